"""Values of streams with a schema: checked where they are produced, stored and delivered as columns."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

import millpond as mp
from millpond.gc.compaction import CompactionRules, compact_updates
from millpond.statestore.leases.memory import MemoryRegistry
from millpond.statestore.objects.memory import MemoryObjects
from millpond.statestore.rows.files import join_updates
from millpond.statestore.rows.record_ids import IdRetention
from millpond.statestore.rows.row import ROW_SCHEMA, conform, flat_productions, production_lists, with_texts
from millpond.statestore.rows.state_schema import SchemaCodec, struct_of
from millpond.statestore.types import TIME_MIN_US, Superstep, WallTimeMicros
from millpond.testing.fixtures.determinism import ManualClock, SeededRng
from tests.fixtures.both_runners import plays
from tests.fixtures.row_updates import row_updates

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

AT = datetime(2026, 1, 1, tzinfo=UTC)
ITEM = pa.struct([("name", pa.string()), ("price", pa.decimal128(9, 2))])
SALE = pa.schema(
    [
        ("card", pa.string()),
        ("items", pa.list_(ITEM)),
        ("at", pa.timestamp("us", "UTC")),
        ("by_day", pa.map_(pa.date32(), pa.int64())),
    ]
)
SALES = [
    {"card": "a", "items": [{"name": "tea", "price": Decimal("3.20")}], "at": AT, "by_day": {}},
    {"card": "b", "items": [], "at": AT + timedelta(microseconds=1), "by_day": {date(2026, 1, 1): 2}},
    {"card": "a", "items": None, "at": None, "by_day": None},
]


class Produce(mp.Computation):
    """Produces what a function makes of a record's value."""

    def __init__(self, make: Callable[[Any], Any]) -> None:
        self.make = make

    def process_record(self, context: mp.Context, record: mp.Record) -> None:
        for stream, value in self.make(record.value):
            context.produce(stream, value)


class Keep(mp.Computation):
    def process_record(self, context: mp.Context, record: mp.Record) -> None:
        context.state.set([*context.state.get([]), record.value])


class KeepItems(mp.Computation):
    def process_records(self, context: mp.Context, records: mp.Records) -> None:
        column = records.column("items")
        context.state.set({"type": str(column.type), "items": column.to_pylist()})


class Pond:
    """A store in memory that each run opens anew."""

    def __init__(self) -> None:
        self._clock, self._disk, self._registry = ManualClock(), MemoryObjects(), MemoryRegistry()

    def store(self) -> mp.Store:
        return mp.Store.in_memory(
            objects=self._disk, registry=self._registry, clock=self._clock, rng=SeededRng(1)
        )

    def start(self, store: mp.Store, pipeline: mp.Pipeline) -> mp.LocalRun:
        runner = mp.LocalRunner(
            store, clock=self._clock, rng=SeededRng(2), progress=False, dead_letter_limit=None
        )
        return runner.start(pipeline, stepping=True)

    def run(self, pipeline: mp.Pipeline, rows: list[dict[str, Any]]) -> None:
        with self.store() as store, self.start(store, pipeline) as run:
            run.inject("in", rows)
            run.run_until_quiet()

    def states(self, computation: str) -> list[Any]:
        with self.store() as store:
            texts = store.rows_view(computation).to_arrow().column("state").to_pylist()
        return [mp.JsonCodec().decode(text) for text in texts]


def produced(
    make: Callable[[Any], Any], schemas: Any, *consumers: tuple[str, Any, mp.Computation]
) -> mp.Pipeline:
    pipeline = mp.Pipeline("p")
    stream = pipeline.inject("in", key="k", at="n", at_unit="us")
    streams = pipeline.add(Produce(make), name="made", subscribes={stream.name: None}, produces=schemas)
    for name, key, code in consumers:
        streams[name].apply(code, name=f"of_{name}", key=key)
    return pipeline


def rows(count: int) -> list[dict[str, Any]]:
    return [{"k": "k", "n": number} for number in range(count)]


def of_sales(value: Any) -> list[tuple[str, Any]]:
    return [("sales", SALES[value["n"]])]


