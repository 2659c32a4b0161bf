"""Parts of objects: read from a store that can, and cut out of the whole object of one that cannot.

The names of objects that are written once: no two writers draw the same, so what has such a name never changes.

Published versions: a number that only rises, which several processes announce through the object store.

A published version is an object whose name is the number. Lower ones are deleted only after a higher one exists, so of
two processes that publish at the same time the higher number stays. The one before the newest stays as well: a listing of
a local folder reads the names first and each file's metadata afterwards, so a listing during a replacement might see
neither. The folders' names begin with an underscore, so Delta readers and their vacuum ignore them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol, runtime_checkable

from millpond.statestore.errors import ObjectExistsError
from millpond.statestore.types import Objects, TableVersion


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


_NAME: Final = re.compile(r"(?:^|/)\d{10,}-[0-9a-f]{32}\.parquet$")


def is_written_once(path: str) -> bool:
    """Whether a path is that of a row file that Millpond wrote; other writers' files have other names.

    Example:
        >>> is_written_once(f"computation=c/0000000007-{'ab' * 16}.parquet"), is_written_once("_delta_log/0.json")
        (True, False)
    """
    return _NAME.search(path) is not None


def published_version(objects: Objects, folder: str) -> TableVersion:
    """The highest version that is published in a folder; 0 if there is none.

    Raises:
        UnavailableError: the store is unavailable.
    """
    names = (path.rpartition("/")[2] for path in objects.list(folder))
    return TableVersion(max((int(name) for name in names if name.isdecimal()), default=0))


def publish_version(objects: Objects, folder: str, version: TableVersion, text: bytes) -> None:
    """Publish a version in a folder; one that is not above the published one changes nothing.

    Args:
        objects: the table's root.
        folder: where versions of this meaning are published.
        version: the version.
        text: what it says to people who find it.

    Raises:
        UnavailableError: the store is unavailable; the version may or may not be published.
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
