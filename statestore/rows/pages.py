"""Pages: row files that are read block by block, where few of their keys are wanted.

All columns of a large row file are cut into pages after the same rows, into *blocks*. The pages of some blocks are
joined into a Parquet file in memory, which Arrow decodes.

The file's page index has the place of each page, a filter of its keys, and the contents of its uniform columns. It
lies between the last page and the seal, where no Parquet reader looks. Its own checksum covers the file's name, so
every part that is read was written under this name, though the seal of the whole file cannot be verified. Parquet's
metadata is read and written with the part of Thrift's compact protocol that it needs: structs as their numbered
fields, without maps and sets.
"""

from __future__ import annotations

import threading
import zlib
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from itertools import compress
from typing import Any, Final, Generic, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from millpond.statestore.errors import DataError, check
from millpond.statestore.objects.ranges import ByteRange, Tail, read_ranges, read_tail
from millpond.statestore.rows.record_ids import BlockFilter, Fingerprints, fingerprints
from millpond.statestore.types import Objects

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")
_Offsets: TypeAlias = npt.NDArray[np.int64]

# The ends of a Parquet file; before the last one stands the footer's length.
PARQUET_MAGIC: Final = b"PAR1"
TAIL_BYTES: Final = 8
_SECTION: Final = b"MPPAGES1"
# Behind the page index: its length, its checksum, and the name of the section.
_TRAILER_BYTES: Final = 8 + len(_SECTION)
# The seal between the page index and the footer (`row_format`).
SEAL_BYTES: Final = 12
# The cost of a key in Python, without its characters.
_KEY_BYTES: Final = 64
# The first read from a file's end: the footer and the index of a file of average size.
_READ_BYTES: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class StoredPages:
    """The pages of a column by block: offset and size of each in the file, and its CRC-32, headers included."""

    offsets: _Offsets
    sizes: npt.NDArray[np.int32]
    checksums: npt.NDArray[np.uint32]

    @property
    def size_bytes(self) -> int:
        return int(self.offsets.nbytes + self.sizes.nbytes + self.checksums.nbytes)


@dataclass(frozen=True, slots=True)
class AlikePages:
    """The few different pages of a nearly uniform column, such as nulls, and the page of each block; none is read."""

    contents: tuple[bytes, ...]
    numbers: npt.NDArray[np.uint8]

    @property
    def size_bytes(self) -> int:
        return sum(map(len, self.contents)) + int(self.numbers.nbytes)


@dataclass(frozen=True, slots=True)
class Leaf:
    """A column of a Parquet file, nested ones included, with Parquet's numbers of its type, codec and encodings.

    ``pages`` is None for a column without values, and ``values``, the number of values on each page, if they
    are as many as rows.
    """

    path: tuple[str, ...]
    physical_type: int
    codec: int
    encodings: tuple[int, ...]
    pages: StoredPages | AlikePages | None
    values: npt.NDArray[np.int32] | None


