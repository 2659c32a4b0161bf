"""One ZooKeeper session on kazoo, whose exceptions and untyped values no module above this one sees.

Every call takes a `Deadline`. A call that raises `UnavailableError` may have had its effect; the caller finds out by reading
back. kazoo reconnects by itself for as long as the session is open: giving up would turn an outage of ZooKeeper into one
of the pipeline. Calls wait meanwhile, bounded, for the connection.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

from kazoo.exceptions import KazooException, NoAuthError, NoNodeError, SessionClosedRequireSaslError
from kazoo.handlers.threading import KazooTimeoutError
from kazoo.protocol.states import KeeperState
from kazoo.security import ACL, Permissions

from millpond.statestore.errors import InvalidError, MillpondError, UnavailableError
from millpond.statestore.leases.zookeeper_client import (
    HANDSHAKE_S_MAX,
    OPEN_ENSEMBLE,
    ZooKeeperSecurity,
    connection_fault,
    make_client,
)
from millpond.statestore.outage import Outage
from millpond.statestore.types import Clock

_LOG = logging.getLogger("millpond")

# kazoo wakes its connection thread with one byte a request through a blocking socket
# pair; some 270 unread bytes fill it. Windows stay well below that.
_WINDOW: Final = 64
_PROBE_S: Final = 2.0
# Time for a stuck handshake, a pause, and a successful one.
_ADMISSION_S: Final = 2 * HANDSHAKE_S_MAX + 1.0
_REFUSALS: Final = (NoAuthError, SessionClosedRequireSaslError)


@dataclass(slots=True)
class Deadline:
    """A point on the monotonic clock by which an operation, with all its steps, must end."""

    clock: Clock
    at_us: int

    @staticmethod
    def after(clock: Clock, timeout_ms: float) -> Deadline:
        return Deadline(clock, clock.monotonic_us() + int(timeout_ms * 1_000))

    @property
    def left_s(self) -> float:
        return max(0.0, (self.at_us - self.clock.monotonic_us()) / 1e6)


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A node's data, the number of changes of its data, and the session that owns it (0: none)."""

    data: bytes
    version: int
    owner_session: int


@dataclass(frozen=True, slots=True)
class Create:
    """Create a node; fails if it exists."""

    path: str
    data: bytes
    ephemeral: bool = False


@dataclass(frozen=True, slots=True)
class Set:
    """Replace a node's data; fails unless its version is ``version``."""

    path: str
    data: bytes
    version: int


@dataclass(frozen=True, slots=True)
class Delete:
    """Delete a node; fails if it is missing."""

    path: str


@dataclass(frozen=True, slots=True)
class Expect:
    """Fail unless the node's version is ``version``."""

    path: str
    version: int


Operation = Create | Set | Delete | Expect

_Comparison = Callable[[Collection[ACL], Collection[ACL]], bool]

Watcher = Callable[[str], None]
"""Receives the path of a changed node on kazoo's thread: it must not block."""


@dataclass(frozen=True, slots=True)
class Connection:
    """The last reported state of the session: connected or not, and its id (``None`` once it has expired)."""

    connected: bool
    session_id: int | None


