"""The catalog: readers' horizons and code versions, which the log does not have, in a small SQL database.

No commit depends on it. A reader publishes the oldest version that it reads *before* it reads; a collector publishes the
oldest version that it leaves readable *before* it deletes. One transaction refuses whatever contradicts the other side,
so in either order a collector never deletes a file that a reader needs (architecture, section 9).

A process that stands still inside a transaction holds SQLite's file, so the others go on in a copy of it. Once it
continues, it finds that its transaction does not count, and repeats it there.

Losing the catalog loses no data: `Catalog.rebuild` and the next start of a pipeline restore the code versions that the
log still records, and readers restore their horizons when they renew them.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Final, Self, TypeVar

import orjson
from sqlalchemy import Connection, Engine, select

from millpond import migrations
from millpond.statestore.catalog.engine import (
    CODE_VERSIONS,
    COMPUTATIONS,
    FILES_MAX,
    HORIZONS,
    STORE,
    HeldError,
    connect,
    file_url,
    newest_file,
    reading,
    replace_row,
    writing,
)
from millpond.statestore.catalog.topology import (
    ComputationDefinition,
    PipelineDefinition,
    definition_from_metadata,
)
from millpond.statestore.errors import ConflictError, InvalidError, MillpondError, UnavailableError
from millpond.statestore.history.replayed_log import LoggedCommit
from millpond.statestore.history.savepoint import open_savepoints
from millpond.statestore.log.snapshot import Snapshot
from millpond.statestore.system import SystemClock
from millpond.statestore.types import Clock, Closeable, TableVersion, WallTimeMicros

CODE_VERSIONS_MAX: Final = 100
"""Code versions that are kept of each computation."""

READER_LIFETIME_MS: Final = 15 * 60 * 1_000
"""Lifetime of a reader's horizon without renewal; afterwards the reader counts as dead."""

_COPIED: Final = (STORE, COMPUTATIONS, CODE_VERSIONS, HORIZONS)
_RENEWALS: Final = 5
_PIN_TRIES: Final = 5
_LOG = logging.getLogger("millpond")
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputationEntry:
    """A declared computation; ``code_version`` rises by one whenever the code's hash changes."""

    name: str
    pipeline: str
    code_version: int
    code_hash: str
    codec: str
    options: Mapping[str, object]
    recorded_us: WallTimeMicros
    retired_us: WallTimeMicros | None  # since when its pipeline no longer declares it


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeVersion:
    """The code of a computation from ``recorded_us`` until the next version."""

    computation: str
    code_version: int
    code_hash: str
    recorded_us: WallTimeMicros


class HorizonKind(StrEnum):
    """The publisher of a horizon."""

    READER = "reader"
    COLLECTOR = "collector"


@dataclass(frozen=True, slots=True, kw_only=True)
class HorizonEntry:
    """The oldest version that a reader still reads, or that a collector leaves readable."""

    holder: str
    kind: HorizonKind
    version: TableVersion
    published_us: WallTimeMicros
    expires_us: WallTimeMicros | None  # ``None`` never expires


