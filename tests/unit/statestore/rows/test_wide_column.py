"""Columns too large for one Arrow array."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millpond.statestore.rows.merge import take_rows

_COLUMNS = st.lists(st.lists(st.none() | st.text(max_size=5), max_size=5), min_size=1, max_size=4)


@given(chunks=_COLUMNS, data=st.data(), chunk_bytes_max=st.integers(1, 12))
def test_rows_come_in_requested_order(chunks, data, chunk_bytes_max):
    column = pa.chunked_array(chunks, pa.string())
    index = st.none() | st.integers(0, len(column) - 1) if len(column) else st.none()
    rows = data.draw(st.lists(index, max_size=12))

    taken = take_rows(column, pa.array(rows, pa.int64()), chunk_bytes_max=chunk_bytes_max)

    values = column.to_pylist()
    assert taken.to_pylist() == [None if row is None else values[row] for row in rows]
    assert taken.type == pa.string()


@pytest.mark.parametrize("kind", [pa.string(), pa.binary()])
def test_pieces_are_bounded(kind):
    """Each may exceed the bound by one value."""
    column = pa.chunked_array([["aa", "bbbb"], ["cccccc", "d"]], kind)

    taken = take_rows(column, pa.array([3, 2, 1, 0]), chunk_bytes_max=4)

    assert [chunk.to_pylist() for chunk in taken.chunks] == [
        column.take([3, 2]).to_pylist(),
        column.take([1]).to_pylist(),
        column.take([0]).to_pylist(),
    ]


def test_numbers_stay_in_one_piece():
    """They have no offsets that could overflow."""
    taken = take_rows(pa.chunked_array([[1, 2], [3]]), pa.array([2, None]), chunk_bytes_max=1)

    assert taken.equals(pa.array([3, None]))
