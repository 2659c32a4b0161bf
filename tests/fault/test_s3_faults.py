"""An S3 server that loses replies, fails before or after its work, and lets failed puts land later.

The store under test speaks HTTP to a proxy. Each record must be acknowledged, and in the table once.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from typing import Final

import pytest

from millpond.executor.local.run import LocalRun
from millpond.executor.local.runner import LocalRunner
from millpond.statestore.errors import FencedError
from millpond.statestore.history.verification import verify_store
from millpond.statestore.leases.memory import MemoryLeases, MemoryRegistry
from millpond.statestore.log.action import CommitInfo
from millpond.statestore.log.commit_file import decode
from millpond.statestore.store import Store
from millpond.statestore.system import SystemClock
from millpond.testing.faults.report import FaultReport
from millpond.testing.fixtures.determinism import SeededRng
from millpond.testing.processes.ledger import ROWS, ledger_of, ledger_pipeline, numbered, written
from millpond.testing.servers.s3_proxy import S3Fault, S3Proxy
from millpond.testing.servers.s3_server import S3Server, s3_options

pytestmark = pytest.mark.fault

CLOCK: Final = SystemClock()
LOST: Final = 50
LATE: Final = 50
WRITES_IN_A_STORM: Final = 12
PATIENCE: Final = "120s"
LOG: Final = "_delta_log/"

SCENARIOS: Final = {
    "500 before": (S3Fault.ERROR_500, "PUT", LOG),
    "500 after": (S3Fault.ERROR_AFTER, "PUT", LOG),
    "503 on row files": (S3Fault.UNAVAILABLE_503, "PUT", "computation"),
    "429": (S3Fault.THROTTLED_429, "PUT", ""),
    "reset before": (S3Fault.RESET, "PUT", ""),
    "reply lost after": (S3Fault.REPLY_LOST, "PUT", ""),
    "slow": (S3Fault.SLOW, "PUT", ""),
    "cut body of reads": (S3Fault.CUT_BODY, "GET", ""),
}
"""Faults of requests: the fault, the method, and a part of the path."""


class Pond:
    """A store behind the proxy, and the same store accessed directly."""

    def __init__(self, bucket: str, server: S3Server, proxy: S3Proxy) -> None:
        self._url, self._server, self._proxy = f"{bucket}/pond", server, proxy
        self._registry = MemoryRegistry()

    def open(self, *, direct: bool = False) -> Store:
        address = self._server.address if direct else self._proxy.address
        return Store.open(
            self._url,
            storage_options=s3_options(address),
            leases=lambda _, writer_id: MemoryLeases(self._registry, CLOCK, writer_id=writer_id),
        )

    def assert_holds(self, numbers: range | list[int]) -> None:
        """Assert that each number is in the ledger once, in order, and that the store is sound."""
        with self.open(direct=True) as store:
            assert ledger_of(store) == written(numbered(numbers))
            assert verify_store(store.objects, store.leases.high_water.read()).findings == ()

    def commits(self) -> Counter[str]:
        """Return the number of commits of each kind in the log."""
        kinds: Counter[str] = Counter()
        with self.open(direct=True) as store:
            newest = store.snapshot().version
            for version in range(newest + 1):
                for action in decode(store.objects.get(f"{LOG}{version:020d}.json"), str(version)):
                    if isinstance(action, CommitInfo) and action.millpond:
                        kinds[str(action.millpond.get("kind"))] += 1
        return kinds


@pytest.fixture
def proxy(s3_server: S3Server) -> Iterator[S3Proxy]:
    with S3Proxy(s3_server.port, CLOCK) as between:
        yield between


@pytest.fixture
def pond(s3_bucket: str, s3_server: S3Server, proxy: S3Proxy) -> Pond:
    return Pond(s3_bucket, s3_server, proxy)


def start(store: Store) -> LocalRun:
    return LocalRunner(store, progress=False, upkeep=None).start(ledger_pipeline(), stepping=True)


def write(run: LocalRun, number: int) -> None:
    run.inject(ROWS, numbered([number]))
    run.run_until_quiet()


def test_lost_reply_of_a_commit_is_resolved_by_reading_back(
    pond: Pond, proxy: S3Proxy, fault_report: FaultReport
) -> None:
    """The caller sees no error."""
    with pond.open() as store:
        run = start(store)
        before = pond.commits()["superstep"]
        for number in range(LOST):
            proxy.plan(S3Fault.REPLY_LOST, within=LOG)
            write(run, number)
        run.stop()
    lost = proxy.happened[S3Fault.REPLY_LOST]
    settled = pond.commits()["superstep"] - before
    fault_report.fault("R3", lost, lost_replies=lost, lost_replies_settled=min(lost, settled))
    assert lost == settled == LOST
    pond.assert_holds(range(LOST))


def test_late_put_lands_once_or_never(pond: Pond, proxy: S3Proxy, fault_report: FaultReport) -> None:
    """The writer has put the same bytes again in the meantime."""
    statuses: list[int] = []
    with pond.open() as store:
        run = start(store)
        for number in range(LATE):
            proxy.plan(S3Fault.LATE, within=LOG if number % 2 else "computation")
            write(run, number)
            statuses += proxy.land()
        run.stop()
    fault_report.fault("R5", len(statuses))
    assert len(statuses) == proxy.happened[S3Fault.LATE] == LATE
    # The writer repeats a commit under the same name, so the late put finds it; a row file likewise.
    assert set(statuses) == {412}
    pond.assert_holds(range(LATE))


def test_late_put_after_a_takeover_is_no_commit(
    pond: Pond, proxy: S3Proxy, fault_report: FaultReport
) -> None:
    """The successor's fence has the version."""
    with pond.open() as store, pond.open(direct=True) as other:
        former = start(store)
        write(former, 0)
        proxy.plan(S3Fault.LATE, within=LOG, times=1)
        proxy.plan(S3Fault.RESET, within=LOG, times=1_000)
        former.inject(ROWS, numbered([5]))
        fault_report.fault("R5", zombies=1)
        with pytest.raises(FencedError):
            # Replace the owner while its put is blocked, then let the put pass.
            take_over_and_mend(former, other, proxy)
        assert proxy.land() == [412]
        assert ledger_of(other) == {"k0": [0, 10]}
        former.abandon()
    fault_report.count(zombies_fenced=1)
    pond.assert_holds([0, 10])


