"""Routing in the JVM, compared with Python."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pytest

from millpond.executor.computation.computation import Computation
from millpond.executor.inputs.extraction import FieldExtractor, InjectorNode, read_injected
from millpond.executor.inputs.keys import KeyExtractor, KeyField
from millpond.executor.pipeline.pipeline import EnginePipeline
from millpond.executor.spark.routing import Routed, Router, check_frame, slot_of_row
from millpond.executor.spark.slots import OneMachine
from millpond.executor.spark.task_plan import TARGET, Route, is_readable
from millpond.executor.time.instants import DATES_IN, TimeReading, TimeUnit
from millpond.executor.time.watermark_policies import BoundedDisorder
from millpond.statestore.errors import InvalidError
from millpond.statestore.interval import locate
from millpond.statestore.rows.key_text import encode_key, plain_key
from millpond.testing.fixtures.determinism import SeededRng

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark

YEAR_12000 = 316_516_147_200_000_000
SCHEMA = (
    "n long, k string, `odd 'name` string, text string, number long, moment timestamp, id string, seq long"
)
MOMENT = datetime(2013, 2, 8, 10, 0, 0, 5, tzinfo=UTC)
ROWS: list[tuple[Any, ...]] = [
    (0, "a", "z", "2013-02-08T10:00:00Z", 5, MOMENT, "i0", 0),
    (1, None, "z", "2013-02-08T10:00Z", -5, MOMENT, "i1", 1),
    (2, "b", None, "2013-02-08T10:00:00+01:00", 0, MOMENT, None, None),
    (3, "", "a", None, None, None, "", 3),
    (4, "é", "m'\"\\", "yesterday", YEAR_12000, MOMENT, "i4", -4),
    (5, "z\U0001f30a", "m", "10:00:00", -(2**62), MOMENT, "i5", 5),
    (6, "m", "m", "0001-01-01T00:00:00+01:00", 2**62, MOMENT, "i6", 6),
    (7, "mm", "\uffee", "9999-12-31T23:59:59.999999Z", 7, datetime(1, 1, 1, tzinfo=UTC), "i7", 7),
]
TEXTS = (
    """
2013-02-08T10:00:00|2013-02-08 10:00:00|2013-02-08|2013-02-08T10:00|2013-02-08T10:00Z|2013-02-08T10
2013-02-08T10:00:00Z|2013-02-08T10:00:00z|2013-02-08T10:00:00 UTC|2013-02-08T10:00:00GMT|2013-02-08 10:00 UTC
2013-02-08T10:00:00+01:00|2013-02-08T10:00:00+0100|2013-02-08T10:00:00+01|2013-02-08 10:00:00 +01:00
2013-02-08T10:00:00-18:00|2013-02-08T10:00:00+18:30|2013-02-08T10:00:00+1:00|2013-02-08T10:00:00+01:00:30
2013-02-08T10:00:00 America/New_York| 2013-02-08T10:00:00 |2013-02-08T10:00:00.|2013-02-08T10:00:00,5
2013-02-08T10:00:00.1|2013-02-08T10:00:00.123456789|1969-12-31T23:59:59.9999999|20130208|20130208T100000
2013-W06-5|2013-2-8|2013-02-08T9:05:07|10:00:00|T10:00:00|now|today|epoch||2013|2013-02|2013-02-08T|1360317600
2013-02-08t10:00z|2013-02-08t10:00:00.5+01:00|2013-02-08t10:00|2013-02-08T24:00:00|2013-02-30|2013-02-08T10:00:60|0001-01-01|0000-01-01|9999-12-31T23:59:59.999999
+12000-01-01|12000-01-01|-0001-01-01|0001-01-01T00:00:00+01:00|9999-12-31T23:59:59-01:00|2013-02-08Z
2013-02-08+01:00|2013-02-08-05|1582-10-10|1500-02-29|1500-01-01T00:00:00|2013-02-08x10:00:00|٢٠١٣-02-08
""".strip()
    .replace("\n", "|")
    .split("|")
)


@pytest.fixture(scope="module")
def zone(spark: SparkSession) -> Iterator[None]:
    """Set a session zone far from UTC, which must not matter."""
    before = spark.conf.get("spark.sql.session.timeZone")
    spark.conf.set("spark.sql.session.timeZone", "Pacific/Auckland")
    yield
    spark.conf.set("spark.sql.session.timeZone", str(before))


@pytest.fixture(scope="module")
def frame(spark: SparkSession, zone: None) -> DataFrame:
    return spark.createDataFrame(ROWS, SCHEMA).coalesce(1)


@pytest.fixture(scope="module")
def table(frame: DataFrame) -> pa.Table:
    return frame.toArrow()


def injector(key: FieldExtractor = "k", at: FieldExtractor = "text", **fields: Any) -> InjectorNode:
    return InjectorNode(
        stream="in", key=key, at=at, id=fields.pop("id", None), watermark=BoundedDisorder(0), **fields
    )


def finished(result: Routed) -> pa.Table:
    """Return the routed rows, as the driver gets them, in the session's zone."""
    batches = result.frame._collect_as_arrow()  # type: ignore[operator]
    return pa.Table.from_batches([rows for batch in batches for rows in result.finish(batch)])


