"""The folder of the disk tier: verified copies of parts of objects, within one budget for all processes of a machine.

Processes share only files. Each process counts its writes since its last sweep. At its first write, and before the count
exceeds a 64th of the budget, the process sweeps: it sums the sizes of all files and removes the least recently used ones
until less than 90 % of the budget is left. One process sweeps at a time, and another whose turn it is writes nothing
meanwhile. So the folder never holds more than 90 % of the budget and a 64th of it per process, and up to six processes
stay within the budget.

A copy is one sparse file::

    0    magic, size of the object, and the CRC-32 of both
    32   the CRC-32 of each chunk, or 0 for a chunk that is not kept
    …    the chunks, from the next multiple of 4 KiB

The CRC-32 of a chunk also covers the object's name and the chunk's number, so no chunk is mistaken for another. It is
written after the chunk, without locks and syncs: several processes write the same bytes, and a chunk torn by a crash
fails its CRC-32, as a flipped bit does, and counts as not kept.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
import struct
import threading
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import numpy as np

from millpond.statestore.objects.ranges import ByteRange
from millpond.statestore.types import Clock, Closeable

# The unit of keeping and verifying, less than a page of rows; the last chunk of an object may be shorter.
CHUNK_BYTES: Final = 1 << 14

_MAGIC: Final = b"MPDISK01"
_HEADER: Final = struct.Struct("<8sQI")
_TABLE_AT: Final = 32
_ENTRY_BYTES: Final = 4
_ALIGNED_BYTES: Final = 1 << 12
# The longest run of adjacent chunks: 16 MiB.
_RUN_CHUNKS_MAX: Final = 1_024


class DiskCopy(Closeable):
    """An open copy of an object, made by `open` or `create`; ``damaged`` counts the chunks that failed their CRC-32."""

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
        """Open the copy in a file, or return None if it is missing or its header is damaged."""
        try:
            file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        size_bytes = _size_in_header(file, name)
        if size_bytes is None:
            os.close(file)
            return None
        return cls(file, name, size_bytes)

    @classmethod
    def create(cls, path: str, name: bytes, size_bytes: int) -> DiskCopy:
        """Open the copy in a file, which is created if missing and emptied if the object's size differs."""
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        known_bytes = _size_in_header(file, name)
        copy = cls(file, name, size_bytes)
        try:
            if known_bytes is not None and known_bytes != size_bytes:
                os.ftruncate(file, 0)
            if known_bytes != size_bytes:
                start = _HEADER.pack(_MAGIC, size_bytes, 0)[:-_ENTRY_BYTES]
                checksum = zlib.crc32(start, copy._seed).to_bytes(_ENTRY_BYTES, "little")
                _write_all(file, memoryview(start + checksum), 0)
        except BaseException:
            copy.close()
            raise
        return copy

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def read(self, chunks: Sequence[int]) -> dict[int, bytes]:
        """Return the kept and intact ones among some chunks, whose numbers rise."""
        if not chunks:
            return {}
        first, count = chunks[0], chunks[-1] - chunks[0] + 1
        packed = os.pread(self._file, _ENTRY_BYTES * count, _TABLE_AT + _ENTRY_BYTES * first)
        # A truncated file has a shorter table.
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
        """Write adjacent whole chunks, from the one with number ``first``."""
        view = memoryview(data)
        starts = range(0, len(view), CHUNK_BYTES)
        checksums = [
            self._checksum(first + number, view[start : start + CHUNK_BYTES])
            for number, start in enumerate(starts)
        ]
        # Chunks before their checksums: otherwise a reader could find a checksum without its chunk.
        _write_all(self._file, view, self._data_at + first * CHUNK_BYTES)
        table = memoryview(np.array(checksums, "<u4").tobytes())
        _write_all(self._file, table, _TABLE_AT + _ENTRY_BYTES * first)

    def mark_used(self, now_us: int) -> None:
        """Record the time of use, by which the sweep chooses."""
        os.utime(self._file, ns=(now_us * 1_000, now_us * 1_000))

    def part_of(self, chunks: range) -> ByteRange:
        """Return the place of adjacent chunks in the object."""
        return ByteRange(chunks.start * CHUNK_BYTES, min(chunks.stop * CHUNK_BYTES, self.size_bytes))

    def _checksum(self, chunk: int, piece: bytes | memoryview) -> int:
        # 0 marks a chunk that is not kept, so no checksum may be 0.
        return zlib.crc32(piece, zlib.crc32(chunk.to_bytes(8, "little"), self._seed)) or 1


