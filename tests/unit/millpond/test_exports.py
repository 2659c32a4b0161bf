"""The public surface of the package."""

from __future__ import annotations

import ast
import importlib
import inspect
import subprocess
import sys
import types
from pathlib import Path

import pytest

import millpond as mp

STUB = Path(mp.__file__).with_suffix(".pyi")


def listed() -> list[ast.alias]:
    tree = ast.parse(STUB.read_text())
    return [alias for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names]


@pytest.mark.parametrize("name", mp.__all__)
def test_every_public_name_loads(name: str) -> None:
    assert getattr(mp, name) is not None


def test_names_match_stub() -> None:
    names = [alias.name for alias in listed()]

    assert len(names) == len(set(names))
    assert sorted(names) == sorted(mp.__all__) == sorted(dir(mp))


def test_stub_reexports_every_name() -> None:
    """Type checkers need the form ``X as X``."""
    assert [alias.name for alias in listed() if alias.asname != alias.name] == []


def test_importing_package_imports_no_submodule() -> None:
    """Nor any of the libraries that they need."""
    code = "import sys, millpond; print(*(m for m in sys.modules if m.startswith(('millpond.', 'pyarrow', 'pyspark'))))"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)

    assert loaded.stdout.split() == []


def homes() -> dict[str, str]:
    return {name: home for home in ("windows", "spark", "types") for name in names_of(home)} | dict.fromkeys(
        ("ManualClock", "SeededRng", "RecordingSink", "MemoryLeases", "MemoryRegistry"), "testing"
    )


def names_of(home: str) -> list[str]:
    return [name for name in vars(importlib.import_module(f"millpond.{home}")) if not name.startswith("_")]


@pytest.mark.parametrize(("name", "home"), homes().items())
def test_moved_name_warns_with_new_place(name: str, home: str) -> None:
    with pytest.warns(DeprecationWarning, match=f"mp.{name} has moved: use mp.{home}.{name}"):
        moved = getattr(mp, name)

    assert moved is getattr(getattr(mp, home), name)


def test_public_modules_share_no_name() -> None:
    listed_once = [name for home in ("windows", "spark", "types") for name in names_of(home)]

    assert len(listed_once) == len(set(listed_once))
    assert not set(listed_once) & set(mp.__all__)
    assert len(mp.__all__) <= 100


@pytest.mark.parametrize("name", [*mp.__all__, *homes()])
def test_public_names_and_members_have_docstrings(name: str) -> None:
    home = homes().get(name)
    thing = getattr(mp if home is None else getattr(mp, home), name)
    if isinstance(thing, (type, types.FunctionType)):
        members = [
            member
            for member, value in (vars(thing) if isinstance(thing, type) else {}).items()
            if not member.startswith("_") and isinstance(value, (types.FunctionType, property))
        ]

        assert thing.__doc__
        # A hook that overrides another may leave its meaning to that one's docstring.
        assert [member for member in members if not inspect.getdoc(getattr(thing, member))] == []


def test_unknown_name_is_attribute_error() -> None:
    with pytest.raises(AttributeError, match="attribute Stoer"):
        mp.Stoer  # noqa: B018
