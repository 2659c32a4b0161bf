"""Steps of opening a store: its table, catalog, ZooKeeper leases and high-water mark."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from millpond.statestore.catalog.catalog import Catalog
from millpond.statestore.catalog.topology import DEFINES
from millpond.statestore.errors import ConflictError, InvalidError, MillpondError, UnavailableError
from millpond.statestore.history.lineage import NO_STORE, Lineage, local_folder
from millpond.statestore.history.replayed_log import newest_commits
from millpond.statestore.leases.lease import Leases
from millpond.statestore.leases.zookeeper_client import ZooKeeperSecurity
from millpond.statestore.leases.zookeeper_high_water import ask_for_mark, local_server
from millpond.statestore.leases.zookeeper_lease import ZooKeeperLeases
from millpond.statestore.leases.zookeeper_process import check_name
from millpond.statestore.leases.zookeeper_server import EmbeddedZooKeeper, local_security
from millpond.statestore.log.high_water import LINGER_MS, Mark, StoredMark
from millpond.statestore.log.log import Log
from millpond.statestore.log.table import create_rows_table
from millpond.statestore.types import Clock, Objects, Rng

_REBUILT_COMMITS_MAX: Final = 1_000
_REVIVAL_US: Final = 1_000_000
_CLOUD_LINGER_MS: Final = 1_000

_LOG: Final = logging.getLogger("millpond")


def mark_to_read(
    zookeeper: str | None, place: str, incarnation: str, clock: Clock, security: ZooKeeperSecurity
) -> Mark | None:
    """Return ZooKeeper's high-water mark; a given ensemble must answer, the store's own server only if it runs."""
    hosts = zookeeper or local_server(place)
    if hosts is None:
        return None
    try:
        known = security if zookeeper is not None else local_security(place)
        return ask_for_mark(hosts, incarnation, clock, known)
    except (UnavailableError, InvalidError) as error:
        # InvalidError: the server has a new secret since it was read, or belongs to another user.
        if zookeeper is not None:
            raise
        _LOG.info("the high-water mark of ZooKeeper is not checked: %s", error)
        return None


def open_catalog(url: str, clock: Clock, store_id: str, log: Log, *, read_only: bool) -> Catalog:
    """Open a store's catalog, and rebuild an empty one, new or lost, from the log."""
    catalog = Catalog.open(url, clock, store_id=store_id, read_only=read_only)
    try:
        if not read_only and not catalog.computations():
            rebuild_catalog(catalog, log)
    except BaseException:
        catalog.close()
        raise
    return catalog


def rebuild_catalog(catalog: Catalog, log: Log) -> None:
    newest = log.latest_version()
    if newest is not None:
        catalog.rebuild(newest_commits(log, newest, _REBUILT_COMMITS_MAX, naming=DEFINES))


def stored_mark(marks: Objects, lineage: Lineage, place: str, *, threaded: bool) -> StoredMark:
    linger_ms = LINGER_MS if local_folder(place) is not None else _CLOUD_LINGER_MS
    return StoredMark(marks, lineage.current.id, threaded=threaded, linger_ms=linger_ms)


class OwnServer:
    """The store's own ZooKeeper, restarted when it dies."""

    def __init__(self, server: EmbeddedZooKeeper, clock: Clock) -> None:
        self._server = server
        self._clock = clock
        self._revived_us = clock.monotonic_us()

    def revive(self) -> None:
        """Restart a dead server, at most once a second; never raise."""
        now_us = self._clock.monotonic_us()
        if now_us - self._revived_us < _REVIVAL_US:
            return
        try:
            self._server.start_or_join()
        except (UnavailableError, OSError) as error:
            _LOG.debug("zookeeper's server does not start: %s", error)
        self._revived_us = self._clock.monotonic_us()


class KnownCatalog:
    """The catalog of an open store, opened on first use and closed with the store."""

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
        with self._lock:
            if self._catalog is None and self.url is not None:
                self._catalog = open_catalog(
                    self.url, self._clock, self._store_id, self._log, read_only=self._read_only
                )
                self._resources.callback(self._catalog.close)
            return self._catalog

    def of_readers(self, resources: ExitStack) -> Catalog | None:
        """Return a catalog that takes pins, also of a store opened read-only; ``None`` if it cannot be written."""
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
    if local is None and not (read_only or leases or zookeeper):
        raise InvalidError(
            "a store in an object store is shared between machines and needs a ZooKeeper ensemble: "
            "pass zookeeper='host:port,…'",
            path=root,
        )
    if local is not None and not read_only:
        check_name(local)
    if adopt is not None and read_only:
        raise InvalidError(
            "cannot adopt a store that is opened read-only: open it without read_only=True", adopt=adopt
        )


def create_store(objects: Objects, root: str, clock: Clock, rng: Rng, *, create: bool) -> None:
    if not create:
        raise InvalidError(NO_STORE, path=root)
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
    """Return a factory of ZooKeeper leases; with ``zookeeper`` None they use the store's own server."""

    def connect(incarnation: str, writer_id: str) -> Leases:
        # The server starts only here, so a store that is refused starts none.
        hosts = zookeeper or ""
        if server is not None:
            hosts = server.start_or_join()
            resources.callback(server.close)
        known = security if server is None else server.security
        return ZooKeeperLeases(
            hosts, incarnation, writer_id, clock, session_timeout_ms=session_timeout_ms, security=known
        )

    return connect
