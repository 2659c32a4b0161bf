"""ZooKeeper's absence under a running pipeline: briefly, longer than a session, or permanently."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from millpond.executor.local.intake import Receipt
from millpond.executor.local.run import LocalRun
from millpond.executor.local.runner import LocalRunner
from millpond.statestore.errors import FencedError, UnavailableError
from millpond.statestore.interval import Interval
from millpond.statestore.leases.lease import Lease, LeaseState
from millpond.statestore.leases.zookeeper_process import ServerProcess, recorded_server
from millpond.statestore.leases.zookeeper_server import EmbeddedZooKeeper
from millpond.statestore.log.high_water import Mark
from millpond.statestore.store import Store
from millpond.statestore.system import SystemClock, SystemRng
from millpond.statestore.types import Sequencer
from millpond.testing.processes.ledger import ROWS, ledger_of, ledger_pipeline, numbered, written
from millpond.testing.servers.tcp_proxy import TcpProxy
from millpond.testing.servers.zookeeper import wait_until

pytestmark = [pytest.mark.fault, pytest.mark.zookeeper]

CLOCK = SystemClock()
PATIENCE_MS = 60_000
PATIENCE = "60s"
SHORT_SESSION_MS = 3_000


def server_of(path: Path) -> ServerProcess:
    """Return the server of the folder ``zookeeper`` below ``path``."""
    server = recorded_server(path / "zookeeper")
    assert server is not None
    return server


def start(store: Store, **options: float) -> LocalRun:
    return LocalRunner(store, progress=False, **options).start(ledger_pipeline())


def probe_of(store: Store) -> Lease:
    """Return a lease of the store's session, which shows the process's knowledge of ZooKeeper."""
    return store.leases.take(Interval("probe"), above=Sequencer(0))


def notices(probe: Lease) -> bool:
    """Wait until the process has noticed ZooKeeper's absence."""
    return wait_until(lambda: probe.state is LeaseState.SUSPENDED, CLOCK)


def write(run: LocalRun, numbers: Sequence[int]) -> Receipt:
    return run.inject(ROWS, numbered(numbers))


@pytest.fixture
def proxy(zookeeper_hosts: str) -> Iterator[TcpProxy]:
    """A faulty network to the run's server."""
    between = TcpProxy(int(zookeeper_hosts.rpartition(":")[2]))
    yield between
    between.mend()
    between.close()


def stop(path: Path) -> Callable[[], object]:
    """Stop the store's server with a signal, so that it can be resumed."""
    server = server_of(path)
    server.signal(signal.SIGSTOP)
    return lambda: server.signal(signal.SIGCONT)


@pytest.mark.slow
def test_ten_seconds_without_zookeeper_lose_nothing(tmp_path: Path) -> None:
    """The run pauses within its session and resumes by itself."""
    server = EmbeddedZooKeeper(tmp_path / "zookeeper", CLOCK, SystemRng(), is_open=True)
    with (
        Store.open(tmp_path / "one", zookeeper=server.start_or_join(), session_timeout="30s") as killed,
        Store.open(tmp_path / "other", session_timeout="30s") as hanging,
        start(killed) as one,
        start(hanging) as other,
    ):
        for run in (one, other):
            write(run, range(10)).wait(PATIENCE)
        probe = probe_of(killed)
        server_of(tmp_path).kill(CLOCK)
        go_on = stop(tmp_path / "other")
        assert notices(probe)
        version = killed.snapshot().version
        receipts = [write(run, numbers) for numbers in (range(10, 20), range(20, 30)) for run in (one, other)]
        CLOCK.sleep_ms(10_000)

        # A run that has noticed the absence commits nothing; its fence protects a run that has not.
        assert killed.snapshot().version == version
        assert not receipts[0].is_durable
        server.start_or_join()
        go_on()
        assert all(receipt.wait(PATIENCE) for receipt in receipts)
        expected = written(numbered(range(30)))
        assert (ledger_of(killed), ledger_of(hanging)) == (expected, expected)
        for store in (killed, hanging):
            store.leases.high_water.flush()
            snapshot = store.snapshot()
            assert store.leases.high_water.read() == Mark(snapshot.version, snapshot.digest)
    server.close()


def test_store_restarts_its_own_server(tmp_path: Path) -> None:
    path = tmp_path / "pond"
    with Store.open(path) as store, start(store) as run:
        write(run, range(10)).wait(PATIENCE)
        probe, before = probe_of(store), server_of(path)
        before.kill(CLOCK)
        assert notices(probe)
        assert write(run, range(10, 20)).wait(PATIENCE)
        after = server_of(path)
        assert after.port == before.port
        assert after.process_id != before.process_id
        assert ledger_of(store) == written(numbered(range(20)))


