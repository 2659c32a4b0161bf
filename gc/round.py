"""
A round of garbage collection: every collector once, in the order that lets each see all it needs.

A checkpoint comes first, for it marks what is settled. Vacuum comes before the log's cleanup,
which takes the memory of removed files away (a checkpoint keeps it as long as they exist).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from millpond.gc.collector import Collection, Collector
from millpond.gc.horizon import Horizons
from millpond.gc.log import LogCollector, write_checkpoint
from millpond.gc.orphan import OrphanCollector, Owned
from millpond.gc.survey import survey
from millpond.gc.vacuum import VacuumCollector
from millpond.statestore.catalog.catalog import Catalog
from millpond.statestore.errors import InvalidError
from millpond.statestore.failpoint import reach
from millpond.statestore.interval import Interval
from millpond.statestore.log.checkpoint import checkpoint_path
from millpond.statestore.log.log import Log
from millpond.statestore.system import SystemClock
from millpond.statestore.types import Clock, Objects, TableVersion

__all__ = ["CollectionRound", "Retention", "collect_garbage", "collect_garbage_at"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """
    What a round leaves.

    Args:
        keep_ms: how long a version stays readable after it has been replaced; open savepoints
            and readers that have published theirs keep versions for longer.
        checkpoint_every: a checkpoint is written after so many versions.
    """

    keep_ms: int = 3_600_000
    checkpoint_every: int = 1_024

    def __post_init__(self) -> None:
        """
        Refuse what cannot be meant.
        """
        if self.keep_ms < 0 or self.checkpoint_every < 1:
            raise InvalidError("a retention cannot be negative", retention=self)


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectionRound:
    """
    What a round did.

    Attributes:
        horizon: the oldest version that stays readable.
        held_by: what keeps it from being newer.
        collections: what each collector did.
    """

    horizon: TableVersion
    held_by: str
    collections: tuple[Collection, ...]


def collect_garbage(
    objects: Objects,
    catalog: Catalog | None,
    clock: Clock,
    *,
    retention: Retention,
    owned: Mapping[Interval, Owned],
    seen: TableVersion | None = None,
    check: Callable[[], None] | None = None,
    dry_run: bool = False,
) -> CollectionRound:
    """
    One round over everything but compactions.

    Args:
        objects: the table's root.
        catalog: where horizons and savepoints are.
        clock: the source of time.
        retention: what stays.
        owned: the intervals whose leases the caller holds, as far as he knows.
        seen: the newest version of a while ago, as the caller saw it; see `LogCollector`.
        check: raises if the caller may not delete any more; asked before each collector.
        dry_run: change nothing.

    Raises:
        DataError: the log is damaged; nothing was deleted.
        UnavailableError: the store or the catalog is away.
        ConflictError: readers kept coming first; nothing was deleted.
    """
    made = None if dry_run else write_checkpoint(objects, every=retention.checkpoint_every)
    horizons = Horizons(Log(objects), catalog, clock, retention_ms=retention.keep_ms)
    found = survey(objects, horizons, dry_run=dry_run)
    reach("garbage.surveyed")
    collectors: tuple[Collector, ...] = (
        VacuumCollector(found),
        OrphanCollector(found, owned),
        LogCollector(found, clock, seen),
    )
    collections: list[Collection] = []
    for each in collectors:
        if check is not None:
            check()
        collections.append(each.collect(dry_run=dry_run))
    if made is not None:
        collections.insert(0, Collection(kind="checkpoint", made=(checkpoint_path(made),)))
    return CollectionRound(
        horizon=found.horizon.version, held_by=found.horizon.held_by, collections=tuple(collections)
    )


def collect_garbage_at(
    objects: Objects,
    catalog_url: str | None,
    store_id: str,
    *,
    retention: Retention,
    owned: Mapping[Interval, Owned],
    seen: TableVersion | None = None,
) -> CollectionRound:
    """
    The same from another process of this machine, which opens the catalog for itself; see `collect_garbage`.

    Args:
        objects: the table's root.
        catalog_url: SQLAlchemy URL of the catalog; ``None`` for a store without one.
        store_id: the store's, which the catalog must be of.
        retention: what stays.
        owned: the intervals whose leases the caller holds, as far as he knows.
        seen: the newest version of a while ago, as the caller saw it; see `LogCollector`.
    """
    clock = SystemClock()
    catalog = None if catalog_url is None else Catalog.open(catalog_url, clock, store_id=store_id)
    try:
        return collect_garbage(objects, catalog, clock, retention=retention, owned=owned, seen=seen)
    finally:
        if catalog is not None:
            catalog.close()