def read(result: Routed) -> list[tuple[Any, ...]]:
    """Return number, target, key, time and id of each routed row, as a task would read them."""
    columns, arrow = result.columns, finished(result)
    at = arrow.column(columns.at)
    at = (at.cast(pa.timestamp("us", tz="UTC")) if pa.types.is_timestamp(at.type) else at).cast(pa.int64())
    ids = pa.nulls(len(arrow)) if columns.id is None else arrow.column(columns.id)
    if pa.types.is_integer(ids.type):
        ids = ids.cast(pa.string())
    arrays = [arrow.column("n"), arrow.column(TARGET), arrow.column(columns.key), at, ids.cast(pa.binary())]
    rows = zip(*(column.to_pylist() for column in arrays), strict=True)
    # An unreadable record's other columns appear only in its letter's text.
    return sorted(row if row[1] >= 0 else row[:2] for row in rows)


def routed(node: InjectorNode, frame: DataFrame, routes: tuple[Route, ...]) -> list[tuple[Any, ...]]:
    """Return the rows that Spark routes, which are those that the driver routes once it has collected them."""
    by_spark = read(Router(node).route(frame, routes))

    assert read(Router(node).route(frame, routes, is_collected=True)) == by_spark
    return by_spark


def expected(node: InjectorNode, routes: tuple[Route, ...], table: pa.Table) -> list[tuple[Any, ...]]:
    """Compute the same with `read_injected`."""
    numbers = table.column("n").to_pylist()
    rows: list[tuple[Any, ...]] = []
    for route in routes:
        injected = read_injected(node, route.key, table)
        ids = [None] * len(numbers) if injected.ids is None else injected.ids.to_pylist()
        for row, key in enumerate(injected.keys.to_pylist()):
            if row in injected.errors:
                rows.append((numbers[row], -1 - route.first))
            else:
                target = route.positions[locate(route.lows, key)]
                rows.append((numbers[row], target, key, int(injected.at[row]), ids[row]))
    return sorted(rows)


ONE = (Route(positions=(0,), lows=("",), key=None),)
CUT = (Route(positions=(2, 3, 4, 5), lows=("", "b", "m", "\U0001f30a"), key=None),)
THREE = (
    Route(positions=(0, 1), lows=("", "b"), key=None),
    Route(positions=(4, 2, 3), lows=("", "m'\"\\", "z"), key="odd 'name"),
    Route(positions=(5,), lows=("",), key="k"),
)
TYPED = (
    Route(positions=(0, 1), lows=("", encode_key((0,))), key="seq"),
    Route(positions=(2, 4, 3), lows=("", encode_key(("", 0)), encode_key(("m", None))), key=("k", "number")),
    Route(positions=(5,), lows=("",), key="k"),
)
TYPED_ONE = (Route(positions=(1, 2), lows=("", encode_key((None, "m"))), key=("number", "odd 'name")),)
CUTS = ("", *(f"{chr(97 + n // 26)}{chr(97 + n % 26)}" for n in range(100)))
MANY = (Route(positions=tuple(range(101)), lows=CUTS, key=None),)
MOVED = (Route(positions=(7, *range(100)), lows=CUTS, key=None),)