class ZooKeeperSession:
    """A session that outlives its connections, and is replaced by kazoo when it expires; ``outage`` logs its absences."""

    def __init__(
        self,
        hosts: str,
        session_timeout_ms: int,
        on_change: Callable[[Connection], None],
        security: ZooKeeperSecurity = OPEN_ENSEMBLE,
        outage: Outage | None = None,
    ) -> None:
        self._hosts = hosts
        self._outage = outage
        self._security = security
        self._on_change = on_change
        self._changed = threading.Condition()
        self._connection = Connection(connected=False, session_id=None)
        self._watches: dict[Watcher, Callable[[Any], None]] = {}
        self._was_refused = False
        self._session_timeout_ms = session_timeout_ms
        self._client = self._new_client()
        self._client.add_listener(self._heard)

    @property
    def connection(self) -> Connection:
        return self._connection

    def start(self, deadline: Deadline) -> None:
        """Connect, or raise `UnavailableError` at the deadline and `InvalidError` for refused credentials."""
        try:
            self._start(self._client, max(deadline.left_s, 0.001))
            if self._security.user is not None:
                self._wait_accepted(deadline)
        except MillpondError:
            _discard(self._client)
            raise

    def _wait_accepted(self, deadline: Deadline) -> None:
        """Wait until the servers have checked the credentials."""
        # kazoo reports the connection before that, and delays requests until then.
        while True:
            try:
                self._result(self._client.exists_async("/"), deadline)
            except UnavailableError:
                with self._changed:
                    self._changed.wait_for(
                        lambda: self._connection.connected or self._was_refused, timeout=deadline.left_s
                    )
                self._raise_if_refused()
                if deadline.left_s == 0:
                    raise
            else:
                return

    def close(self) -> None:
        # Before the stop, which is reported as a lost connection.
        self._outage = None
        self._client.stop()
        self._client.close()

    def wait_connected(self, deadline: Deadline) -> int:
        """Wait for the connection and return the session's id, or raise `UnavailableError` at the deadline."""
        with self._changed:
            self._changed.wait_for(lambda: self._connection.connected, timeout=deadline.left_s)
            connection = self._connection
        if not connection.connected or connection.session_id is None:
            raise self._lost()
        return connection.session_id

    def tell_of_outage(self) -> None:
        """Log that the connection is lost, when the last line about it is a minute old."""
        if self._outage is not None:
            self._outage.away(self._lost())

    def _lost(self) -> UnavailableError:
        return UnavailableError("the connection to zookeeper is lost", hosts=self._hosts)

    def read(
        self, paths: Sequence[str], deadline: Deadline, watcher: Watcher | None = None
    ) -> list[Node | None]:
        """Return the nodes at ``paths``, ``None`` where there is none; ``watcher`` is called at the next change."""
        watch = None if watcher is None else self._watch_of(watcher)
        nodes: list[Node | None] = []
        for window in _windows(paths):
            self.wait_connected(deadline)
            pending = [self._client.get_async(path, watch=watch) for path in window]
            nodes += [self._node(result, deadline) for result in pending]
        return nodes

    def read_newest(self, path: str, deadline: Deadline) -> Node | None:
        """Return a node as it was after this call began, whichever server answers."""
        self.wait_connected(deadline)
        # Answered in this order: the server first catches up with the leader.
        caught_up, found = self._client.sync_async(path), self._client.get_async(path)
        self._or_none(caught_up, deadline)
        return self._node(found, deadline)

    def children(self, path: str, deadline: Deadline) -> list[str]:
        self.wait_connected(deadline)
        return sorted(self._or_none(self._client.get_children_async(path), deadline) or ())

    def transact(self, operations: Iterable[Operation], deadline: Deadline) -> bool:
        """Apply all operations or none, and return True if they were applied; after `UnavailableError` either may be the case."""
        transaction = self._client.transaction()
        for operation in operations:
            _add(transaction, operation)
        self.wait_connected(deadline)
        results = self._result(transaction.commit_async(), deadline)
        for result in results:
            if isinstance(result, _REFUSALS):
                raise self._refusal() from result
        return not any(isinstance(result, Exception) for result in results)

    def ensure_path(self, path: str, deadline: Deadline) -> None:
        self.wait_connected(deadline)
        self._result(self._client.ensure_path_async(path), deadline)

    def close_to_others(self, path: str, deadline: Deadline) -> None:
        """Give a node, and all nodes below it, this client's access list where they have another one.

        The nodes above it are only closed to other clients, if they are open. Without credentials nothing changes.
        """
        wanted = self._security.access_list
        if not wanted:
            return
        above = path.rpartition("/")[0]
        while above:
            self._set_access_lists([above], wanted, _is_open, deadline)
            above = above.rpartition("/")[0]
        if not self._with_other_lists([path], wanted, _is_other, deadline):
            return
        below = [path]
        while below:
            window, below = below[:_WINDOW], below[_WINDOW:]
            asked = [(each, self._client.get_children_async(each)) for each in window]
            found = [(each, self._or_none(answer, deadline) or ()) for each, answer in asked]
            children = [f"{parent}/{name}" for parent, names in found for name in names]
            self._set_access_lists(children, wanted, _is_other, deadline)
            below += children
        # The node itself comes last: an interrupted run finds its list unchanged and starts over.
        self._set_access_lists([path], wanted, _is_other, deadline)

    def _set_access_lists(
        self, paths: Sequence[str], wanted: list[ACL], is_to_change: _Comparison, deadline: Deadline
    ) -> None:
        for window in _windows(paths):
            to_change = self._with_other_lists(window, wanted, is_to_change, deadline)
            for answer in [self._client.set_acls_async(path, wanted) for path in to_change]:
                self._or_none(answer, deadline)

    def _with_other_lists(
        self, paths: Sequence[str], wanted: list[ACL], is_to_change: _Comparison, deadline: Deadline
    ) -> list[str]:
        self.wait_connected(deadline)
        asked = [(path, self._client.get_acls_async(path)) for path in paths]
        found = [(path, self._or_none(answer, deadline)) for path, answer in asked]
        return [path for path, known in found if known is not None and is_to_change(known[0], wanted)]

    def _or_none(self, answer: Any, deadline: Deadline) -> Any:
        try:
            return self._result(answer, deadline)
        except NoNodeError:
            return None

    def renew_if_refused(self) -> None:
        """Give the session up if the servers admit a new session but, given the time, not this one.

        A ZooKeeper that was wiped or restored has seen less than this session. It refuses the session indefinitely without
        reporting that it has expired.
        """
        probe = self._new_client()
        try:
            self._start(probe, _PROBE_S)
        except (UnavailableError, InvalidError):
            return  # No server admits any session now, so this one has not been refused yet.
        finally:
            _discard(probe)
        with self._changed:
            if self._changed.wait_for(lambda: self._connection.connected, timeout=_ADMISSION_S):
                return
        has_ended = self._client.client_state == KeeperState.CLOSED
        self._client.stop()
        if has_ended:
            # kazoo gave up after a refusal. Started again, the same client would obey this stop at once.
            self._client.close()
            self._client = self._new_client()
            self._client.add_listener(self._heard)
        self._start(self._client, _PROBE_S)

    def _new_client(self) -> Any:
        return make_client(self._hosts, self._session_timeout_ms, self._security)

    def _start(self, client: Any, timeout_s: float) -> None:
        try:
            client.start(timeout=timeout_s)
        except (KazooException, KazooTimeoutError, OSError) as error:
            self._raise_if_refused()
            fault = connection_fault(client)
            reason = {} if fault is None else {"cause": fault}
            raise UnavailableError(
                "zookeeper does not answer: are host and port right, and can this machine reach them?",
                hosts=self._hosts,
                **reason,
            ) from error

    def _raise_if_refused(self) -> None:
        if self._was_refused:
            raise InvalidError(
                "zookeeper does not accept this user with this password",
                user=self._security.user, hosts=self._hosts,
            )  # fmt: skip

    def _heard(self, state: str) -> None:
        # This runs on kazoo's connection thread, so it must not wait for ZooKeeper.
        connected = state == "CONNECTED"
        # Read now, because kazoo's next state is CLOSED, which would hide the refusal.
        self._was_refused = self._client.client_state == KeeperState.AUTH_FAILED
        client_id = self._client.client_id
        session_id = client_id[0] if client_id else self._connection.session_id
        connection = Connection(connected, None if state == "LOST" else session_id)
        with self._changed:
            self._connection = connection
            # Before any thread that waits for the connection continues: it must find its leases up to date.
            self._on_change(connection)
            self._changed.notify_all()
        if not connected:
            self.tell_of_outage()
        elif self._outage is not None:
            self._outage.back()

    def _watch_of(self, watcher: Watcher) -> Callable[[Any], None]:
        # kazoo keeps one watch per callable and path: with one callable, repeated reads add no watches.
        def watch(event: Any) -> None:
            if event.path is not None:
                watcher(event.path)

        return self._watches.setdefault(watcher, watch)

    def _node(self, result: Any, deadline: Deadline) -> Node | None:
        found = self._or_none(result, deadline)
        if found is None:
            return None
        data, stat = found
        return Node(data=data, version=stat.version, owner_session=stat.ephemeralOwner)

    def _result(self, result: Any, deadline: Deadline) -> Any:
        try:
            return result.get(timeout=deadline.left_s)
        except NoNodeError:
            raise
        except _REFUSALS as error:
            raise self._refusal() from error
        except (KazooException, KazooTimeoutError) as error:
            raise UnavailableError(
                "zookeeper did not answer", hosts=self._hosts, cause=type(error).__name__
            ) from error

    def _refusal(self) -> InvalidError:
        if self._security.is_authenticated:
            return InvalidError(
                "zookeeper's nodes of this store belong to another user: use that user's credentials, or keep "
                "the nodes of this one under a root of their own, as in host:port/root",
                user=self._security.user or "of the certificate", hosts=self._hosts,
            )  # fmt: skip
        return InvalidError(
            "zookeeper wants credentials: pass zookeeper_security, or set MILLPOND_ZOOKEEPER_SECURITY",
            hosts=self._hosts,
        )


def _discard(client: Any) -> None:
    try:
        client.stop()
        client.close()
    except Exception as error:  # noqa: BLE001 - kazoo raises no narrower one if the client's thread does not end
        # Only logged: the error for which the client is discarded matters more.
        _LOG.warning("a zookeeper client could not be closed: %s", error)


def _is_open(found: Collection[ACL], _: Collection[ACL]) -> bool:
    """Return True if every client may change nodes below a node with this access list."""
    return any(entry.id.scheme == "world" and entry.perms & ~Permissions.READ for entry in found)


def _is_other(found: Collection[ACL], wanted: Collection[ACL]) -> bool:
    if any(entry.id.scheme == "auth" for entry in wanted):
        # The servers replace "auth" with names that the client does not learn, so only openness can be compared.
        return _is_open(found, wanted)
    return set(found) != set(wanted)


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
