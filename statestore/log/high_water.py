"""The high-water mark: the newest table version that is known to exist, kept outside the table.

A log that was cut or rolled back reads as older data without an error: the table
alone gives no sign of it. So every writer reports the versions that it commits or reads, and
opening a store compares: a table that ends before the mark, or whose commit at the mark
has other bytes, is refused. The mark is an alarm and not part of the commit: it may
lag slightly behind, and it never falls.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from millpond.statestore.errors import DataError
from millpond.statestore.log.commit_file import digest_of
from millpond.statestore.log.log import commit_path
from millpond.statestore.types import TableVersion

if TYPE_CHECKING:
    from millpond.statestore.log.log import Log
    from millpond.statestore.log.snapshot import Snapshot


@dataclass(frozen=True, slots=True)
class Mark:
    """A table version, and the SHA-256 in hexadecimal of that commit file's bytes ("" where unknown).

    ``successor`` is the incarnation that took this one's place; "" for none.
    """

    version: TableVersion
    digest: str
    successor: str = ""


class HighWater(Protocol):
    """Storage of the mark."""

    def read(self) -> Mark | None:
        """The mark; ``None`` before the first one.

        Raises:
            UnavailableError: the storage is unavailable.
        """
        ...

    def advance(self, version: TableVersion, digest: str) -> None:
        """Raise the mark asynchronously; never blocks or raises. A lower version changes nothing."""
        ...

    def flush(self) -> None:
        """Wait, for a bounded time, until the advanced mark is stored.

        Raises:
            UnavailableError: the storage did not confirm it in time.
        """
        ...

    def supersede(self, incarnation: str) -> None:
        """Note that another incarnation takes this one's place: opening this one is refused from now on.

        Raises:
            UnavailableError: the storage is unavailable.
        """
        ...


class MemoryHighWater:
    """`HighWater` within one process, stored synchronously; the writers of a simulated store share one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._mark: Mark | None = None

    def read(self) -> Mark | None:
        """The mark; ``None`` before the first one."""
        return self._mark

    def advance(self, version: TableVersion, digest: str) -> None:
        """Raise the mark; a lower version changes nothing."""
        with self._lock:
            known = self._mark
            if known is None or (version > known.version and not known.successor):
                self._mark = Mark(version, digest)

    def supersede(self, incarnation: str) -> None:
        """Note a successor at once."""
        with self._lock:
            self._mark = superseded(self._mark, incarnation)

    def flush(self) -> None:
        """Return at once: `advance` stores the mark synchronously."""


def later_mark(first: Mark | None, second: Mark | None) -> Mark | None:
    """The one of two marks that tells more: a successor, or else the higher version."""
    known = [mark for mark in (first, second) if mark is not None]
    return max(known, key=lambda mark: (bool(mark.successor), mark.version), default=None)


def superseded(mark: Mark | None, incarnation: str) -> Mark:
    """The mark of an incarnation whose place another one has taken."""
    return Mark(TableVersion(0), "", incarnation) if mark is None else replace(mark, successor=incarnation)


def check_high_water(mark: Mark | None, snapshot: Snapshot, log: Log) -> None:
    """Refuse a table whose log is not the one that the mark was set on.

    Args:
        mark: read *before* the snapshot was loaded, so that a live writer cannot look like a rollback.
        snapshot: the table as it was loaded.
        log: the table's log.

    Raises:
        DataError: the table ends before the mark, has another commit at the mark, or is an incarnation that
            was superseded.
    """
    if mark is None:
        return
    if mark.successor:
        raise DataError(
            "the store was restored elsewhere, and that incarnation took the place of this one: open that one, "
            "or go on with this as a copy (`millpond adopt STORE --as copy`)",
            store=log.objects.url,
            successor=mark.successor,
        )
    path = commit_path(mark.version)
    if snapshot.version < mark.version:
        raise DataError(
            "the table ends before a version that was committed: its log was cut or rolled back; put the newer files back, "
            "or let `millpond repair` make what is there a sound store",
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
