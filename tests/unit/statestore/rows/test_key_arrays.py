from __future__ import annotations

import datetime as dt
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millpond.statestore.errors import InvalidError
from millpond.statestore.rows.key_columns import check_key_type, encode_key_columns
from millpond.statestore.rows.key_text import encode_key
from tests.fixtures.typed_keys import key_types, key_values


@given(st.data())
def test_column_and_single_values_give_same_texts(data: st.DataObject) -> None:
    kinds = data.draw(st.lists(key_types(), min_size=1, max_size=3))
    rows = data.draw(st.lists(st.tuples(*map(key_values, kinds)), max_size=6))
    columns = [pa.array([row[place] for row in rows], kind) for place, kind in enumerate(kinds)]
    cut = data.draw(st.integers(0, len(rows)))

    expected = [encode_key(row) for row in rows]
    sliced = encode_key_columns([column.slice(cut) for column in columns])
    chunked = encode_key_columns([pa.chunked_array([column[:cut], column[cut:]]) for column in columns])

    assert encode_key_columns(columns).keys.to_pylist() == expected
    assert sliced.keys.to_pylist() == expected[cut:]
    assert chunked.keys.to_pylist() == expected


@pytest.mark.parametrize(
    ("column", "values"),
    [
        (pa.array(["a", None]).dictionary_encode(), ["a", None]),
        (pa.array(["a\n"], pa.large_string()), ["a\n"]),
        (pa.array(["a"], pa.string_view()), ["a"]),
        (pa.array([200], pa.uint8()), [200]),
        (pa.array([1.5], pa.float16()), [1.5]),
        (pa.array([b"ab"], pa.binary(2)), [b"ab"]),
        (pa.array([b"ab"], pa.large_binary()), [b"ab"]),
        (pa.array([dt.date(2026, 1, 2)], pa.date64()), [dt.date(2026, 1, 2)]),
        (pa.array([86_400], pa.timestamp("s", "Europe/Oslo")), [dt.datetime(1970, 1, 2, tzinfo=dt.UTC)]),
        (pa.array([5_000], pa.timestamp("ns", "UTC")), [dt.datetime(1970, 1, 1, 0, 0, 0, 5, dt.UTC)]),
        (pa.nulls(2), [None, None]),
    ],
)
def test_arrow_layouts_give_same_texts(column: pa.Array, values: list[Any]) -> None:
    check_key_type(column.type, "column")

    assert encode_key_columns([column]).keys.to_pylist() == [encode_key([value]) for value in values]


def test_unreadable_value_affects_only_its_row() -> None:
    days = pa.array(np.array([0, 2_932_897, -800_000], np.int32)).cast(pa.date32())
    fine = pa.array([1, 1_000, None], pa.int64()).cast(pa.timestamp("ns"))

    keys = encode_key_columns([days, fine])

    assert keys.keys.to_pylist() == [None, None, None]
    assert keys.errors == {
        0: "a time in the key has a part of a microsecond",
        1: "a date or time in the key is not in the years 1 to 9999",
        2: "a date or time in the key is not in the years 1 to 9999",
    }
    assert encode_key_columns([days.slice(0, 1), fine.slice(1, 1)]).errors == {}
    parts = encode_key_columns([pa.array([1, 86_400_000, None]).view(pa.date64())])
    assert parts.errors == {0: "a date in the key has a part of a day"}
    assert parts.keys[1].as_py() == encode_key([dt.date(1970, 1, 2)])


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (pa.list_(pa.int64()), "single values"),
        (pa.map_(pa.string(), pa.int64()), "single values"),
        (pa.struct([("a", pa.list_(pa.int64()))]), "column=`cell.a`"),
        (pa.struct([]), "at least one field"),
        (pa.decimal256(40, 2), "38 digits"),
        (pa.uint64(), "cast the column"),
        (pa.duration("us"), "cast the column"),
        (pa.time64("us"), "cast the column"),
    ],
)
def test_refused_column_type_is_named(kind: pa.DataType, says: str) -> None:
    with pytest.raises(InvalidError, match=says):
        check_key_type(kind, "cell")
