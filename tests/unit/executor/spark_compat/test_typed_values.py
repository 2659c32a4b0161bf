"""Values of a schema as JSON."""

from __future__ import annotations

import base64
import math
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.types import Row

from millpond.executor.sinks.sink import DeltaSink, Sink, read_table
from millpond.executor.spark_compat.schema import StructCodec, parse_schema, zone_named
from millpond.executor.spark_compat.spark_query import sink_of
from millpond.statestore.errors import InvalidError
from tests.unit.executor.sinks.test_sink import productions

_MOMENT = st.datetimes(datetime(1990, 1, 1), datetime(2100, 1, 1))  # noqa: DTZ001 - local time, as Spark takes it
_INT = st.integers(-(2**31), 2**31 - 1)
_VALUES: dict[str, st.SearchStrategy[Any]] = {
    "tinyint": st.integers(-128, 127),
    "int": _INT,
    "long": st.integers(-(2**63), 2**63 - 1),
    "double": st.floats(allow_nan=False),
    "string": st.text(),
    "boolean": st.booleans(),
    "date": st.dates(),
    "timestamp": _MOMENT,
    "timestamp_ntz": _MOMENT,
    "decimal(12,3)": st.decimals(-(10**8), 10**8, places=3),
    "binary": st.binary(),
    "array<date>": st.lists(st.none() | st.dates()),
    "map<string,binary>": st.dictionaries(st.text(), st.none() | st.binary()),
    "struct<x:int,z:date>": st.builds(lambda x, z: Row(x=x, z=z), st.none() | _INT, st.none() | st.dates()),
}


def _codec(schema: str) -> StructCodec:
    return StructCodec(parse_schema(schema), "the state 'v'")


@st.composite
def _typed(draw: st.DrawFn) -> tuple[str, tuple[Any, ...]]:
    kinds = draw(st.lists(st.sampled_from(sorted(_VALUES)), min_size=1, max_size=5))
    schema = ", ".join(f"f{place} {kind}" for place, kind in enumerate(kinds))
    return schema, tuple(draw(st.none() | _VALUES[kind]) for kind in kinds)


@given(typed=_typed())
def test_value_survives_json_with_its_types(typed: tuple[str, tuple[Any, ...]]) -> None:
    schema, value = typed
    codec = _codec(schema)

    back = codec.from_json(orjson.loads(orjson.dumps(codec.encode(value))))

    assert back == value
    assert list(map(type, back)) == list(map(type, value))


@pytest.mark.parametrize("number", [math.inf, -math.inf, math.nan])
def test_infinities_and_nan_survive_json(number: float) -> None:
    codec = _codec("x double")

    (back,) = codec.from_json(orjson.loads(orjson.dumps(codec.encode((number,)))))

    assert repr(back) == repr(number)


def test_numpy_and_pandas_values_are_stored_as_plain_ones() -> None:
    value = (np.int64(7), np.float32(0.5), np.bool_(True), pd.Timestamp("2020-01-02", tz="UTC"))

    stored = _codec("a long, b double, c boolean, d timestamp").encode(value)

    assert stored == {"a": 7, "b": 0.5, "c": True, "d": "2020-01-02T00:00:00+00:00"}


def test_integer_in_a_double_field_is_read_as_a_float() -> None:
    codec = _codec("x double")

    (back,) = codec.from_json(codec.encode((1,)))

    assert (back, type(back)) == (1.0, float)


def test_time_with_a_zone_is_read_in_local_time() -> None:
    """Spark does the same."""
    moment = datetime(2020, 1, 2, 3, tzinfo=UTC)
    codec = _codec("t timestamp")

    (back,) = codec.from_json(codec.encode((moment,)))

    assert back.tzinfo is None
    assert back.astimezone(UTC) == moment


def test_fields_are_matched_by_name() -> None:
    """A new field is null, and a removed one is dropped."""
    stored = _codec("a int, b int").encode((1, 2))

    assert _codec("c int, b int").from_json(stored) == (None, 2)


