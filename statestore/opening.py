"""
What opening a store needs from its surroundings: a table, ZooKeeper's leases, and the mark that it keeps.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from typing import Final

from millpond.statestore.catalog.catalog import Catalog
from millpond.statestore.catalog.rebuild import logged_commits
from millpond.statestore.errors import ConflictError, InvalidError, UnavailableError
from millpond.statestore.leases.lease import Leases
from millpond.statestore.log.high_water import Mark
from millpond.statestore.log.log import Log
from millpond.statestore.log.snapshot import load
from millpond.statestore.log.table import create_rows_table
from millpond.statestore.types import Clock, Objects, Rng
from millpond.statestore.zookeeper.lease import ZooKeeperLeases
from millpond.statestore.zookeeper.mark import ask_for_mark, local_server
from millpond.statestore.zookeeper.security import ZooKeeperSecurity
from millpond.statestore.zookeeper.server import EmbeddedZooKeeper

__all__ = ["create_store", "mark_to_read", "open_catalog", "zookeeper_leases"]

_REBUILT_COMMITS_MAX: Final = 1_000

_LOG: Final = logging.getLogger("millpond")


def mark_to_read(
    zookeeper: str | None, place: str, incarnation: str, clock: Clock, security: ZooKeeperSecurity
) -> Mark | None:
    """
    The high-water mark that ZooKeeper keeps; ``None`` where there is none to ask.

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
    """
    The catalog of a store; an empty one, new or lost, is rebuilt from the log.

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


def create_store(objects: Objects, root: str, clock: Clock, rng: Rng, *, create: bool) -> None:
    """
    Make the table of a new store.

    Raises:
        InvalidError: ``create`` is false.
    """
    if not create:
        raise InvalidError("there is no store at this path", path=root)
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
    """
    What makes the leases of a store in ZooKeeper, given the store's incarnation and a writer's id.

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