def test_consumers_get_the_values_and_their_columns():
    pond = Pond()
    pipeline = produced(of_sales, {"sales": SALE}, ("sales", "card", Keep()))
    pipeline.stream("sales").apply(KeepItems(), name="items", key=lambda _: "all")
    pond.run(pipeline, rows(3))

    assert pond.states("of_sales") == [[SALES[0], SALES[2]], [SALES[1]]]
    (columns,) = pond.states("items")
    assert columns["items"] == [sale["items"] for sale in SALES]
    assert columns["type"].startswith("list<")


@pytest.mark.parametrize(
    "kind", [pa.string(), pa.int16(), pa.bool_(), pa.date32(), pa.decimal128(9, 2), pa.binary()]
)
def test_a_field_gives_the_same_keys_as_in_text(kind):
    cells = {
        pa.string(): ["x", "~", ""],
        pa.int16(): [1, -1, 0],
        pa.bool_(): [True, False, None],
        pa.date32(): [date(2026, 1, 1), date(1, 1, 1), None],
        pa.decimal128(9, 2): [Decimal("1.10"), Decimal("-0.01"), Decimal(0)],
        pa.binary(): [b"\x00", b"", None],
    }[kind]
    keys = []
    for schema in (None, pa.schema([("key", kind), ("n", pa.int64())])):
        pond = Pond()
        pipeline = produced(
            lambda value: [("out", {"key": cells[value["n"]], "n": value["n"]})],
            {"out": schema},
            ("out", "key", Keep()),
        )
        pond.run(pipeline, rows(3))
        with pond.store() as store:
            keys.append(store.rows_view("of_out").to_arrow().column("key").to_pylist())
            letters = store.rows_view("dead_letters").to_arrow().num_rows
        assert len(keys[-1]) + letters == 3

    assert keys[0] == keys[1]


class Colour(enum.Enum):
    RED = "red"


@dataclasses.dataclass
class Sale:
    card: str


@pytest.mark.parametrize(
    ("value", "part"),
    [
        (None, "value"),
        ("sale", "value"),
        (Sale("a"), "value"),
        ({"card": 7}, "value.card"),
        ({"card": Colour.RED}, "value.card"),
        ({"kard": "a"}, "value.kard"),
        ({"at": datetime(2026, 1, 1)}, "value.at"),  # noqa: DTZ001 - without a zone
        ({"items": [{}, {}, {}, {"price": Decimal("1.234")}]}, "value.items[3].price"),
        ({"items": [{"price": float("nan")}]}, "value.items[0].price"),
        ({"items": [{"name": object()}]}, "value.items[0].name"),
        ({"items": {"name": "tea"}}, "value.items"),
        ({"by_day": {date(2026, 1, 31): 1.5}}, "value.by_day[datetime.date(2026, 1, 31)]"),
    ],
)
def test_what_does_not_fit_is_refused_by_produce_in_any_cut(value, part):
    told = []

    class Try(mp.Computation):
        def process_record(self, context: mp.Context, record: mp.Record) -> None:
            try:
                context.produce("sales", value)
            except mp.InvalidError as error:
                told.append(error.details["part"])
            context.produce("sales", SALES[0])

    for cut in (1, 2):
        pond, pipeline = Pond(), mp.Pipeline("p")
        stream = pipeline.inject("in", key="k", at="n", at_unit="us")
        sales = stream.apply(Try(), name="try", produces={"sales": SALE})
        sales.apply(Keep(), name="kept", key="card")
        for start in range(0, 2, cut):
            pond.run(pipeline, rows(2)[start : start + cut])
        assert pond.states("kept") == [[SALES[0], SALES[0]]]

    assert told == [part] * 4


def test_productions_of_several_schemas_and_of_none_keep_their_order_and_types():
    other = pa.schema([("card", pa.string()), ("n", pa.int32())])

    def make(value: Any) -> list[tuple[str, Any]]:
        n = value["n"]
        return [
            ("other", {"card": "a", "n": n}),
            ("any", {"n": [n]}),
            ("sales", SALES[n % 2]),
            ("any", b"\xff"),
        ]

    pond = Pond()
    consumers = (("other", "card", Keep()), ("any", None, Keep()), ("sales", lambda _: "all", Keep()))
    pond.run(produced(make, {"sales": SALE, "other": other, "any": None}, *consumers), rows(3))

    assert pond.states("of_other") == [[{"card": "a", "n": n} for n in range(3)]]
    assert pond.states("of_any") == [[{"n": [0]}, b"\xff", {"n": [1]}, b"\xff", {"n": [2]}, b"\xff"]]
    assert pond.states("of_sales") == [[SALES[0], SALES[1], SALES[0]]]


