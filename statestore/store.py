"""
The store: one folder for all of a pipeline's durable state (architecture §2).

::

    pond/rows/              the Delta table; its log is the only source of truth
    pond/catalog.sqlite     an index for people and tools; can be rebuilt from the log
    pond/zookeeper/         the embedded server's data, unless an ensemble is given
    pond/checkpoints/       Spark's streaming checkpoints

Opening for writing connects to ZooKeeper and compares the log with the high-water mark
there, so a log that was cut or rolled back is refused instead of read as older data.
Opening ``read_only`` starts no server and takes no lease; it makes the same comparison if a ZooKeeper is
given or the store's own server is running, and skips it otherwise.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self, TypeAlias

from millpond.statestore.catalog.catalog import Catalog, default_catalog_url
from millpond.statestore.catalog.reading import Reading
from millpond.statestore.catalog.rebuild import logged_commits
from millpond.statestore.closeable import Closeable
from millpond.statestore.commit.committer import Committer
from millpond.statestore.errors import ConflictError, InvalidError, MillpondError, UnavailableError
from millpond.statestore.leases.lease import Leases
from millpond.statestore.leases.memory import MemoryLeases, MemoryRegistry
from millpond.statestore.log.high_water import check_high_water
from millpond.statestore.log.log import Log
from millpond.statestore.log.snapshot import Snapshot, load
from millpond.statestore.log.table import check_format, create_rows_table, store_id_of
from millpond.statestore.objects.local import LocalObjects
from millpond.statestore.objects.memory import MemoryObjects
from millpond.statestore.objects.obstore import ObstoreObjects, open_objects
from millpond.statestore.rows.files import PARQUET
from millpond.statestore.rows.row_format import RowFormat
from millpond.statestore.system import SystemClock, SystemRng
from millpond.statestore.types import Clock, Durability, Objects, Rng, TableVersion
from millpond.statestore.view import RowsView, connect
from millpond.statestore.zookeeper.lease import SESSION_TIMEOUT_MS, ZooKeeperLeases
from millpond.statestore.zookeeper.mark import ask_for_mark, server_beside
from millpond.statestore.zookeeper.server import EmbeddedZooKeeper

if TYPE_CHECKING:
    import duckdb

__all__ = ["LeaseFactory", "Store", "place_of"]

_ROWS: Final = "rows"
_REBUILT_COMMITS_MAX: Final = 1_000
_REVIVAL_US: Final = 1_000_000
_PIN_TRIES: Final = 5
_LOG = logging.getLogger("millpond")

LeaseFactory: TypeAlias = Callable[[str, str], Leases]
"""Makes the leases of one writer, given the store's id and the writer's id."""


class Store(Closeable):
    """
    An open store; made by `open` and `in_memory`, never directly.

    Args:
        path: the store's location.
        objects: the root of its table.
        storage_options: how other processes open that root.
        clock: the source of time.
        rng: the source of names.
        leases: makes the leases of this writer, given the store's id and the writer's id;
            ``None`` for a store that is opened read-only.
        catalog_url: SQLAlchemy URL of the catalog; ``None`` for a store without one.
        resources: closed with the store.
        row_format: how row files are encoded; Parquet except in simulations.
    """

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
        row_format: RowFormat = PARQUET,
    ) -> None:
        self.path = path
        self.objects = objects
        self.row_format = row_format
        self.storage_options: dict[str, str] = dict(storage_options)
        self.log: Log = Log(objects)
        self._clock = clock
        self._rng = rng
        self._resources = resources
        self._catalog_url = catalog_url
        self._catalog: Catalog | None = None
        self._catalog_lock = threading.Lock()
        self._read_only = leases is None
        snapshot = load(self.log)
        check_format(snapshot)
        self.store_id: str = store_id_of(snapshot)
        self._leases: Leases | None = None
        self._server: EmbeddedZooKeeper | None = None
        self._revived_us = clock.monotonic_us()
        self._committer: Committer | None = None
        if leases is not None:
            writer_id = rng.token()
            self._leases = leases(self.store_id, writer_id)
            resources.callback(self._leases.close)
            self._committer = Committer(self.log, clock, rng, self._leases.high_water, writer_id=writer_id)

    @classmethod
    def open(
        cls,
        path: str | Path,
        zookeeper: str | None = None,
        catalog: str | None = None,
        *,
        storage_options: Mapping[str, str] | None = None,
        session_timeout_ms: int = SESSION_TIMEOUT_MS,
        create: bool = True,
        read_only: bool = False,
        check_mark: bool = True,
        durability: Durability | None = None,
        leases: LeaseFactory | None = None,
        clock: Clock | None = None,
        rng: Rng | None = None,
    ) -> Self:
        """
        Open a store, creating it if there is none.

        Args:
            path: a local folder, or the URL of a folder in an object store.
            zookeeper: ``host:port,…`` of an ensemble; ``None`` shares one small server among
                the processes of this machine, with its data inside the store's folder.
            catalog: SQLAlchemy URL of the catalog; ``None`` keeps SQLite in the store's folder.
            storage_options: credentials and endpoints of an object store under the names that ``deltalake``
                uses; missing values come from the environment (``AWS_…`` and so on).
            session_timeout_ms: how long ZooKeeper keeps the session of a silent process.
            create: whether to create a store where there is none.
            read_only: only read; needs no ZooKeeper and no lease. If a ZooKeeper is given, or the store's own
                server is running, the log is compared with its high-water mark.
            check_mark: with ``read_only``, whether to make that comparison; without it a store that
                was rolled back opens.
            durability: what this process's commits to a local folder survive. ``"os_cache"``, the **default**:
                the end of any process, **but not a power cut**, which takes back what was acknowledged in the
                last half minute or so; the store is refused then until it is repaired. ``"disk"``: a power cut
                too, because files, commit and folders are synced before a commit is acknowledged, which takes
                two syncs of the disk a commit. An object store needs no choice: what it acknowledges is durable.
            leases: makes this writer's leases instead of ZooKeeper; for tests and simulation.
            clock: the source of time.
            rng: the source of names.

        Raises:
            InvalidError: the path is a file, a folder that is not a store, or a store of a newer version; or
                there is no such durability.
            DataError: the log is damaged, or ends before the last acknowledged commit.
            UnavailableError: ZooKeeper or the object store does not answer, or there is no Java.

        Example::

            with Store.open("pond") as store:
                print(store.rows_view("window_counter").to_arrow())
        """
        clock, rng = clock or SystemClock(), rng or SystemRng()
        local = _local_folder(path)
        options = dict(storage_options or {})
        _check_location(local, path, create=create and not read_only)
        root = place_of(path)
        if local is None and not (read_only or leases or zookeeper):
            raise InvalidError(
                "a store in an object store is shared between machines and needs a ZooKeeper ensemble: "
                "pass zookeeper='host:port,…'",
                path=root,
            )
        objects = open_objects(f"{root}/{_ROWS}", options, durability=durability)
        if Log(objects).latest_version() is None:
            _create(objects, root, clock, rng, create=create and not read_only)
        server: EmbeddedZooKeeper | None = None
        with ExitStack() as resources:
            if not read_only and leases is None:
                if zookeeper is None:
                    server = EmbeddedZooKeeper(Path(root) / "zookeeper", clock, rng)
                leases = _zookeeper_leases(zookeeper, server, clock, session_timeout_ms, resources)
            store = cls(
                root,
                objects,
                storage_options=options,
                clock=clock,
                rng=rng,
                leases=None if read_only else leases,
                catalog_url=catalog or _catalog_url(local),
                resources=resources,
            )
            if read_only and check_mark:
                store._refuse_rollback(zookeeper)
            store._resources = resources.pop_all()
            store._server = server
            return store

    def _refuse_rollback(self, zookeeper: str | None) -> None:
        """
        Compare the log with the high-water mark, if a ZooKeeper can be reached.
        """
        hosts = zookeeper or server_beside(self.path)
        if hosts is None:
            return
        try:
            mark = ask_for_mark(hosts, self.store_id, self._clock)
        except UnavailableError as error:
            if zookeeper is not None:
                raise
            _LOG.info("the high-water mark is not checked: %s", error)
            return
        check_high_water(mark, self.snapshot(), self.log)

    @classmethod
    def in_memory(
        cls,
        *,
        objects: Objects | None = None,
        registry: MemoryRegistry | None = None,
        clock: Clock | None = None,
        rng: Rng | None = None,
    ) -> Self:
        """
        A store in this process's memory, with the same commit code: for tests and simulation.

        Args:
            objects: the shared "disk"; pass the same object to open the same store again.
            registry: the shared "ZooKeeper".
            clock: the source of time.
            rng: the source of names.
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
        )

    @property
    def committer(self) -> Committer:
        """
        The only way to change the table.

        Raises:
            InvalidError: the store was opened read-only.
        """
        if self._committer is None:
            raise InvalidError("the store was opened read-only", path=self.path)
        return self._committer

    @property
    def leases(self) -> Leases:
        """
        The leases of this writer.

        Raises:
            InvalidError: the store was opened read-only.
        """
        if self._leases is None:
            raise InvalidError("the store was opened read-only", path=self.path)
        return self._leases

    @property
    def durability(self) -> Durability:
        """
        What commits survive: a power cut (``"disk"``), or only the end of a process (``"os_cache"``).
        """
        if isinstance(self.objects, LocalObjects):
            return self.objects.durability
        return "disk" if isinstance(self.objects, ObstoreObjects) else "os_cache"

    def revive_zookeeper(self) -> None:
        """
        Restart the store's own ZooKeeper if it has died; call it while waiting for the service.

        It does nothing for an ensemble. It tries once a second at most and never raises:
        a full disk, for example, keeps a server from starting until there is room again.
        """
        now_us = self._clock.monotonic_us()
        if self._server is None or now_us - self._revived_us < _REVIVAL_US:
            return
        try:
            self._server.start_or_join()
        except (UnavailableError, OSError) as error:
            _LOG.debug("zookeeper's server does not start: %s", error)
        self._revived_us = self._clock.monotonic_us()

    @property
    def catalog_url(self) -> str | None:
        """
        SQLAlchemy URL of the catalog, for other processes; ``None`` for stores without a catalog.
        """
        return self._catalog_url

    @property
    def catalog(self) -> Catalog | None:
        """
        The catalog, opened on first use; ``None`` for stores without a catalog.

        An empty catalog, new or lost, is rebuilt from the log.

        Raises:
            UnavailableError: its database does not answer.
            DataError: its file is damaged.
        """
        with self._catalog_lock:
            if self._catalog is None and self._catalog_url is not None:
                self._catalog = self._open_catalog(self._catalog_url)
            return self._catalog

    def _open_catalog(self, url: str) -> Catalog:
        catalog = Catalog.open(url, self._clock, store_id=self.store_id, read_only=self._read_only)
        self._resources.callback(catalog.close)
        if not self._read_only and not catalog.supersteps(limit=1):
            snapshot = self.snapshot()
            if snapshot.version > 0:
                catalog.rebuild(snapshot, logged_commits(self.log, snapshot.version, _REBUILT_COMMITS_MAX))
        return catalog

    def snapshot(self, version: int | None = None) -> Snapshot:
        """
        The table now, or at ``version``; loaded from the log on every call.

        Raises:
            DataError: the log is damaged or does not reach back that far.
        """
        return load(self.log, None if version is None else TableVersion(version))

    @contextmanager
    def reading(self, version: int | None = None) -> Iterator[Snapshot]:
        """
        The table now or at ``version``, pinned: garbage collection keeps it readable until the block ends.

        Without a pin, a version stays readable for the retention period after it was replaced. The pin
        is stored in the catalog; a store without a catalog, or with one that cannot be written, sets none.

        Raises:
            ConflictError: the version is being collected.
            DataError: the log is damaged or does not reach back that far.

        Example::

            with store.reading(version=1_200) as snapshot:
                for day in days:
                    print(RowsView.of(snapshot, store.objects, "sales").to_arrow(keys_of(day)))
        """
        with ExitStack() as resources:
            catalog = self._catalog_of_readers(resources)
            holder = f"reader-{self._rng.token()}"
            yield self._pinned_snapshot(catalog, holder, version, resources)

    def _pinned_snapshot(
        self, catalog: Catalog | None, holder: str, version: int | None, resources: ExitStack
    ) -> Snapshot:
        for _ in range(_PIN_TRIES - 1):
            snapshot = self.snapshot(version)
            try:
                if catalog is not None:
                    resources.enter_context(Reading(catalog, holder, snapshot.version))
            except ConflictError:
                # The version was the newest when it was loaded but is being collected now: load a newer one.
                if version is not None:
                    raise
                continue
            except MillpondError as error:
                # A read-only disk, for example: reading must still work, for as long as the retention lasts.
                _LOG.info("no version is pinned for this reader: %s", error)
            return snapshot
        raise ConflictError("versions are collected faster than they are read", store=self.path)

    def _catalog_of_readers(self, resources: ExitStack) -> Catalog | None:
        try:
            if not self._read_only or self.catalog is None or self._catalog_url is None:
                return self.catalog
            writable = Catalog.open(self._catalog_url, self._clock, store_id=self.store_id)
        except MillpondError as error:
            _LOG.info("no version is pinned for this reader: %s", error)
            return None
        return resources.enter_context(writable)

    def rows_view(self, computation: str, version: int | None = None) -> RowsView:
        """
        Exactly one row per key of a computation, now or at an older table version.
        """
        return RowsView.of(self.snapshot(version), self.objects, computation)

    def sql(self, version: int | None = None) -> duckdb.DuckDBPyConnection:
        """
        A DuckDB connection with one view per computation, named after it, at one table version.

        Example::

            store.sql().sql("select key, state ->> 'count' from window_counter")
        """
        return connect(self.snapshot(version), self.objects)

    def close(self) -> None:
        """
        Release leases, close connections, and stop the embedded server if no other process uses it.
        """
        self._resources.close()


