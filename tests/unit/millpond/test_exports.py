"""
The public surface: every name is where it should be, and tools see what the interpreter sees.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import millpond as mp


@pytest.mark.parametrize("name", mp.__all__)
def test_every_public_name_loads(name: str) -> None:
    """
    Each name of ``__all__`` can be got from the package.
    """
    assert getattr(mp, name) is not None


def test_static_tools_see_the_same_names() -> None:
    """
    What type checkers are shown equals what is loaded at run time.
    """
    tree = ast.parse(Path(mp.__file__).read_text())
    shown = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("millpond.")
        for alias in node.names
    }

    assert set(mp.__all__) == shown == set(mp._HOMES)


def test_an_unknown_name_is_an_attribute_error() -> None:
    """
    A misspelt name fails as for any module.
    """
    with pytest.raises(AttributeError, match="no attribute 'Stoer'"):
        mp.Stoer  # noqa: B018
