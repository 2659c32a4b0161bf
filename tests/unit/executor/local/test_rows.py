"""The forms of rows that the local runner accepts."""

from __future__ import annotations

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


@pytest.mark.parametrize("rows", [pa.table({"n": range(5)}), [{"n": n} for n in range(5)]])
def test_pieces_are_bounded_ordered_and_complete(rows):
    cut = list(pieces(rows, 2))

    assert [count for count, _ in cut] == [2, 2, 1]
    assert list(pieces(rows_from([]), 2)) == []