@pytest.mark.parametrize(
    "routes",
    [ONE, CUT, THREE, MANY, MOVED, TYPED, TYPED_ONE],
    ids=["one", "cut", "three", "many", "moved", "typed", "typed one"],
)
@pytest.mark.parametrize("at", ["text", "number", "moment"])
def test_jvm_and_python_route_to_the_same_interval(
    frame: DataFrame, table: pa.Table, routes: tuple[Route, ...], at: str
) -> None:
    node = injector(at=at, id="id")

    assert routed(node, frame, routes) == expected(node, routes, table)


@pytest.mark.parametrize("count", [1, 2, 128, 129, 1_000])
@pytest.mark.parametrize("characters", ["ab\x01\x02'\U0001f30a", "".join(map(chr, range(1, 32)))])
def test_key_is_located_among_any_number_of_cuts(spark: SparkSession, count: int, characters: str) -> None:
    """Keys equal a cut, lie just below one, or beyond all."""
    drawn = np.random.default_rng(count)
    lengths = drawn.integers(1, 12, 20 * count)
    texts = {"".join(drawn.choice(list(characters), length)) for length in lengths}
    lows = ("", *sorted(drawn.choice(sorted(texts), min(count, len(texts)), replace=False).tolist()))
    keys = sorted({*texts, *(low[:-1] for low in lows), "", "\U0010ffff"})
    route = Route(positions=tuple(drawn.permutation(len(lows)).tolist()), lows=lows, key=None)
    frame = spark.createDataFrame([(key, 0) for key in keys], "k string, n long")

    wanted = {key: route.positions[locate(lows, plain_key(key))] for key in keys}
    for is_collected in (False, True):
        result = Router(injector("k", "n")).route(frame, (route,), is_collected=is_collected)
        assert {row["k"]: row[TARGET] for row in finished(result).to_pylist()} == wanted


@pytest.mark.parametrize(
    "node",
    [
        injector(key=lambda row: row["k"], at="number", id="seq"),
        injector(key="k", at=lambda row: row["number"], id=lambda row: row["id"]),
    ],
    ids=["key", "time and id"],
)
def test_function_extractors_route_to_the_same_interval(
    frame: DataFrame, table: pa.Table, node: InjectorNode
) -> None:
    """The records pass through Python."""
    assert routed(node, frame, THREE) == expected(node, THREE, table)


def test_function_of_one_consumer_does_not_affect_the_others(frame: DataFrame, table: pa.Table) -> None:
    node = injector(at="number")
    routes = (*CUT, Route(positions=(6, 7), lows=("", "5"), key=lambda row: str(row["n"])))

    assert routed(node, frame, routes) == expected(node, routes, table)


@pytest.mark.parametrize("column", ["id", "seq", None])
def test_jvm_and_python_make_the_same_ids(frame: DataFrame, table: pa.Table, column: str | None) -> None:
    node = injector(at="moment", id=column)

    assert routed(node, frame, ONE) == expected(node, ONE, table)


def test_jvm_and_python_parse_the_same_times_in_text(spark: SparkSession, zone: None) -> None:
    """This includes odd forms and damaged texts."""
    rng = SeededRng(3)
    damaged = [_damaged(text, rng) for text in TEXTS for _ in range(12)]
    texts = list(dict.fromkeys([*TEXTS, *damaged]))
    rows = [(number, "k", text) for number, text in enumerate(texts)]
    frame = spark.createDataFrame(rows, "n long, k string, text string").coalesce(1)
    readable = []
    for at_zone in (None, "UTC", "-03:30", "Europe/Berlin"):
        node = injector(times=TimeReading.of(None, at_zone, stream="in"))
        routed_rows = {row[0]: row for row in routed(node, frame, ONE)}
        wanted = {row[0]: row for row in expected(node, ONE, frame.toArrow())}

        assert {texts[n]: routed_rows[n] for n in routed_rows} == {texts[n]: wanted[n] for n in wanted}
        readable.append(sum(len(row) > 2 for row in wanted.values()))
    assert 15 < readable[0] < min(readable[1:]) <= max(readable) < len(texts) - 200


