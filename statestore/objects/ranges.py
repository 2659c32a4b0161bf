"""Helpers over any object store: reads of parts, wrappers, and published versions.

A published version is a number that only rises, announced by several processes through the object store: an object
whose name is the number. Lower numbers are deleted only after a higher one exists, so of two concurrent publishers the
higher number stays. The number before the newest stays too, because a listing of a local folder reads the names first
and each file's metadata later, so during a replacement it might see neither. The names of the folders begin with an
underscore, so Delta readers and their vacuum ignore them.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, runtime_checkable

from millpond.statestore.errors import ObjectExistsError, ObjectMissingError, UnavailableError
from millpond.statestore.types import Objects, TableVersion


@dataclass(frozen=True, slots=True)
class ByteRange:
    """The bytes of an object from ``start`` up to but excluding ``end``."""

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Tail:
    """The last bytes of an object, or all of a shorter one, and the size of the whole object."""

    data: bytes
    size_bytes: int


@runtime_checkable
class RangedObjects(Protocol):
    """An object store that reads parts of objects."""

    def read_ranges(self, path: str, ranges: Sequence[ByteRange]) -> list[bytes]: ...
    def read_tail(self, path: str, size_bytes: int) -> Tail: ...


def read_ranges(objects: Objects, path: str, ranges: Sequence[ByteRange]) -> list[bytes]:
    """Read parts of an object, each shorter where the object ends before it."""
    if isinstance(objects, RangedObjects):
        return objects.read_ranges(path, ranges)
    data = objects.get(path)
    return [data[part.start : part.end] for part in ranges]


def read_tail(objects: Objects, path: str, size_bytes: int) -> Tail:
    """Read the last ``size_bytes`` bytes of an object."""
    if isinstance(objects, RangedObjects):
        return objects.read_tail(path, size_bytes)
    data = objects.get(path)
    return Tail(data[-size_bytes:], len(data))


def put_new(objects: Objects, path: str, data: bytes, *, synced: bool = True) -> None:
    """Create an object under a unique name; an existing object with exactly these bytes counts as success.

    ``obstore`` repeats a put whose reply was lost, and the repetition then finds its own object. An object that is not
    ``synced`` may not survive a power cut; see `Objects.put_unsynced`.
    """
    try:
        (objects.put_if_absent if synced else objects.put_unsynced)(path, data)
    except ObjectExistsError:
        try:
            existing = objects.get(path)
        except ObjectMissingError as error:
            # S3 answers like this while another put of the same name is in progress.
            raise UnavailableError(
                "a name is taken and has no object", path=path, store=objects.url
            ) from error
        if existing != data:
            raise


class WrappedObjects:
    """Base of stores that add to a store below them; each call passes through unless overridden."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects

    @property
    def url(self) -> str:
        return self._objects.url

    def get(self, path: str) -> bytes:
        return self._objects.get(path)

    def read_ranges(self, path: str, ranges: Sequence[ByteRange]) -> list[bytes]:
        return read_ranges(self._objects, path, ranges)

    def read_tail(self, path: str, size_bytes: int) -> Tail:
        return read_tail(self._objects, path, size_bytes)

    def put_if_absent(self, path: str, data: bytes) -> None:
        self._objects.put_if_absent(path, data)

    def put_unsynced(self, path: str, data: bytes) -> None:
        self._objects.put_unsynced(path, data)

    def put(self, path: str, data: bytes) -> None:
        self._objects.put(path, data)

    def sync(self, paths: Iterable[str] = ()) -> None:
        self._objects.sync(paths)

    def list(self, prefix: str, start_after: str | None = None) -> Sequence[str]:
        return self._objects.list(prefix, start_after)

    def delete(self, paths: Iterable[str]) -> None:
        self._objects.delete(paths)


@runtime_checkable
class ParallelObjects(Protocol):
    """An object store that answers many requests in about the time of one."""

    def get_many(self, paths: Sequence[str]) -> Sequence[bytes | None]: ...


class _ReadAhead(WrappedObjects):
    def __init__(self, objects: Objects, many: ParallelObjects, paths: Sequence[str]) -> None:
        super().__init__(objects)
        self._many = many
        self._found = dict(zip(paths, many.get_many(paths), strict=True))

    def get_many(self, paths: Sequence[str]) -> Sequence[bytes | None]:
        others = [path for path in paths if path not in self._found]
        found = {
            **self._found,
            **dict(zip(others, self._many.get_many(others) if others else (), strict=True)),
        }
        return [found[path] for path in paths]

    def get(self, path: str) -> bytes:
        if path not in self._found:
            return super().get(path)
        data = self._found[path]
        if data is None:
            raise ObjectMissingError("the object is missing", path=path, store=self.url)
        return data


def read_ahead(objects: Objects, paths: Sequence[str]) -> Objects:
    """Return the store with these objects in memory; the store itself if it would read them one by one."""
    return _ReadAhead(objects, objects, paths) if isinstance(objects, ParallelObjects) else objects


class MeteredObjects(WrappedObjects):
    """An object store that counts the bytes read by each thread."""

    def __init__(self, objects: Objects) -> None:
        super().__init__(objects)
        self._read = _Read()

    @property
    def read_bytes(self) -> int:
        """The bytes that this thread has read."""
        return self._read.bytes

    def get(self, path: str) -> bytes:
        data = super().get(path)
        self._read.bytes += len(data)
        return data

    def read_ranges(self, path: str, ranges: Sequence[ByteRange]) -> list[bytes]:
        parts = super().read_ranges(path, ranges)
        self._read.bytes += sum(map(len, parts))
        return parts

    def read_tail(self, path: str, size_bytes: int) -> Tail:
        tail = super().read_tail(path, size_bytes)
        self._read.bytes += len(tail.data)
        return tail


class _Read(threading.local):
    def __init__(self) -> None:
        self.bytes = 0


_NAME: Final = re.compile(r"(?:^|/)\d{10,}-[0-9a-f]{32}\.parquet$")


def is_written_once(path: str) -> bool:
    """Return True for the path of a row file of ours, which never changes: no two writers draw the same name.

    Example:
        >>> is_written_once(f"computation=c/0000000007-{'ab' * 16}.parquet"), is_written_once("_delta_log/0.json")
        (True, False)
    """
    return _NAME.search(path) is not None


def published_version(objects: Objects, folder: str) -> TableVersion:
    """Return the highest version published in a folder, or 0."""
    names = (path.rpartition("/")[2] for path in objects.list(folder))
    return TableVersion(max((int(name) for name in names if name.isdecimal()), default=0))


def publish_version(objects: Objects, folder: str, version: TableVersion, text: bytes) -> None:
    """Publish a version in a folder; ``text`` explains it to people who find the object.

    A version that is not above the published one changes nothing.
    """
    last = published_version(objects, folder)
    if version <= last:
        return
    try:
        objects.put_if_absent(f"{folder}/{version:020d}", text)
    except ObjectExistsError:
        # Another process has published the same version.
        return
    oldest = f"{folder}/{last:020d}"
    objects.delete([other for other in objects.list(folder) if other < oldest])
