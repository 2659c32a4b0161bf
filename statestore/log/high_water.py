"""The high-water mark: the newest table version that is known to exist, kept outside the table.

A log that was cut or rolled back reads as older data without an error: the table
alone gives no sign of it. So every writer reports the versions that it commits or reads, and
opening a store compares: a table that ends before the mark, or whose commit at the mark
has other bytes, is refused. The mark is an alarm and not part of the commit: it may
lag slightly behind, and it never falls.

The high-water mark that travels with the store: objects next to the table, which need no ZooKeeper to read.

A mark is an object whose name is everything: the table version, the digest of its commit and the
incarnation of the store. Each is put once, if absent, after its commit, so marks never fall, and two writers cannot take
one from the other. A thread puts the newest one, ten times a second at most (once, in an object store): commits do not wait
for it, and after a crash the mark is a moment behind. It then tells less, and nothing wrong: a log
that reaches further than its mark is sound.

Marks lie outside the table's folder, so that a table that alone was put back is noticed as well.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Protocol

from millpond.statestore.errors import DataError, MillpondError, ObjectExistsError
from millpond.statestore.log.commit_file import digest_of
from millpond.statestore.log.log import commit_path
from millpond.statestore.types import TableVersion

if TYPE_CHECKING:
    from millpond.statestore.log.log import Log
    from millpond.statestore.log.snapshot import Snapshot
    from millpond.statestore.types import Objects


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


MARK_FOLDER: Final = "high_water"
"""The folder of the marks, in the store's own folder."""

_NAME: Final = re.compile(r"(?:^|/)(\d{20})-([0-9a-f]{64})-([^/]+)$")
_SAYS: Final = b"The store's table has reached the version in this name.\n"

LINGER_MS: Final = 100
"""How long after one mark the next may follow: commits of a moment share one."""


def list_marks(objects: Objects) -> Sequence[str]:
    """The names of a store's marks; list them before the table is read, so that a live writer is no rollback.

    Args:
        objects: the store's folder.

    Raises:
        UnavailableError: the store is unavailable.
    """
    return objects.list(MARK_FOLDER)


def newest_mark(paths: Iterable[str], incarnations: Iterable[str]) -> Mark | None:
    """The newest mark of the last incarnation among the names of marks; ``None`` if it has none.

    Args:
        paths: from `list_marks`.
        incarnations: the incarnations in the log, oldest first.

    Raises:
        DataError: there are marks of an incarnation that the log lacks, because it was rolled back behind it.
    """
    known = tuple(incarnations)
    marks = [
        (TableVersion(int(match[1])), match[2], match[3]) for path in paths if (match := _NAME.search(path))
    ]
    strangers = sorted({incarnation for _, _, incarnation in marks} - set(known))
    if strangers:
        raise DataError(
            "the store has been another incarnation, of which its log tells nothing: the log was rolled back",
            incarnation=strangers[0],
            known=known[-1],
        )
    own = [Mark(version, digest) for version, digest, incarnation in marks if incarnation == known[-1]]
    return max(own, key=lambda mark: mark.version, default=None)


class StoredMark:
    """`HighWater` in objects of the store's folder.

    Args:
        objects: the store's folder.
        incarnation: the store's.
        threaded: whether a thread writes; if not, marks are written by `flush` alone.
        linger_ms: how long the thread waits between two marks.
    """

    def __init__(
        self, objects: Objects, incarnation: str, *, threaded: bool = True, linger_ms: int = LINGER_MS
    ) -> None:
        self._objects = objects
        self._incarnation = incarnation
        self._changed = threading.Condition()
        self._writing = threading.Lock()
        self._noted: Mark | None = None
        self._kept: TableVersion | None = None
        self._before: str | None = None
        self._last: str | None = None
        self._linger_s = linger_ms / 1_000
        self._closed = False
        self._thread: threading.Thread | None = None
        if threaded:
            self._thread = threading.Thread(target=self._run, name="millpond-stored-mark", daemon=True)
            self._thread.start()

    def read(self) -> Mark | None:
        """The mark of this incarnation; ``None`` before the first one."""
        own = (path for path in self._objects.list(MARK_FOLDER) if path.endswith(f"-{self._incarnation}"))
        return newest_mark(own, [self._incarnation])

    def advance(self, version: TableVersion, digest: str) -> None:
        """Note the mark, to be written in a moment; never blocks or raises."""
        if not digest:
            return
        with self._changed:
            if self._noted is None or version > self._noted.version:
                self._noted = Mark(version, digest)
                self._changed.notify_all()

    def flush(self) -> None:
        """Write what is noted now.

        Raises:
            UnavailableError: the store is unavailable.
        """
        mark = self._due()
        if mark is not None:
            self._write(mark)

    def close(self) -> None:
        """Write what is noted, and stop the thread; a store that is away keeps an older mark."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _due(self) -> Mark | None:
        with self._changed:
            noted = self._noted
            return (
                noted
                if noted is not None and noted.version > (-1 if self._kept is None else self._kept)
                else None
            )

    def _run(self) -> None:
        with suppress(MillpondError):
            # What is left over costs a name each; the next writer tidies up where this one cannot.
            self.tidy()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._has_unstored_mark())
                closed = self._closed
            try:
                self.flush()
            except MillpondError:
                # The mark tells less until the store is back; commits say themselves what is wrong.
                if closed:
                    return
            if closed:
                return
            with self._changed:
                self._changed.wait_for(lambda: self._closed, timeout=self._linger_s)

    def _has_unstored_mark(self) -> bool:
        return self._noted is not None and (self._kept is None or self._noted.version > self._kept)

    def _write(self, mark: Mark) -> None:
        with self._writing:
            path = f"{MARK_FOLDER}/{mark.version:020d}-{mark.digest}-{self._incarnation}"
            # It may be there: of another writer of the store, or of an attempt whose reply was lost.
            with suppress(ObjectExistsError):
                self._objects.put_if_absent(path, _SAYS)
            with self._changed:
                self._kept = mark.version
            # The one before the newest stays: a listing of a local folder may miss both ends of a replacement.
            before, self._before, self._last = self._before, self._last, path
            if before is not None:
                self._objects.delete([before])

    def tidy(self) -> None:
        """Delete the marks that earlier writers left behind; the newest one stays.

        Raises:
            UnavailableError: the store is unavailable.
        """
        newest = self.read()
        if newest is not None:
            paths = self._objects.list(MARK_FOLDER)
            older = [
                path for path in paths if (match := _NAME.search(path)) and int(match[1]) < newest.version
            ]
            self._objects.delete(older)


class BothHighWaters:
    """`HighWater` in two places: that of the lease service, and the one that travels with the store."""

    def __init__(self, service: HighWater, stored: StoredMark) -> None:
        self._service = service
        self._stored = stored

    def read(self) -> Mark | None:
        """The mark of the lease service; `newest_mark` tells the other one."""
        return self._service.read()

    def advance(self, version: TableVersion, digest: str) -> None:
        """Raise both marks."""
        self._service.advance(version, digest)
        self._stored.advance(version, digest)

    def flush(self) -> None:
        """Wait for both marks.

        Raises:
            UnavailableError: one of them cannot be stored.
        """
        self._service.flush()
        self._stored.flush()

    def supersede(self, incarnation: str) -> None:
        """Tell the lease service of a successor."""
        self._service.supersede(incarnation)
