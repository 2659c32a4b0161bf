"""Loads, which write a whole table in one commit or nothing."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

import millpond as mp
from millpond.statestore.failpoint import listening
from millpond.statestore.interval import Interval
from millpond.statestore.objects.memory import MemoryObjects
from millpond.statestore.types import Sequencer
from millpond.testing.fixtures.determinism import ManualClock, SeededRng

SECOND_US = 1_000_000

ROWS: list[dict[str, Any]] = [
    {"key": "b", "state": {"count": 2, "names": ["x"]}, "timers": [{"tag": "t", "at": 7 * SECOND_US}]},
    {"key": "a", "state": {"count": 1, "names": []}, "timers": None},
    {"key": "é", "state": None, "timers": [{"tag": "", "at": 3 * SECOND_US}]},
]


@pytest.fixture
def store() -> Iterator[mp.Store]:
    with mp.Store.in_memory(clock=ManualClock(), rng=SeededRng(1)) as opened:
        yield opened


def rows_of(
    store: mp.Store, computation: str = "c"
) -> dict[str, tuple[Any, list[tuple[str, str, int, int]], Any]]:
    table = store.rows_view(computation).to_arrow()
    micros = pa.int64()
    return {
        row["key"]: (
            row["state"] if row["state_bytes"] is None else row["state_bytes"],
            [
                (
                    timer["tag"],
                    timer["domain"],
                    pa.scalar(timer["at"]).cast(pa.timestamp("us", "UTC")).cast(micros).as_py(),
                    pa.scalar(timer["output_at"]).cast(pa.timestamp("us", "UTC")).cast(micros).as_py(),
                )
                for timer in row["timers"]
            ],
            None if row["hold"] is None else pa.scalar(row["hold"]).cast(micros).as_py(),
        )
        for row in table.to_pylist()
    }


EXPECTED = {
    "a": ('{"count":1,"names":[]}', [], None),
    "b": (
        '{"count":2,"names":["x"]}',
        [("t", "event", 7 * SECOND_US, 7 * SECOND_US)],
        7 * SECOND_US,
    ),
    "é": (None, [("", "event", 3 * SECOND_US, 3 * SECOND_US)], 3 * SECOND_US),
}


def _text_columns() -> pa.Table:
    return pa.table(
        {
            "key": [row["key"] for row in ROWS],
            "state": [row["state"] and json.dumps(row["state"], separators=(",", ":")) for row in ROWS],
            "timers": [row["timers"] and json.dumps(row["timers"]) for row in ROWS],
        }
    )


def _parquet(folder: Path) -> Path:
    pq.write_table(pa.Table.from_pylist(ROWS), folder / "rows.parquet")
    return folder / "rows.parquet"


def _csv(folder: Path) -> Path:
    pyarrow.csv.write_csv(_text_columns(), folder / "rows.csv")
    return folder / "rows.csv"


def _jsonl(folder: Path) -> Path:
    lines = [json.dumps(row, separators=(",", ":")) for row in ROWS]
    (folder / "rows.jsonl").write_text("\n".join(lines))
    return folder / "rows.jsonl"


def _json(folder: Path) -> Path:
    (folder / "rows.json").write_text(json.dumps(ROWS, separators=(",", ":")))
    return folder / "rows.json"


SOURCES: dict[str, Callable[[Path], Any]] = {
    "mappings": lambda _: (dict(row) for row in ROWS),
    "arrow": lambda _: pa.Table.from_pylist(ROWS),
    "a reader": lambda _: pa.RecordBatchReader.from_batches(
        (table := pa.Table.from_pylist(ROWS)).schema, table.to_batches(1)
    ),
    "pandas": lambda _: pd.DataFrame(ROWS),
    "text": lambda _: _text_columns(),
    "text in pandas": lambda _: _text_columns().to_pandas(),
    "parquet": _parquet,
    "csv": _csv,
    "jsonl": _jsonl,
    "json": _json,
}


@pytest.mark.parametrize("name", SOURCES)
def test_table_of_any_kind_becomes_same_rows(store: mp.Store, tmp_path: Path, name: str) -> None:
    """Timers are as `set_timer` would store them."""
    loaded = store.load("c", SOURCES[name](tmp_path))

    assert rows_of(store) == EXPECTED
    assert (loaded.rows, loaded.intervals, loaded.files) == (3, 1, 1)
    assert loaded.version == store.snapshot().version


@pytest.mark.parametrize("name", ["a[1]", "*", "?"])
@pytest.mark.parametrize("suffix", ["parquet", "csv", "jsonl", "json"])
def test_file_whose_name_looks_like_a_pattern_is_read_alone(
    store: mp.Store, tmp_path: Path, name: str, suffix: str
) -> None:
    """Nor do names of folders replace columns."""
    folder = tmp_path / "key=x" / "state=7"
    folder.mkdir(parents=True)
    SOURCES[suffix](folder).rename(folder / f"{name}.{suffix}")
    (folder / f"a1.{suffix}").write_bytes(b"another file")

    store.load("c", folder / f"{name}.{suffix}")

    assert rows_of(store) == EXPECTED


def test_parquet_with_text_that_is_not_utf8_is_refused(store: mp.Store, tmp_path: Path) -> None:
    buffers = [None, pa.py_buffer(b"\0\0\0\0\2\0\0\0"), pa.py_buffer(b"\xff\xfe")]
    key = pa.Array.from_buffers(pa.string(), 1, buffers)
    pq.write_table(pa.table({"key": key, "state": ["1"]}), tmp_path / "1.parquet")

    with pytest.raises(mp.InvalidError, match="cannot be read"):
        store.load("c", tmp_path / "1.parquet")


def test_parquet_with_a_column_name_that_is_not_utf8_is_refused(store: mp.Store, tmp_path: Path) -> None:
    pq.write_table(pa.table({"key": ["a"], "staté": ["1"]}), tmp_path / "1.parquet", store_schema=False)
    data = (tmp_path / "1.parquet").read_bytes().replace("é".encode(), b"\xe9\x80")
    (tmp_path / "1.parquet").write_bytes(data)

    with pytest.raises(mp.InvalidError, match="cannot be read"):
        store.load("c", tmp_path / "1.parquet")


class Own(mp.Computation):
    def __init__(self, codec: mp.Codec) -> None:
        self.codec = codec

    def process_record(self, context, record):
        value = record.value
        context.state.set([value["n"], context.state.get()])
        for at in value["event"]:
            context.set_timer(at, tag=f"e{at}")
        for at in value["wall"]:
            context.set_timer(at, tag="w", domain="wall")
            context.set_timer(at, tag="held", domain="wall", output_at=record.at)

    def process_timer(self, context, timer):
        context.state.set([timer.tag, timer.at, context.state.get()])
        context.produce("out", [context.key, timer.tag, timer.at])


def _own_pipeline(codec: mp.Codec, sink: mp.testing.RecordingSink | None = None) -> mp.Pipeline:
    pipeline = mp.Pipeline("p")
    stream = pipeline.inject("in", key="k", at="at", watermark=mp.BoundedDisorder("1s"))
    out = stream.apply(Own(codec), name="c", produces="out")
    if sink is not None:
        out.sink("s", sink)
    return pipeline


def _feed(store: mp.Store, codec: mp.Codec, rows: list[dict[str, Any]], clock: ManualClock) -> None:
    runner = mp.LocalRunner(store, progress=False, clock=clock, rng=SeededRng(5))
    with runner.start(_own_pipeline(codec), stepping=True) as run:
        run.inject("in", rows)
        run.run_until_quiet()


@pytest.mark.parametrize("codec", [mp.JsonCodec(), mp.MsgpackCodec()], ids=["json", "msgpack"])
@pytest.mark.parametrize("intervals", [None, 3])
def test_computation_continues_loaded_view(codec: mp.Codec, intervals: int | None) -> None:
    clock = ManualClock()
    now = clock.now_us()
    first = [
        {"k": f"k{n}", "at": (n + 1) * SECOND_US, "n": n, "event": [(n + 9) * SECOND_US, 99 * SECOND_US],
         "wall": [now + n * SECOND_US + 1] if n % 2 else []}
        for n in range(7)
    ]  # fmt: skip
    later = [{"k": f"k{n}", "at": 14 * SECOND_US, "n": -n, "event": [], "wall": []} for n in (2, 9)]
    ends: list[dict[str, Any]] = []
    with mp.Store.in_memory(clock=clock, rng=SeededRng(2)) as original:
        _feed(original, codec, first, clock)
        view = original.rows_view("c").to_arrow()
        with mp.Store.in_memory(clock=clock, rng=SeededRng(3)) as copy:
            copy.load("c", view, codec=codec, intervals=intervals)
            clock.advance_ms(3_000)
            for store in (original, copy):
                _feed(store, codec, later, clock)
                ends.append(rows_of(store))

    assert ends[0] == ends[1]
    assert any(b"e" in state if isinstance(state, bytes) else "e" in state for state, *_ in ends[0].values())


def test_load_cuts_requested_number_of_intervals(store: mp.Store) -> None:
    """A pipeline that declares the same number opens."""
    loaded = store.load("c", ({"key": f"{n:03d}", "state": n} for n in range(100)), intervals=4)

    assert loaded.intervals == 4
    assert [one.low for one in store.snapshot().live_intervals("c")] == ["", "025", "050", "075"]
    assert sorted(str(file.min_key) for file in store.snapshot().files_in("c")) == [
        "000",
        "025",
        "050",
        "075",
    ]
    pipeline = mp.Pipeline("p")
    pipeline.inject("in", key="k", at="at").apply(Own(mp.JsonCodec()), name="c", produces="out", intervals=4)
    with mp.LocalRunner(store, progress=False).start(pipeline, stepping=True) as run:
        assert run.step() is None


def test_codec_differing_from_load_is_refused(store: mp.Store) -> None:
    store.load("c", ROWS)

    with pytest.raises(mp.InvalidError, match="another codec"):
        mp.LocalRunner(store, progress=False).start(_own_pipeline(mp.MsgpackCodec()), stepping=True)


def test_mapping_text_is_value_and_column_text_is_json(store: mp.Store) -> None:
    store.load("c", [{"key": "a", "state": "1"}])
    store.load("d", pa.table({"key": ["a"], "state": ["1"]}))

    assert rows_of(store)["a"][0] == '"1"'
    assert rows_of(store, "d")["a"][0] == "1"


def test_timers_are_stored_in_firing_order(store: mp.Store) -> None:
    """Each keeps its clock; the row keeps the earliest hold."""
    timers = [
        {"tag": "late", "at": "1970-01-01T00:00:09Z"},
        {"tag": "wall", "at": "1970-01-01T00:00:05+00:00", "domain": "wall"},
        {"tag": "held", "at": "1970-01-01T00:00:05Z", "domain": "wall", "output_at": "1970-01-01T00:00:08Z"},
        {"tag": "early", "at": "1970-01-01T00:00:02Z", "domain": "event@99/free"},
    ]
    store.load("c", [{"key": "a", "timers": timers}])

    assert rows_of(store)["a"] == (
        None,
        [
            ("early", "event@99.0/free", 2 * SECOND_US, 2 * SECOND_US),
            ("held", "wall", 5 * SECOND_US, 8 * SECOND_US),
            ("wall", "wall/free", 5 * SECOND_US, 5 * SECOND_US),
            ("late", "event", 9 * SECOND_US, 9 * SECOND_US),
        ],
        8 * SECOND_US,
    )


REFUSED: dict[str, tuple[Any, str]] = {
    "repeated": ([{"key": "a", "state": 1}, {"key": "b", "state": 1}, {"key": "a", "state": 2}], "more than once"),
    "null": (pa.table({"key": ["a", None], "state": ["1", "2"]}), "a key is null row=`1`"),
    "not text": (pa.table({"key": [1], "state": ["1"]}), "not text"),
    "not text in a mapping": ([{"key": "a", "state": 1}, {"key": 5, "state": 1}], "a key is not text row=`1`"),
    "surrogate": ([{"key": "\ud800", "state": 1}], "no UTF-8 form"),
    "no key": ([{"k": "a"}], "no column key"),
    "unknown": ([{"key": "a", "timer": []}], "columns that rows do not have"),
    "empty": ([], "no rows"),
    "neither": ([{"key": "a", "state": 1}, {"key": "b"}], "neither state nor timers.* key=`b`"),
    "no json": (pa.table({"key": ["a"], "state": ["{"]}), "not what the codec stores.* key=`a`"),
    "a day beyond Python's": (
        pa.table({"key": ["a"], "state": pa.array([2**60], pa.timestamp("us"))}),
        "a value of the column cannot be read",
    ),
    "a key twice": (
        pa.table({"key": ["a"], "state": pa.array([[("x", 1), ("x", 2)]], pa.map_(pa.string(), pa.int64()))}),
        "a map has a key twice",
    ),
    "no value": ([{"key": "a", "state": {1, 2}}], "values cannot have"),
    "bytes": (pa.table({"key": ["a"], "state_bytes": [b"1"]}), "the codec stores text"),
    "no row": ([1], "each row must be a mapping"),
    "no table": (7, "rows must be a table"),
    "no file": ("nowhere.parquet", "no such file"),
    "no kind of file": ("rows.xlsx", "the format of a file from its name"),
    "no time": ([{"key": "a", "timers": [{"tag": "x"}]}], "one has no time.* key=`a`"),
    "no zone": ([{"key": "a", "timers": [{"at": "2024-01-01T00:00:00"}]}], "zone"),
    "no clock": ([{"key": "a", "timers": [{"at": 1, "domain": "sun"}]}], "no such clock"),
    "no list": (pa.table({"key": ["a"], "timers": ["{}"]}), "they are not a list"),
    "no field": ([{"key": "a", "timers": [{"at": 1, "hold": True}]}], "unknown fields"),
    "two timers": ([{"key": "a", "timers": [{"at": 1}, {"at": 2}]}], "one tag and domain"),
    "year": ([{"key": "a", "timers": [{"at": 2**62}]}], "the years 1 to 9999"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_malformed_table_is_refused_without_effect(store: mp.Store, name: str) -> None:
    """Not even a lease is acquired."""
    source, message = REFUSED[name]
    before = store.snapshot()

    with pytest.raises(mp.InvalidError, match=message):
        store.load("c", source)

    assert store.snapshot().version == before.version
    assert store.load("c", ROWS).rows == 3


def test_computation_with_rows_is_refused(store: mp.Store) -> None:
    store.load("c", ROWS)

    with pytest.raises(mp.InvalidError, match="a computation that already has rows"):
        store.load("c", [{"key": "z", "state": 1}])

    assert rows_of(store) == EXPECTED


@pytest.mark.parametrize("name", ["", "dead_letters", "window_signals"])
def test_reserved_name_is_refused(store: mp.Store, name: str) -> None:
    with pytest.raises(mp.InvalidError, match="computation must be a name"):
        store.load(name, ROWS)


def test_read_only_store_is_refused(tmp_path: Path) -> None:
    with mp.Store.open(
        tmp_path / "pond",
        leases=lambda *_: mp.testing.MemoryLeases(mp.testing.MemoryRegistry(), ManualClock()),
    ):
        pass
    with (
        mp.Store.open(tmp_path / "pond", read_only=True) as store,
        pytest.raises(mp.InvalidError, match="read-only"),
    ):
        store.load("c", ROWS)


class Silent(mp.Computation):
    def process_record(self, context, record):
        pass


def test_running_computation_is_refused(store: mp.Store) -> None:
    """It has no rows yet, and the pipeline uses the same store object."""
    pipeline = mp.Pipeline("p")
    pipeline.inject("in", key="k", at="at").apply(Silent(), name="c")
    with mp.LocalRunner(store, progress=False).start(pipeline, stepping=True) as run:
        run.inject("in", [{"k": "a", "at": 1}])
        run.run_until_quiet()

        with pytest.raises(mp.ConflictError, match="a pipeline with this computation is running"):
            store.load("c", ROWS)

        run.inject("in", [{"k": "a", "at": 2}])
        run.run_until_quiet()
    store.load("c", ROWS)
    assert rows_of(store) == EXPECTED


def test_new_computation_is_loaded_beside_running_pipelines(store: mp.Store) -> None:
    pipeline = mp.Pipeline("p")
    pipeline.inject("in", key="k", at="at").apply(Silent(), name="c")
    with mp.LocalRunner(store, progress=False).start(pipeline, stepping=True) as run:
        for at in range(3):
            run.inject("in", [{"k": "a", "at": at}])
            run.run_until_quiet()
            store.load(f"new{at}", ROWS)
    assert all(rows_of(store, f"new{at}") == EXPECTED for at in range(3))


class Died(BaseException):
    """The process died here."""


@pytest.mark.parametrize("death", range(1, 13))
def test_killed_load_leaves_all_or_nothing(death: int) -> None:
    """It can be repeated."""
    disk, registry, clock = MemoryObjects(), mp.testing.MemoryRegistry(), ManualClock()
    reached: list[str] = []

    def die(name: str) -> None:
        reached.append(name)
        if len(reached) == death:
            raise Died(name)

    def opened(seed: int) -> mp.Store:
        return mp.Store.in_memory(objects=disk, registry=registry, clock=clock, rng=SeededRng(seed))

    rows = [{"key": f"{n:02d}", "state": n} for n in range(20)]
    has_died = False
    with opened(1) as store, listening(die):
        try:
            store.load("c", rows, intervals=3)
        except Died:
            has_died = True
    with opened(2) as store:
        found = rows_of(store)
        assert len(found) in (0, 20)
        assert has_died or len(found) == 20
        if not found:
            store.load("c", rows, intervals=3)
        assert {key: state for key, (state, *_) in rows_of(store).items()} == {
            row["key"]: str(row["state"]) for row in rows
        }
        assert len(store.snapshot().live_intervals("c")) == 3


def test_takeover_fences_load() -> None:
    disk, registry, clock = MemoryObjects(), mp.testing.MemoryRegistry(), ManualClock()
    rival = mp.testing.MemoryLeases(registry, clock, writer_id="rival")

    def take(stage: str, *_: object) -> None:
        if stage == "write":
            rival.take(Interval("c"), above=Sequencer(0))

    with mp.Store.in_memory(objects=disk, registry=registry, clock=clock, rng=SeededRng(1)) as store:
        with pytest.raises(mp.FencedError):
            store.load("c", ROWS, told=take)
        assert rows_of(store) == {}


def test_load_reports_rows_read_and_written(store: mp.Store) -> None:
    told: list[tuple[Any, ...]] = []
    store.load("c", ROWS, told=lambda *words: told.append(words))

    assert told == [("read", 3, None), ("write", 3, 3)]


class Newer(mp.Computation):
    state_version = 2

    def upgrade_state(self, state: Any, version: int) -> Any:
        assert version == 0
        return {"count": state}

    def process_record(self, context: mp.Context, record: mp.Record) -> None:
        context.state.set({"count": context.state.get({"count": 0})["count"] + 1})


def counted_after_a_load(store: mp.Store, state: Any, state_version: int) -> Any:
    store.load("c", [{"key": "a", "state": state}], state_version=state_version)
    pipeline = mp.Pipeline("p")
    pipeline.inject("in", key="k", at="at").apply(Newer(), name="c")
    with mp.LocalRunner(store, progress=False, rng=SeededRng(2), clock=ManualClock()).start(
        pipeline, stepping=True
    ) as run:
        run.inject("in", [{"k": "a", "at": 1}])
        run.step()
    return store.sql().sql("select state, state_version from c").fetchall()


@pytest.mark.parametrize(("state", "state_version"), [({"count": 5}, 2), (5, 0)])
def test_loaded_states_have_declared_version(store: mp.Store, state: Any, state_version: int) -> None:
    """States of today's code are not upgraded again."""
    assert counted_after_a_load(store, state, state_version) == [('{"count":6}', 2)]


def test_states_of_later_code_are_refused(store: mp.Store) -> None:
    with pytest.raises(mp.InvalidError, match="state_version"):
        counted_after_a_load(store, {"count": 5}, 3)
