"""The high-water mark in one ZooKeeper node of the store, and how readers ask for it without taking part.

The boundary of log cleanups has a node beside it, so that a writer need not list an object store after each commit.

A thread writes the newest recorded mark, so a hundred commits a second cost one write at a time. A write is conditional on
the node's version, so several writers never push the mark down. While ZooKeeper is away the thread retries each second;
commits pause then anyway, because the leases are suspended.
"""

from __future__ import annotations

import re
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Final
from urllib.parse import quote

import orjson

from millpond.statestore.errors import DataError, InvalidError, UnavailableError
from millpond.statestore.leases.zookeeper_client import OPEN_ENSEMBLE, ZooKeeperSecurity
from millpond.statestore.leases.zookeeper_process import read_own, recorded_server
from millpond.statestore.leases.zookeeper_session import (
    Connection,
    Create,
    Deadline,
    Node,
    Set,
    ZooKeeperSession,
)
from millpond.statestore.log.high_water import HighWater, LaggingMark, Mark, later_mark, superseded
from millpond.statestore.types import Clock, TableVersion

_WRITE_ATTEMPTS_MAX: Final = 5
_RETRY_S: Final = 1.0
# Least time between two writes, so that hundreds of commits a second do not cost as many round trips.
_LINGER_S: Final = 0.02
_ASK_TIMEOUT_MS: Final = 4_000
# A commit waits no longer than this before it asks the store instead.
_BOUNDARY_TIMEOUT_MS: Final = 1_000
# Of each file of a server that could not read them; more than the zeros at the end of a log.
_DAMAGED_BYTES_MAX: Final = 2**23


def store_folder(store_id: str) -> str:
    return f"/millpond/{quote(store_id, safe='')}"


class ZooKeeperHighWater(LaggingMark):
    """`HighWater` over a session that the leases share."""

    def __init__(self, session: ZooKeeperSession, folder: str, clock: Clock, timeout_ms: float) -> None:
        super().__init__("millpond-high-water", linger_s=_LINGER_S, retry_s=_RETRY_S)
        self._session = session
        self._folder = folder
        self._path = _path_in(folder)
        self._clock = clock
        self._timeout_ms = timeout_ms
        self._known: Node | None = None
        self._boundary_path = f"{folder}/log_boundary"
        self._session_id = session.connection.session_id
        self._thread.start()

    def read(self) -> Mark | None:
        return read_mark(self._session, self._folder, self._deadline())

    def flush(self) -> None:
        with self._changed:
            self._flushing += 1
            self._changed.notify_all()
            written = self._changed.wait_for(lambda: self._due() is None, timeout=self._timeout_ms / 1_000)
            self._flushing -= 1
        if not written:
            raise UnavailableError("zookeeper did not take the high-water mark", path=self._path)

    def supersede(self, incarnation: str) -> None:
        for _ in range(_WRITE_ATTEMPTS_MAX):
            deadline = self._deadline()
            node = self._session.read([self._path], deadline)[0]
            mark = superseded(None if node is None else _decode(node, self._path), incarnation)
            if self._write(mark, node, deadline):
                return
        raise UnavailableError("other writers kept moving the high-water mark", path=self._path)

    def announce_boundary(self, version: TableVersion) -> None:
        for _ in range(_WRITE_ATTEMPTS_MAX):
            deadline = self._deadline()
            node = self._session.read([self._boundary_path], deadline)[0]
            if node is not None and _boundary_of(node, self._boundary_path) >= version:
                return
            self._session.ensure_path(self._folder, deadline)
            data = b"%d" % version
            path = self._boundary_path
            write = Create(path, data) if node is None else Set(path, data, node.version)
            if self._session.transact([write], deadline):
                return
        raise UnavailableError("other processes kept moving the boundary", path=self._boundary_path)

    def boundary(self) -> TableVersion | None:
        try:
            if not self._is_same_session():
                return None
            deadline = Deadline.after(self._clock, _BOUNDARY_TIMEOUT_MS)
            node = self._session.read_newest(self._boundary_path, deadline)
            announced = TableVersion(0) if node is None else _boundary_of(node, self._boundary_path)
        except (UnavailableError, InvalidError, DataError):
            return None
        # While a session lives, its servers have lost nothing that they acknowledged.
        return announced if self._is_same_session() else None

    def _is_same_session(self) -> bool:
        return self._session.connection == Connection(connected=True, session_id=self._session_id)

    def _deadline(self) -> Deadline:
        return Deadline.after(self._clock, self._timeout_ms)

    def _try_store(self, mark: Mark) -> bool:
        try:
            return any(self._write_once(mark) for _ in range(_WRITE_ATTEMPTS_MAX))
        except (UnavailableError, InvalidError):
            # InvalidError: the access list was changed meanwhile, and may be changed back.
            self._known = None
            return False

    def _write_once(self, mark: Mark) -> bool:
        deadline = self._deadline()
        known = self._known or self._session.read([self._path], deadline)[0]
        self._known = None
        if known is not None:
            stored = _decode(known, self._path)
            if stored.version >= mark.version or stored.successor:
                return True
        written = self._write(mark, known, deadline)
        if written and known is not None:
            # The next write needs no read unless another process writes in between.
            self._known = Node(data=_encode(mark), version=known.version + 1, owner_session=0)
        return written

    def _write(self, mark: Mark, known: Node | None, deadline: Deadline) -> bool:
        if known is None:
            self._session.ensure_path(self._folder, deadline)
            return self._session.transact([Create(self._path, _encode(mark))], deadline)
        # Conditional on the version that was read: a mark that another writer raised meanwhile stays.
        return self._session.transact([Set(self._path, _encode(mark), known.version)], deadline)


