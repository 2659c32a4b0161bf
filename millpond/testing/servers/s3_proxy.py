"""An HTTP proxy on the loopback interface that stands for an unreliable object store.

It sits between `ObstoreObjects` and an S3 server and knows where a request ends, so it can do to
one request what networks and servers do: answer and lose the answer, fail before or after the work
was done, take long, cut the body, or let a put that has failed land later. Point
`Store.open` at it with ``storage_options=s3_options(proxy.address)``.

Faults are planned for coming requests (`S3Proxy.plan`), or happen at random (`S3Proxy.storm`).
"""

from __future__ import annotations

import http.client
import socket
import struct
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final, Self

from millpond.statestore.leases.zookeeper_process import HOST
from millpond.statestore.types import Clock, Rng

_LATE_MAX: Final = 10_000
_HOP_HEADERS: Final = frozenset(("connection", "transfer-encoding", "keep-alive", "content-length"))


class S3Fault(Enum):
    """What happens to a request."""

    REPLY_LOST = "done, and the connection closed without an answer"
    RESET = "not done, and the connection reset"
    ERROR_500 = "not done, 500"
    UNAVAILABLE_503 = "not done, 503"
    THROTTLED_429 = "not done, 429"
    ERROR_AFTER = "done, and answered 500"
    SLOW = "done, and answered late"
    CUT_BODY = "done, and half of the answer's body sent"
    LATE = "not done, the connection closed, and done later, when `S3Proxy.land` is called"

    @property
    def lands(self) -> bool:
        """Return True if the request takes effect at once."""
        return self in {S3Fault.REPLY_LOST, S3Fault.ERROR_AFTER, S3Fault.SLOW, S3Fault.CUT_BODY}


_STATUS: Final = {S3Fault.ERROR_500: 500, S3Fault.UNAVAILABLE_503: 503, S3Fault.THROTTLED_429: 429}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reply:
    status: int
    headers: list[tuple[str, str]]
    body: bytes


@dataclass(slots=True, kw_only=True)
class _Planned:
    fault: S3Fault
    method: str
    within: str
    times: int