@dataclass(frozen=True, slots=True)
class PageIndex:
    """The facts about a row file that are known without reading its pages.

    ``schema`` has the schema's elements as in the footer, ``firsts`` the first key of each block and ``rows``
    its number of rows, ``last`` the file's last key, ``keys`` a filter of all keys.
    """

    schema: bytes
    firsts: Sequence[str]
    last: str
    rows: npt.NDArray[np.int32]
    leaves: tuple[Leaf, ...]
    keys: BlockFilter

    @property
    def size_bytes(self) -> int:
        of_firsts = sum(map(len, self.firsts)) + _KEY_BYTES * len(self.firsts)
        of_pages = sum(leaf.pages.size_bytes for leaf in self.leaves if leaf.pages is not None)
        of_values = sum(leaf.values.nbytes for leaf in self.leaves if leaf.values is not None)
        return int(of_firsts + of_pages + of_values + self.rows.nbytes + self.keys.size_bytes)

    def blocks_of(self, keys: Sequence[str], fingerprints: Fingerprints) -> list[int]:
        """Return the blocks that may hold any of these sorted keys."""
        begin, end = bisect_left(keys, self.firsts[0]), bisect_right(keys, self.last)
        may_be_here = self.keys.might_contain(fingerprints[begin:end])
        blocks: list[int] = []
        for key in compress(keys[begin:end], may_be_here.tolist()):
            block = bisect_right(self.firsts, key, lo=blocks[-1] if blocks else 0) - 1
            if not blocks or blocks[-1] != block:
                blocks.append(block)
        return blocks

    @property
    def columns(self) -> list[str]:
        """The names of the file's columns, in order."""
        return list(dict.fromkeys(leaf.path[0] for leaf in self.leaves))

    @property
    def empty_columns(self) -> frozenset[str]:
        return frozenset(leaf.path[0] for leaf in self.leaves if leaf.pages is None)

    def ranges(self, blocks: Sequence[int], columns: Iterable[str]) -> list[ByteRange]:
        chosen = np.fromiter(blocks, np.int64, len(blocks))
        found: list[ByteRange] = []
        for pages in self._stored_of(columns):
            starts = pages.offsets[chosen]
            found += map(ByteRange, starts.tolist(), (starts + pages.sizes[chosen]).tolist())
        return found

    def portions(
        self, blocks: Sequence[int], columns: Iterable[str], *, blocks_max: int, bytes_max: int
    ) -> Iterator[Sequence[int]]:
        """Yield blocks in groups of at most ``blocks_max`` and ``bytes_max`` encoded bytes, but at least one block."""
        chosen, sizes = self._sizes_of(blocks, columns)
        ends = np.cumsum(sizes)
        begin = 0
        while begin < len(chosen):
            room = ends[begin] - sizes[begin] + bytes_max
            end = min(int(np.searchsorted(ends, room, side="right")), begin + blocks_max)
            end = max(end, begin + 1)
            yield chosen[begin:end].tolist()
            begin = end

    @property
    def pages_bytes(self) -> int:
        stored = self._stored_of(leaf.path[0] for leaf in self.leaves)
        return sum(int(pages.sizes.sum(dtype=np.int64)) for pages in stored)

    def size_of(self, blocks: Sequence[int], columns: Iterable[str]) -> int:
        return int(self._sizes_of(blocks, columns)[1].sum())

    def _sizes_of(self, blocks: Sequence[int], columns: Iterable[str]) -> tuple[_Offsets, _Offsets]:
        chosen = np.fromiter(blocks, np.int64, len(blocks))
        sizes = np.zeros(len(chosen), np.int64)
        for pages in self._stored_of(columns):
            sizes += pages.sizes[chosen]
        return chosen, sizes

    def _stored_of(self, columns: Iterable[str]) -> list[StoredPages]:
        wanted = frozenset(columns)
        pages = (leaf.pages for leaf in self.leaves if leaf.path[0] in wanted)
        return [each for each in pages if isinstance(each, StoredPages)]

    def to_bytes(self) -> bytes:
        columns: dict[str, Any] = {"first": pa.array(self.firsts, pa.string()), "rows": self.rows}
        metadata = {"schema": self.schema, "last": self.last.encode(), "keys": self.keys.to_bytes()}
        leaves = []
        for number, leaf in enumerate(self.leaves):
            if isinstance(leaf.pages, StoredPages):
                columns |= {
                    f"offset{number}": leaf.pages.offsets,
                    f"size{number}": leaf.pages.sizes,
                    f"checksum{number}": leaf.pages.checksums,
                }
            elif leaf.pages is not None:
                columns[f"page{number}"] = leaf.pages.numbers
                metadata |= {f"page{number}.{place}": page for place, page in enumerate(leaf.pages.contents)}
            if leaf.values is not None:
                columns[f"values{number}"] = leaf.values
            codes = {"type": leaf.physical_type, "codec": leaf.codec, "encodings": leaf.encodings}
            leaves.append({"path": leaf.path} | codes)
        metadata["leaves"] = orjson.dumps(leaves)
        table = pa.table(columns).replace_schema_metadata(metadata)
        sink = pa.BufferOutputStream()
        options = pa.ipc.IpcWriteOptions(compression="zstd")
        with pa.ipc.new_stream(sink, table.schema, options=options) as writer:
            writer.write_table(table)
        return bytes(sink.getvalue())

    @staticmethod
    def from_bytes(packed: bytes | memoryview) -> PageIndex:
        """Return the index of `to_bytes`, whose checksum the caller has verified."""
        table = pa.ipc.open_stream(pa.py_buffer(packed)).read_all().combine_chunks()
        metadata: Mapping[bytes, bytes] = table.schema.metadata
        arrays: dict[str, Any] = {
            name: table.column(name).to_numpy() for name in table.column_names if name != "first"
        }
        leaves = []
        for number, leaf in enumerate(orjson.loads(metadata[b"leaves"])):
            pages: StoredPages | AlikePages | None = None
            if f"page{number}" in arrays:
                numbers = arrays[f"page{number}"]
                contents = (metadata[f"page{number}.{place}".encode()] for place in range(numbers.max() + 1))
                pages = AlikePages(tuple(contents), numbers)
            elif f"offset{number}" in arrays:
                pages = StoredPages(*(arrays[f"{name}{number}"] for name in ("offset", "size", "checksum")))
            codes = (leaf["type"], leaf["codec"], tuple(leaf["encodings"]))
            leaves.append(Leaf(tuple(leaf["path"]), *codes, pages, arrays.get(f"values{number}")))
        return PageIndex(
            schema=metadata[b"schema"],
            firsts=table.column("first").to_pylist(),
            last=metadata[b"last"].decode(),
            rows=arrays["rows"],
            leaves=tuple(leaves),
            keys=BlockFilter.from_bytes(metadata[b"keys"]),
        )


