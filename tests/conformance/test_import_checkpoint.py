"""Queries stopped in Spark and moved to Millpond: both yield the same from there on."""

from __future__ import annotations

import os
import shutil
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
import pytest
from click.testing import CliRunner, Result
from deltalake import DeltaTable
from pyspark.sql import functions as F  # noqa: N812 - the name that every Spark user knows
from pyspark.sql.streaming.state import GroupStateTimeout

from millpond.cli.main import main
from millpond.executor.spark_compat.import_checkpoint import ImportedCheckpoint, import_checkpoint
from millpond.executor.spark_compat.spark_query import (
    apply_in_pandas_with_state,
    drop_duplicates,
    transform_with_state,
)
from millpond.statestore.errors import DataError, InvalidError
from millpond.statestore.failpoint import listening
from millpond.statestore.store import Store
from tests.spark_code.group_functions import grouped
from tests.spark_code.stateful_processors import SEEN, AllTypes, Remembering, Sums, Timers

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from millpond.executor.spark.run import SparkRun

pytestmark = [pytest.mark.spark, pytest.mark.slow]

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Move:
    """A user's query that is stopped after some files and moved; each file is a micro-batch."""

    spark: SparkSession
    folder: Path
    schema: str
    delay: str | None = None

    def put(self, batches: Sequence[Sequence[Row]]) -> None:
        source = self.folder / "in"
        source.mkdir(exist_ok=True)
        first = len(list(source.iterdir()))
        for number, rows in enumerate(batches, first):
            file = source / f"{number:04d}.json"
            file.write_bytes(b"\n".join(map(orjson.dumps, rows)))
            os.utime(file, (1e9 + number, 1e9 + number))

    def frame(self) -> DataFrame:
        reader = self.spark.readStream.schema(self.schema).option("maxFilesPerTrigger", 1)
        frame = reader.json(str(self.folder / "in"))
        return frame if self.delay is None else frame.withWatermark("t", self.delay)

    @property
    def checkpoint(self) -> Path:
        return self.folder / "checkpoint"

    def in_spark(self, output: DataFrame, mode: str = "update") -> list[str]:
        """Return the rows that the query yields in this run of it."""
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
        """Import the query's state into a new store."""
        return import_checkpoint(
            self.checkpoint, computation=computation, into=self.folder / "pond", spark=self.spark, **options
        )

    @property
    def place(self) -> dict[str, Any]:
        return {
            "store": self.folder / "pond",
            "sink": self.folder / "millpond",
            "trigger": {"availableNow": True},
            "spark": self.spark,
            "progress": False,
        }

    def in_millpond(self, run: SparkRun) -> list[str]:
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
    """The source's position moves too: pending timers, due timers and late rows are as in Spark."""
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


def _snapshot(**names: str) -> Callable[[Path], object]:
    """Return damage to a checkpoint: a snapshot of RocksDB with a file of these names."""

    def damage(checkpoint: Path) -> None:
        for partition in checkpoint.glob("state/0/[0-9]*"):
            for version in (1, 2):
                with zipfile.ZipFile(partition / f"{version}.zip", "w") as zipped:
                    zipped.writestr(names.get("entry", "CURRENT"), b"MANIFEST-000005\n")
                    files = [{"localFileName": "1.sst", "dfsSstFileName": "1-a.sst", "sizeBytes": 1, **names}]
                    manifest = {"sstFiles": files, "numKeys": 1, "numInternalKeys": 0}
                    zipped.writestr("metadata", b"v1\n" + orjson.dumps(manifest))

    return damage


def _write(path: str, data: bytes) -> Callable[[Path], object]:
    return lambda checkpoint: (checkpoint / path).write_bytes(data)


def _replace(path: str, make: Callable[[Path], object]) -> Callable[[Path], object]:
    return lambda checkpoint: ((checkpoint / path).unlink(), make(checkpoint / path))


