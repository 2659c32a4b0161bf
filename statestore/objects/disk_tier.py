"""The disk tier: an object store that keeps the read parts of row files on the machine's disk.

Row files never change, so a kept part equals the store's. A part that is missing or damaged on the disk is read from
the store. The disk never fails a call: while it is full or broken, every read goes to the store.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias, TypeVar

from millpond.statestore.errors import ObjectMissingError
from millpond.statestore.objects.disk_folder import (
    ADMITTED_BYTES_MAX,
    CHUNK_BYTES,
    DiskCopy,
    DiskFolder,
    chunks_of,
    runs_of,
)
from millpond.statestore.objects.local import LocalObjects
from millpond.statestore.objects.obstore import ObstoreObjects, download, upload
from millpond.statestore.objects.ranges import ByteRange, Tail, WrappedObjects, is_written_once
from millpond.statestore.system import SystemClock
from millpond.statestore.types import Clock, Objects

_LOG = logging.getLogger("millpond")
_Result = TypeVar("_Result")
_Parts: TypeAlias = list[bytes]
# The pause in the use of the disk after a failure.
_REST_US: Final = 60_000_000


class DiskTier(WrappedObjects):
    """`Objects` that keeps the row files read and written through it in a folder of the local disk.

    ``keeps=False`` reads what is there and keeps nothing more. A tier pickles as one that keeps nothing.
    """

    def __init__(self, objects: Objects, folder: DiskFolder, clock: Clock, *, keeps: bool = True) -> None:
        super().__init__(objects)
        self._folder = folder
        self._clock = clock
        self._keeps = keeps
        self._resumes_us: int | None = None
        self._has_warned = False
        # The number of parts found damaged on the disk and read from the store again.
        self.damaged: int = 0

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return (_reader_of, (self._objects, self._folder.path, self._folder.budget_bytes))

    def without_keeping(self) -> DiskTier:
        return DiskTier(self._objects, self._folder, self._clock, keeps=False)

    def get(self, path: str) -> bytes:
        kept = self._kept(path, lambda copy: [ByteRange(0, copy.size_bytes)])
        if kept is not None:
            return kept[0][0]
        data = super().get(path)
        self._keep_whole(path, data)
        return data

    def read_ranges(self, path: str, ranges: Sequence[ByteRange]) -> _Parts:
        kept = self._kept(path, lambda _: ranges)
        if kept is not None:
            return kept[0]
        if self._keeps and self._is_kept(path):
            with self._begun(path, super().read_tail(path, 1).size_bytes) as copy:
                parts = None if copy is None else self._parts(path, copy, ranges)
            if parts is not None:
                return parts
        return super().read_ranges(path, ranges)

    def read_tail(self, path: str, size_bytes: int) -> Tail:
        kept = self._kept(
            path, lambda copy: [ByteRange(max(0, copy.size_bytes - size_bytes), copy.size_bytes)]
        )
        if kept is not None:
            return Tail(kept[0][0], kept[1])
        if not self._keeps or not self._is_kept(path):
            return super().read_tail(path, size_bytes)
        # Read enough more that the chunk in which the tail begins is whole, because only whole chunks are kept.
        tail = super().read_tail(path, size_bytes + CHUNK_BYTES - 1)
        begin = tail.size_bytes - len(tail.data)
        first = -(-begin // CHUNK_BYTES)
        with self._begun(path, tail.size_bytes) as copy:
            if copy is not None:
                self._keep(copy, first, tail.data[first * CHUNK_BYTES - begin :])
        return Tail(tail.data[max(0, len(tail.data) - size_bytes) :], tail.size_bytes)

    def put_if_absent(self, path: str, data: bytes) -> None:
        super().put_if_absent(path, data)
        self._keep_whole(path, data)

    def put_unsynced(self, path: str, data: bytes) -> None:
        super().put_unsynced(path, data)
        self._keep_whole(path, data)

    def put(self, path: str, data: bytes) -> None:
        super().put(path, data)
        self.forget(path)

    def delete(self, paths: Iterable[str]) -> None:
        wanted = [*paths]
        super().delete(wanted)
        for path in wanted:
            self.forget(path)

    def forget(self, path: str) -> bool:
        """Remove the copy of an object, so that the next read goes to the store; return True if there was one."""
        return is_written_once(path) and bool(self._try(lambda: self._folder.remove(self._name(path))))

    # -- the disk --------------------------------------------------------------------------

    def _is_kept(self, path: str) -> bool:
        resumes_us = self._resumes_us
        is_resting = resumes_us is not None and self._clock.monotonic_us() < resumes_us
        return is_written_once(path) and not is_resting

    def _name(self, path: str) -> bytes:
        return hashlib.sha256(f"{self._objects.url}\0{path}".encode()).digest()

    def _kept(
        self, path: str, ranges_of: Callable[[DiskCopy], Sequence[ByteRange]]
    ) -> tuple[_Parts, int] | None:
        """Return parts of an object that has a copy on the disk, and the object's size."""
        if not self._is_kept(path):
            return None
        with self._try(lambda: self._folder.open(self._name(path))) or nullcontext() as copy:
            parts = None if copy is None else self._parts(path, copy, ranges_of(copy))
            return None if copy is None or parts is None else (parts, copy.size_bytes)

    def _begun(self, path: str, size_bytes: int) -> AbstractContextManager[DiskCopy | None, None]:
        return self._try(lambda: self._folder.create(self._name(path), size_bytes)) or nullcontext()

    def _parts(self, path: str, copy: DiskCopy, ranges: Sequence[ByteRange]) -> _Parts | None:
        """Read parts of an object from the disk and the rest from the store; None if the store's object differs."""
        cut = [ByteRange(part.start, min(part.end, copy.size_bytes)) for part in ranges]
        wanted = sorted({chunk for part in cut if part.start < part.end for chunk in chunks_of(part)})
        found = self._try(lambda: copy.read(wanted)) or {}
        if copy.damaged:
            self.damaged += copy.damaged
            _LOG.info(
                "parts of a file in the disk tier are damaged and read from the store again: %s", copy.damaged
            )
        runs = runs_of(chunk for chunk in wanted if chunk not in found)
        if runs:
            asked = [copy.part_of(run) for run in runs]
            fetched = super().read_ranges(path, asked)
            if [len(data) for data in fetched] != [part.end - part.start for part in asked]:
                self.forget(path)
                return None
            for run, data in zip(runs, fetched, strict=True):
                starts = range(0, len(data), CHUNK_BYTES)
                pieces = (data[start : start + CHUNK_BYTES] for start in starts)
                found |= dict(zip(run, pieces, strict=True))
            if self._keeps and sum(map(len, fetched)) <= self._folder.large_bytes:
                for run, data in zip(runs, fetched, strict=True):
                    self._keep(copy, run.start, data)
        self._try(lambda: self._folder.record_use(copy, is_written=bool(runs)))
        return [_joined(found, part) for part in cut]

    def _keep_whole(self, path: str, data: bytes) -> None:
        if self._keeps and self._is_kept(path) and len(data) <= self._folder.large_bytes:
            with self._begun(path, len(data)) as copy:
                if copy is not None:
                    self._keep(copy, 0, data)

    def _keep(self, copy: DiskCopy, first: int, data: bytes) -> None:
        """Write adjacent chunks to the disk, as far as the budget admits them."""

        def write() -> None:
            view = memoryview(data)
            for start in range(0, len(view), ADMITTED_BYTES_MAX):
                piece = view[start : start + ADMITTED_BYTES_MAX]
                if not self._folder.admits(len(piece)):
                    return
                copy.write(first + start // CHUNK_BYTES, piece)
            self._folder.record_use(copy, is_written=True)

        self._try(write)

    def _try(self, action: Callable[[], _Result]) -> _Result | None:
        """Use the disk; after a failure, log the first one and leave the disk alone for a while."""
        try:
            return action()
        except OSError as error:
            self._resumes_us = self._clock.monotonic_us() + _REST_US
            level = logging.DEBUG if self._has_warned else logging.WARNING
            self._has_warned = True
            _LOG.log(
                level,
                "the disk tier in %s is not used for a minute, and row files are read from the store: %s",
                self._folder.path,
                error,
            )
            return None


def _reader_of(objects: Objects, folder: str, budget_bytes: int) -> DiskTier:
    clock = SystemClock()
    return DiskTier(objects, DiskFolder(folder, budget_bytes, clock), clock, keeps=False)


def without_keeping(objects: Objects) -> Objects:
    """Return a disk tier as one that keeps nothing more, for files that are read once; any other store unchanged."""
    return objects.without_keeping() if isinstance(objects, DiskTier) else objects


def _joined(found: dict[int, bytes], part: ByteRange) -> bytes:
    if part.start >= part.end:
        return b""
    chunks = chunks_of(part)
    begin = part.start - chunks.start * CHUNK_BYTES
    whole = found[chunks.start] if len(chunks) == 1 else b"".join(map(found.__getitem__, chunks))
    return whole[begin : begin + part.end - part.start]


# The budget of a machine whose disk has ten times as much free.
DEFAULT_DISK_BYTES: Final = 8 << 30

_FREE_SHARE: Final = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskOptions:
    """The requested disk tier, which each machine adapts to the free space of its disk.

    A budget of 0 means no tier. By default the folder is one of this user in the system's temporary folder.
    """

    budget_bytes: int | None = None
    folder: str | None = None

    def tier_of(self, objects: Objects, clock: Clock, *, below: Objects | None = None) -> Objects:
        """Put the disk tier before a store, or return the store unchanged.

        By default only a cloud store gets a tier, because the tier of a local folder would copy the disk to itself. The tier
        reads ``below``, a wrapper of the store, if given.
        """
        lower = objects if below is None else below
        is_asked_for = self.folder is not None or self.budget_bytes is not None
        if self.budget_bytes == 0 or not (is_asked_for or isinstance(objects, ObstoreObjects)):
            return lower
        try:
            folder = self._folder()
            budget_bytes = self.budget_bytes
            if budget_bytes is None:
                there = next(each for each in (folder, *folder.parents) if each.exists())
                budget_bytes = min(DEFAULT_DISK_BYTES, shutil.disk_usage(there).free // _FREE_SHARE)
        except OSError as error:
            _LOG.warning(
                "there is no folder for the disk tier, and row files are read from the store: %s", error
            )
            return lower
        return DiskTier(lower, DiskFolder(folder, budget_bytes, clock), clock)

    def _folder(self) -> Path:
        if self.folder is not None:
            return Path(self.folder).resolve()
        return Path(tempfile.gettempdir()) / f"millpond-{os.getuid()}"


def forget_copy(objects: Objects, path: str) -> bool:
    """Remove the copy of a damaged object; return True if there was one, so that another read may succeed."""
    return isinstance(objects, DiskTier) and objects.forget(path)


def share_object(source: Objects, target: Objects, path: str) -> bool:
    """Give an object to another store under the same path; return True if both share its bytes on a disk.

    An object is never changed in place, so on one disk a hard link is as good as a copy: each store deletes its own
    name, and the bytes go with the last one. Elsewhere the object is copied.
    """
    if isinstance(source, LocalObjects) and isinstance(target, LocalObjects):
        try:
            target.link_from(source, path)
        except FileNotFoundError as error:
            raise ObjectMissingError("object is missing", path=path, store=source.url) from error
        except OSError:
            # Another disk, or one without hard links: copy instead.
            pass
        else:
            return True
    with tempfile.TemporaryDirectory(prefix="millpond-share-") as folder:
        copy = Path(folder, "object")
        download(source, path, copy)
        upload(target, path, copy)
    return False
