"""Watermarks of frames as policies of streams."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

import orjson
import pytest

from millpond.executor.computation.computation import Computation
from millpond.executor.computation.context import Context
from millpond.executor.computation.records import Record
from millpond.executor.spark.foreach_batch import foreach_batch
from millpond.executor.spark.runner import SparkRunner
from millpond.executor.time.watermark_policies import BoundedDisorder, WatermarkPolicy
from millpond.executor.windows.combiners import Count
from millpond.executor.windows.pipeline import Pipeline
from millpond.executor.windows.window_fns import FixedWindows
from millpond.statestore.leases.memory import MemoryLeases, MemoryRegistry
from millpond.statestore.store import Store
from millpond.statestore.system import SystemClock

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark

START_US = 1_800_000_000_000_000
CLOCK = SystemClock()


class _Keep(Computation):
    def process_record(self, context: Context, record: Record) -> None:
        if context.watermark > START_US:
            context.state.set(context.watermark - START_US)


def _store(folder: Path) -> Store:
    registry = MemoryRegistry()
    return Store.open(
        folder / "pond", leases=lambda _, writer_id: MemoryLeases(registry, CLOCK, writer_id=writer_id)
    )


def _stream(spark: SparkSession, folder: Path, *seconds: int) -> DataFrame:
    """Write one file a batch, each with a row at one of the seconds."""
    source = folder / "input"
    source.mkdir(exist_ok=True)
    for number, second in enumerate(seconds):
        row = {"k": "k", "us": START_US + second * 1_000_000}
        (source / f"{number:04d}.json").write_bytes(orjson.dumps(row))
    stream = spark.readStream.schema("k string, us long").option("maxFilesPerTrigger", 1).json(str(source))
    return stream.selectExpr("k", "timestamp_micros(us) AS time", "timestamp_micros(us) AS seen")


def _pipeline(watermark: WatermarkPolicy | None = None, at: str = "time") -> Pipeline:
    pipeline = Pipeline("p")
    stream = pipeline.inject("s", key="k", at=at, watermark=watermark)
    stream.window(FixedWindows("1m")).combine(Count(), name="minutes")
    return pipeline


def _watermark_of(store: Store, spark: SparkSession, pipeline: Pipeline, frame: DataFrame) -> int:
    runner = SparkRunner(store, spark=spark, progress=False, intervals=1)
    runner.run(pipeline, {"s": frame}, finish=False)
    with runner.open(pipeline) as run:
        return run.watermark("minutes") - START_US


@pytest.mark.parametrize(
    ("declared", "seconds_behind"), [(None, 37), (BoundedDisorder("0s"), 0), (BoundedDisorder("5s"), 5)]
)
def test_frame_watermark_is_the_default_policy(
    spark: SparkSession, tmp_path: Path, declared: WatermarkPolicy | None, seconds_behind: int
) -> None:
    """A declared policy takes precedence, and the delay follows a renamed column."""
    frame = _stream(spark, tmp_path, 10, 100).withWatermark("time", "37 seconds")
    renamed = frame.selectExpr("k", "time AS happened")

    with _store(tmp_path) as store:
        behind = 100_000_000 - _watermark_of(store, spark, _pipeline(declared, "happened"), renamed)

    assert behind == seconds_behind * 1_000_000


def test_frame_watermark_on_another_column_is_ignored_with_a_warning(
    spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It does not bound the event time."""
    caplog.set_level(logging.WARNING, "millpond")
    frame = _stream(spark, tmp_path, 10).withWatermark("seen", "37 seconds")

    with _store(tmp_path) as store:
        assert _watermark_of(store, spark, _pipeline(), frame) == 10_000_000

    [warning] = caplog.messages
    assert "withWatermark=`['seen']`" in warning
    assert "at=`time`" in warning


def test_embedded_computation_takes_the_watermark_of_its_batches(spark: SparkSession, tmp_path: Path) -> None:
    """`foreach_batch` sees only the batches of the user's own query."""
    frame = _stream(spark, tmp_path, 100, 100).withWatermark("time", "37 seconds")
    with _store(tmp_path) as store:
        embedded = foreach_batch(store, _Keep(), key="k", at="time", name="kept", progress=False)
        query = frame.writeStream.foreachBatch(embedded).option(
            "checkpointLocation", str(tmp_path / "checkpoint")
        )
        query.trigger(availableNow=True).start().awaitTermination()
        embedded.close()

        [row] = store.rows_view("kept").to_arrow().to_pylist()

    assert int(row["state"]) == 63_000_000
