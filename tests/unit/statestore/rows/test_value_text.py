"""Values as text: they come back equal and of their types, and are refused where they would not."""

from __future__ import annotations

import dataclasses
import datetime as dt
import enum
import json
import zoneinfo
from decimal import Decimal
from typing import Any

import duckdb
import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millpond.statestore.errors import InvalidError
from millpond.statestore.rows.value_text import (
    PlainObject,
    decode_value,
    encode_value,
    part_name,
    typed_text,
    typed_value,
)

_NOON = dt.datetime.fromisoformat("2026-01-31T12:00:00")
_DAY = dt.datetime.fromisoformat("2026-01-31T00:00:00")
_ZONES = st.sampled_from(
    [
        dt.UTC,
        zoneinfo.ZoneInfo("UTC"),
        zoneinfo.ZoneInfo("Europe/Oslo"),
        dt.timezone(dt.timedelta(hours=-3, minutes=-30)),
        dt.timezone(dt.timedelta(seconds=7)),
    ]
)
_TEXTS = st.text(max_size=4) | st.sampled_from(["$types", "$value", "~", "/", "0"])
_SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.decimals()
    | _TEXTS
    | st.binary(max_size=4)
    | st.dates()
    | st.times()
    | st.datetimes()
    | st.datetimes(timezones=_ZONES)
    | st.timedeltas()
    | st.uuids()
)
_PARTS = _TEXTS | st.integers() | st.dates() | st.binary(max_size=2)
_KEYS = _PARTS | st.tuples(_PARTS, st.tuples(_PARTS, _TEXTS))
_VALUES = st.recursive(
    _SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(_TEXTS, inner, max_size=3)
        | st.dictionaries(_KEYS, inner, max_size=3)
    ),
    max_leaves=8,
)


