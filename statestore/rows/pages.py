"""
Pages: a row file is read block by block, where few of its keys are wanted.

A large row file is written so that all its columns are cut into pages after the same rows: a *block*. Where each page
lies, and its checksum, is in the file's page index, between the last page and the seal, where no Parquet reader looks.
The pages of some blocks are put together to a Parquet file of their own in memory, which Arrow decodes.

The page index has a checksum of its own, which covers the file's name: so nothing is read that is not what was written
under this name, though the seal of the whole file cannot be verified.
"""

from __future__ import annotations

import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from millpond.statestore.check import check
from millpond.statestore.errors import DataError
from millpond.statestore.objects.ranges import ByteRange, Tail, read_ranges, read_tail
from millpond.statestore.rows.thrift import Field, FieldType, read_list, read_struct, write_struct
from millpond.statestore.types import Objects

__all__ = [
    "SEAL_BYTES",
    "Leaf",
    "PageIndex",
    "decode_blocks",
    "join_ranges",
    "pack_section",
    "page_index_of",
    "read_page_index",
]

_MAGIC: Final = b"PAR1"
_TAIL_BYTES: Final = 8
_SECTION: Final = b"MPPAGES1"
_TRAILER_BYTES: Final = 8 + len(_SECTION)
"""What follows the page index: its length, its checksum, and the name of the section."""

SEAL_BYTES: Final = 12
"""The seal between the page index and the footer (`row_format`)."""

_KEY_BYTES: Final = 64
_PAGE_INDEX_BYTES: Final = 20
"""What a key costs in Python, and a page in the arrays of its column."""

_READ_BYTES: Final = 1 << 16
"""How much of a file's end is read at first: the footer and the index of a file of average size."""

_I32, _I64, _BINARY, _LIST, _STRUCT = (
    FieldType.I32,
    FieldType.I64,
    FieldType.BINARY,
    FieldType.LIST,
    FieldType.STRUCT,
)


@dataclass(frozen=True, slots=True)
class Leaf:
    """
    A column of a Parquet file, nested ones included, and its pages by block.

    Attributes:
        path: its name, and those of its fields.
        physical_type: Parquet's number of its type.
        codec: Parquet's number of its compression.
        encodings: Parquet's numbers.
        offsets: where each page begins, with its header.
        sizes: how long it is.
        values: how many values it has; of a list more than rows.
        checksums: CRC-32 of each page with its header.
    """

    path: tuple[str, ...]
    physical_type: int
    codec: int
    encodings: tuple[int, ...]
    offsets: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int32]
    values: npt.NDArray[np.int32]
    checksums: npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class PageIndex:
    """
    Where the pages of a row file are.

    Attributes:
        schema: the elements of Parquet's schema, as they are in the footer.
        firsts: the first key of each block.
        last: the last key of the file.
        rows: how many rows each block has.
        leaves: the columns in the order of the schema.
    """

    schema: bytes
    firsts: Sequence[str]
    last: str
    rows: npt.NDArray[np.int32]
    leaves: tuple[Leaf, ...]

    @property
    def size_bytes(self) -> int:
        """
        What it costs in memory, by estimate.
        """
        of_keys = sum(map(len, self.firsts)) + _KEY_BYTES * len(self.firsts)
        return of_keys + (1 + len(self.leaves)) * _PAGE_INDEX_BYTES * len(self.firsts)

    def blocks_of(self, keys: Sequence[str]) -> list[int]:
        """
        The blocks that may hold any of these sorted keys, in their order.
        """
        blocks: list[int] = []
        begin = bisect_left(keys, self.firsts[0])
        for key in keys[begin : bisect_right(keys, self.last)]:
            block = bisect_right(self.firsts, key, lo=blocks[-1] if blocks else 0) - 1
            if not blocks or blocks[-1] != block:
                blocks.append(block)
        return blocks

    def ranges(self, blocks: Sequence[int], columns: Iterable[str]) -> list[ByteRange]:
        """
        Where the pages of some blocks and columns are, column by column.
        """
        return [
            ByteRange(int(leaf.offsets[block]), int(leaf.offsets[block] + leaf.sizes[block]))
            for leaf in self._leaves_of(columns)
            for block in blocks
        ]

    def size_of(self, blocks: Sequence[int], columns: Iterable[str]) -> int:
        """
        How many bytes the pages of some blocks and columns have.
        """
        chosen = np.fromiter(blocks, np.int64, len(blocks))
        return sum(int(leaf.sizes[chosen].sum()) for leaf in self._leaves_of(columns))

    def _leaves_of(self, columns: Iterable[str]) -> list[Leaf]:
        wanted = frozenset(columns)
        return [leaf for leaf in self.leaves if leaf.path[0] in wanted]

    def to_bytes(self) -> bytes:
        """
        The index as an Arrow stream, for `from_bytes`.
        """
        columns: dict[str, Any] = {"first": pa.array(self.firsts, pa.string()), "rows": self.rows}
        for number, leaf in enumerate(self.leaves):
            columns |= {
                f"offset{number}": leaf.offsets,
                f"size{number}": leaf.sizes,
                f"values{number}": leaf.values,
                f"checksum{number}": leaf.checksums,
            }
        leaves = [
            {"path": leaf.path, "type": leaf.physical_type, "codec": leaf.codec, "encodings": leaf.encodings}
            for leaf in self.leaves
        ]
        table = pa.table(columns).replace_schema_metadata(
            {"schema": self.schema, "leaves": orjson.dumps(leaves), "last": self.last.encode()}
        )
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(
            sink, table.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")
        ) as writer:
            writer.write_table(table)
        packed: bytes = sink.getvalue().to_pybytes()
        return packed

    @staticmethod
    def from_bytes(packed: bytes | memoryview) -> PageIndex:
        """
        The index of `to_bytes`, whose checksum the caller has verified.
        """
        table = pa.ipc.open_stream(pa.py_buffer(packed)).read_all().combine_chunks()
        metadata: Mapping[bytes, bytes] = table.schema.metadata

        def numbers(name: str) -> Any:
            return table.column(name).to_numpy()

        leaves = tuple(
            Leaf(
                path=tuple(leaf["path"]),
                physical_type=leaf["type"],
                codec=leaf["codec"],
                encodings=tuple(leaf["encodings"]),
                offsets=numbers(f"offset{number}"),
                sizes=numbers(f"size{number}"),
                values=numbers(f"values{number}"),
                checksums=numbers(f"checksum{number}"),
            )
            for number, leaf in enumerate(orjson.loads(metadata[b"leaves"]))
        )
        return PageIndex(
            schema=metadata[b"schema"],
            firsts=table.column("first").to_pylist(),
            last=metadata[b"last"].decode(),
            rows=numbers("rows"),
            leaves=leaves,
        )