def pack_section(index: PageIndex, name: str) -> bytes:
    """Return the page index with its trailer, for a file of this name."""
    packed = index.to_bytes()
    checksum = zlib.crc32(packed, zlib.crc32(name.encode()))
    return packed + len(packed).to_bytes(4, "little") + checksum.to_bytes(4, "little") + _SECTION


def read_page_index(objects: Objects, path: str, name: str) -> PageIndex | None:
    """Read the page index of a row file written under ``name``; None if it has none or is damaged."""
    tail = read_tail(objects, path, _READ_BYTES)
    footer_bytes = int.from_bytes(tail.data[-TAIL_BYTES:-4], "little")
    behind = TAIL_BYTES + footer_bytes + SEAL_BYTES
    end = tail.size_bytes - behind - _TRAILER_BYTES
    trailer = _part(objects, path, tail, ByteRange(end, end + _TRAILER_BYTES))
    if len(trailer) != _TRAILER_BYTES or not trailer.endswith(_SECTION):
        return None
    size, checksum = (int.from_bytes(trailer[at : at + 4], "little") for at in (0, 4))
    packed = _part(objects, path, tail, ByteRange(end - size, end))
    if len(packed) != size or zlib.crc32(packed, zlib.crc32(name.encode())) != checksum:
        return None
    return PageIndex.from_bytes(packed)


def _part(objects: Objects, path: str, tail: Tail, part: ByteRange) -> bytes:
    """Return a part of a file, perhaps from the tail; nothing for one that begins before the file."""
    if part.start < 0:
        return b""
    begin = tail.size_bytes - len(tail.data)
    if part.start >= begin:
        return tail.data[part.start - begin : part.end - begin]
    return read_ranges(objects, path, [part])[0]


# The cost of remembering that a file has no index.
_NONE_BYTES: Final = 256


class RecentlyUsed(Generic[_Key, _Value]):
    """Values within a bound of bytes, the least recently used evicted first; threads may share it."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self._lock = threading.Lock()
        self._known: OrderedDict[_Key, tuple[_Value, int]] = OrderedDict()
        self.size_bytes: int = 0

    def get(self, key: _Key) -> _Value | None:
        with self._lock:
            known = self._known.get(key)
            if known is None:
                return None
            self._known.move_to_end(key)
            return known[0]

    def keep(self, key: _Key, value: _Value, size_bytes: int) -> None:
        with self._lock:
            if key not in self._known:
                self._known[key] = value, size_bytes
                self.size_bytes += size_bytes
            while self.size_bytes > self.bytes_max:
                _, (_, freed) = self._known.popitem(last=False)
                self.size_bytes -= freed


class PageIndexes(RecentlyUsed[tuple[str, str], tuple[PageIndex | None]]):
    def of(self, objects: Objects, path: str, name: str) -> PageIndex | None:
        file = objects.url, path
        known = self.get(file)
        if known is not None:
            return known[0]
        index = read_page_index(objects, path, name)
        self.keep(file, (index,), _NONE_BYTES if index is None else index.size_bytes)
        return index


# The page indexes of this process.
PAGE_INDEXES: Final = PageIndexes(64 << 20)


class FieldType(IntEnum):
    """The numbers of Thrift's types."""

    TRUE = 1
    FALSE = 2
    BYTE = 3
    I16 = 4
    I32 = 5
    I64 = 6
    DOUBLE = 7
    BINARY = 8
    LIST = 9
    STRUCT = 12


