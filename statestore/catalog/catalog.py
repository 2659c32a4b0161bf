"""The catalog: a store's topology and history, in a small SQL database.

It holds computations and their code versions, streams and subscriptions, intervals and their owners,
the watermark and superstep journals, injector positions, savepoints and horizons. It serves
people, tools and garbage collection; no commit depends on it. Its data about commits is
derived from the commits themselves (`millpond.statestore.catalog.entries`), so `Catalog.rebuild`
restores it from the log: losing the catalog loses nothing. Pipelines' declarations come back with
their next start (or from a commit that carries ``definition``), readers' horizons with their next
renewal.

Commits must not wait for the catalog: they pass their facts to a `CatalogJournal`.

Queries of recorded commits: intervals, owners, positions, journals.

Readers: keep a table version readable for as long as it is read, whatever the retention.

A reader publishes its version in the catalog. A collector looks up there how far it may go, publishes its
own horizon before it deletes, and is refused if that contradicts a reader's. A reader that comes after the
collector is refused instead (`millpond.statestore.catalog.pins`). The horizon of a dead reader expires
after `READER_LIFETIME_MS`; a live reader renews its horizon several times within that time.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Final, Self

from sqlalchemy import Connection, Engine, RowMapping, select

from millpond import migrations
from millpond.statestore.app_ids import savepoints_of
from millpond.statestore.catalog import pins as catalog_pins
from millpond.statestore.catalog import topology as catalog_topology
from millpond.statestore.catalog.commits import prune_journals, write_commits
from millpond.statestore.catalog.engine import (
    INPUT_POSITIONS,
    INTERVALS,
    LEASES,
    STORE,
    SUPERSTEPS,
    WATERMARKS,
    connect,
    reading,
    writing,
)
from millpond.statestore.catalog.entries import (
    CatalogLimits,
    CodeVersion,
    CommitFacts,
    ComputationEntry,
    HorizonEntry,
    HorizonKind,
    InputPositionEntry,
    IntervalEntry,
    LeaseEntry,
    PipelineDefinition,
    SavepointEntry,
    StreamDefinition,
    SubscriptionDefinition,
    SuperstepEntry,
    WatermarkEntry,
)
from millpond.statestore.catalog.rebuild import LogState, rewrite_commits
from millpond.statestore.errors import ConflictError, InvalidError, MillpondError, UnavailableError
from millpond.statestore.interval import Interval
from millpond.statestore.log.snapshot import Snapshot
from millpond.statestore.rows.row import Fence
from millpond.statestore.system import SystemClock
from millpond.statestore.types import Clock, Closeable, Superstep, TableVersion, WallTimeMicros


def read_intervals(
    connection: Connection, computation: str | None, *, closed: bool
) -> tuple[IntervalEntry, ...]:
    """Intervals in key order; with ``closed`` also intervals that splits and merges replaced."""
    query = select(INTERVALS)
    if computation is not None:
        query = query.where(INTERVALS.c.computation == computation)
    if not closed:
        query = query.where(INTERVALS.c.closed_version.is_(None))
    entries = (_interval_entry(row) for row in connection.execute(query).mappings())
    # Sorted here because not every database compares strings by their bytes.
    return tuple(sorted(entries, key=_key_order))


def _key_order(entry: IntervalEntry) -> tuple[str, str, bool, str]:
    interval = entry.interval
    return interval.computation, interval.low, interval.high is None, interval.high or ""


def _interval_entry(row: RowMapping) -> IntervalEntry:
    return IntervalEntry(
        interval=Interval(row["computation"], row["low"], row["high"]),
        fence=Fence(row["sequencer"], row["commit_number"]),
        opened_version=row["opened_version"],
        closed_version=row["closed_version"],
        version=row["version"],
        input_watermark_us=row["input_watermark_us"],
        output_watermark_us=row["output_watermark_us"],
    )


def read_leases(connection: Connection, interval: Interval) -> tuple[LeaseEntry, ...]:
    """The last owners of an interval, oldest first."""
    query = select(LEASES).where(LEASES.c.app_id == interval.app_id).order_by(LEASES.c.sequencer)
    return tuple(
        LeaseEntry(
            interval=interval,
            sequencer=row.sequencer,
            opened_version=row.opened_version,
            closed_version=row.closed_version,
        )
        for row in connection.execute(query)
    )


def read_input_positions(connection: Connection) -> tuple[InputPositionEntry, ...]:
    """The consumed position of every external source."""
    columns = [column for column in INPUT_POSITIONS.columns if column.name != "app_id"]
    query = select(*columns).order_by(INPUT_POSITIONS.c.app_id)
    return tuple(InputPositionEntry(**row) for row in connection.execute(query).mappings())


def read_supersteps(connection: Connection, pipeline: str | None, limit: int) -> tuple[SuperstepEntry, ...]:
    """The last ``limit`` journaled supersteps, newest first."""
    query = select(SUPERSTEPS).order_by(SUPERSTEPS.c.version.desc()).limit(limit)
    if pipeline is not None:
        query = query.where(SUPERSTEPS.c.pipeline == pipeline)
    return tuple(SuperstepEntry(**row) for row in connection.execute(query).mappings())


def read_watermarks(
    connection: Connection, pipeline: str, superstep: Superstep | None
) -> tuple[WatermarkEntry, ...]:
    """The journaled watermarks of one superstep, or of all supersteps in the journal, oldest first."""
    query = select(WATERMARKS).where(WATERMARKS.c.pipeline == pipeline)
    if superstep is not None:
        query = query.where(WATERMARKS.c.superstep == superstep)
    query = query.order_by(WATERMARKS.c.superstep, WATERMARKS.c.subject)
    return tuple(WatermarkEntry(**row) for row in connection.execute(query).mappings())


_PRUNE_SHARE: Final = 8


class Catalog(Closeable):
    """An open catalog; methods may be called from any thread.

    Every method raises `UnavailableError` while the database does not answer.

    Example:
        >>> with Catalog.open("sqlite://") as catalog:
        ...     catalog.record_commits([CommitFacts(version=1, wall_us=0, txns={})])
        ...     catalog.intervals()
        ()
    """

    def __init__(self, engine: Engine, clock: Clock, limits: CatalogLimits) -> None:
        self._engine = engine
        self._clock = clock
        self._limits = limits
        self._rows_since_prune = 0
        self._supersteps_since_prune = 0

    @classmethod
    def open(
        cls,
        url: str,
        clock: Clock | None = None,
        *,
        store_id: str | None = None,
        limits: CatalogLimits | None = None,
        read_only: bool = False,
    ) -> Self:
        """Open a catalog; create it or migrate its schema if needed.

        Args:
            url: any SQLAlchemy URL; a store's default is `default_catalog_url`.
            clock: the source of times for new entries; the machine's by default.
            store_id: the store that the catalog must belong to; any store by default.
            limits: bounds of the journals.
            read_only: change nothing, not even the schema; a missing SQLite file is not created.

        Raises:
            InvalidError: not a usable URL, another store's catalog, or a newer schema
                (with ``read_only`` also an older one).
            UnavailableError: the database does not answer.
            DataError: the file is not a catalog.
        """
        own_clock = SystemClock() if clock is None else clock
        engine = connect(url, own_clock, create=not read_only)
        catalog = cls(engine, own_clock, CatalogLimits() if limits is None else limits)
        try:
            catalog._prepare(store_id, read_only=read_only)
        except BaseException:
            catalog.close()
            raise
        return catalog

    def _prepare(self, store_id: str | None, *, read_only: bool) -> None:
        with reading(self._engine) as connection:
            ready = migrations.current_revision(connection) == migrations.HEAD
            if ready and _belongs(connection, store_id):
                return
        if read_only:
            raise InvalidError("the catalog needs a migration: open the store for writing once")
        with writing(self._engine) as connection:
            migrations.upgrade(connection)
            _claim(connection, store_id, self._clock.now_us())

    def close(self) -> None:
        """Close the database connections; recorded entries stay."""
        self._engine.dispose()

    @property
    def created_us(self) -> WallTimeMicros:
        """When this catalog was created.

        A catalog younger than the longest lifetime of a reader's horizon may not list all
        readers yet; collectors wait that long before they trust it.
        """
        with reading(self._engine) as connection:
            return WallTimeMicros(connection.execute(select(STORE.c.created_us)).scalar_one())

    # Declarations of pipelines.

    def record_pipeline(self, definition: PipelineDefinition) -> None:
        """Replace a pipeline's topology.

        Raises:
            InvalidError: a computation belongs to another pipeline, or its options are not JSON.
        """
        with writing(self._engine) as connection:
            catalog_topology.write_definition(connection, definition, self._clock.now_us(), self._limits)

    def computations(self) -> tuple[ComputationEntry, ...]:
        """Every computation ever declared, including retired computations, by name."""
        with reading(self._engine) as connection:
            return catalog_topology.read_computations(connection)

    def code_versions(self, computation: str) -> tuple[CodeVersion, ...]:
        """The last code versions of a computation, oldest first."""
        with reading(self._engine) as connection:
            return catalog_topology.read_code_versions(connection, computation)

    def streams(self, pipeline: str) -> tuple[StreamDefinition, ...]:
        """The streams of a pipeline, by name."""
        with reading(self._engine) as connection:
            return catalog_topology.read_streams(connection, pipeline)

    def subscriptions(self, pipeline: str) -> tuple[SubscriptionDefinition, ...]:
        """The subscriptions of a pipeline: consumer, stream and key extractor."""
        with reading(self._engine) as connection:
            return catalog_topology.read_subscriptions(connection, pipeline)

    # Facts of commits.

    def record_commits(self, batch: Iterable[CommitFacts]) -> None:
        """Record the facts of commits (supersteps, fences, compactions) in one transaction; idempotent."""
        facts = tuple(batch)
        with writing(self._engine) as connection:
            self._rows_since_prune += write_commits(connection, facts, self._limits)
            self._supersteps_since_prune += len(facts)
            self._prune_when_due(connection)

    def _prune_when_due(self, connection: Connection) -> None:
        rows_due = self._rows_since_prune * _PRUNE_SHARE >= self._limits.watermark_rows_max
        supersteps_due = self._supersteps_since_prune * _PRUNE_SHARE >= self._limits.supersteps_max
        if rows_due or supersteps_due:
            prune_journals(connection, self._limits)
            self._rows_since_prune = self._supersteps_since_prune = 0

    def intervals(self, computation: str | None = None, *, closed: bool = False) -> tuple[IntervalEntry, ...]:
        """Intervals in key order; with ``closed`` also intervals that splits and merges replaced."""
        with reading(self._engine) as connection:
            return read_intervals(connection, computation, closed=closed)

    def leases(self, interval: Interval) -> tuple[LeaseEntry, ...]:
        """The last owners of an interval, oldest first."""
        with reading(self._engine) as connection:
            return read_leases(connection, interval)

    def input_positions(self) -> tuple[InputPositionEntry, ...]:
        """The consumed position of each external source."""
        with reading(self._engine) as connection:
            return read_input_positions(connection)

    def supersteps(self, pipeline: str | None = None, *, limit: int = 100) -> tuple[SuperstepEntry, ...]:
        """The last ``limit`` journaled supersteps, newest first."""
        with reading(self._engine) as connection:
            return read_supersteps(connection, pipeline, limit)

    def watermarks(self, pipeline: str, superstep: Superstep | None = None) -> tuple[WatermarkEntry, ...]:
        """The journaled watermarks of one superstep, or of all supersteps in the journal, oldest first."""
        with reading(self._engine) as connection:
            return read_watermarks(connection, pipeline, superstep)

    # Constraints on garbage collection.

    def savepoints(self, *, released: bool = False) -> tuple[SavepointEntry, ...]:
        """The savepoints of the log that are open, by name; with ``released`` those that were dropped too."""
        with reading(self._engine) as connection:
            return catalog_pins.read_savepoints(connection, released=released)

    def horizons(self) -> tuple[HorizonEntry, ...]:
        """The horizons that have not expired, by holder."""
        with reading(self._engine) as connection:
            return catalog_pins.read_horizons(connection, self._clock.now_us())

    def publish_horizon(
        self,
        holder: str,
        version: TableVersion,
        kind: HorizonKind = HorizonKind.READER,
        *,
        lifetime_ms: int | None = None,
    ) -> HorizonEntry:
        """Publish a table version that the holder needs; call it before reading, or before deleting below it.

        Args:
            holder: name of the reader or collector; publishing again moves or renews its horizon.
            version: the oldest version that a reader reads, or that a collector leaves readable.
            kind: reader or collector.
            lifetime_ms: how long a reader's horizon lives without renewal; for ever by default.

        Raises:
            ConflictError: a reader's version is being collected, or a collector's horizon falls or is
                above a version that a reader needs.
            InvalidError: a collector's horizon with a lifetime.
        """
        now_us = self._clock.now_us()
        expires_us = None if lifetime_ms is None else WallTimeMicros(now_us + lifetime_ms * 1_000)
        horizon = HorizonEntry(
            holder=holder, kind=kind, version=version, published_us=now_us, expires_us=expires_us
        )
        with writing(self._engine) as connection:
            catalog_pins.write_horizon(connection, horizon)
        return horizon

    def withdraw_horizon(self, holder: str) -> None:
        """Remove a reader's horizon: its version may be collected from now on."""
        with writing(self._engine) as connection:
            catalog_pins.withdraw_horizon(connection, holder)

    def oldest_needed(self) -> TableVersion | None:
        """The oldest version that a live reader needs; ``None`` if there is none."""
        with reading(self._engine) as connection:
            horizons = catalog_pins.read_horizons(connection, self._clock.now_us())
        return catalog_pins.oldest_needed(horizons)

    # Recovery of a lost catalog.

    def rebuild(self, snapshot: LogState, commits: Iterable[CommitFacts]) -> None:
        """Rewrite everything that the log contains, in one transaction.

        Data that is not in the log (declared topology, horizons, notes) stays as it is.

        Args:
            snapshot: the log's newest state.
            commits: the facts of the newest commits, without a gap, up to the snapshot's version
                (`millpond.statestore.catalog.rebuild.logged_commits`).
        """
        with writing(self._engine) as connection:
            rewrite_commits(connection, snapshot, commits, self._limits)