def page_index_of(file: memoryview, firsts: Sequence[str], last: str) -> PageIndex:
    """
    The page index of a Parquet file that was written with Parquet's own page index, without dictionaries.

    Args:
        file: the whole file.
        firsts: the first key of each block.
        last: its last key.

    Raises:
        InternalError: its columns are not cut after the same rows.
    """
    footer_bytes = int.from_bytes(file[-_TAIL_BYTES:-4], "little")
    footer_start = len(file) - _TAIL_BYTES - footer_bytes
    metadata, _ = read_struct(file, footer_start)
    groups = metadata[4]
    starts: list[int] = []
    by_leaf: list[list[tuple[int, int, int, int]]] = [[] for _ in groups[0][1]]
    row = 0
    for group in groups:
        group_starts: list[int] | None = None
        for pages, chunk in zip(by_leaf, group[1], strict=True):
            locations, _ = read_struct(file, chunk[4])
            cuts = [location[3] for location in locations[1]]
            if group_starts is None:
                group_starts = cuts
            check(cuts == group_starts and 11 not in chunk[3], "columns are cut after the same rows")
            for location in locations[1]:
                offset, size = location[1], location[2]
                header, _ = read_struct(file, offset)
                pages.append((offset, size, header[5][1], zlib.crc32(file[offset : offset + size])))
        starts += [row + cut for cut in group_starts or ()]
        row += group[3]
    check(len(starts) == len(firsts), "each block has a first key", blocks=len(starts), keys=len(firsts))
    leaves = []
    for pages, chunk in zip(by_leaf, groups[0][1], strict=True):
        column = chunk[3]
        offsets, sizes, values, checksums = zip(*pages, strict=True)
        leaves.append(
            Leaf(
                path=tuple(name.decode() for name in column[3]),
                physical_type=column[1],
                codec=column[4],
                encodings=tuple(column[2]),
                offsets=np.array(offsets, np.int64),
                sizes=np.array(sizes, np.int32),
                values=np.array(values, np.int32),
                checksums=np.array(checksums, np.uint32),
            )
        )
    return PageIndex(
        schema=_schema_of(file, footer_start),
        firsts=firsts,
        last=last,
        rows=np.diff([*starts, row]).astype(np.int32),
        leaves=tuple(leaves),
    )


def pack_section(index: PageIndex, name: str) -> bytes:
    """
    The page index as it is in a file of this name, between the last page and the seal.
    """
    packed = index.to_bytes()
    checksum = zlib.crc32(packed, zlib.crc32(name.encode()))
    return packed + len(packed).to_bytes(4, "little") + checksum.to_bytes(4, "little") + _SECTION


