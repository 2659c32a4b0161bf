"""The state of `benchmarks.state_size` on Spark's own ``transformWithState``: a row of Python a record, RocksDB.

In its best form, as in `benchmarks.transform_with_state`: one value a key, a change log instead of whole snapshots, as
many partitions as cores, and RocksDB may use as much memory as Millpond's workers together.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

from benchmarks.engine_result import as_mapping

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row, SparkSession

ENGINE: Final = "spark-tws-python-row"

_STATE_BYTES: Final = 400
_STATE: Final = "spark.sql.streaming.stateStore"
_PROVIDER: Final = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
_FIRST_MODIFIED_S: Final = 1_700_000_000
_MS: Final = 1_000


def spark_settings(partitions: int, memory_mib: int) -> dict[str, str]:
    """The settings of a session whose queries keep their state in RocksDB.

    Args:
        partitions: into how many the state is divided.
        memory_mib: what all instances of RocksDB may use together.
    """
    return {
        "spark.sql.shuffle.partitions": str(partitions),
        f"{_STATE}.providerClass": _PROVIDER,
        f"{_STATE}.rocksdb.changelogCheckpointing.enabled": "true",
        f"{_STATE}.rocksdb.boundedMemoryUsage": "true",
        f"{_STATE}.rocksdb.maxMemoryUsageMB": str(memory_mib),
    }


class BlobProcessor(StatefulProcessor):
    """Keeps bytes that do not compress, other ones after each record."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        """One value a key."""
        self._blob = handle.getValueState("blob", "blob BINARY")

    def handleInputRows(  # noqa: N802 - Spark's name
        self,
        key: Any,
        rows: Iterator[Row],
        timerValues: Any,  # noqa: N803 - Spark's name
    ) -> Iterator[Row]:
        """Replace the state by a hash of itself, for each record."""
        known = self._blob.get()
        blob = key[0].encode() if known is None else bytes(known[0])
        for _ in rows:
            blob = hashlib.shake_128(blob).digest(_STATE_BYTES)
        self._blob.update((blob,))
        return iter(())

    def close(self) -> None:
        """Nothing is held."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A micro-batch as Spark reports it.

    Attributes:
        batch_ms: from the search for input to the checkpoint.
        read_bytes: RocksDB's count.
    """

    records: int
    batch_ms: float
    read_bytes: int


def batch_file(folder: Path, number: int) -> Path:
    """The file of a batch of this number."""
    return folder / f"{number:06d}.parquet"


def write_batch(frame: DataFrame, folder: Path, number: int) -> None:
    """Write records as one file, which is one micro-batch.

    Args:
        frame: the records.
        folder: where the input lies.
        number: the files are read in the order of their numbers.
    """
    folder.mkdir(exist_ok=True)
    target = batch_file(folder, number)
    frame.toPandas().to_parquet(target, index=False)
    # Spark reads files in the order of their times.
    modified_s = _FIRST_MODIFIED_S + number
    os.utime(target, (modified_s, modified_s))


def run_query(spark: SparkSession, inputs: Path, checkpoint: Path, limit_s: float) -> list[Batch] | None:
    """Process all input that the checkpoint has not; ``None`` if that takes too long.

    Args:
        spark: the session, with `spark_settings`.
        inputs: the files that `write_batch` wrote.
        checkpoint: the query's checkpoint.
        limit_s: how long it may take.
    """
    stream = spark.readStream.schema("k STRING").option("maxFilesPerTrigger", 1).parquet(str(inputs))
    hashed = stream.groupBy("k").transformWithState(
        BlobProcessor(), outputStructType="k STRING", outputMode="Update", timeMode="None"
    )
    query = (
        hashed.writeStream.format("noop")
        .outputMode("update")
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
        .start()
    )
    if not query.awaitTermination(int(limit_s)):
        query.stop()
        return None
    progress = [entry for entry in map(as_mapping, query.recentProgress) if entry["numInputRows"] > 0]
    return [_batch(entry) for entry in progress]


def _batch(progress: Mapping[str, Any]) -> Batch:
    (operator,) = progress["stateOperators"]
    return Batch(
        records=progress["numInputRows"],
        batch_ms=float(progress["durationMs"]["triggerExecution"]),
        read_bytes=operator["customMetrics"]["rocksdbTotalBytesRead"],
    )