@pytest.mark.parametrize("key", ["k", lambda row: row["k"]], ids=["in the JVM", "in Python"])
def test_null_time_is_readable_where_it_is_kept(spark: SparkSession, key: KeyField) -> None:
    """A text that is no time is unreadable all the same."""
    rows = [(0, "k", None), (1, "k", "1970-01-01T00:00:01Z"), (2, "k", "soon"), (3, None, None)]
    frame = spark.createDataFrame(rows, "n long, k string, at string").coalesce(1)
    node = replace(injector(key=key, at="at"), keeps_null_times=True)

    routing = Router(node).route(frame, ONE)
    targets = {row["n"]: row[TARGET] for row in routing.frame.toArrow().to_pylist()}
    assert {n: is_readable(target) for n, target in targets.items()} == {0: True, 1: True, 2: False, 3: False}


@pytest.mark.parametrize("unit", [None, "s", "ms", "us", "ns"])
def test_jvm_and_python_read_the_same_times_in_numbers(spark: SparkSession, unit: TimeUnit | None) -> None:
    """The numbers lie around 1970 and around the ranges taken for other units."""
    numbers = [0, 1, -1, 999, -999, -1_001, 1_700_000_000, 17 * 10**14, 17 * 10**17, 2**62, -(2**62)]
    numbers += [bound + step for bounds in DATES_IN.values() for bound in bounds for step in (-1, 0, 1)]
    frame = spark.createDataFrame(
        [(n, "k", number) for n, number in enumerate(numbers)], "n long, k string, at long"
    )
    node = injector(at="at", times=TimeReading.of(unit, None, stream="in"))

    assert routed(node, frame.coalesce(1), ONE) == expected(node, ONE, frame.coalesce(1).toArrow())


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
def test_jvm_and_python_read_the_same_times_in_floats(spark: SparkSession, unit: TimeUnit) -> None:
    numbers = [0.0, -0.5, 0.5, 1.5, 1_767_225_600.1, 1_767_225_600.123_456_7, 1e9 / 3, -1e9 / 7, 1e30, 17e17]
    numbers += [float("nan"), float("inf"), float("-inf"), 2.0**53 + 1, 1e-9]
    frame = spark.createDataFrame(
        [(n, "k", number) for n, number in enumerate(numbers)], "n long, k string, at double"
    ).coalesce(1)
    node = injector(at="at", times=TimeReading.of(unit, None, stream="in"))

    assert routed(node, frame, ONE) == expected(node, ONE, frame.toArrow())


def test_timestamp_ntz_has_the_offset_of_its_place(spark: SparkSession) -> None:
    """Also where an hour comes twice or never."""
    texts = [
        "2026-01-01 12:00:00",
        "2026-03-29 02:30:00",
        "2026-10-25 02:30:00",
        "1890-01-01 00:00:00",
        "0100-01-01 00:00:00",
    ]
    rows = " UNION ALL ".join(
        f"SELECT {n}L AS n, 'k' AS k, timestamp_ntz'{text}' AS at" for n, text in enumerate(texts)
    )
    frame = spark.sql(rows).coalesce(1)
    node = injector(at="at", times=TimeReading.of(None, "Europe/Berlin", stream="in"))

    assert routed(node, frame, ONE) == expected(node, ONE, frame.toArrow())


def test_timestamp_ntz_takes_the_injectors_zone(spark: SparkSession) -> None:
    """The session's zone does not matter."""
    frame = spark.sql("SELECT 0L AS n, 'k' AS k, timestamp_ntz'2013-02-08 10:00:00.000005' AS at").coalesce(1)
    node = injector(at="at", times=TimeReading.of(None, "+02:00", stream="in"))
    routed_rows = routed(node, frame, ONE)

    assert routed_rows == expected(node, ONE, frame.toArrow())
    assert routed_rows[0][3] == 1_360_310_400_000_005


