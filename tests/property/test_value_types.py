"""Arrow tables of every type through chains of two steps, in any cuts, with restarts: what comes out went in.

Fourteen kinds of steps keep or pass on a row: ``map``, ``union``, ``with_timestamps``, a `Computation` that produces
(strongly or weakly), one that keeps rows in its state until a timer, one whose records wait for the order of time,
windows combined by ``ToList`` and by ``LastN``, ``process_windows``, ``co_group``, panes that are retracted, dead
letters that are retried, Spark's ``StatefulProcessor``, and a sink. Where Delta has all types of a table, four more
declare its schema, of what they produce (strongly, weakly or at another time) or of their state. Input comes as a table or as its changes.

The last step keeps each row as a pickle, which no codec of Millpond's can change, and Arrow says what the row was. For
combined values DuckDB is the other opinion.
"""

from __future__ import annotations

import base64
import datetime as dt
import itertools
import json
import pickle
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from pyspark.sql import Row
from pyspark.sql.streaming import StatefulProcessor

import millpond as mp
from millpond.statestore.leases.memory import MemoryRegistry
from millpond.statestore.log.action import delta_schema
from millpond.statestore.objects.memory import MemoryObjects
from millpond.testing.fixtures.determinism import ManualClock, SeededRng
from tests.fixtures.both_runners import plays
from tests.unit.statestore.rows.test_value_text import same

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.slow

Step = Callable[[mp.DataflowStream, str, "Chain"], mp.DataflowStream]

DAY: Final = 86_400_000_000
WINDOW: Final = mp.FixedWindows("1d")
LAST: Final = dt.datetime(9999, 12, 31, 23, 59, 59, 999_999)  # noqa: DTZ001 - in Arrow the type has the zone
FIRST: Final = dt.datetime(1, 1, 1)  # noqa: DTZ001


# ---------------------------------------------------------------------------- tables


def whole(bits: int, *, signed: bool = True) -> st.SearchStrategy[int]:
    least, most = (-(1 << bits - 1), (1 << bits - 1) - 1) if signed else (0, (1 << bits) - 1)
    return st.sampled_from([least, most]) | st.integers(least, most)


def decimals(digits: int, scale: int) -> st.SearchStrategy[Decimal]:
    most = 10**digits - 1
    numbers = st.sampled_from([most, -most, 0]) | st.integers(-most, most)
    return numbers.map(
        lambda number: Decimal(number).scaleb(-scale) if digits <= 28 else _scaled(number, scale)
    )


def _scaled(number: int, scale: int) -> Decimal:
    sign, digits, _ = Decimal(number).as_tuple()
    return Decimal((sign, digits, -scale))


