"""The number of examples of the oracle tests: few, or ``MILLPOND_ORACLE_EXAMPLES`` in shares for ``-n``."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Final

import pytest

EXAMPLES: Final = int(os.environ.get("MILLPOND_ORACLE_EXAMPLES", "0"))
"""Examples of each test; 0: few."""

_SHARES: Final = 8


def examples(few: int) -> int:
    """Return the number of examples of one share of a test, or of a test without shares."""
    return -(-EXAMPLES // _SHARES) or few


def in_shares(test: Callable[..., Any]) -> Callable[..., Any]:
    """Cut a test of thousands of examples into shares, which `Distribution` gives to any process.

    Each share draws different examples, unless ``--hypothesis-seed`` sets the seed of all.
    """
    if not EXAMPLES:
        return test
    shares = [pytest.param(number, id=f"share {number}") for number in range(_SHARES)]
    shared: Callable[..., Any] = pytest.mark.usefixtures("share")(
        pytest.mark.parametrize("share", shares)(test)
    )
    return shared
