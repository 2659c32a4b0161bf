"""Sinks that keep one row for each key."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
import pyarrow as pa
import pytest
from deltalake import DeltaTable
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import millpond as mp
from millpond.executor.sinks.columns import SinkRecord
from millpond.executor.sinks.delta_upsert import UpsertSinkWriter
from millpond.executor.sinks.sink import DeltaSink
from millpond.executor.superstep.delivery import PRODUCTION_SCHEMA
from millpond.executor.windows.pane import Pane, Timing, WindowedValue
from millpond.executor.windows.window import GLOBAL_WINDOW, Window
from millpond.statestore.errors import DataError, InvalidError
from millpond.statestore.failpoint import listening
from millpond.statestore.leases.memory import MemoryRegistry
from millpond.statestore.objects.memory import MemoryObjects
from millpond.statestore.objects.obstore import open_objects
from millpond.statestore.store import Store
from millpond.statestore.system import SystemRng
from millpond.testing.fixtures.determinism import ManualClock, SeededRng

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SCHEMA = pa.schema([("user", pa.string()), ("flights", pa.int64())])


class Killed(BaseException):
    """The process died here."""


def shown(
    value: Any, *, key: str = "k", window: Window = GLOBAL_WINDOW, takes_back: bool = False
) -> tuple[str, str]:
    """Make a production that is a pane of a windowed step or its retraction."""
    pane = Pane(
        index=0, nonspeculative_index=-1, timing=Timing.EARLY, is_last=False, is_retraction=takes_back
    )
    return key, orjson.dumps(WindowedValue(value=value, window=window, at=5, pane=pane).to_json()).decode()


def productions(*made: tuple[str, str]) -> pa.Table:
    rows = [{"stream": "s", "key": key, "value": text, "value_bytes": None, "at": 5} for key, text in made]
    return pa.Table.from_pylist(rows, schema=PRODUCTION_SCHEMA).drop_columns(["stream"])


def by_user(user: str, flights: int, *, takes_back: bool = False) -> tuple[str, str]:
    return shown({"user": user, "flights": flights}, takes_back=takes_back)


def a_writer(folder: Path, rows_max: int = 3, **options: Any) -> UpsertSinkWriter:
    """Make a writer with small leaves."""
    settings_of_it: dict[str, Any] = {"schema": SCHEMA, "keys": ["user"], **options}
    return UpsertSinkWriter(
        open_objects(str(folder)),
        ManualClock(),
        SystemRng(),
        name="board",
        record=SinkRecord.of_store("store", "p", "board"),
        leaf_rows_max=rows_max,
        **settings_of_it,
    )


def table_of(folder: Path, version: int | None = None) -> dict[str, int]:
    """Read the table with delta-rs, and check that users are unique."""
    rows = DeltaTable(str(folder), version=version).to_pyarrow_table().to_pylist()
    counts = {row["user"]: row["flights"] for row in rows}
    assert len(counts) == len(rows)
    return counts


def test_pane_replaces_and_retraction_deletes_its_row(tmp_path: Path) -> None:
    """Every version of the table must be right, not only the last."""
    writer = a_writer(tmp_path)
    writer.write(1, productions(by_user("a", 1), by_user("b", 2)))
    writer.write(2, productions(by_user("a", 1, takes_back=True), by_user("a", 4)))
    writer.write(5, productions(by_user("b", 2, takes_back=True)))

    assert [table_of(tmp_path, version) for version in (1, 2, 3)] == [
        {"a": 1, "b": 2},
        {"a": 4, "b": 2},
        {"a": 4},
    ]
    assert writer.delivered == 5


@pytest.mark.parametrize("retraction_first", [True, False])
def test_pane_wins_over_a_retraction_in_the_same_superstep(tmp_path: Path, retraction_first: bool) -> None:
    """Two keys of the pipeline may change one row, in either order."""
    writer = a_writer(tmp_path)
    writer.write(1, productions(by_user("a", 1)))
    both = [by_user("a", 1, takes_back=True), by_user("a", 2)]
    writer.write(2, productions(*(both if retraction_first else reversed(both))))
    same = [by_user("a", 2, takes_back=True), by_user("a", 2)]
    writer.write(3, productions(*(same if retraction_first else reversed(same))))

    assert table_of(tmp_path) == {"a": 2}


def test_retraction_of_a_replaced_row_deletes_nothing(tmp_path: Path) -> None:
    writer = a_writer(tmp_path)
    writer.write(1, productions(by_user("a", 1)))
    writer.write(2, productions(by_user("a", 2)))
    writer.write(3, productions(by_user("a", 1, takes_back=True), by_user("z", 9, takes_back=True)))

    assert table_of(tmp_path) == {"a": 2}
    assert writer.delivered == 3


def test_rows_without_a_schema_are_identified_by_key_and_window(tmp_path: Path) -> None:
    """The columns of the window are null for the global one."""
    writer = DeltaSink(str(tmp_path), mode="upsert").open("store", "p", "board")
    writer.write(1, productions(shown({"n": 1}, window=Window(0, 10)), shown(2), shown([3], key="m")))
    writer.write(2, productions(shown({"n": 4}, window=Window(0, 10))))

    rows = DeltaTable(str(tmp_path)).to_pyarrow_table().to_pylist()
    values = {(row["key"], row["window_end"] and row["window_end"].microsecond): row["value"] for row in rows}
    assert values == {("k", 10): '{"n":4}', ("k", None): "2", ("m", None): "[3]"}
    assert len(rows) == 3


def test_plain_values_keep_the_newest_of_each_key(tmp_path: Path) -> None:
    writer = DeltaSink(str(tmp_path), mode="upsert").open("store", "p", "board")
    writer.write(1, productions(("a", "1"), ("b", "2"), ("a", "3")))
    writer.write(2, productions(("b", "4")))

    rows = DeltaTable(str(tmp_path)).to_pyarrow_table().to_pylist()
    assert {row["key"]: row["value"] for row in rows} == {"a": "3", "b": "4"}


_MOVES = st.lists(
    st.lists(st.tuples(st.integers(0, 25), st.booleans()), min_size=1, max_size=12), min_size=1, max_size=8
)
"""Supersteps of (user, whether its row is only taken back)."""


@given(moves=_MOVES)
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_table_equals_a_dict_after_every_superstep(
    moves: list[list[tuple[int, bool]]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The leaves must not overlap, nor grow above their limit."""
    folder = tmp_path_factory.mktemp("board")
    expected: dict[str, int] = {}
    content = 0
    for superstep, changes in enumerate(moves, start=1):
        made = []
        for number, is_gone in changes:
            user = f"{number:02d}"
            if user in expected:
                made.append(by_user(user, expected.pop(user), takes_back=True))
            if not is_gone:
                content += 1
                expected[user] = content
                made.append(by_user(user, content))
        writer = a_writer(folder)
        if made:
            writer.write(superstep, productions(*made))

        assert table_of(folder) == expected
        ranges = sorted(
            (file.tags["millpond.first"], file.tags["millpond.last"], file.num_records)
            for file in writer._writer.snapshot.files
        )
        assert all(one[1] < other[0] for one, other in pairwise(ranges))
        assert all(rows <= 3 for *_, rows in ranges)