class Catalog(Closeable):
    """An open catalog; methods may be called from any thread.

    Every method raises `UnavailableError` while the database does not answer.

    Example:
        >>> with Catalog.open("sqlite://") as catalog:
        ...     catalog.horizons()
        ()
    """

    def __init__(self, url: str, clock: Clock, store_id: str | None, *, read_only: bool) -> None:
        self._url = url
        self._clock = clock
        self._store_id = store_id
        self._read_only = read_only
        self._lock = threading.Lock()
        self._opened: tuple[int, Engine] | None = None

    @classmethod
    def open(
        cls, url: str, clock: Clock | None = None, *, store_id: str | None = None, read_only: bool = False
    ) -> Self:
        """Open a catalog, which must belong to the store ``store_id``; ``read_only`` changes nothing.

        Otherwise a missing catalog is created, and an older schema is migrated.

        Raises:
            InvalidError: not a usable URL, another store's catalog, or a newer schema
                (with ``read_only`` also an older one).
            DataError: the file is not a catalog.
        """
        catalog = cls(url, SystemClock() if clock is None else clock, store_id, read_only=read_only)
        catalog._in(reading, lambda _: None)
        return catalog

    def _in(
        self,
        transaction: Callable[[Engine], AbstractContextManager[Connection]],
        work: Callable[[Connection], _Result],
    ) -> _Result:
        """Do work in a transaction of the newest file; where another process holds that one, begin the next file."""
        held = 0
        while True:
            number = max(newest_file(self._url), held + 1)
            try:
                with transaction(self._engine(number)) as connection:
                    done = work(connection)
            except HeldError as error:
                # No other process knows a file that is begun here: held as well, its disk has no working locks.
                if held or self._read_only or number == FILES_MAX:
                    raise
                _LOG.warning("the catalog goes on in another file: %s", error)
                held = number
                continue
            # A newer file may lack this work: its copy of this one was perhaps made before. Whoever begins one after
            # this look copies the work too.
            if newest_file(self._url) <= number:
                return done

    def _engine(self, number: int) -> Engine:
        with self._lock:
            if self._opened is None or self._opened[0] != number:
                engine = connect(file_url(self._url, number), self._clock, create=not self._read_only)
                try:
                    self._prepare(engine, number)
                except BaseException:
                    engine.dispose()
                    raise
                former, self._opened = self._opened, (number, engine)
                if former is not None:
                    former[1].dispose()
            return self._opened[1]

    def _prepare(self, engine: Engine, number: int) -> None:
        with reading(engine) as connection:
            ready = migrations.current_revision(connection) == migrations.HEAD
            if ready and _belongs(connection, self._store_id):
                return
        if self._read_only:
            raise InvalidError("the catalog needs a migration: open the store for writing once")
        with writing(engine) as connection:
            migrations.upgrade(connection)
            if _belongs(connection, self._store_id):
                return
            if connection.execute(STORE.update().values(store_id=self._store_id)).rowcount == 0:
                row = {"id": 1, "store_id": self._store_id, "created_us": self._clock.now_us()}
                connection.execute(STORE.insert(), row)
                if number > 1:
                    self._copy_file(number - 1, connection)

    def _copy_file(self, number: int, target: Connection) -> None:
        """Copy a file that another process holds; one that cannot be read either is lost, which loses no data."""
        try:
            former = connect(file_url(self._url, number), self._clock, create=False)
            try:
                with reading(former) as source:
                    rows = [(table, source.execute(select(table)).mappings().all()) for table in _COPIED]
            finally:
                former.dispose()
        except UnavailableError as error:
            _LOG.info("the catalog's former file is not copied: %s", error)
            return
        for table, found in rows:
            if found:
                target.execute(table.delete())
                target.execute(table.insert(), [dict(row) for row in found])

    def close(self) -> None:
        with self._lock:
            if self._opened is not None:
                self._opened[1].dispose()
                self._opened = None

    @property
    def created_us(self) -> WallTimeMicros:
        """The time at which this catalog was created.

        A catalog younger than the longest lifetime of a reader's horizon may lack readers, so collectors do not
        trust it before.
        """
        query = select(STORE.c.created_us)
        return WallTimeMicros(self._in(reading, lambda connection: connection.execute(query).scalar_one()))

    # -- code versions ---------------------------------------------------------------------

    def record_pipeline(self, definition: PipelineDefinition) -> None:
        """Record the computations of a pipeline, none of which may belong to another one, and retire its other ones."""
        now_us = self._clock.now_us()
        self._in(writing, lambda connection: _write_definition(connection, definition, now_us))

    def rebuild(self, commits: Iterable[LoggedCommit]) -> None:
        """Restore code versions from the topologies in commits, given newest first."""
        declared = [
            (definition, commit.wall_us)
            for commit in commits
            if (definition := definition_from_metadata(commit.metadata)) is not None
        ]
        if not declared:
            return

        def write(connection: Connection) -> None:
            for definition, at_us in reversed(declared):
                known = _read_computations(connection)
                is_of_it = (entry for entry in known if entry.pipeline == definition.name)
                if all(entry.recorded_us <= at_us for entry in is_of_it):
                    _write_definition(connection, definition, at_us)

        self._in(writing, write)

    def computations(self) -> tuple[ComputationEntry, ...]:
        """Return every computation ever declared, also retired ones, by name."""
        return self._in(reading, _read_computations)

    def code_versions(self, computation: str) -> tuple[CodeVersion, ...]:
        """Return the last code versions of a computation, oldest first."""
        query = select(CODE_VERSIONS).where(CODE_VERSIONS.c.computation == computation)
        query = query.order_by(CODE_VERSIONS.c.code_version)
        rows = self._in(reading, lambda connection: connection.execute(query).mappings().all())
        return tuple(CodeVersion(**row) for row in rows)

    # -- horizons --------------------------------------------------------------------------

    def horizons(self) -> tuple[HorizonEntry, ...]:
        """Return the horizons that have not expired, by holder."""
        now_us = self._clock.now_us()
        return self._in(reading, lambda connection: _read_horizons(connection, now_us))

    def publish_horizon(
        self,
        holder: str,
        version: TableVersion,
        kind: HorizonKind = HorizonKind.READER,
        *,
        lifetime_ms: int | None = None,
    ) -> HorizonEntry:
        """Publish a horizon, or move or renew the holder's last one; call this before reading or deleting.

        Raises:
            ConflictError: a reader's version is being collected, or a collector's horizon falls or is
                above a version that a reader needs.
        """
        now_us = self._clock.now_us()
        expires_us = None if lifetime_ms is None else WallTimeMicros(now_us + lifetime_ms * 1_000)
        horizon = HorizonEntry(
            holder=holder, kind=kind, version=version, published_us=now_us, expires_us=expires_us
        )

        # One transaction with the write lock: otherwise a reader and a collector could publish past each other.
        def publish(connection: Connection) -> None:
            live = _read_horizons(connection, now_us)
            connection.execute(HORIZONS.delete().where(HORIZONS.c.expires_us <= now_us))
            _check_horizon(horizon, live)
            replace_row(connection, HORIZONS, {**asdict(horizon), "kind": kind.value})

        self._in(writing, publish)
        return horizon

    def withdraw_horizon(self, holder: str) -> None:
        """Remove a reader's horizon; a collector's stays, because its deletions are final."""
        is_reader = HORIZONS.c.kind == HorizonKind.READER.value
        query = HORIZONS.delete().where(HORIZONS.c.holder == holder, is_reader)
        self._in(writing, lambda connection: connection.execute(query))

    def oldest_needed(self) -> TableVersion | None:
        """Return the oldest version that a live reader needs, if any."""
        return _oldest_needed(self.horizons())


