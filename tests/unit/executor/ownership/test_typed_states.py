"""States with a schema in the store: beside text, under changed schemas, and through all that rewrites rows."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Final

import orjson
import pyarrow as pa
import pytest

from millpond.executor.computation.computation import Computation
from millpond.executor.local.runner import LocalRunner
from millpond.executor.maintenance.offline_upgrade import upgrade_offline
from millpond.executor.maintenance.policy import UpkeepPolicy
from millpond.executor.pipeline.pipeline import EnginePipeline
from millpond.executor.replay.repair import repair_store
from millpond.executor.replay.repair_plan import plan_rewind
from millpond.gc.compaction import (
    Compaction,
    CompactionPolicy,
    CompactionRules,
    compact_files,
)
from millpond.statestore.errors import DataError, FencedError, InvalidError
from millpond.statestore.history.verification import verify_store
from millpond.statestore.interval import Interval
from millpond.statestore.leases.memory import MemoryLeases, MemoryRegistry
from millpond.statestore.log import table as log_table
from millpond.statestore.log.log import Log
from millpond.statestore.log.snapshot import Snapshot, load
from millpond.statestore.objects.memory import MemoryObjects
from millpond.statestore.rows import files as row_files
from millpond.statestore.rows import row_format
from millpond.statestore.rows.codec import JsonCodec, MsgpackCodec
from millpond.statestore.rows.files import read_row_files
from millpond.statestore.rows.merge import merge_updates
from millpond.statestore.rows.record_ids import IdRetention
from millpond.statestore.rows.row import STATE_VERSION, Fence
from millpond.statestore.rows.state_schema import SchemaCodec, state_columns_among
from millpond.statestore.store import Store
from millpond.statestore.types import (
    TIME_MIN_US,
    CommitNumber,
    Sequencer,
    Superstep,
    TableVersion,
    WallTimeMicros,
)
from millpond.testing.fixtures.determinism import ManualClock, SeededRng

NUMBER: Final = pa.field("n", pa.int32())
TAGS: Final = pa.field("tags", pa.list_(pa.string()))
FIRST: Final = pa.schema([NUMBER, TAGS, ("at", pa.timestamp("us", "UTC"))])
WIDER: Final = pa.schema(
    [("n", pa.int64()), TAGS, ("at", pa.timestamp("us", "UTC")), ("sum", pa.decimal128(9, 2))]
)
FEWER: Final = pa.schema([NUMBER])
NOON: Final = datetime(2026, 1, 1, 12, tzinfo=UTC)


class Tally(Computation):
    """A count of the key's records and their tags; works with and without a schema."""

    def process_record(self, context, record):
        state = context.state.get({})
        state["n"] = (state.get("n") or 0) + 1
        if "at" in state or record.value.get("at"):
            state["at"] = NOON
        if record.value.get("tag"):
            state["tags"] = [*(state.get("tags") or []), record.value["tag"]]
        if record.value.get("delete"):
            context.state.delete()
        else:
            context.state.set(state)


class Next(Tally):
    state_version = 1

    def upgrade_state(self, state: Any, version: int) -> Any:
        return {"n": (state["n"] if isinstance(state, dict) else state) + 100}


class Number(Computation):
    """A state that is no dict."""

    def process_record(self, context, record):
        context.state.set(context.state.get(0) + 1)


