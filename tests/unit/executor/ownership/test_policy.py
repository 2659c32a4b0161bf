"""Bounds of the balance policy."""

from __future__ import annotations

from typing import Any

import pytest

from millpond.executor.ownership.balancer import BalancePolicy
from millpond.statestore.errors import InvalidError


@pytest.mark.parametrize(
    "bounds",
    [{"every": 0}, {"hot": 1.0}, {"cold": 0.6}, {"cold": -1}, {"least_work": "-1ms"}, {"intervals_max": 0}],
)
def test_bounds_that_let_cuts_undo_each_other_are_refused(bounds: dict[str, Any]) -> None:
    """A part of a split must not be hot, and two parts together not cold."""
    with pytest.raises(InvalidError):
        BalancePolicy(**bounds)
