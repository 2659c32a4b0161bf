"""Typed columns for the parts of states."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from millpond.statestore.errors import DataError
from millpond.statestore.view_columns import (
    StateColumn,
    fits,
    parse_state_word,
    parsed_states,
    state_columns_in,
    state_word,
)

_CENTS = pa.struct([("cents", pa.int64())])
_PAIR = pa.struct([("day", pa.date32()), ("cents", pa.decimal128(10, 2))])
_TIME = pa.timestamp("us", "UTC")
_AT = dt.datetime(2026, 11, 23, 17, 36, 50, tzinfo=dt.UTC)
_AT_MS = int(_AT.timestamp() * 1_000)


def _cells(column: StateColumn, *parts: Any) -> list[Any]:
    return column.cells([{column.name: part} for part in parts]).to_pylist()


@pytest.mark.parametrize(
    ("column", "shown", "stored", "cell"),
    [
        (StateColumn("v", "value", _CENTS), pa.int64(), {"cents": 300}, 300),
        (StateColumn("v", "value", _CENTS), pa.int64(), {"value": {"cents": 300}, "expires_at_ms": 1}, 300),
        (
            StateColumn("v", "value", _PAIR),
            _PAIR,
            {"day": "2026-11-23", "cents": "1.50"},
            {"day": dt.date(2026, 11, 23), "cents": Decimal("1.50")},
        ),
        (StateColumn("v", "list", _CENTS), pa.list_(pa.int64()), [{"cents": 1}, {"cents": None}], [1, None]),
        (
            StateColumn("v", "map", _CENTS, pa.struct([("d", pa.date32())])),
            pa.map_(pa.date32(), pa.int64()),
            [{"key": {"d": "2026-11-23"}, "value": {"cents": 7}}],
            [(dt.date(2026, 11, 23), 7)],
        ),
        (StateColumn("v", "field", pa.float64()), pa.float64(), 3, 3.0),
        (StateColumn("v", "field", pa.float64()), pa.float64(), "inf", float("inf")),
        (StateColumn("v", "field", _TIME), _TIME, "2026-11-23T17:36:50+00:00", _AT),
        (StateColumn("v", "field", pa.binary()), pa.binary(), "AP8=", b"\0\xff"),
        (
            StateColumn("v", "field", pa.map_(pa.string(), pa.list_(pa.int32()))),
            pa.map_(pa.string(), pa.list_(pa.int32())),
            [["a", [1, None]], ["b", None]],
            [("a", [1, None]), ("b", None)],
        ),
    ],
)
def test_part_has_typed_cell(column: StateColumn, shown: pa.DataType, stored: Any, cell: Any) -> None:
    """A struct of one field is shown as that field."""
    assert column.shown == shown
    assert column.cells([{"v": stored}]).type == shown
    assert _cells(column, stored) == [cell]


def test_value_of_wrong_type_is_null() -> None:
    """No stored state may make a view unreadable."""
    column = StateColumn("v", "value", _PAIR)
    good = {"day": "2026-11-23", "cents": "2"}

    assert _cells(column, {"day": "soon"}, [1], 7, {"cents": 10**20}, None, good)[:-1] == [None] * 5
    assert _cells(column, good) == [{"day": dt.date(2026, 11, 23), "cents": Decimal("2.00")}]
    assert column.cells(parsed_states([None, "no JSON", "[]", "3", "{}"])).null_count == 5


def test_expiries_mirror_their_values() -> None:
    """A value stored without a time to live has null."""
    keys = pa.struct([("k", pa.string())])
    value = {"value": {"cents": 1}, "expires_at_ms": _AT_MS}
    columns = [
        StateColumn("v", "value", _CENTS, has_expiry=True),
        StateColumn("v", "list", _CENTS, has_expiry=True),
        StateColumn("v", "map", _CENTS, keys, has_expiry=True),
    ]
    stored = [value, [value, {"cents": 2}], [{"key": {"k": "a"}, **value}]]

    shown = [column.expiries([{"v": part}]).to_pylist() for column, part in zip(columns, stored, strict=True)]

    assert shown == [[_AT], [[_AT, None]], [[("a", _AT)]]]
    assert columns[1].cells([{"v": stored[1]}]).to_pylist() == [[1, 2]]


def test_newest_record_counts() -> None:
    """A rewound record does not."""
    kinds = [pa.struct([("x", pa.list_(pa.map_(pa.string(), _PAIR))), ("t", _TIME)]), _CENTS]
    columns = (
        StateColumn("a", "map", kinds[0], kinds[1], has_expiry=True),
        StateColumn("b", "list", kinds[1]),
    )
    before = state_word([StateColumn("b", "list", kinds[1])])
    name = f"millpond/state_columns/c/{state_word(columns)}".replace("%", "%25")

    assert parse_state_word(state_word(columns)) == columns
    assert state_columns_in({f"millpond/state_columns/c/{before}": 3, name: 9}, "c") == columns
    assert state_columns_in({f"millpond/state_columns/c/{before}": 3, name: -1}, "c") == columns[1:]
    assert state_columns_in({name: 9}, "other") == ()


@pytest.mark.parametrize(
    "word",
    [
        '[["a","field","year",null,false]]',
        '[["a","heap","long",null,false]]',
        "7",
        '[["a"]]',
        '[["a","field",{"x":1},null,false]]',
    ],
)
def test_record_of_later_version_is_refused(word: str) -> None:
    with pytest.raises(DataError, match="does not know"):
        parse_state_word(word)


@pytest.mark.parametrize(
    ("before", "now", "is_read"),
    [
        (pa.int32(), pa.int64(), True),
        (pa.int64(), pa.int32(), False),
        (pa.int64(), pa.float64(), True),
        (pa.float64(), pa.int64(), False),
        (pa.string(), pa.date32(), False),
        (pa.decimal128(10, 2), pa.decimal128(12, 3), True),
        (pa.decimal128(10, 2), pa.decimal128(10, 3), False),
        (pa.null(), pa.string(), True),
        (pa.list_(pa.int32()), pa.list_(pa.int64()), True),
        (pa.list_(pa.int32()), pa.int64(), False),
        (pa.map_(pa.string(), pa.int32()), pa.map_(pa.string(), pa.int64()), True),
        (pa.map_(pa.string(), pa.int32()), pa.map_(pa.int32(), pa.int32()), False),
        (_PAIR, pa.struct([("cents", pa.decimal128(10, 2)), ("new", pa.string())]), True),
        (_PAIR, pa.struct([("cents", pa.string())]), False),
    ],
)
def test_fields_may_change_and_numbers_may_widen(
    before: pa.DataType, now: pa.DataType, *, is_read: bool
) -> None:
    """Any other change would misread stored states."""
    assert fits(StateColumn("a", "field", before), StateColumn("a", "field", now)) is is_read


def test_kind_of_part_must_not_change() -> None:
    keys = [pa.struct([("k", kind)]) for kind in (pa.string(), pa.int64())]

    assert not fits(StateColumn("a", "value", _CENTS), StateColumn("a", "list", _CENTS))
    assert not fits(StateColumn("a", "map", _CENTS, keys[0]), StateColumn("a", "map", _CENTS, keys[1]))
    assert fits(StateColumn("a", "map", _CENTS, keys[0]), StateColumn("a", "map", _CENTS, keys[0]))
