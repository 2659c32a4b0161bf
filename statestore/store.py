"""The store: one folder for all durable state of a pipeline (architecture §2).

::

    pond/rows/              the Delta table; its log is the only source of truth
    pond/catalog.sqlite     readers' horizons and code versions, for people and tools; the newest of several files
    pond/zookeeper/         the embedded server's data, unless an ensemble is given
    pond/checkpoints/       Spark's streaming checkpoints
    pond/high_water/        the newest version that the table has reached, for readers without a ZooKeeper

Opening a store compares its log with the high-water marks, so that a log which was cut or rolled back is
refused instead of read as older data. ``read_only`` starts no server and takes no lease.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

from millpond.statestore.app_ids import AppId, recorded_names
from millpond.statestore.arguments import check_flags, check_instance
from millpond.statestore.catalog.catalog import Catalog, pinned_snapshot
from millpond.statestore.catalog.engine import default_catalog_url
from millpond.statestore.catalog.topology import DEFINES
from millpond.statestore.durations import accepts_old_durations, duration_ms
from millpond.statestore.errors import (
    ConflictError,
    InvalidError,
    MillpondError,
    UnavailableError,
    did_you_mean,
)
from millpond.statestore.history.lineage import (
    NO_STORE,
    ROWS_FOLDER,
    Adoption,
    Lineage,
    adopt_store,
    check_location,
    local_folder,
    place_of,
)
from millpond.statestore.history.replayed_log import newest_commits
from millpond.statestore.history.savepoint import (
    Savepoint,
    drop_savepoint,
    load_version,
    make_savepoint,
    open_savepoints,
)
from millpond.statestore.leases.ensemble import hosts_in_environment
from millpond.statestore.leases.lease import Leases
from millpond.statestore.leases.memory import MemoryLeases, MemoryRegistry
from millpond.statestore.leases.zookeeper_client import ZooKeeperSecurity, security_of
from millpond.statestore.leases.zookeeper_high_water import ask_for_mark, local_server
from millpond.statestore.leases.zookeeper_server import EmbeddedZooKeeper, local_security
from millpond.statestore.leases.zookeeper_service import LeaseFactory, ZooKeeperService, connect_leases
from millpond.statestore.loading.load import Load, LoadBeginning, Loaded, LoadProgress
from millpond.statestore.loading.source import LoadSource
from millpond.statestore.log.committer import Committer
from millpond.statestore.log.high_water import (
    LINGER_MS,
    BothHighWaters,
    HighWater,
    StoredMark,
    check_high_water,
    list_marks,
    newest_mark,
    version_marked,
)
from millpond.statestore.log.log import Log
from millpond.statestore.log.snapshot import Snapshot, load, load_existing
from millpond.statestore.log.table import check_format, create_rows_table, store_id_of
from millpond.statestore.objects.local import LocalObjects
from millpond.statestore.objects.memory import MemoryObjects
from millpond.statestore.objects.obstore import ObstoreObjects, open_objects
from millpond.statestore.rows.codec import Codec, JsonCodec
from millpond.statestore.rows.files import PARQUET
from millpond.statestore.rows.row_format import RowFormat
from millpond.statestore.system import SystemClock, SystemRng
from millpond.statestore.types import Clock, Closeable, Durability, Objects, Rng, TableVersion
from millpond.statestore.view import RowsView, computations_of, connect

if TYPE_CHECKING:
    import duckdb

_REBUILT_COMMITS_MAX: Final = 1_000
_REVIVAL_US: Final = 1_000_000
_CLOUD_LINGER_MS: Final = 1_000
# Marks that are deleted in one request.
_CLOUD_MARKS: Final = 32
_READ_ONLY: Final = "the store was opened read-only: open it without read_only=True to write"

_LOG: Final = logging.getLogger("millpond")


def rebuild_catalog(catalog: Catalog, log: Log) -> None:
    newest = log.latest_version()
    if newest is not None:
        catalog.rebuild(newest_commits(log, newest, _REBUILT_COMMITS_MAX, naming=DEFINES))


@dataclass(slots=True)
class KnownCatalog:
    """The catalog of an open store, opened on first use."""

    url: str | None
    clock: Clock
    store_id: str
    log: Log
    read_only: bool
    _catalog: Catalog | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def open(self) -> Catalog | None:
        with self._lock:
            if self._catalog is None and self.url is not None:
                catalog = Catalog.open(self.url, self.clock, store_id=self.store_id, read_only=self.read_only)
                try:
                    # An empty one is new or lost, so the log has more.
                    if not self.read_only and not catalog.computations():
                        rebuild_catalog(catalog, self.log)
                except BaseException:
                    catalog.close()
                    raise
                self._catalog = catalog
            return self._catalog

    def of_readers(self, resources: ExitStack) -> Catalog | None:
        """Return a catalog that takes pins, also of a store opened read-only; ``None`` if it cannot be written."""
        try:
            opened = self.open()
            if not self.read_only or self.url is None:
                return opened
            writable = Catalog.open(self.url, self.clock, store_id=self.store_id)
        except MillpondError as error:
            _LOG.info("no version is pinned for this reader: %s", error)
            return None
        return resources.enter_context(writable)

    def close(self) -> None:
        with self._lock:
            if self._catalog is not None:
                self._catalog.close()
                self._catalog = None


@dataclass(frozen=True, slots=True)
class _Read:
    """A store's marks, and the table as it was read after them and after ``at_us``; ``None`` without a table."""

    marks: Sequence[str]
    snapshot: Snapshot | None
    at_us: int

    @staticmethod
    def of(objects: Objects, marks: Objects | None, clock: Clock) -> _Read:
        # Marks are listed before the table is read, so that a live writer does not look like a rollback.
        listed = () if marks is None else list_marks(marks)
        at_us = clock.monotonic_us()
        return _Read(listed, load_existing(Log(objects), near=version_marked(listed)), at_us)


