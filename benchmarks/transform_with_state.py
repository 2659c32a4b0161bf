"""Spark's own arbitrary state: the keyed count as a ``StatefulProcessor`` in Python, row mode, RocksDB.

In its best form: a key's rows of a batch come in one call, so there is one ``get`` and one ``update`` per
key and batch; the state is one number; changes are checkpointed as a change log instead of whole snapshots;
there are as many partitions as cores; the event time, which it has no use for, is left out; nothing is
emitted. It does not deduplicate: Spark would need a
second stateful operator for that, so the record id travels along and that is all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

from benchmarks.batches import COLUMNS, Load
from benchmarks.engine_result import BatchTime, EngineResult, batch_times

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

ENGINE: Final = "spark-tws-python-row"

_STATE: Final = "spark.sql.streaming.stateStore"
ROCKSDB: Final[dict[str, str]] = {
    f"{_STATE}.providerClass": "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider",
    f"{_STATE}.rocksdb.changelogCheckpointing.enabled": "true",
}
"""Settings of Spark's state in its best form."""


class CountProcessor(StatefulProcessor):
    """Counts the records of each key."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        """One number per key."""
        self._count = handle.getValueState("count", "count BIGINT")

    def handleInputRows(  # noqa: N802 - Spark's name
        self,
        key: Any,
        rows: Iterator[Row],
        timerValues: Any,  # noqa: N803 - Spark's name
    ) -> Iterator[Row]:
        """One get and one update for all rows of the key."""
        known = self._count.get()
        count = known[0] if known is not None else 0
        self._count.update((count + self._number(rows),))
        return iter(())

    def _number(self, rows: Iterator[Any]) -> int:
        return sum(1 for _ in rows)

    def close(self) -> None:
        """Nothing is held."""


def measure(spark: SparkSession, folder: Path, load: Load, inputs: Path) -> EngineResult:
    """Run the load to its end and report every micro-batch.

    Args:
        spark: the session; its state-store settings are put back afterwards.
        folder: where the checkpoint goes; must not exist.
        load: how much.
        inputs: the files that `write_batches` wrote.
    """
    return measure_count(ENGINE, count_by_rows, spark, folder, load, inputs)


def count_by_rows(rows: DataFrame) -> DataFrame:
    """Return the query that counts the rows of each key."""
    return rows.groupBy("key").transformWithState(
        CountProcessor(), outputStructType="key STRING", outputMode="Update", timeMode="None"
    )


def measure_count(
    engine: str,
    count: Callable[[DataFrame], DataFrame],
    spark: SparkSession,
    folder: Path,
    load: Load,
    inputs: Path,
) -> EngineResult:
    """Run a count of the load's rows to its end; see `measure`."""
    with best_settings(spark):
        stream = spark.readStream.schema(COLUMNS).option("maxFilesPerTrigger", 1).parquet(str(inputs))
        times = run_to_end(count(stream.select("key", "id")), folder)
    return EngineResult(engine=engine, load=load, times=times)


def run_to_end(output: DataFrame, checkpoint: Path) -> tuple[BatchTime, ...]:
    """Run a query over all of its input, throw its output away, and return its micro-batches."""
    query = start(output, checkpoint, availableNow=True)
    query.awaitTermination()
    return batch_times(query)


def start(output: DataFrame, checkpoint: Path, **trigger: Any) -> StreamingQuery:
    """Start a query whose output is thrown away; without a trigger it runs until it is stopped."""
    writer = output.writeStream.format("noop").outputMode("update")
    writer = writer.option("checkpointLocation", str(checkpoint))
    return (writer.trigger(**trigger) if trigger else writer).start()


@contextmanager
def best_settings(spark: SparkSession) -> Iterator[None]:
    """Settings of the session for Spark's state in its best form, for as long as the block runs."""
    wanted = ROCKSDB | {"spark.sql.shuffle.partitions": str(spark.sparkContext.defaultParallelism)}
    before: dict[str, str | None] = {name: spark.conf.get(name, None) for name in wanted}
    for name, value in wanted.items():
        spark.conf.set(name, value)
    try:
        yield
    finally:
        for name, former in before.items():
            if former is None:
                spark.conf.unset(name)
            else:
                spark.conf.set(name, former)
