"""Asking for the high-water mark without taking part: for readers, who own nothing and start nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from millpond.statestore.log.high_water import Mark
from millpond.statestore.types import Clock
from millpond.statestore.zookeeper.high_water import read_mark
from millpond.statestore.zookeeper.nodes import StorePaths
from millpond.statestore.zookeeper.process import noted
from millpond.statestore.zookeeper.security import ZooKeeperSecurity
from millpond.statestore.zookeeper.session import Connection, Deadline, ZooKeeperSession

_TIMEOUT_MS: Final = 4_000
_OPEN: Final = ZooKeeperSecurity()


def local_server(place: str) -> str | None:
    """Where the server of a store's own folder answers, ``host:port``; ``None`` when none runs.

    Args:
        place: the store's absolute path or URL.
    """
    server = None if "://" in place else noted(Path(place) / "zookeeper")
    return f"127.0.0.1:{server.port}" if server is not None and server.is_running() else None


def ask_for_mark(
    hosts: str, incarnation: str, clock: Clock, security: ZooKeeperSecurity = _OPEN
) -> Mark | None:
    """The mark of an incarnation of a store; ``None`` before the first commit, and after ZooKeeper was wiped.

    Raises:
        UnavailableError: ZooKeeper does not answer.
        InvalidError: it does not accept the credentials, or does not let them read.
    """
    session = ZooKeeperSession(hosts, _TIMEOUT_MS, _ignored, security)
    deadline = Deadline.after(clock, _TIMEOUT_MS)
    session.start(deadline)
    try:
        return read_mark(session, StorePaths(incarnation).store, deadline)
    finally:
        session.close()


def _ignored(_: Connection) -> None:
    """Nothing here lives longer than the question."""