def test_superstep_rewrites_only_affected_leaves(tmp_path: Path) -> None:
    """The table has a hundred leaves."""
    writer = a_writer(tmp_path)
    writer.write(1, productions(*(by_user(f"{number:03d}", number) for number in range(300))))
    before = {file.path for file in writer._writer.snapshot.files}
    writer.write(2, productions(by_user("150", -1), by_user("999", -2)))
    after = {file.path for file in writer._writer.snapshot.files}

    assert len(before) == 100
    assert len(before - after) == 2
    assert len(after - before) == 3


KILLS = ["sink.file_written", "commit.before_put", "commit.after_put", "commit.before_apply", "commit.done"]


@pytest.mark.parametrize("failpoint", KILLS)
@pytest.mark.parametrize("nth", [1, 2])
def test_superstep_killed_midway_is_written_once_when_repeated(
    tmp_path: Path, failpoint: str, nth: int
) -> None:
    seen = 0

    def kill(name: str) -> None:
        nonlocal seen
        seen += name == failpoint
        if name == failpoint and seen == nth:
            raise Killed

    a_writer(tmp_path).write(1, productions(*(by_user(f"{number}", number) for number in range(8))))
    step = productions(
        by_user("0", 0, takes_back=True), by_user("0", 50), by_user("7", 7, takes_back=True), by_user("9", 9)
    )
    doomed = a_writer(tmp_path)
    with listening(kill):
        try:
            doomed.write(2, step)
        except Killed:
            pass
        else:
            assert nth == 2
            assert failpoint != "sink.file_written"
    a_writer(tmp_path).write(2, step)
    a_writer(tmp_path).write(2, step)

    assert table_of(tmp_path) == {"0": 50, **{f"{number}": number for number in (1, 2, 3, 4, 5, 6, 9)}}
    assert DeltaTable(str(tmp_path)).version() == 2


