"""A ZooKeeper for stores that are used on one machine: started with the first store, stopped with the last.

The first process that opens a store starts the server and records its process id and port in ``server.json``; the others
join it. Every user holds a shared lock on the file ``users``, and the last one to close, who can lock it alone, stops the
server. Locks end with their process, so killed users do not count. ``lock`` serialises starting, joining and stopping.
Losing the leases in it is safe, because sequencers are raised above the table's. So data that the server cannot read, such
as a log that a full disk has cut, is set aside, and the server starts anew. Only the high-water mark is of value: it is
carried over (`carry_over_mark`).

Every user of the machine can reach the server's port, so it admits only sessions that know its secret. The secret is in a
file that only this user can read, and is drawn anew by the first process. The nodes have no access lists: no other
session comes near them, and a server of an earlier version serves them too.
"""

from __future__ import annotations

import atexit
import fcntl
import logging
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Final

from kazoo.security import ACL

from millpond.statestore.errors import InvalidError, UnavailableError
from millpond.statestore.leases.zookeeper_client import OPEN_ENSEMBLE, ZooKeeperSecurity
from millpond.statestore.leases.zookeeper_process import (
    DATA,
    HOST,
    JAAS_OPTION,
    ServerProcess,
    find_jars,
    find_java,
    forget,
    free_ports,
    is_free,
    launch,
    make_folder,
    open_own,
    place_of_server,
    read_own,
    recorded_server,
    refuse_old_java,
    write_own,
)
from millpond.statestore.types import Clock, Rng

_LOG: Final = logging.getLogger("millpond")
_READY_MS: Final = 60_000
_ANSWER_MS: Final = 30_000
_START_ATTEMPTS_MAX: Final = 5
_LOCK_POLL_MS: Final = 20
_COMES_FREE_POLLS: Final = 100
_DAMAGED: Final = "data.damaged"
# A server's log begins with so many bytes.
_ROOM_BYTES: Final = 2**20
_PORT_TAKEN: Final = "BindException"
"""The name of Java's error, which unlike its message is the same in every language."""


_USER: Final = "millpond"
_SECRET: Final = "secret"  # noqa: S105 - the name of a file
_JAAS: Final = "jaas.conf"
_SECRET_TEXT: Final = re.compile(rb"[0-9a-f]{32,128}")
_SECURED: Final = {
    "authProvider.sasl": "org.apache.zookeeper.server.auth.SASLAuthenticationProvider",
    "enforce.auth.enabled": "true",
    "enforce.auth.schemes": "sasl",
}
_USERS: Final = """\
Server {{
    org.apache.zookeeper.server.auth.DigestLoginModule required user_{user}="{secret}";
}};
"""


class _PortTakenError(UnavailableError):
    """Another program has taken the server's port."""


class _EndedError(UnavailableError):
    """The server has ended by itself, with room on the disk and its port."""


class OwnServerSecurity(ZooKeeperSecurity):
    """The credentials of a store's own server, whose nodes have no access lists."""

    @property
    def access_list(self) -> list[ACL]:
        return []


def security_of_server(server: ServerProcess) -> ZooKeeperSecurity:
    """Return how to connect to a folder's server, which is open if an earlier version has started it."""
    if not server.is_secured():
        return OPEN_ENSEMBLE
    secret = read_own(server.folder / _SECRET)
    if not _SECRET_TEXT.fullmatch(secret):
        raise UnavailableError(
            "the secret of the store's zookeeper cannot be read: use the store as the user who has opened it",
            file=server.folder / _SECRET,
        )
    return OwnServerSecurity(user=_USER, password=secret.decode())


def local_security(place: str) -> ZooKeeperSecurity:
    """Return how to connect to the server of the store at ``place``."""
    server = recorded_server(Path(place) / "zookeeper")
    return OPEN_ENSEMBLE if server is None else security_of_server(server)


