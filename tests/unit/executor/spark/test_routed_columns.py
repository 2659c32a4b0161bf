"""Targets of routed rows."""

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
def test_target_encodes_position_and_readability(position: int) -> None:
    """Readable and unreadable targets never coincide."""
    readable, unreadable = position, unreadable_target(position)

    assert position_of(readable) == position_of(unreadable) == position
    assert (is_readable(readable), is_readable(unreadable)) == (True, False)
    assert readable_rows(pa.array([readable, unreadable], pa.int32())).to_pylist() == [True, False]
