"""
One ZooKeeper session on kazoo: bounded calls, windows of requests in flight, state changes.

Nothing above this module sees kazoo, its exceptions or its untyped values. Every call
takes a `Deadline`; a call that raises `UnavailableError` may have had its effect, and
the caller finds out by reading back.

kazoo reconnects by itself for as long as the session is open, at most two attempts a
second: to give up would turn an outage of ZooKeeper into one of the pipeline. Calls
are not queued meanwhile but wait, bounded, for the connection. A ZooKeeper that came
back with less than our session has seen (it was wiped, or restored) refuses the
session for ever without saying that it expired; `ZooKeeperSession.renew_if_refused`
finds that out.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from math import ceil
from typing import Any, Final

from kazoo.client import KazooClient
from kazoo.exceptions import KazooException, NoNodeError
from kazoo.handlers.threading import KazooTimeoutError
from kazoo.retry import KazooRetry

from millpond.statestore.errors import UnavailableError
from millpond.statestore.types import Clock

__all__ = [
    "Connection",
    "Create",
    "Deadline",
    "Delete",
    "Expect",
    "Node",
    "Operation",
    "Set",
    "Watcher",
    "ZooKeeperSession",
]

# kazoo wakes its connection thread with one byte a request through a blocking socket
# pair; some 270 unread bytes fill it. Windows stay well below that.
_WINDOW: Final = 64
_PROBE_S: Final = 2.0
_HANDSHAKE_S_MAX: Final = 2.0
# A handshake that is stuck, a pause, and one that is not.
_ADMISSION_S: Final = 2 * _HANDSHAKE_S_MAX + 1.0

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Deadline:
    """
    A point on the monotonic clock by which an operation, with all its steps, must end.
    """

    clock: Clock
    at_us: int

    @staticmethod
    def after(clock: Clock, timeout_ms: float) -> Deadline:
        """
        The deadline ``timeout_ms`` from now.
        """
        return Deadline(clock, clock.monotonic_us() + int(timeout_ms * 1_000))

    @property
    def left_s(self) -> float:
        """
        Seconds left, not below zero.
        """
        return max(0.0, (self.at_us - self.clock.monotonic_us()) / 1e6)


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """
    A node's data, the number of changes of its data, and the session that owns it (0: none).
    """

    data: bytes
    version: int
    owner_session: int


@dataclass(frozen=True, slots=True)
class Create:
    """
    Create a node; fails if it exists.
    """

    path: str
    data: bytes
    ephemeral: bool = False


@dataclass(frozen=True, slots=True)
class Set:
    """
    Replace a node's data; fails unless its version is ``version``.
    """

    path: str
    data: bytes
    version: int


@dataclass(frozen=True, slots=True)
class Delete:
    """
    Delete a node; fails if it is missing.
    """

    path: str


@dataclass(frozen=True, slots=True)
class Expect:
    """
    Fail unless the node's version is ``version``.
    """

    path: str
    version: int


Operation = Create | Set | Delete | Expect

Watcher = Callable[[str], None]
"""Called with the path of a changed node, from kazoo's thread: it must not block."""


@dataclass(frozen=True, slots=True)
class Connection:
    """
    The session as last heard: connected or not, and its id (`None` once it has expired).
    """

    connected: bool
    session_id: int | None