def _check_horizon(horizon: HorizonEntry, live: tuple[HorizonEntry, ...]) -> None:
    """Refuse a horizon that contradicts the live ones of the other side, or falls."""
    version, oldest = horizon.version, collected_below(live)
    if horizon.kind is HorizonKind.READER:
        if version < oldest:
            raise ConflictError("that version is being collected", version=version, oldest_kept=oldest)
        return
    needed = _oldest_needed(live)
    if needed is not None and version > needed:
        raise ConflictError("an older version is still needed", version=version, needed=needed)
    if horizon.expires_us is not None:
        raise InvalidError("a collector's horizon cannot expire", holder=horizon.holder)
    last = next((other.version for other in live if other.holder == horizon.holder), version)
    if version < last:
        raise ConflictError("a collector's horizon cannot fall", version=version, last=last)


def _belongs(connection: Connection, store_id: str | None) -> bool:
    """Return whether the catalog belongs to the store; an unclaimed catalog belongs to none."""
    row = connection.execute(select(STORE.c.store_id)).one_or_none()
    if row is None:
        return False
    owner = row.store_id
    if store_id is not None and owner not in (None, store_id):
        raise InvalidError("the catalog belongs to another store", store_id=store_id, owner=owner)
    return store_id is None or owner == store_id


def _write_definition(connection: Connection, definition: PipelineDefinition, at_us: WallTimeMicros) -> None:
    known = {entry.name: entry for entry in _read_computations(connection)}
    for computation in definition.computations:
        _write_computation(connection, definition.name, computation, known.get(computation.name), at_us)
    declared = [computation.name for computation in definition.computations]
    others = COMPUTATIONS.update().where(
        COMPUTATIONS.c.pipeline == definition.name,
        COMPUTATIONS.c.name.not_in(declared),
        COMPUTATIONS.c.retired_us.is_(None),
    )
    # Retired, not deleted: the rows of the computation are still in the table.
    connection.execute(others.values(retired_us=at_us))