def take_over_and_mend(former: LocalRun, other: Store, proxy: S3Proxy) -> None:
    failure: list[BaseException] = []

    def go_on() -> None:
        try:
            former.run_until_quiet()
        except BaseException as error:  # noqa: BLE001 - raised below, in the test's own thread
            failure.append(error)

    thread = threading.Thread(target=go_on)
    thread.start()
    while not proxy.happened[S3Fault.LATE]:
        CLOCK.sleep_ms(1)
    successor = start(other)
    write(successor, 10)
    proxy.mend()
    thread.join()
    successor.abandon()
    if failure:
        raise failure[0]


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_failed_requests_are_retried(
    pond: Pond, proxy: S3Proxy, scenario: str, fault_report: FaultReport
) -> None:
    """A third of the requests fail, before or after taking effect."""
    fault, _, within = SCENARIOS[scenario]
    with pond.open() as store:
        run = start(store)
        proxy.storm({fault: 0.35}, SeededRng(len(scenario)), within=within)
        for number in range(WRITES_IN_A_STORM):
            write(run, number)
        proxy.mend()
        run.stop()
    assert proxy.happened[fault] > 0
    fault_report.fault("R4")
    pond.assert_holds(range(WRITES_IN_A_STORM))


def test_run_waits_for_an_unreachable_store(pond: Pond, proxy: S3Proxy, fault_report: FaultReport) -> None:
    """Nothing is acknowledged while no request passes."""
    with pond.open() as store:
        run = LocalRunner(store, progress=False).start(ledger_pipeline())
        run.inject(ROWS, numbered([0])).wait(PATIENCE)
        for round_number in range(1, 4):
            proxy.cut()
            receipt = run.inject(ROWS, numbered([round_number]))
            assert not receipt.wait("300ms")
            proxy.mend()
            assert receipt.wait(PATIENCE)
        run.stop()
    fault_report.fault("R10", 3)
    pond.assert_holds(range(4))


def test_canary_blind_retry_writes_twice(pond: Pond, proxy: S3Proxy) -> None:
    """A caller that treats a lost reply as a failure makes duplicates."""
    with pond.open() as store:
        run = start(store)
        proxy.plan(S3Fault.REPLY_LOST, within=LOG)
        for number in range(2):
            # A record without an id is not recognised as a duplicate.
            run.inject(ROWS, [{**numbered([0])[0], "id": f"attempt {number}"}])
            run.run_until_quiet()
        run.stop()
    with pytest.raises(AssertionError):
        pond.assert_holds(range(1))