Field: TypeAlias = tuple[int, FieldType, Any]
"""Number, type and value of a field to be written.

A list's value is the type of its elements and the elements. A struct's value is its fields, in the order of their
numbers. A value given as bytes is written unchanged.
"""

_INTEGERS: Final = frozenset({FieldType.I16, FieldType.I32, FieldType.I64})
_LONG_LIST: Final = 15
_DOUBLE_BYTES: Final = 8


def read_struct(data: memoryview | bytes, start: int) -> tuple[dict[int, Any], int]:
    """Return the fields of a struct by their numbers, and its end; bad data raise `IndexError` or `ValueError`."""
    fields: dict[int, Any] = {}
    number, at = 0, start
    while True:
        head = data[at]
        at += 1
        if head == 0:
            return fields, at
        step = head >> 4
        if step:
            number += step
        else:
            raw, at = _read_varint(data, at)
            number = _unzigzag(raw)
        fields[number], at = _read_value(data, at, head & 15)


def _read_value(data: memoryview | bytes, at: int, kind: int) -> tuple[Any, int]:
    if kind in _INTEGERS:
        raw, at = _read_varint(data, at)
        return _unzigzag(raw), at
    if kind == FieldType.STRUCT:
        return read_struct(data, at)
    if kind == FieldType.BINARY:
        size, at = _read_varint(data, at)
        return bytes(data[at : at + size]), at + size
    if kind == FieldType.LIST:
        return read_list(data, at)
    if kind in {FieldType.TRUE, FieldType.FALSE}:
        return kind == FieldType.TRUE, at
    if kind == FieldType.BYTE:
        return data[at], at + 1
    if kind == FieldType.DOUBLE:
        return bytes(data[at : at + _DOUBLE_BYTES]), at + _DOUBLE_BYTES
    raise ValueError(f"a field of Thrift's type {kind}")


def read_list(data: memoryview | bytes, at: int) -> tuple[list[Any], int]:
    head = data[at]
    at += 1
    size, kind = head >> 4, head & 15
    if size == _LONG_LIST:
        size, at = _read_varint(data, at)
    if size > len(data):
        raise ValueError("a list longer than the data")
    elements = []
    for _ in range(size):
        if kind in {FieldType.TRUE, FieldType.FALSE}:
            element, at = data[at] == FieldType.TRUE, at + 1
        else:
            element, at = _read_value(data, at, kind)
        elements.append(element)
    return elements, at


def _read_varint(data: memoryview | bytes, at: int) -> tuple[int, int]:
    number = shift = 0
    while True:
        part = data[at]
        at += 1
        number |= (part & 0x7F) << shift
        if part < 0x80:
            return number, at
        shift += 7


def _unzigzag(number: int) -> int:
    return (number >> 1) ^ -(number & 1)


def write_struct(fields: Sequence[Field], before: int = 0) -> bytes:
    """Encode fields whose numbers rise; ``before`` is the last field's number of a struct that they continue."""
    out = bytearray()
    _write_struct(out, fields, before)
    return bytes(out)


def _write_struct(out: bytearray, fields: Sequence[Field], before: int = 0) -> None:
    for number, kind, value in fields:
        step = number - before
        if not 0 < step < 16:
            raise ValueError(f"field {number} comes after field {before}")
        out.append(step << 4 | kind)
        _write_value(out, kind, value)
        before = number
    out.append(0)


def _write_value(out: bytearray, kind: FieldType, value: Any) -> None:
    if isinstance(value, bytes) and kind is not FieldType.BINARY:
        out += value
    elif kind in _INTEGERS:
        _write_varint(out, (value << 1) ^ (value >> 63))
    elif kind is FieldType.BINARY:
        _write_varint(out, len(value))
        out += value
    elif kind is FieldType.LIST:
        element_kind, elements = value
        if len(elements) < _LONG_LIST:
            out.append(len(elements) << 4 | element_kind)
        else:
            out.append(_LONG_LIST << 4 | element_kind)
            _write_varint(out, len(elements))
        for element in elements:
            _write_value(out, element_kind, element)
    elif kind is FieldType.STRUCT:
        _write_struct(out, value)
    else:
        raise ValueError(f"fields of type {kind.name} are not written")