def place_of(path: str | Path) -> str:
    """
    A store's location, the same for every process: an absolute path, or a URL without a trailing slash.

    Example:
        >>> place_of("s3://bucket/pond/")
        's3://bucket/pond'
    """
    local = _local_folder(path)
    return str(path).rstrip("/") if local is None else str(local)


def _local_folder(path: str | Path) -> Path | None:
    text = str(path)
    if text.startswith("file://"):
        return Path(text.removeprefix("file://")).resolve()
    return None if "://" in text else Path(path).resolve()


def _check_location(local: Path | None, path: str | Path, *, create: bool) -> None:
    if local is None:
        return
    if local.exists() and not local.is_dir():
        raise InvalidError("a store is a folder, and there is a file at its path", path=path)
    blocking = next((parent for parent in local.parents if parent.is_file()), None)
    if blocking is not None:
        raise InvalidError(
            "a store is a folder, and there is a file on the way to it", path=path, file=blocking
        )
    if (local / _ROWS / "_delta_log").is_dir():
        return
    # A process that was killed while creating the store leaves an empty `rows`.
    if local.is_dir() and any(entry.name != _ROWS or any(entry.iterdir()) for entry in local.iterdir()):
        raise InvalidError("the folder is not empty and is not a Millpond store", path=path)
    if not create:
        raise InvalidError("there is no store at this path", path=path)


def _create(objects: Objects, root: str, clock: Clock, rng: Rng, *, create: bool) -> None:
    if not create:
        raise InvalidError("there is no store at this path", path=root)
    try:
        create_rows_table(Log(objects), clock, rng)
    except ConflictError:
        # Another process created it at the same moment: its table is as good as ours.
        return


def _zookeeper_leases(
    zookeeper: str | None,
    server: EmbeddedZooKeeper | None,
    clock: Clock,
    session_timeout_ms: int,
    resources: ExitStack,
) -> LeaseFactory:
    def connect(store_id: str, writer_id: str) -> Leases:
        # The server starts only here, so a store that is refused starts none.
        hosts = zookeeper or ""
        if server is not None:
            hosts = server.start_or_join()
            resources.callback(server.close)
        return ZooKeeperLeases(hosts, store_id, writer_id, clock, session_timeout_ms=session_timeout_ms)

    return connect


def _catalog_url(local: Path | None) -> str | None:
    return None if local is None else default_catalog_url(str(local))