@pytest.mark.parametrize(
    ("kind", "value", "stored"),
    [
        ("int", 2.0, 2),
        ("boolean", 1, True),
        ("boolean", 0.0, False),
        ("date", datetime(2020, 1, 2, 3, tzinfo=UTC), "2020-01-02"),
        ("date", np.datetime64("2020-01-02T00:00"), "2020-01-02"),
        ("timestamp", pd.Timestamp("2020-01-02T01:00"), "2020-01-02T06:00:00+00:00"),
        ("timestamp", np.datetime64("2020-01-02T01:00", "ns"), "2020-01-02T06:00:00+00:00"),
        # The hour that the zone has twice.
        ("timestamp", datetime(2020, 11, 1, 1), "2020-11-01T06:00:00+00:00"),  # noqa: DTZ001
        ("array<timestamp>", np.array(["2020-07-02T01:00"], "datetime64[us]"), ["2020-07-02T05:00:00+00:00"]),
        ("map<string,int>", [("a", 1), ("b", None)], [["a", 1], ["b", None]]),
        ("decimal(3,1)", Decimal("1.20"), "1.2"),
    ],
)
def test_near_types_are_taken_as_spark_takes_them(kind: str, value: Any, stored: object) -> None:
    codec = StructCodec(parse_schema(f"x {kind}"), "the output", zone_named("America/New_York"))

    assert codec.encode((value,)) == {"x": stored}


def test_text_for_a_struct_has_a_letter_for_each_field() -> None:
    """Spark takes it for the tuple of its letters."""
    assert _codec("x string").encode("a") == {"x": "a"}
    with pytest.raises(InvalidError, match="one value for each field"):
        _codec("x string").encode("ab")


@pytest.mark.parametrize(("name", "hours"), [("+02:00", 2), ("Asia/Tokyo", 9), ("UTC", 0)])
def test_zone_of_a_session_is_a_region_or_an_offset(name: str, hours: int) -> None:
    assert datetime(2020, 1, 1, tzinfo=zone_named(name)).utcoffset() == timedelta(hours=hours)
    with pytest.raises(InvalidError, match="an offset such as"):
        zone_named("Mars/Olympus")


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("int", 1.5),
        ("int", "1"),
        ("int", True),
        ("int", 2**31),
        ("tinyint", 128),
        ("double", True),
        ("double", "1"),
        ("string", 1),
        ("boolean", 2),
        ("timestamp", date(2020, 1, 2)),
        ("timestamp", pd.Timestamp("2020-01-02T00:00:00.000000001Z")),
        ("decimal(3,1)", Decimal(100)),
        ("decimal(3,1)", Decimal("1.25")),
        ("decimal(3,1)", Decimal("NaN")),
        ("binary", "x"),
        ("array<int>", 1),
        ("array<int>", ["x"]),
        ("map<string,int>", [1]),
        ("map<string,int>", [("a", 1), ("a", 2)]),
        ("struct<x:int>", (1, 2)),
    ],
)
def test_value_of_another_type_is_refused(kind: str, value: Any) -> None:
    """Spark would silently store null."""
    with pytest.raises(InvalidError, match="the state 'v'"):
        _codec(f"x {kind}").encode((value,))


@pytest.mark.parametrize("value", [None, 1, (), (1, 2), {"x": 1}])
def test_value_must_be_a_tuple_of_all_fields(value: Any) -> None:
    with pytest.raises(InvalidError, match="one value for each field"):
        _codec("x int").encode(value)


def test_delta_sink_of_an_output_has_its_columns(tmp_path: Path) -> None:
    """With a schema of its own, columns of the output's names hold the output's values."""
    value = orjson.dumps({"key": "own", "blob": base64.b64encode(b"\x00").decode(), "n": 7}).decode()
    rows = productions(("record's", 5, value))

    def written(sink: Sink) -> list[dict[str, Any]]:
        made = sink_of(sink, "key string, blob binary, n int")
        made.open("store", "p", "out").write(1, rows)
        return read_table(made.identity).to_pylist()

    whole = {"key": "own", "blob": b"\x00", "n": 7}
    assert written(DeltaSink(str(tmp_path / "whole"))) == [whole]
    some = pa.schema([("blob", pa.binary()), ("key", pa.string()), ("at", pa.timestamp("us", tz="UTC"))])
    assert written(DeltaSink(str(tmp_path / "some"), some)) == [
        {"blob": b"\x00", "key": "own", "at": datetime.fromtimestamp(5e-6, UTC)}
    ]
    last = DeltaSink(str(tmp_path / "last"), mode="upsert", keys=["key"])
    assert written(last) == [whole]
    with pytest.raises(InvalidError, match="keys must be columns of the table"):
        sink_of(last, "n int")
