"""The page index of a row file: where its pages are, which keys it may have, and what its dullest columns hold.

It lies between the file's last page and its seal, where no Parquet reader looks, and has a checksum of its own, which
covers the file's name: so nothing is read that is not what was written under this name, though the seal of the whole
file cannot be verified.
"""

from __future__ import annotations

import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa

from millpond.statestore.objects.ranges import ByteRange, Tail, read_ranges, read_tail
from millpond.statestore.rows.bloom import BlockFilter
from millpond.statestore.rows.fingerprint import Fingerprints
from millpond.statestore.types import Objects

_TAIL_BYTES: Final = 8
_SECTION: Final = b"MPPAGES1"
_TRAILER_BYTES: Final = 8 + len(_SECTION)
"""What follows the page index: its length, its checksum, and the name of the section."""

SEAL_BYTES: Final = 12
"""The seal between the page index and the footer (`row_format`)."""

_KEY_BYTES: Final = 64
"""What a key costs in Python, but for its characters."""

_READ_BYTES: Final = 1 << 16
"""How much of a file's end is read at first: the footer and the index of a file of average size."""


@dataclass(frozen=True, slots=True)
class StoredPages:
    """The pages of a column where they lie in the file, by block.

    Attributes:
        offsets: where each page begins, with its header.
        sizes: how long it is.
        checksums: CRC-32 of each page with its header.
    """

    offsets: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int32]
    checksums: npt.NDArray[np.uint32]

    @property
    def size_bytes(self) -> int:
        """What they cost in memory."""
        return int(self.offsets.nbytes + self.sizes.nbytes + self.checksums.nbytes)


@dataclass(frozen=True, slots=True)
class AlikePages:
    """The pages of a column that are nearly all alike, such as those of nulls: they are not read from the file.

    Attributes:
        contents: the few different pages, with their headers.
        numbers: for each block, which of them it has.
    """

    contents: tuple[bytes, ...]
    numbers: npt.NDArray[np.uint8]

    @property
    def size_bytes(self) -> int:
        """What they cost in memory."""
        return sum(map(len, self.contents)) + int(self.numbers.nbytes)


@dataclass(frozen=True, slots=True)
class Leaf:
    """A column of a Parquet file, nested ones included.

    Attributes:
        path: its name, and those of its fields.
        physical_type: Parquet's number of its type.
        codec: Parquet's number of its compression.
        encodings: Parquet's numbers.
        pages: its pages by block; ``None`` of a column without values.
        values: how many values each page has; ``None`` if as many as rows.
    """

    path: tuple[str, ...]
    physical_type: int
    codec: int
    encodings: tuple[int, ...]
    pages: StoredPages | AlikePages | None
    values: npt.NDArray[np.int32] | None


