from __future__ import annotations

import datetime as dt
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millpond.statestore.errors import DataError, InvalidError
from millpond.statestore.rows.key_columns import (
    encode_key_columns,
    key_columns_of,
    key_lookup,
    key_word,
    parse_key_word,
    same_texts,
    told_kind,
    typed_column,
)
from millpond.statestore.rows.key_text import encode_key
from tests.fixtures.typed_keys import key_types, key_values, same_key

KINDS = st.lists(key_types(), min_size=1, max_size=3)


def fields(*kinds: pa.DataType) -> tuple[pa.Field, ...]:
    return tuple(pa.field(f"c{place}", kind) for place, kind in enumerate(kinds))


def _typed_columns(keys: pa.ChunkedArray, columns: tuple[pa.Field, ...]) -> list[pa.Array]:
    return [typed_column(columns, place, keys) for place in range(len(columns))]


@given(KINDS)
def test_record_round_trips(kinds: list[pa.DataType]) -> None:
    columns = key_columns_of(fields(*kinds))

    assert columns == fields(*kinds)
    assert parse_key_word(key_word(columns)) == columns


@given(st.data())
def test_view_columns_have_values_of_keys(data: st.DataObject) -> None:
    kinds = data.draw(KINDS)
    rows = data.draw(st.lists(st.tuples(*map(key_values, kinds)), max_size=6))
    texts = pa.chunked_array([[encode_key(row) for row in rows]], pa.string())

    columns = _typed_columns(texts, fields(*kinds))

    assert [column.type for column in columns] == kinds
    read = list(zip(*(column.to_pylist() for column in columns), strict=True))
    assert len(read) == len(rows)
    assert all(map(same_key, rows, read))


def test_other_keys_are_null() -> None:
    texts = pa.chunked_array([["plain", "\t=a", "\ta1\ta1\ta1", "\t=a\td9999\t#a1", "\t=\x1fI\tZ8\t?1"]])

    columns = _typed_columns(texts, fields(pa.string(), pa.int8(), pa.bool_()))

    assert [column.to_pylist() for column in columns] == [
        [None, "a", None, "a", "\t"],
        [None, None, 1, None, -1],
        [None, None, None, None, True],
    ]


def test_compatible_types_share_texts() -> None:
    """Widths may change, kinds may not."""
    pairs = [
        (pa.int8(), pa.int64(), True),
        (pa.float32(), pa.float64(), True),
        (pa.decimal128(5, 2), pa.decimal128(38, 10), True),
        (pa.null(), pa.string(), True),
        (pa.string(), pa.int64(), False),
        (pa.int64(), pa.decimal128(5, 0), False),
        (pa.date32(), pa.timestamp("us"), False),
        (pa.timestamp("us"), pa.timestamp("us", "UTC"), False),
        (pa.struct([("a", pa.int8())]), pa.struct([("a", pa.int64())]), True),
        (pa.struct([("a", pa.int8())]), pa.struct([("b", pa.int8())]), False),
        (pa.struct([("a", pa.int8())]), pa.int8(), False),
    ]

    assert [same_texts(stored, given) for stored, given, _ in pairs] == [same for *_, same in pairs]


@pytest.mark.parametrize(
    ("cells", "kind"),
    [
        ([None, 1, 2], pa.int64()),
        ([None], pa.null()),
        ([1, "a"], pa.null()),
        ([True], pa.bool_()),
        ([dt.datetime.fromisoformat("2026-01-01T00:00Z")], pa.timestamp("us", "UTC")),
        ([dt.datetime.fromisoformat("2026-01-01")], pa.timestamp("us")),
        ([dt.date(2026, 1, 1)], pa.date32()),
        ([{"a": "x", "b": b""}], pa.struct([("a", pa.string()), ("b", pa.binary())])),
    ],
)
def test_column_type_follows_python_values(cells: list[Any], kind: pa.DataType) -> None:
    assert told_kind(cells) == kind


def test_record_ignores_arrow_layout() -> None:
    kinds = [
        pa.dictionary(pa.int8(), pa.large_string()),
        pa.uint16(),
        pa.timestamp("ns", "Europe/Oslo"),
        pa.date64(),
        pa.binary(3),
        pa.string_view(),
    ]

    expected = [pa.string(), pa.int32(), pa.timestamp("us", "UTC"), pa.date32(), pa.binary(), pa.string()]
    assert [column.type for column in key_columns_of(fields(*kinds))] == expected


def test_key_is_found_by_loose_values() -> None:
    columns = fields(pa.int32(), pa.decimal128(10, 2), pa.date32(), pa.timestamp("us", "UTC"), pa.binary())
    day, at = dt.date(2026, 1, 2), dt.datetime(2026, 1, 2, 3, tzinfo=dt.UTC)
    expected = encode_key([7, Decimal("1.5"), day, at, b"\xff"])

    assert key_lookup(["7", "1.5", "2026-01-02", "2026-01-02T03:00:00Z", "ff"], columns) == expected
    assert key_lookup([7, 1.5, day, at, b"\xff"], columns) == expected
    assert key_lookup([None], fields(pa.string())) == encode_key([None])


@pytest.mark.parametrize(
    ("values", "says"),
    [(["x"], "does not convert.*column=`c0`"), (["1", "2"], "must have a value for each column")],
)
def test_inconvertible_or_extra_value_is_refused(values: list[Any], says: str) -> None:
    with pytest.raises(InvalidError, match=says):
        key_lookup(values, fields(pa.int64()))


def test_type_of_later_version_is_refused() -> None:
    with pytest.raises(DataError, match="does not know"):
        parse_key_word('[["a","variant"]]')


def test_columns_after_struct_are_found() -> None:
    kind = pa.struct([("a", pa.int64()), ("b", pa.string())])
    texts = encode_key_columns([pa.array([{"a": 1, "b": "x"}], kind), pa.array(["z"])]).keys

    columns = _typed_columns(pa.chunked_array([texts]), fields(kind, pa.string()))

    assert [column.to_pylist() for column in columns] == [[{"a": 1, "b": "x"}], ["z"]]
