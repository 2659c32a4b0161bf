"""Sessions that fail to start, with their threads and sockets."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from kazoo.client import KazooClient
from kazoo.exceptions import ConnectionLoss

from millpond.statestore.errors import UnavailableError
from millpond.statestore.leases import zookeeper_session as sessions
from millpond.statestore.leases.zookeeper_high_water import ask_for_mark
from millpond.statestore.leases.zookeeper_session import Connection, Deadline, ZooKeeperSession
from millpond.statestore.system import SystemClock

pytestmark = pytest.mark.zookeeper

CLOCK = SystemClock()
TIMEOUT_MS = 4_000


@pytest.fixture
def clients(monkeypatch: pytest.MonkeyPatch) -> list[KazooClient]:
    made: list[KazooClient] = []
    make: Callable[..., KazooClient] = sessions.make_client

    def recorded(*arguments: object) -> KazooClient:
        made.append(make(*arguments))
        return made[-1]

    monkeypatch.setattr(sessions, "make_client", recorded)
    return made


def _lose(*_: object) -> None:
    raise ConnectionLoss


def _is_closed(client: KazooClient) -> bool:
    connection = client._connection
    return connection.connection_stopped.is_set() and connection._write_sock is None


def test_session_losing_connection_at_start_is_closed(
    zookeeper_hosts: str, clients: list[KazooClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kazoo leaves its client open if the first look for the root fails."""
    monkeypatch.setattr(KazooClient, "exists", _lose)
    with pytest.raises(UnavailableError, match="does not answer"):
        ask_for_mark(f"{zookeeper_hosts}/root", "store", CLOCK)
    assert [_is_closed(client) for client in clients] == [True]


def test_probe_losing_connection_at_start_is_closed(
    zookeeper_hosts: str, clients: list[KazooClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Connection] = []
    monkeypatch.setattr(KazooClient, "exists", lambda *_: True)
    session = ZooKeeperSession(f"{zookeeper_hosts}/root", TIMEOUT_MS, seen.append)
    session.start(Deadline.after(CLOCK, TIMEOUT_MS))
    monkeypatch.setattr(KazooClient, "exists", _lose)
    session.renew_if_refused()
    assert [_is_closed(client) for client in clients] == [False, True]
    session.close()