def test_absence_beyond_the_session_ends_the_run(
    tmp_path: Path, proxy: TcpProxy, zookeeper_hosts: str
) -> None:
    """Its successor continues at the same place."""
    path = tmp_path / "pond"
    with Store.open(path, zookeeper=proxy.address, session_timeout=f"{SHORT_SESSION_MS}ms") as store:
        run = start(store)
        write(run, range(10)).wait(PATIENCE)
        probe = probe_of(store)
        proxy.cut()
        assert notices(probe)
        late = write(run, range(10, 20))
        # No other process takes the store, so only the session's end ends the leases.
        CLOCK.sleep_ms(2 * SHORT_SESSION_MS)
        assert not late.is_durable
        proxy.mend()

        with pytest.raises(FencedError, match="the lease has ended"):
            late.wait(PATIENCE)
        with pytest.raises(FencedError):
            write(run, [99])
        assert not run.is_active
        run.abandon()
        assert ledger_of(store) == written(numbered(range(10)))
    with Store.open(path, zookeeper=zookeeper_hosts) as store, start(store) as run:
        # Ids let the second run ignore how far the first one came.
        write(run, range(20)).wait(PATIENCE)
        assert ledger_of(store) == written(numbered(range(20)))


def test_standby_follows_an_owner_cut_off_from_zookeeper(
    tmp_path: Path, proxy: TcpProxy, zookeeper_hosts: str
) -> None:
    """The owner is fenced when its connection is back."""
    path = tmp_path / "pond"
    with (
        Store.open(path, zookeeper=proxy.address, session_timeout=f"{SHORT_SESSION_MS}ms") as store,
        Store.open(path, zookeeper=zookeeper_hosts) as standby,
    ):
        run = start(store)
        write(run, range(10)).wait(PATIENCE)
        probe = probe_of(store)
        proxy.cut()
        # Before that the owner may still commit, under its fence.
        assert notices(probe)
        late = write(run, range(10, 20))
        with LocalRunner(standby, on_held="wait", progress=False).start(ledger_pipeline()) as follower:
            write(follower, range(20, 30)).wait(PATIENCE)
            proxy.mend()
            with pytest.raises(FencedError):
                late.wait(PATIENCE)
            run.abandon()
            assert ledger_of(standby) == written(numbered([*range(10), *range(20, 30)]))


def test_pause_beyond_its_timeout_ends_the_run(tmp_path: Path, proxy: TcpProxy) -> None:
    with Store.open(tmp_path / "pond", zookeeper=proxy.address) as store:
        run = start(store, pause_timeout="300ms")
        write(run, range(10)).wait(PATIENCE)
        version = store.snapshot().version
        probe = probe_of(store)
        proxy.cut()
        assert notices(probe)

        with pytest.raises(UnavailableError, match="the lease service is unavailable"):
            write(run, range(10, 20)).wait(PATIENCE)
        assert store.snapshot().version == version
        proxy.mend()
        assert store.leases.wait_until_settled(PATIENCE_MS)
        run.abandon()
        with start(store) as again:
            write(again, range(20)).wait(PATIENCE)
        assert ledger_of(store) == written(numbered(range(20)))


def test_server_hanging_beyond_the_session_loses_nothing(tmp_path: Path) -> None:
    """The server may expire the session or keep it; a restart continues either way."""
    path = tmp_path / "pond"
    with Store.open(path, session_timeout=f"{SHORT_SESSION_MS}ms") as store:
        run = start(store)
        write(run, range(10)).wait(PATIENCE)
        go_on = stop(path)
        receipt = write(run, range(10, 20))
        CLOCK.sleep_ms(2 * SHORT_SESSION_MS)
        receipts = [receipt, write(run, range(20, 30))]
        go_on()
        durable = [_is_durable(one) for one in receipts]
        run.abandon()
        kept = [*range(10), *(n for n in range(10, 30) if durable[n // 10 - 1])]
        assert ledger_of(store) == written(numbered(kept))
    with Store.open(path) as store, start(store) as again:
        write(again, range(30)).wait(PATIENCE)
        assert ledger_of(store) == written(numbered(kept + [n for n in range(30) if n not in kept]))


def _is_durable(receipt: Receipt) -> bool:
    try:
        return receipt.wait(PATIENCE)
    except FencedError:
        return False
