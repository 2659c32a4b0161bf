"""The store: one folder for all of a pipeline's durable state (architecture §2).

::

    pond/rows/              the Delta table; its log is the only source of truth
    pond/catalog.sqlite     an index for people and tools; can be rebuilt from the log
    pond/zookeeper/         the embedded server's data, unless an ensemble is given
    pond/checkpoints/       Spark's streaming checkpoints
    pond/high_water/        the newest version that the table has reached, for readers without a ZooKeeper

Opening for writing connects to ZooKeeper and compares the log with the high-water mark
there, so a log that was cut or rolled back is refused instead of read as older data.
Opening ``read_only`` starts no server and takes no lease; it makes the same comparison with the mark in the
store's folder, and with ZooKeeper's if one is given or the store's own server is running.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self, TypeAlias

from millpond.statestore.catalog.catalog import Catalog, pinned_snapshot
from millpond.statestore.catalog.engine import default_catalog_url
from millpond.statestore.errors import InvalidError
from millpond.statestore.history.lineage import (
    ROWS_FOLDER,
    Adoption,
    Lineage,
    adopt_store,
    check_location,
    local_folder,
    place_of,
)
from millpond.statestore.history.savepoint import Savepoint, drop_savepoint, make_savepoint, open_savepoints
from millpond.statestore.leases.lease import Leases
from millpond.statestore.leases.memory import MemoryLeases, MemoryRegistry
from millpond.statestore.leases.zookeeper_client import ZooKeeperSecurity, security_of
from millpond.statestore.leases.zookeeper_lease import SESSION_TIMEOUT_MS
from millpond.statestore.leases.zookeeper_server import EmbeddedZooKeeper
from millpond.statestore.loading.load import (
    LoadBeginning,
    Loaded,
    LoadedForm,
    LoadProgress,
    LoadTarget,
    load_rows,
)
from millpond.statestore.loading.source import LoadSource
from millpond.statestore.log.committer import Committer
from millpond.statestore.log.high_water import (
    BothHighWaters,
    HighWater,
    StoredMark,
    check_high_water,
    list_marks,
    newest_mark,
)
from millpond.statestore.log.log import Log
from millpond.statestore.log.snapshot import Snapshot, load
from millpond.statestore.log.table import check_format, create_rows_table, store_id_of
from millpond.statestore.objects.local import LocalObjects
from millpond.statestore.objects.memory import MemoryObjects
from millpond.statestore.objects.obstore import ObstoreObjects, open_objects
from millpond.statestore.opening import (
    KnownCatalog,
    OwnServer,
    check_options,
    create_store,
    mark_to_read,
    stored_mark,
    zookeeper_leases,
)
from millpond.statestore.rows.codec import Codec, JsonCodec
from millpond.statestore.rows.files import PARQUET
from millpond.statestore.rows.row_format import RowFormat
from millpond.statestore.system import SystemClock, SystemRng
from millpond.statestore.types import Clock, Closeable, Durability, Objects, Rng, TableVersion
from millpond.statestore.view import RowsView, connect

if TYPE_CHECKING:
    import duckdb

_READ_ONLY: Final = "the store was opened read-only: open it without read_only=True to write"

LeaseFactory: TypeAlias = Callable[[str, str], Leases]
"""Makes the leases of one writer, given the store's id and the writer's id."""


class Store(Closeable):
    """An open store; made by `open` and `in_memory`, never directly.

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
        marks: the store's folder, in which its high-water mark lies; ``None`` to neither check nor keep it there.
        mark_thread: whether a thread writes that mark; if not, only `keep_mark` does.

    Raises:
        DataError: the log is damaged, or ends before a high-water mark.
        InvalidError: the store lies elsewhere than it did, and is opened to be written to.
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
        marks: Objects | None = None,
        mark_thread: bool = True,
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
        # Listed before the table is read, so that a live writer does not look like a rollback.
        listed = () if marks is None else list_marks(marks)
        snapshot = load(self.log)
        check_format(snapshot)
        self.store_id: str = store_id_of(snapshot)
        self._lineage = Lineage.of(self.store_id, snapshot.txns)
        self._known_catalog = KnownCatalog(
            catalog_url, clock, self.store_id, self.log, resources, read_only=leases is None
        )
        if marks is not None:
            mark = newest_mark(listed, [known.id for known in self._lineage.incarnations])
            check_high_water(mark, snapshot, self.log)
        self._leases: Leases | None = None
        self._server: OwnServer | None = None
        self._committer: Committer | None = None
        self._mark: StoredMark | None = None
        if leases is not None:
            self._lineage.check_location(path)
            writer_id = rng.token()
            self._leases = leases(self._lineage.current.id, writer_id)
            resources.callback(self._leases.close)
            high_water: HighWater = self._leases.high_water
            if marks is not None:
                self._mark = stored_mark(marks, self._lineage, path, threaded=mark_thread)
                resources.callback(self._mark.close)
                high_water = BothHighWaters(high_water, self._mark)
            self._committer = Committer(
                self.log, clock, rng, high_water, loaded=snapshot, writer_id=writer_id
            )

    @classmethod
    def open(
        cls,
        path: str | Path,
        zookeeper: str | None = None,
        catalog: str | None = None,
        *,
        zookeeper_security: ZooKeeperSecurity | None = None,
        storage_options: Mapping[str, str] | None = None,
        session_timeout_ms: int = SESSION_TIMEOUT_MS,
        create: bool = True,
        read_only: bool = False,
        check_mark: bool = True,
        durability: Durability | None = None,
        adopt: Adoption | None = None,
        leases: LeaseFactory | None = None,
        clock: Clock | None = None,
        rng: Rng | None = None,
    ) -> Self:
        """Open a store, creating it if there is none.

        Args:
            path: a local folder, or the URL of a folder in an object store.
            zookeeper: ``host:port,…`` of an ensemble; ``None`` shares one small server among
                the processes of this machine, with its data inside the store's folder.
            catalog: SQLAlchemy URL of the catalog; ``None`` keeps SQLite in the store's folder.
            zookeeper_security: TLS and credentials for the ensemble; by default what the environment says
                (`ZooKeeperSecurity.from_environment`).
            storage_options: credentials and endpoints of an object store under the names that ``deltalake``
                uses; missing values come from the environment (``AWS_…`` and so on).
            session_timeout_ms: how long ZooKeeper keeps the session of a silent process.
            create: whether to create a store where there is none.
            read_only: only read; needs no ZooKeeper and no lease. The log is compared with the high-water mark
                in the store's folder, and, if a ZooKeeper is given or the store's own server is running, with
                the one there.
            check_mark: with ``read_only``, whether to make that comparison; without it a store that
                was rolled back opens.
            durability: what this process's commits to a local folder survive. ``"os_cache"``, the **default**:
                the end of any process, **but not a power cut**, which takes back what was acknowledged in the
                last half minute or so; the store is refused then until it is repaired. ``"disk"``: a power cut
                too, because files, commit and folders are synced before a commit is acknowledged, which takes
                two syncs of the disk a commit. An object store needs no choice: what it acknowledges is durable.
            adopt: what this store is, where it is not what it was: ``moved``, it lies elsewhere and there is no
                other; ``copy``, its original goes on, and this one goes its own way; ``restored``, it is
                an older copy that takes the place of what was lost. See `millpond.statestore.history.lineage`.
            leases: makes this writer's leases instead of ZooKeeper; for tests and simulation.
            clock: the source of time.
            rng: the source of names.

        Raises:
            InvalidError: the path is a file, a folder that is not a store, or a store of a newer version; or the
                store lies elsewhere than it did, and ``adopt`` does not say what it is; or there is no such durability;
                or ZooKeeper refuses the credentials.
            DataError: the log is damaged, another engine changed its data, or it ends before the last
                acknowledged commit.
            ConflictError: the store is being adopted while a pipeline of it runs.
            UnavailableError: ZooKeeper or the object store does not answer, or there is no Java.

        Example::

            with Store.open("pond") as store:
                print(store.rows_view("window_counter").to_arrow())
        """
        clock, rng = clock or SystemClock(), rng or SystemRng()
        local = local_folder(path)
        options = dict(storage_options or {})
        security = security_of(zookeeper, zookeeper_security)
        check_location(local, path, create=create and not read_only)
        root = place_of(path)
        check_options(local, root, zookeeper, leases, adopt, read_only=read_only)
        objects = open_objects(f"{root}/{ROWS_FOLDER}", options, durability=durability)
        if Log(objects).latest_version() is None:
            create_store(objects, root, clock, rng, create=create and not read_only)
        marks = open_objects(root, options) if check_mark or not read_only else None
        server: EmbeddedZooKeeper | None = None
        with ExitStack() as resources:
            if not read_only and leases is None:
                if zookeeper is None:
                    server = EmbeddedZooKeeper(Path(root) / "zookeeper", clock, rng)
                leases = zookeeper_leases(zookeeper, security, server, clock, session_timeout_ms, resources)
            if adopt is not None and leases is not None:
                adopt_store(Log(objects), root, adopt, leases, clock, rng, marks=marks)
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
            )
            if read_only and check_mark:
                mark = mark_to_read(zookeeper, root, store._lineage.current.id, clock, security)
                check_high_water(mark, store.snapshot(), store.log)
            store._resources = resources.pop_all()
            store._server = None if server is None else OwnServer(server, clock)
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
        """A store in this process's memory, with the same commit code: for tests and simulation.

        Args:
            objects: the shared "disk"; pass the same object to open the same store again.
            registry: the shared "ZooKeeper".
            clock: the source of time.
            rng: the source of names.
            row_format: how row files are encoded.
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

    @property
    def lineage(self) -> Lineage:
        """Which incarnation this store is, what it came from, and where it lies."""
        if self._committer is None:
            return self._lineage
        return Lineage.of(self.store_id, self._committer.snapshot.txns)

    def keep_mark(self) -> None:
        """Write the high-water mark that travels with the store, where no thread does.

        Raises:
            UnavailableError: the store is unavailable.
        """
        if self._mark is not None:
            self._mark.flush()

    @property
    def committer(self) -> Committer:
        """The only way to change the table.

        Raises:
            InvalidError: the store was opened read-only.
        """
        if self._committer is None:
            raise InvalidError(_READ_ONLY, path=self.path)
        return self._committer

    @property
    def leases(self) -> Leases:
        """The leases of this writer.

        Raises:
            InvalidError: the store was opened read-only.
        """
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
        """Restart the store's own ZooKeeper if it has died; call it while waiting for the service.

        It does nothing for an ensemble. It tries once a second at most and never raises:
        a full disk, for example, keeps a server from starting until there is room again.
        """
        if self._server is not None:
            self._server.revive()

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
        """The table now, or at ``version``; loaded from the log on every call.

        Raises:
            DataError: the log is damaged or does not reach back that far.
        """
        return load(self.log, None if version is None else TableVersion(version))

    @contextmanager
    def reading(self, version: int | None = None) -> Iterator[Snapshot]:
        """The table now or at ``version``, pinned: garbage collection keeps it readable until the block ends.

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
            catalog = self._known_catalog.of_readers(resources)
            holder = f"reader-{self._rng.token()}"
            yield pinned_snapshot(self.snapshot, catalog, holder, version, resources)

    def savepoint(self, name: str, version: int | None = None) -> Savepoint:
        """Keep a table version readable under a name, until `drop_savepoint`; to make it again changes nothing.

        Args:
            name: a name that no open savepoint has.
            version: the table version; ``None`` for the newest.

        Raises:
            InvalidError: the name is taken or empty, there is no such version, or the store was opened read-only.
            ConflictError: the version has been collected.

        Example::

            store.savepoint("before the sale")
        """
        kept = None if version is None else TableVersion(version)
        return make_savepoint(self.committer, self.log, name, kept)

    def drop_savepoint(self, name: str) -> None:
        """Drop a savepoint: its version may be collected from now on.

        Raises:
            InvalidError: there is no savepoint of that name, or the store was opened read-only.
        """
        drop_savepoint(self.committer, name)

    def savepoints(self) -> tuple[Savepoint, ...]:
        """The open savepoints, oldest version first."""
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
        """Make rows of a table: the states and timers that a computation begins with, in one commit.

        Args:
            computation: its name, which need not be known to the store yet.
            rows: a table (Arrow, pandas, Polars, Spark), a reader of record batches, the path of a file (Parquet, CSV,
                JSON), or mappings. Columns: ``key``; ``state``, a value or in a column of text what the codec has
                written, or ``state_bytes``; and ``timers``, a list of structs as rows have them.
            codec: the computation's; JSON by default.
            state_version: that of the code whose states these are, where no column ``state_version`` says it.
            intervals: into how many intervals its keys are cut; the option ``intervals`` of the computation.
            told: called with ``"read"`` or ``"write"``, the number of rows so far, and that of all if it is known.
            beginning: what else the commit says, such as from where inputs go on.

        Raises:
            InvalidError: the computation has rows, or the table is none of its rows; nothing was written.
            ConflictError: a pipeline that has the computation runs, or the store is being repaired.
            FencedError: a pipeline took the computation meanwhile; nothing was added.
            OutcomeUnknownError: the rows may have been added or not; the store tells.

        Example::

            store.load("counts", [{"key": "EWR", "state": 7, "timers": [{"at": noon, "tag": "flush"}]}])
        """
        form, rng = LoadedForm(codec or JsonCodec(), state_version), self._rng
        writes, at = self._lease_factory, (self.lineage, self.path)
        target = LoadTarget(self.committer, writes, self.objects, rng, self.row_format, *at)
        return load_rows(target, computation, rows, form, intervals, told, beginning)

    def rows_view(self, computation: str, version: int | None = None) -> RowsView:
        """Exactly one row per key of a computation, now or at an older table version."""
        return RowsView.of(self.snapshot(version), self.objects, computation)

    def sql(self, version: int | None = None) -> duckdb.DuckDBPyConnection:
        """A DuckDB connection with one view per computation, named after it, at one table version.

        Example::

            store.sql().sql("select key, state ->> 'count' from window_counter")
        """
        return connect(self.snapshot(version), self.objects)

    def close(self) -> None:
        """Release leases, close connections, and stop the embedded server if no other process uses it."""
        self._resources.close()
