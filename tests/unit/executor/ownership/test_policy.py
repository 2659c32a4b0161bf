"""Bounds under which a cut does not call for the opposite one."""

from __future__ import annotations

from typing import Any

import pytest

from millpond.executor.ownership.balancer import BalancePolicy
from millpond.statestore.errors import InvalidError


@pytest.mark.parametrize(
    "bounds",
    [{"every": 0}, {"hot": 1.0}, {"cold": 0.6}, {"cold": -1}, {"least_work": "-1ms"}, {"intervals_max": 0}],
)
def test_bounds_without_a_gap_are_refused(bounds: dict[str, Any]) -> None:
    """Parts of a split have about one fair share each: neither hot nor, two together, cold."""
    with pytest.raises(InvalidError):
        BalancePolicy(**bounds)