class S3Proxy:
    """The proxy; close it when done.

    Args:
        port: of the S3 server on this machine.
        clock: for slow answers.
        delay_ms: how late a slow answer is.

    Attributes:
        happened: how often each fault has happened.
        received_bytes: how much data requests have brought, done or not.
        requests: how many requests came, by method and path with its query.
    """

    def __init__(self, port: int, clock: Clock, *, delay_ms: float = 200.0) -> None:
        self._port = port
        self._clock = clock
        self._delay_ms = delay_ms
        self._lock = threading.Lock()
        self._planned: list[_Planned] = []
        self._storm: tuple[Mapping[S3Fault, float], Rng, str] | None = None
        self._late: list[_Request] = []
        self._cut = False
        self.happened: Counter[S3Fault] = Counter()
        self.received_bytes: int = 0
        self.requests: Counter[tuple[str, str]] = Counter()
        self._server = _Server((HOST, 0), _Handler)
        self._server.proxy = self
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.05,), name="s3-proxy", daemon=True
        )
        self._thread.start()

    @property
    def address(self) -> str:
        """``host:port`` for the client."""
        host, port = self._server.server_address[:2]
        return f"{host!s}:{port}"

    def plan(self, fault: S3Fault, *, method: str = "PUT", within: str = "", times: int = 1) -> None:
        """Let this happen to the next ``times`` requests whose method is this and whose path contains ``within``."""
        with self._lock:
            self._planned.append(_Planned(fault=fault, method=method, within=within, times=times))

    def storm(self, chances: Mapping[S3Fault, float], rng: Rng, *, within: str = "") -> None:
        """Let faults happen at random, each with its chance in [0, 1], to all requests on such paths."""
        with self._lock:
            self._storm = (chances, rng, within)

    def cut(self) -> None:
        """Answer no request until `mend`."""
        self._cut = True

    def mend(self) -> None:
        """Forget all plans; late puts stay under way."""
        with self._lock:
            self._planned.clear()
            self._storm, self._cut = None, False

    def land(self) -> list[int]:
        """Let the late requests be done now; the server's status for each (412: it came too late)."""
        with self._lock:
            late, self._late = self._late, []
        return [self._forward(request).status for request in late]

    def close(self) -> None:
        """End the proxy."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def __enter__(self) -> Self:
        """It runs already."""
        return self

    def __exit__(self, *_: object) -> None:
        """End it."""
        self.close()

    def _next_fault(self, request: _Request) -> S3Fault | None:
        with self._lock:
            if self._cut:
                return S3Fault.RESET
            for planned in self._planned:
                if planned.times > 0 and planned.method == request.method and planned.within in request.path:
                    planned.times -= 1
                    return self._happens(planned.fault)
            if self._storm is not None and self._storm[2] in request.path:
                chances, rng, _ = self._storm
                for fault, chance in chances.items():
                    if rng.random() < chance:
                        return self._happens(fault)
        return None

    def _happens(self, fault: S3Fault) -> S3Fault:
        self.happened[fault] += 1
        return fault

    def treat(self, request: _Request) -> tuple[S3Fault | None, _Reply | None]:
        """What happens to a request, and what its sender hears; only the server's handler calls this."""
        with self._lock:
            self.received_bytes += len(request.body)
            self.requests[request.method, request.path] += 1
        fault = self._next_fault(request)
        if fault is S3Fault.LATE:
            with self._lock:
                self._late = [*self._late, request][-_LATE_MAX:]
        if fault is not None and not fault.lands:
            status = _STATUS.get(fault)
            return fault, None if status is None else _Reply(status=status, headers=[], body=b"")
        reply = self._forward(request)
        if fault is S3Fault.ERROR_AFTER:
            reply = _Reply(status=500, headers=[], body=b"")
        if fault is S3Fault.SLOW:
            self._clock.sleep_ms(self._delay_ms)
        return fault, None if fault is S3Fault.REPLY_LOST else reply

    def _forward(self, request: _Request) -> _Reply:
        connection = http.client.HTTPConnection(HOST, self._port, timeout=30.0)
        try:
            connection.request(request.method, request.path, request.body, dict(request.headers))
            reply = connection.getresponse()
            return _Reply(status=reply.status, headers=reply.getheaders(), body=reply.read())
        except OSError:
            return _Reply(status=502, headers=[], body=b"")
        finally:
            connection.close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    # A thousand requests would leave a thousand threads to join.
    block_on_close = False
    request_queue_size = 128
    proxy: S3Proxy

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that has gone away is what this is about."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def do_GET(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        request = _Request(
            method=self.command,
            path=self.path,
            headers=dict(self.headers.items()),
            body=self.rfile.read(length),
        )
        fault, reply = self.server.proxy.treat(request)
        self.close_connection = fault is not None
        if reply is None:
            self._hang_up(is_reset=fault is S3Fault.RESET)
        else:
            self._answer(reply, is_cut=fault is S3Fault.CUT_BODY)

    do_PUT = do_POST = do_DELETE = do_HEAD = do_GET  # noqa: N815 - the names that the server looks for

    def _answer(self, reply: _Reply, *, is_cut: bool) -> None:
        self.send_response_only(reply.status)
        told = "0"
        for name, value in reply.headers:
            if name.lower() == "content-length":
                told = value
            elif name.lower() not in _HOP_HEADERS:
                self.send_header(name, value)
        length = len(reply.body)
        if self.command != "HEAD":
            # Where there is no body to cut, the client is promised one.
            told = str(max(length, 1) if is_cut else length)
        self.send_header("Content-Length", told)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(reply.body[: length // 2] if is_cut else reply.body)
        self.wfile.flush()

    def _hang_up(self, *, is_reset: bool) -> None:
        if is_reset:
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        else:
            self.connection.shutdown(socket.SHUT_RDWR)
        self.connection.close()

    def log_message(self, *_: object) -> None:
        """Log nothing: a line per request is noise."""