class Pond:
    """A store in memory, and pipelines that run on it in turn."""

    def __init__(self, **runner: Any) -> None:
        self.objects, self.registry = MemoryObjects(), MemoryRegistry()
        self.clock, self.opened, self.runner = ManualClock(), 0, runner

    def store(self) -> Store:
        self.opened += 1
        return Store.in_memory(
            objects=self.objects,
            registry=self.registry,
            clock=self.clock,
            rng=SeededRng(f"s{self.opened}"),
        )

    @staticmethod
    def pipeline(computation: Computation, pipeline: str = "p", name: str = "c", **options: Any) -> Any:
        graph = EnginePipeline(pipeline, drop=options.pop("drop", ()))
        graph.inject("in", key="k", at="t", id="id").apply(computation, name=name, **options)
        return graph

    def start(self, graph: EnginePipeline) -> Any:
        settings = {"intervals": 1, **self.runner}
        store = self.store()
        rng = SeededRng(f"r{self.opened}")
        runner = LocalRunner(store, clock=self.clock, rng=rng, progress=False, **settings)
        return runner.start(graph, stepping=True)

    def run(
        self, computation: Computation, *keys: str, rows: Sequence[dict[str, Any]] = (), **options: Any
    ) -> Snapshot:
        with self.start(self.pipeline(computation, **options)) as run:
            inject(run, *keys, rows=rows)
        return self.snapshot()

    def snapshot(self) -> Snapshot:
        return load(Log(self.objects))

    def states(self, name: str = "c") -> dict[str, Any]:
        table = self.store().rows_view(name).to_arrow()
        return {
            row["key"]: None if row["state"] is None else JsonCodec().decode(row["state"])
            for row in table.to_pylist()
        }

    def columns(self) -> list[str]:
        metadata = self.snapshot().metadata
        assert metadata is not None
        return state_columns_among([one["name"] for one in orjson.loads(metadata.schema_string)["fields"]])

    def stored_in(self, name: str = "c") -> dict[str, str]:
        """Return the column that has each key's state."""
        paths = [file.path for file in self.snapshot().files_in(name)]
        merged = merge_updates(read_row_files(self.objects, paths, keeps_cells=True))
        found: dict[str, str] = {}
        for column in ("state", "state_bytes", *state_columns_among(merged.column_names)):
            keys = merged.column("key").filter(merged.column(column).is_valid()).to_pylist()
            assert not found.keys() & set(keys), "a state is in one column"
            found |= dict.fromkeys(keys, column)
        return found


_NUMBERS = iter(range(1, 1 << 30))


def inject(run: Any, *keys: str, rows: Sequence[dict[str, Any]] = ()) -> None:
    given = [*({"k": key} for key in keys), *rows]
    for row in given:
        run.inject("in", [{"t": 1, "id": f"{next(_NUMBERS)}", **row}])
        run.run_until_quiet()
    run.run_until_quiet()


def column_of(schema: pa.Schema) -> str:
    return str(SchemaCodec(schema).column.name)


# ------------------------------------------------------------- schemas that come, change and go


def test_rows_of_text_move_to_the_column_as_they_are_written():
    pond = Pond()
    pond.run(Tally(), "a", "b", rows=[{"k": "a", "tag": "x", "at": True}])
    assert pond.columns() == []
    pond.run(Tally(), "a", "c", state=FIRST)

    assert pond.columns() == [column_of(FIRST)]
    assert pond.stored_in() == {"a": column_of(FIRST), "b": "state", "c": column_of(FIRST)}
    assert pond.states() == {
        "a": {"n": 3, "tags": ["x"], "at": NOON},
        "b": {"n": 1},
        "c": {"n": 1, "tags": None, "at": None},
    }
    assert verify_store(pond.objects).findings == ()


def test_code_without_a_schema_goes_on_with_typed_rows():
    pond = Pond()
    pond.run(Tally(), "a", "b", state=FIRST)
    pond.run(Tally(), "a")

    assert pond.stored_in() == {"a": "state", "b": column_of(FIRST)}
    assert {key: state["n"] for key, state in pond.states().items()} == {"a": 2, "b": 1}
    pond.run(Tally(), "a", "b", state=FIRST)
    assert {key: state["n"] for key, state in pond.states().items()} == {"a": 3, "b": 2}


def test_reading_a_row_moves_nothing():
    class Look(Computation):
        def process_record(self, context, record):
            context.state.get()

    pond = Pond()
    pond.run(Tally(), "a")
    pond.run(Look(), "a", state=FIRST)
    assert pond.stored_in() == {"a": "state"}


