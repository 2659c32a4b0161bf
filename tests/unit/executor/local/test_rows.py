"""Rows in every form that people hand to the local runner."""

from __future__ import annotations

import pandas as pd
import pyarrow as pa
import pytest

from millpond.executor.inputs.extraction import pieces, rows_from
from millpond.statestore.errors import InvalidError


class SpeaksArrow:
    """Neither Arrow nor pandas, but it has the C stream."""

    def __init__(self, table: pa.Table) -> None:
        self.table = table

    def __arrow_c_stream__(self, schema: object = None) -> object:
        return self.table.__arrow_c_stream__(schema)


def test_tables_of_every_kind_become_arrow():
    """Arrow stays as it is; a batch, pandas and whatever speaks Arrow become tables."""
    table = pa.table({"n": [1, 2]})

    assert rows_from(table) is table
    assert rows_from(pa.record_batch({"n": [1, 2]})) == table
    assert rows_from(SpeaksArrow(table)) == table
    assert rows_from(pd.DataFrame({"n": [1, 2]}, index=["x", "y"])).column_names == ["n"]


def test_mappings_are_copied():
    """The caller may reuse a row that was handed in."""
    row = {"n": 1}

    rows = rows_from(row)
    row["n"] = 2

    assert rows == [{"n": 1}]
    assert rows_from([row]) == [{"n": 2}]
    assert rows_from(iter([row, row])) == [{"n": 2}] * 2


def test_what_is_no_mapping_stays_to_become_a_dead_letter():
    """One bad row among good ones is not the caller's mistake as a whole."""
    assert rows_from([{"n": 1}, "what"]) == [{"n": 1}, "what"]


@pytest.mark.parametrize("given", [5, "text", b"bytes", None, pd.DataFrame({"n": ["a", 1]})])
def test_what_is_no_rows_is_refused(given):
    """Numbers, text, and tables that Arrow cannot hold are refused by type."""
    with pytest.raises(InvalidError, match="type=`"):
        rows_from(given)


@pytest.mark.parametrize("rows", [pa.table({"n": range(5)}), [{"n": n} for n in range(5)]])
def test_pieces_are_bounded_and_complete(rows):
    """All rows in order, at most so many at a time."""
    cut = list(pieces(rows, 2))

    assert [count for count, _ in cut] == [2, 2, 1]
    assert list(pieces(rows_from([]), 2)) == []
