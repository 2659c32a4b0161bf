"""Pages: row files that are read block by block, where few of their keys are wanted.

All columns of a large row file are cut into pages after the same rows, into *blocks*. The file's page index has the place
of each page. The pages of some blocks are joined into a Parquet file in memory, which Arrow decodes.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from millpond.statestore.errors import DataError, check
from millpond.statestore.objects.ranges import ByteRange
from millpond.statestore.rows.page_index import (
    AlikePages,
    Field,
    FieldType,
    Leaf,
    PageIndex,
    StoredPages,
    read_list,
    read_struct,
    write_struct,
)
from millpond.statestore.rows.record_ids import BlockFilter, fingerprints

_MAGIC: Final = b"PAR1"
_TAIL_BYTES: Final = 8
# A column with more different pages is read from the file: two of whole blocks and two last ones.
_ALIKE_MAX: Final = 4
# One absent key in a hundred costs a page; each key takes 1.4 bytes of the filter.
_KEY_ERROR_RATE: Final = 0.01
_KEYS_AT_ONCE: Final = 1 << 16

_I32, _I64, _BINARY = FieldType.I32, FieldType.I64, FieldType.BINARY
_LIST, _STRUCT = FieldType.LIST, FieldType.STRUCT


def page_index_of(file: memoryview, page_rows: int, empty_columns: Collection[str]) -> PageIndex:
    """Return the page index of a Parquet file of row updates, written with page indexes and without dictionaries.

    A row group's columns are cut after each ``page_rows`` rows.
    """
    footer_bytes = int.from_bytes(file[-_TAIL_BYTES:-4], "little")
    footer_start = len(file) - _TAIL_BYTES - footer_bytes
    metadata, _ = read_struct(file, footer_start)
    groups = metadata[4]
    rows: list[int] = []
    by_leaf: list[list[tuple[int, int]]] = [[] for _ in groups[0][1]]
    for group in groups:
        cuts = list(range(0, group[3], page_rows))
        rows += [min(page_rows, group[3] - cut) for cut in cuts]
        for pages, chunk in zip(by_leaf, group[1], strict=True):
            if chunk[3][3][0].decode() in empty_columns:
                continue
            locations, _ = read_struct(file, chunk[4])
            is_cut_so = [location[3] for location in locations[1]] == cuts
            check(is_cut_so and 11 not in chunk[3], "columns are cut after the same rows")
            pages += [(location[1], location[2]) for location in locations[1]]
    firsts, last, keys = _keys_of(file, page_rows)
    return PageIndex(
        schema=_schema_of(file, footer_start),
        firsts=firsts,
        last=last,
        rows=np.array(rows, np.int32),
        leaves=tuple(
            _leaf(file, chunk[3], pages) for pages, chunk in zip(by_leaf, groups[0][1], strict=True)
        ),
        keys=keys,
    )


def _leaf(file: memoryview, column: Mapping[int, Any], pages: Sequence[tuple[int, int]]) -> Leaf:
    values = None
    if pages and len(column[3]) > 1:
        # Only in a nested column may a page have more values than rows.
        headers = (read_struct(file, offset)[0] for offset, _ in pages)
        values = np.array([header[5][1] for header in headers], np.int32)
    return Leaf(
        path=tuple(name.decode() for name in column[3]),
        physical_type=column[1],
        codec=column[4],
        encodings=tuple(column[2]),
        pages=(_alike(file, pages) or _stored(file, pages)) if pages else None,
        values=values,
    )


def _alike(file: memoryview, pages: Sequence[tuple[int, int]]) -> AlikePages | None:
    """Return the pages as the few different ones among them; None if they are more."""
    numbers: dict[bytes, int] = {}
    found = np.empty(len(pages), np.uint8)
    for block, (offset, size) in enumerate(pages):
        found[block] = numbers.setdefault(bytes(file[offset : offset + size]), len(numbers))
        if len(numbers) > _ALIKE_MAX:
            return None
    return AlikePages(tuple(numbers), found)


def _stored(file: memoryview, pages: Sequence[tuple[int, int]]) -> StoredPages:
    offsets, sizes = zip(*pages, strict=True)
    checksums = [zlib.crc32(file[offset : offset + size]) for offset, size in pages]
    return StoredPages(
        offsets=np.array(offsets, np.int64),
        sizes=np.array(sizes, np.int32),
        checksums=np.array(checksums, np.uint32),
    )


def _keys_of(file: memoryview, page_rows: int) -> tuple[list[str], str, BlockFilter]:
    """Read the file in pieces for the first key of each block, the last key, and a filter of all keys."""
    parquet = pq.ParquetFile(pa.BufferReader(pa.py_buffer(file)))
    keys = BlockFilter.empty(parquet.metadata.num_rows, _KEY_ERROR_RATE)
    firsts: list[str] = []
    last = ""
    for group in range(parquet.num_row_groups):
        begin = 0
        batches = parquet.iter_batches(_KEYS_AT_ONCE, row_groups=[group], columns=["key"], use_threads=False)
        for batch in batches:
            column = batch.column(0)
            keys.add(fingerprints(column))
            firsts += column.take(pa.array(range(-begin % page_rows, len(column), page_rows))).to_pylist()
            last = column[len(column) - 1].as_py()
            begin += len(column)
    return firsts, last, keys


def _schema_of(file: memoryview, footer_start: int) -> bytes:
    """Return the bytes of the schema's list, the footer's second field."""
    version_end = footer_start + 1
    while file[version_end] >= 0x80:
        version_end += 1
    # Skip the version's last byte and the head of the second field.
    start = version_end + 2
    _, end = read_list(file, start)
    return bytes(file[start:end])


def join_ranges(ranges: Iterable[ByteRange], gap_bytes: int) -> list[ByteRange]:
    joined: list[ByteRange] = []
    for part in sorted(ranges, key=lambda part: part.start):
        if joined and part.start - joined[-1].end <= gap_bytes:
            joined[-1] = ByteRange(joined[-1].start, max(joined[-1].end, part.end))
        else:
            joined.append(part)
    return joined


def decode_blocks(
    index: PageIndex, blocks: Sequence[int], columns: Sequence[str], parts: Mapping[ByteRange, bytes]
) -> pa.Table:
    """Decode the rows of some blocks from the joined `PageIndex.ranges`; a changed page raises `DataError`.

    Columns without values in the file are omitted.
    """
    wanted = frozenset(columns)
    chosen = np.fromiter(blocks, np.int64, len(blocks))
    read = _ReadParts(parts)
    body: list[bytes | memoryview] = [_MAGIC]
    end = len(_MAGIC)
    rows = int(index.rows[chosen].sum())
    chunks: list[list[Field]] = []
    for leaf in index.leaves:
        begin = end
        if leaf.path[0] in wanted:
            pages: Iterable[bytes | memoryview] = ()
            if isinstance(leaf.pages, AlikePages):
                pages = map(leaf.pages.contents.__getitem__, leaf.pages.numbers[chosen].tolist())
            elif leaf.pages is not None:
                pages = read.pages(leaf.pages, chosen, leaf.path[0])
            for page in pages:
                body.append(page)
                end += len(page)
        values = rows if leaf.values is None else int(leaf.values[chosen].sum())
        chunks.append(_chunk(leaf, begin, end - begin, values))
    footer = write_struct(
        [
            (1, _I32, 2),
            (2, _LIST, index.schema),
            (3, _I64, rows),
            (4, _LIST, (_STRUCT, [[(1, _LIST, (_STRUCT, chunks)), (2, _I64, end), (3, _I64, rows)]])),
        ]
    )
    body += (footer, len(footer).to_bytes(4, "little"), _MAGIC)
    # Join at once: a growing buffer would be in memory twice whenever it is moved.
    file = pq.ParquetFile(pa.BufferReader(b"".join(body)), coerce_int96_timestamp_unit="us")
    empty = index.empty_columns
    present = [column for column in columns if column not in empty]
    return file.read(columns=present, use_threads=False)


class _ReadParts:
    def __init__(self, parts: Mapping[ByteRange, bytes]) -> None:
        ordered = sorted(parts.items(), key=lambda item: item[0].start)
        self._begins = np.array([part.start for part, _ in ordered], np.int64)
        self._views = [memoryview(data) for _, data in ordered]

    def pages(self, stored: StoredPages, blocks: npt.NDArray[np.int64], column: str) -> Iterator[memoryview]:
        offsets = stored.offsets[blocks]
        holders = np.searchsorted(self._begins, offsets, side="right") - 1
        starts = offsets - self._begins[holders]
        places = (holders, starts, stored.sizes[blocks], stored.checksums[blocks], offsets)
        for holder, start, size, checksum, offset in zip(*(place.tolist() for place in places), strict=True):
            page = self._views[holder][start : start + size]
            if len(page) != size or zlib.crc32(page) != checksum:
                raise DataError("row file is damaged: a page's checksum is wrong", column=column, at=offset)
            yield page


def _chunk(leaf: Leaf, begin: int, size: int, values: int) -> list[Field]:
    numbers = [(5, _I64, values), (6, _I64, size), (7, _I64, size), (9, _I64, begin)]
    head = _chunk_head(leaf.path, leaf.physical_type, leaf.codec, leaf.encodings)
    return [(2, _I64, begin), (3, _STRUCT, head + write_struct(numbers, before=4))]


@lru_cache(maxsize=256)
def _chunk_head(path: tuple[str, ...], physical_type: int, codec: int, encodings: tuple[int, ...]) -> bytes:
    """Return the first four fields of a chunk's metadata, which are the same for all blocks of a column."""
    fields: list[Field] = [
        (1, _I32, physical_type),
        (2, _LIST, (_I32, list(encodings))),
        (3, _LIST, (_BINARY, [name.encode() for name in path])),
        (4, _I32, codec),
    ]
    return write_struct(fields)[:-1]