@pytest.mark.parametrize("schema", [WIDER, FEWER, pa.schema([*FIRST, ("new", pa.bool_())])])
def test_fields_come_and_go_and_numbers_become_wider(schema: pa.Schema):
    pond = Pond()
    pond.run(Tally(), "a", "b", rows=[{"k": "a", "tag": "x"}], state=FIRST)
    code = Tally() if "tags" in schema.names else Counting()
    pond.run(code, "a", state=schema)

    assert pond.columns() == [column_of(FIRST), column_of(schema)]
    assert pond.stored_in() == {"a": column_of(schema), "b": column_of(FIRST)}
    states = pond.states()
    assert {key: state["n"] for key, state in states.items()} == {"a": 3, "b": 1}
    assert list(states["a"]) == schema.names


class Counting(Computation):
    def process_record(self, context, record):
        context.state.set({"n": (context.state.get({}).get("n") or 0) + 1})


def test_fields_of_a_nested_struct_come_and_go():
    """Text and cells of the former schema are read alike."""

    class Nested(Computation):
        def process_record(self, context, record):
            state = context.state.get({"in": [{}]})
            state["in"][0]["x"] = (state["in"][0].get("x") or 0) + 1
            context.state.set(state)

    def schema(*names: str) -> pa.Schema:
        return pa.schema([("in", pa.list_(pa.struct([(name, pa.int64()) for name in names])))])

    pond = Pond()
    pond.run(Nested(), "a", state=schema("x", "y"))
    pond.run(Nested(), "a", state=schema("z", "x"))
    assert pond.states() == {"a": {"in": [{"z": None, "x": 2}]}}


def test_field_of_another_type_is_refused_before_anything_runs():
    pond = Pond()
    pond.run(Tally(), "a", state=FIRST)
    with pytest.raises(InvalidError, match=r"another schema.*state=.n. "):
        pond.run(Tally(), "a", state=pa.schema([("n", pa.string())]))
    with pytest.raises(InvalidError, match="another schema"):
        pond.run(Tally(), "a", state=pa.schema([("n", pa.int16())]))
    assert pond.states()["a"]["n"] == 1


def test_text_that_does_not_fit_stops_at_its_key():
    pond = Pond()
    pond.run(Number(), "a")
    with pytest.raises((DataError, InvalidError), match="raise state_version"):
        pond.run(Tally(), "a", state=FIRST, on_error="stop")


def test_another_codec_is_refused_without_a_version():
    packed = Tally()
    packed.codec = MsgpackCodec()
    pond = Pond()
    pond.run(packed, "a")
    with pytest.raises(InvalidError, match="another codec"):
        pond.run(Tally(), "a", state=FIRST)


# ------------------------------------------------------------- versions


@pytest.mark.parametrize("offline", [False, True])
@pytest.mark.parametrize("cache_mib", [0, 64])
@pytest.mark.parametrize(
    ("before", "after"),
    [(None, FIRST), (FIRST, FIRST), (FIRST, WIDER), (FIRST, FEWER), (FIRST, None), (FEWER, FIRST)],
)
def test_upgrade_changes_states_of_text_and_of_any_schema(
    before: pa.Schema | None, after: pa.Schema | None, cache_mib: int, offline: bool
):
    former = {} if before is None else {"state": before}
    now = {} if after is None else {"state": after}
    pond = Pond(cache_mib=cache_mib)
    pond.run(Counting(), "a", "b", **former)
    if offline:
        graph = pond.pipeline(Next(), **now).check()
        (done,) = upgrade_offline(pond.store(), graph, pond.clock, SeededRng("u"))
        assert (done.rows, done.current) == (2, 0)
        expected = "state" if after is None else column_of(after)
        assert pond.stored_in() == {"a": expected, "b": expected}
    pond.run(Upgraded(), "a", **now)

    states = pond.states()
    assert states["a"]["n"] == 102
    assert states["b"]["n"] == (101 if offline else 1)
    pond.run(Upgraded(), "a", "b", **now)
    assert {key: state["n"] for key, state in pond.states().items()} == {"a": 103, "b": 102}
    assert verify_store(pond.objects).findings == ()


