"""The high-water mark in one ZooKeeper node of the store.

`ZooKeeperHighWater.advance` only notes the mark; a thread writes the latest noted
one, so that a hundred commits a second cost one write at a time, and the lag is one
round trip. A write is conditional on the node's version and skipped when the node
holds a higher mark, so that several writers of a store never push it down. While
ZooKeeper is away the thread tries again each second; commits stop anyway then,
because the leases are suspended.

Asking for the high-water mark without taking part: for readers, who own nothing and start nothing.
"""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Final

from millpond.statestore.errors import DataError, InvalidError, UnavailableError
from millpond.statestore.leases.zookeeper_client import ZooKeeperSecurity
from millpond.statestore.leases.zookeeper_nodes import StorePaths
from millpond.statestore.leases.zookeeper_process import noted
from millpond.statestore.leases.zookeeper_session import (
    Connection,
    Create,
    Deadline,
    Node,
    Set,
    ZooKeeperSession,
)
from millpond.statestore.log.high_water import Mark, superseded
from millpond.statestore.types import Clock, TableVersion

_WRITE_ATTEMPTS_MAX: Final = 5
_RETRY_S: Final = 1.0
_LINGER_S: Final = 0.02
"""
Between two writes, so that hundreds of commits a second do not cost as many round trips: the mark
is this far behind at most, and what a local superstep takes is not spent on it.
"""


class ZooKeeperHighWater:
    """`HighWater` over a session that the leases share."""

    def __init__(self, session: ZooKeeperSession, folder: str, clock: Clock, timeout_ms: float) -> None:
        self._session = session
        self._folder = folder
        self._path = _path_in(folder)
        self._clock = clock
        self._timeout_ms = timeout_ms
        self._changed = threading.Condition()
        self._noted: Mark | None = None
        self._kept: TableVersion | None = None
        self._known: Node | None = None
        self._closed = False
        self._flushing = 0
        self._thread = threading.Thread(target=self._run, name="millpond-high-water", daemon=True)
        self._thread.start()

    def read(self) -> Mark | None:
        """The mark; `None` before the first one, and after ZooKeeper was wiped."""
        return read_mark(self._session, self._folder, self._deadline())

    def advance(self, version: TableVersion, digest: str) -> None:
        """Note the mark; a thread writes it, at once or within a moment of the last write."""
        with self._changed:
            if self._noted is None or version > self._noted.version:
                self._noted = Mark(version, digest)
                self._changed.notify_all()

    def flush(self) -> None:
        """Wait until the mark that was noted last is in ZooKeeper.

        Raises:
            UnavailableError: it is not, in time.
        """
        with self._changed:
            self._flushing += 1
            self._changed.notify_all()
            written = self._changed.wait_for(lambda: self._due() is None, timeout=self._timeout_ms / 1_000)
            self._flushing -= 1
        if not written:
            raise UnavailableError("zookeeper did not take the high-water mark", path=self._path)

    def supersede(self, incarnation: str) -> None:
        """Note a successor, at once.

        Raises:
            UnavailableError: ZooKeeper does not answer, or other writers came first too often.
        """
        for _ in range(_WRITE_ATTEMPTS_MAX):
            deadline = self._deadline()
            node = self._session.read([self._path], deadline)[0]
            mark = superseded(None if node is None else _decode(node, self._path), incarnation)
            if node is None:
                self._session.ensure_path(self._folder, deadline)
                change: Create | Set = Create(self._path, _encode(mark))
            else:
                change = Set(self._path, _encode(mark), node.version)
            if self._session.transact([change], deadline):
                return
        raise UnavailableError("other writers kept moving the high-water mark", path=self._path)

    def close(self) -> None:
        """Stop the thread, once it has written what is noted if ZooKeeper answers."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def _deadline(self) -> Deadline:
        return Deadline.after(self._clock, self._timeout_ms)

    def _due(self) -> Mark | None:
        noted = self._noted
        behind = noted is not None and (self._kept is None or noted.version > self._kept)
        return noted if behind else None

    def _run(self) -> None:
        while (mark := self._next()) is not None:
            kept = self._try_write(mark)
            with self._changed:
                if kept:
                    self._kept = mark.version
                    self._changed.notify_all()
                    self._changed.wait_for(lambda: self._closed or self._flushing, timeout=_LINGER_S)
                elif self._closed:
                    return
                else:
                    self._changed.wait_for(lambda: self._closed, timeout=_RETRY_S)

    def _next(self) -> Mark | None:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._due() is not None)
            return self._due()

    def _try_write(self, mark: Mark) -> bool:
        try:
            return any(self._write_once(mark) for _ in range(_WRITE_ATTEMPTS_MAX))
        except (UnavailableError, InvalidError):
            # InvalidError: what we may do was changed meanwhile, and may be changed back.
            self._known = None
            return False

    def _write_once(self, mark: Mark) -> bool:
        """Write unless the node holds as much; `False` when another writer came between."""
        deadline = self._deadline()
        known = self._known or self._session.read([self._path], deadline)[0]
        self._known = None
        if known is None:
            self._session.ensure_path(self._folder, deadline)
            return self._session.transact([Create(self._path, _encode(mark))], deadline)
        stored = _decode(known, self._path)
        if stored.version >= mark.version or stored.successor:
            return True
        data = _encode(mark)
        written = self._session.transact([Set(self._path, data, known.version)], deadline)
        if written:
            # The next write needs no read unless another process writes in between.
            self._known = Node(data=data, version=known.version + 1, owner_session=0)
        return written


def read_mark(session: ZooKeeperSession, folder: str, deadline: Deadline) -> Mark | None:
    """The mark in a store's folder of nodes; `None` before the first one, and after ZooKeeper was wiped.

    Raises:
        UnavailableError: ZooKeeper does not answer.
        InvalidError: it does not let this client read.
        DataError: the node holds something else.
    """
    path = _path_in(folder)
    node = session.read([path], deadline)[0]
    return None if node is None else _decode(node, path)


def _path_in(folder: str) -> str:
    return f"{folder}/high_water"


def _encode(mark: Mark) -> bytes:
    successor = {"successor": mark.successor} if mark.successor else {}
    return json.dumps({"version": mark.version, "digest": mark.digest, **successor}).encode()


def _decode(node: Node, path: str) -> Mark:
    try:
        pairs = json.loads(node.data)
        successor = str(pairs.get("successor", ""))
        return Mark(TableVersion(int(pairs["version"])), str(pairs["digest"]), successor)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError("the high-water mark in zookeeper cannot be read", path=path) from error


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