def _write_computation(
    connection: Connection,
    pipeline: str,
    computation: ComputationDefinition,
    known: ComputationEntry | None,
    at_us: WallTimeMicros,
) -> None:
    if known is not None and known.retired_us is None and known.pipeline != pipeline:
        raise InvalidError(
            "a computation of that name belongs to another pipeline of the store",
            computation=computation.name,
            pipeline=known.pipeline,
        )
    changed = known is None or known.code_hash != computation.code_hash
    code_version = (0 if known is None else known.code_version) + (1 if changed else 0)
    try:
        options = json.dumps(dict(computation.options), sort_keys=True)
    except (TypeError, ValueError) as error:
        raise InvalidError("a computation's options must be JSON", computation=computation.name) from error
    row = {
        "name": computation.name,
        "pipeline": pipeline,
        "code_version": code_version,
        "code_hash": computation.code_hash,
        "codec": computation.codec,
        "options": options,
        "recorded_us": at_us if known is None or changed else known.recorded_us,
        "retired_us": None,
    }
    replace_row(connection, COMPUTATIONS, row)
    if changed:
        version = {"computation": computation.name, "code_version": code_version}
        version |= {"code_hash": computation.code_hash, "recorded_us": at_us}
        replace_row(connection, CODE_VERSIONS, version)
        of_computation = CODE_VERSIONS.c.computation == computation.name
        old = CODE_VERSIONS.c.code_version <= code_version - CODE_VERSIONS_MAX
        connection.execute(CODE_VERSIONS.delete().where(of_computation, old))


def _read_computations(connection: Connection) -> tuple[ComputationEntry, ...]:
    rows = connection.execute(select(COMPUTATIONS).order_by(COMPUTATIONS.c.name)).mappings()
    return tuple(ComputationEntry(**{**row, "options": orjson.loads(row["options"])}) for row in rows)


def _read_horizons(connection: Connection, now_us: WallTimeMicros) -> tuple[HorizonEntry, ...]:
    rows = connection.execute(select(HORIZONS).order_by(HORIZONS.c.holder)).mappings()
    horizons = (HorizonEntry(**{**row, "kind": HorizonKind(row["kind"])}) for row in rows)
    return tuple(horizon for horizon in horizons if horizon.expires_us is None or horizon.expires_us > now_us)


def collected_below(horizons: Iterable[HorizonEntry]) -> TableVersion:
    """Return the oldest version that every collector leaves readable."""
    promised = (horizon.version for horizon in horizons if horizon.kind is HorizonKind.COLLECTOR)
    return max(promised, default=TableVersion(0))


def _oldest_needed(horizons: Iterable[HorizonEntry]) -> TableVersion | None:
    needed = [horizon.version for horizon in horizons if horizon.kind is HorizonKind.READER]
    return min(needed, default=None)


class Reading(Closeable):
    """A pinned version: published on construction (`ConflictError` if too late), renewed by a thread, withdrawn by `close`."""

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
        """Keep the version for another `READER_LIFETIME_MS`; raise `ConflictError` if it is being collected."""
        self._catalog.publish_horizon(self._holder, self.version, lifetime_ms=READER_LIFETIME_MS)

    def check(self) -> None:
        """Raise the error that ended the pin, if any: files of the version may be deleted."""
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
    """Load a table version (``None``: the newest), pinned until ``resources`` are closed; savepoints need no pin."""
    for _ in range(_PIN_TRIES):
        snapshot = load(version)
        if catalog is None:
            return snapshot
        try:
            resources.enter_context(Reading(catalog, holder, snapshot.version))
        except ConflictError:
            if version is not None:
                if version not in {savepoint.version for savepoint in open_savepoints(load(None).txns)}:
                    raise
                return snapshot
            # The version was the newest when it was loaded but is being collected now: load a newer one.
            continue
        except MillpondError as error:
            # A read-only disk, for example: reading must still work, for as long as the retention lasts.
            _LOG.info("no version is pinned for this reader: %s", error)
        return snapshot
    raise ConflictError("versions are collected faster than they are read", version=version)