_HOSTILE: Mapping[str, tuple[str, Callable[[Path], object]]] = {
    "snapshot writes elsewhere": ("outside of its folder", _snapshot(localFileName="../../../../owned.sst")),
    "snapshot writes to a path": ("outside of its folder", _snapshot(localFileName="/tmp/owned.sst")),
    "snapshot reads elsewhere": ("outside of its folder", _snapshot(dfsSstFileName="../../../metadata")),
    "entry elsewhere": ("outside of its folder", _snapshot(entry="../../../../owned")),
    "no snapshot": ("snapshot of the checkpoint is damaged", _write("state/0/0/1.zip", b"PK")),
    "link": ("must not be links", lambda checkpoint: (checkpoint / "sources" / "x").symlink_to("/etc")),
    "fifo": ("must not be links", _replace("commits/1", os.mkfifo)),
    "folder": ("an entry of the checkpoint is damaged", _replace("commits/1", Path.mkdir)),
    "no text": ("an entry of the checkpoint is damaged", _write("offsets/1", b"\xff\xfe")),
    "one line": ("an entry of the checkpoint is damaged", _write("commits/1", b"v1")),
    "far future": ("an entry of", _write("commits/1", b'v1\n{"nextBatchWatermarkMs":9223372036854775807}')),
    "no number": ("an entry of", _write("commits/1", b'v1\n{"nextBatchWatermarkMs":"x"}')),
    "no object": ("an entry of the checkpoint is damaged", _write("metadata", b"5")),
    "operator": ("spark cannot read", _write("state/0/_metadata/metadata", b'v1\n{"x":')),
}


def test_hostile_checkpoint_is_refused(rocksdb: SparkSession, tmp_path: Path) -> None:
    """Spark itself writes a file of any name that the list of a snapshot's files has."""
    move = Move(rocksdb, tmp_path, "k string, n long")
    move.put([[{"k": "a", "n": 1}], [{"k": "b", "n": 1}]])
    move.in_spark(move.frame().dropDuplicates(["k"]).selectExpr("k AS seen"), "append")
    assert move.move("honest", dry_run=True).rows == 2
    for path in move.checkpoint.rglob(".*.crc"):
        path.unlink()

    for number, (reason, damage) in enumerate(_HOSTILE.values()):
        hostile = tmp_path / f"hostile {number}"
        shutil.copytree(move.checkpoint, hostile)
        damage(hostile)
        with pytest.raises(DataError, match=reason):
            import_checkpoint(hostile, computation="c", into=tmp_path / "pond", spark=rocksdb, dry_run=True)
    assert not list(tmp_path.rglob("owned*"))
    assert not (tmp_path / "pond").exists()


def test_moved_values_keep_their_types(rocksdb: SparkSession, tmp_path: Path) -> None:
    move = Move(rocksdb, tmp_path, "k string, n long")

    def theirs() -> list[str]:
        return move.in_spark(move.frame().groupBy("k").transformWithState(AllTypes(), SEEN, "Update", "None"))

    move.put([[{"k": "a", "n": 1}, {"k": None, "n": 1}]])
    theirs()
    move.move("AllTypes")
    move.put([[{"k": "a", "n": 2}, {"k": None, "n": 2}, {"k": "b", "n": 2}]])
    run = transform_with_state(move.frame(), keys="k", processor=AllTypes(), output_schema=SEEN, **move.place)

    assert move.in_millpond(run) == theirs()


def test_state_of_groups_moves(rocksdb: SparkSession, tmp_path: Path) -> None:
    """The caller names the time domain of the timeouts of ``applyInPandasWithState``."""
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
    with pytest.raises(InvalidError, match="record their kind"):
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


def _clicks(*given: tuple[str, float]) -> list[Row]:
    return [
        {"k": key, "t": f"1970-01-01T00:00:{second:06.3f}Z", "seen": f"{key} {second}"}
        for key, second in given
    ]


_CLICKS = "k string, t timestamp, seen string"


@pytest.mark.parametrize(
    ("keys", "within"),
    [
        (["k", "t"], False),
        pytest.param(["k"], False, marks=pytest.mark.spark_all),
        pytest.param(["k"], True, marks=pytest.mark.spark_all),
    ],
    ids=["key with the event time", "for ever", "within the watermark"],
)
def test_seen_keys_move(rocksdb: SparkSession, tmp_path: Path, keys: list[str], within: bool) -> None:
    """Duplicates are dropped until the key expires."""
    move = Move(rocksdb, tmp_path, _CLICKS, "2 seconds")

    def theirs() -> list[str]:
        frame = move.frame()
        rows = frame.dropDuplicatesWithinWatermark(keys) if within else frame.dropDuplicates(keys)
        return move.in_spark(rows, "append")

    def timers() -> int:
        with Store.open(move.folder / "pond", read_only=True) as store:
            return sum(
                len(row["timers"]) for row in store.rows_view("drop_duplicates").to_arrow().to_pylist()
            )

    move.put([_clicks(("a", 1), ("b", 2), ("c", 4)), _clicks(("a", 5), ("a", 3))])
    theirs()
    event_time = "t" if "t" in keys else None
    moved = move.move("drop_duplicates", event_time=event_time)
    known = rocksdb.read.format("statestore").load(str(move.checkpoint)).count()
    assert moved.rows == known > 1
    assert timers() == moved.timers == (known if within or event_time else 0)
    move.put(
        [
            _clicks(("a", 5), ("b", 4), ("b", 2.5), ("d", 6), ("c", 4)),
            _clicks(("z", 12)),
            _clicks(("a", 13), ("a", 9), ("b", 12), ("c", 10.5)),
            _clicks(("z", 30)),
        ]
    )
    run = drop_duplicates(move.frame(), keys, within_watermark=within, **move.place)

    assert move.in_millpond(run) == theirs()
    expected = rocksdb.read.format("statestore").load(str(move.checkpoint)).count()
    assert timers() == (expected if within or event_time else 0)


