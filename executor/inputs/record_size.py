"""Sizes of records, column by column, and the beginning of a large record that its dead letter shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from millpond.statestore.errors import InvalidError

RECORD_BYTES_MAX: Final = 16 << 20
"""The default limit. Kafka's default is 1 MiB a message, and brokers rarely accept more than 10."""

_SHOWN_CHARACTERS: Final = 1_000
_Sizes = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class CutValue:
    """The beginning of a record's value, for the letter of a record that is too large to be stored."""

    value: Any


def check_record_size(stream: str, limit: object) -> None:
    if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool) or limit < 1):
        raise InvalidError(
            "max_record_bytes must be a positive whole number or None", stream=stream, max_record_bytes=limit
        )


def error_of_size(limit: int) -> str:
    return f"the record is larger than the {limit:,} bytes that max_record_bytes of its stream allows"


def row_bytes(rows: pa.Table) -> _Sizes:
    """Return the size of each row in bytes, as Arrow stores its values."""
    sizes = np.zeros(rows.num_rows, np.int64)
    for column in rows.columns:
        sizes += np.concatenate([np.zeros(0, np.int64), *(_cell_bytes(chunk) for chunk in column.chunks)])
    return sizes


def _cell_bytes(cells: pa.Array) -> _Sizes:
    kind = cells.type
    if isinstance(cells, pa.ExtensionArray):
        return _cell_bytes(cells.storage)
    if pa.types.is_dictionary(kind):
        known = _cell_bytes(cells.dictionary)
        sizes: _Sizes = np.append(known, 0)[
            cells.indices.fill_null(len(known)).to_numpy(zero_copy_only=False)
        ]
        return sizes
    if pa.types.is_string_view(kind) or pa.types.is_binary_view(kind):
        return _cell_bytes(cells.cast(pa.large_binary()))
    if pa.types.is_struct(kind):
        parts = [np.zeros(len(cells), np.int64), *map(_cell_bytes, cells.flatten())]
        return np.asarray(np.sum(parts, axis=0), np.int64)
    if pa.types.is_map(kind):
        entries = pa.StructArray.from_arrays([cells.keys, cells.items], ["key", "item"])
        return _of_lists(_cell_bytes(entries), cells.offsets.to_numpy(zero_copy_only=False))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return _of_lists(_cell_bytes(cells.values), cells.offsets.to_numpy(zero_copy_only=False))
    try:
        lengths = pc.fill_null(pc.binary_length(cells), 0)
        return np.asarray(lengths.to_numpy(zero_copy_only=False), np.int64)
    except (pa.ArrowNotImplementedError, pa.ArrowInvalid):
        # Numbers, times and the like: each cell has the same size.
        return np.full(len(cells), -(-cells.nbytes // max(1, len(cells))), np.int64)


def _of_lists(elements: _Sizes, offsets: npt.NDArray[Any]) -> _Sizes:
    ends = np.concatenate([[0], np.cumsum(elements)])
    sizes: _Sizes = ends[offsets[1:]] - ends[offsets[:-1]]
    return sizes


def cut_row(rows: pa.Table | Sequence[Any], place: int) -> CutValue:
    """Return the beginning of a row's value, without making Python objects of all of it."""
    if isinstance(rows, pa.Table):
        columns = rows.slice(place, 1)
        return CutValue({name: _cut_column(columns.column(name)) for name in columns.column_names})
    row = rows[place].items()
    return CutValue({name: c[:_SHOWN_CHARACTERS] if isinstance(c, str | bytes) else c for name, c in row})


def _cut_column(cell: pa.ChunkedArray) -> Any:
    kind, size = cell.type, int(row_bytes(pa.table({"cell": cell}))[0])
    if size <= _SHOWN_CHARACTERS:
        return cell[0].as_py()
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return pc.utf8_slice_codeunits(cell, 0, _SHOWN_CHARACTERS)[0].as_py()
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return pc.binary_slice(cell, 0, _SHOWN_CHARACTERS)[0].as_py()
    return f"<{kind}: {size:,} bytes>"
