"""The keyed count on Millpond's Spark runner: state, record ids, exactly once, one commit per batch.

The same function as `benchmarks.transform_with_state`, in the same form (all of a key's rows of a
batch in one call), plus what Spark leaves out: each record's id is checked and stored.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

import millpond as mp
from benchmarks.batches import COLUMNS, Load
from benchmarks.engine_result import EngineResult, batch_times

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ENGINE: Final = "millpond-spark"


class Count(mp.Computation):
    """Counts the records of each key."""

    def process_records(self, context: mp.Context, records: mp.Records) -> None:
        """One get and one set for all records of the key."""
        count = context.state.get(0)
        context.state.set(count + sum(1 for _ in records))


def pipeline() -> mp.Pipeline:
    """One computation, with exactly-once by record id."""
    built = mp.Pipeline("throughput")
    stream = built.inject("records", key="key", at="at", id="id", watermark=mp.BoundedDisorder("1s"))
    stream.apply(Count(), name="count")
    return built


def measure(spark: SparkSession, folder: Path, load: Load, inputs: Path) -> EngineResult:
    """Run the load to its end and report every micro-batch.

    Args:
        spark: the session; the same for both engines.
        folder: the store's folder; must not exist.
        load: the size of the load.
        inputs: the files from `write_batches`.
    """
    frame = spark.readStream.schema(COLUMNS).option("maxFilesPerTrigger", 1).parquet(str(inputs))
    runner = mp.SparkRunner(folder, spark=spark, progress=False)
    run = runner.start(pipeline(), {"records": frame}, trigger={"availableNow": True})
    run.await_termination()
    times = batch_times(run.queries[0])
    run.stop()
    return EngineResult(engine=ENGINE, load=load, times=times)
