"""
Asking for the high-water mark without taking part: for readers, who own nothing and start nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from millpond.statestore.log.high_water import Mark
from millpond.statestore.types import Clock
from millpond.statestore.zookeeper.lease import ZooKeeperLeases
from millpond.statestore.zookeeper.process import noted

__all__ = ["ask_for_mark", "server_beside"]

_TIMEOUT_MS: Final = 4_000


def server_beside(place: str) -> str | None:
    """
    Where the server of a store's own folder answers, ``host:port``; ``None`` when none runs.

    Args:
        place: the store's absolute path or URL.
    """
    server = None if "://" in place else noted(Path(place) / "zookeeper")
    return f"127.0.0.1:{server.port}" if server is not None and server.is_running() else None


def ask_for_mark(hosts: str, incarnation: str, clock: Clock) -> Mark | None:
    """
    The mark of an incarnation of a store; ``None`` before the first commit, and after ZooKeeper was wiped.

    Raises:
        UnavailableError: ZooKeeper does not answer.
    """
    leases = ZooKeeperLeases(hosts, incarnation, "reader", clock, session_timeout_ms=_TIMEOUT_MS)
    try:
        return leases.high_water.read()
    finally:
        leases.close()
