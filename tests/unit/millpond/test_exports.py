"""The public surface: every name loads, is listed once, and static tools see what the interpreter sees."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import millpond as mp

STUB = Path(mp.__file__).with_suffix(".pyi")


def listed() -> list[ast.alias]:
    """The imports of the stub, in order."""
    tree = ast.parse(STUB.read_text())
    return [alias for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names]


@pytest.mark.parametrize("name", mp.__all__)
def test_every_public_name_loads(name: str) -> None:
    """Each name of ``__all__`` is an attribute of the package."""
    assert getattr(mp, name) is not None


def test_run_time_names_are_those_of_the_stub() -> None:
    """``__all__`` and ``dir`` at run time are the names that type checkers read in the stub, each listed once."""
    names = [alias.name for alias in listed()]

    assert len(names) == len(set(names))
    assert sorted(names) == sorted(mp.__all__) == sorted(dir(mp))


def test_type_checkers_treat_every_name_as_public() -> None:
    """Each import of the stub is a re-export, which a stub writes as ``X as X``."""
    assert [alias.name for alias in listed() if alias.asname != alias.name] == []


def test_importing_the_package_imports_none_of_its_rooms() -> None:
    """``import millpond`` loads no submodule and none of the libraries that they need."""
    code = "import sys, millpond; print(*(m for m in sys.modules if m.startswith(('millpond.', 'pyarrow', 'pyspark'))))"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)

    assert loaded.stdout.split() == []


def test_an_unknown_name_is_an_attribute_error() -> None:
    """A misspelt name fails as for any module."""
    with pytest.raises(AttributeError, match="attribute Stoer"):
        mp.Stoer  # noqa: B018
