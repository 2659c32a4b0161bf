"""A key made in the JVM is the one that Arrow and Python make."""

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
    """The session in a zone that is not UTC, with and without ANSI mode."""
    kept = {name: spark.conf.get(name) for name in ("spark.sql.ansi.enabled", "spark.sql.session.timeZone")}
    spark.conf.set("spark.sql.ansi.enabled", str(request.param).lower())
    spark.conf.set("spark.sql.session.timeZone", "America/New_York")
    yield spark
    for name, value in kept.items():
        spark.conf.set(name, value)


@given(rows=st.lists(CELLS, min_size=20, max_size=60))
@settings(max_examples=5, suppress_health_check=list(HealthCheck), phases=[Phase.generate])
def test_jvm_and_python_agree(session: SparkSession, rows: list[tuple[Any, ...]]) -> None:
    """Each column alone, and all together, have the same keys in the JVM, in Arrow and in Python."""
    table = pa.table(
        [pa.array(cells, kind) for cells, kind in zip(zip(*rows, strict=True), KINDS, strict=True)],
        names=NAMES,
    )
    # Spark would read times without a zone as those of the session.
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


def test_columns_as_arrow_has_them() -> None:
    """The types of a frame's columns are those of Arrow; what no key is made of is left out."""
    fields = [
        T.StructField(name, from_arrow_type(kind, prefer_timestamp_ntz=True))
        for name, kind in zip(NAMES, KINDS, strict=True)
    ]

    columns = arrow_key_columns(T.StructType([*fields, T.StructField("list", T.ArrayType(T.LongType()))]))

    assert [(column.name, column.type) for column in columns] == list(zip(NAMES, KINDS, strict=True))


def test_jvm_orders_as_tuples(spark: SparkSession) -> None:
    """Sorting by the key sorts by the columns, nulls first and NaN last, as Spark sorts them."""
    frame = spark.sql(
        "SELECT * FROM VALUES ('b', 1, 0.5D), ('a', -10, NULL), ('a', 2, double('NaN')), ('a', 2, 1D), (NULL, 7, 1D), "
        "('a', NULL, -1D), ('a b', 1, 1D), ('a', -9, -0.0D), ('a', 10, 1D) AS t(s, n, d)"
    )
    key = key_sql([(field.name, field.dataType) for field in frame.schema])

    by_key = frame.selectExpr("*", f"{key} AS key").orderBy("key").select("s", "n", "d")

    assert list(map(str, by_key.collect())) == list(map(str, frame.orderBy("s", "n", "d").collect()))


def test_times_out_of_range(spark: SparkSession) -> None:
    """A date or time that Python cannot hold makes no key, in a struct, too."""
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
def test_refused_types(kind: T.DataType, says: str) -> None:
    """A column that no key can be made of is refused by its name, with a way out."""
    with pytest.raises(InvalidError, match=says):
        check_key_type(kind, "cell")