def _write_varint(out: bytearray, number: int) -> None:
    while number >= 0x80:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)


# A column with more different pages is read from the file: two of whole blocks and two last ones.
_ALIKE_MAX: Final = 4
# One absent key in a hundred costs a page; each key takes 1.4 bytes of the filter.
_KEY_ERROR_RATE: Final = 0.01
_KEYS_AT_ONCE: Final = 1 << 16

_I32, _I64, _BINARY = FieldType.I32, FieldType.I64, FieldType.BINARY
_LIST, _STRUCT = FieldType.LIST, FieldType.STRUCT


def page_index_of(
    file: memoryview, footer_start: int, page_rows: int, empty_columns: Collection[str]
) -> PageIndex:
    """Return the page index of a Parquet file of row updates, written with page indexes and without dictionaries.

    A row group's columns are cut after each ``page_rows`` rows.
    """
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
    stored: StoredPages | AlikePages | None = _alike(file, pages) if pages else None
    if pages and stored is None:
        offsets, sizes = zip(*pages, strict=True)
        checksums = [zlib.crc32(file[offset : offset + size]) for offset, size in pages]
        stored = StoredPages(
            np.array(offsets, np.int64), np.array(sizes, np.int32), np.array(checksums, np.uint32)
        )
    return Leaf(
        path=tuple(name.decode() for name in column[3]),
        physical_type=column[1],
        codec=column[4],
        encodings=tuple(column[2]),
        pages=stored,
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


def _schema_of(file: memoryview, footer: int) -> bytes:
    version_end = footer + 1
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
    ordered = sorted(parts.items(), key=lambda item: item[0].start)
    begins = np.array([part.start for part, _ in ordered], np.int64)
    views = [memoryview(data) for _, data in ordered]
    body: list[bytes | memoryview] = [PARQUET_MAGIC]
    end = len(PARQUET_MAGIC)
    rows = int(index.rows[chosen].sum())
    chunks: list[list[Field]] = []
    for leaf in index.leaves:
        begin = end
        if leaf.path[0] in wanted:
            pages: Iterable[bytes | memoryview] = ()
            if isinstance(leaf.pages, AlikePages):
                pages = map(leaf.pages.contents.__getitem__, leaf.pages.numbers[chosen].tolist())
            elif leaf.pages is not None:
                pages = _whole_pages(leaf.pages, chosen, begins, views, leaf.path[0])
            for page in pages:
                body.append(page)
                end += len(page)
        values = rows if leaf.values is None else int(leaf.values[chosen].sum())
        size = end - begin
        numbers = [(5, _I64, values), (6, _I64, size), (7, _I64, size), (9, _I64, begin)]
        head = _chunk_head(leaf.path, leaf.physical_type, leaf.codec, leaf.encodings)
        chunks.append([(2, _I64, begin), (3, _STRUCT, head + write_struct(numbers, before=4))])
    footer = write_struct(
        [
            (1, _I32, 2),
            (2, _LIST, index.schema),
            (3, _I64, rows),
            (4, _LIST, (_STRUCT, [[(1, _LIST, (_STRUCT, chunks)), (2, _I64, end), (3, _I64, rows)]])),
        ]
    )
    body += (footer, len(footer).to_bytes(4, "little"), PARQUET_MAGIC)
    # Join at once: a growing buffer would be in memory twice whenever it is moved.
    file = pq.ParquetFile(pa.BufferReader(b"".join(body)), coerce_int96_timestamp_unit="us")
    empty = index.empty_columns
    present = [column for column in columns if column not in empty]
    return file.read(columns=present, use_threads=False)


def _whole_pages(
    stored: StoredPages, blocks: _Offsets, begins: _Offsets, views: Sequence[memoryview], column: str
) -> Iterator[memoryview]:
    offsets = stored.offsets[blocks]
    holders = np.searchsorted(begins, offsets, side="right") - 1
    starts = offsets - begins[holders]
    places = (holders, starts, stored.sizes[blocks], stored.checksums[blocks], offsets)
    for holder, start, size, checksum, offset in zip(*(place.tolist() for place in places), strict=True):
        page = views[holder][start : start + size]
        if len(page) != size or zlib.crc32(page) != checksum:
            raise DataError("row file is damaged: a page's checksum is wrong", column=column, at=offset)
        yield page


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
