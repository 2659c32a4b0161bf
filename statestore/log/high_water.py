"""The high-water mark: the newest table version that is known to exist, kept outside the table.

A log that was cut or rolled back reads as older data without an error. So every writer reports the versions that it
commits or reads, and opening a store refuses a table that ends before the mark, or has other bytes at it. The mark is an
alarm and not part of the commit: it may lag slightly behind, and it never falls. One lies in the lease service;
`StoredMark` travels with the store, next to the table's folder.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final, Protocol

from millpond.statestore.errors import DataError, MillpondError, ObjectExistsError
from millpond.statestore.log.commit_file import digest_of
from millpond.statestore.log.log import Log, commit_path
from millpond.statestore.log.snapshot import Snapshot
from millpond.statestore.types import Objects, TableVersion


@dataclass(frozen=True, slots=True)
class Mark:
    """A table version, and the SHA-256 in hexadecimal of its commit file ("" where unknown).

    ``successor`` is the incarnation that took this one's place; "" for none.
    """

    version: TableVersion
    digest: str
    successor: str = ""


class HighWater(Protocol):
    """Storage of the mark."""

    def read(self) -> Mark | None:
        """Return the mark, or ``None`` before the first one; raise `UnavailableError` without the storage."""

    def advance(self, version: TableVersion, digest: str) -> None:
        """Raise the mark asynchronously; never block or raise. A lower version changes nothing."""

    def flush(self) -> None:
        """Wait, for a bounded time, until the advanced mark is stored; raise `UnavailableError` otherwise."""

    def supersede(self, incarnation: str) -> None:
        """Record the incarnation that takes this one's place: opening this one is refused from now on."""

    def announce_boundary(self, version: TableVersion) -> None:
        """Say that commits below ``version`` may be deleted, before any is; it never falls.

        Raise `UnavailableError` without the storage: then none may be deleted.
        """

    def boundary(self) -> TableVersion | None:
        """Return the highest boundary that was announced before this call, 0 for none.

        ``None`` if the storage may have lost one since this object was made, or does not answer at once.
        """


class MemoryHighWater:
    """`HighWater` within one process, stored synchronously; the writers of a simulated store share one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._mark: Mark | None = None
        self._boundary: TableVersion | None = TableVersion(0)

    def read(self) -> Mark | None:
        return self._mark

    def announce_boundary(self, version: TableVersion) -> None:
        with self._lock:
            self._boundary = None if self._boundary is None else max(self._boundary, version)

    def boundary(self) -> TableVersion | None:
        return self._boundary

    def lose_boundary(self) -> None:
        """Answer like a service that was wiped, to those who knew it before."""
        self._boundary = None

    def advance(self, version: TableVersion, digest: str) -> None:
        with self._lock:
            known = self._mark
            if known is None or (version > known.version and not known.successor):
                self._mark = Mark(version, digest)

    def supersede(self, incarnation: str) -> None:
        with self._lock:
            self._mark = superseded(self._mark, incarnation)

    def flush(self) -> None:
        pass


def later_mark(first: Mark | None, second: Mark | None) -> Mark | None:
    known = [mark for mark in (first, second) if mark is not None]
    return max(known, key=lambda mark: (bool(mark.successor), mark.version), default=None)


def superseded(mark: Mark | None, incarnation: str) -> Mark:
    return Mark(TableVersion(0), "", incarnation) if mark is None else replace(mark, successor=incarnation)


def check_high_water(mark: Mark | None, snapshot: Snapshot, log: Log) -> None:
    """Raise `DataError` if the mark was set on another log than the table's.

    The mark must be read *before* the snapshot is loaded, so that a live writer cannot look like a rollback.
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
    # The table may be long enough and still be another one: a log that was rolled back and then continued.
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


class LaggingMark:
    """The newest mark that commits have recorded; a thread stores it behind them, so that no commit waits for it.

    ``linger_s`` is the least time between two stored marks, so that commits of a moment share one.
    """

    def __init__(self, thread_name: str, *, linger_s: float, retry_s: float) -> None:
        self._changed = threading.Condition()
        self._recorded: Mark | None = None
        self._stored: TableVersion | None = None
        self._flushing = 0
        self._closed = False
        self._linger_s, self._retry_s = linger_s, retry_s
        self._thread = threading.Thread(target=self._run, name=thread_name, daemon=True)

    def advance(self, version: TableVersion, digest: str) -> None:
        with self._changed:
            if self._recorded is None or version > self._recorded.version:
                self._recorded = Mark(version, digest)
                self._changed.notify_all()

    def close(self) -> None:
        """Stop the thread after an attempt to store the recorded mark; without it an older mark stays."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join()

    def _try_store(self, mark: Mark) -> bool:
        """Store the mark; return False if its storage is away, which only makes the alarm weaker."""
        raise NotImplementedError

    def _due(self) -> Mark | None:
        with self._changed:
            recorded, stored = self._recorded, self._stored
            is_behind = recorded is not None and (stored is None or recorded.version > stored)
            return recorded if is_behind else None

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._due() is not None)
                mark = self._due()
            if mark is None:
                return
            is_stored = self._try_store(mark)
            with self._changed:
                if is_stored:
                    self._stored = mark.version
                    self._changed.notify_all()
                    self._changed.wait_for(lambda: self._closed or self._flushing, self._linger_s)
                elif self._closed:
                    return
                else:
                    self._changed.wait_for(lambda: self._closed, self._retry_s)


MARK_FOLDER: Final = "high_water"
_NAME: Final = re.compile(r"(?:^|/)(\d{20})-([0-9a-f]{64})-([^/]+)$")
_MARK_TEXT: Final = b"The store's table has reached the version in this name.\n"

# Least time between two stored marks: commits of a moment share one.
LINGER_MS: Final = 100


def list_marks(objects: Objects) -> Sequence[str]:
    """List a store's marks; before the table is read, so that a live writer is no rollback."""
    return objects.list(MARK_FOLDER)