def read_mark(session: ZooKeeperSession, folder: str, deadline: Deadline) -> Mark | None:
    path = _path_in(folder)
    node = session.read([path], deadline)[0]
    return None if node is None else _decode(node, path)


def _boundary_of(node: Node, path: str) -> TableVersion:
    if not node.data.isdigit():
        raise DataError("the boundary of the log in zookeeper cannot be read", path=path)
    return TableVersion(int(node.data))


def carry_over_mark(folder: Path, incarnation: str, high_water: HighWater) -> None:
    """Store the newest mark in the files of a server that could not read them, and remove the files.

    The log may have been cut together with them: without the mark, the loss of acknowledged commits would go unnoticed.
    """
    if not folder.exists():
        return
    path = _path_in(store_folder(incarnation))
    # A node's path, and four bytes for the size of its data, in the log and in a snapshot.
    node = re.compile(re.escape(path.encode()) + rb".{4}(\{[^}]*\})", re.DOTALL)
    mark: Mark | None = None
    for file in folder.rglob("*"):
        for data in node.findall(read_own(file, _DAMAGED_BYTES_MAX)):
            with suppress(DataError):
                mark = later_mark(mark, _decode(Node(data=data, version=0, owner_session=0), path))
    if mark is not None:
        high_water.advance(mark.version, mark.digest)
        high_water.flush()
        if mark.successor:
            high_water.supersede(mark.successor)
    shutil.rmtree(folder)


def _path_in(folder: str) -> str:
    return f"{folder}/high_water"


def _encode(mark: Mark) -> bytes:
    successor = {"successor": mark.successor} if mark.successor else {}
    return orjson.dumps({"version": mark.version, "digest": mark.digest, **successor})


def _decode(node: Node, path: str) -> Mark:
    try:
        pairs = orjson.loads(node.data)
        successor = str(pairs.get("successor", ""))
        return Mark(TableVersion(int(pairs["version"])), str(pairs["digest"]), successor)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError("the high-water mark in zookeeper cannot be read", path=path) from error


def local_server(place: str) -> str | None:
    server = None if "://" in place else recorded_server(Path(place) / "zookeeper")
    return f"127.0.0.1:{server.port}" if server is not None and server.is_own() else None


def ask_for_mark(
    hosts: str, incarnation: str, clock: Clock, security: ZooKeeperSecurity = OPEN_ENSEMBLE
) -> Mark | None:
    """Return the mark of an incarnation, or ``None`` before its first commit and after ZooKeeper was wiped."""
    session = ZooKeeperSession(hosts, _ASK_TIMEOUT_MS, lambda _: None, security)
    deadline = Deadline.after(clock, _ASK_TIMEOUT_MS)
    session.start(deadline)
    try:
        return read_mark(session, store_folder(incarnation), deadline)
    finally:
        session.close()
