"""A real secured server, and clients with and without rights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kazoo.client import KazooClient
from kazoo.exceptions import NoAuthError
from kazoo.security import OPEN_ACL_UNSAFE

from millpond.statestore.errors import InvalidError, UnavailableError
from millpond.statestore.interval import Interval, intervals_from_boundaries
from millpond.statestore.leases.lease import LeaseState
from millpond.statestore.leases.zookeeper_client import ZooKeeperSecurity
from millpond.statestore.leases.zookeeper_high_water import ask_for_mark
from millpond.statestore.leases.zookeeper_lease import ZooKeeperLeases
from millpond.statestore.log.high_water import Mark
from millpond.statestore.system import SystemClock, SystemRng
from millpond.statestore.types import Sequencer, TableVersion
from millpond.testing.servers.secured_zookeeper import Authority, SecuredZooKeeper
from millpond.testing.servers.tcp_proxy import TcpProxy
from millpond.testing.servers.zookeeper import wait_until

pytestmark = pytest.mark.slow

CLOCK = SystemClock()
INTERVAL = Interval("counter", "a", "m")
NOTHING = Sequencer(0)
MARK = Mark(TableVersion(7), "digest")


@contextmanager
def kazoo(server: SecuredZooKeeper, *, tls: bool, user: str | None = None) -> Iterator[Any]:
    options: dict[str, Any] = {}
    if user is not None:
        options["sasl_options"] = {
            "mechanism": "DIGEST-MD5",
            "username": user,
            "password": server.users[user],
        }
    hosts = server.hosts if tls else server.plain_hosts
    client = KazooClient(hosts, use_ssl=tls, ca=str(server.authority.ca_file), **options)
    client.start()
    try:
        yield client
    finally:
        client.stop()
        client.close()


def nodes_below(client: Any, path: str) -> list[str]:
    return [
        path,
        *(node for name in client.get_children(path) for node in nodes_below(client, f"{path}/{name}")),
    ]


class Pond:
    def __init__(self, server: SecuredZooKeeper, resources: ExitStack) -> None:
        self.server = server
        self.store_id = SystemRng().token()
        self._resources = resources

    def open(self, security: ZooKeeperSecurity, hosts: str | None = None) -> ZooKeeperLeases:
        leases = ZooKeeperLeases(
            hosts or self.server.hosts, self.store_id, "w", CLOCK, session_timeout_ms=4_000, security=security
        )
        self._resources.callback(leases.close)
        return leases

    def filled(self) -> ZooKeeperLeases:
        leases = self.open(self.server.security_of("shop"))
        leases.take(INTERVAL, above=NOTHING)
        leases.high_water.advance(MARK.version, MARK.digest)
        leases.high_water.flush()
        return leases


@pytest.fixture
def pond(secured_zookeeper: SecuredZooKeeper) -> Iterator[Pond]:
    with ExitStack() as resources:
        yield Pond(secured_zookeeper, resources)


@pytest.mark.parametrize("tls", [True, False])
@pytest.mark.parametrize("user", [None, "stranger"])
def test_client_without_credentials_cannot_access_any_node(
    pond: Pond, user: str | None, *, tls: bool
) -> None:
    pond.filled()
    with kazoo(pond.server, tls=True, user="shop") as owner:
        nodes = nodes_below(owner, f"/millpond/{pond.store_id}")
    assert len(nodes) == 5  # The store, its mark, the leases, the interval, its owner.

    with kazoo(pond.server, tls=tls, user=user) as stranger:
        for node in nodes:
            attempts: tuple[Callable[[], object], ...] = (
                lambda: stranger.get(node),  # noqa: B023 - called before the next turn
                lambda: stranger.get_children(node),  # noqa: B023
                lambda: stranger.set(node, b"{}"),  # noqa: B023
                lambda: stranger.delete(node),  # noqa: B023
                lambda: stranger.set_acls(node, OPEN_ACL_UNSAFE),  # noqa: B023
            )
            for attempt in attempts:
                with pytest.raises(NoAuthError):
                    attempt()
        for node in nodes[:-1]:
            if not node.endswith("/owner"):
                with pytest.raises(NoAuthError):
                    stranger.create(f"{node}/another")


def test_other_user_cannot_read_or_take_lease(pond: Pond) -> None:
    held = pond.filled().take(INTERVAL, above=NOTHING)
    tls_only = ZooKeeperSecurity(ca_file=pond.server.authority.ca_file)

    for security, message in (
        (tls_only, "wants credentials"),
        (pond.server.security_of("stranger"), "belong to another user"),
    ):
        with pytest.raises(InvalidError, match=message):
            pond.open(security)
        with pytest.raises(InvalidError, match=message):
            ask_for_mark(pond.server.hosts, pond.store_id, CLOCK, security)
    held.check()


def test_wrong_password_is_refused_at_once(pond: Pond) -> None:
    """The error names the user, not the password."""
    right = pond.server.security_of("shop")

    for wrong in (replace(right, password="planted-wrong"), replace(right, user="stranger")):
        with pytest.raises(InvalidError, match=f"user=`{wrong.user}`") as refused:
            pond.open(wrong)
        assert str(wrong.password) not in str(refused.value)


def test_server_with_unproven_certificate_is_refused(pond: Pond, tmp_path: Path) -> None:
    """Another authority signed it, or it names another host."""
    foreign = Authority(tmp_path, CLOCK, "another authority")
    strange = replace(pond.server.security_of("shop"), ca_file=foreign.ca_file)
    elsewhere = pond.server.hosts.replace("127.0.0.1", "localhost")

    with pytest.raises(UnavailableError, match="certificate is not accepted"):
        pond.open(strange)
    with pytest.raises(UnavailableError, match="certificate is not accepted"):
        pond.open(pond.server.security_of("shop"), elsewhere)
    pond.open(replace(pond.server.security_of("shop"), check_hostname=False), elsewhere)


def test_tls_and_plain_ports_do_not_mix(pond: Pond) -> None:
    with pytest.raises(UnavailableError):
        pond.open(ZooKeeperSecurity())
    with pytest.raises(UnavailableError, match="TLS"):
        pond.open(pond.server.security_of("shop"), pond.server.plain_hosts)


def test_password_protects_nodes_without_tls(pond: Pond) -> None:
    plain = replace(pond.server.security_of("shop"), ca_file=None, tls=False)
    leases = pond.open(plain, pond.server.plain_hosts)
    leases.take(INTERVAL, above=NOTHING)

    with pytest.raises(InvalidError, match="belong to another user"):
        pond.open(pond.server.security_of("stranger"))


def test_grant_allows_only_reading(pond: Pond) -> None:
    """A grant may be added later."""
    pond.filled()
    auditor = pond.server.security_of("auditor")
    with pytest.raises(InvalidError):
        ask_for_mark(pond.server.hosts, pond.store_id, CLOCK, auditor)

    pond.open(replace(pond.server.security_of("shop"), grants=("sasl:auditor:r",)))

    assert ask_for_mark(pond.server.hosts, pond.store_id, CLOCK, auditor) == MARK
    with pytest.raises(InvalidError, match="belong to another user"):
        pond.open(auditor)


def test_nodes_of_open_ensemble_are_closed_on_first_secured_open(tmp_path: Path) -> None:
    with SecuredZooKeeper(tmp_path / "zk", CLOCK, {"shop": "a secret"}) as server, ExitStack() as resources:
        pond = Pond(server, resources)
        opened = pond.open(ZooKeeperSecurity(), server.plain_hosts)
        for interval in intervals_from_boundaries("counter", [f"{number:03}" for number in range(1, 150)]):
            opened.take(interval, above=NOTHING)
        opened.high_water.advance(MARK.version, MARK.digest)
        opened.high_water.flush()

        secured = pond.open(server.security_of("shop"))

        assert secured.high_water.read() == MARK
        with kazoo(server, tls=True, user="shop") as owner:
            nodes = nodes_below(owner, "/millpond")
            lists = {tuple(owner.get_acls(node)[0]) for node in nodes}
        assert len(nodes) == 5 + 2 * 150
        assert [[entry.id for entry in each] for each in lists] == [[("sasl", "shop")]]


def test_nodes_may_belong_to_certificate_subject(tmp_path: Path) -> None:
    server = SecuredZooKeeper(tmp_path / "zk", CLOCK, {"shop": "a secret"}, client_certificates="need")
    with server, ExitStack() as resources:
        pond = Pond(server, resources)
        authority = server.authority
        ours, theirs = (
            ZooKeeperSecurity(
                ca_file=authority.ca_file,
                certificate_file=authority.issue(name, key_password="k"),
                key_password="k",
            )
            for name in ("ours", "theirs")
        )
        pond.open(ours).take(INTERVAL, above=NOTHING)
        pond.open(ours)

        with pytest.raises(InvalidError, match="belong to another user"):
            pond.open(theirs)
        with pytest.raises(UnavailableError):
            pond.open(ZooKeeperSecurity(ca_file=authority.ca_file))


def test_hundreds_of_requests_are_answered_over_tls(pond: Pond) -> None:
    """One TLS record may hold several answers."""
    intervals = intervals_from_boundaries("counter", [f"{number:03}" for number in range(1, 200)])
    leases = pond.open(pond.server.security_of("shop"))

    taken = leases.take_all(dict.fromkeys(intervals, NOTHING))

    assert [lease.interval for lease in taken] == list(intervals)


def test_lease_survives_server_restart(tmp_path: Path) -> None:
    """The session is the same."""
    with SecuredZooKeeper(tmp_path / "zk", CLOCK, {"shop": "a secret"}) as server, ExitStack() as resources:
        pond = Pond(server, resources)
        security = server.security_of("shop")
        leases = ZooKeeperLeases(
            server.hosts, pond.store_id, "w", CLOCK, session_timeout_ms=60_000, security=security
        )
        resources.callback(leases.close)
        lease = leases.take(INTERVAL, above=NOTHING)

        server.close()
        assert wait_until(lambda: lease.state is LeaseState.SUSPENDED, CLOCK)
        server.start()
        assert leases.wait_until_settled(60_000)
        assert lease.state is LeaseState.HELD


def test_temporarily_unknown_user_loses_leases_and_can_retake_them(tmp_path: Path) -> None:
    with SecuredZooKeeper(tmp_path / "zk", CLOCK, {"shop": "a secret"}) as server, ExitStack() as resources:
        pond = Pond(server, resources)
        leases = pond.open(server.security_of("shop"))
        lease = leases.take(INTERVAL, above=NOTHING)

        server.close()
        server.users["shop"] = "another secret"
        server.start()
        assert wait_until(lambda: lease.state is LeaseState.LOST, CLOCK)
        server.close()
        server.users["shop"] = "a secret"
        server.start()
        assert leases.take(INTERVAL, above=NOTHING, timeout_ms=60_000).sequencer > lease.sequencer


def test_connection_broken_during_authentication_is_retried(pond: Pond) -> None:
    """The break must not be taken for a wrong password."""
    plain = replace(pond.server.security_of("shop"), ca_file=None, tls=False)
    proxy = TcpProxy(int(pond.server.plain_hosts.rpartition(":")[2]))
    try:
        proxy.close_at(b"digest-uri")
        pond.open(plain, proxy.address).take(INTERVAL, above=NOTHING).check()
        assert proxy.has_closed
    finally:
        proxy.close()