def same(one: Any, other: Any) -> bool:
    """Return True for equal values of equal types; two NaN are equal."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        names = list(one) == list(other)
        return names and all(map(same, one, other)) and all(map(same, one.values(), other.values()))
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return repr(one) == repr(other) if isinstance(one, float | Decimal) else bool(one == other)


@given(_VALUES)
def test_value_comes_back_with_its_types(value: Any) -> None:
    text = encode_value(value)

    restored = decode_value(text)
    assert same(restored, value), text
    assert encode_value(restored) == text
    assert same(decode_value(text.encode()), restored)
    described = typed_text(value, lambda *_: None)
    assert same(typed_value(json.loads(described.text), described.types), restored)


@given(st.dictionaries(_TEXTS | st.sampled_from(["at", "amount"]), _SCALARS, max_size=4))
def test_object_has_the_same_text_alone_and_as_a_part(fields: dict[str, Any]) -> None:
    """Objects of fields take a shorter way than nested ones."""
    text, types = encode_value(fields), {}
    alone, outer = json.loads(text), json.loads(encode_value({"part": fields}))

    if text.startswith("  "):
        types = alone.pop("$types")
        alone = alone["$value"] if {"$types", "$value"} & fields.keys() else alone
    assert repr(alone) == repr(outer["part"])
    assert {f"/part{pointer}": word for pointer, word in types.items()} == outer.get("$types", {})


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"n": 3}, '{"n":3}'),
        ({"$types": 1}, '{"$types":1}'),
        ({"amount": Decimal("1.10")}, '  {"amount":"1.10","$types":{"/amount":"decimal"}}'),
        ([dt.date(2026, 1, 31)], '  {"$value":["2026-01-31"],"$types":{"/0":"date"}}'),
        ({"$value": b"x"}, '  {"$value":{"$value":"eA=="},"$types":{"/$value":"bytes"}}'),
        ({7: "a"}, '  {"$value":[[7,"a"]],"$types":{"":"mapping"}}'),
    ],
)
def test_text_is_what_a_reader_expects(value: Any, text: str) -> None:
    assert encode_value(value) == text


def test_plain_object_with_types_stays_one() -> None:
    value = PlainObject(at=dt.date(2026, 1, 31))
    assert same(decode_value(encode_value(value)), value)


def test_sql_reads_a_typed_text_like_any_other() -> None:
    text = encode_value({"count": 3, "amount": Decimal("1.10"), "at": _NOON})

    read = duckdb.sql(
        "select $1 ->> 'count', ($1 ->> 'amount')::decimal(9, 2), ($1 ->> 'at')::timestamp", params=[text]
    )
    assert read.fetchall() == [("3", Decimal("1.10"), _NOON)]


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (np.int16(3), 3),
        (np.float64(1.5), 1.5),
        (np.bool_(True), True),
        (np.str_("a"), "a"),
        (np.array([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
        (np.datetime64("2026-01-31T12:00", "ns"), _NOON),
        (np.timedelta64(5, "s"), dt.timedelta(seconds=5)),
        (np.array(["2026-01-31", "NaT"], "M8[ns]"), [_DAY, None]),
        (pd.Timestamp("2026-01-31 12:00", tz="UTC"), dt.datetime(2026, 1, 31, 12, tzinfo=dt.UTC)),
        (pd.Timedelta("5s"), dt.timedelta(seconds=5)),
        ([pd.NaT, pd.NA], [None, None]),
        ((1, (b"x",)), [1, [b"x"]]),
        (bytearray(b"x"), b"x"),
        (memoryview(b"abcdef")[::2], b"ace"),
        (np.timedelta64("NaT"), None),
        (pd.Series([1, 2]), [1, 2]),
        (pd.Series([1.5, None]), [1.5, None]),
        (pd.Series([_DAY, None]), [_DAY, None]),
        (pd.Index(["a", "b"]), ["a", "b"]),
        (pd.Categorical(["a", "b", None]), ["a", "b", None]),
        (pd.array([1, None], dtype="Int64"), [1, None]),
    ],
)
def test_scalars_of_libraries_become_pythons(value: Any, plain: Any) -> None:
    assert same(decode_value(encode_value({"part": value})), {"part": plain})


@dataclasses.dataclass
class Point:
    x: int


class Kind(enum.StrEnum):
    BUS = "bus"


_NESTED: list[Any] = []
_NESTED.append(_NESTED)
_NESTED.append(_NESTED)


@pytest.mark.parametrize(
    ("value", "part", "kind"),
    [
        (object(), "value", "object"),
        ({"items": [{}, {"price": {1, 2}}]}, "value.items[1].price", "set"),
        ({"a/b": Point(1)}, "value.a/b", "Point"),
        ([Kind.BUS], "value[0]", "Kind"),
        ({"a": "\ud800"}, "value.a", "str"),
        ({"a": {"\ud800": 1}}, "value.a[0][0]", "str"),
        ({dt.date(2026, 1, 31): 1j}, "value[0][1]", "complex"),
        ({"a": lambda: 1}, "value.a", "function"),
        ({"a": pd.Period("2026")}, "value.a", "Period"),
        (b"x".hex, "value", "builtin_function_or_method"),
        ([np.longdouble(1)], "value[0]", "longdouble"),
        ({"a": np.array([1], np.longdouble)}, "value.a[0]", "longdouble"),
        (pd.DataFrame({"a": [1]}), "value", "DataFrame"),
        (pd.period_range("2026", periods=1, freq="M"), "value[0]", "Period"),
    ],
)
def test_no_value_is_refused_with_its_part(value: Any, part: str, kind: str) -> None:
    with pytest.raises(InvalidError, match="values cannot have") as caught:
        encode_value(value)
    assert (caught.value.details["part"], caught.value.details["type"]) == (part, kind)


@pytest.mark.parametrize(
    "value", [pd.Timestamp(1), np.datetime64(1, "ns"), pd.Timedelta(1), np.timedelta64(1, "ns")]
)
def test_nanoseconds_are_refused(value: Any) -> None:
    with pytest.raises(InvalidError, match="no whole number of microseconds"):
        encode_value([value])


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (np.datetime64("20000-01-01"), "years 1 to 9999"),
        (np.array(["2026-01-01", "-0001-01-01"], "M8[s]"), "years 1 to 9999"),
        (np.timedelta64(1, "M"), "weeks or a shorter unit"),
        (np.array([1, 2], "m8[Y]"), "weeks or a shorter unit"),
        (np.timedelta64(1), "weeks or a shorter unit"),
        (np.timedelta64(10**10, "D"), "more than 64 bits"),
        (dt.time(1, tzinfo=zoneinfo.ZoneInfo("Europe/Berlin")), "offset depends on the day"),
        ("a\ud800", "half a character"),
    ],
)
def test_value_that_would_change_is_refused_with_its_part(value: Any, reason: str) -> None:
    with pytest.raises(InvalidError, match=reason) as caught:
        encode_value({"a": [value]})
    assert caught.value.details["part"] == "value.a[0]"


@pytest.mark.parametrize("value", [dt.timedelta.max, dt.timedelta.min])
def test_longest_durations_come_back(value: Any) -> None:
    assert decode_value(encode_value([value])) == [value]


def test_value_that_contains_itself_is_refused() -> None:
    with pytest.raises(InvalidError, match="contains itself"):
        encode_value(_NESTED)


def test_part_is_named_as_python_would() -> None:
    assert part_name("/items/3/price") == "value.items[3].price"
