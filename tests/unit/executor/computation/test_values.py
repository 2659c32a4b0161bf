"""Record values in columns."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from datetime import UTC, date, datetime, time
from decimal import Decimal
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millpond.executor.computation.values import (
    UNHELD,
    ArrowValues,
    ConcatenatedValues,
    JsonValues,
    PythonValues,
    Values,
)
from millpond.executor.inputs.payload import UndecodedRow, python_rows
from millpond.statestore.errors import DataError, InvalidError
from millpond.statestore.rows.state_schema import plain_cells

TABLE = pa.table({"city": ["Bergen", None], "days": [[1, 2], []], "rain": [True, False]})


def all_of(values: Values) -> list[Any]:
    return [values.value(index) for index in range(len(values))]


def test_row_becomes_a_dict_in_column_order() -> None:
    assert all_of(ArrowValues(TABLE)) == [
        {"city": "Bergen", "days": [1, 2], "rain": True},
        {"city": None, "days": [], "rain": False},
    ]
    assert list(ArrowValues(TABLE).value(0)) == ["city", "days", "rain"]


def test_batch_and_sliced_struct_equal_the_table() -> None:
    batch = TABLE.to_batches()[0]
    sliced = pa.concat_arrays([batch.to_struct_array(), batch.to_struct_array()]).slice(1, 2)

    assert all_of(ArrowValues(batch)) == all_of(ArrowValues(TABLE))
    assert all_of(ArrowValues(sliced)) == all_of(ArrowValues(TABLE))[::-1]


def test_null_struct_is_none_and_row_without_columns_is_an_empty_dict() -> None:
    struct = pa.array([None, {"a": 1}])

    assert all_of(ArrowValues(struct)) == [None, {"a": 1}]
    assert all_of(ArrowValues(pa.array([{}, {}], pa.struct([])))) == [{}, {}]


_DAY_NS = 86_400 * 10**9


@pytest.mark.parametrize(
    ("column", "held"),
    [
        (pa.array([10**7, 0, None], pa.int32()).cast(pa.date32()), date(1970, 1, 1)),
        (pa.array([2**60, 0, None]).cast(pa.timestamp("us")), datetime(1970, 1, 1)),  # noqa: DTZ001 - Arrow's
        (pa.array([1001, 1000, None]).cast(pa.time64("ns")), time(0, 0, 0, 1)),
        (pa.array([_DAY_NS, 0, None]).view(pa.time64("ns")), time()),
        (pa.array([1, 0, None]).view(pa.date64()), date(1970, 1, 1)),
        (pa.array([1001, 1000, None]).cast(pa.time64("ns")).dictionary_encode(), time(0, 0, 0, 1)),
        (pa.array([b"\xff", b"a", None]).view(pa.string()), "a"),
    ],
    ids=["date", "timestamp", "nanoseconds", "after midnight", "part of a day", "dictionary", "text"],
)
@pytest.mark.parametrize("nest", ["plain", "struct", "list", "map"])
def test_cell_that_python_cannot_hold_is_an_error_of_its_row_alone(
    column: pa.Array, held: Any, nest: str
) -> None:
    if nest == "struct":
        column, held = pa.StructArray.from_arrays([column], names=["x"]), {"x": held}
    elif nest == "list":
        column, held = pa.ListArray.from_arrays(pa.array([0, 1, 2, 3], pa.int32()), column), [held]
    elif nest == "map":
        names = pa.array(["x"] * len(column))
        column = pa.MapArray.from_arrays(pa.array([0, 1, 2, 3], pa.int32()), names, column)
        held = {"x": held}
    table = pa.table({"n": [1, 2, 3], "v": column})

    values = ArrowValues(table)
    with pytest.raises(InvalidError, match="a value of the row cannot be read"):
        values.value(0)
    assert values.value(1) == {"n": 2, "v": held}
    assert values.value(2)["n"] == 3
    rows = python_rows(table)
    assert isinstance(rows[0], UndecodedRow)
    assert rows[1:] == [values.value(1), values.value(2)]


def test_text_view_with_bytes_is_an_error_of_its_row_alone() -> None:
    """Arrow can slice such a column, and not take rows of it."""
    values = ArrowValues(
        pa.table({"v": pa.array([b"\xff", b"a"]).cast(pa.binary_view()).view(pa.string_view())})
    )

    with pytest.raises(InvalidError, match="a value of the row cannot be read"):
        values.value(0)
    assert values.value(1) == {"v": "a"}


def test_map_is_a_dict_and_one_with_a_repeated_key_an_error() -> None:
    maps = pa.array([[("a", 1)], [("a", 1), ("a", 2)], []], pa.map_(pa.string(), pa.int64()))
    numbered = pa.array([[(1, None)], None, []], pa.map_(pa.int64(), pa.int64()))
    values = ArrowValues(pa.table({"m": maps, "n": numbered}))

    assert [values.value(0), values.value(2)] == [{"m": {"a": 1}, "n": {1: None}}, {"m": {}, "n": {}}]
    assert values.row(1) == ([("a", 1), ("a", 2)], None)
    with pytest.raises(InvalidError, match="duplicate key"):
        values.value(1)


@pytest.mark.parametrize(
    "values",
    [
        ArrowValues(TABLE),
        JsonValues(pa.array(['{"days": [1]}', '{"days": []}'])),
        PythonValues([{"days": [1]}, {"days": []}]),
        PythonValues([{"days": 1}, {"days": 2}]),
    ],
)
def test_changed_value_reads_unchanged_again(values: Values) -> None:
    before = all_of(values)
    for value in all_of(values):
        if isinstance(value["days"], list):
            value["days"].append(9)
        value["days"] = None

    assert all_of(values) == before


class _Marked(datetime):
    """A datetime that code can change."""

    notes: list[str]


def test_immutable_times_are_shared_between_copies() -> None:
    """A datetime with attributes is mutable, so it is copied."""
    marked = _Marked(2013, 2, 8, tzinfo=UTC)
    marked.notes = ["snow"]
    times = [datetime(2013, 2, 8, tzinfo=UTC), date(2013, 2, 8), Decimal("1.5"), pd.Timestamp("2013-02-08")]
    for value in (*times, marked):
        row = {"at": value}
        copied = PythonValues([row]).value(0)
        copied["more"] = 1

        assert row == {"at": value}
        assert (copied["at"] is value) == (value is not marked)
        assert copied["at"] == value


def test_text_is_decoded_and_bytes_stay_bytes() -> None:
    values = JsonValues(pa.array(["[1]", None, "null", None]), pa.array([None, b"\x00", None, None]))

    assert all_of(values) == [[1], b"\x00", None, None]


def test_broken_json_raises_when_read() -> None:
    values = JsonValues(pa.array(["{", "1"]))

    assert values.value(1) == 1
    with pytest.raises(DataError):
        values.value(0)


@pytest.mark.parametrize(
    "values",
    [
        ArrowValues(TABLE),
        JsonValues(pa.array(["1", None]), pa.array([None, b"x"])),
        PythonValues([1, "x"]),
        ConcatenatedValues([PythonValues([1]), JsonValues(pa.array(["2"]))]),
    ],
)
def test_take_selects_reorders_and_repeats(values: Values) -> None:
    first, second = all_of(values)

    assert all_of(values.take(np.array([1, 0, 1]))) == [second, first, second]


def test_values_survive_pickling() -> None:
    """The pickle omits the cache of decoded values."""
    for values in (ArrowValues(TABLE), JsonValues(pa.array(["1"]), pa.array([None], pa.binary()))):
        before = all_of(values)

        assert all_of(pickle.loads(pickle.dumps(values))) == before


def test_concatenated_values_have_continuous_positions() -> None:
    values = ConcatenatedValues([PythonValues([]), PythonValues([1, 2]), PythonValues([]), PythonValues([3])])

    assert (len(values), all_of(values)) == (3, [1, 2, 3])


_MOMENTS_US = (
    st.integers(-(2**63), 2**63 - 1) | st.integers(-(10**17), 10**18) | st.sampled_from([-(2**63), 0])
)


@pytest.mark.parametrize(
    "kind",
    [pa.timestamp("us"), pa.timestamp("us", "UTC"), pa.timestamp("us", "Europe/Oslo"), pa.duration("us")],
    ids=str,
)
@given(moments=st.lists(st.none() | _MOMENTS_US, max_size=5))
def test_times_are_those_of_arrow(kind: pa.DataType, moments: list[int | None]) -> None:
    """Their zones too, and what Python cannot hold is refused, not taken for a missing value."""
    column = pa.array(moments, pa.int64()).view(kind)

    assert _cells(plain_cells, column) == _cells(pa.Array.to_pylist, column)


@given(
    days=st.lists(st.none() | st.integers(-(2**31), 2**31 - 1) | st.integers(-700_000, 2_900_000), max_size=5)
)
def test_dates_are_those_of_arrow(days: list[int | None]) -> None:
    column = pa.array(days, pa.int32()).view(pa.date32())

    assert _cells(plain_cells, column) == _cells(pa.Array.to_pylist, column)


@pytest.mark.parametrize(
    "kind", [pa.decimal128(38, 10), pa.decimal128(5, -2), pa.decimal256(76, 40)], ids=str
)
@given(numbers=st.lists(st.none() | st.integers(-99_999, 99_999), max_size=5))
def test_decimals_are_those_of_arrow(kind: Any, numbers: list[int | None]) -> None:
    digits = [None if number is None else Decimal(number).scaleb(-kind.scale) for number in numbers]
    column = pa.array(digits, kind)

    assert _cells(plain_cells, column) == _cells(pa.Array.to_pylist, column)


def _cells(read: Callable[[pa.Array], list[Any]], column: pa.Array) -> object:
    try:
        return [(repr(cell), type(cell)) for cell in read(column)]
    except UNHELD:
        return "refused"


def test_nested_value_is_read_any_number_of_times() -> None:
    """Each time as an object of its own; one that Python cannot hold disturbs no other row."""
    maps = pa.array([[("a", 1)], [("b", 2), ("b", 3)], [("c", 4)]], pa.map_(pa.string(), pa.int64()))
    values = ArrowValues(pa.table({"map": maps}))

    first, again = values.value(0), values.value(0)
    assert first == again == {"map": {"a": 1}}
    assert first["map"] is not again["map"]
    with pytest.raises(InvalidError, match="map"):
        values.value(1)
    assert values.value(2) == {"map": {"c": 4}}
    assert values.row(2) == ([("c", 4)],)
