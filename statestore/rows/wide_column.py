"""Columns that are too large for one Arrow array.

Arrow's text and binary arrays hold at most 2 GiB, because their offsets have 32 bits. The states of
an interval may be larger, over all updates or even over the last updates alone, and must stay
readable: such a column is gathered with 64-bit offsets and returned in chunks.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

_CHUNK_BYTES_MAX: Final = 2**30
_WIDE: Final = {pa.string(): pa.large_string(), pa.binary(): pa.large_binary()}


def nulls(type_: pa.DataType, count: int) -> pa.Array:
    """Nulls, which have no values below them: below those of ``pa.nulls`` are nulls again, and go to files.

    Example:
        >>> nulls(pa.list_(pa.int64()), 2).to_pylist()
        [None, None]
    """
    if not pa.types.is_list(type_):
        return pa.nulls(count, type_)
    buffers = [pa.py_buffer(bytes(-(-count // 8))), pa.py_buffer(bytes(4 * (count + 1)))]
    return pa.Array.from_buffers(type_, count, buffers, count, children=[pa.array([], type_.value_type)])


def take_rows(
    column: pa.ChunkedArray, rows: pa.Array, *, chunk_bytes_max: int = _CHUNK_BYTES_MAX
) -> pa.Array | pa.ChunkedArray:
    """The values of a column at ``rows``, in that order; null where a row number is null.

    Args:
        column: any column.
        rows: row numbers.
        chunk_bytes_max: size from which a text or binary column is returned in chunks.

    Example:
        >>> take_rows(pa.chunked_array([["a", "b"], ["c"]]), pa.array([2, None, 0])).to_pylist()
        ['c', None, 'a']
    """
    if column.null_count == len(column):
        return nulls(column.type, len(rows))
    wide = _WIDE.get(column.type)
    if wide is None or column.num_chunks < 2 or column.nbytes < chunk_bytes_max:
        return column.combine_chunks().take(rows)
    lengths = pc.fill_null(pc.binary_length(column), 0).to_numpy()
    chosen = column.cast(wide).combine_chunks()
    pieces = [
        # Taken piece by piece, so that the offsets of each piece begin at zero.
        chosen.take(rows.slice(start, stop - start)).cast(column.type)
        for start, stop in _cuts(lengths, rows, chunk_bytes_max)
    ]
    return pieces[0] if len(pieces) == 1 else pa.chunked_array(pieces, column.type)


def _cuts(lengths: npt.NDArray[np.int32], rows: pa.Array, bytes_max: int) -> list[tuple[int, int]]:
    """Runs of ``rows`` whose values begin within the same ``bytes_max`` bytes."""
    present = rows.is_valid().to_numpy(zero_copy_only=False)
    numbers = rows.fill_null(0).to_numpy()
    sizes = np.where(present, lengths[numbers], 0).astype(np.int64)
    begins = np.cumsum(sizes) - sizes
    bounds = [0, *(np.flatnonzero(np.diff(begins // bytes_max)) + 1).tolist(), len(numbers)]
    return list(pairwise(bounds))
