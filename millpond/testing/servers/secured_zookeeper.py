"""A real secured ZooKeeper on the loopback interface: TLS, users with passwords, access lists.

The server comes out of PySpark's jars. Certificates are made on the spot, for a day, by an authority that
ends with the folder.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final, Self

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from millpond.statestore.errors import UnavailableError
from millpond.statestore.leases.zookeeper_client import ZooKeeperSecurity
from millpond.statestore.leases.zookeeper_process import (
    HOST,
    ServerProcess,
    find_jars,
    find_java,
    free_ports,
    launch,
)
from millpond.statestore.types import Clock

_READY_MS: Final = 60_000
_VALID: Final = timedelta(days=1)
_JAAS: Final = """\
Server {
    org.apache.zookeeper.server.auth.DigestLoginModule required
%s;
};
"""
_PROVIDER: Final = "org.apache.zookeeper.server.auth.SASLAuthenticationProvider"
_NETTY: Final = "org.apache.zookeeper.server.NettyServerCnxnFactory"


@dataclass(frozen=True, slots=True)
class _Made:
    key: ec.EllipticCurvePrivateKey
    certificate: x509.Certificate


class Authority:
    """An authority that signs certificates; its own is the file ``ca.pem``.

    Args:
        folder: where the files are written.
        clock: tells when certificates are made.
        name: the authority's.
    """

    def __init__(self, folder: Path, clock: Clock, name: str = "test authority") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._now = datetime.fromtimestamp(clock.now_us() / 1e6, UTC)
        self._root = self._sign(name, None)
        self.ca_file: Path = folder / "ca.pem"
        self.ca_file.write_bytes(self._root.certificate.public_bytes(serialization.Encoding.PEM))

    def issue(self, name: str, key_password: str | None = None) -> Path:
        """A PEM file with a key and a certificate, of a server on the loopback interface or of a client.

        Args:
            name: the subject's.
            key_password: encrypts the key.
        """
        made = self._sign(name, self._root)
        encryption: serialization.KeySerializationEncryption = serialization.NoEncryption()
        if key_password is not None:
            encryption = serialization.BestAvailableEncryption(key_password.encode())
        file = self._folder / f"{name}.pem"
        file.write_bytes(
            made.key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption)
            + made.certificate.public_bytes(serialization.Encoding.PEM)
        )
        file.chmod(0o600)
        return file

    def _sign(self, name: str, issuer: _Made | None) -> _Made:
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(subject if issuer is None else issuer.certificate.subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(self._now - _VALID)
            .not_valid_after(self._now + _VALID)
            .add_extension(x509.BasicConstraints(ca=issuer is None, path_length=None), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        )
        if issuer is not None:
            here = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(HOST))])
            uses = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
            above = x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer.key.public_key())
            builder = builder.add_extension(here, critical=False).add_extension(uses, critical=False)
            builder = builder.add_extension(above, critical=False)
        signer = key if issuer is None else issuer.key
        return _Made(key, builder.sign(signer, hashes.SHA256()))


class SecuredZooKeeper:
    """One server with a TLS port for clients, and an open port that `ServerProcess` asks for its health.

    It admits connections without credentials, as ZooKeeper does by itself: the access lists alone decide their
    reach.

    Args:
        folder: its place; its data is served again by the next one.
        clock: measures the bounds on waiting.
        users: passwords by user.
        client_certificates: the server's treatment of client certificates: ``none`` (it does not
            ask for them), ``want`` or ``need``.

    Example:
        >>> from millpond.statestore.system import SystemClock
        >>> with SecuredZooKeeper(Path("zk"), SystemClock(), {"shop": "a secret"}) as server:  # doctest: +SKIP
        ...     print(server.hosts, server.authority.ca_file)
    """

    def __init__(
        self,
        folder: Path,
        clock: Clock,
        users: Mapping[str, str],
        *,
        client_certificates: str = "none",
    ) -> None:
        self._folder = folder.resolve()
        self._clock = clock
        self.users: dict[str, str] = dict(users)
        self.authority: Authority = Authority(self._folder / "certificates", clock)
        self._certificate = self.authority.issue("server")
        self._client_certificates = client_certificates
        self._port, self._tls_port = free_ports(2)
        self._server: ServerProcess | None = None

    @property
    def hosts(self) -> str:
        """``host:port`` of the TLS port."""
        return f"{HOST}:{self._tls_port}"

    @property
    def plain_hosts(self) -> str:
        """``host:port`` of the port without TLS, for users with a password."""
        return f"{HOST}:{self._port}"

    def security_of(self, user: str) -> ZooKeeperSecurity:
        """What a client passes to connect as one of the users."""
        return ZooKeeperSecurity(user=user, password=self.users[user], ca_file=self.authority.ca_file)

    def start(self) -> None:
        """Start the server, with the users of now, and wait until it serves.

        Raises:
            UnavailableError: it does not; the note is its last output.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        lines = "\n".join(f'    user_{name}="{password}"' for name, password in self.users.items())
        jaas = self._folder / "jaas.conf"
        jaas.write_text(_JAAS % lines)
        jaas.chmod(0o600)
        settings = {
            "secureClientPort": str(self._tls_port),
            "secureClientPortAddress": HOST,
            "serverCnxnFactory": _NETTY,
            "authProvider.sasl": _PROVIDER,
            "ssl.keyStore.location": str(self._certificate),
            "ssl.trustStore.location": str(self.authority.ca_file),
            "ssl.clientAuth": self._client_certificates,
            "forceSync": "no",
        }
        self._server = launch(
            self._folder,
            self._port,
            java=find_java(),
            jars=find_jars(),
            settings=settings,
            java_options=(f"-Djava.security.auth.login.config={jaas}",),
        )
        if not self._server.wait_serving(self._clock, _READY_MS):
            failure = UnavailableError("the secured server does not start", folder=self._folder)
            failure.add_note(self._server.last_words())
            self.close()
            raise failure

    def close(self) -> None:
        """Kill the server."""
        if self._server is not None:
            self._server.kill(self._clock)
            self._server = None

    def __enter__(self) -> Self:
        """Start."""
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Kill the server."""
        self.close()
