"""Two and three owners of one interval, in every order of their calls to shared state (R7)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import cast

import pytest

from millpond.executor.ownership.ownership import Ownership
from millpond.executor.pipeline.nodes import control_interval
from millpond.statestore.errors import (
    ConflictError,
    DataError,
    FencedError,
    ObjectExistsError,
    OutcomeUnknownError,
    UnavailableError,
)
from millpond.statestore.interval import Interval
from millpond.statestore.leases.lease import TIMEOUT_MS, Lease, OnHeld
from millpond.statestore.leases.memory import MemoryLeases, MemoryRegistry
from millpond.statestore.log.action import Action, CommitInfo, Txn
from millpond.statestore.log.commit_file import decode
from millpond.statestore.log.committer import Committer
from millpond.statestore.log.log import Log
from millpond.statestore.log.rules import CommitRequest, IntervalWrite
from millpond.statestore.log.snapshot import load
from millpond.statestore.log.table import create_rows_table
from millpond.statestore.objects.memory import MemoryObjects
from millpond.statestore.rows.row import unpack_fence
from millpond.statestore.store import Store
from millpond.statestore.system import RetryPolicy
from millpond.statestore.types import Sequencer, TableVersion
from millpond.testing.faults.report import FaultReport
from millpond.testing.fixtures.determinism import ManualClock, SeededRng
from millpond.testing.processes.ledger import ledger_pipeline
from tests.fixtures.commit_requests import Bench, fence_request, superstep_request
from tests.fixtures.interleavings import Explored, Stage, explore

pytestmark = pytest.mark.slow

INTERVAL = Interval("counter")


@dataclass
class Duel:
    """The owners of one interval, the reply to each, and the final table."""

    stage: Stage
    bench: Bench
    told: dict[str, list[str]] = field(default_factory=dict)
    landed: dict[str, list[int]] = field(default_factory=dict)

    def enter(self, name: str, *requests: CommitRequest, committer: Committer | None = None) -> None:
        """Add an owner that makes these commits until one is refused."""
        self.told[name], self.landed[name] = [], []

        def play() -> None:
            own = committer or self.committer(name)
            for request in requests:
                outcome = self._commit(own, request)
                self.told[name].append(outcome if isinstance(outcome, str) else "landed")
                if isinstance(outcome, str):
                    return
                self.landed[name].append(outcome)

        self.stage.enter(name, play)

    def committer(self, name: str) -> Committer:
        log = Log(self.stage.objects(self.bench.memory))
        mark = self.stage.high_water(self.bench.high_water)
        return Committer(log, self.bench.clock, self.bench.rng, mark, writer_id=name, retry=self.bench.retry)

    def _commit(self, committer: Committer, request: CommitRequest) -> int | str:
        try:
            return committer.commit(request).version
        except OutcomeUnknownError:
            return self._settle(committer, request)
        except (FencedError, ConflictError, UnavailableError) as error:
            return type(error).__name__

    def _settle(self, committer: Committer, request: CommitRequest) -> int | str:
        try:
            settled = committer.resolve()
        except (OutcomeUnknownError, UnavailableError):
            return "unknown"
        return self._commit(committer, request) if settled is None else settled.version

    def check(self) -> None:
        """Check I1, I2, I4 and I5 from the log alone, against the replies."""
        fences, versions = [], {name: [] for name in self.landed}
        for version, actions in commits(self.bench.log):
            fences += [unpack_fence(action.version) for action in actions if _is_fence(action)]
            info = next(action for action in actions if isinstance(action, CommitInfo))
            versions.setdefault(info.millpond["writer"], []).append(version)
        for before, after in itertools.pairwise(fences):
            if after.sequencer == before.sequencer:
                assert after.commit_number == before.commit_number + 1, "commit numbers rise by one"
            else:
                assert after.sequencer > before.sequencer, "sequencers never fall"
                assert after.commit_number == 0, "an owner begins with its fence"
        for name, landed in self.landed.items():
            sure = versions[name][: len(landed)] if self.told[name][-1] == "unknown" else versions[name]
            assert landed == sure, f"{name} was told what is so"


def commits(log: Log) -> Iterator[tuple[int, Sequence[Action]]]:
    """Return the actions of each version, except the one that created the table."""
    for version in range(1, load(log).version + 1):
        yield version, decode(log.require(TableVersion(version)))


def _is_fence(action: Action, interval: Interval = INTERVAL) -> bool:
    return isinstance(action, Txn) and action.app_id == interval.app_id


def owner_and_rival(stage: Stage, memory: MemoryObjects | None = None, supersteps: int = 2) -> Duel:
    """Return an owner with some supersteps to commit, and a rival that takes over."""
    bench = Bench(memory=memory or MemoryObjects(), retry=RetryPolicy(tries=2)).create()
    duel = Duel(stage, bench)
    owner = duel.committer("owner")
    owner.commit(fence_request(1, INTERVAL))
    duel.enter(
        "owner",
        *(superstep_request(1, number + 1, INTERVAL) for number in range(supersteps)),
        committer=owner,
    )
    duel.landed["owner"].append(1)
    duel.enter("rival", fence_request(2, INTERVAL), superstep_request(2, 1, INTERVAL))
    return duel


def endings_of(
    scenario: Callable[[Stage], Duel], *, preemptions_max: int | None = None, faults_max: int = 0
) -> tuple[Explored, set[tuple[str, ...]]]:
    """Return the owners' replies over all orders, each of which is checked."""
    endings: set[tuple[str, ...]] = set()

    def play(stage: Stage) -> Callable[[], None]:
        duel = scenario(stage)

        def look() -> None:
            duel.check()
            endings.add(tuple(" ".join(told) for told in duel.told.values()))

        return look

    return explore(play, preemptions_max=preemptions_max, faults_max=faults_max), endings


