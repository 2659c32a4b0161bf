"""The page index of a row file: the place of its pages, a filter of its keys, and the contents of its uniform columns.

The index lies between the file's last page and its seal, where no Parquet reader looks. Its own checksum covers the
file's name, so every part that is read was written under this name, though the seal of the whole file cannot be verified.
Parquet's metadata is read and written with the part of Thrift's compact protocol that it needs: structs as their numbered
fields, without maps and sets.
"""

from __future__ import annotations

import threading
import zlib
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import compress
from typing import Any, Final, Generic, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa

from millpond.statestore.objects.ranges import ByteRange, Tail, read_ranges, read_tail
from millpond.statestore.rows.record_ids import BlockFilter, Fingerprints
from millpond.statestore.types import Objects

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")

_TAIL_BYTES: Final = 8
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

    offsets: npt.NDArray[np.int64]
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
    def empty_columns(self) -> frozenset[str]:
        return frozenset(leaf.path[0] for leaf in self.leaves if leaf.pages is None)

    def ranges(self, blocks: Sequence[int], columns: Iterable[str]) -> list[ByteRange]:
        """Return the places of the pages of some blocks and columns, column by column."""
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
        stored = (leaf.pages for leaf in self.leaves if isinstance(leaf.pages, StoredPages))
        return sum(int(pages.sizes.sum(dtype=np.int64)) for pages in stored)

    def size_of(self, blocks: Sequence[int], columns: Iterable[str]) -> int:
        return int(self._sizes_of(blocks, columns)[1].sum())

    def _sizes_of(
        self, blocks: Sequence[int], columns: Iterable[str]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        chosen = np.fromiter(blocks, np.int64, len(blocks))
        sizes = np.zeros(len(chosen), np.int64)
        for pages in self._stored_of(columns):
            sizes += pages.sizes[chosen]
        return chosen, sizes

    def _stored_of(self, columns: Iterable[str]) -> list[StoredPages]:
        wanted = frozenset(columns)
        return [
            leaf.pages
            for leaf in self.leaves
            if leaf.path[0] in wanted and isinstance(leaf.pages, StoredPages)
        ]

    def to_bytes(self) -> bytes:
        columns: dict[str, Any] = {"first": pa.array(self.firsts, pa.string()), "rows": self.rows}
        metadata: dict[str, bytes] = {
            "schema": self.schema,
            "last": self.last.encode(),
            "keys": self.keys.to_bytes(),
        }
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
            leaves.append({"path": leaf.path, **codes})
        metadata["leaves"] = orjson.dumps(leaves)
        table = pa.table(columns).replace_schema_metadata(metadata)
        sink = pa.BufferOutputStream()
        options = pa.ipc.IpcWriteOptions(compression="zstd")
        with pa.ipc.new_stream(sink, table.schema, options=options) as writer:
            writer.write_table(table)
        packed: bytes = sink.getvalue().to_pybytes()
        return packed

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
    footer_bytes = int.from_bytes(tail.data[-_TAIL_BYTES:-4], "little")
    behind = _TAIL_BYTES + footer_bytes + SEAL_BYTES
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
    """Recently used page indexes."""

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
    """Return the elements of a list, and its end; raises like `read_struct`."""
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