def test_concurrent_writers_write_each_superstep_once() -> None:
    """The writer with the old view finds the superstep when it reads again."""
    objects = MemoryObjects()
    first, second = (
        UpsertSinkWriter(
            objects,
            ManualClock(),
            SeededRng(seed),
            name="b",
            record=SinkRecord.of_store("a", "p", "b"),
            schema=SCHEMA,
            keys=["user"],
        )
        for seed in (1, 2)
    )
    first.write(1, productions(by_user("a", 1)))
    second.write(1, productions(by_user("a", 1)))
    second.write(2, productions(by_user("a", 2)))
    first.write(3, productions(by_user("b", 3)))

    assert first.delivered == 3
    assert first._writer.snapshot.version == 3


def test_table_rewritten_by_optimize_is_split_into_leaves_again(tmp_path: Path) -> None:
    writer = a_writer(tmp_path)
    writer.write(1, productions(*(by_user(f"{number}", number) for number in range(9))))
    DeltaTable(str(tmp_path)).optimize.compact()
    assert len(DeltaTable(str(tmp_path)).file_uris()) == 1
    writer.write(2, productions(by_user("4", 44), by_user("5", 5, takes_back=True)))

    assert table_of(tmp_path) == {**{f"{number}": number for number in (0, 1, 2, 3, 6, 7, 8)}, "4": 44}
    assert len(DeltaTable(str(tmp_path)).file_uris()) == 3


def test_vacuum_removes_replaced_files_while_the_sink_writes(tmp_path: Path) -> None:
    """docs/windows.md advises a vacuum with the default retention of a week."""
    # The writer's clock shows 1970, so replaced files look old enough.
    writer = a_writer(tmp_path)
    for superstep in range(1, 6):
        writer.write(superstep, productions(by_user("a", superstep), by_user("b", superstep)))
    before = {path.name for path in tmp_path.glob("*.parquet")}
    live = {Path(path).name for path in DeltaTable(str(tmp_path)).file_uris()}
    assert live < before

    gone = {Path(path).name for path in DeltaTable(str(tmp_path)).vacuum(dry_run=False)}
    writer.write(6, productions(by_user("c", 6)))

    assert gone == before - live
    assert table_of(tmp_path) == {"a": 5, "b": 5, "c": 6}
    assert a_writer(tmp_path).delivered == 6


@pytest.mark.parametrize("damage", ["flipped", "cut", "gone"])
def test_damaged_leaf_is_named_and_not_rewritten(tmp_path: Path, damage: str) -> None:
    writer = a_writer(tmp_path)
    writer.write(1, productions(by_user("a", 1), by_user("b", 2)))
    (leaf,) = writer._writer.snapshot.files
    path = tmp_path / leaf.path
    data = bytearray(path.read_bytes())
    data[12] ^= 1
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(data if damage == "flipped" else data[:-9])

    with pytest.raises(DataError, match=leaf.path):
        writer.write(2, productions(by_user("a", 3)))
    assert writer.delivered == 1


@pytest.mark.parametrize(
    "options",
    [
        {"mode": "replace"},
        {"mode": "append", "keys": ["user"]},
        {"mode": "upsert", "schema": SCHEMA},
        {"mode": "upsert", "schema": SCHEMA, "keys": ["missing"]},
        {"mode": "upsert", "schema": SCHEMA, "keys": ["user", "user"]},
        {"mode": "upsert", "schema": pa.schema([("x", pa.float64())]), "keys": ["x"]},
    ],
)
def test_invalid_options_are_refused_when_declared(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidError):
        DeltaSink("out", **options)


def test_table_with_more_columns_is_refused(tmp_path: Path) -> None:
    """Rewriting rows would lose the unknown columns."""
    a_writer(tmp_path, schema=SCHEMA.append(pa.field("more", pa.string())))

    with pytest.raises(InvalidError, match="would lose"):
        a_writer(tmp_path)


