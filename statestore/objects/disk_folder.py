"""The folder of the disk tier: one budget for all processes of a machine, without anything that they share but files.

Each process counts what it has written since it last swept. Before that exceeds a 64th of the budget, and at its first
write, it sweeps: it sums what is there and removes what was not used for longest, until that is below 90 % of the
budget. One process sweeps at a time; another whose turn it is writes nothing until it gets to sweep. So the folder never
holds more than 90 % of the budget and a 64th of it for each process: up to six processes stay within the budget.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from millpond.statestore.objects.disk_copy import DiskCopy
from millpond.statestore.types import Clock

ADMITTED_BYTES_MAX: Final = 1 << 20
"""How much may be written at once."""

COUNTED_BYTES_MIN: Final = 1 << 16
"""What a file counts at least, so that there are not too many to sweep: 131,072 in 8 GiB."""

_SHARE: Final = 64
_SHARE_BYTES_MIN: Final = ADMITTED_BYTES_MAX
_KEPT_OF_TEN: Final = 9
_LARGE_SHARE: Final = 8

_MARK_EVERY_US: Final = 60_000_000
_MARKED_MAX: Final = 65_536
"""Of how many files a process remembers when it marked them."""

_SWEEP: Final = ".sweep"
_SUB_FOLDER: Final = re.compile(r"[0-9a-f]{2}")
_FILE: Final = re.compile(r"[0-9a-f]{64}")
_OTHERS_MAY_WRITE: Final = stat.S_IWGRP | stat.S_IWOTH


class DiskFolder:
    """A folder of `DiskCopy` within a budget; threads and processes may share it.

    It is made when it is first written to, readable by this user alone, and used only while no other user may write
    to it.

    Args:
        path: the folder.
        budget_bytes: how much of the disk it may take.
        clock: the source of time.
    """

    def __init__(self, path: str | Path, budget_bytes: int, clock: Clock) -> None:
        self._path = str(path)
        self._budget_bytes = budget_bytes
        self._share_bytes = max(budget_bytes // _SHARE, _SHARE_BYTES_MIN)
        self._clock = clock
        self._lock = threading.Lock()
        self._written_bytes = self._share_bytes
        self._marked: dict[bytes, int] = {}

    @property
    def path(self) -> str:
        """The folder."""
        return self._path

    @property
    def large_bytes(self) -> int:
        """What is longer is not kept whole: it would take the place of too much else."""
        return self._budget_bytes // _LARGE_SHARE

    def open(self, name: bytes) -> DiskCopy | None:
        """The copy of an object; ``None`` if there is none.

        Raises:
            OSError: the disk failed, or other users may write to the folder.
        """
        try:
            self._check()
        except FileNotFoundError:
            return None
        return DiskCopy.open(self._file_of(name), name)

    def create(self, name: bytes, size_bytes: int) -> DiskCopy | None:
        """The copy of an object, begun if there is none; ``None`` while another process makes room.

        Raises:
            OSError: the disk failed or is full, or other users may write to the folder.
        """
        file = Path(self._file_of(name))
        if not file.exists():
            self._make(file.parent)
            if not self.admits(COUNTED_BYTES_MIN):
                return None
        self._check()
        return DiskCopy.create(str(file), name, size_bytes)

    def remove(self, name: bytes) -> bool:
        """Remove the copy of an object.

        Returns:
            Whether there was one.

        Raises:
            OSError: the disk failed.
        """
        try:
            Path(self._file_of(name)).unlink()
        except FileNotFoundError:
            return False
        return True

    def admits(self, size_bytes: int) -> bool:
        """Whether as much may be written now, for which room is made if it is time.

        Args:
            size_bytes: at most `ADMITTED_BYTES_MAX`, which is the least share of a process.

        Raises:
            OSError: the disk failed.
        """
        with self._lock:
            if self._written_bytes + size_bytes <= self._share_bytes:
                self._written_bytes += size_bytes
                return True
        if not self._sweep():
            return False
        with self._lock:
            self._written_bytes = size_bytes
        return True

    def note_use(self, copy: DiskCopy, *, is_written: bool) -> None:
        """Note that a copy is in use: once a minute at most, unless it has been written to.

        Raises:
            OSError: the disk failed.
        """
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
        return f"{self._path}/{digits[:2]}/{digits}"

    def _make(self, sub_folder: Path) -> None:
        Path(self._path).mkdir(mode=0o700, parents=True, exist_ok=True)
        self._check()
        sub_folder.mkdir(mode=0o700, exist_ok=True)

    def _check(self) -> None:
        """See that no other user has put files here: in a folder that all users share, one could make it first."""
        status = os.lstat(self._path)
        is_ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
        if not is_ours or status.st_mode & _OTHERS_MAY_WRITE:
            raise PermissionError(errno.EPERM, "not a folder that only this user may write to", self._path)

    def _sweep(self) -> bool:
        """Remove what was not used for longest; ``False`` if another process or thread does."""
        lock = os.open(f"{self._path}/{_SWEEP}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
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
            if held_bytes * 10 <= self._budget_bytes * _KEPT_OF_TEN:
                return
            Path(path).unlink(missing_ok=True)
            held_bytes -= counted

    def _files(self) -> Iterator[tuple[int, int, str]]:
        """When each file was used last, what it counts, and its path."""
        for folder in _entries(self._path):
            for entry in _entries(folder.path) if _SUB_FOLDER.fullmatch(folder.name) else ():
                status = _status(entry) if _FILE.fullmatch(entry.name) else None
                if status is not None:
                    counted = max(status.st_blocks * 512, COUNTED_BYTES_MIN)
                    yield status.st_mtime_ns, counted, entry.path


def _entries(path: str) -> list[os.DirEntry[str]]:
    with os.scandir(path) as entries:
        return list(entries)


def _status(entry: os.DirEntry[str]) -> os.stat_result | None:
    try:
        return entry.stat(follow_symlinks=False)
    except FileNotFoundError:
        # Another process has removed it.
        return None
