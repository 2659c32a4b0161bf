"""A round of garbage collection: every collector once, in an order that keeps the data that the next one needs.

Versions at or after the published horizon keep all their files, and a round may be killed at any point without damage.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from millpond.gc.collectors import Owned, collect_log, collect_orphans, collect_removed, write_checkpoint
from millpond.gc.survey import Collection, Horizons, survey
from millpond.statestore.catalog.catalog import Catalog
from millpond.statestore.errors import InvalidError
from millpond.statestore.failpoint import reach
from millpond.statestore.interval import Interval
from millpond.statestore.log.checkpoint import checkpoint_path
from millpond.statestore.log.log import Log
from millpond.statestore.system import SystemClock
from millpond.statestore.types import Clock, Objects, TableVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """The bounds of a round.

    A replaced version stays readable for ``keep_ms``, or longer for open savepoints and readers' pins. A checkpoint is written
    ``checkpoint_every`` versions after the last one.
    """

    keep_ms: int = 3_600_000
    checkpoint_every: int = 1_024

    def __post_init__(self) -> None:
        if self.keep_ms < 0 or self.checkpoint_every < 1:
            raise InvalidError(
                "a retention's bounds are too small: keep_ms is at least 0, checkpoint_every at least 1",
                retention=self,
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectionRound:
    """The result of a round: its horizon, the reason that holds the horizon back, and each collector's result."""

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
    """Run one round over all garbage except the rows that compaction drops.

    Args:
        objects: the table's root.
        catalog: readers' horizons; ``None`` for a store without a catalog.
        clock: the source of time.
        retention: the versions to keep.
        owned: the intervals whose leases the caller holds, as far as it knows.
        seen: the newest version as the caller saw it a while ago; see `collect_log`.
        check: raises if the caller may no longer delete; called before each collector.
        dry_run: change nothing.
    """
    # The checkpoint comes first, because it marks the settled part of the log.
    checkpoint = None if dry_run else write_checkpoint(objects, every=retention.checkpoint_every)
    horizons = Horizons(Log(objects), catalog, clock, retention_ms=retention.keep_ms)
    surveyed = survey(objects, horizons, dry_run=dry_run)
    if not dry_run:
        # Files are garbage only because of these commits and checkpoints; a power cut must not revert them.
        objects.sync(surveyed.rests_on)
    reach("garbage.surveyed")
    collections: list[Collection] = []
    for collect in (
        # Vacuum comes before the log cleanup, which deletes the record of removed files.
        partial(collect_removed, surveyed),
        partial(collect_orphans, surveyed, owned),
        partial(collect_log, surveyed, clock, seen),
    ):
        if check is not None:
            check()
        collections.append(collect(dry_run=dry_run))
    if checkpoint is not None:
        collections.insert(0, Collection(kind="checkpoint", made=(checkpoint_path(checkpoint),)))
    return CollectionRound(
        horizon=surveyed.horizon.version, held_by=surveyed.horizon.held_by, collections=tuple(collections)
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
    """Run `collect_garbage` in a helper process, which opens the catalog itself."""
    clock = SystemClock()
    catalog = None if catalog_url is None else Catalog.open(catalog_url, clock, store_id=store_id)
    try:
        return collect_garbage(objects, catalog, clock, retention=retention, owned=owned, seen=seen)
    finally:
        if catalog is not None:
            catalog.close()