@pytest.mark.spark
def test_every_version_reads_the_same_in_deltars_duckdb_and_spark(
    tmp_path: Path, spark_as_reader: SparkSession
) -> None:
    import duckdb

    writer = a_writer(tmp_path)
    writer.write(1, productions(*(by_user(f"{number}", number) for number in range(9))))
    writer.write(2, productions(by_user("3", 3, takes_back=True), by_user("4", 40)))
    writer.write(3, productions(by_user("4", 40, takes_back=True), by_user("x", 7)))

    for version in (1, 2, 3):
        expected = table_of(tmp_path, version)
        data_set = DeltaTable(str(tmp_path), version=version).to_pyarrow_dataset()
        in_duckdb = duckdb.connect().execute("SELECT * FROM data_set").fetchall()
        in_spark = (
            spark_as_reader.read.format("delta").option("versionAsOf", version).load(str(tmp_path)).collect()
        )

        assert data_set.count_rows() == len(expected)
        assert dict(in_duckdb) == expected
        assert {row["user"]: row["flights"] for row in in_spark} == expected


def _sessions(folder: Path) -> mp.Pipeline:
    """Count clicks in merging sessions with retractions, and sessions by their size."""
    pipeline = mp.Pipeline("sessions")
    clicks = pipeline.inject("clicks", key="user", at="at", watermark=mp.ManualWatermark())
    sessions = clicks.window(
        mp.Sessions("10us"),
        trigger=mp.Repeatedly(mp.AfterCount(1)),
        accumulation="retracting",
        allowed_lateness="1h",
    ).combine(mp.Count(), name="sessions")
    sessions.sink("board", DeltaSink(str(folder / "sessions"), mode="upsert"))
    sizes = sessions.map(lambda count: {"size": str(count)}, name="sizes").window(
        mp.GlobalWindows(), trigger=mp.Repeatedly(mp.AfterCount(1)), accumulation="accumulating"
    )
    sizes.combine(mp.Count(), name="by_size", key="size").sink(
        "sizes", DeltaSink(str(folder / "sizes"), mode="upsert", keys=["key"])
    )
    return pipeline


CLICKS = [("a", 0), ("a", 30), ("b", 5), ("a", 15), ("a", 8), ("b", 100), ("a", 22), ("b", 9), ("c", 1)]


def _play(folder: Path, kill_at: tuple[str, int] | None = None) -> tuple[dict[Any, Any], dict[Any, Any]]:
    clock, disk, registry = ManualClock(1_000_000), MemoryObjects(), MemoryRegistry()
    rng = SeededRng(7)
    reached = 0

    def kill(name: str) -> None:
        nonlocal reached
        if kill_at is not None and name == kill_at[0]:
            reached += 1
            if reached == kill_at[1]:
                raise Killed

    def opened() -> tuple[Store, Any]:
        store = Store.in_memory(objects=disk, registry=registry, clock=clock, rng=rng)
        return store, mp.LocalRunner(store, clock=clock, rng=rng, progress=False).start(
            _sessions(folder), stepping=True
        )

    store, run = opened()
    for number, (user, at) in enumerate(CLICKS):
        clock.advance_ms(1)
        run.inject("clicks", {"user": user, "at": at})
        try:
            with listening(kill):
                run.run_until_quiet()
        except Killed:
            store.close()
            store, run = opened()
            if run.summary().totals.injected == number:
                run.inject("clicks", {"user": user, "at": at})
            run.run_until_quiet()
    run.stop()
    store.close()
    assert kill_at is None or reached >= kill_at[1]
    boards = DeltaTable(str(folder / "sessions")).to_pyarrow_table().to_pylist()
    sizes = DeltaTable(str(folder / "sizes")).to_pyarrow_table().to_pylist()
    return (
        {
            (row["key"], row["window_start"].microsecond, row["window_end"].microsecond): row["value"]
            for row in boards
        },
        {row["key"]: row["value"] for row in sizes},
    )


def test_merged_sessions_leave_one_row_each(tmp_path: Path) -> None:
    """The aggregate on other keys counts each session once."""
    boards, sizes = _play(tmp_path)

    assert boards == {("a", 0, 40): "5", ("b", 5, 19): "2", ("b", 100, 110): "1", ("c", 1, 11): "1"}
    assert {size: count for size, count in sizes.items() if count != "0"} == {"5": "1", "2": "1", "1": "2"}


@pytest.mark.parametrize(
    "failpoint",
    ["superstep.file_written", "superstep.committed", "sink.behind", "sink.file_written", "sink.delivered"],
)
@pytest.mark.parametrize("nth", [6])
def test_killed_and_restarted_run_leaves_the_same_tables(tmp_path: Path, failpoint: str, nth: int) -> None:
    assert _play(tmp_path / "killed", (failpoint, nth)) == _play(tmp_path / "whole")