@dataclass(frozen=True, slots=True)
class PageIndex:
    """What is known of a row file without reading its pages.

    Attributes:
        schema: the elements of Parquet's schema, as they are in the footer.
        firsts: the first key of each block.
        last: the last key of the file.
        rows: how many rows each block has.
        leaves: the columns in the order of the schema.
        keys: a filter of all its keys.
    """

    schema: bytes
    firsts: Sequence[str]
    last: str
    rows: npt.NDArray[np.int32]
    leaves: tuple[Leaf, ...]
    keys: BlockFilter

    @property
    def size_bytes(self) -> int:
        """What it costs in memory, by estimate."""
        of_firsts = sum(map(len, self.firsts)) + _KEY_BYTES * len(self.firsts)
        of_leaves = sum(
            (0 if leaf.pages is None else leaf.pages.size_bytes)
            + (0 if leaf.values is None else leaf.values.nbytes)
            for leaf in self.leaves
        )
        return int(of_firsts + of_leaves + self.rows.nbytes + self.keys.size_bytes)

    def blocks_of(self, keys: Sequence[str], fingerprints: Fingerprints) -> list[int]:
        """The blocks that may hold any of these sorted keys, in their order.

        Args:
            keys: the keys.
            fingerprints: those of the keys.
        """
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
        """The columns that have no values in the whole file, and no pages here."""
        return frozenset(leaf.path[0] for leaf in self.leaves if leaf.pages is None)

    def ranges(self, blocks: Sequence[int], columns: Iterable[str]) -> list[ByteRange]:
        """Where the pages of some blocks and columns are that have to be read, column by column."""
        chosen = np.fromiter(blocks, np.int64, len(blocks))
        found: list[ByteRange] = []
        for pages in self._stored_of(columns):
            starts = pages.offsets[chosen]
            found += map(ByteRange, starts.tolist(), (starts + pages.sizes[chosen]).tolist())
        return found

    def portions(
        self, blocks: Sequence[int], columns: Iterable[str], *, blocks_max: int, bytes_max: int
    ) -> Iterator[Sequence[int]]:
        """Some blocks, as many at a time as may be in memory at once, and at least one.

        Args:
            blocks: the blocks.
            columns: the columns that are read of them.
            blocks_max: how many blocks may be in memory.
            bytes_max: how many bytes of them, as they are in the file.
        """
        chosen = np.fromiter(blocks, np.int64, len(blocks))
        sizes = np.zeros(len(chosen), np.int64)
        for pages in self._stored_of(columns):
            sizes += pages.sizes[chosen]
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
        """How many bytes of the file have to be read for all rows and columns."""
        stored = (leaf.pages for leaf in self.leaves if isinstance(leaf.pages, StoredPages))
        return sum(int(pages.sizes.sum(dtype=np.int64)) for pages in stored)

    def size_of(self, blocks: Sequence[int], columns: Iterable[str]) -> int:
        """How many bytes of some blocks and columns have to be read."""
        chosen = np.fromiter(blocks, np.int64, len(blocks))
        return sum(int(pages.sizes[chosen].sum(dtype=np.int64)) for pages in self._stored_of(columns))

    def _stored_of(self, columns: Iterable[str]) -> list[StoredPages]:
        wanted = frozenset(columns)
        return [
            leaf.pages
            for leaf in self.leaves
            if leaf.path[0] in wanted and isinstance(leaf.pages, StoredPages)
        ]

    def to_bytes(self) -> bytes:
        """The index as an Arrow stream, for `from_bytes`."""
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
            leaves.append(
                {
                    "path": leaf.path,
                    "type": leaf.physical_type,
                    "codec": leaf.codec,
                    "encodings": leaf.encodings,
                }
            )
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
        """The index of `to_bytes`, whose checksum the caller has verified."""
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
            leaves.append(
                Leaf(
                    path=tuple(leaf["path"]),
                    physical_type=leaf["type"],
                    codec=leaf["codec"],
                    encodings=tuple(leaf["encodings"]),
                    pages=pages,
                    values=arrays.get(f"values{number}"),
                )
            )
        return PageIndex(
            schema=metadata[b"schema"],
            firsts=table.column("first").to_pylist(),
            last=metadata[b"last"].decode(),
            rows=arrays["rows"],
            leaves=tuple(leaves),
            keys=BlockFilter.from_bytes(metadata[b"keys"]),
        )


def pack_section(index: PageIndex, name: str) -> bytes:
    """The page index as it is in a file of this name, between the last page and the seal."""
    packed = index.to_bytes()
    checksum = zlib.crc32(packed, zlib.crc32(name.encode()))
    return packed + len(packed).to_bytes(4, "little") + checksum.to_bytes(4, "little") + _SECTION


def read_page_index(objects: Objects, path: str, name: str) -> PageIndex | None:
    """The page index of a row file; ``None`` if it has none, or what is said of it is damaged.

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
    """A part of a file, which may have been read already; none that begins before the file."""
    if part.start < 0:
        return b""
    begin = tail.size_bytes - len(tail.data)
    if part.start >= begin:
        return tail.data[part.start - begin : part.end - begin]
    return read_ranges(objects, path, [part])[0]
