"""The horizon: the oldest table version that garbage collection leaves readable.

Two things hold it back: the retention (how long a version stays readable after it was replaced), and
the versions that readers have pinned. A
collector publishes its horizon in the catalog *before* it deletes, and is refused when that
contradicts a pin (`millpond.statestore.catalog.catalog`); so in either order of the
two it never deletes a file that a reader needs. A published horizon never falls.

Savepoints do not hold it back: of what is older than the horizon, collectors leave what the versions of savepoints
need. For those who make one, the horizon is published in the store as well
(`millpond.statestore.history.savepoint`).

Readers pin versions through `millpond.statestore.catalog.catalog`. A writer needs no pin: it works
on the newest version, and checks the boundary that a cleanup of the log publishes before it
deletes (`millpond.statestore.log.writer`). MillWheel's store, Bigtable, collects old cell
versions itself (MillWheel §4.4); a Delta table leaves that to its writers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from millpond.statestore.catalog.catalog import READER_LIFETIME_MS, Catalog, HorizonKind, collected_below
from millpond.statestore.errors import ConflictError
from millpond.statestore.history.savepoint import publish_collected_horizon
from millpond.statestore.log.action import CommitInfo
from millpond.statestore.log.commit_file import decode
from millpond.statestore.log.log import Log, commit_path
from millpond.statestore.log.snapshot import Snapshot
from millpond.statestore.types import Clock, TableVersion

_COLLECTOR: Final = "gc"
_TRIES: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Horizon:
    """What may be collected.

    Attributes:
        version: this version and all later ones stay readable.
        held_by: what holds it back, for reports: "retention", "a reader", …
    """

    version: TableVersion
    held_by: str


class Horizons:
    """Finds and publishes the horizon of one store.

    Args:
        log: the table's log.
        catalog: holds readers' horizons; ``None`` for a store without a catalog.
        clock: the source of time.
        retention_ms: how long a version stays readable after it has been replaced.
    """

    def __init__(self, log: Log, catalog: Catalog | None, clock: Clock, *, retention_ms: int) -> None:
        self._log = log
        self._catalog = catalog
        self._clock = clock
        self._retention_ms = retention_ms

    def find(self, snapshot: Snapshot) -> Horizon:
        """Compute the horizon; nothing is published.

        Args:
            snapshot: the table at its newest version.
        """
        before_ms = self._clock.now_us() // 1_000 - self._retention_ms
        horizon = Horizon(version=version_at(self._log, snapshot.version, before_ms), held_by="retention")
        for version, holder in self._pins():
            if version < horizon.version:
                horizon = Horizon(version=version, held_by=holder)
        return horizon

    def publish(self, snapshot: Snapshot) -> Horizon:
        """Compute the horizon and publish it; call it before anything is deleted.

        Raises:
            UnavailableError: the store or the catalog is unavailable.
            ConflictError: readers kept pinning versions first.
        """
        horizon = self._publish_to_readers(snapshot)
        publish_collected_horizon(self._log.objects, horizon.version)
        return horizon

    def _publish_to_readers(self, snapshot: Snapshot) -> Horizon:
        horizon = self.find(snapshot)
        if self._catalog is None:
            return horizon
        for _ in range(_TRIES):
            try:
                self._catalog.publish_horizon(_COLLECTOR, horizon.version, HorizonKind.COLLECTOR)
            except ConflictError:
                # A reader came in between, or an earlier horizon is above this one.
                fresh = self.find(snapshot)
                published = collected_below(self._catalog.horizons())
                horizon = max(
                    fresh,
                    Horizon(version=published, held_by="an earlier collection"),
                    key=lambda candidate: candidate.version,
                )
            else:
                return horizon
        raise ConflictError("readers keep coming first", horizon=horizon.version)

    def _pins(self) -> Iterator[tuple[TableVersion, str]]:
        if self._catalog is None:
            return
        needed = self._catalog.oldest_needed()
        if needed is not None:
            yield needed, "a reader"
        if self._clock.now_us() - self._catalog.created_us < self._trust_ms * 1_000:
            # It may not list all readers yet: it is new, or was lost and rebuilt.
            yield TableVersion(0), "the catalog's youth"

    @property
    def _trust_ms(self) -> int:
        return min(READER_LIFETIME_MS, self._retention_ms)


def version_at(log: Log, newest: TableVersion, before_ms: int) -> TableVersion:
    """The newest version as of ``before_ms``; the oldest version that is left if all are younger.

    Commits are bisected, since their times rise (as far as clocks do). A commit without
    a time counts as new.
    """
    low, high = 0, int(newest)
    while low < high:
        middle = (low + high + 1) // 2
        at_ms = _committed_ms(log, TableVersion(middle))
        if at_ms is None or at_ms <= before_ms:
            low = middle
        else:
            high = middle - 1
    return TableVersion(low)


def _committed_ms(log: Log, version: TableVersion) -> int | None:
    """When a version was committed; ``None`` when its commit file was cleaned up, which makes it old."""
    data = log.read(version)
    if data is None:
        return None
    infos = [action for action in decode(data, commit_path(version)) if isinstance(action, CommitInfo)]
    return next((info.timestamp_ms for info in infos if info.timestamp_ms), 1 << 62)
