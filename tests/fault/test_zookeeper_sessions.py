"""Expired sessions, lost connections, and acquisitions of unknown outcome, fifty times each."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from kazoo.client import KazooClient

from millpond.executor.local.run import LocalRun
from millpond.executor.local.runner import LocalRunner
from millpond.statestore.errors import FencedError
from millpond.statestore.interval import Interval
from millpond.statestore.leases.lease import Lease
from millpond.statestore.leases.zookeeper_lease import ZooKeeperLeases
from millpond.statestore.store import Store
from millpond.statestore.system import SystemClock, SystemRng
from millpond.statestore.types import Sequencer
from millpond.testing.faults.report import FaultReport
from millpond.testing.processes.ledger import ROWS, ledger_of, ledger_pipeline, numbered, written
from millpond.testing.servers.tcp_proxy import TcpProxy
from millpond.testing.servers.zookeeper import wait_until

pytestmark = [pytest.mark.fault, pytest.mark.zookeeper]

CLOCK: Final = SystemClock()
SHORT_SESSION_MS: Final = 1_000
EXPIRIES: Final = 15
LOSSES: Final = 20
UNKNOWN: Final = 15
PATIENCE_MS: Final = 60_000
PATIENCE: Final = "60s"
REQUEST_OF_A_TAKING: Final = b"writer_id"


@pytest.fixture
def proxy(zookeeper_hosts: str) -> Iterator[TcpProxy]:
    """A faulty network to the run's server."""
    between = TcpProxy(int(zookeeper_hosts.rpartition(":")[2]))
    yield between
    between.mend()
    between.close()


def expire(store: Store, hosts: str) -> None:
    """Expire the store's session on the server, as after too long a silence."""
    leases = store.leases
    assert isinstance(leases, ZooKeeperLeases)
    # A client with a session's id and password may attach to the session, and close it for both.
    impostor = KazooClient(hosts=hosts, client_id=leases._session._client.client_id)
    impostor.start()
    impostor.stop()
    impostor.close()


def test_runs_with_expired_sessions_are_fenced_and_followed(
    tmp_path: Path, zookeeper_hosts: str, fault_report: FaultReport
) -> None:
    path = tmp_path / "pond"
    durable = 0
    for _ in range(EXPIRIES):
        with Store.open(path, zookeeper=zookeeper_hosts, session_timeout=f"{SHORT_SESSION_MS}ms") as store:
            run = LocalRunner(store, progress=False).start(ledger_pipeline())
            run.inject(ROWS, numbered([durable])).wait(PATIENCE)
            durable += 1
            expire(store, zookeeper_hosts)
            fault_report.fault("R8", zombies=1)
            # Until the run learns that its session has ended, it has no successor, and its commits are
            # valid.
            with pytest.raises(FencedError):
                write_on(run, durable)
            fault_report.count(zombies_fenced=1)
            run.abandon()
            numbers = sorted(number for each in ledger_of(store).values() for number in each)
            assert numbers == list(range(len(numbers)))
            assert len(numbers) >= durable
            durable = len(numbers)
    assert durable >= EXPIRIES


def write_on(run: LocalRun, number: int) -> None:
    """Write numbers until a write fails."""
    for at_most in range(number, number + 10_000):
        run.inject(ROWS, numbered([at_most])).wait(PATIENCE)


def test_run_outlives_lost_connections(tmp_path: Path, proxy: TcpProxy, fault_report: FaultReport) -> None:
    with Store.open(tmp_path / "pond", zookeeper=proxy.address, session_timeout="1m") as store:
        with LocalRunner(store, progress=False).start(ledger_pipeline()) as run:
            for number in range(LOSSES):
                proxy.cut()
                receipt = run.inject(ROWS, numbered([number]))
                proxy.mend()
                fault_report.fault("R8")
                fault_report.fault("R10")
                assert receipt.wait(PATIENCE)
        assert ledger_of(store) == written(numbered(range(LOSSES)))


def test_acquisitions_of_unknown_outcome_end_in_one_lease(
    zookeeper_hosts: str, proxy: TcpProxy, fault_report: FaultReport
) -> None:
    """Its sequencer exceeds all former ones."""
    leases = ZooKeeperLeases(proxy.address, SystemRng().token(), "w1", CLOCK, session_timeout_ms=60_000)
    before = Sequencer(0)
    for number in range(UNKNOWN):
        taken: list[Lease] = []
        lost = proxy.replies_lost

        def take(above: Sequencer = before, into: list[Lease] = taken) -> None:
            into.append(leases.take(Interval("held"), above=above, timeout_ms=PATIENCE_MS))

        thread = threading.Thread(target=take)
        proxy.lose_replies(to=REQUEST_OF_A_TAKING)
        thread.start()
        assert wait_until(lambda was=lost: proxy.replies_lost > was, CLOCK)
        proxy.mend()
        thread.join()
        fault_report.fault("R8")
        assert leases.wait_until_settled(PATIENCE_MS)
        taken[0].check()
        assert taken[0].sequencer > before, number
        before = taken[0].sequencer
    leases.close()
