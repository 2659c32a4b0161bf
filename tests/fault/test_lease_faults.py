"""Leases under stopped and killed processes, lost replies, and ZooKeeper's losses of members or data."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from millpond.statestore.errors import ConflictError, UnavailableError
from millpond.statestore.interval import Interval
from millpond.statestore.leases.lease import Lease, LeaseState
from millpond.statestore.leases.zookeeper_lease import ZooKeeperLeases
from millpond.statestore.leases.zookeeper_process import free_ports, recorded_server
from millpond.statestore.leases.zookeeper_server import EmbeddedZooKeeper
from millpond.statestore.log.high_water import Mark
from millpond.statestore.system import SystemClock, SystemRng
from millpond.statestore.types import Sequencer, TableVersion
from millpond.testing.servers.tcp_proxy import TcpProxy
from millpond.testing.servers.zookeeper import Ensemble, wait_until
from tests.processes.lease_holder import INTERVAL

pytestmark = [pytest.mark.fault, pytest.mark.zookeeper]

CLOCK = SystemClock()
OTHER = Interval("other")
NOTHING = Sequencer(0)
SHORT_SESSION_MS = 1_000
REQUEST_OF_A_TAKING = b"writer_id"
Open = Callable[..., ZooKeeperLeases]


@pytest.fixture
def store_id() -> str:
    return SystemRng().token()


@pytest.fixture
def open_leases(store_id: str) -> Iterator[Open]:
    opened: list[ZooKeeperLeases] = []

    def make(hosts: str, writer_id: str, session_timeout_ms: int = 10_000) -> ZooKeeperLeases:
        leases = ZooKeeperLeases(hosts, store_id, writer_id, CLOCK, session_timeout_ms=session_timeout_ms)
        opened.append(leases)
        return leases

    yield make
    for leases in opened:
        leases.close()


@pytest.fixture(scope="module")
def members(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ensemble]:
    """Three real servers."""
    with Ensemble(tmp_path_factory.mktemp("ensemble") / "data", CLOCK) as members:
        yield members


@pytest.fixture
def ensemble(members: Ensemble) -> Ensemble:
    """The three servers, running and with a leader again after each test."""
    members.start()
    return members


@pytest.fixture
def proxy(zookeeper_hosts: str) -> Iterator[TcpProxy]:
    """A faulty network to the run's server."""
    between = TcpProxy(int(zookeeper_hosts.rpartition(":")[2]))
    yield between
    between.mend()
    between.close()


@pytest.fixture
def holder(zookeeper_hosts: str, store_id: str) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the lease on `INTERVAL`, in a short session."""
    command = [sys.executable, "-m", "tests.processes.lease_holder"]
    process = subprocess.Popen(
        [*command, zookeeper_hosts, store_id, str(SHORT_SESSION_MS)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert next_line(process) == "held 1"
    yield process
    process.kill()
    process.communicate()


def next_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def reaches(lease: Lease, state: LeaseState) -> bool:
    return wait_until(lambda: lease.state is state, CLOCK)


def test_stopped_holder_finds_its_lease_lost(
    holder: subprocess.Popen[str], open_leases: Open, zookeeper_hosts: str
) -> None:
    """A standby follows once the session has expired."""
    standby = open_leases(zookeeper_hosts, "standby")
    holder.send_signal(signal.SIGSTOP)
    lease = standby.take(INTERVAL, above=NOTHING, on_held="wait", timeout_ms=30_000)
    holder.send_signal(signal.SIGCONT)
    said = [line for line in iter(lambda: next_line(holder), "") if not line.startswith("suspended")]

    assert lease.sequencer == 2
    assert said == ["lost 1"]
    lease.check()


def test_stopped_holder_is_replaced_at_once(
    holder: subprocess.Popen[str], open_leases: Open, zookeeper_hosts: str
) -> None:
    """Taking over needs neither the holder's consent nor the end of its session."""
    taker = open_leases(zookeeper_hosts, "taker")
    holder.send_signal(signal.SIGSTOP)
    lease = taker.take(INTERVAL, above=NOTHING)
    holder.send_signal(signal.SIGCONT)

    assert lease.sequencer == 2
    assert "lost 1" in iter(lambda: next_line(holder), "")
    lease.check()


def test_killed_holder_is_followed_by_a_standby(
    holder: subprocess.Popen[str], open_leases: Open, zookeeper_hosts: str
) -> None:
    """The lease is held until the session expires."""
    standby = open_leases(zookeeper_hosts, "standby")
    holder.kill()

    with pytest.raises(ConflictError, match=f"process {holder.pid}"):
        standby.take(INTERVAL, above=NOTHING, on_held="refuse")
    standby.take(INTERVAL, above=NOTHING, on_held="wait", timeout_ms=30_000).check()