def read_page_index(objects: Objects, path: str, name: str) -> PageIndex | None:
    """
    The page index of a row file; ``None`` if it has none, or what is said of it is damaged.

    Args:
        objects: the table's root.
        path: the file.
        name: the name that it was written under.

    Raises:
        ObjectMissingError: there is no such file.
        UnavailableError: the store is unavailable.
    """
    tail = read_tail(objects, path, _READ_BYTES)
    footer_bytes = int.from_bytes(tail.data[-_TAIL_BYTES:-4], "little")
    behind = _TAIL_BYTES + footer_bytes + SEAL_BYTES
    trailer = _part(
        objects, path, tail, ByteRange(tail.size_bytes - behind - _TRAILER_BYTES, tail.size_bytes - behind)
    )
    if len(trailer) != _TRAILER_BYTES or not trailer.endswith(_SECTION):
        return None
    size, checksum = (int.from_bytes(trailer[at : at + 4], "little") for at in (0, 4))
    end = tail.size_bytes - behind - _TRAILER_BYTES
    packed = _part(objects, path, tail, ByteRange(end - size, end))
    if len(packed) != size or zlib.crc32(packed, zlib.crc32(name.encode())) != checksum:
        return None
    return PageIndex.from_bytes(packed)


def _part(objects: Objects, path: str, tail: Tail, part: ByteRange) -> bytes:
    """
    A part of a file, which may have been read already; none that begins before the file.
    """
    if part.start < 0:
        return b""
    begin = tail.size_bytes - len(tail.data)
    if part.start >= begin:
        return tail.data[part.start - begin : part.end - begin]
    return read_ranges(objects, path, [part])[0]


def _schema_of(file: memoryview, footer_start: int) -> bytes:
    """
    The bytes of the schema's list, which is the footer's second field, after the version.
    """
    version_end = footer_start + 1
    while file[version_end] >= 0x80:
        version_end += 1
    # The version's last byte, then the head of the second field.
    start = version_end + 2
    _, end = read_list(file, start)
    return bytes(file[start:end])


def join_ranges(ranges: Iterable[ByteRange], gap_bytes: int) -> list[ByteRange]:
    """
    The ranges that cover all of these, in order; those nearer to each other than a gap are read at once.

    Example:
        >>> join_ranges([ByteRange(50, 60), ByteRange(0, 10), ByteRange(12, 20)], 5)
        [ByteRange(start=0, end=20), ByteRange(start=50, end=60)]
    """
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
    """
    The rows of some blocks.

    Args:
        index: the file's.
        blocks: which blocks, at least one.
        columns: which columns.
        parts: what was read of the file: all of `PageIndex.ranges`, joined.

    Raises:
        DataError: a page has changed since it was written.
    """
    starts = sorted(parts, key=lambda part: part.start)
    begins = [part.start for part in starts]
    wanted = frozenset(columns)
    body = bytearray(_MAGIC)
    rows = int(index.rows[list(blocks)].sum())
    chunks: list[list[Field]] = []
    for leaf in index.leaves:
        begin = len(body)
        if leaf.path[0] in wanted:
            for block in blocks:
                offset, size = int(leaf.offsets[block]), int(leaf.sizes[block])
                part = starts[bisect_right(begins, offset) - 1]
                page = memoryview(parts[part])[offset - part.start : offset - part.start + size]
                if len(page) != size or zlib.crc32(page) != int(leaf.checksums[block]):
                    raise DataError(
                        "row file is damaged: a page's checksum is wrong", column=leaf.path[0], at=offset
                    )
                body += page
        values = int(leaf.values[list(blocks)].sum())
        chunks.append(_chunk(leaf, begin, len(body) - begin, values))
    footer = write_struct(
        [
            (1, _I32, 2),
            (2, _LIST, index.schema),
            (3, _I64, rows),
            (4, _LIST, (_STRUCT, [[(1, _LIST, (_STRUCT, chunks)), (2, _I64, len(body)), (3, _I64, rows)]])),
        ]
    )
    body += footer + len(footer).to_bytes(4, "little") + _MAGIC
    file = pq.ParquetFile(pa.BufferReader(pa.py_buffer(body)), coerce_int96_timestamp_unit="us")
    return file.read(columns=list(columns), use_threads=False)


def _chunk(leaf: Leaf, begin: int, size: int, values: int) -> list[Field]:
    metadata: list[Field] = [
        (1, _I32, leaf.physical_type),
        (2, _LIST, (_I32, list(leaf.encodings))),
        (3, _LIST, (_BINARY, [name.encode() for name in leaf.path])),
        (4, _I32, leaf.codec),
        (5, _I64, values),
        (6, _I64, size),
        (7, _I64, size),
        (9, _I64, begin),
    ]
    return [(2, _I64, begin), (3, _STRUCT, metadata)]
