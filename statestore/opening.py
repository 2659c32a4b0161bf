"""What opening a store needs from its surroundings: a table, ZooKeeper's leases, and the mark that it keeps."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from millpond.statestore.catalog.catalog import Catalog
from millpond.statestore.catalog.rebuild import logged_commits
from millpond.statestore.errors import ConflictError, InvalidError, MillpondError, UnavailableError
from millpond.statestore.history.lineage import Lineage, local_folder
from millpond.statestore.leases.lease import Leases
from millpond.statestore.leases.zookeeper_client import ZooKeeperSecurity
from millpond.statestore.leases.zookeeper_high_water import ask_for_mark, local_server
from millpond.statestore.leases.zookeeper_lease import ZooKeeperLeases
from millpond.statestore.leases.zookeeper_server import EmbeddedZooKeeper
from millpond.statestore.log.high_water import LINGER_MS, Mark, StoredMark
from millpond.statestore.log.log import Log
from millpond.statestore.log.snapshot import load
from millpond.statestore.log.table import create_rows_table
from millpond.statestore.types import Clock, Objects, Rng

_REBUILT_COMMITS_MAX: Final = 1_000
_REVIVAL_US: Final = 1_000_000
_CLOUD_LINGER_MS: Final = 1_000
"""Each mark is a request that is paid for."""

_LOG: Final = logging.getLogger("millpond")


def mark_to_read(
    zookeeper: str | None, place: str, incarnation: str, clock: Clock, security: ZooKeeperSecurity
) -> Mark | None:
    """The high-water mark that ZooKeeper keeps; ``None`` where there is none to ask.

    Args:
        zookeeper: ``host:port,…`` of an ensemble, which must answer; ``None`` asks the store's own server, if it runs.
        place: the store's absolute path or URL.
        incarnation: the store's.
        clock: the source of time.
        security: TLS and credentials for the ensemble.

    Raises:
        UnavailableError: the ensemble does not answer.
        InvalidError: it refuses the credentials.
    """
    hosts = zookeeper or local_server(place)
    if hosts is None:
        return None
    try:
        return ask_for_mark(hosts, incarnation, clock, security)
    except UnavailableError as error:
        if zookeeper is not None:
            raise
        _LOG.info("the high-water mark of ZooKeeper is not checked: %s", error)
        return None


def open_catalog(url: str, clock: Clock, store_id: str, log: Log, *, read_only: bool) -> Catalog:
    """The catalog of a store; an empty one, new or lost, is rebuilt from the log.

    Args:
        url: SQLAlchemy URL of its database.
        clock: the source of time.
        store_id: the store's id, which the catalog must match.
        log: the log of the store's table.
        read_only: change nothing.

    Raises:
        UnavailableError: its database does not answer.
        DataError: its file is damaged.
    """
    catalog = Catalog.open(url, clock, store_id=store_id, read_only=read_only)
    try:
        if not read_only and not catalog.supersteps(limit=1):
            snapshot = load(log)
            if snapshot.version > 0:
                catalog.rebuild(snapshot, logged_commits(log, snapshot.version, _REBUILT_COMMITS_MAX))
    except BaseException:
        catalog.close()
        raise
    return catalog


def stored_mark(marks: Objects, lineage: Lineage, place: str, *, threaded: bool) -> StoredMark:
    """The high-water mark in a store's folder, as a writer keeps it.

    Args:
        marks: the store's folder.
        lineage: which incarnation the store is.
        place: where it lies.
        threaded: whether a thread writes the mark.
    """
    linger_ms = LINGER_MS if local_folder(place) is not None else _CLOUD_LINGER_MS
    return StoredMark(marks, lineage.current.id, threaded=threaded, linger_ms=linger_ms)


class OwnServer:
    """The store's own ZooKeeper, which is restarted if it dies.

    Args:
        server: the server.
        clock: the source of time.
    """

    def __init__(self, server: EmbeddedZooKeeper, clock: Clock) -> None:
        self._server = server
        self._clock = clock
        self._revived_us = clock.monotonic_us()

    def revive(self) -> None:
        """Restart it if it has died, once a second at most; never raises."""
        now_us = self._clock.monotonic_us()
        if now_us - self._revived_us < _REVIVAL_US:
            return
        try:
            self._server.start_or_join()
        except (UnavailableError, OSError) as error:
            _LOG.debug("zookeeper's server does not start: %s", error)
        self._revived_us = self._clock.monotonic_us()


class KnownCatalog:
    """The catalog of an open store, opened when it is first asked for.

    Args:
        url: SQLAlchemy URL of its database; ``None`` for a store without one.
        clock: the source of time.
        store_id: the store's id, which the catalog must match.
        log: the log of the store's table.
        resources: close it with the store.
        read_only: change nothing.

    Attributes:
        url: the same URL.
    """

    def __init__(
        self, url: str | None, clock: Clock, store_id: str, log: Log, resources: ExitStack, *, read_only: bool
    ) -> None:
        self.url = url
        self._clock = clock
        self._store_id = store_id
        self._log = log
        self._resources = resources
        self._read_only = read_only
        self._catalog: Catalog | None = None
        self._lock = threading.Lock()

    def open(self) -> Catalog | None:
        """The catalog; ``None`` for a store without one.

        Raises:
            UnavailableError: its database does not answer.
            DataError: its file is damaged.
        """
        with self._lock:
            if self._catalog is None and self.url is not None:
                self._catalog = open_catalog(
                    self.url, self._clock, self._store_id, self._log, read_only=self._read_only
                )
                self._resources.callback(self._catalog.close)
            return self._catalog

    def of_readers(self, resources: ExitStack) -> Catalog | None:
        """The catalog to pin versions in, which is written to also where the store is only read; ``None`` if it cannot be.

        Args:
            resources: close it when they are closed, if it was opened for this.
        """
        try:
            if not self._read_only or self.url is None:
                return self.open()
            if self.open() is None:
                return None
            writable = Catalog.open(self.url, self._clock, store_id=self._store_id)
        except MillpondError as error:
            _LOG.info("no version is pinned for this reader: %s", error)
            return None
        return resources.enter_context(writable)


def check_options(
    local: Path | None,
    root: str,
    zookeeper: str | None,
    leases: object,
    adopt: object,
    *,
    read_only: bool,
) -> None:
    """Refuse options of `Store.open` that contradict each other, before anything is opened.

    Raises:
        InvalidError: a store in an object store is opened without its ensemble, or one is adopted to be read.
    """
    if local is None and not (read_only or leases or zookeeper):
        raise InvalidError(
            "a store in an object store is shared between machines and needs a ZooKeeper ensemble: "
            "pass zookeeper='host:port,…'",
            path=root,
        )
    if adopt is not None and read_only:
        raise InvalidError("a store that is opened to be read is not adopted", adopt=adopt)


def create_store(objects: Objects, root: str, clock: Clock, rng: Rng, *, create: bool) -> None:
    """Make the table of a new store.

    Raises:
        InvalidError: ``create`` is false.
    """
    if not create:
        raise InvalidError(
            "there is no store at this path: a store is the folder that a runner was given", path=root
        )
    try:
        create_rows_table(Log(objects), clock, rng, location=root)
    except ConflictError:
        # Another process created it at the same moment: its table is as good as ours.
        return


def zookeeper_leases(
    zookeeper: str | None,
    security: ZooKeeperSecurity,
    server: EmbeddedZooKeeper | None,
    clock: Clock,
    session_timeout_ms: int,
    resources: ExitStack,
) -> Callable[[str, str], Leases]:
    """What makes the leases of a store in ZooKeeper, given the store's incarnation and a writer's id.

    Args:
        zookeeper: ``host:port,…`` of an ensemble; ``None`` for the store's own server.
        security: TLS and credentials for the ensemble.
        server: the store's own server.
        clock: the source of time.
        session_timeout_ms: how long ZooKeeper keeps the session of a silent process.
        resources: stop using the server when they are closed.
    """

    def connect(incarnation: str, writer_id: str) -> Leases:
        # The server starts only here, so a store that is refused starts none.
        hosts = zookeeper or ""
        if server is not None:
            hosts = server.start_or_join()
            resources.callback(server.close)
        return ZooKeeperLeases(
            hosts, incarnation, writer_id, clock, session_timeout_ms=session_timeout_ms, security=security
        )

    return connect
