"""Columns that are fitted to a schema: what fits as a value fits as a column, and becomes the same cells."""

from __future__ import annotations

import math
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import assume, event, given
from hypothesis import strategies as st

from millpond.statestore.errors import InvalidError
from millpond.statestore.rows.schema_columns import fitted_rows
from millpond.statestore.rows.state_schema import SchemaCodec, cells_of

KINDS = [
    pa.bool_(),
    pa.int8(),
    pa.int64(),
    pa.float32(),
    pa.float64(),
    pa.decimal128(9, 2),
    pa.decimal128(38, 38),
    pa.string(),
    pa.binary(),
    pa.date32(),
    pa.timestamp("us", "UTC"),
    pa.list_(pa.int32()),
    pa.struct([("a", pa.int8()), ("b", pa.string())]),
    pa.map_(pa.string(), pa.int8()),
]
GIVEN: list[tuple[pa.DataType, st.SearchStrategy[Any]]] = [
    (pa.null(), st.none()),
    (pa.bool_(), st.booleans()),
    (pa.int8(), st.integers(-128, 127)),
    (pa.int64(), st.sampled_from([0, 127, 128, 2**24 + 1, 2**53 + 1, -(2**63), 2**63 - 1])),
    (pa.uint64(), st.sampled_from([0, 2**63 - 1, 2**63])),
    (pa.float32(), st.floats(width=32)),
    (pa.float64(), st.sampled_from([0.5, 1.0, -0.0, 2.0**63, math.nan, math.inf, 1e300, 1e-300])),
    (pa.decimal128(9, 2), st.integers(-(10**9) + 1, 10**9 - 1).map(lambda cents: Decimal(cents) / 100)),
    (pa.decimal128(20, 3), st.sampled_from([Decimal("1.001"), Decimal("1.100"), Decimal(10**16)])),
    (pa.string(), st.sampled_from(["", "1", "é"])),
    (pa.large_string(), st.sampled_from(["", "true"])),
    (pa.dictionary(pa.int32(), pa.string()), st.sampled_from(["x", "y"])),
    (pa.binary(), st.binary(max_size=2)),
    (pa.date32(), st.dates()),
    (pa.timestamp("us", "UTC"), st.datetimes(timezones=st.just(UTC))),
    (pa.timestamp("us"), st.datetimes()),
    (pa.list_(pa.int64()), st.lists(st.sampled_from([0, 1, 2**40]), max_size=2)),
    (pa.list_(pa.float64()), st.lists(st.sampled_from([0.5, 2.0]), max_size=2)),
    (pa.struct([("b", pa.string()), ("a", pa.int8())]), st.just({"b": "x", "a": 1})),
    (pa.struct([("a", pa.int64())]), st.sampled_from([{"a": 5}, {"a": 300}, {"a": None}])),
    (pa.struct([("c", pa.int8())]), st.just({"c": 1})),
    (pa.map_(pa.string(), pa.int8()), st.just({"x": 1})),
]


@given(kind=st.sampled_from(KINDS), given_=st.sampled_from(GIVEN), data=st.data(), is_nullable=st.booleans())
def test_columns_are_fitted_as_their_values_are(
    kind: pa.DataType, given_: Any, data: st.DataObject, *, is_nullable: bool
) -> None:
    """A type may be refused whose values would fit: of no values, and of nested types, which are cast as a whole."""
    given_kind, cells = given_
    values = data.draw(st.lists(st.none() | cells, max_size=3))
    try:
        column = pa.array(values, given_kind)
    except (pa.ArrowException, ValueError):
        assume(False)
    codec = SchemaCodec(pa.schema([pa.field("x", kind, nullable=is_nullable)]))
    try:
        expected = [codec.encode({"x": value}) for value in values]
    except InvalidError:
        expected = None
    try:
        found = cells_of(fitted_rows({"x": column}, codec, "state"))
    except InvalidError:
        found = None
    event("refused" if found is None else "fitted")
    if found is None:
        assert expected is None or pa.types.is_nested(kind) or column.null_count == len(column)
        return
    assert expected is not None
    for one, other in zip(found, expected, strict=True):
        assert one == other or repr(one) == repr(other)
        assert type(one[0]) is type(other[0])


