"""The public surface: every name loads, is listed once, and static tools see what the interpreter sees."""

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


def homes() -> dict[str, str]:
    """The names of the public modules, each with its module."""
    return {name: home for home in ("windows", "spark", "types") for name in names_of(home)} | dict.fromkeys(
        ("ManualClock", "SeededRng", "RecordingSink", "MemoryLeases", "MemoryRegistry"), "testing"
    )


def names_of(home: str) -> list[str]:
    return [name for name in vars(importlib.import_module(f"millpond.{home}")) if not name.startswith("_")]


@pytest.mark.parametrize(("name", "home"), homes().items())
def test_a_name_that_moved_works_and_warns_where_it_is(name: str, home: str) -> None:
    with pytest.warns(DeprecationWarning, match=f"mp.{name} has moved: use mp.{home}.{name}"):
        moved = getattr(mp, name)

    assert moved is getattr(getattr(mp, home), name)


def test_no_name_is_in_two_public_modules() -> None:
    listed_once = [name for home in ("windows", "spark", "types") for name in names_of(home)]

    assert len(listed_once) == len(set(listed_once))
    assert not set(listed_once) & set(mp.__all__)
    assert len(mp.__all__) <= 100


@pytest.mark.parametrize("name", [*mp.__all__, *homes()])
def test_public_name_and_its_public_members_have_docstrings(name: str) -> None:
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


def test_an_unknown_name_is_an_attribute_error() -> None:
    """A misspelt name fails as for any module."""
    with pytest.raises(AttributeError, match="attribute Stoer"):
        mp.Stoer  # noqa: B018