def chunks_of(part: ByteRange) -> range:
    """Return the chunks that hold a part of an object, which is not empty."""
    return range(part.start // CHUNK_BYTES, (part.end - 1) // CHUNK_BYTES + 1)


def runs_of(chunks: Iterable[int]) -> list[range]:
    """Group rising numbers of chunks into runs of adjacent ones, of at most 16 MiB."""
    runs: list[range] = []
    for chunk in chunks:
        if runs and runs[-1].stop == chunk and len(runs[-1]) < _RUN_CHUNKS_MAX:
            runs[-1] = range(runs[-1].start, chunk + 1)
        else:
            runs.append(range(chunk, chunk + 1))
    return runs


def _size_in_header(file: int, name: bytes) -> int | None:
    """Return the object's size by the file's header, or None if the header is damaged; an error closes the file."""
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
        # A nearly full disk writes a part, and raises at the next call.
        written = os.pwrite(file, data, at)
        data, at = data[written:], at + written


# The largest single write.
ADMITTED_BYTES_MAX: Final = 1 << 20
# The least that a file counts, which bounds the files to sweep: 131,072 in 8 GiB.
COUNTED_BYTES_MIN: Final = 1 << 16

_SHARE: Final = 64
_SHARE_BYTES_MIN: Final = ADMITTED_BYTES_MAX
_KEPT_OF_TEN: Final = 9
_LARGE_SHARE: Final = 8
_MARK_EVERY_US: Final = 60_000_000
# The number of files whose last mark a process remembers.
_MARKED_MAX: Final = 65_536
_SWEEP: Final = ".sweep"
_SUB_FOLDER: Final = re.compile(r"[0-9a-f]{2}")
_FILE: Final = re.compile(r"[0-9a-f]{64}")
_OTHERS_MAY_WRITE: Final = stat.S_IWGRP | stat.S_IWOTH


class DiskFolder:
    """A folder of `DiskCopy` within a budget, shared by threads and processes.

    The first write creates it, readable by this user alone. It is used only while no other user may write to it. Its
    methods raise `OSError` when the disk fails or is full.
    """

    def __init__(self, path: str | Path, budget_bytes: int, clock: Clock) -> None:
        self.path: Final[str] = str(path)
        self.budget_bytes: Final[int] = budget_bytes
        self._share_bytes = max(budget_bytes // _SHARE, _SHARE_BYTES_MIN)
        self._clock = clock
        self._lock = threading.Lock()
        self._written_bytes = self._share_bytes
        self._marked: dict[bytes, int] = {}

    @property
    def large_bytes(self) -> int:
        """The size above which an object is not kept whole, because it would evict too much else."""
        return self.budget_bytes // _LARGE_SHARE

    def open(self, name: bytes) -> DiskCopy | None:
        try:
            self._check()
        except FileNotFoundError:
            return None
        return DiskCopy.open(self._file_of(name), name)

    def create(self, name: bytes, size_bytes: int) -> DiskCopy | None:
        """Open or begin the copy of an object; return None while another process makes room."""
        file = Path(self._file_of(name))
        if not file.exists():
            Path(self.path).mkdir(mode=0o700, parents=True, exist_ok=True)
            self._check()
            file.parent.mkdir(mode=0o700, exist_ok=True)
            if not self.admits(COUNTED_BYTES_MIN):
                return None
        self._check()
        return DiskCopy.create(str(file), name, size_bytes)

    def remove(self, name: bytes) -> bool:
        """Remove the copy of an object; return True if there was one."""
        try:
            Path(self._file_of(name)).unlink()
        except FileNotFoundError:
            return False
        return True

    def admits(self, size_bytes: int) -> bool:
        """Return True if up to `ADMITTED_BYTES_MAX` bytes may be written now, after a sweep if it is due."""
        with self._lock:
            if self._written_bytes + size_bytes <= self._share_bytes:
                self._written_bytes += size_bytes
                return True
        if not self._sweep():
            return False
        with self._lock:
            self._written_bytes = size_bytes
        return True

    def record_use(self, copy: DiskCopy, *, is_written: bool) -> None:
        """Mark a copy as used, at most once a minute unless it was written to."""
        now_us = self._clock.monotonic_us()
        with self._lock:
            marked_us = self._marked.get(copy.name)
            if not is_written and marked_us is not None and now_us - marked_us < _MARK_EVERY_US:
                return
            if len(self._marked) >= _MARKED_MAX:
                self._marked.clear()
            self._marked[copy.name] = now_us
        copy.mark_used(self._clock.now_us())

    def _file_of(self, name: bytes) -> str:
        digits = name.hex()
        return f"{self.path}/{digits[:2]}/{digits}"

    def _check(self) -> None:
        """Refuse a folder into which another user could put files: in a shared place, one could have made it first."""
        status = os.lstat(self.path)
        is_ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
        if not is_ours or status.st_mode & _OTHERS_MAY_WRITE:
            raise PermissionError(errno.EPERM, "not a folder that only this user may write to", self.path)

    def _sweep(self) -> bool:
        """Remove the least recently used files; return False if another process or thread is sweeping."""
        lock = os.open(f"{self.path}/{_SWEEP}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        else:
            self._remove_unused()
            return True
        finally:
            os.close(lock)

    def _remove_unused(self) -> None:
        files = sorted(self._files())
        held_bytes = sum(counted for _, counted, _ in files)
        for _, counted, path in files:
            if held_bytes * 10 <= self.budget_bytes * _KEPT_OF_TEN:
                return
            Path(path).unlink(missing_ok=True)
            held_bytes -= counted

    def _files(self) -> Iterator[tuple[int, int, str]]:
        """Yield each file's time of last use, counted size, and path."""
        for folder in _entries(self.path):
            for entry in _entries(folder.path) if _SUB_FOLDER.fullmatch(folder.name) else ():
                if _FILE.fullmatch(entry.name):
                    # Another process may have removed the file.
                    with suppress(FileNotFoundError):
                        status = entry.stat(follow_symlinks=False)
                        counted = max(status.st_blocks * 512, COUNTED_BYTES_MIN)
                        yield status.st_mtime_ns, counted, entry.path


def _entries(path: str) -> list[os.DirEntry[str]]:
    with os.scandir(path) as entries:
        return list(entries)