def test_a_failing_hook_takes_back_its_productions_alone():
    class Fail(mp.Computation):
        def process_record(self, context: mp.Context, record: mp.Record) -> None:
            context.produce("sales", SALES[record.value["n"]])
            if record.value["n"] == 1:
                raise ValueError(record.value)

    pond, pipeline = Pond(), mp.Pipeline("p")
    stream = pipeline.inject("in", key="k", at="n", at_unit="us")
    stream.apply(Fail(), name="fail", produces={"sales": SALE}).apply(Keep(), name="kept", key="card")
    pond.run(pipeline, rows(3))

    assert pond.states("kept") == [[SALES[0], SALES[2]]]


@pytest.mark.parametrize("before", [None, SALE])
@pytest.mark.parametrize("after", [None, SALE])
def test_productions_that_wait_for_delivery_outlive_a_change_of_the_schema(before, after):
    pond = Pond()
    for schema, count in ((before, 2), (after, 1)):
        pipeline = produced(of_sales, {"sales": schema}, ("sales", "card", Keep()))
        with pond.store() as store, pond.start(store, pipeline) as run:
            run.inject("in", rows(2)[:count])
            run.step()
    with pond.store() as store, pond.start(store, pipeline) as run:
        run.run_until_quiet()

    assert pond.states("of_sales") == [[SALES[0], SALES[0]], [SALES[1]]]


def updates_with(values: list[Any], numbers: list[int], *, typed: bool) -> pa.Table:
    """Return an update for each number, with these values produced by each."""
    codec = SchemaCodec(SALE, "value")
    updates = row_updates([{"key": "k", "commit_number": number, "superstep": number} for number in numbers])
    count = len(values) * len(numbers)
    texts = [None if typed else mp.JsonCodec().encode(value) for value in values] * len(numbers)
    columns = [
        pa.array(["sales"] * count, pa.string()),
        pa.array(["k"] * count, pa.string()),
        pa.array(texts, pa.string()),
        pa.nulls(count, pa.binary()),
        pa.nulls(count, pa.timestamp("us", "UTC")),
    ]
    names = ["stream", "key", "value", "value_bytes", "at"]
    if typed:
        columns.append(
            struct_of([codec.encode(value) for value in values] * len(numbers), codec.produced.type)
        )
        names.append(codec.produced.name)
    lists = production_lists(
        pa.StructArray.from_arrays(columns, names=names), pa.array([len(values)] * len(numbers)).to_numpy()
    )
    for name, column in lists.items():
        place = updates.schema.get_field_index(name)
        updates = (
            updates.append_column(name, column) if place < 0 else updates.set_column(place, name, column)
        )
    return updates


def test_files_with_and_without_the_column_are_joined_and_compacted():
    files = [
        updates_with([SALES[0]], [0], typed=False),
        updates_with(SALES[1:], [1], typed=True),
        updates_with([], [2], typed=False),
    ]
    joined = join_updates(files)
    rules = CompactionRules(
        pending_from=Superstep(0), ids=IdRetention.of(TIME_MIN_US, WallTimeMicros(0), slack_us=0)
    )
    compacted = compact_updates(joined, rules, is_complete=False)

    (column,) = set(compacted.column_names) - set(ROW_SCHEMA.names)
    assert flat_productions(compacted).field(column.replace("productions", "value")).null_count == 1
    for table in (joined, compacted):
        found = [each for row in with_texts(table).column("productions").to_pylist() for each in row or ()]
        assert [mp.JsonCodec().decode(each["value"]) for each in found] == SALES
    assert conform(compacted, list(ROW_SCHEMA.names)).equals(with_texts(compacted))