def _damaged(text: str, rng: SeededRng) -> str:
    """Change, add or remove a character."""
    index = int(rng.random() * (len(text) + 1))
    letter = "0123459:-+.TZ \t\n"[int(rng.random() * 16)]
    tail = text[index + int(rng.random() * 2) :]
    return text[:index] + ("" if rng.random() < 0.3 else letter) + tail


def test_rows_are_placed_in_the_slot_of_their_interval(frame: DataFrame) -> None:
    """The slot is the position modulo the number of slots; letters go with the first interval."""
    from pyspark.sql.functions import spark_partition_id

    result = Router(injector(at="number")).route(frame, THREE)
    placed = OneMachine(frame.sparkSession, 3).place(result.frame, slot_of_row(3), 3)
    rows = placed.select(TARGET, spark_partition_id().alias("slot")).collect()

    assert placed.rdd.getNumPartitions() == 3
    assert len(rows) == 3 * len(ROWS)
    for row in rows:
        position = row[TARGET] if row[TARGET] >= 0 else -1 - row[TARGET]
        assert row["slot"] == position % 3


@pytest.mark.parametrize(
    "key",
    [None, "odd 'name", lambda row: row["k"], "seq", ("k", "moment")],
    ids=["own", "column", "function", "number", "typed"],
)
def test_sample_contains_keys_of_readable_records_only(
    frame: DataFrame, table: pa.Table, key: KeyExtractor
) -> None:
    node = injector(at="number")
    injected = read_injected(node, key, table)
    readable = np.setdiff1d(np.arange(len(ROWS)), list(injected.errors))

    keys = Router(node).keys(frame, key, 1_000).toArrow().column(0).to_pylist()
    assert sorted(keys) == sorted(injected.keys.take(pa.array(readable)).to_pylist())


@pytest.mark.parametrize(
    ("node", "words"),
    [
        (injector(key="absent"), "no such key column column=`absent`"),
        (injector(key=("k", "list")), "single values.*column=`list`"),
        (injector(at="absent"), "no such time column column=`absent`"),
        (injector(at="naive"), "no time zone.*column=`naive`"),
        (injector(at="real"), "time column is no time: cast it.*column=`real`"),
        (injector(at="day"), "time column is no time: cast it.*column=`day`"),
        (injector(id="real"), "id column is neither .* column=`real`"),
    ],
    ids=lambda value: "" if isinstance(value, str) else None,
)
def test_missing_and_unsupported_columns_are_refused_by_name(
    spark: SparkSession, frame: DataFrame, node: InjectorNode, words: str
) -> None:
    odd = frame.selectExpr(
        "*",
        "timestamp_ntz'2013-02-08 10:00:00' AS naive",
        "1.5D AS real",
        "date'2013-02-08' AS day",
        "array(1) AS list",
    )

    with pytest.raises(InvalidError, match=words):
        Router(node).route(odd, ONE)


def test_frame_with_an_unsupported_key_is_refused_before_the_run(frame: DataFrame) -> None:
    """Functions as other extractors must not hide it."""
    pipeline = EnginePipeline("p")
    pipeline.inject("in", key=lambda row: row["k"], at="text").apply(Computation(), name="c", key="list")

    with pytest.raises(InvalidError, match=r"single values.*column=`list`"):
        check_frame(pipeline.check(), "in", frame.selectExpr("*", "array(1) AS list").schema)


@pytest.mark.parametrize("name", ["user.name", "back`tick"])
@pytest.mark.parametrize("key", ["k", lambda row: row["k"]], ids=["column", "function"])
def test_column_names_that_spark_cannot_pass_to_python_are_refused(
    frame: DataFrame, key: FieldExtractor, name: str
) -> None:
    odd = frame.withColumnRenamed("seq", name)

    with pytest.raises(InvalidError, match=f"rename it column=`{name}`"):
        Router(injector(key=key)).route(odd, ONE)
