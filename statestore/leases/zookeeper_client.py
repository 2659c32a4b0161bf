"""kazoo's client, made for one ensemble: hosts, retries, credentials and access lists.

TLS hides the traffic and proves the servers (and, with a certificate, the client), SASL (DIGEST-MD5) proves a user with a
password, and access lists on every node of a store keep others from reading it or taking a lease. No ``repr``, error or
log line holds a password.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import ssl
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache
from math import ceil
from pathlib import Path
from typing import Any, Final, Self

from kazoo.client import KazooClient
from kazoo.handlers.threading import KazooTimeoutError, SequentialThreadingHandler
from kazoo.retry import KazooRetry
from kazoo.security import ACL, Id

from millpond.statestore.arguments import check_flags, check_instance
from millpond.statestore.errors import InvalidError
from millpond.statestore.objects.obstore import file_here
from millpond.statestore.visible import show_in

ENVIRONMENT_PREFIX: Final = "MILLPOND_ZOOKEEPER_"
_FILE_VARIABLE: Final = f"{ENVIRONMENT_PREFIX}SECURITY"
_PERMISSIONS: Final = {"r": 1, "w": 2, "c": 4, "d": 8, "a": 16}
_ALL: Final = 31
# The parser takes memory with the square of a key's length.
_TOML_BYTES_MAX: Final = 16 << 10
_TRUTH: Final = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class ZooKeeperSecurity:
    r"""How to connect to a secured ensemble; without arguments, as to an open one.

    Every node of a store belongs to its writer alone: to ``user``, else to the certificate's subject, and to ``grants``.
    Opening a store for writing closes nodes that an open ensemble made.

    Args:
        user: name for SASL's DIGEST-MD5.
        password: of the user.
        tls: whether to use TLS; also true if any file below is given.
        ca_file: PEM file of the authorities that may have signed the servers' certificates; the system's by default.
        certificate_file: PEM file of this client's certificate, for servers that require one.
        key_file: PEM file of its key; by default in the same file.
        key_password: of the key.
        check_hostname: whether a server's certificate must name the host that the client connects to.
        grants: further entries of the access lists, as ``scheme:id:permissions`` in the notation of ZooKeeper's
            shell: ``"sasl:auditor:r"``.

    Raises:
        InvalidError: a password without its user, or the reverse; a key without its certificate; a malformed grant.

    Example:
        >>> ZooKeeperSecurity(user="shop", password="a secret", ca_file="ca.pem", grants=("sasl:auditor:r",))
        ZooKeeperSecurity(user='shop', tls=True, ca_file='ca.pem', certificate_file=None, key_file=None, \
    check_hostname=True, grants=('sasl:auditor:r',))
    """

    user: str | None = None
    password: str | None = field(default=None, repr=False)
    tls: bool = False
    ca_file: str | Path | None = None
    certificate_file: str | Path | None = None
    key_file: str | Path | None = None
    key_password: str | None = field(default=None, repr=False)
    check_hostname: bool = True
    grants: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_flags(tls=self.tls, check_hostname=self.check_hostname)
        if (self.user is None) != (self.password is None):
            raise InvalidError("a user of zookeeper has a name and a password: give both", user=self.user)
        if self.certificate_file is None and (self.key_file is not None or self.key_password is not None):
            raise InvalidError("a key for zookeeper needs its certificate: give certificate_file")
        if self.ca_file is not None or self.certificate_file is not None:
            object.__setattr__(self, "tls", True)
        object.__setattr__(self, "grants", tuple(self.grants))
        for grant in self.grants:
            _parse_grant(grant)
        if self.grants and not self.is_authenticated:
            raise InvalidError("grants need a user or a certificate, to whom the nodes belong")

    @property
    def is_authenticated(self) -> bool:
        """True if the servers learn who this client is."""
        return self.user is not None or self.certificate_file is not None

    @property
    def access_list(self) -> list[ACL]:
        """The access list of the nodes that this client makes; empty if every client may do everything."""
        if not self.is_authenticated:
            return []
        # The server replaces "auth" with the names that it knows this client by.
        owner = Id("auth", "") if self.user is None else Id("sasl", self.user)
        return [ACL(_ALL, owner), *map(_parse_grant, self.grants)]

    def tls_context(self) -> ssl.SSLContext | None:
        """Return the context of a connection, or ``None`` without TLS; `InvalidError` names a missing or bad file."""
        if not self.tls:
            return None
        try:
            context = ssl.create_default_context(cafile=self.ca_file)
        except OSError as error:
            raise InvalidError(
                "the certificates of zookeeper's authorities cannot be read",
                ca_file=self.ca_file, cause=error,
            ) from error  # fmt: skip
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.check_hostname = self.check_hostname
        if self.certificate_file is not None:
            # Without a password the library would ask for one at the terminal.
            password = self.key_password or ""
            try:
                context.load_cert_chain(self.certificate_file, self.key_file, lambda: password)
            except OSError as error:
                raise InvalidError(
                    "the certificate for zookeeper, or its key, cannot be read",
                    certificate_file=self.certificate_file, key_file=self.key_file, cause=error,
                ) from error  # fmt: skip
        return context

    @classmethod
    def from_file(cls, path: str | Path) -> Self:
        """Read a TOML file whose keys are the arguments of this class; relative paths in it start at its folder.

        Raises:
            InvalidError: the file is missing, is not TOML, or has unknown keys or values.

        Example::

            user = "shop"
            password = "…"
            ca_file = "ca.pem"
        """
        return cls(**_read_file(path))

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Self:
        """Read ``MILLPOND_ZOOKEEPER_USER``, ``…_PASSWORD``, ``…_TLS``, ``…_CA_FILE`` and so on, one for each argument.

        ``MILLPOND_ZOOKEEPER_SECURITY`` names a file for `from_file`, whose values the other variables replace.
        Grants are separated by commas.

        Raises:
            InvalidError: as `from_file`.
        """
        given: dict[str, Any] = {}
        if path := environment.get(_FILE_VARIABLE):
            given = _read_file(path)
        for each in fields(cls):
            name = ENVIRONMENT_PREFIX + each.name.upper()
            if text := environment.get(name):
                given[each.name] = _from_text(each.name, text, name)
        return cls(**given)


OPEN_ENSEMBLE: Final = ZooKeeperSecurity()


def security_of(hosts: str | None, given: ZooKeeperSecurity | None) -> ZooKeeperSecurity:
    """Return the security of a connection to ``hosts``: the given one, else the environment's.

    A store's own server, where ``hosts`` is ``None``, is open to its machine.

    Raises:
        InvalidError: security is given without an ensemble, or the environment is malformed.
    """
    check_instance("zookeeper", hosts, str, optional=True)
    check_instance("zookeeper_security", given, ZooKeeperSecurity, optional=True)
    if hosts is not None:
        found = ZooKeeperSecurity.from_environment() if given is None else given
        if found.user is not None and not found.tls:
            _warn_without_tls(hosts)
        return found
    if given is not None:
        raise InvalidError("zookeeper_security is for an ensemble: pass zookeeper='host:port,…' as well")
    return OPEN_ENSEMBLE


@lru_cache(maxsize=64)
def _warn_without_tls(hosts: str) -> None:
    _log.warning(
        "the connection to zookeeper has a user and no TLS: whoever reads the network can change leases and guess the "
        "password; set tls=True hosts=`%s`",
        hosts,
    )


def read_toml(path: str | Path, what: str) -> dict[str, Any]:
    """Read a small TOML file of settings; no error quotes it, because it may have passwords."""
    try:
        with file_here(path).open("rb") as file:
            data = file.read(_TOML_BYTES_MAX + 1)
        text = data.decode()
    except (OSError, ValueError) as error:
        raise InvalidError(f"{what} cannot be read", file=path) from error
    if len(data) > _TOML_BYTES_MAX:
        raise InvalidError(f"{what} must have at most {_TOML_BYTES_MAX >> 10} KiB", file=path)
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError):
        raise InvalidError(f'{what} must be TOML, with lines NAME = "VALUE"', file=path) from None


def _read_file(path: str | Path) -> dict[str, Any]:
    what = "the file of zookeeper's security"
    place, given = file_here(path), read_toml(path, what)
    kinds = {each.name: str(each.type) for each in fields(ZooKeeperSecurity)}
    unknown = sorted(given.keys() - kinds.keys())
    if unknown:
        raise InvalidError(
            f"{what} has unknown keys",
            file=path, keys=", ".join(unknown), known=", ".join(kinds),
        )  # fmt: skip
    for name, value in given.items():
        _check_kind(name, value, kinds[name], path)
    files = {name: place.parent / value for name, value in given.items() if name.endswith("_file")}
    return {**given, **files}


def _check_kind(name: str, value: object, kind: str, path: str | Path) -> None:
    # Do not show the value: it may be a password in the wrong place.
    if kind == "bool":
        fits, wanted = isinstance(value, bool), "true or false"
    elif kind.startswith("tuple"):
        fits = isinstance(value, list) and all(isinstance(each, str) for each in value)
        wanted = "a list of texts"
    else:
        fits, wanted = isinstance(value, str), "a text"
    if not fits:
        raise InvalidError(f"{name} is {wanted} in the file of zookeeper's security", file=path)


def _from_text(name: str, text: str, variable: str) -> str | bool | tuple[str, ...]:
    if name == "grants":
        return tuple(part.strip() for part in text.split(","))
    if name in {"tls", "check_hostname"}:
        if text.lower() not in _TRUTH:
            raise InvalidError("the environment variable is true or false", variable=variable, value=text)
        return _TRUTH[text.lower()]
    return text


def _parse_grant(text: str) -> ACL:
    scheme, _, rest = text.partition(":")
    name, _, letters = rest.rpartition(":")
    if not scheme or not name or not letters or not set(letters) <= _PERMISSIONS.keys():
        raise InvalidError(
            "a grant is scheme:id:permissions, with the permissions r, w, c, d and a", grant=text
        )
    return ACL(sum(_PERMISSIONS[letter] for letter in set(letters)), Id(scheme, name))


# How long a server may take to admit a session before the client tries the next one.
HANDSHAKE_S_MAX: Final = 2.0
_log = logging.getLogger(__name__)
show_in(_log)


def _is_told(record: logging.LogRecord) -> bool:
    """Return False for kazoo's lines about connections, some twelve a second of an outage, which `Outage` tells of.

    They are shown if Millpond logs at the level of debug. kazoo's own debug lines never are: they show requests, which
    may carry credentials, and the session's password.
    """
    if record.levelno >= logging.ERROR:
        return True
    return record.levelno >= logging.INFO and logging.getLogger("millpond").isEnabledFor(logging.DEBUG)


_kazoo_log = logging.getLogger(f"{__name__}.kazoo")
show_in(_kazoo_log)
_kazoo_log.addFilter(_is_told)


def make_client(hosts: str, session_timeout_ms: int, security: ZooKeeperSecurity) -> Any:
    extra: dict[str, Any] = {}
    if security.tls or security.is_authenticated:
        extra = {"handler": _Handler(security.tls_context()), "use_ssl": security.tls}
        extra["default_acl"] = security.access_list or None
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
        logger=_kazoo_log,
        **extra,
    )


def connection_fault(client: Any) -> str | None:
    handler = client.handler
    return handler.fault if isinstance(handler, _Handler) else None


class _Ending:
    """A socket that reports the other side's end to kazoo as a time-out, after which kazoo connects again.

    During SASL kazoo takes any other end for a refusal of the credentials, and gives the session up.
    """

    def recv(self, *args: Any) -> bytes:
        try:
            data: bytes = super().recv(*args)  # type: ignore[misc]
        except ssl.SSLError:
            raise  # Such as SSLWantReadError: the message is not complete yet.
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
    """kazoo's threads, with Millpond's connections.

    kazoo's own handler trusts every authority of the system besides the given one, waits for data that TLS has decrypted
    already, and takes a server's death while it checks credentials for a final refusal.
    """

    def __init__(self, context: ssl.SSLContext | None) -> None:
        super().__init__()
        if context is not None:
            context.sslsocket_class = _TlsSocket
        self._context = context
        self.fault: str | None = None

    def create_connection(
        self, address: tuple[str, int], hostname: str, timeout: float, **_: object
    ) -> socket.socket:
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
        """Wait for sockets; bytes that TLS has decrypted already count as received."""
        held = [each for each in readable if isinstance(each, ssl.SSLSocket) and each.pending()]
        if held:
            return held, [], []
        # kazoo makes an epoll object for each call, which takes ten times as long.
        waiting = select.poll()
        for each in (*readable, *writable, *failed):
            wanted = (select.POLLIN if each in readable else 0) | (select.POLLOUT if each in writable else 0)
            waiting.register(each, wanted)
        events = dict(waiting.poll(None if timeout is None else max(0, timeout) * 1_000))
        broken = select.POLLHUP | select.POLLERR
        # A broken socket counts as ready, because reading from it raises the reason.
        return (
            [each for each in readable if events.get(each.fileno(), 0) & (select.POLLIN | broken)],
            [each for each in writable if events.get(each.fileno(), 0) & (select.POLLOUT | broken)],
            [each for each in failed if events.get(each.fileno(), 0) & broken],
        )


def _reason_of(error: OSError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the server's certificate is not accepted: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        return f"no TLS connection: {error.reason or error}"
    return str(error.strerror or error)


def _repeated(hosts: str, session_timeout_ms: int) -> str:
    """Repeat the hosts until kazoo waits at most `HANDSHAKE_S_MAX` for a server's handshake.

    A server that is starting may accept a connection and never answer on it. kazoo waits for the session's time-out divided
    by the number of hosts before it tries the next; one host and ten seconds would make every restart an outage of ten
    seconds.
    """
    names, slash, root = hosts.partition("/")
    times = ceil(session_timeout_ms / 1_000 / HANDSHAKE_S_MAX / len(names.split(",")))
    return ",".join([names] * max(1, times)) + slash + root
