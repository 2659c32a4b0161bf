"""
The high-water mark: the newest table version that is known to exist, kept outside the table.

A log that was cut or rolled back reads as older data without an error: the table
alone gives no sign of it. So every writer reports the versions that it commits or reads, and
opening a store compares: a table that ends before the mark, or whose commit at the mark
has other bytes, is refused. The mark is an alarm and not part of the commit: it may
lag slightly behind, and it never falls.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from millpond.statestore.errors import DataError
from millpond.statestore.log.commit_file import digest_of
from millpond.statestore.log.log import commit_path

if TYPE_CHECKING:
    from millpond.statestore.log.log import Log
    from millpond.statestore.log.snapshot import Snapshot
    from millpond.statestore.types import TableVersion

__all__ = ["HighWater", "Mark", "MemoryHighWater", "check_high_water"]


@dataclass(frozen=True, slots=True)
class Mark:
    """
    A table version, and the SHA-256 in hexadecimal of that commit file's bytes ("" where unknown).
    """

    version: TableVersion
    digest: str


class HighWater(Protocol):
    """
    Storage of the mark.
    """

    def read(self) -> Mark | None:
        """
        The mark; ``None`` before the first one.

        Raises:
            UnavailableError: the storage is unavailable.
        """
        ...

    def advance(self, version: TableVersion, digest: str) -> None:
        """
        Raise the mark asynchronously; never blocks or raises. A lower version changes nothing.
        """
        ...

    def flush(self) -> None:
        """
        Wait, for a bounded time, until the advanced mark is stored.

        Raises:
            UnavailableError: the storage did not confirm it in time.
        """
        ...


class MemoryHighWater:
    """
    `HighWater` within one process, stored synchronously; the writers of a simulated store share one.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._mark: Mark | None = None

    def read(self) -> Mark | None:
        """
        The mark; ``None`` before the first one.
        """
        return self._mark

    def advance(self, version: TableVersion, digest: str) -> None:
        """
        Raise the mark; a lower version changes nothing.
        """
        with self._lock:
            if self._mark is None or version > self._mark.version:
                self._mark = Mark(version, digest)

    def flush(self) -> None:
        """
        Return at once: `advance` stores the mark synchronously.
        """


def check_high_water(mark: Mark | None, snapshot: Snapshot, log: Log) -> None:
    """
    Refuse a table whose log is not the one that the mark was set on.

    Args:
        mark: read *before* the snapshot was loaded, so that a live writer cannot look like a rollback.
        snapshot: the table as it was loaded.
        log: the table's log.

    Raises:
        DataError: the table ends before the mark, or has another commit at the mark.
    """
    if mark is None:
        return
    path = commit_path(mark.version)
    if snapshot.version < mark.version:
        raise DataError(
            "the table ends before a version that was committed: its log was cut or rolled back",
            path=path,
            store=log.objects.url,
            newest=snapshot.version,
            committed=mark.version,
        )
    digest = _digest_at(mark.version, snapshot, log)
    if mark.digest and digest and digest != mark.digest:
        raise DataError(
            "the commit file is not the one that was committed",
            path=path,
            store=log.objects.url,
            found=digest,
            committed=mark.digest,
        )


def _digest_at(version: TableVersion, snapshot: Snapshot, log: Log) -> str:
    if version == snapshot.version:
        return snapshot.digest
    # A file that is missing here was cleaned up behind a checkpoint; otherwise the load would have failed.
    data = log.read(version)
    return "" if data is None else digest_of(data)