class Upgraded(Counting):
    state_version = 1
    upgrade_state = Next.upgrade_state


def test_state_that_is_no_dict_is_upgraded_to_a_schema():
    pond = Pond()
    pond.run(Number(), "a")
    pond.run(Upgraded(), "a", state=FEWER)
    assert pond.states() == {"a": {"n": 102}}


def test_messagepack_is_upgraded_to_a_schema_and_back():
    class Packed(Counting):
        codec = MsgpackCodec()

    class ToColumns(Upgraded):
        codecs = {0: MsgpackCodec()}  # noqa: RUF012 - as in user code

    class Back(Counting):
        codec = MsgpackCodec()
        state_version = 2
        codecs = {0: MsgpackCodec(), 1: JsonCodec()}  # noqa: RUF012

        def upgrade_state(self, state: Any, version: int) -> Any:
            return state

    pond = Pond()
    pond.run(Packed(), "a", "b")
    pond.run(ToColumns(), "a", state=FEWER)
    assert pond.stored_in() == {"a": column_of(FEWER), "b": "state_bytes"}
    pond.run(Back(), "a", "b")
    assert pond.stored_in() == {"a": "state_bytes", "b": "state_bytes"}
    table = pond.store().rows_view("c").to_arrow()
    assert [MsgpackCodec().decode(one) for one in table.column("state_bytes").to_pylist()] == [
        {"n": 103},
        {"n": 2},
    ]


def test_rewind_reverts_schema_and_version():
    pond = Pond()
    before = pond.run(Counting(), "a", "b")
    pond.run(Counting(), "a", state=FEWER)
    middle = pond.run(Counting(), "a", state=pa.schema([NUMBER, TAGS]))
    pond.run(Upgraded(), "a", "b", state=FEWER)
    rewind(pond, middle.version)
    assert pond.states() == {"a": {"n": 3, "tags": None}, "b": {"n": 1}}
    pond.run(Counting(), "a", "b", state=pa.schema([NUMBER, TAGS]))
    assert {key: state["n"] for key, state in pond.states().items()} == {"a": 4, "b": 2}

    rewind(pond, before.version)
    assert pond.states() == {"a": {"n": 1}, "b": {"n": 1}}
    pond.run(Counting(), "a", state=FEWER)
    assert pond.states() == {"a": {"n": 2}, "b": {"n": 1}}
    assert column_of(FEWER) in pond.columns()
    assert verify_store(pond.objects).findings == ()


def rewind(pond: Pond, version: TableVersion) -> None:
    leases = MemoryLeases(pond.registry, pond.clock, writer_id=f"w{pond.opened}")
    repair_store(pond.objects, plan_rewind(pond.objects, version, None), leases, pond.clock, SeededRng(9))


# ------------------------------------------------------------- compaction


ALL = CompactionRules(
    pending_from=Superstep(0), ids=IdRetention.of(TIME_MIN_US, WallTimeMicros(0), slack_us=0)
)


def mixed_pond(keys: int = 30) -> Pond:
    """Make a store with files of text, of two schemas and of text again, and keys in any of them."""
    pond = Pond(upkeep=UpkeepPolicy(compaction=CompactionPolicy(files_max=10_000, fan_in=10_000)))
    names = [f"k{number:03d}" for number in range(keys)]
    steps: list[dict[str, Any]] = [{}, {"state": FIRST}, {"state": WIDER}, {}, {"state": FIRST}]
    for number, options in enumerate(steps):
        rows = [
            {"k": key, "tag": f"t{number}" * 20}
            for place, key in enumerate(names)
            if place % len(steps) >= number or place % 7 == number
        ]
        with pond.start(pond.pipeline(Tally(), **options)) as run:
            run.inject("in", [{"t": 1, "id": f"{next(_NUMBERS)}", **row} for row in rows])
            run.run_until_quiet()
            run.inject("in", [{"t": 1, "id": f"{next(_NUMBERS)}", "k": names[number], "delete": True}])
            run.run_until_quiet()
    return pond