class EmbeddedZooKeeper:
    """This process's part in the server of a folder. With ``is_open``, for tests, the server admits everybody.

    A running server may be silent for ``answer_timeout_ms`` before it is replaced. A new one may take ``ready_timeout_ms`` until
    it serves; the wait ends early if the process ends.
    """

    def __init__(
        self,
        folder: Path,
        clock: Clock,
        rng: Rng,
        *,
        port: int | None = None,
        java: str | None = None,
        is_open: bool = False,
        answer_timeout_ms: int = _ANSWER_MS,
        ready_timeout_ms: int = _READY_MS,
    ) -> None:
        self._folder = place_of_server(folder)
        self._clock = clock
        self._rng = rng
        self._port = port
        self._java = java
        self._is_open = is_open
        self._answer_timeout_ms = answer_timeout_ms
        self._ready_timeout_ms = ready_timeout_ms
        self._use: int | None = None
        self._process_id = os.getpid()
        self._server: ServerProcess | None = None

    def start_or_join(self) -> str:
        """Make sure that the server runs, count as its user, and return its ``host:port``.

        Another call restarts a server that has died, on its old port if that is free.
        """
        make_folder(self._folder)
        with self._locked(), ExitStack() as undone:
            if self._use is None:
                self._use = open_own(self._folder / "users", os.O_RDWR | os.O_CREAT)
                undone.callback(self._leave)
                if not self._is_open and _lock_alone(self._use):
                    self._begin_alone()
                fcntl.flock(self._use, fcntl.LOCK_SH)
                atexit.register(self.close)
            self._server = self._joinable() or self._start()
            undone.pop_all()
        return f"{HOST}:{self._server.port}"

    def is_in_use(self) -> bool:
        """Return True if the server runs and a process uses it, which may hold leases."""
        server = recorded_server(self._folder)
        if server is None or not server.is_own():
            return False
        with self._locked():
            users = open_own(self._folder / "users", os.O_RDWR | os.O_CREAT)
            try:
                return not _lock_alone(users)
            finally:
                _unlock(users)

    @property
    def security(self) -> ZooKeeperSecurity:
        """The credentials of the server that `start_or_join` has found or started."""
        return OPEN_ENSEMBLE if self._server is None else security_of_server(self._server)

    def _begin_alone(self) -> None:
        """Draw a new secret, because a copy of the folder may have told the last one; end an open server."""
        server = recorded_server(self._folder)
        if server is not None and server.is_own():
            if server.is_secured():
                return
            server.stop(self._clock)
        write_own(self._folder / _SECRET, (self._rng.token() + self._rng.token()).encode())

    def _leave(self) -> None:
        if self._use is not None:
            _unlock(self._use)
        self._use = None
        atexit.unregister(self.close)

    def close(self) -> None:
        """Stop using the server, and stop it if it has no other user."""
        if self._use is None or self._process_id != os.getpid():
            return
        # After the folder was removed, the users of its server still share their lock on the unlinked file.
        with self._locked() if self._folder.exists() else nullcontext():
            if _lock_alone(self._use):
                self._stop()
            self._leave()

    def _joinable(self) -> ServerProcess | None:
        """Return the server that is running already."""
        server = recorded_server(self._folder)
        if server is None or not server.is_own():
            return None
        # A hanging server and a starting one (its starter was killed) look alike at first; only the
        # hanging one is still silent at the time-out, and is replaced.
        if server.wait_serving(self._clock, self._answer_timeout_ms):
            return server
        if not server.kill(self._clock):
            raise UnavailableError(
                "zookeeper's server hangs and cannot be ended",
                process_id=server.process_id,
                folder=self._folder,
            )
        return None

    def _start(self) -> ServerProcess:
        try:
            return self._launch()
        except _EndedError as failure:
            data = self._folder / DATA
            if not any(data.rglob("*")):
                raise
            # Its words depend on what is damaged and on the version; a start without the data tells whether that is it.
            shutil.rmtree(self.damaged, ignore_errors=True)
            data.rename(self.damaged)
            with ExitStack() as undone:
                undone.callback(self.damaged.rename, data)
                undone.callback(shutil.rmtree, data, ignore_errors=True)
                try:
                    server = self._launch()
                except UnavailableError:
                    raise failure from None
                undone.pop_all()
            _LOG.warning("the data of the store's zookeeper cannot be read, and it starts anew: %s", failure)
            return server

    @property
    def damaged(self) -> Path:
        """Where data lies that the server could not read, until its high-water mark is carried over."""
        return self._folder / _DAMAGED

    def _launch(self) -> ServerProcess:
        java, jars = self._java or find_java(), find_jars()
        if shutil.which(java) is None:
            raise UnavailableError("no java found where it was said to be", java=java)
        failure = UnavailableError("no port is free for zookeeper's server", folder=self._folder)
        for port in self._ports():
            with ExitStack() as undone:
                # On failure and on interruption alike: a half-started server must not be abandoned.
                undone.callback(self._stop)
                server = launch(self._folder, port, java=java, jars=jars, **self._secured())
                if server.wait_serving(self._clock, self._ready_timeout_ms):
                    undone.pop_all()
                    return server
                failure = self._failure(server, java)
            # Another program has taken it since it was found free.
            if not isinstance(failure, _PortTakenError):
                break
        raise failure

    def _secured(self) -> dict[str, Any]:
        if self._is_open:
            return {}
        secret = read_own(self._folder / _SECRET).decode(errors="replace")
        write_own(self._folder / _JAAS, _USERS.format(user=_USER, secret=secret).encode())
        return {"settings": _SECURED, "java_options": (JAAS_OPTION + _JAAS,)}

    def _failure(self, server: ServerProcess, java: str) -> UnavailableError:
        """Return the error of a server that does not start, with its last output."""
        refuse_old_java(java)
        said, kind = server.last_words(), UnavailableError
        cause = f"it does not serve after {self._ready_timeout_ms / 1_000:g} s"
        if _PORT_TAKEN in said:
            kind, cause = _PortTakenError, "its port was taken meanwhile"
        elif shutil.disk_usage(self._folder).free < _ROOM_BYTES:
            cause = "the disk is full: make room, and start again"
        elif not server.is_running():
            kind, cause = _EndedError, "it has ended"
        failure = kind(
            "zookeeper's server does not start",
            cause=cause,
            port=server.port,
            folder=self._folder,
            java=java,
        )
        failure.add_note(f"It said last:\n{said or '(nothing)'}")
        return failure

    def _ports(self) -> Iterator[int]:
        """Yield ports to try: the requested one, or the last one (for clients that wait for it), then free ones."""
        if self._port is not None:
            if not is_free(self._port):
                raise InvalidError("the port for zookeeper's server is in use", port=self._port)
            yield self._port
            return
        # The record is gone after a failed start, for example on a full disk.
        last = recorded_server(self._folder) or self._server
        if last is not None and self._comes_free(last.port):
            yield last.port
        for _ in range(_START_ATTEMPTS_MAX):
            yield free_ports(1)[0]

    def _comes_free(self, port: int) -> bool:
        """Wait for a free port: a killed server's socket outlives its process by a moment."""
        for _ in range(_COMES_FREE_POLLS):
            if is_free(port):
                return True
            self._clock.sleep_ms(_LOCK_POLL_MS)
        return False

    def _stop(self) -> None:
        server = recorded_server(self._folder) or self._server
        if server is not None and server.stop(self._clock):
            forget(self._folder)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Exclude the other processes that start, join or stop this folder's server."""
        descriptor = open_own(self._folder / "lock", os.O_RDWR | os.O_CREAT)
        deadline_us = self._clock.monotonic_us() + 3 * _READY_MS * 1_000
        try:
            while not _lock_alone(descriptor):
                if self._clock.monotonic_us() >= deadline_us:
                    raise UnavailableError(
                        "another process keeps zookeeper's server locked", folder=self._folder
                    )
                self._clock.sleep_ms(_LOCK_POLL_MS * (0.5 + self._rng.random()))
            yield
        finally:
            _unlock(descriptor)


def _lock_alone(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _unlock(descriptor: int) -> None:
    # Closing alone would leave the lock with children that were forked meanwhile, which would count as users.
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)