CODEC = SchemaCodec(
    pa.schema([("n", pa.int64()), ("s", pa.string()), pa.field("must", pa.int8(), nullable=False)])
)


@pytest.mark.parametrize(
    "rows",
    [
        {"must": [1, 2], "n": np.array([3, 4])},
        pa.table({"n": [3, 4], "must": [1, 2]}),
        pa.record_batch({"n": [3, 4], "must": [1, 2]}),
        pa.chunked_array([[{"n": 3, "must": 1}], [{"n": 4, "must": 2}]]),
        {"must": pa.chunked_array([[1], [2]]), "n": pa.chunked_array([[3, 4]])},
    ],
)
def test_rows_come_in_any_form_of_columns(rows: Any) -> None:
    assert cells_of(fitted_rows(rows, CODEC, "state")) == [(3, None, 1), (4, None, 2)]


def test_null_rows_need_no_fields() -> None:
    rows = pa.array([None, {"n": 3, "must": 1}], pa.struct([("n", pa.int64()), ("must", pa.int64())]))

    assert cells_of(fitted_rows(rows, CODEC, "state")) == [None, (3, None, 1)]


@pytest.mark.parametrize(
    ("rows", "words", "part"),
    [
        ([{"n": 1}], "as columns", "state"),
        ({}, "as columns", "state"),
        ({"mus": [1]}, "no such field; did you mean 'must'", "state.mus"),
        ({"n": [1, 2], "must": [1]}, "one length", "state"),
        ({"n": [1]}, "takes no null", "state.must"),
        ({"n": ["1"], "must": [1]}, "another type", "state.n"),
        ({"n": [1.5], "must": [1]}, "without a change", "state.n"),
        ({"n": 5, "must": [1]}, "Arrow or NumPy array", "state.n"),
        ({"n": [1, "x"], "must": [1, 1]}, "make no column", "state.n"),
        (pa.Table.from_arrays([pa.array([1])] * 2, names=["n", "n"]), "different names", "state"),
    ],
)
def test_misfits_are_refused_by_name(rows: Any, words: str, part: str) -> None:
    with pytest.raises(InvalidError, match=words) as raised:
        fitted_rows(rows, CODEC, "state")
    assert raised.value.details["part"] == part


def test_text_that_is_no_utf8_is_refused() -> None:
    text = pa.Array.from_buffers(
        pa.string(), 1, [None, pa.py_buffer(np.array([0, 1], np.int32)), pa.py_buffer(b"\xff")]
    )
    with pytest.raises(InvalidError, match="do not have"):
        fitted_rows({"s": text, "must": [1]}, CODEC, "state")


def test_nested_fields_without_nulls_are_looked_at() -> None:
    inner = pa.struct([pa.field("a", pa.int8(), nullable=False)])
    codec = SchemaCodec(
        pa.schema([("one", inner), ("many", pa.list_(inner)), ("by", pa.map_(pa.string(), inner))])
    )
    fits = {"one": {"a": 1}, "many": [{"a": 1}], "by": {"x": {"a": 1}}}
    for name, misfit in {"one": {"a": None}, "many": [{"a": None}], "by": {"x": {"a": None}}}.items():
        with pytest.raises(InvalidError, match="takes no null"):
            fitted_rows(pa.array([{**fits, name: misfit}], codec.column.type), codec, "state")
    rows = pa.array([fits, {"one": None, "many": None, "by": None}], codec.column.type)
    assert cells_of(fitted_rows(rows, codec, "state"))[1] == (None, None, None)


def test_days_and_times_of_other_types() -> None:
    codec = SchemaCodec(pa.schema([("d", pa.date32()), ("t", pa.timestamp("us", "UTC"))]))
    at = datetime(2026, 1, 1, 12, tzinfo=UTC)
    rows = {
        "d": pa.array([date(2026, 1, 1)], pa.date64()),
        "t": pa.array([at], pa.timestamp("ns", "Europe/Oslo")),
    }
    assert cells_of(fitted_rows(rows, codec, "state")) == [(date(2026, 1, 1), at)]
