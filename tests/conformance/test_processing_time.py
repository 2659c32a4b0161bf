"""Processing time in Spark's own operators and in Millpond, over the same micro-batches.

Spark ends no query of this time mode, so each side runs until its output is complete.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any

import orjson
import pytest
from pyspark.sql.streaming.state import GroupStateTimeout

from millpond.executor.spark_compat.spark_query import apply_in_pandas_with_state, transform_with_state
from millpond.testing.fixtures.own_writer import OwnWriter
from tests.fixtures.micro_batches import micro_batches
from tests.spark_code.group_functions import expecting
from tests.spark_code.stateful_processors import SEEN, Alarms, Fading

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.stateful_processor import StatefulProcessor

    from millpond.executor.spark.run import SparkRun
    from millpond.statestore.types import Superstep

pytestmark = pytest.mark.spark

_LONG_MS = 10**11
_WAIT_S = 120


class Seen(OwnWriter):
    """The output so far of either side.

    Args:
        count: the number of rows that make it complete.
    """

    def __init__(self, count: int) -> None:
        super().__init__("seen")
        self._count = count
        self._texts: list[str] = []
        self._is_all = Event()

    def add(self, texts: Sequence[str]) -> None:
        self._texts += texts
        if len(self._texts) >= self._count:
            self._is_all.set()

    def write(self, superstep: Superstep, productions: pa.Table) -> None:
        if superstep > self.delivered:
            self.delivered = superstep
            self.add([orjson.loads(text)["seen"] for text in productions.column("value").to_pylist()])

    def all(self) -> list[str]:
        assert self._is_all.wait(_WAIT_S), self._texts
        return sorted(self._texts)


def _in_spark(output: DataFrame, folder: Path, count: int) -> list[str]:
    seen = Seen(count)

    def take(frame: DataFrame, _: int) -> None:
        seen.add([row.seen for row in frame.collect()])

    query = (
        output.writeStream.outputMode("update")
        .option("checkpointLocation", str(folder / "checkpoint"))
        .foreachBatch(take)
        .start()
    )
    try:
        return seen.all()
    finally:
        query.stop()


def _in_millpond(start: Callable[..., SparkRun], spark: SparkSession, folder: Path, count: int) -> list[str]:
    seen = Seen(count)
    run = start(
        keys="k",
        output_schema=SEEN,
        store=folder / "pond",
        sink=seen,
        spark=spark,
        progress=False,
        tick="50ms",
    )
    try:
        return seen.all()
    finally:
        run.stop()


def _both(
    spark: SparkSession,
    folder: Path,
    processor: StatefulProcessor,
    frame: Callable[[], DataFrame],
    count: int,
) -> tuple[list[str], list[str]]:
    def start(**place: Any) -> SparkRun:
        return transform_with_state(frame(), processor=processor, time_mode="ProcessingTime", **place)

    operator = frame().groupBy("k").transformWithState(processor, SEEN, "Update", "ProcessingTime")
    return _in_millpond(start, spark, folder, count), _in_spark(operator, folder, count)


def test_processing_timers_equal_sparks(rocksdb: SparkSession, tmp_path: Path) -> None:
    """Past timers fire with the rows, others in a later batch; timers may set timers."""
    batches = [
        [{"k": "past", "set": [-5_000, 0]}, {"k": "soon", "set": [1]}],
        [{"k": "both", "set": [0, 1, _LONG_MS]}, {"k": "gone", "set": [1, 2], "unset": [1]}],
        [{"k": "again", "set": [0]}, {"k": "idle", "set": []}],
    ]

    def frame() -> DataFrame:
        return micro_batches(
            rocksdb, tmp_path / "in", batches, "k string, set array<long>, unset array<long>"
        )

    ours, theirs = _both(rocksdb, tmp_path, Alarms(), frame, 6 + 2 + 1 + 2 + 1 + 4)

    assert ours == theirs


def test_times_to_live_equal_sparks(rocksdb: SparkSession, tmp_path: Path) -> None:
    """A value that lives for a millisecond expires at the end of its micro-batch."""
    batches = [[{"k": key, "n": number} for key in keys] for number, keys in enumerate(["ab", "a", "aab"])]

    def frame() -> DataFrame:
        return micro_batches(rocksdb, tmp_path / "in", batches, "k string, n long")

    ours, theirs = _both(rocksdb, tmp_path, Fading(), frame, 2 * (2 + 1 + 2))

    assert ours == theirs


def test_processing_timeouts_equal_sparks(rocksdb: SparkSession, tmp_path: Path) -> None:
    """A group without rows times out after its duration, again if it asks for another timeout."""
    batches = [
        [{"k": "soon", "n": 1}, {"k": "long", "n": _LONG_MS}],
        [{"k": "again", "n": 2}, {"k": "long", "n": _LONG_MS}],
    ]
    timeout, state, count = GroupStateTimeout.ProcessingTimeTimeout, "until long, n long", 4 + 1 + 3

    def frame() -> DataFrame:
        return micro_batches(rocksdb, tmp_path / "in", batches, "k string, n long")

    def start(**place: Any) -> SparkRun:
        return apply_in_pandas_with_state(
            frame(), function=expecting, state_schema=state, timeout=timeout, **place
        )

    operator = frame().groupBy("k").applyInPandasWithState(expecting, SEEN, state, "Update", timeout)
    ours, theirs = (
        _in_millpond(start, rocksdb, tmp_path, count),
        _in_spark(operator, tmp_path, count),
    )

    assert ours == theirs