@pytest.mark.parametrize("memory_bytes_max", [1 << 30, 0])
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("batch_rows", [1, 64])
def test_compaction_of_text_and_two_schemas_changes_no_state(
    monkeypatch: pytest.MonkeyPatch, memory_bytes_max: int, paged: bool, batch_rows: int
):
    if paged:
        monkeypatch.setattr(row_format, "PAGED_BYTES_MIN", 0)
        monkeypatch.setattr(row_files, "COMPACTED_PAGED_BYTES_MIN", 0)
        monkeypatch.setattr(row_files, "LARGE_BYTES", 0)
    monkeypatch.setattr(row_files, "_BATCH_ROWS_MIN", batch_rows)
    pond = mixed_pond()
    snapshot = pond.snapshot()
    files = snapshot.files_in("c")
    former = merge_updates(read_row_files(pond.objects, [file.path for file in files]))
    for count in (2, 3, len(files)):
        for chosen in (files[:count], files[-count:]):
            compacted = compact_files(
                pond.objects,
                Compaction(interval=Interval("c"), files=chosen, is_complete=False),
                ALL,
                fence=Fence(Sequencer(1 << 30), CommitNumber(1)),
                token=f"{next(_NUMBERS):032x}",
                memory_bytes_max=memory_bytes_max,
            )
            assert compacted.file is not None
            left = [file.path for file in files if file not in chosen]
            place = 0 if chosen[0] is files[0] else len(left)
            paths = [*left[:place], compacted.file.path, *left[place:]]
            found = read_row_files(pond.objects, paths)
            assert comparable(merge_updates(found)) == comparable(former)
            names = {field.name for field in compacted.file.typed_columns}
            assert names <= {column_of(FIRST), column_of(WIDER)}
            for key in ("k003", "k017", "k029", "none"):
                one = read_row_files(pond.objects, paths, keys=[key], large=set(paths))
                assert comparable(merge_updates(one)) == [
                    row for row in comparable(former) if row["key"] == key
                ]


def comparable(table: pa.Table) -> list[dict[str, Any]]:
    rows = table.to_pylist()
    for row in rows:
        row["state"] = None if row["state"] is None else JsonCodec().decode(row["state"])
    return rows


@pytest.mark.parametrize("cache_mib", [0, 64])
@pytest.mark.parametrize("memory_bytes_max", [1 << 30, 0])
def test_run_that_compacts_and_evicts_counts_on(cache_mib: int, memory_bytes_max: int):
    policy = CompactionPolicy(fan_in=2, files_max=3, memory_bytes_max=memory_bytes_max)
    pond = Pond(cache_mib=cache_mib, upkeep=UpkeepPolicy(compaction=policy, collect_every=2))
    counts: dict[str, int] = {}
    for number in range(12):
        options = [{}, {"state": FIRST}, {"state": WIDER}][number % 3 if number < 6 else 2]
        keys = [key for place, key in enumerate("abcdefgh") if (place + number) % 3]
        pond.run(Tally(), *keys, **options)
        for key in keys:
            counts[key] = counts.get(key, 0) + 1
        assert {key: state["n"] for key, state in pond.states().items()} == counts
    assert verify_store(pond.objects).findings == ()


# ------------------------------------------------------------- several computations, writers and names


def two(pipeline: str, first: pa.Schema | None, second: pa.Schema | None, **options: Any) -> EnginePipeline:
    graph = EnginePipeline(pipeline)
    stream = graph.inject("in", key="k", at="t", id="id")
    for name, schema in ((f"{pipeline}1", first), (f"{pipeline}2", second)):
        stream.apply(Counting(), name=name, **({} if schema is None else {"state": schema}), **options)
    return graph


