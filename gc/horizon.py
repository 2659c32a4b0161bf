"""
The horizon: the oldest table version that garbage collection leaves readable.

Three things hold it back: the retention (how long ago a version must have been replaced before
anything of it goes), the versions that readers have published, and open savepoints. A
collector publishes its horizon in the catalog *before* it deletes, and is refused when that
contradicts what others have published (`millpond.statestore.catalog.pins`); so no order of the
two lets it delete what a reader stands on (fact F11). Once published it never falls.

Readers publish theirs by `millpond.statestore.catalog.reading`. A writer needs no horizon of its own: it stands
on the newest version, and looks at the boundary that a cleanup of the log publishes before it
deletes (`millpond.statestore.log.boundary`, fact F4).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from millpond.statestore.app_ids import SAVEPOINT_PREFIX
from millpond.statestore.catalog.catalog import Catalog
from millpond.statestore.catalog.entries import HorizonKind
from millpond.statestore.catalog.facts import SAVEPOINT_RELEASED
from millpond.statestore.catalog.pins import collected_below
from millpond.statestore.catalog.reading import READER_LIFETIME_MS
from millpond.statestore.errors import ConflictError
from millpond.statestore.log.action import CommitInfo
from millpond.statestore.log.commit_file import decode
from millpond.statestore.log.log import Log, commit_path
from millpond.statestore.log.snapshot import Snapshot
from millpond.statestore.types import Clock, TableVersion

__all__ = ["Horizon", "Horizons", "version_at"]

_COLLECTOR: Final = "gc"
_TRIES: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Horizon:
    """
    What may be collected.

    Attributes:
        version: this version and all later ones stay readable.
        held_by: what holds it back, for people: "retention", "a reader", "a savepoint", …
    """

    version: TableVersion
    held_by: str


class Horizons:
    """
    Finds and publishes the horizon of one store.

    Args:
        log: the table's log.
        catalog: where horizons and savepoints are; ``None`` for a store without one, which
            knows only the savepoints in its log and the retention.
        clock: the source of time.
        retention_ms: how long a version stays readable after it has been replaced.
    """

    def __init__(self, log: Log, catalog: Catalog | None, clock: Clock, *, retention_ms: int) -> None:
        self._log = log
        self._catalog = catalog
        self._clock = clock
        self._retention_ms = retention_ms

    def find(self, snapshot: Snapshot) -> Horizon:
        """
        Where the horizon could be now.

        Args:
            snapshot: the table as it is.
        """
        before_ms = self._clock.now_us() // 1_000 - self._retention_ms
        found = Horizon(version=version_at(self._log, snapshot.version, before_ms), held_by="retention")
        for version, holder in self._pins(snapshot):
            if version < found.version:
                found = Horizon(version=version, held_by=holder)
        return found

    def publish(self, snapshot: Snapshot) -> Horizon:
        """
        Find the horizon and say so, before anything is deleted.

        Raises:
            UnavailableError: the catalog is away.
            ConflictError: readers keep coming first.
        """
        found = self.find(snapshot)
        if self._catalog is None:
            return found
        for _ in range(_TRIES):
            try:
                self._catalog.publish_horizon(_COLLECTOR, found.version, HorizonKind.COLLECTOR)
            except ConflictError:
                # A reader or a savepoint came in between, or an earlier horizon is above this one.
                again = self.find(snapshot)
                published = collected_below(self._catalog.horizons())
                found = max(
                    again,
                    Horizon(version=published, held_by="an earlier collection"),
                    key=lambda each: each.version,
                )
            else:
                return found
        raise ConflictError("readers keep coming first", horizon=found.version)

    def _pins(self, snapshot: Snapshot) -> Iterator[tuple[TableVersion, str]]:
        for app_id, version in snapshot.txns.items():
            if app_id.startswith(SAVEPOINT_PREFIX) and version != SAVEPOINT_RELEASED:
                yield TableVersion(version), "a savepoint"
        if self._catalog is None:
            return
        needed = self._catalog.oldest_needed()
        if needed is not None:
            yield needed, "a reader or a savepoint"
        if self._clock.now_us() - self._catalog.created_us < self._trust_ms * 1_000:
            # It may not have heard of all readers yet: it is new, or has been lost and made again.
            yield TableVersion(0), "the catalog's youth"

    @property
    def _trust_ms(self) -> int:
        return min(READER_LIFETIME_MS, self._retention_ms)


def version_at(log: Log, newest: TableVersion, before_ms: int) -> TableVersion:
    """
    The version that was the newest one at a time; the oldest one that is left if all are younger.

    Commits are read by bisection, since their times rise (as far as clocks do). A commit that
    tells no time counts as new.
    """
    low, high = 0, int(newest)
    while low < high:
        middle = (low + high + 1) // 2
        at_ms = _time_of(log, TableVersion(middle))
        if at_ms is None or at_ms <= before_ms:
            low = middle
        else:
            high = middle - 1
    return TableVersion(low)


def _time_of(log: Log, version: TableVersion) -> int | None:
    """
    When a version was committed; ``None`` when its commit file is gone, so that it is old.
    """
    data = log.read(version)
    if data is None:
        return None
    infos = [action for action in decode(data, commit_path(version)) if isinstance(action, CommitInfo)]
    return next((info.timestamp_ms for info in infos if info.timestamp_ms), 1 << 62)
