"""Parquet files of strangers, read within a bound of memory.

A few bytes of a Parquet file may stand for gigabytes of rows, and its numbers may be wrong. So the headers of its pages
are checked before Arrow reads a page, and rows come in pieces of a bounded size.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from millpond.statestore.errors import InvalidError
from millpond.statestore.rows.pages import read_struct

PIECE_BYTES_MAX: Final = 64 << 20
"""The size of a piece in memory, unless a single row is larger."""

_PAGE_BYTES_MAX: Final = 256 << 20
_OF_VIEWS: Final = {pa.string_view(): pa.large_string(), pa.binary_view(): pa.large_binary()}
_DICTIONARY_BYTES: Final = 64 << 10
_BUFFER_BYTES: Final = 1 << 20
_BATCH_ROWS: Final = 1_024
_DICTIONARY_PAGE: Final = 2
# Old writers left the dictionary's header out of a column's size.
_OLD_HEADER_BYTES: Final = 100
# The second holds a header with the longest statistics that Arrow accepts.
_HEADER_BYTES: Final = (4 << 10, 16 << 20)
_Sizes = npt.NDArray[np.int64]


@dataclass(slots=True)
class _Leaf:
    """The largest pages of a column."""

    data: int = 0
    dictionary: int = 0


def read_parquet(path: Path, start: int, rows_max: int) -> Iterator[pa.Table]:
    """Yield the rows of a file after the first ``start``, in pieces of at most ``rows_max`` rows.

    Raises:
        InvalidError: two columns have one name, or a page is larger than any honest one.
        pa.ArrowException, OSError, UnicodeDecodeError: the file is not of its format.
    """
    metadata = pq.read_metadata(path)
    _refuse_repeated_names(path, metadata.schema)
    first, skipped = 0, start
    while first < metadata.num_row_groups and skipped >= metadata.row_group(first).num_rows:
        skipped -= metadata.row_group(first).num_rows
        first += 1
    groups = list(range(first, metadata.num_row_groups))
    leaves = _leaves(path, metadata, groups)
    # Text columns with a dictionary so large that a few bytes of file may become gigabytes of rows.
    words = [
        metadata.schema.column(place).path
        for place, leaf in leaves.items()
        if leaf.dictionary > _DICTIONARY_BYTES and _is_text(metadata.schema.column(place))
    ]
    batch_rows = min(rows_max, _BATCH_ROWS, _rows_that_fit(metadata, groups, leaves))
    waiting, rows, size_bytes = list[pa.Table](), 0, 0
    # Buffered, because otherwise each column of a row group would be in memory as a whole.
    with pq.ParquetFile(path, buffer_size=_BUFFER_BYTES, pre_buffer=False, read_dictionary=words) as file:
        for batch in file.iter_batches(batch_rows, row_groups=groups) if groups else ():
            passed = min(skipped, batch.num_rows)
            skipped -= passed
            table = without_views(pa.Table.from_batches([batch.slice(passed)]))
            for part in _within_bytes(table, words):
                if waiting and (
                    rows + part.num_rows > rows_max or size_bytes + part.nbytes > PIECE_BYTES_MAX
                ):
                    yield pa.concat_tables(waiting)
                    waiting, rows, size_bytes = [], 0, 0
                waiting.append(part)
                rows, size_bytes = rows + part.num_rows, size_bytes + part.nbytes
    if waiting:
        yield pa.concat_tables(waiting)


def without_views(table: pa.Table) -> pa.Table:
    """Return a table without views and runs, also within other types, from which Arrow cannot take rows."""
    for place, field in enumerate(table.schema):
        column = table.column(place)
        if pa.types.is_run_end_encoded(field.type):
            plain = pc.run_end_decode(column)
        elif (kind := _without_views(field.type)) != field.type:
            # Copied, because Arrow's cast of a slice of structs takes a wrong part of a null column in it.
            copies = [pa.concat_arrays([chunk, chunk.slice(0, 0)]) for chunk in column.chunks]
            plain = pa.chunked_array([copy.cast(kind) for copy in copies], kind)
        else:
            continue
        table = table.set_column(place, field.with_type(plain.type), plain)
    return table


def _without_views(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_without_views(field.type)) for field in kind])
    if pa.types.is_map(kind):
        return pa.map_(_without_views(kind.key_type), _without_views(kind.item_type))
    if pa.types.is_dictionary(kind):
        return pa.dictionary(kind.index_type, _without_views(kind.value_type), kind.ordered)
    if pa.types.is_list(kind) or pa.types.is_fixed_size_list(kind):
        size = kind.list_size if pa.types.is_fixed_size_list(kind) else -1
        return pa.list_(kind.value_field.with_type(_without_views(kind.value_type)), size)
    if pa.types.is_large_list(kind):
        return pa.large_list(kind.value_field.with_type(_without_views(kind.value_type)))
    return _OF_VIEWS.get(kind, kind)


def _refuse_repeated_names(path: Path, schema: pq.ParquetSchema) -> None:
    names = schema.to_arrow_schema().names
    if len(set(names)) < len(names):
        repeated = sorted({name for name in names if names.count(name) > 1}) if len(names) < 1_000 else ()
        raise InvalidError("a Parquet file has two columns of one name", file=path, columns=repeated)


def _leaves(path: Path, metadata: pq.FileMetaData, groups: Collection[int]) -> dict[int, _Leaf]:
    """Return the largest pages of each column, by its place; refuse a page that no honest program writes."""
    leaves: dict[int, _Leaf] = defaultdict(_Leaf)
    with path.open("rb") as file:
        for group in groups:
            for place in range(metadata.num_columns):
                chunk = metadata.row_group(group).column(place)
                for kind, size_bytes in _pages(file.fileno(), path, chunk):
                    leaf = leaves[place]
                    if kind == _DICTIONARY_PAGE:
                        leaf.dictionary = max(leaf.dictionary, size_bytes)
                    else:
                        leaf.data = max(leaf.data, size_bytes)
    return leaves


def _pages(descriptor: int, path: Path, chunk: pq.ColumnChunkMetaData) -> Iterator[tuple[int | None, int]]:
    """Yield the type and the size in memory of each page of a column chunk."""
    at = chunk.data_page_offset
    if chunk.has_dictionary_page and 0 < chunk.dictionary_page_offset < at:
        at = chunk.dictionary_page_offset
    end = at + chunk.total_compressed_size
    while at < end:
        header, length = _header(descriptor, path, at)
        kind, size_bytes, stored_bytes = (_number(header, field) for field in (1, 2, 3))
        room = end + _OLD_HEADER_BYTES - at - length
        if not (0 <= size_bytes <= _PAGE_BYTES_MAX and 0 <= stored_bytes <= room):
            raise InvalidError(
                f"a page of the Parquet file is larger than {_PAGE_BYTES_MAX >> 20} MiB, or than its column",
                file=path,
                column=chunk.path_in_schema,
                bytes=size_bytes,
                stored_bytes=stored_bytes,
            )
        at += length + stored_bytes
        yield kind, size_bytes


def _number(header: dict[int, Any], field: int) -> int:
    found = header.get(field)
    return found if isinstance(found, int) else -1


def _header(descriptor: int, path: Path, at: int) -> tuple[dict[int, Any], int]:
    for size in _HEADER_BYTES:
        try:
            return read_struct(os.pread(descriptor, size, at), 0)
        except IndexError:
            continue
        except (ValueError, OSError, OverflowError, RecursionError):
            break
    raise InvalidError("a page of the Parquet file has no readable header", file=path, at=at)


def _is_text(column: pq.ColumnSchema) -> bool:
    return bool(column.physical_type == "BYTE_ARRAY" and column.path == column.name)


def _rows_that_fit(metadata: pq.FileMetaData, groups: Collection[int], leaves: dict[int, _Leaf]) -> int:
    """Return the number of rows that are small even where each has the largest value of a page."""
    largest = 1
    for place, leaf in leaves.items():
        column = metadata.schema.column(place)
        if column.physical_type == "FIXED_LEN_BYTE_ARRAY":
            largest = max(largest, column.length)
        elif any("DELTA_BYTE_ARRAY" in metadata.row_group(group).column(place).encodings for group in groups):
            # A value may repeat all of the value before it, in a byte.
            largest = max(largest, leaf.data)
    return max(1, 4 * PIECE_BYTES_MAX // largest)


def _within_bytes(rows: pa.Table, words: Collection[str]) -> Iterator[pa.Table]:
    """Yield rows in parts of a bounded size, with plain text in the columns that were read as ``words``."""
    if not rows.num_rows:
        return
    if not words:
        yield rows
        return
    plain = pa.schema(
        [field.with_type(field.type.value_type) if field.name in words else field for field in rows.schema]
    )
    ends = np.cumsum(row_bytes(rows))
    start = 0
    while start < rows.num_rows:
        before = ends[start - 1] if start else 0
        end = max(start + 1, int(np.searchsorted(ends, before + PIECE_BYTES_MAX, side="right")))
        yield rows.slice(start, end - start).cast(plain)
        start = end


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