@pytest.mark.parametrize("second", [None, FEWER, WIDER])
def test_computations_of_a_superstep_have_one_schema_or_two(second: pa.Schema | None):
    pond = Pond(intervals=2)
    with pond.start(two("p", FEWER, second)) as run:
        inject(run, "a", "b", "a")

    schemas = {column_of(schema) for schema in (FEWER, second) if schema is not None}
    assert set(pond.columns()) == schemas
    for name in ("p1", "p2"):
        assert {key: state["n"] for key, state in pond.states(name).items()} == {"a": 2, "b": 1}
    assert set(pond.stored_in("p2").values()) == {"state" if second is None else column_of(second)}


def test_writers_that_add_columns_at_once_both_commit():
    """Each loses the race against the other's columns once, and commits again on top of them."""
    pond = Pond()
    with pond.start(two("p", FEWER, None)) as one, pond.start(two("q", WIDER, FIRST)) as other:
        one.inject("in", [{"k": "a", "t": 1, "id": "1"}])
        other.inject("in", [{"k": "a", "t": 1, "id": "1"}])
        for _ in range(4):
            one.step()
            other.step()
        inject(one, "a")
        inject(other, "a", "b")

    assert set(pond.columns()) == {column_of(schema) for schema in (FEWER, WIDER, FIRST)}
    assert {name: pond.states(name)["a"]["n"] for name in ("p1", "p2", "q1", "q2")} == {
        "p1": 2,
        "p2": 2,
        "q1": 2,
        "q2": 2,
    }
    assert verify_store(pond.objects).findings == ()


def test_table_without_the_column_of_versions_gets_both(monkeypatch: pytest.MonkeyPatch):
    pond = Pond()
    with monkeypatch.context() as patch:
        for name in ("ROW_SCHEMA", "_ROWS_SCHEMA"):
            schema = getattr(log_table, name)
            patch.setattr(log_table, name, schema.remove(schema.get_field_index(STATE_VERSION)))
        pond.run(Counting(), "a")
    pond.run(Counting(), "a", state=FEWER)
    assert pond.states() == {"a": {"n": 2}}
    pond.run(Upgraded(), "a", state=FIRST)
    assert pond.states()["a"]["n"] == 103
    assert pond.columns() == [column_of(FEWER), column_of(FIRST)]


def test_reused_name_may_have_any_schema():
    pond = Pond()
    pond.run(Counting(), "a", state=FEWER)
    pond.run(Counting(), "a", name="d", drop=("c",))
    pond.run(Counting(), "a", drop=("d",), state=pa.schema([("n", pa.float64())]))
    assert pond.states() == {"a": {"n": 1.0}}


@pytest.mark.parametrize("schema", [FEWER, WIDER, None])
def test_renamed_computation_keeps_its_typed_rows(schema: pa.Schema | None):
    """Every reader finds the columns, also under a name whose code has no schema."""
    pond = Pond()
    pond.run(Counting(), "a", "b", state=FEWER)
    options = {} if schema is None else {"state": schema}
    pond.run(Counting(), "a", name="new", renamed_from="c", **options)

    assert {key: state["n"] for key, state in pond.states("new").items()} == {"a": 2, "b": 1}
    assert column_of(FEWER) in pond.store().rows_view("new").stored_columns


def test_view_knows_the_columns_of_typed_rows_that_code_without_a_schema_took_over():
    pond = Pond()
    pond.run(Counting(), "a", "b", state=FEWER)
    pond.run(Counting(), "a")
    assert column_of(FEWER) in pond.store().rows_view("c").stored_columns


def test_upgraded_offline_rows_are_known_to_views():
    pond = Pond()
    pond.run(Counting(), "a", "b")
    upgrade_offline(pond.store(), pond.pipeline(Next(), state=FEWER).check(), pond.clock, SeededRng("u"))
    view = pond.store().rows_view("c")
    assert view.stored_columns == (column_of(FEWER),)
    assert view.to_arrow().column("n").to_pylist() == [101, 101]