class ZooKeeperSession:
    """
    A session that outlives its connections, and is replaced by kazoo when it expires.
    """

    def __init__(
        self,
        hosts: str,
        session_timeout_ms: int,
        on_change: Callable[[Connection], None],
    ) -> None:
        self._hosts = hosts
        self._on_change = on_change
        self._changed = threading.Condition()
        self._connection = Connection(connected=False, session_id=None)
        self._watches: dict[Watcher, Callable[[Any], None]] = {}
        self._session_timeout_ms = session_timeout_ms
        self._client = self._new_client()
        self._client.add_listener(self._heard)

    @property
    def connection(self) -> Connection:
        """
        The session as last heard.
        """
        return self._connection

    def start(self, deadline: Deadline) -> None:
        """
        Connect.

        Raises:
            UnavailableError: no server answered in time.
        """
        self._start(self._client, max(deadline.left_s, 0.001))

    def close(self) -> None:
        """
        End the session, and with it every ephemeral node.
        """
        self._client.stop()
        self._client.close()

    def wait_connected(self, deadline: Deadline) -> int:
        """
        The id of the live session, waiting for the connection if need be.

        Raises:
            UnavailableError: there is no connection in time.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._connection.connected, timeout=deadline.left_s)
            connection = self._connection
        if not connection.connected or connection.session_id is None:
            raise UnavailableError("the connection to zookeeper is lost", hosts=self._hosts)
        return connection.session_id

    def read(
        self, paths: Sequence[str], deadline: Deadline, watcher: Watcher | None = None
    ) -> list[Node | None]:
        """
        The nodes at ``paths``, `None` where there is none; ``watcher`` hears of the next change.
        """
        watch = None if watcher is None else self._watch_of(watcher)
        nodes: list[Node | None] = []
        for window in _windows(paths):
            self.wait_connected(deadline)
            pending = [self._client.get_async(path, watch=watch) for path in window]
            nodes += [self._node(result, deadline) for result in pending]
        return nodes

    def transact(self, operations: Iterable[Operation], deadline: Deadline) -> bool:
        """
        Apply all operations or none.

        Returns:
            Whether they were applied.

        Raises:
            UnavailableError: they may or may not have been.
        """
        transaction = self._client.transaction()
        for operation in operations:
            _add(transaction, operation)
        self.wait_connected(deadline)
        results = self._result(transaction.commit_async(), deadline)
        return not any(isinstance(result, Exception) for result in results)

    def ensure_path(self, path: str, deadline: Deadline) -> None:
        """
        Create the persistent nodes of ``path`` that are missing.
        """
        self.wait_connected(deadline)
        self._result(self._client.ensure_path_async(path), deadline)

    def renew_if_refused(self) -> None:
        """
        Give the session up if the servers admit a new one but, given the time, not ours.
        """
        probe = self._new_client()
        try:
            self._start(probe, _PROBE_S)
        except UnavailableError:
            return  # No server answers; ours will be admitted as soon as one does.
        probe.stop()
        probe.close()
        with self._changed:
            if self._changed.wait_for(lambda: self._connection.connected, timeout=_ADMISSION_S):
                return
        self._client.stop()
        self._start(self._client, _PROBE_S)

    def _new_client(self) -> Any:
        return KazooClient(
            hosts=_repeated(self._hosts, self._session_timeout_ms),
            timeout=self._session_timeout_ms / 1_000,
            connection_retry=KazooRetry(max_tries=-1, delay=0.05, max_delay=0.5),
            command_retry=KazooRetry(max_tries=1),
            logger=_log,
        )

    def _start(self, client: Any, timeout_s: float) -> None:
        try:
            client.start(timeout=timeout_s)
        except (KazooException, KazooTimeoutError, OSError) as error:
            raise UnavailableError("zookeeper does not answer", hosts=self._hosts) from error

    def _heard(self, state: str) -> None:
        # On kazoo's connection thread: note, tell, and return.
        connected = state == "CONNECTED"
        client_id = self._client.client_id
        session_id = client_id[0] if client_id else self._connection.session_id
        connection = Connection(connected, None if state == "LOST" else session_id)
        with self._changed:
            self._connection = connection
            # Told before any thread that waits for the connection continues.
            self._on_change(connection)
            self._changed.notify_all()

    def _watch_of(self, watcher: Watcher) -> Callable[[Any], None]:
        # kazoo keeps one watch per callable and path, so that a repeated read adds none.
        def watch(event: Any) -> None:
            if event.path is not None:
                watcher(event.path)

        return self._watches.setdefault(watcher, watch)

    def _node(self, result: Any, deadline: Deadline) -> Node | None:
        try:
            data, stat = self._result(result, deadline)
        except NoNodeError:
            return None
        return Node(data=data, version=stat.version, owner_session=stat.ephemeralOwner)

    def _result(self, result: Any, deadline: Deadline) -> Any:
        try:
            return result.get(timeout=deadline.left_s)
        except NoNodeError:
            raise
        except (KazooException, KazooTimeoutError) as error:
            raise UnavailableError(
                "zookeeper did not answer", hosts=self._hosts, cause=type(error).__name__
            ) from error


def _add(transaction: Any, operation: Operation) -> None:
    match operation:
        case Create(path, data, ephemeral):
            transaction.create(path, data, ephemeral=ephemeral)
        case Set(path, data, version):
            transaction.set_data(path, data, version=version)
        case Delete(path):
            transaction.delete(path)
        case Expect(path, version):
            transaction.check(path, version)


def _windows(paths: Sequence[str]) -> Iterator[list[str]]:
    remaining = iter(paths)
    while window := list(islice(remaining, _WINDOW)):
        yield window


def _repeated(hosts: str, session_timeout_ms: int) -> str:
    """
    The hosts, so often that kazoo waits at most `_HANDSHAKE_S_MAX` for a server's handshake.

    A server that is starting may accept a connection and never answer on it. kazoo
    waits for the session's time-out divided by the number of hosts, then goes on to the
    next; one host and ten seconds would make every restart an outage of ten seconds.
    """
    names, slash, root = hosts.partition("/")
    times = ceil(session_timeout_ms / 1_000 / _HANDSHAKE_S_MAX / len(names.split(",")))
    return ",".join([names] * max(1, times)) + slash + root
