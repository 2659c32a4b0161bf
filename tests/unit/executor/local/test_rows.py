"""The forms of rows that the local runner accepts."""

from __future__ import annotations

from datetime import UTC, datetime, time
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest

from millpond.executor.inputs.extraction import pieces, rows_from
from millpond.statestore.errors import InvalidError


class SpeaksArrow:
    """An object that has only Arrow's C stream."""

    def __init__(self, table: pa.Table) -> None:
        self.table = table

    def __arrow_c_stream__(self, schema: object = None) -> object:
        return self.table.__arrow_c_stream__(schema)


def test_tables_of_every_kind_become_arrow_tables():
    table = pa.table({"n": [1, 2]})

    assert rows_from(table) is table
    assert rows_from(pa.record_batch({"n": [1, 2]})) == table
    assert rows_from(SpeaksArrow(table)) == table
    assert rows_from(pd.DataFrame({"n": [1, 2]}, index=["x", "y"])).column_names == ["n"]


VIEWS = pa.struct(
    [
        ("text", pa.list_(pa.string_view())),
        ("blob", pa.binary_view()),
        ("none", pa.struct([("x", pa.null())])),
    ]
)


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (pa.string_view(), ["a", None, "c"]),
        (pa.map_(pa.string_view(), pa.binary_view()), [[("a", b"b")], None, []]),
        (pa.list_(pa.large_list(pa.string_view())), [[["a"], None], None, []]),
        (pa.run_end_encoded(pa.int32(), pa.string()), ["a", "a", None]),
        (
            VIEWS,
            [
                {"text": ["a"], "blob": b"b", "none": {"x": None}},
                None,
                {"text": None, "blob": None, "none": None},
            ],
        ),
    ],
)
def test_rows_can_be_taken_of_views_and_runs_in_any_slice(kind: pa.DataType, values: list[Any]) -> None:
    """Arrow itself takes none of views, and its cast of a slice of structs loses nulls."""
    for start in range(len(values)):
        rows = rows_from(pa.table({"v": pa.array(values, kind)}).slice(start))

        assert isinstance(rows, pa.Table)
        order = pa.array(range(len(values) - start), pa.int64())
        assert rows.take(order).column("v").to_pylist() == values[start:]


def test_mappings_are_copied_when_read():
    """The caller may reuse the row."""
    row = {"n": 1}

    rows = rows_from(row)
    row["n"] = 2

    assert rows == [{"n": 1}]
    assert rows_from([row]) == [{"n": 2}]
    assert rows_from(iter([row, row])) == [{"n": 2}] * 2


def test_other_value_among_mappings_is_kept():
    """It becomes a dead letter; one bad row must not fail the call."""
    assert rows_from([{"n": 1}, "what"]) == [{"n": 1}, "what"]


@pytest.mark.parametrize("given", [5, "text", b"bytes", None, pd.DataFrame({"n": ["a", 1]})])
def test_values_that_are_not_rows_are_refused(given):
    with pytest.raises(InvalidError, match="type=`"):
        rows_from(given)


_NEW_YEAR = datetime(2026, 1, 1)  # noqa: DTZ001 - it has no zone


@pytest.mark.parametrize(
    ("cells", "reason"),
    [
        (pd.period_range("2026-01", periods=2, freq="M"), "periods or intervals"),
        (pd.interval_range(0, 2), "periods or intervals"),
        ([None, time(1, tzinfo=UTC)], "times of day with a zone"),
        ([_NEW_YEAR, _NEW_YEAR.replace(tzinfo=UTC)], "with and without a zone"),
    ],
)
def test_frame_whose_cells_would_change_is_refused(cells, reason):
    frame = pd.DataFrame({"v": cells}, dtype="object" if isinstance(cells, list) else None)

    with pytest.raises(InvalidError, match=rf"{reason}.*column=`v`"):
        rows_from(frame)


def test_arrow_table_with_periods_is_refused():
    table = pa.Table.from_pandas(pd.DataFrame({"v": pd.period_range("2026-01", periods=2, freq="M")}))

    with pytest.raises(InvalidError, match="periods or intervals"):
        rows_from(table)


@pytest.mark.parametrize(
    "cells", [[None, time(1)], [_NEW_YEAR, None, pd.NaT], [_NEW_YEAR.replace(tzinfo=UTC), pd.NaT, None]]
)
def test_frame_of_objects_of_one_kind_is_taken(cells):
    frame = pd.DataFrame({"v": pd.Series(cells, dtype="object")})

    assert rows_from(frame).column("v").to_pylist() == [None if cell is pd.NaT else cell for cell in cells]


@pytest.mark.parametrize("rows", [pa.table({"n": range(5)}), [{"n": n} for n in range(5)]])
def test_pieces_are_bounded_ordered_and_complete(rows):
    cut = list(pieces(rows, 2))

    assert [count for count, _ in cut] == [2, 2, 1]
    assert list(pieces(rows_from([]), 2)) == []
