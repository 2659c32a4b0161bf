"""kazoo's client, made for one ensemble: its hosts, its retries, and how it proves itself.

With TLS or credentials kazoo gets another handler, which makes the connections: kazoo's own trusts every
authority of the system in addition to the one that is named, waits for data that TLS has decrypted already, and
takes a server that dies while it checks credentials for one that refuses them for good.
"""

from __future__ import annotations

import logging
import socket
import ssl
from collections.abc import Sequence
from math import ceil
from typing import Any, Final

from kazoo.client import KazooClient
from kazoo.handlers.threading import KazooTimeoutError, SequentialThreadingHandler
from kazoo.retry import KazooRetry
from kazoo.security import ACL, Id

from millpond.statestore.zookeeper.security import ZooKeeperSecurity

HANDSHAKE_S_MAX: Final = 2.0
"""How long a server may take to admit a session before the next one is tried."""

_log = logging.getLogger(__name__)


def _is_harmless(record: logging.LogRecord) -> bool:
    """Whether a line of kazoo's shows neither requests, which may carry credentials, nor a session's password."""
    return record.levelno >= logging.INFO


_log.addFilter(_is_harmless)


def make_client(hosts: str, session_timeout_ms: int, security: ZooKeeperSecurity) -> Any:
    """A client that is not connected yet.

    Raises:
        InvalidError: a file that the security names cannot be read.
    """
    extra: dict[str, Any] = {}
    if security.tls or security.is_authenticated:
        extra = {"handler": _Handler(security.tls_context()), "use_ssl": security.tls}
        extra["default_acl"] = access_list_of(security) or None
    if security.user is not None:
        extra["sasl_options"] = {
            "mechanism": "DIGEST-MD5",
            "username": security.user,
            "password": security.password,
        }
    return KazooClient(
        hosts=_repeated(hosts, session_timeout_ms),
        timeout=session_timeout_ms / 1_000,
        connection_retry=KazooRetry(max_tries=-1, delay=0.05, max_delay=0.5),
        command_retry=KazooRetry(max_tries=1),
        logger=_log,
        **extra,
    )


def access_list_of(security: ZooKeeperSecurity) -> list[ACL]:
    """The access list of every node that a client makes, as kazoo has it."""
    return [ACL(grant.permissions, Id(grant.scheme, grant.id)) for grant in security.access_list]


def connection_fault(client: Any) -> str | None:
    """Why the last connection of a client failed, as far as TLS knows."""
    handler = client.handler
    return handler.fault if isinstance(handler, _Handler) else None


class _Ending:
    """A socket that tells kazoo of the other side's end as of a time-out, after which it connects again.

    kazoo takes any other end during SASL for a refusal of the credentials, and gives the session up.
    """

    def recv(self, *args: Any) -> bytes:
        """Bytes that have come, at least one."""
        try:
            data: bytes = super().recv(*args)  # type: ignore[misc]
        except ssl.SSLError:
            raise  # Among them that a message is not complete yet.
        except OSError as error:
            raise KazooTimeoutError("the connection has broken") from error
        if not data:
            raise KazooTimeoutError("the server has ended the connection")
        return data


class _PlainSocket(_Ending, socket.socket):
    pass


class _TlsSocket(_Ending, ssl.SSLSocket):
    pass


class _Handler(SequentialThreadingHandler):  # type: ignore[misc]
    """kazoo's threads, with connections of ours."""

    def __init__(self, context: ssl.SSLContext | None) -> None:
        super().__init__()
        if context is not None:
            context.sslsocket_class = _TlsSocket
        self._context = context
        self.fault: str | None = None

    def create_connection(
        self, address: tuple[str, int], hostname: str, timeout: float, **_: object
    ) -> socket.socket:
        """A connection, with its TLS handshake done."""
        try:
            opened = socket.create_connection(address, min(timeout, HANDSHAKE_S_MAX))
            connection: socket.socket = _PlainSocket(fileno=opened.detach())
            try:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                connection.settimeout(min(timeout, HANDSHAKE_S_MAX))
                if self._context is not None:
                    connection = self._context.wrap_socket(connection, server_hostname=hostname)
            except BaseException:
                connection.close()
                raise
        except OSError as error:
            self.fault = _reason_of(error)
            raise
        self.fault = None
        return connection

    def select(
        self,
        readable: Sequence[Any],
        writable: Sequence[Any],
        failed: Sequence[Any],
        timeout: float | None = None,
    ) -> tuple[list[Any], list[Any], list[Any]]:
        """Wait for sockets; bytes that TLS has decrypted already count as come."""
        held = [each for each in readable if isinstance(each, ssl.SSLSocket) and each.pending()]
        if held:
            return held, [], []
        found: tuple[list[Any], list[Any], list[Any]] = super().select(readable, writable, failed, timeout)
        return found


def _reason_of(error: OSError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the server's certificate is not accepted: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        return f"no TLS connection: {error.reason or error}"
    return str(error.strerror or error)


def _repeated(hosts: str, session_timeout_ms: int) -> str:
    """The hosts, so often that kazoo waits at most `HANDSHAKE_S_MAX` for a server's handshake.

    A server that is starting may accept a connection and never answer on it. kazoo
    waits for the session's time-out divided by the number of hosts, then goes on to the
    next; one host and ten seconds would make every restart an outage of ten seconds.
    """
    names, slash, root = hosts.partition("/")
    times = ceil(session_timeout_ms / 1_000 / HANDSHAKE_S_MAX / len(names.split(",")))
    return ",".join([names] * max(1, times)) + slash + root