def test_acquisition_with_a_lost_reply_is_resolved(open_leases: Open, proxy: TcpProxy) -> None:
    """Reading back finds the lease, so one lease is held."""
    leases = open_leases(proxy.address, "w1")
    first = leases.take(INTERVAL, above=NOTHING)
    taken: list[Lease] = []
    thread = threading.Thread(target=lambda: taken.append(leases.take(INTERVAL, above=first.sequencer)))
    proxy.lose_replies(to=REQUEST_OF_A_TAKING)
    thread.start()
    assert wait_until(lambda: proxy.replies_lost > 0, CLOCK)
    proxy.mend()
    thread.join()

    assert leases.wait_until_settled()
    assert first.state is LeaseState.LOST
    # The acquisition whose reply was lost used a sequencer.
    assert taken[0].sequencer == first.sequencer + 2
    taken[0].check()


def test_abandoned_acquisition_leaves_no_lease(
    open_leases: Open, proxy: TcpProxy, zookeeper_hosts: str
) -> None:
    """An acquisition that lands after its caller gave up is undone, so a standby gets the lease."""
    leases, standby = open_leases(proxy.address, "w1"), open_leases(zookeeper_hosts, "w2")
    proxy.lose_replies(to=REQUEST_OF_A_TAKING)

    with pytest.raises(UnavailableError):
        leases.take(INTERVAL, above=NOTHING, timeout_ms=300)
    with pytest.raises(ConflictError, match="w1"):
        standby.take(INTERVAL, above=NOTHING, on_held="refuse")
    proxy.mend()
    assert standby.take(INTERVAL, above=NOTHING, on_held="wait").sequencer == 2


def test_mark_with_a_lost_reply_is_kept(open_leases: Open, proxy: TcpProxy) -> None:
    high_water = open_leases(proxy.address, "w1").high_water
    proxy.lose_replies(to=b"digest")
    high_water.advance(TableVersion(1), "one")
    assert wait_until(lambda: proxy.replies_lost > 0, CLOCK)
    high_water.advance(TableVersion(2), "two")
    proxy.mend()
    high_water.flush()

    assert high_water.read() == Mark(TableVersion(2), "two")


def test_leader_kill_ends_no_lease(ensemble: Ensemble, open_leases: Open) -> None:
    leases = open_leases(ensemble.hosts, "w1")
    lease = leases.take(INTERVAL, above=NOTHING)
    leader = ensemble.leader()
    assert leader is not None
    ensemble.kill(leader)

    assert wait_until(ensemble.has_quorum, CLOCK)
    again = leases.take(INTERVAL, above=NOTHING, timeout_ms=30_000)
    other = leases.take(OTHER, above=NOTHING, timeout_ms=30_000)
    assert leases.wait_until_settled(30_000)
    assert again.sequencer > lease.sequencer
    again.check()
    other.check()


def test_lost_quorum_suspends_until_it_is_back(ensemble: Ensemble, open_leases: Open) -> None:
    leases = open_leases(ensemble.hosts, "w1")
    lease = leases.take(INTERVAL, above=NOTHING)
    ensemble.kill(0)
    ensemble.kill(1)

    assert reaches(lease, LeaseState.SUSPENDED)
    with pytest.raises(UnavailableError):
        leases.take(OTHER, above=NOTHING, timeout_ms=300)
    assert leases.high_water.boundary() is None
    ensemble.start()
    assert leases.wait_until_settled(30_000)
    assert leases.high_water.boundary() == 0
    lease.check()
    leases.take(OTHER, above=NOTHING).check()


def test_wiped_zookeeper_repeats_no_sequencer(ensemble: Ensemble, open_leases: Open) -> None:
    """Leases are lost, and new sequencers exceed the table's."""
    leases = open_leases(ensemble.hosts, "w1", SHORT_SESSION_MS)
    lease = leases.take(INTERVAL, above=leases.take(INTERVAL, above=NOTHING).sequencer)
    leases.high_water.advance(TableVersion(7), "seven")
    leases.high_water.flush()
    leases.high_water.announce_boundary(TableVersion(5))
    ensemble.wipe()

    assert reaches(lease, LeaseState.LOST)
    again = leases.take(INTERVAL, above=lease.sequencer, timeout_ms=30_000)
    assert again.sequencer > lease.sequencer
    assert leases.high_water.read() is None
    assert leases.high_water.boundary() is None
    leases.high_water.advance(TableVersion(8), "eight")
    leases.high_water.flush()
    assert leases.high_water.read() == Mark(TableVersion(8), "eight")


def test_restarted_embedded_server_keeps_leases(tmp_path: Path, open_leases: Open) -> None:
    server = EmbeddedZooKeeper(tmp_path, CLOCK, SystemRng(), is_open=True)
    leases = open_leases(server.start_or_join(), "w1")
    lease = leases.take(INTERVAL, above=NOTHING)
    process = recorded_server(tmp_path)
    assert process is not None
    process.kill(CLOCK)

    assert reaches(lease, LeaseState.SUSPENDED)
    with pytest.raises(UnavailableError):
        lease.check()
    server.start_or_join()
    assert leases.wait_until_settled(30_000)
    lease.check()
    leases.close()
    server.close()


def test_missing_server_is_an_error_in_time(open_leases: Open) -> None:
    """The error names the hosts, within the session's timeout."""
    hosts = f"127.0.0.1:{free_ports(1)[0]}"

    with pytest.raises(UnavailableError, match=hosts):
        open_leases(hosts, "w1", 500)
