"""Keys made in the JVM."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from pyspark.sql import types as T  # noqa: N812 - the name that every Spark user knows
from pyspark.sql.pandas.types import from_arrow_type

from millpond.executor.spark.key_sql import arrow_key_columns, check_key_type, key_sql
from millpond.statestore.errors import InvalidError
from millpond.statestore.rows.key_columns import encode_key_columns
from millpond.statestore.rows.key_text import encode_key
from tests.fixtures.typed_keys import KEY_TYPES, key_values

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

STRUCT = pa.struct(
    [("a", pa.string()), ("é, c", pa.int64()), ("b", pa.struct([("Ab", pa.decimal128(5, 2))]))]
)
KINDS = (*KEY_TYPES, STRUCT)
CELLS = st.tuples(*map(key_values, KINDS))


@pytest.fixture(params=[True, False], ids=["ansi", "lenient"])
def session(spark: SparkSession, request: pytest.FixtureRequest) -> Iterator[SparkSession]:
    """Set a zone other than UTC, with and without ANSI mode."""
    kept = {name: spark.conf.get(name) for name in ("spark.sql.ansi.enabled", "spark.sql.session.timeZone")}
    spark.conf.set("spark.sql.ansi.enabled", str(request.param).lower())
    spark.conf.set("spark.sql.session.timeZone", "America/New_York")
    yield spark
    for name, value in kept.items():
        spark.conf.set(name, value)


@given(rows=st.lists(CELLS, min_size=20, max_size=60))
@settings(max_examples=5, suppress_health_check=list(HealthCheck), phases=[Phase.generate])
def test_keys_agree_in_the_jvm_arrow_and_python(session: SparkSession, rows: list[tuple[Any, ...]]) -> None:
    """The columns are tested alone and together."""
    table = pa.table(
        [pa.array(cells, kind) for cells, kind in zip(zip(*rows, strict=True), KINDS, strict=True)],
        names=NAMES,
    )
    # Spark would read times without a zone in the session's zone.
    fields = [
        T.StructField(name, from_arrow_type(kind, prefer_timestamp_ntz=True))
        for name, kind in zip(NAMES, KINDS, strict=True)
    ]
    frame = session.createDataFrame(table, T.StructType(fields))
    columns = [(f"`{field.name}`", field.dataType) for field in frame.schema]

    alone = [f"{key_sql([column])} AS k{place}" for place, column in enumerate(columns)]
    made = frame.selectExpr(*alone, f"{key_sql(columns)} AS whole").toArrow()

    for place, name in enumerate(NAMES):
        expected = [encode_key([row[place]]) for row in rows]
        assert made.column(f"k{place}").to_pylist() == expected
        assert encode_key_columns([table.column(name)]).keys.to_pylist() == expected
    assert made.column("whole").to_pylist() == [encode_key(row) for row in rows]


NAMES = [f"c{place}" for place in range(len(KINDS))]


def test_arrow_types_of_key_columns_omit_other_columns() -> None:
    fields = [
        T.StructField(name, from_arrow_type(kind, prefer_timestamp_ntz=True))
        for name, kind in zip(NAMES, KINDS, strict=True)
    ]

    columns = arrow_key_columns(T.StructType([*fields, T.StructField("list", T.ArrayType(T.LongType()))]))

    assert [(column.name, column.type) for column in columns] == list(zip(NAMES, KINDS, strict=True))


def test_sorting_by_key_sorts_by_columns(spark: SparkSession) -> None:
    """Like Spark, keys sort nulls first and NaN last."""
    frame = spark.sql(
        "SELECT * FROM VALUES ('b', 1, 0.5D), ('a', -10, NULL), ('a', 2, double('NaN')), ('a', 2, 1D), (NULL, 7, 1D), "
        "('a', NULL, -1D), ('a b', 1, 1D), ('a', -9, -0.0D), ('a', 10, 1D) AS t(s, n, d)"
    )
    key = key_sql([(field.name, field.dataType) for field in frame.schema])

    by_key = frame.selectExpr("*", f"{key} AS key").orderBy("key").select("s", "n", "d")

    assert list(map(str, by_key.collect())) == list(map(str, frame.orderBy("s", "n", "d").collect()))


def test_times_beyond_pythons_range_make_no_key(spark: SparkSession) -> None:
    """This includes times in a struct."""
    frame = spark.sql(
        "SELECT DATE'+10000-01-01' AS d, TIMESTAMP_NTZ'-0001-01-01 00:00:00' AS t, TIMESTAMP'+10000-01-02 00:00:00Z' AS z"
    )
    columns = [(field.name, field.dataType) for field in frame.schema]
    inside = frame.selectExpr("struct(d) AS s").schema[0].dataType
    keys = [key_sql([column]) for column in columns]

    made = frame.selectExpr("struct(d) AS s", "*").selectExpr(*keys, key_sql([("s", inside)]))

    assert tuple(made.collect()[0]) == (None, None, None, None)


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (T.ArrayType(T.LongType()), "single values"),
        (T.MapType(T.StringType(), T.LongType()), "single values"),
        (T.StructType([T.StructField("a", T.ArrayType(T.LongType()))]), "column=`cell.a`"),
        (T.DayTimeIntervalType(), "cast the column"),
    ],
)
def test_unsupported_key_types_are_refused_by_column(kind: T.DataType, says: str) -> None:
    with pytest.raises(InvalidError, match=says):
        check_key_type(kind, "cell")