def test_typed_columns_are_those_of_the_newest_code():
    pond = Pond()
    pond.run(Counting(), "a", "b", state=FIRST)
    pond.run(Counting(), "a", state=WIDER)
    table = pond.store().rows_view("c").to_arrow()
    assert table.schema.field("n").type == pa.int64()
    assert table.column("n").to_pylist() == [2, 1]
    assert table.schema.field("sum").type == pa.decimal128(9, 2)
    shown = pond.store().rows_view("c").to_duckdb().project("key, n, state ->> 'n', sum").fetchall()
    assert sorted(shown) == [("a", 2, "2", None), ("b", 1, "1", None)]


# ------------------------------------------------------------- restarts, lost commits, owners


@pytest.mark.parametrize("cache_mib", [0, 64])
def test_second_owner_takes_over_typed_rows(cache_mib: int):
    pond = Pond(cache_mib=cache_mib)
    first = pond.start(pond.pipeline(Counting(), state=FEWER))
    inject(first, "a", "b", "a")
    with pond.start(pond.pipeline(Counting(), state=FIRST)) as second:
        inject(second, "a", "b")
        with pytest.raises(FencedError):
            inject(first, "a")
    assert {key: state["n"] for key, state in pond.states().items()} == {"a": 3, "b": 2}


class Forward(Computation):
    """Counts, and passes each number on."""

    def process_record(self, context, record):
        count = (context.state.get({}).get("n") or 0) + 1
        context.state.set({"n": count})
        context.produce("out", {"k": record.key, "n": count})


class Sum(Computation):
    def process_record(self, context, record):
        context.state.set({"n": (context.state.get({}).get("n") or 0) + record.value["n"]})


@pytest.mark.parametrize("mode", ["strong", "weak"])
@pytest.mark.parametrize("cache_mib", [0, 64])
def test_productions_of_typed_rows_arrive_once(mode: str, cache_mib: int):
    pond = Pond(cache_mib=cache_mib)

    def graph(schema: pa.Schema) -> EnginePipeline:
        made = EnginePipeline("p")
        source = made.inject("in", key="k", at="t", id="id")
        source.apply(Forward(), name="c", produces=["out"], productions=mode, state=schema)
        made.stream("out").apply(Sum(), name="sums", state=FEWER)
        return made

    for schema in (FEWER, WIDER):
        with pond.start(graph(schema)) as run:
            run.inject("in", [{"k": key, "t": 1, "id": f"{next(_NUMBERS)}"} for key in "abab"])
            run.step()
    with pond.start(graph(WIDER)) as run:
        run.run_until_quiet()
    assert pond.states("sums") == {"a": {"n": 10}, "b": {"n": 10}}


def test_equal_state_writes_no_row():
    """NaN at any depth is no change."""

    class Same(Computation):
        def process_record(self, context, record):
            state = context.state.get({"x": float("nan"), "in": {"y": [float("nan")]}})
            context.state.set(state)

    kind = pa.schema([("x", pa.float64()), ("in", pa.struct([("y", pa.list_(pa.float32()))]))])
    pond = Pond()
    graph = EnginePipeline("p")
    graph.inject("in", key="k", at="t").apply(Same(), name="c", state=kind)
    counts = []
    for _ in range(2):
        with pond.start(graph) as run:
            run.inject("in", [{"k": "a", "t": 1}])
            run.run_until_quiet()
        counts.append(len(pond.snapshot().files_in("c")))
    assert counts == [1, 1]


def test_fields_that_are_called_like_marks_of_text_are_shown():
    class Marks(Computation):
        def process_record(self, context, record):
            context.state.set({"$types": 1, "$value": 2, "day": NOON.date()})

    pond = Pond()
    pond.run(
        Marks(), "a", state=pa.schema([("$types", pa.int64()), ("$value", pa.int64()), ("day", pa.date32())])
    )
    (row,) = pond.store().rows_view("c").to_arrow().to_pylist()

    assert (row["$types"], row["$value"], row["day"]) == (1, 2, NOON.date())


def test_floats_of_fewer_bits_need_another_version():
    pond = Pond()
    pond.run(Counting(), "a", state=pa.schema([("n", pa.float64())]))

    with pytest.raises(InvalidError, match="another schema"):
        pond.run(Counting(), "a", state=pa.schema([("n", pa.float32())]))