def _belongs(connection: Connection, store_id: str | None) -> bool:
    """Whether the catalog belongs to the store; an unclaimed catalog belongs to none."""
    row = connection.execute(select(STORE.c.store_id)).one_or_none()
    if row is None:
        return False
    owner = row.store_id
    if store_id is not None and owner not in (None, store_id):
        raise InvalidError("the catalog belongs to another store", store_id=store_id, owner=owner)
    return store_id is None or owner == store_id


def _claim(connection: Connection, store_id: str | None, now_us: WallTimeMicros) -> None:
    if _belongs(connection, store_id):
        return
    if connection.execute(STORE.update().values(store_id=store_id)).rowcount == 0:
        connection.execute(STORE.insert(), {"id": 1, "store_id": store_id, "created_us": now_us})


READER_LIFETIME_MS: Final = 15 * 60 * 1_000
"""Lifetime of a reader's horizon without renewal, in milliseconds."""

_RENEWALS: Final = 5
_PIN_TRIES: Final = 5
_LOG = logging.getLogger("millpond")


class Reading(Closeable):
    """A version that is being read: published on construction, withdrawn by `close`.

    Args:
        catalog: the catalog to publish in.
        holder: a name that no other reader has.
        version: the table version.

    Raises:
        ConflictError: the version is already being collected.
        UnavailableError: the catalog is unavailable.
    """

    def __init__(self, catalog: Catalog, holder: str, version: TableVersion) -> None:
        self.version = version
        self._catalog = catalog
        self._holder = holder
        self._ended = threading.Event()
        self._lost: MillpondError | None = None
        self.renew()
        self._thread = threading.Thread(target=self._renew_regularly, name="millpond-reading", daemon=True)
        self._thread.start()

    def renew(self) -> None:
        """Keep the version for another `READER_LIFETIME_MS`; a background thread calls this regularly.

        Raises:
            ConflictError: the horizon expired, and the version is being collected.
            UnavailableError: the catalog is unavailable.
        """
        self._catalog.publish_horizon(self._holder, self.version, lifetime_ms=READER_LIFETIME_MS)

    def check(self) -> None:
        """Raise the error that ended the pin, if there was one: files of the version may be deleted.

        Raises:
            ConflictError: the horizon expired, and the version is being collected.
        """
        if self._lost is not None:
            raise self._lost

    def close(self) -> None:
        """Withdraw the horizon, so that the version may be collected; closing again does nothing."""
        if self._ended.is_set():
            return
        self._ended.set()
        self._thread.join()
        try:
            self._catalog.withdraw_horizon(self._holder)
        except UnavailableError as error:
            _LOG.info("a reader's horizon is left to expire: %s", error)

    def _renew_regularly(self) -> None:
        while not self._ended.wait(READER_LIFETIME_MS / _RENEWALS / 1_000):
            try:
                self.renew()
            except ConflictError as error:
                self._lost = error
                _LOG.warning("a version that is being read is being collected: %s", error)
                return
            except MillpondError as error:
                _LOG.info("a reader's horizon was not renewed: %s", error)


def pinned_snapshot(
    load: Callable[[int | None], Snapshot],
    catalog: Catalog | None,
    holder: str,
    version: int | None,
    resources: ExitStack,
) -> Snapshot:
    """A table version, pinned until the resources are closed; that of a savepoint needs no pin.

    Args:
        load: loads a version, or the newest one.
        catalog: the catalog to pin it in; ``None`` pins nothing.
        holder: a name that no other reader has.
        version: the version; ``None`` for the newest.
        resources: closes the pin.

    Raises:
        ConflictError: the version is being collected.
        DataError: the log is damaged or does not reach back that far.
    """
    for _ in range(_PIN_TRIES):
        snapshot = load(version)
        if catalog is None:
            return snapshot
        try:
            resources.enter_context(Reading(catalog, holder, snapshot.version))
        except ConflictError:
            if version is not None:
                if version in {kept for _, kept in savepoints_of(load(None).txns)}:
                    return snapshot
                raise
            # The version was the newest when it was loaded but is being collected now: load a newer one.
            continue
        except MillpondError as error:
            # A read-only disk, for example: reading must still work, for as long as the retention lasts.
            _LOG.info("no version is pinned for this reader: %s", error)
        return snapshot
    raise ConflictError("versions are collected faster than they are read", version=version)
