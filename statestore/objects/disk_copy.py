"""A copy of parts of an object on the local disk, of which every byte is verified when it is read.

It is one sparse file::

    0    magic, how long the object is, and the CRC-32 of both
    32   of each chunk its CRC-32, or 0 as long as the chunk is not here
    …    the chunks, from the next multiple of 4 KiB on

The CRC-32 of a chunk covers the object's name and the chunk's number too, so that nothing is taken for what it is not.
It is written after the chunk, without locks and syncs: several processes write the same bytes, and what a crash has
left of a chunk fails its CRC-32, as a flipped bit does. It counts as not here then.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np

from millpond.statestore.closeable import Closeable
from millpond.statestore.objects.ranges import ByteRange

CHUNK_BYTES: Final = 1 << 14
"""What is kept and verified at once, less than a page of rows; the last chunk of an object may be shorter."""

_MAGIC: Final = b"MPDISK01"
_HEADER: Final = struct.Struct("<8sQI")
_TABLE_AT: Final = 32
_ENTRY_BYTES: Final = 4
_ALIGNED_BYTES: Final = 1 << 12
_RUN_CHUNKS_MAX: Final = 1_024
"""How many adjacent chunks are one run: 16 MiB."""


class DiskCopy(Closeable):
    """An open copy of an object; made by `open` and `create`.

    Attributes:
        name: the object's name, which the checksums cover.
        size_bytes: how long the object is.
        damaged: how many chunks were here and failed their checksums.

    Args:
        file: its open file, which is closed with it.
        name: the object's name.
        size_bytes: how long the object is.
    """

    def __init__(self, file: int, name: bytes, size_bytes: int) -> None:
        self.name: bytes = name
        self.size_bytes: int = size_bytes
        self.damaged: int = 0
        self._file = file
        self._seed = zlib.crc32(name)
        self._chunks = -(-size_bytes // CHUNK_BYTES)
        table_end = _TABLE_AT + _ENTRY_BYTES * self._chunks
        self._data_at = -(-table_end // _ALIGNED_BYTES) * _ALIGNED_BYTES

    @classmethod
    def open(cls, path: str, name: bytes) -> DiskCopy | None:
        """The copy in a file; ``None`` if there is none, or its header is damaged.

        Raises:
            OSError: the disk failed.
        """
        try:
            file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        size_bytes = _size_in_header(file, name)
        if size_bytes is None:
            os.close(file)
            return None
        return cls(file, name, size_bytes)

    @classmethod
    def create(cls, path: str, name: bytes, size_bytes: int) -> DiskCopy:
        """The copy in a file, which is made if there is none, and emptied if it is of an object of another length.

        Raises:
            OSError: the disk failed or is full.
        """
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        known_bytes = _size_in_header(file, name)
        copy = cls(file, name, size_bytes)
        try:
            if known_bytes is not None and known_bytes != size_bytes:
                os.ftruncate(file, 0)
            if known_bytes != size_bytes:
                _write_all(file, memoryview(copy._header()), 0)
        except BaseException:
            copy.close()
            raise
        return copy

    def close(self) -> None:
        """Close the file."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def read(self, chunks: Sequence[int]) -> dict[int, bytes]:
        """Those of some chunks that are here and whole.

        Args:
            chunks: their numbers, rising.

        Raises:
            OSError: the disk failed.
        """
        if not chunks:
            return {}
        first, count = chunks[0], chunks[-1] - chunks[0] + 1
        packed = os.pread(self._file, _ENTRY_BYTES * count, _TABLE_AT + _ENTRY_BYTES * first)
        # A file that was cut off has a shorter table.
        entries = np.frombuffer(packed[: len(packed) // _ENTRY_BYTES * _ENTRY_BYTES], "<u4").tolist()
        here = [chunk for chunk in chunks if chunk - first < len(entries) and entries[chunk - first]]
        found: dict[int, bytes] = {}
        for run in runs_of(here):
            part = self.part_of(run)
            data = os.pread(self._file, part.end - part.start, self._data_at + part.start)
            for chunk in run:
                piece = data[(chunk - run.start) * CHUNK_BYTES : (chunk - run.start + 1) * CHUNK_BYTES]
                if self._checksum(chunk, piece) == entries[chunk - first]:
                    found[chunk] = piece
        self.damaged += len(here) - len(found)
        return found

    def write(self, first: int, data: bytes | memoryview) -> None:
        """Keep adjacent chunks.

        Args:
            first: the number of the first.
            data: their bytes, up to the end of a chunk.

        Raises:
            OSError: the disk failed or is full.
        """
        view = memoryview(data)
        starts = range(0, len(view), CHUNK_BYTES)
        checksums = [
            self._checksum(first + number, view[start : start + CHUNK_BYTES])
            for number, start in enumerate(starts)
        ]
        _write_all(self._file, view, self._data_at + first * CHUNK_BYTES)
        table = memoryview(np.array(checksums, "<u4").tobytes())
        _write_all(self._file, table, _TABLE_AT + _ENTRY_BYTES * first)

    def mark_used(self, now_us: int) -> None:
        """Note that it was used at this time, for the sweep, which removes what was not used for longest.

        Raises:
            OSError: the disk failed.
        """
        os.utime(self._file, ns=(now_us * 1_000, now_us * 1_000))

    def part_of(self, chunks: range) -> ByteRange:
        """Where adjacent chunks are in the object."""
        return ByteRange(chunks.start * CHUNK_BYTES, min(chunks.stop * CHUNK_BYTES, self.size_bytes))

    def _header(self) -> bytes:
        start = _HEADER.pack(_MAGIC, self.size_bytes, 0)[:-_ENTRY_BYTES]
        return start + zlib.crc32(start, self._seed).to_bytes(_ENTRY_BYTES, "little")

    def _checksum(self, chunk: int, piece: bytes | memoryview) -> int:
        # 0 stands for a chunk that is not here.
        return zlib.crc32(piece, zlib.crc32(chunk.to_bytes(8, "little"), self._seed)) or 1


def chunks_of(part: ByteRange) -> range:
    """The chunks that have a part of an object, which is not empty.

    Example:
        >>> chunks_of(ByteRange(16_000, 17_000))
        range(0, 2)
    """
    return range(part.start // CHUNK_BYTES, (part.end - 1) // CHUNK_BYTES + 1)


def runs_of(chunks: Iterable[int]) -> list[range]:
    """Rising numbers of chunks as runs of adjacent ones, of 16 MiB at most.

    Example:
        >>> runs_of([1, 2, 3, 7])
        [range(1, 4), range(7, 8)]
    """
    runs: list[range] = []
    for chunk in chunks:
        if runs and runs[-1].stop == chunk and len(runs[-1]) < _RUN_CHUNKS_MAX:
            runs[-1] = range(runs[-1].start, chunk + 1)
        else:
            runs.append(range(chunk, chunk + 1))
    return runs


def _size_in_header(file: int, name: bytes) -> int | None:
    """How long the object is by the file's header; ``None`` if that is damaged. The file is closed after an error."""
    try:
        header = os.pread(file, _HEADER.size, 0)
    except BaseException:
        os.close(file)
        raise
    if len(header) != _HEADER.size:
        return None
    magic, size_bytes, checksum = _HEADER.unpack(header)
    is_whole = magic == _MAGIC and zlib.crc32(header[:-_ENTRY_BYTES], zlib.crc32(name)) == checksum
    return int(size_bytes) if is_whole else None


def _write_all(file: int, data: memoryview, at: int) -> None:
    while data:
        # A disk that is nearly full takes a part, and raises at the next call.
        written = os.pwrite(file, data, at)
        data, at = data[written:], at + written