class Store(Closeable):
    """An open store; `Store.open` and `Store.in_memory` make one, its constructor is internal."""

    def __init__(
        self,
        path: str,
        objects: Objects,
        *,
        storage_options: Mapping[str, str],
        clock: Clock,
        rng: Rng,
        leases: LeaseFactory | None,
        catalog_url: str | None,
        resources: ExitStack,
        row_format: RowFormat = PARQUET,  # another one only in simulations
        marks: Objects
        | None = None,  # the store's folder; ``None`` neither checks nor keeps its high-water mark
        mark_thread: bool = True,  # otherwise only `keep_mark` writes the mark
        read: _Read | None = None,
    ) -> None:
        self.path = path
        self.objects = objects
        self.row_format = row_format
        self.storage_options: dict[str, str] = dict(storage_options)
        self.log: Log = Log(objects)
        self._clock = clock
        self._rng = rng
        self._resources = resources
        self._lease_factory = leases
        read = read or _Read.of(objects, marks, clock)
        snapshot = load(self.log) if read.snapshot is None else read.snapshot
        check_format(snapshot)
        self.store_id: str = store_id_of(snapshot)
        self._lineage = Lineage.of(self.store_id, snapshot.txns)
        self._known_catalog = KnownCatalog(catalog_url, clock, self.store_id, self.log, leases is None)
        resources.callback(self._known_catalog.close)
        if marks is not None:
            mark = newest_mark(read.marks, [known.id for known in self._lineage.incarnations])
            check_high_water(mark, snapshot, self.log)
        # The table as it was opened, for a reader that looks once; a writer's changes with its commits.
        self.opened: Snapshot | None = snapshot if leases is None else None
        self._leases: Leases | None = None
        self._server: EmbeddedZooKeeper | None = None
        self._revived_us = clock.monotonic_us()
        self._committer: Committer | None = None
        self._mark: StoredMark | None = None
        if leases is not None:
            self._lineage.check_location(path)
            writer_id = rng.token()
            self._leases = connect_leases(leases, snapshot.txns, self._lineage.current.id, writer_id)
            resources.callback(self._leases.close)
            high_water: HighWater = self._leases.high_water
            if marks is not None:
                is_local = local_folder(path) is not None
                self._mark = StoredMark(
                    marks,
                    self._lineage.current.id,
                    threaded=mark_thread,
                    linger_ms=LINGER_MS if is_local else _CLOUD_LINGER_MS,
                    listed=read.marks,
                    kept=1 if is_local else _CLOUD_MARKS,
                )
                resources.callback(self._mark.close)
                high_water = BothHighWaters(high_water, self._mark)
            self._committer = Committer(
                self.log,
                clock,
                rng,
                high_water,
                loaded=snapshot,
                loaded_us=read.at_us,
                writer_id=writer_id,
            )

    @classmethod
    @accepts_old_durations
    def open(
        cls,
        path: str | Path,
        zookeeper: str | None = None,
        catalog: str | None = None,
        *,
        zookeeper_security: ZooKeeperSecurity | None = None,
        storage_options: Mapping[str, str] | None = None,
        session_timeout: str | timedelta = "10s",
        create: bool = True,
        read_only: bool = False,
        check_mark: bool = True,
        durability: Durability | None = None,
        adopt: Adoption | None = None,
        leases: LeaseFactory | None = None,
        clock: Clock | None = None,
        rng: Rng | None = None,
    ) -> Self:
        """Open a store, and create a missing one.

        Args:
            path: a local folder, or the URL of a folder in an object store.
            zookeeper: ``host:port,…`` of an ensemble, by default the environment's ``MILLPOND_ZOOKEEPER``; without
                either, one small server is shared among the processes of this machine, with its data inside the
                store's folder. A store that an ensemble serves is written to with that ensemble only.
            catalog: SQLAlchemy URL of the catalog; ``None`` keeps SQLite in the store's folder.
            zookeeper_security: TLS and credentials for the ensemble; by default from the environment
                (`ZooKeeperSecurity.from_environment`).
            storage_options: credentials and endpoints of an object store under the names that ``deltalake``
                uses; missing values come from the environment (``AWS_…`` and so on).
            session_timeout: after which ZooKeeper ends the session of a silent process.
            create: create a missing store.
            read_only: only read; needs no ZooKeeper and no lease. The log is compared with the high-water mark
                in the store's folder, and with ZooKeeper's if an ensemble is given or the store's own server is running.
            check_mark: with ``read_only``, whether to make that comparison; without it a store that
                was rolled back opens.
            durability: the failures that a commit to a local folder survives. ``"os_cache"``, the **default**:
                the end of any process, **but not a power cut**, which reverts the commits acknowledged in the
                last half minute or so; the store is then refused until it is repaired. ``"disk"``: also a power
                cut, because files, commit and folders are synced before a commit is acknowledged, which takes
                two syncs of the disk a commit. An object store needs no choice: its acknowledgements are durable.
            adopt: what happened to a store whose location changed: ``moved``, there is no other copy;
                ``copy``, its original stays in use; ``restored``, an older copy that replaces a lost store.
                See `millpond.statestore.history.lineage`.
            leases: creates this writer's leases instead of ZooKeeper; for tests and simulation.
            clock: the source of time.
            rng: the source of names.

        Raises:
            InvalidError: the path is a file, a folder without a store, or a store of a newer version; the
                store's location changed and ``adopt`` is not given; the durability is unknown; another ensemble
                serves the store;
                or ZooKeeper refuses the credentials.
            DataError: the log is damaged, another engine changed its data, or it ends before the last
                acknowledged commit.
            ConflictError: the store is being adopted while one of its pipelines runs, or an ensemble is given
                while a process uses the store's own server.
            UnavailableError: ZooKeeper or the object store does not answer, or there is no Java.

        Example::

            with Store.open("pond") as store:
                print(store.rows_view("window_counter").to_arrow())
        """
        check_flags(create=create, read_only=read_only, check_mark=check_mark)
        check_instance("storage_options", storage_options, Mapping, optional=True)
        clock, rng = clock or SystemClock(), rng or SystemRng()
        local = local_folder(path)
        options = dict(storage_options or {})
        session_ms = int(duration_ms("session_timeout", session_timeout))
        zookeeper = zookeeper or (None if read_only or leases else hosts_in_environment())
        security = security_of(zookeeper, zookeeper_security)
        check_location(local, path, create=create and not read_only)
        root = place_of(path)
        if adopt is not None and read_only:
            raise InvalidError(
                "cannot adopt a store that is opened read-only: open it without read_only=True", adopt=adopt
            )
        if local is not None and create and not read_only:
            # The store is for this user alone, unless its folder was made for others beforehand.
            with suppress(OSError):  # reported below, with its cause
                local.mkdir(mode=0o700, parents=True, exist_ok=True)
        resources = ExitStack()
        if not read_only and leases is None:
            leases = ZooKeeperService.at(root, zookeeper, security, clock, rng, resources, session_ms)
        objects = open_objects(root, options, folder=ROWS_FOLDER, durability=durability)
        marks = open_objects(root, options) if check_mark or not read_only else None
        read = _Read.of(objects, marks, clock)
        if read.snapshot is None:
            if read_only or not create:
                raise InvalidError(NO_STORE, path=root)
            # A conflict means that another process created it at the same moment: its table is as good as ours.
            with suppress(ConflictError):
                create_rows_table(Log(objects), clock, rng, location=root)
            read = _Read.of(objects, marks, clock)
        with resources:
            if adopt is not None and leases is not None:
                adopt_store(Log(objects), root, adopt, leases, clock, rng, marks=marks)
                read = _Read.of(objects, marks, clock)
            store = cls(
                root,
                objects,
                storage_options=options,
                clock=clock,
                rng=rng,
                leases=None if read_only else leases,
                catalog_url=catalog or (None if local is None else default_catalog_url(str(local))),
                resources=resources,
                marks=marks,
                read=read,
            )
            if read_only and check_mark:
                store._check_mark(zookeeper, security)
            store._resources = resources.pop_all()
            if isinstance(leases, ZooKeeperService) and not leases.hosts:
                store._server = leases.own
            return store

    @classmethod
    def in_memory(
        cls,
        *,
        objects: Objects | None = None,
        registry: MemoryRegistry | None = None,
        clock: Clock | None = None,
        rng: Rng | None = None,
        row_format: RowFormat = PARQUET,
    ) -> Self:
        """Open a store in this process's memory, with the same commit code: for tests and simulation.

        Pass the same ``objects``, the "disk", to open the same store again; ``registry`` is the shared
        "ZooKeeper".
        """
        own_clock, own_rng = clock or SystemClock(), rng or SystemRng()
        shared = registry or MemoryRegistry()
        disk = objects or MemoryObjects()
        if Log(disk).latest_version() is None:
            create_rows_table(Log(disk), own_clock, own_rng)
        return cls(
            disk.url,
            disk,
            storage_options={},
            clock=own_clock,
            rng=own_rng,
            leases=lambda _, writer_id: MemoryLeases(shared, own_clock, writer_id=writer_id),
            catalog_url=None,
            resources=ExitStack(),
            row_format=row_format,
        )

    def _check_mark(self, zookeeper: str | None, security: ZooKeeperSecurity) -> None:
        """Compare with ZooKeeper's mark; a given ensemble must answer, the store's own server only if it runs."""
        hosts = zookeeper or local_server(self.path)
        if hosts is None:
            return
        try:
            known = security if zookeeper is not None else local_security(self.path)
            mark = ask_for_mark(hosts, self._lineage.current.id, self._clock, known)
        except (UnavailableError, InvalidError) as error:
            # InvalidError: the server has a new secret since it was read, or belongs to another user.
            if zookeeper is not None:
                raise
            _LOG.info("the high-water mark of ZooKeeper is not checked: %s", error)
        else:
            check_high_water(mark, self.snapshot(), self.log)

    @property
    def lineage(self) -> Lineage:
        """The store's incarnation, its ancestors, and its location."""
        if self._committer is None:
            return self._lineage
        return Lineage.of(self.store_id, self._committer.snapshot.txns)

    def keep_mark(self) -> None:
        """Write the high-water mark in the store's folder, for stores without a thread that does."""
        if self._mark is not None:
            self._mark.flush()

    @property
    def committer(self) -> Committer:
        """The only way to change the table; `InvalidError` if the store was opened read-only."""
        if self._committer is None:
            raise InvalidError(_READ_ONLY, path=self.path)
        return self._committer

    @property
    def leases(self) -> Leases:
        """The leases of this writer; `InvalidError` if the store was opened read-only."""
        if self._leases is None:
            raise InvalidError(_READ_ONLY, path=self.path)
        return self._leases

    @property
    def durability(self) -> Durability:
        """What commits survive: a power cut (``"disk"``), or only the end of a process (``"os_cache"``)."""
        if isinstance(self.objects, LocalObjects):
            return self.objects.durability
        return "disk" if isinstance(self.objects, ObstoreObjects) else "os_cache"

    def revive_zookeeper(self) -> None:
        """Restart the store's own ZooKeeper if it has died; call this while waiting for the service.

        It does nothing for an ensemble. It tries once a second at most and never raises: a full disk, for
        example, keeps a server from starting until there is room again.
        """
        if self._server is None or self._clock.monotonic_us() - self._revived_us < _REVIVAL_US:
            return
        try:
            self._server.start_or_join()
        except (UnavailableError, OSError) as error:
            _LOG.debug("zookeeper's server does not start: %s", error)
        self._revived_us = self._clock.monotonic_us()

    @property
    def catalog_url(self) -> str | None:
        """SQLAlchemy URL of the catalog, for other processes; ``None`` for stores without a catalog."""
        return self._known_catalog.url

    @property
    def catalog(self) -> Catalog | None:
        """The catalog, opened on first use; ``None`` for stores without a catalog.

        An empty catalog, new or lost, is rebuilt from the log.

        Raises:
            UnavailableError: its database does not answer.
            DataError: its file is damaged.
        """
        return self._known_catalog.open()

    def snapshot(self, version: int | None = None) -> Snapshot:
        """Load the table at its newest version, or at ``version``, from the log.

        Raises:
            InvalidError: ``version`` is no whole number from 0.
            ConflictError: the version has been collected.
            DataError: there is no such version, or the log is damaged or does not reach back that far.
        """
        return load(self.log) if version is None else load_version(self.log, version)

    @contextmanager
    def reading(self, version: int | None = None) -> Iterator[Snapshot]:
        """Pin a version (the newest by default), so that garbage collection keeps it readable until the block ends.

        Without a pin, a version stays readable for the retention period after it was replaced. The pin is
        stored in the catalog; a store without a writable catalog sets none.

        Raises:
            ConflictError: the version is being collected.
            DataError: the log is damaged or does not reach back that far.

        Example::

            with store.reading(version=1_200) as snapshot:
                for day in days:
                    print(RowsView.of(snapshot, store.objects, "sales").to_arrow(keys_of(day)))
        """
        with ExitStack() as resources:
            catalog = self._known_catalog.of_readers(resources)
            holder = f"reader-{self._rng.token()}"
            yield pinned_snapshot(self.snapshot, catalog, holder, version, resources)

    def savepoint(self, name: str, version: int | None = None) -> Savepoint:
        """Keep a table version (the newest by default) readable under a name, until `drop_savepoint`.

        Repeating the call changes nothing.

        Raises:
            InvalidError: the name is taken or empty, there is no such version, or the store was opened read-only.
            ConflictError: the version has been collected.
            OutcomeUnknownError: the savepoint may or may not exist; repeat the call.

        Example::

            store.savepoint("before the sale")
        """
        kept = None if version is None else TableVersion(version)
        return make_savepoint(self.committer, self.log, name, kept)

    def drop_savepoint(self, name: str) -> None:
        """Drop a savepoint: gc may remove its version from now on; `InvalidError` if none has that name."""
        drop_savepoint(self.committer, name)

    def savepoints(self) -> tuple[Savepoint, ...]:
        """Return the open savepoints, oldest version first."""
        return open_savepoints(self.snapshot().txns)

    def load(
        self,
        computation: str,
        rows: LoadSource,
        *,
        codec: Codec | None = None,
        state_version: int = 0,
        intervals: int | None = None,
        told: LoadProgress = lambda *_: None,
        beginning: LoadBeginning | None = None,
    ) -> Loaded:
        """Load the initial rows of a computation, states and timers, from a table in one commit.

        Args:
            computation: its name, which need not be known to the store yet.
            rows: a table (Arrow, pandas, Polars, Spark), a reader of record batches, the path of a file (Parquet, CSV,
                JSON), or mappings. Columns: ``key``; ``state``, as values or as text that the codec has
                written, or ``state_bytes``; and ``timers``, a list of structs.
            codec: the computation's; JSON by default.
            state_version: the version of the code that wrote the states, where no column ``state_version`` gives it.
            intervals: the number of key intervals; the option ``intervals`` of the computation.
            told: called with ``"read"`` or ``"write"``, the number of rows so far, and the total if it is known.
            beginning: further positions of the same commit, such as the start of each input.

        Raises:
            InvalidError: the computation has rows, or the table's columns or values do not fit; nothing was written.
            ConflictError: a pipeline that has the computation runs, or the store is being repaired.
            FencedError: a pipeline took the computation over meanwhile; nothing was added.
            OutcomeUnknownError: the rows may or may not have been added; look at the store.

        Example::

            store.load("counts", [{"key": "EWR", "state": 7, "timers": [{"at": noon, "tag": "flush"}]}])
        """
        load = Load(
            committer=self.committer,
            leases=self._lease_factory,
            objects=self.objects,
            rng=self._rng,
            row_format=self.row_format,
            lineage=self.lineage,
            path=self.path,
            computation=computation,
            codec=codec or JsonCodec(),
            state_version=state_version,
            intervals=intervals,
            on_progress=told,
            beginning=beginning,
        )
        return load.run(rows)

    def rows_view(self, computation: str, version: int | None = None) -> RowsView:
        """Return a view of exactly one row per key of a computation, at the newest or an older table version.

        A computation without rows yet has an empty view; a name that no pipeline declared, and that looks like the
        misspelling of another, is refused.
        """
        check_instance("computation", computation, str)
        snapshot = self.snapshot(version)
        # Earlier versions of Millpond did not record the computations that have never run.
        declared = recorded_names(snapshot.txns, AppId.FINGERPRINT)
        known = declared.union(computations_of(snapshot))
        if declared and computation not in known and (hint := did_you_mean(computation, known)):
            raise InvalidError(
                f"the store has no such computation{hint}",
                computation=computation,
                computations=sorted(known),
            )
        return RowsView.of(snapshot, self.objects, computation)

    def sql(self, version: int | None = None, *, allow_files: bool = False) -> duckdb.DuckDBPyConnection:
        """Open a DuckDB connection with one view per computation, named after it, at one table version.

        Queries reach only these views and tables that you register with the connection, so that they may come from
        somebody else.

        Args:
            version: a table version, by default the newest.
            allow_files: let queries also read and write files, attach databases, load extensions, name variables of
                Python and change settings.

        Example::

            store.sql().sql("select key, state ->> 'count' from window_counter")
        """
        check_flags(allow_files=allow_files)
        return connect(self.snapshot(version), self.objects, allow_files=allow_files)

    def close(self) -> None:
        """Release leases, close connections, and stop the embedded server if no other process uses it."""
        self._resources.close()
