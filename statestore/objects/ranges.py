"""Parts of objects: read from a store that can, and cut out of the whole object of one that cannot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from millpond.statestore.types import Objects


@dataclass(frozen=True, slots=True)
class ByteRange:
    """A part of an object: from ``start`` up to but without ``end``."""

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Tail:
    """The end of an object, or all of one that is not longer.

    Attributes:
        data: its last bytes.
        size_bytes: how long the object is.
    """

    data: bytes
    size_bytes: int


@runtime_checkable
class RangedObjects(Protocol):
    """An object store that reads parts of objects."""

    def read_ranges(self, path: str, ranges: Sequence[ByteRange]) -> list[bytes]:
        """Parts of an object, each shorter than asked where the object ends before it.

        Raises:
            ObjectMissingError: there is no such object.
        """
        ...

    def read_tail(self, path: str, size_bytes: int) -> Tail:
        """The last bytes of an object.

        Raises:
            ObjectMissingError: there is no such object.
        """
        ...


def read_ranges(objects: Objects, path: str, ranges: Sequence[ByteRange]) -> list[bytes]:
    """Parts of an object, each shorter than asked where the object ends before it.

    Raises:
        ObjectMissingError: there is no such object.
        UnavailableError: the store is unavailable.
    """
    if isinstance(objects, RangedObjects):
        return objects.read_ranges(path, ranges)
    data = objects.get(path)
    return [data[part.start : part.end] for part in ranges]


def read_tail(objects: Objects, path: str, size_bytes: int) -> Tail:
    """The last bytes of an object, as many as these if it has so many.

    Raises:
        ObjectMissingError: there is no such object.
        UnavailableError: the store is unavailable.

    Example:
        >>> from millpond.statestore.objects.memory import MemoryObjects
        >>> objects = MemoryObjects()
        >>> objects.put("a", b"abcdef")
        >>> read_tail(objects, "a", 2)
        Tail(data=b'ef', size_bytes=6)
    """
    if isinstance(objects, RangedObjects):
        return objects.read_tail(path, size_bytes)
    data = objects.get(path)
    return Tail(data[-size_bytes:], len(data))