def _sums_of(key: dict[str, Any], buffers: dict[str, Any]) -> dict[str, Any] | None:
    if key["k"] == "left out":
        return None
    assert buffers["count_2"] == buffers["count"]
    return {"sums": {"count": buffers["count"], "total": buffers["sum"]}}


def test_aggregation_moves(rocksdb: SparkSession, tmp_path: Path) -> None:
    """The user's function makes state of the buffers; without one, the state is the buffers."""
    move = Move(rocksdb, tmp_path, "k string, n long")

    def theirs() -> list[str]:
        sums = move.frame().groupBy("k").agg(F.count("*"), F.sum("n"), F.avg("n"))
        return move.in_spark(sums.select(F.concat_ws(" ", *sums.columns).alias("seen")))

    move.put([[{"k": key, "n": n} for key in ("a", "b", "left out") for n in (1, 2, 4)]])
    theirs()
    plain = move.move("buffers", dry_run=True)
    assert orjson.loads(plain.samples[0]["state"]) == {"count": 3, "sum": 7, "sum_2": 7.0, "count_2": 3}
    with pytest.raises(InvalidError, match=r"convert failed for a key: KeyError: 'typo'.*'k': '"):
        move.move("Sums", convert=lambda _, buffers: buffers["typo"], dry_run=True)
    assert move.move("Sums", convert=_sums_of).rows == 2
    move.put([[{"k": key, "n": 5} for key in ("a", "new")]])
    run = transform_with_state(move.frame(), keys="k", processor=Sums(), output_schema=SEEN, **move.place)

    assert move.in_millpond(run) == theirs()


@pytest.mark.spark_all
def test_killed_query_moves(rocksdb: SparkSession, tmp_path: Path) -> None:
    """Records of the unfinished batch are read again, once; files already listed by the source follow."""
    move = Move(rocksdb, tmp_path, "k string, do string, n long")

    def theirs() -> list[str]:
        return move.in_spark(
            move.frame().groupBy("k").transformWithState(Remembering(), SEEN, "Update", "None")
        )

    move.put([[{"k": "a", "do": "append", "n": n}] for n in range(4)])
    theirs()
    for batch in (2, 3):
        (move.checkpoint / "commits" / str(batch)).unlink()
        (move.checkpoint / "commits" / f".{batch}.crc").unlink(missing_ok=True)
    (move.checkpoint / "offsets" / "3").unlink()
    before = {path: path.read_bytes() for path in move.checkpoint.rglob("*") if path.is_file()}

    moved = move.move("Remembering")

    assert (moved.batch, moved.unfinished) == (1, 2)
    assert {path: path.read_bytes() for path in move.checkpoint.rglob("*") if path.is_file()} == before
    run = transform_with_state(
        move.frame(), keys="k", processor=Remembering(), output_schema=SEEN, **move.place
    )
    seen = move.in_millpond(run)
    assert len(seen) == 2
    assert seen == [
        line
        for line in _seen(str(tmp_path / "spark"))
        if "('append', 0)" not in line and "('append', 1)" not in line
    ]


