"""Targets of routed rows: one integer names an interval and says whether the record is readable."""

from __future__ import annotations

import pyarrow as pa
import pytest

from millpond.executor.spark.task_plan import (
    is_readable,
    position_of,
    readable_rows,
    unreadable_target,
)


@pytest.mark.parametrize("position", [0, 1, 2_147_483_646])
def test_a_target_names_its_interval(position: int) -> None:
    """The position comes back from either kind of target, and the kinds never coincide."""
    readable, unreadable = position, unreadable_target(position)

    assert position_of(readable) == position_of(unreadable) == position
    assert (is_readable(readable), is_readable(unreadable)) == (True, False)
    assert readable_rows(pa.array([readable, unreadable], pa.int32())).to_pylist() == [True, False]
