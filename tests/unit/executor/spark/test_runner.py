"""The Spark runner with an empty input."""

from __future__ import annotations

from typing import TYPE_CHECKING

from millpond.executor.computation.computation import Computation
from millpond.executor.pipeline.pipeline import EnginePipeline
from millpond.executor.spark.runner import SparkRunner
from millpond.statestore.leases.memory import MemoryLeases, MemoryRegistry
from millpond.statestore.store import Store
from millpond.testing.fixtures.determinism import ManualClock

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession


class Forward(Computation):
    def __init__(self, *outputs: str) -> None:
        self.outputs = outputs

    def process_record(self, context, record):
        context.state.set(context.state.get(0) + 1)
        for output in self.outputs:
            context.produce(output, record.value)


def two_inputs() -> EnginePipeline:
    """Chain a → first → second, and b → third."""
    pipeline = EnginePipeline("p")
    pipeline.inject("a", key="k", at="at").apply(Forward("mid"), name="first", produces="mid").apply(
        Forward(), name="second"
    )
    pipeline.inject("b", key="k", at="at").apply(Forward(), name="third")
    return pipeline


def test_empty_input_still_delivers_pending_productions(spark: SparkSession, tmp_path: Path) -> None:
    """Spark runs no task for a relation known to be empty."""
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
