"""The installed package: the contents of the rooms, although the import root holds only links to them."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.tidy import LINKED, ROOT

BUILD = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"
USE = """
from importlib.resources import files
import millpond.cli.main, millpond.gc, millpond.statestore, millpond.windows, millpond
assert files("millpond.migrations").joinpath("versions").is_dir()
print(millpond.__file__)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel, built from a copy to leave the repository unchanged."""
    folder = tmp_path_factory.mktemp("package")
    copy = folder / "source"
    copy.mkdir()
    for name in ("millpond", *LINKED):
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy / name)
    subprocess.run([sys.executable, "-c", BUILD, str(folder)], cwd=copy, check=True, capture_output=True)
    return next(folder.glob("*.whl"))


def test_wheel_holds_every_module_once(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    modules = {
        f"millpond/{path.relative_to(ROOT)}" for room in LINKED for path in (ROOT / room).rglob("*.py")
    }
    own = {str(path.relative_to(ROOT)) for path in (ROOT / "millpond").glob("*.py")}
    own |= {
        str(path.relative_to(ROOT))
        for room in ("cli", "testing")
        for path in (ROOT / "millpond" / room).rglob("*.py")
    }

    assert {name for name in names if name.endswith(".py")} == modules | own
    assert {"millpond/py.typed", "millpond/__init__.pyi", "millpond/migrations/script.py.mako"} <= set(names)
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"millpond"}


def test_wheel_works_away_from_the_repository(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path)

    used = subprocess.run(
        [sys.executable, "-c", USE], cwd=tmp_path, check=True, capture_output=True, text=True
    )

    assert Path(used.stdout.strip()).is_relative_to(tmp_path)
