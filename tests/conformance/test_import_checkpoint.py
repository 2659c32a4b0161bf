"""
Queries that are stopped and moved: what Millpond yields from there on is what Spark yields from there on.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
import pytest
from deltalake import DeltaTable
from pyspark.sql.streaming.state import GroupStateTimeout

from millpond.executor.checkpoint_import.import_checkpoint import ImportedCheckpoint, import_checkpoint
from millpond.executor.spark_api.spark_query import apply_in_pandas_with_state, transform_with_state
from millpond.statestore.errors import InvalidError
from millpond.testing.fixtures.stateful_processors import (
    SEEN,
    AllTypes,
    Remembering,
    Timers,
    grouped,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from millpond.executor.spark.run import SparkRun

pytestmark = pytest.mark.spark

Row = Mapping[str, Any]
_STATE_STORE = "spark.sql.streaming.stateStore.providerClass"
_ROCKSDB = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"


@pytest.fixture
def rocksdb(spark: SparkSession) -> Iterator[SparkSession]:
    """
    The session with the state store that Spark's operator needs.
    """
    spark.conf.set(_STATE_STORE, _ROCKSDB)
    yield spark
    spark.conf.unset(_STATE_STORE)


@dataclass(frozen=True)
class Move:
    """
    A user's query that is stopped after some files and moved: each file is a micro-batch.
    """

    spark: SparkSession
    folder: Path
    schema: str
    delay: str | None = None

    def put(self, batches: Sequence[Sequence[Row]]) -> None:
        """
        Write more files.
        """
        source = self.folder / "in"
        source.mkdir(exist_ok=True)
        first = len(list(source.iterdir()))
        for number, rows in enumerate(batches, first):
            file = source / f"{number:04d}.json"
            file.write_bytes(b"\n".join(map(orjson.dumps, rows)))
            os.utime(file, (1e9 + number, 1e9 + number))

    def frame(self) -> DataFrame:
        """
        The frame of the files.
        """
        reader = self.spark.readStream.schema(self.schema).option("maxFilesPerTrigger", 1)
        frame = reader.json(str(self.folder / "in"))
        return frame if self.delay is None else frame.withWatermark("t", self.delay)

    @property
    def checkpoint(self) -> Path:
        """
        The query's checkpoint.
        """
        return self.folder / "checkpoint"

    def in_spark(self, output: DataFrame, mode: str = "update") -> list[str]:
        """
        What the query yields in this start of it.
        """
        table = str(self.folder / "spark")
        before = _seen(table)
        query = (
            output.writeStream.outputMode(mode)
            .option("checkpointLocation", str(self.checkpoint))
            .foreachBatch(lambda frame, _: frame.write.format("delta").mode("append").save(table))
        )
        query.trigger(availableNow=True).start().awaitTermination()
        return _without(_seen(table), before)

    def move(self, computation: str, **options: Any) -> ImportedCheckpoint:
        """
        Import what the query has now into a store of its own.
        """
        return import_checkpoint(
            self.checkpoint, computation=computation, into=self.folder / "pond", spark=self.spark, **options
        )

    @property
    def place(self) -> dict[str, Any]:
        """
        Where Millpond goes on.
        """
        return {
            "store": self.folder / "pond",
            "sink": self.folder / "millpond",
            "trigger": {"availableNow": True},
            "spark": self.spark,
            "progress": False,
        }

    def in_millpond(self, run: SparkRun) -> list[str]:
        """
        What a run yields.
        """
        try:
            run.await_termination()
        finally:
            run.stop()
        return _seen(str(self.folder / "millpond"))


def _seen(table: str) -> list[str]:
    if not DeltaTable.is_deltatable(table):
        return []
    return sorted(map(str, DeltaTable(table).to_pyarrow_table().column("seen").to_pylist()))


def _without(rows: list[str], others: list[str]) -> list[str]:
    left = list(rows)
    for other in others:
        left.remove(other)
    return left


def _timed(key: str, second: float, set_: Sequence[int] = (), unset: Sequence[int] = ()) -> Row:
    return {"k": key, "t": f"1970-01-01T00:00:{second:06.3f}Z", "set": set_, "unset": unset}


def test_timers_and_the_watermark_move(rocksdb: SparkSession, tmp_path: Path) -> None:
    """
    Timers that are pending, those that fall due, and rows that are late go on as in Spark, with the source.
    """
    move = Move(rocksdb, tmp_path, "k string, t timestamp, set array<long>, unset array<long>", "1 second")

    def theirs() -> list[str]:
        grouped_frame = move.frame().groupBy("k")
        return move.in_spark(grouped_frame.transformWithState(Timers(), SEEN, "Update", "EventTime"))

    move.put(
        [
            [_timed("a", 5, [5_000, 5_500, 6_000, 7_000, 100]), _timed("b", 5, [5_000, 30_000])],
            [_timed("a", 7, [8_500]), _timed("c", 7, [9_000])],
        ]
    )
    theirs()
    moved = move.move("timers")
    known = rocksdb.read.format("statestore").option("readRegisteredTimers", True).load(str(move.checkpoint))
    assert moved.timers == known.count() > 3
    move.put(
        [
            [_timed("a", 5.9), _timed("a", 6.1, (), [7_000]), _timed("b", 6)],
            [_timed("z", 11), _timed("c", 6.5)],
            [_timed("z", 40)],
        ]
    )
    run = transform_with_state(
        move.frame(),
        keys="k",
        processor=Timers(),
        output_schema=SEEN,
        time_mode="EventTime",
        name="timers",
        **move.place,
    )

    assert move.in_millpond(run) == theirs()
    assert (moved.rows, moved.watermark_ms, moved.sources) == (3, 6_000, 1)


@pytest.mark.spark_all
@pytest.mark.parametrize("keys", [("k",), ("k", "n")])
def test_variables_move(rocksdb: SparkSession, tmp_path: Path, keys: tuple[str, ...]) -> None:
    """
    Values, lists and maps of one key column and of several.
    """
    words = ("update", "append", "map", "put", "append", "map")
    move = Move(rocksdb, tmp_path, "k string, do string, n long")

    def rows(number: int) -> list[Row]:
        return [
            {"k": key, "do": words[(number + step) % len(words)], "n": step % 2}
            for step in range(4)
            for key in "ab"
        ]

    def theirs() -> list[str]:
        return move.in_spark(
            move.frame().groupBy(*keys).transformWithState(Remembering(), SEEN, "Update", "None")
        )

    move.put([rows(0), rows(1), rows(2)])
    theirs()
    move.move("Remembering")
    move.put([rows(3), rows(4)])
    run = transform_with_state(
        move.frame(), keys=keys, processor=Remembering(), output_schema=SEEN, **move.place
    )

    assert move.in_millpond(run) == theirs()


def test_values_of_all_types_move(rocksdb: SparkSession, tmp_path: Path) -> None:
    """
    What the code reads from the state that moved has the values and the types that it has in Spark.
    """
    move = Move(rocksdb, tmp_path, "k string, n long")

    def theirs() -> list[str]:
        return move.in_spark(move.frame().groupBy("k").transformWithState(AllTypes(), SEEN, "Update", "None"))

    move.put([[{"k": "a", "n": 1}, {"k": None, "n": 1}]])
    theirs()
    move.move("AllTypes")
    move.put([[{"k": "a", "n": 2}, {"k": None, "n": 2}, {"k": "b", "n": 2}]])
    run = transform_with_state(move.frame(), keys="k", processor=AllTypes(), output_schema=SEEN, **move.place)

    assert move.in_millpond(run) == theirs()


def test_the_state_of_groups_moves(rocksdb: SparkSession, tmp_path: Path) -> None:
    """
    State and timeouts of ``applyInPandasWithState``; which time they are of has to be said.
    """
    timeout = GroupStateTimeout.EventTimeTimeout
    move = Move(rocksdb, tmp_path, "k string, t timestamp, do string, n long", "1 second")

    def row(key: str, second: float, do: str = "", n: int = 0) -> Row:
        return {"k": key, "t": f"1970-01-01T00:00:{second:06.3f}Z", "do": do, "n": n}

    def theirs() -> list[str]:
        grouped_frame = move.frame().groupBy("k")
        return move.in_spark(
            grouped_frame.applyInPandasWithState(grouped, SEEN, "n long, word string", "Update", timeout)
        )

    move.put(
        [
            [row("a", 5, "update", 1), row("a", 5, "timeout", 9_000), row("b", 5, "update", 99)],
            [row("b", 7, "timeout", 9_500), row("c", 7, "update", 3), row("d", 7, "timeout", 8_000)],
        ]
    )
    theirs()
    with pytest.raises(InvalidError, match="of which time"):
        move.move("grouped", dry_run=True)
    moved = move.move("grouped", timeout=timeout)
    move.put([[row("c", 8)], [row("z", 12)], [row("z", 20)]])
    run = apply_in_pandas_with_state(
        move.frame(),
        keys="k",
        function=grouped,
        output_schema=SEEN,
        state_schema="n long, word string",
        timeout=timeout,
        **move.place,
    )

    assert move.in_millpond(run) == theirs()
    assert (moved.rows, moved.timers) == (4, 3)
