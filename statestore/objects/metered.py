"""Metered objects: an object store that says how much each thread has read of it."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

from millpond.statestore.objects.ranges import ByteRange, Tail, read_ranges, read_tail
from millpond.statestore.types import Objects


class MeteredObjects:
    """An object store that counts the bytes that it reads, for each thread by itself.

    Args:
        objects: the store.

    Example:
        >>> from millpond.statestore.objects.memory import MemoryObjects
        >>> objects = MeteredObjects(MemoryObjects())
        >>> objects.put("a", b"four")
        >>> (objects.get("a"), objects.read_bytes)
        (b'four', 4)
    """

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._read = _Read()

    @property
    def url(self) -> str:
        """The root's URL."""
        return self._objects.url

    @property
    def read_bytes(self) -> int:
        """How much this thread has read."""
        return self._read.bytes

    def get(self, path: str) -> bytes:
        """The object's bytes."""
        data = self._objects.get(path)
        self._read.bytes += len(data)
        return data

    def read_ranges(self, path: str, ranges: Sequence[ByteRange]) -> list[bytes]:
        """Parts of the object."""
        parts = read_ranges(self._objects, path, ranges)
        self._read.bytes += sum(map(len, parts))
        return parts

    def read_tail(self, path: str, size_bytes: int) -> Tail:
        """The last bytes of the object."""
        tail = read_tail(self._objects, path, size_bytes)
        self._read.bytes += len(tail.data)
        return tail

    def put_if_absent(self, path: str, data: bytes) -> None:
        """Create the object, whole or not at all."""
        self._objects.put_if_absent(path, data)

    def put_unsynced(self, path: str, data: bytes) -> None:
        """Create the object, which a power cut may take back until the next `sync`."""
        self._objects.put_unsynced(path, data)

    def put(self, path: str, data: bytes) -> None:
        """Create or replace the object."""
        self._objects.put(path, data)

    def sync(self, paths: Iterable[str] = ()) -> None:
        """Let what was put survive a power cut."""
        self._objects.sync(paths)

    def list(self, prefix: str, start_after: str | None = None) -> Sequence[str]:
        """All paths under a prefix, sorted."""
        return self._objects.list(prefix, start_after)

    def delete(self, paths: Iterable[str]) -> None:
        """Delete the objects; missing ones are ignored."""
        self._objects.delete(paths)


class _Read(threading.local):
    def __init__(self) -> None:
        self.bytes = 0