def test_second_import_is_refused(rocksdb: SparkSession, tmp_path: Path) -> None:
    """Also refused: an import with the same input, and a checkpoint without operator or state."""
    move = Move(rocksdb, tmp_path, "k string, do string, n long")
    move.put([[{"k": "a", "do": "append", "n": 1}]])
    frame = move.frame()
    move.in_spark(frame.groupBy("k").transformWithState(Remembering(), SEEN, "Update", "None"))
    move.move("Remembering")

    for options, match in [
        ({"computation": "Remembering", "input": None}, "has rows"),
        ({"computation": "other", "pipeline": "Remembering"}, "a place in its sources"),
        ({"computation": "other"}, "a place in its sources"),
        ({"computation": "other", "operator": 3}, "no such operator"),
        (
            {"computation": "other", "input": None, "timeout": GroupStateTimeout.EventTimeTimeout},
            "timeout is of",
        ),
        ({"computation": "other", "input": None, "convert": _sums_of}, "convert is of"),
        ({"computation": "other", "input": None, "event_time": "k"}, "event_time is of"),
    ]:
        with pytest.raises(InvalidError, match=match):
            move.move(**options)
    with pytest.raises(InvalidError, match="no checkpoint"):
        import_checkpoint(tmp_path / "nowhere", computation="c", into=tmp_path / "pond", spark=rocksdb)
    assert move.move("other", input=None, plain_key=True).samples[0]["key"] == "a"


class Died(BaseException):
    """The process died here."""


@pytest.mark.spark_all
def test_interrupted_import_has_no_effect(rocksdb: SparkSession, tmp_path: Path) -> None:
    """The next import moves everything."""
    move = Move(rocksdb, tmp_path, "k string, do string, n long")
    move.put([[{"k": "a", "do": "append", "n": 1}]])
    move.in_spark(move.frame().groupBy("k").transformWithState(Remembering(), SEEN, "Update", "None"))

    def dies(at: str) -> Callable[[str], None]:
        def listener(reached: str) -> None:
            if reached == at:
                raise Died(at)

        return listener

    for failpoint in ("lease.taken", "lease.fenced", "commit.before_put"):
        with pytest.raises(Died), listening(dies(failpoint)):
            move.move("Remembering")
        with Store.open(move.folder / "pond", read_only=True) as store:
            assert not store.rows_view("Remembering").to_arrow().num_rows
    assert move.move("Remembering").rows == 1
    move.put([[{"k": "a", "do": "update", "n": 2}]])
    run = transform_with_state(
        move.frame(), keys="k", processor=Remembering(), output_schema=SEEN, **move.place
    )
    assert "[(1,), (2,), (3,)]" in "".join(move.in_millpond(run))


def test_query_without_state_moves_its_position(rocksdb: SparkSession, tmp_path: Path) -> None:
    move = Move(rocksdb, tmp_path, "k string, do string, n long")

    def theirs() -> list[str]:
        return move.in_spark(
            move.frame().groupBy("k").transformWithState(Remembering(), SEEN, "Update", "None")
        )

    move.put([[{"k": "a", "do": "append", "n": 1}], [{"k": "a", "do": "clear", "n": 1}]])
    theirs()
    moved = move.move("Remembering")
    assert (moved.rows, moved.sources, moved.batch) == (0, 1, 1)
    move.put([[{"k": "a", "do": "update", "n": 2}]])
    run = transform_with_state(
        move.frame(), keys="k", processor=Remembering(), output_schema=SEEN, **move.place
    )

    assert move.in_millpond(run) == theirs()


def test_command_moves_a_query(rocksdb: SparkSession, tmp_path: Path) -> None:
    """A dry run prints its plan and writes nothing."""
    move = Move(rocksdb, tmp_path, "k string, do string, n long")
    move.put([[{"k": "a", "do": "append", "n": 1}, {"k": "b", "do": "update", "n": 2}]])
    move.in_spark(move.frame().groupBy("k").transformWithState(Remembering(), SEEN, "Update", "None"))

    def invoke(*options: str) -> Result:
        words = [
            "import-checkpoint",
            str(move.checkpoint),
            "--computation",
            "c",
            "--into",
            str(tmp_path / "pond"),
        ]
        return CliRunner().invoke(main, [*words, *options])

    dry = invoke("--dry-run")
    assert dry.exit_code == 0, dry.output
    assert not (tmp_path / "pond").exists()
    assert (
        "would have 2 rows of c with 0 timers, from transformWithStateInPySparkExec after batch" in dry.stdout
    )
    assert '"value":{"n":2}' in dry.stdout
    done = invoke("--json")
    assert done.exit_code == 0, done.output
    result = orjson.loads(done.stdout)
    assert (result["rows"], result["key"], result["sources"]) == (2, "k:string", 1)
    with Store.open(tmp_path / "pond", read_only=True) as store:
        rows = store.rows_view("c", result["version"]).to_arrow().to_pylist()
    assert [(row["k"], orjson.loads(row["state"])) for row in rows] == [
        ("a", {"list": [{"n": 1}, {"n": 2}, {"n": 3}]}),
        ("b", {"value": {"n": 2}}),
    ]
