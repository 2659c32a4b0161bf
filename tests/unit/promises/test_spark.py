"""
Supersteps on Spark process everything that waits, whatever Spark leaves out of a job.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

from millpond.executor.computation.computation import Computation
from millpond.executor.injectors.observation import Watch
from millpond.executor.pipeline.pipeline import EnginePipeline
from millpond.executor.spark.routed_columns import TARGET, RoutedColumns, unreadable_target
from millpond.executor.spark.runner import SparkRunner
from millpond.executor.spark.task import run_slot
from millpond.executor.spark.task_plan import RoutedInput, TaskPlan
from millpond.statestore.errors import InternalError
from millpond.statestore.leases.memory import MemoryLeases, MemoryRegistry
from millpond.statestore.store import Store
from millpond.statestore.types import Superstep, WallTimeMicros
from millpond.testing.fixtures.determinism import ManualClock

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession


class Forward(Computation):
    """
    Counts its records, and passes them on.
    """

    def __init__(self, *outputs: str) -> None:
        self.outputs = outputs

    def process_record(self, context, record):
        context.state.set(context.state.get(0) + 1)
        for output in self.outputs:
            context.produce(output, record.value)


def two_inputs() -> EnginePipeline:
    """
    The stream a goes through first to second; b only to third.
    """
    pipeline = EnginePipeline("p")
    pipeline.inject("a", key="k", at="at").apply(Forward("mid"), name="first", produces="mid").apply(
        Forward(), name="second"
    )
    pipeline.inject("b", key="k", at="at").apply(Forward(), name="third")
    return pipeline


def test_an_input_without_rows_delivers_what_waits(spark: SparkSession, tmp_path: Path) -> None:
    """
    Spark runs no task for a relation that it knows to be empty; productions of the superstep before wait.
    """
    registry = MemoryRegistry()
    store = Store.open(
        tmp_path / "pond",
        leases=lambda _, writer_id: MemoryLeases(registry, ManualClock(), writer_id=writer_id),
    )
    some = spark.createDataFrame([(f"k{number}", number) for number in range(5)], "k string, at long")

    runner = SparkRunner(store, spark=spark, progress=False, intervals=2)
    summary = runner.run(two_inputs(), {"a": some, "b": some.where("1 = 0")})

    assert store.rows_view("second").to_arrow().column("key").to_pylist() == [f"k{n}" for n in range(5)]
    assert summary.totals.records == 10


def test_records_in_a_wrong_partition_are_refused(tmp_path: Path) -> None:
    """
    A task that is handed another slot's records fails: passing over them would lose them.
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