def durations(unit: dt.timedelta) -> st.SearchStrategy[int]:
    least, most = max(-(1 << 63), dt.timedelta.min // unit), min((1 << 63) - 1, dt.timedelta.max // unit)
    return st.sampled_from([least, most]) | st.integers(least, most)


TEXTS = st.text(max_size=4) | st.sampled_from(["", "$types", "$value", "nan", "~/0", "\x00", "\U0010ffff"])
BLOBS = st.binary(max_size=4)
FLOATS = st.floats() | st.sampled_from([float("nan"), float("inf"), -float("inf"), -0.0, 5e-324])
TIMES = st.sampled_from([FIRST, LAST]) | st.datetimes()
# A zone may push the first and last day out of Python's years.
INSIDE = st.datetimes(FIRST + dt.timedelta(days=1), LAST - dt.timedelta(days=1))
DAYS = st.sampled_from([dt.date.min, dt.date.max]) | st.dates()
SECOND = dt.timedelta(seconds=1)
MICROSECOND = dt.timedelta(microseconds=1)

# Of Spark, and in the schemas of its processors.
SHARED: dict[pa.DataType, st.SearchStrategy[Any]] = {
    pa.bool_(): st.booleans(),
    pa.int8(): whole(8),
    pa.int16(): whole(16),
    pa.int32(): whole(32),
    pa.int64(): whole(64),
    pa.float32(): st.floats(width=32),
    pa.float64(): FLOATS,
    pa.decimal128(9, 2): decimals(9, 2),
    pa.decimal128(38, 0): decimals(38, 0),
    pa.decimal128(38, 38): decimals(38, 38),
    pa.string(): TEXTS,
    pa.binary(): BLOBS,
    pa.date32(): DAYS,
    pa.timestamp("us", "UTC"): INSIDE,
    pa.timestamp("us", "Europe/Oslo"): INSIDE,
    pa.timestamp("us"): TIMES,
}
OTHERS: dict[pa.DataType, st.SearchStrategy[Any]] = {
    pa.null(): st.none(),
    pa.uint8(): whole(8, signed=False),
    pa.uint16(): whole(16, signed=False),
    pa.uint32(): whole(32, signed=False),
    pa.uint64(): whole(64, signed=False),
    pa.float16(): st.floats(width=16),
    pa.decimal32(9, 4): decimals(9, 4),
    pa.decimal64(18, 0): decimals(18, 0),
    pa.decimal256(76, 10): decimals(76, 10),
    pa.large_string(): TEXTS,
    pa.string_view(): TEXTS,
    pa.dictionary(pa.int32(), pa.string()): TEXTS,
    pa.large_binary(): BLOBS,
    pa.binary_view(): BLOBS,
    pa.binary(2): st.binary(min_size=2, max_size=2),
    pa.date64(): DAYS,
    pa.time32("s"): st.integers(0, 86_399),
    pa.time32("ms"): st.integers(0, 86_399_999),
    pa.time64("us"): st.times() | st.sampled_from([dt.time.min, dt.time.max]),
    pa.timestamp("us", "UTC"): TIMES,
    pa.timestamp("s"): TIMES.map(lambda time: time.replace(microsecond=0)),
    pa.timestamp("ms", "-03:30"): INSIDE.map(lambda time: time.replace(microsecond=7_000)),
    pa.duration("s"): durations(SECOND),
    pa.duration("ms"): durations(SECOND / 1_000),
    pa.duration("us"): durations(MICROSECOND),
}
# Arrow makes no lists of these out of Python's values.
LONE: Types = {
    pa.uuid(): st.uuids().map(lambda one: one.bytes),
    pa.run_end_encoded(pa.int32(), pa.string()): TEXTS,
}
ON_SPARK: Final[Types] = SHARED | {kind: OTHERS[kind] for kind in (pa.null(), pa.duration("us"))}
KEYS: Final = (pa.string(), pa.int64(), pa.date32(), pa.decimal128(9, 2), pa.binary(), pa.bool_())

Types = dict[pa.DataType, st.SearchStrategy[Any]]
Typed = tuple[pa.DataType, st.SearchStrategy[Any]]


def nested(draw: st.DrawFn, types: Types, depth: int) -> Typed:
    """Draw a type, nested at most ``depth`` times, and the strategy of its values, which may be null."""
    kind = draw(st.sampled_from(["plain", "plain", "list", "map", "struct"])) if depth else "plain"
    if kind == "plain":
        chosen = draw(st.sampled_from(list(types)))
        return chosen, st.none() | types[chosen]
    inner, values = nested(draw, types, depth - 1)
    if kind == "list":
        lists = [pa.list_] if types is SHARED else [pa.list_, pa.large_list, pa.list_view, _pair]
        kind = draw(st.sampled_from(lists))(inner)
        least, most = (2, 2) if pa.types.is_fixed_size_list(kind) else (0, 3)
        return kind, st.none() | st.lists(values, min_size=least, max_size=most)
    if kind == "map":
        key = draw(st.sampled_from(KEYS))
        pairs = st.dictionaries(types.get(key, SHARED[key]), values, max_size=3)
        return pa.map_(key, inner), st.none() | pairs.map(lambda some: list(some.items()))
    other, others = nested(draw, types, depth - 1)
    names = draw(st.sampled_from([("a", "b"), ("$types", "$value"), ("a/b", "~")]))
    structs = st.tuples(values, others).map(lambda parts: dict(zip(names, parts, strict=True)))
    return pa.struct(list(zip(names, (inner, other), strict=True))), st.none() | structs


def _pair(inner: pa.DataType) -> pa.DataType:
    return pa.list_(inner, 2)


@st.composite
def tables(draw: st.DrawFn, types: Types, *, has_all: bool = False) -> pa.Table:
    """Draw rows of a few keys, each with a number, a time and columns of some types, nested or not."""
    rows = draw(st.integers(1, 6))
    columns = {
        "k": pa.array(draw(st.lists(st.sampled_from("ab"), min_size=rows, max_size=rows))),
        "n": pa.array(range(rows), pa.int64()),
        "t": pa.array(draw(st.lists(st.integers(0, 9), min_size=rows, max_size=rows)), pa.int64()),
    }
    typed = [nested(draw, types, 2) for _ in range(draw(st.integers(1, 3)))]
    if types.keys() >= OTHERS.keys():
        typed += [(kind, st.none() | LONE[kind]) for kind in draw(st.sets(st.sampled_from([*LONE])))]
    if has_all:
        typed += [(kind, st.none() | values) for kind, values in types.items()]
    for number, (kind, values) in enumerate(typed):
        cells = draw(st.lists(values, min_size=rows, max_size=rows))
        columns[f"v{number}"] = pa.array(cells, kind)
    return pa.table(columns)


# ---------------------------------------------------------------------------- steps


@dataclass
class Chain:
    """Where a chain's steps find what they need."""

    folder: Path
    schema: pa.Schema
    sunk: set[str] = field(default_factory=set)

    @property
    def mended(self) -> Path:
        return self.folder / "mended"

    def mend(self) -> None:
        self.folder.mkdir(exist_ok=True)
        self.mended.touch()


def inner(record: mp.Record) -> Any:
    value = record.value
    return value["value"] if mp.windows.WindowedValue.is_envelope(value) else value


def itself(value: Any) -> Any:
    return value


class Forward(mp.Computation):
    def process_record(self, context: mp.Context, record: mp.Record) -> None:
        context.produce(context.streams[0], inner(record))


class Keep(mp.Computation):
    """Keeps a key's rows until a timer produces them from the state."""

    def process_record(self, context: mp.Context, record: mp.Record) -> None:
        context.state.set({"rows": [*context.state.get({"rows": []})["rows"], inner(record)]})
        context.set_timer(record.at + 5, tag="show")

    def process_timer(self, context: mp.Context, timer: mp.Timer) -> None:
        for row in context.state.get()["rows"]:
            context.produce(context.streams[0], row)
        context.state.delete()


class Fragile(Forward):
    """Fails until the file is there."""

    def __init__(self, mended: Path) -> None:
        self.mended = str(mended)

    def process_record(self, context: mp.Context, record: mp.Record) -> None:
        if not Path(self.mended).exists():
            raise ValueError("not mended")
        super().process_record(context, record)


class Echo(StatefulProcessor):
    """Yields each row as it came."""

    def init(self, handle: Any) -> None:
        """Declare nothing."""

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:  # noqa: N802, N803
        yield from rows

    def close(self) -> None:
        """Hold nothing."""


class Seen(mp.Computation):
    """Keeps the rows of a key as pickles."""

    def process_record(self, context: mp.Context, record: mp.Record) -> None:
        pickled = base64.b64encode(pickle.dumps(inner(record))).decode()
        context.state.set([*context.state.get([]), pickled])


def rows_of(stream: mp.DataflowStream, name: str) -> mp.DataflowStream:
    return stream.flat_map(itself, name=f"{name}_rows")


def union(stream: mp.DataflowStream, name: str, chain: Chain) -> mp.DataflowStream:
    """Even rows go one way, odd ones the other."""
    halves = [
        stream.flat_map(lambda row, odd=odd: [row] if row["n"] % 2 == odd else [], name=f"{name}_{odd}")
        for odd in (0, 1)
    ]
    return halves[0].union(halves[1], name=name)


def co_group(stream: mp.DataflowStream, name: str, chain: Chain) -> mp.DataflowStream:
    """Each row comes on both sides."""
    other = stream.map(itself, name=f"{name}_other")
    strategy = mp.windows.WindowingStrategy(window_fn=WINDOW)
    joined = mp.co_group({"one": stream, "other": other}, strategy, name=name)
    return joined.flat_map(_checked_sides, name=f"{name}_rows")


def _checked_sides(sides: dict[str, list[Any]]) -> list[Any]:
    one, other = (sorted(rows, key=lambda row: row["n"]) for rows in sides.values())
    return one if same(one, other) else []


def retract(stream: mp.DataflowStream, name: str, chain: Chain) -> mp.DataflowStream:
    """Each row of a key retracts and repeats the ones before it."""
    panes = stream.window(
        WINDOW, trigger=mp.Repeatedly(mp.AfterCount(1)), accumulation="retracting"
    ).process_windows(lambda rows, window, pane: rows, name=f"{name}_panes")
    return rows_of(panes.window(WINDOW).combine(mp.ToList(), name=name), name)


def processor(stream: mp.DataflowStream, name: str, chain: Chain) -> mp.DataflowStream:
    from pyspark.sql.pandas.types import from_arrow_schema

    # A pane's envelope is no row of the schema.
    plain = stream.apply(Forward(), name=f"{name}_plain")
    schema = from_arrow_schema(chain.schema)
    return plain.apply(mp.spark.TransformWithState(Echo(), schema), name=name)


def sink(stream: mp.DataflowStream, name: str, chain: Chain) -> mp.DataflowStream:
    """What is injected goes to a sink by way of a computation."""
    chain.sunk.add(name)
    return stream.apply(Forward(), name=f"{name}_plain").sink(
        name, mp.DeltaSink(str(chain.folder / name), pa.schema(filter(in_delta, chain.schema)))
    )


def in_delta(column: pa.Field) -> bool:
    try:
        delta_schema(pa.schema([column]))
    except mp.InvalidError:
        return False
    return True


def schema_of(chain: Chain) -> pa.Schema | None:
    return chain.schema if all(map(in_delta, chain.schema)) else None


def produce_rows(stream: mp.DataflowStream, name: str, chain: Chain) -> mp.DataflowStream:
    return stream.apply(Forward(), name=name, produces={name: schema_of(chain)})


def produce_rows_weakly(stream: mp.DataflowStream, name: str, chain: Chain) -> mp.DataflowStream:
    return stream.apply(Forward(), name=name, produces={name: schema_of(chain)}, productions="weak")


def shift_rows(stream: mp.DataflowStream, name: str, chain: Chain) -> mp.DataflowStream:
    plain = stream.apply(Forward(), name=f"{name}_plain")
    return plain.with_timestamps(lambda _, at: at + 1, name=name, schema=schema_of(chain))


def state_of_rows(stream: mp.DataflowStream, name: str, chain: Chain) -> mp.DataflowStream:
    schema, options = schema_of(chain), dict[str, Any]()
    if schema is not None:
        options["state"] = pa.schema([("rows", pa.list_(pa.struct(list(schema))))])
    return stream.apply(Keep(), name=name, **options)


STEPS: dict[str, Step] = {
    "produce_rows": produce_rows,
    "produce_rows_weakly": produce_rows_weakly,
    "shift_rows": shift_rows,
    "state_of_rows": state_of_rows,
    "map": lambda stream, name, _: stream.map(itself, name=name),
    "union": union,
    "with_timestamps": lambda stream, name, _: stream.with_timestamps(lambda _, at: at + 1, name=name),
    "produce": lambda stream, name, _: stream.apply(Forward(), name=name),
    "produce_weakly": lambda stream, name, _: stream.apply(Forward(), name=name, productions="weak"),
    "state": lambda stream, name, _: stream.apply(Keep(), name=name),
    "wait": lambda stream, name, _: stream.apply(Forward(), name=name, time_sorted=True),
    "to_list": lambda stream, name, _: rows_of(stream.window(WINDOW).combine(mp.ToList(), name=name), name),
    "last_n": lambda stream, name, _: rows_of(stream.window(WINDOW).combine(mp.LastN(99), name=name), name),
    "process_windows": lambda stream, name, _: stream.window(WINDOW).process_windows(
        lambda rows, window, pane: rows, name=name
    ),
    "co_group": co_group,
    "retract": retract,
    "retry": lambda stream, name, chain: stream.apply(Fragile(chain.mended), name=name),
    "processor": processor,
    "sink": sink,
}


def chained(stream: mp.DataflowStream, kinds: Iterable[str], chain: Chain, name: str = "s") -> None:
    """Apply the steps, and keep what comes out."""
    for place, kind in enumerate(kinds):
        stream = STEPS[kind](stream, f"{name}{place}", chain)
    stream.apply(Seen(), name=f"{name}_seen")


# ---------------------------------------------------------------------------- runs


def changes_of(table: pa.Table) -> pa.Table:
    """Return the table's rows as changes: each comes, goes, and comes back."""
    words = pa.array(["+I", "-D", "+I"] * len(table))
    rows = pa.concat_tables([table.slice(row, 1) for row in range(len(table)) for _ in range(3)])
    return rows.append_column("op", words)


@dataclass
class Case:
    """A table in pieces, and the two steps that it goes through."""

    table: pa.Table
    kinds: tuple[str, str]
    ends: tuple[int, ...]
    is_changes: bool

    def pipeline(self, chain: Chain) -> mp.Pipeline:
        pipeline = mp.Pipeline("p")
        given: Any = {"change": "op"} if self.is_changes else {}
        stream = pipeline.inject("in", key="k", at="t", watermark=mp.BoundedDisorder("1h"), **given)
        if self.is_changes:
            stream = STEPS["to_list"](stream, "table", chain)
        chained(stream, self.kinds, chain)
        return pipeline

    def pieces(self) -> list[pa.Table]:
        rows = changes_of(self.table) if self.is_changes else self.table
        return [
            rows.slice(start, end - start) for start, end in itertools.pairwise((0, *self.ends, len(rows)))
        ]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    kinds = (draw(st.sampled_from(list(STEPS))), draw(st.sampled_from(list(STEPS))))
    table = draw(tables(SHARED if "processor" in kinds else SHARED | OTHERS))
    is_changes = draw(st.booleans())
    rows = len(table) * (3 if is_changes else 1)
    ends = draw(st.lists(st.integers(0, rows), max_size=3))
    return Case(table, kinds, tuple(sorted(ends)), is_changes)


class Pond:
    """A store in memory that each run opens anew."""

    def __init__(self) -> None:
        self.clock, self.disk, self.registry = ManualClock(), MemoryObjects(), MemoryRegistry()

    def store(self) -> mp.Store:
        return mp.Store.in_memory(
            objects=self.disk, registry=self.registry, clock=self.clock, rng=SeededRng(1)
        )

    def runner(self, store: mp.Store) -> mp.LocalRunner:
        return mp.LocalRunner(
            store, clock=self.clock, rng=SeededRng(2), progress=False, intervals=2, dead_letter_limit=None
        )


def retry_letters(store: mp.Store) -> None:
    if len(store.rows_view("dead_letters").to_arrow()):
        mp.retry_dead_letters(store)


def in_bounded_runs(case: Case, chain: Chain, pond: Pond) -> None:
    """Give each run the pieces so far; a letter is retried before the input ends."""
    pieces = case.pieces()
    for count in range(1, len(pieces) + 1):
        with pond.store() as store:
            pond.runner(store).run(
                case.pipeline(chain), {"in": pa.concat_tables(pieces[:count])}, finish=False
            )
    chain.mend()
    for finish in (False, True):
        with pond.store() as store:
            retry_letters(store)
            pond.runner(store).run(case.pipeline(chain), {"in": pa.concat_tables(pieces)}, finish=finish)


def in_steps(case: Case, chain: Chain, pond: Pond) -> None:
    """Inject the pieces, each in a run of its own that may end before its productions are delivered."""
    for piece in case.pieces():
        with pond.store() as store, pond.runner(store).start(case.pipeline(chain), stepping=True) as run:
            run.inject("in", piece)
            run.step()
    with pond.store() as store, pond.runner(store).start(case.pipeline(chain), stepping=True) as run:
        run.run_until_quiet()
    chain.mend()
    with pond.store() as store:
        retry_letters(store)
    with pond.store() as store, pond.runner(store).start(case.pipeline(chain), stepping=True) as run:
        run.run_until_quiet()
        run.finish("in")
        run.run_until_quiet()


def seen_of(store: mp.Store, name: str) -> list[dict[str, Any]]:
    states = store.rows_view(f"{name}_seen").to_arrow().column("state").to_pylist()
    return [pickle.loads(base64.b64decode(one)) for state in states for one in json.loads(state)]


def assert_seen(store: mp.Store, name: str, expected: list[dict[str, Any]]) -> None:
    assert_same(seen_of(store, name), expected)


def assert_sunk(chain: Chain, table: pa.Table) -> None:
    for name in chain.sunk:
        files = DeltaTable(chain.folder / name).file_uris()
        rows = [row for file in files for row in rows_in(pq.read_table(file, partitioning=None))]
        assert_same(rows, rows_in(table.select([column.name for column in table.schema if in_delta(column)])))


def rows_in(table: pa.Table) -> list[dict[str, Any]]:
    return table.to_pylist(maps_as_pydicts="strict")


def assert_same(rows: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    rows.sort(key=lambda row: row["n"])
    assert [row["n"] for row in rows] == [row["n"] for row in expected]
    for row, wanted in zip(rows, expected, strict=True):
        assert same(row, wanted), (row, wanted)


@pytest.mark.parametrize("run", [in_bounded_runs, in_steps])
@given(case=cases())
@settings(deadline=None, suppress_health_check=list(HealthCheck))
def test_rows_come_out_as_they_went_in(
    run: Callable[[Case, Chain, Pond], None], case: Case, tmp_path_factory: pytest.TempPathFactory
) -> None:
    pond, chain = Pond(), Chain(tmp_path_factory.mktemp("chain"), case.table.schema)
    run(case, chain, pond)
    with pond.store() as store:
        assert not len(store.rows_view("dead_letters").to_arrow())
        assert_seen(store, "s", rows_in(case.table))
    assert_sunk(chain, case.table)


@pytest.mark.spark
@pytest.mark.parametrize(
    ("types", "kinds"), [(SHARED, [*STEPS]), (ON_SPARK, [kind for kind in STEPS if kind != "processor"])]
)
@given(data=st.data())
@settings(
    deadline=None,
    max_examples=1,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
def test_rows_come_out_of_spark_as_they_went_in(
    types: Types,
    kinds: list[str],
    data: st.DataObject,
    tmp_path_factory: pytest.TempPathFactory,
    spark: SparkSession,
) -> None:
    """All kinds of steps in one pipeline, each in a chain with another."""
    folder = tmp_path_factory.mktemp("spark")
    table = data.draw(tables(types, has_all=True))
    order = data.draw(st.permutations(kinds))
    end = data.draw(st.integers(0, len(table)))
    chains = [Chain(folder / str(number), table.schema) for number in range(0, len(order), 2)]

    def pipeline() -> mp.Pipeline:
        pipeline = mp.Pipeline("p")
        stream = pipeline.inject("in", key="k", at="t", watermark=mp.BoundedDisorder("1h"))
        for number, chain in enumerate(chains):
            chained(stream, order[2 * number : 2 * number + 2], chain, f"c{number}_")
        return pipeline

    with plays(folder, ManualClock, spark, dead_letter_limit=None) as start:
        play = start(pipeline)
        for piece in (table.slice(0, end), table.slice(end)):
            play.inject("in", piece)
            play.restart()
        play.settle()
        for chain in chains:
            chain.mend()
        with play._open_store() as store:
            retry_letters(store)
        play.restart()
        play.settle()
        play.advance("in", 10 * DAY)
        play.settle()
        assert not play.states("dead_letters")
        for number, chain in enumerate(chains):
            assert_seen(play.store, f"c{number}_", rows_in(table))
            assert_sunk(chain, table)


# ---------------------------------------------------------------------------- combined values

SUMMED: Types = {
    pa.int64(): whole(64),
    pa.uint64(): whole(64, signed=False),
    pa.decimal128(9, 2): decimals(9, 2),
    pa.decimal128(18, 6): decimals(18, 6),
    # These add up without rounding.
    pa.float64(): st.integers(-(2**40), 2**40).map(lambda number: number / 8),
}


@st.composite
def columns(draw: st.DrawFn, types: Types) -> Case:
    """Draw a column in which some values are equal and some null."""
    kind = draw(st.sampled_from(list(types)))
    some = st.sampled_from(draw(st.lists(types[kind], min_size=1, max_size=4)))
    cells = draw(st.lists(st.none() | some, min_size=1, max_size=8))
    keys = draw(st.lists(st.sampled_from("ab"), min_size=len(cells), max_size=len(cells)))
    table = pa.table({"k": keys, "t": pa.array([0] * len(cells), pa.int64()), "v": pa.array(cells, kind)})
    ends = draw(st.lists(st.integers(0, len(cells)), max_size=2))
    return Case(table, ("map", "map"), tuple(sorted(ends)), is_changes=False)


def combined(case: Case, **combiners: mp.CombineFn) -> list[dict[str, Any]]:
    """Return what a window over the pieces shows, by key."""
    pond, pieces = Pond(), case.pieces()
    for count in range(1, len(pieces) + 1):
        pipeline = mp.Pipeline("p")
        stream = pipeline.inject("in", key="k", at="t", watermark=mp.BoundedDisorder("1h"))
        stream.window(WINDOW).combine(combiners, name="figures", result=_with_key).apply(
            Seen(), name="s_seen"
        )
        with pond.store() as store:
            given = {"in": pa.concat_tables(pieces[:count])}
            pond.runner(store).run(pipeline, given, finish=count == len(pieces))
    with pond.store() as store:
        return sorted(seen_of(store, "s"), key=lambda row: row["k"])


def _with_key(key: str, value: dict[str, Any], window: mp.Window) -> dict[str, Any]:
    return {"k": key, **value}


def by_duckdb(table: pa.Table, figures: str) -> list[dict[str, Any]]:
    with duckdb.connect() as connection:
        connection.register("rows", table)
        answer = connection.sql(f"select k, {figures} from rows group by k order by k")
        names = [column[0] for column in answer.description]
        return [dict(zip(names, row, strict=True)) for row in answer.fetchall()]


@given(case=columns(SUMMED))
@settings(deadline=None)
def test_sums_are_duckdbs(case: Case) -> None:
    shown = combined(case, total=mp.Sum("v"), some=mp.Count("v"), rows=mp.Count())

    assert shown == by_duckdb(case.table, "sum(v) as total, count(v) as some, count(*) as rows")


@given(case=columns({kind: values for kind, values in SHARED.items() if not pa.types.is_timestamp(kind)}))
@settings(deadline=None)
def test_extremes_and_distinct_values_are_duckdbs(case: Case) -> None:
    least, most = mp.Min("v", nan_is_greatest=True), mp.Max("v", nan_is_greatest=True)
    shown = combined(case, least=least, most=most, distinct=mp.CountDistinct("v"))

    expected = by_duckdb(case.table, "min(v) as least, max(v) as most, count(distinct v) as distinct")
    assert all(_same_number(*pair) for pair in zip(shown, expected, strict=True)), (shown, expected)


def _same_number(shown: dict[str, Any], expected: dict[str, Any]) -> bool:
    """Return True for equal figures; two NaN are equal, and so are 0.0 and -0.0."""
    pairs = zip(shown.values(), expected.values(), strict=True)
    return all(one == other or (one != one and other != other) for one, other in pairs)  # noqa: PLR0124