def version_marked(paths: Iterable[str]) -> int:
    """Return the highest version among the names from `list_marks`, of whatever incarnation; 0 for none."""
    return max((int(match[1]) for path in paths if (match := _NAME.search(path))), default=0)


def newest_mark(paths: Iterable[str], incarnations: Iterable[str]) -> Mark | None:
    """Return the newest mark of the last incarnation among the names from `list_marks`.

    ``incarnations`` come from the log, oldest first. Marks of any other incarnation are a `DataError`: the log was rolled back
    behind it.
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


class StoredMark(LaggingMark):
    """`HighWater` in the names of objects in the store's folder, which need no ZooKeeper to read.

    A name holds the table version, the digest of its commit and the store's incarnation. Each object is put once, if
    absent, after its commit: so marks never fall, and two writers cannot take a mark from each other. Without a thread
    (``threaded=False``) only `flush` stores the mark. ``listed`` are the marks as the caller has just listed them, and
    ``kept`` is the number of older ones that are deleted together.
    """

    def __init__(
        self,
        objects: Objects,
        incarnation: str,
        *,
        threaded: bool = True,
        linger_ms: int = LINGER_MS,
        listed: Sequence[str] | None = None,
        kept: int = 1,
    ) -> None:
        linger_s = linger_ms / 1_000
        super().__init__("millpond-stored-mark", linger_s=linger_s, retry_s=linger_s)
        self._objects = objects
        self._incarnation = incarnation
        self._kept = kept
        self._writing = threading.Lock()
        self._older: list[str] = []
        self._last: str | None = None
        self._listed = listed
        known = None if listed is None else self._newest(listed)
        self._stored = None if known is None else known.version
        if threaded:
            self._thread.start()

    def read(self) -> Mark | None:
        return self._newest(list_marks(self._objects))

    def _newest(self, listed: Iterable[str]) -> Mark | None:
        own = (path for path in listed if path.endswith(f"-{self._incarnation}"))
        return newest_mark(own, [self._incarnation])

    def advance(self, version: TableVersion, digest: str) -> None:
        if digest:
            super().advance(version, digest)

    def flush(self) -> None:
        mark = self._due()
        if mark is not None:
            self._write(mark)

    def _run(self) -> None:
        with suppress(MillpondError):
            self.tidy()
        super()._run()

    def _try_store(self, mark: Mark) -> bool:
        try:
            self._write(mark)
        except MillpondError:
            return False
        return True

    def _write(self, mark: Mark) -> None:
        with self._writing:
            path = f"{MARK_FOLDER}/{mark.version:020d}-{mark.digest}-{self._incarnation}"
            # Another writer of the store may have put it, or an earlier attempt whose reply was lost.
            with suppress(ObjectExistsError):
                self._objects.put_if_absent(path, _MARK_TEXT)
            with self._changed:
                self._stored = mark.version
            if self._last is not None:
                self._older.append(self._last)
            self._last = path
            # Keep the mark before the newest: a listing of a local folder may miss both ends of a replacement.
            if len(self._older) > self._kept:
                self._objects.delete(self._older[:-1])
                del self._older[:-1]

    def tidy(self) -> None:
        """Delete the marks that earlier writers abandoned, except the newest one."""
        listed = list_marks(self._objects) if self._listed is None else self._listed
        newest = self._newest(listed)
        if newest is not None:
            matches = ((path, _NAME.search(path)) for path in listed)
            older = [path for path, match in matches if match and int(match[1]) < newest.version]
            if older:
                self._objects.delete(older)


class BothHighWaters:
    """`HighWater` in two places; `read` returns the service's mark, `newest_mark` finds the store's."""

    def __init__(self, service: HighWater, stored: StoredMark) -> None:
        self._service = service
        self._stored = stored

    def read(self) -> Mark | None:
        return self._service.read()

    def supersede(self, incarnation: str) -> None:
        self._service.supersede(incarnation)

    def announce_boundary(self, version: TableVersion) -> None:
        self._service.announce_boundary(version)

    def boundary(self) -> TableVersion | None:
        return self._service.boundary()

    def advance(self, version: TableVersion, digest: str) -> None:
        self._service.advance(version, digest)
        self._stored.advance(version, digest)

    def flush(self) -> None:
        self._service.flush()
        self._stored.flush()
