"""A proxy on the loopback interface that stands for a bad network between a client and a server.

Point the client at `TcpProxy.address`. `TcpProxy.cut` closes every connection and
refuses new ones; `TcpProxy.lose_replies` lets requests through and loses the
answers, so that the client cannot know whether they were executed; `TcpProxy.mend` makes
the network whole again. Bytes that are under way at a change may still arrive.
"""

from __future__ import annotations

import socket
import threading
import weakref
from contextlib import suppress
from enum import Enum
from typing import Final

_LOOPBACK: Final = "127.0.0.1"
_CHUNK_BYTES: Final = 64 * 1024


class _Network(Enum):
    DEFAULT_MEMBER = "whole"
    CUT = "cut"
    DEAF = "deaf"


class TcpProxy:
    """Forwards connections to one server until a call changes that; close it when done."""

    def __init__(self, port: int) -> None:
        self._server = (_LOOPBACK, port)
        self._network = _Network.DEFAULT_MEMBER
        self._lose_replies_to: bytes | None = None
        self._replies_lost = 0
        self._close_at: bytes | None = None
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._deaf: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        self._listener = socket.create_server((_LOOPBACK, 0))
        self._thread = threading.Thread(target=self._accept, name="tcp-proxy", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        """``host:port`` for the client."""
        host, port = self._listener.getsockname()
        return f"{host}:{port}"

    def cut(self) -> None:
        """Close every connection and every new one."""
        self._network = _Network.CUT
        self._close_connections()

    def lose_replies(self, to: bytes = b"") -> None:
        """Lose the server's answers, from the next request on that contains ``to``."""
        self._lose_replies_to = to

    def close_at(self, request: bytes) -> None:
        """Close a connection instead of forwarding the next request that contains ``request``, once."""
        self._close_at = request

    @property
    def has_closed(self) -> bool:
        """Return True if the request that `close_at` waits for has come."""
        return self._close_at is None

    @property
    def replies_lost(self) -> int:
        """The number of pieces of answers lost so far."""
        return self._replies_lost

    def mend(self) -> None:
        """Forward both ways again; lost data stays lost, so connections that were deaf are closed."""
        was_deaf = self._network is _Network.DEAF
        self._lose_replies_to = None
        self._network = _Network.DEFAULT_MEMBER
        if was_deaf:
            self._close_connections()

    def close(self) -> None:
        """End the proxy and its connections."""
        self.cut()
        # A thread that waits in `accept` hears of a shutdown, not of a close.
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if self._network is _Network.CUT or not self._connect(client):
                client.close()

    def _connect(self, client: socket.socket) -> bool:
        try:
            server = socket.create_connection(self._server, timeout=5.0)
        except OSError:
            return False
        server.settimeout(None)
        with self._lock:
            self._open |= {client, server}
        for source, target in ((client, server), (server, client)):
            threading.Thread(target=self._pump, args=(source, target, target is client), daemon=True).start()
        if self._network is _Network.CUT:
            self._close_connections()
        return True

    def _pump(self, source: socket.socket, target: socket.socket, is_reply: bool) -> None:
        forward = self._reply if is_reply else self._request
        try:
            while chunk := source.recv(_CHUNK_BYTES):
                forward(target, chunk)
        except OSError:
            pass  # One side has gone; the other is closed below.
        finally:
            self._close_pair(source, target)

    def _request(self, server: socket.socket, chunk: bytes) -> None:
        if self._close_at is not None and self._close_at in chunk:
            self._close_at = None
            raise ConnectionAbortedError
        if self._lose_replies_to is not None and self._lose_replies_to in chunk:
            self._network = _Network.DEAF
        server.sendall(chunk)

    def _reply(self, client: socket.socket, chunk: bytes) -> None:
        if self._network is _Network.DEAF:
            self._deaf.add(client)
        # As on a real network, nothing arrives on a connection behind lost data, not even after `mend`.
        if client in self._deaf:
            self._replies_lost += 1
        else:
            client.sendall(chunk)

    def _close_pair(self, *pair: socket.socket) -> None:
        with self._lock:
            mine = self._open.intersection(pair)
            self._open -= mine
        for connection in mine:
            _close(connection)

    def _close_connections(self) -> None:
        with self._lock:
            connections, self._open = self._open, set()
        for connection in connections:
            _close(connection)


def _close(connection: socket.socket) -> None:
    with suppress(OSError):  # The other end may have been faster.
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()