class TestOwnersByForce:
    def test_two_owners_in_every_order(self, fault_report: FaultReport) -> None:
        """All three endings occur."""
        explored, endings = endings_of(owner_and_rival)

        fault_report.fault("R7", explored.orders)
        assert explored.orders > 100
        assert endings == {
            ("FencedError", "landed landed"),
            ("landed FencedError", "landed landed"),
            ("landed landed", "landed landed"),
        }

    def test_two_owners_with_a_lost_reply_anywhere(self, fault_report: FaultReport) -> None:
        """One write fails, with or without effect; reading back resolves it."""
        explored, endings = endings_of(partial(owner_and_rival, supersteps=1), faults_max=1)

        fault_report.fault("R7", explored.orders)
        assert explored.orders > 200
        assert {told.split()[-1] for ending in endings for told in ending} == {"landed", "FencedError"}

    def test_three_owners_with_two_interruptions(self, fault_report: FaultReport) -> None:
        def scenario(stage: Stage) -> Duel:
            duel = owner_and_rival(stage, supersteps=1)
            duel.enter("third", fence_request(3, INTERVAL))
            return duel

        explored, endings = endings_of(scenario, preemptions_max=2)

        fault_report.fault("R7", explored.orders)
        assert explored.orders > 500
        assert ("landed", "landed FencedError", "landed") in endings

    def test_canary_overwriting_store_is_detected(self) -> None:
        def scenario(stage: Stage) -> Duel:
            return owner_and_rival(stage, Overwriting())

        with pytest.raises((AssertionError, DataError)):
            endings_of(scenario)


class Overwriting(MemoryObjects):
    def put_if_absent(self, path: str, data: bytes) -> None:
        self.put(path, data)


class SharedLeases(MemoryLeases):
    """Leases that are acquired when the explorer schedules their actor."""

    def __init__(self, stage: Stage, registry: MemoryRegistry, clock: ManualClock, writer_id: str) -> None:
        super().__init__(registry, clock, writer_id=writer_id)
        self._stage = stage

    def take_all(
        self,
        intervals: Mapping[Interval, Sequencer],
        *,
        on_held: OnHeld = "take",
        timeout_ms: float = TIMEOUT_MS,
    ) -> tuple[Lease, ...]:
        self._stage.before("leases", writes=True)
        return super().take_all(intervals, on_held=on_held, timeout_ms=timeout_ms)


@dataclass
class Processes:
    """Processes that open one store, take over its pipeline, and commit an empty superstep."""

    stage: Stage
    hear_late: bool
    disk: MemoryObjects = field(default_factory=MemoryObjects)
    registry: MemoryRegistry = field(default_factory=MemoryRegistry)
    told: dict[str, str] = field(default_factory=dict)

    def enter(self, name: str) -> None:
        self.stage.enter(name, lambda: self._live(name))

    def _live(self, name: str) -> None:
        clock = ManualClock()
        disk = self.stage.objects(self.disk)
        with suppress(ObjectExistsError):
            if Log(disk).latest_version() is None:
                create_rows_table(Log(disk), clock, SeededRng(name))
        store = Store(
            disk.url,
            disk,
            storage_options={},
            clock=clock,
            rng=SeededRng(name),
            leases=lambda _, writer_id: SharedLeases(self.stage, self.registry, clock, writer_id),
            catalog_url=None,
            resources=ExitStack(),
        )
        if self.hear_late:
            cast("SharedLeases", store.leases).hold_notices()
        owner = Ownership(
            store,
            ledger_pipeline().check(),
            clock=clock,
            intervals=1,
            on_held="take",
            pause_timeout_ms=1_000,
        )
        try:
            owner.open()
            write = IntervalWrite(interval=owner.control.interval, fence=owner.control.next_fence)
            owner.commit(CommitRequest(kind="superstep", writes=(write,)))
        except FencedError:
            self.told[name] = "fenced"
        else:
            self.told[name] = "landed"

    def check(self) -> None:
        """Check I4, and that no process is fenced without another owner."""
        control = control_interval(ledger_pipeline().name)
        fences = [
            unpack_fence(action.version)
            for _, actions in commits(Log(self.disk))
            for action in actions
            if _is_fence(action, control)
        ]
        assert fences == sorted(set(fences)), "fences rise"
        landed = [fence for fence in fences if fence.commit_number == 1]
        assert len(landed) == list(self.told.values()).count("landed"), "each is told what is so"
        assert fences[-1].commit_number == 1, "no process fences the last owner"


@pytest.mark.parametrize("hear_late", [False, True])
def test_last_process_to_open_an_empty_store_commits(hear_late: bool, fault_report: FaultReport) -> None:
    """Two preemptions lie anywhere between creation, leases and commit."""
    endings = set()

    def play(stage: Stage) -> Callable[[], None]:
        processes = Processes(stage, hear_late)
        processes.enter("first")
        processes.enter("second")

        def look() -> None:
            processes.check()
            endings.add(tuple(sorted(processes.told.items())))

        return look

    explored = explore(play, preemptions_max=2)

    fault_report.fault("R7", explored.orders)
    assert explored.orders > 100
    assert endings == {
        (("first", first), ("second", other))
        for first, other in (("landed", "landed"), ("landed", "fenced"), ("fenced", "landed"))
    }