def test_productions_and_values_of_different_number_are_damage():
    updates = updates_with(SALES, [0], typed=True)
    name = updates.column_names[-1]
    shorter = pa.array([updates.column(name)[0].as_py()[:2]], updates.schema.field(name).type)

    with pytest.raises(mp.DataError, match="productions and their values differ in number"):
        flat_productions(updates.set_column(updates.num_columns - 1, name, shorter))


def test_other_readers_of_the_table_see_the_columns(tmp_path: Path):
    pipeline = produced(of_sales, {"sales": SALE}, ("sales", "card", Keep()))
    with mp.LocalRunner(tmp_path / "pond", progress=False).start(pipeline, stepping=True) as run:
        run.inject("in", rows(3))
        run.step()

    table = DeltaTable(tmp_path / "pond" / "rows").to_pyarrow_table(filters=[("computation", "=", "made")])
    (name,) = (name for name in table.column_names if name.startswith("productions_"))
    (values,) = table.column(name).to_pylist()
    assert [value["items"] for value in values] == [sale["items"] for sale in SALES]
    (file,) = (tmp_path / "pond" / "rows" / "computation=made").glob("*.parquet")
    assert all(
        each["value"] is None for each in pq.read_table(file, partitioning=None)["productions"][0].as_py()
    )
    with mp.Store.open(tmp_path / "pond", read_only=True) as store:
        shown = store.sql().execute("select value from productions.made").fetchall()
    assert [mp.JsonCodec().decode(value) for (value,) in shown] == SALES


def test_a_sink_takes_the_values(tmp_path: Path):
    pipeline = produced(of_sales, {"sales": SALE})
    schema = pa.schema([field for field in SALE if field.name != "by_day"])
    pipeline.stream("sales").sink("out", mp.DeltaSink(str(tmp_path / "out"), schema))
    mp.LocalRunner(tmp_path / "pond", progress=False).run(pipeline, {"in": rows(3)})

    sold = DeltaTable(tmp_path / "out").to_pyarrow_table().to_pylist()
    expected = [{name: sale[name] for name in schema.names} for sale in SALES]
    # A column `at` of a sink is the record's own time.
    assert [{**row, "at": None} for row in sold] == [{**row, "at": None} for row in expected]


@pytest.mark.spark
def test_both_runners_deliver_the_same(tmp_path: Path, spark: SparkSession):
    def pipeline() -> mp.Pipeline:
        made = produced(of_sales, {"sales": SALE}, ("sales", "card", Keep()))
        made.stream("sales").window(mp.FixedWindows("1d")).combine(mp.Count(), name="counts", key="card")
        return made

    with plays(tmp_path, ManualClock, spark) as start:
        play = start(pipeline)
        play.inject("in", rows(3))
        play.restart()
        play.settle()
        shown = {
            key: [row["card"] for row in mp.JsonCodec().decode(text)]
            for key, text in play.states("of_sales").items()
        }

    assert shown == {"a": ["a", "a"], "b": ["b"]}


@pytest.mark.parametrize("amount", [pa.decimal128(9, 2), pa.decimal128(12, 2), pa.float64()])
def test_a_sink_has_the_same_rows_from_columns_as_from_text(tmp_path: Path, amount: pa.DataType):
    """Columns of the values' own types go to the table unchanged; others are converted, or refused."""
    sale = pa.schema([("card", pa.string()), ("amount", pa.decimal128(9, 2)), ("left_out", pa.int64())])
    columns = pa.schema(
        [("key", pa.string()), ("amount", amount), ("card", pa.string()), ("absent", pa.date32())]
    )

    def make(value: Any) -> list[tuple[str, Any]]:
        return [("sales", {"card": None, "amount": Decimal(value["n"]).scaleb(-2), "left_out": 1})]

    found = []
    for name, schema in (("text", None), ("columns", sale)):
        pipeline = produced(make, {"sales": schema})
        pipeline.stream("sales").sink("out", mp.DeltaSink(str(tmp_path / name), columns))
        try:
            mp.LocalRunner(tmp_path / f"{name} pond", progress=False).run(pipeline, {"in": rows(3)})
        except mp.InvalidError as error:
            found.append(error.message)
        else:
            found.append(DeltaTable(tmp_path / name).to_pyarrow_table().to_pylist())

    assert found[0] == found[1]
