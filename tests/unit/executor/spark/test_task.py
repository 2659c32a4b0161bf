"""
Slots of a superstep on Spark: each task processes exactly the records of its own intervals.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

from millpond.executor.injectors.observation import Watch
from millpond.executor.spark.routed_columns import TARGET, RoutedColumns, unreadable_target
from millpond.executor.spark.task import run_slot
from millpond.executor.spark.task_plan import RoutedInput, TaskPlan
from millpond.statestore.errors import InternalError
from millpond.statestore.types import Superstep, WallTimeMicros

if TYPE_CHECKING:
    from pathlib import Path


def test_records_in_a_wrong_partition_are_refused(tmp_path: Path) -> None:
    """
    A task that receives another slot's records fails, because skipping them would lose them.
    """
    columns = RoutedColumns(key="k", at="at", id=None, error=None, own=("k", "at"))
    plan = TaskPlan(
        url=str(tmp_path),
        storage_options={},
        pipeline="p",
        code=b"\x80\x04}.",
        code_digest="none",
        superstep=Superstep(1),
        wall_time=WallTimeMicros(0),
        slots=2,
        intervals=(),
        sources=(),
        input=RoutedInput(
            stream="a",
            columns=columns,
            first_targets=frozenset({0}),
            id_scopes={},
            watch=Watch(stream="a"),
        ),
        cache_bytes=1,
    )
    batch = pa.record_batch(
        {
            TARGET: pa.array([1, 3, unreadable_target(3)], pa.int32()),
            "k": ["a", "b", "c"],
            "at": pa.array([1, 2, 3], pa.int64()),
        }
    )

    assert run_slot(plan, 1, [batch.slice(0, 2)]).slot == 1
    with pytest.raises(InternalError, match="slot of their interval"):
        run_slot(plan, 0, [batch])
