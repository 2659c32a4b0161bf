"""Ownership of a pipeline's keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millpond.executor.computation.context import Context
from millpond.executor.computation.records import Record
from millpond.executor.interval.row_update import PendingWork
from millpond.executor.local.run import LocalRun
from millpond.executor.local.runner import LocalRunner
from millpond.executor.ownership import ownership
from millpond.executor.ownership.cuts import boundaries_of
from millpond.executor.ownership.ownership import Ownership, scan_interval
from millpond.statestore.errors import ConflictError, FencedError, OutcomeUnknownError, UnavailableError
from millpond.statestore.interval import Interval, intervals_from_boundaries
from millpond.statestore.leases.lease import LeaseState, OnHeld
from millpond.statestore.leases.memory import MemoryLeases, MemoryRegistry
from millpond.statestore.log.rules import CommitRequest, IntervalWrite
from millpond.statestore.objects.memory import MemoryObjects
from millpond.statestore.store import Store
from millpond.statestore.types import Objects, Sequencer
from millpond.testing.faults.faulty_objects import Fault, FaultyObjects
from millpond.testing.fixtures.determinism import ManualClock, SeededRng
from millpond.testing.processes.ledger import (
    LEDGER,
    ROWS,
    START_US,
    Ledger,
    ledger_of,
    ledger_pipeline,
    numbered,
)

PAUSE_MS = 10_000.0
LATER_US = START_US + 3_600_000_000
KEYS = st.lists(st.text(max_size=3), min_size=1, max_size=40)


class EventfulClock(ManualClock):
    """A clock that calls an action at its next sleep."""

    def __init__(self) -> None:
        super().__init__()
        self.at_next_sleep: Callable[[], object] = lambda: None

    def sleep_ms(self, duration_ms: float) -> None:
        super().sleep_ms(duration_ms)
        action, self.at_next_sleep = self.at_next_sleep, lambda: None
        action()


class Reminding(Ledger):
    def process_record(self, context: Context, record: Record) -> None:
        super().process_record(context, record)
        context.set_timer(LATER_US)


class Pond:
    """A store in memory on a faulty disk, and its clock."""

    def __init__(self) -> None:
        self.clock = EventfulClock()
        self.disk = FaultyObjects(MemoryObjects())
        self.registry = MemoryRegistry()

    def store(self, registry: MemoryRegistry | None = None) -> Store:
        shared = registry or self.registry
        return Store.in_memory(objects=self.disk, registry=shared, clock=self.clock, rng=SeededRng(1))

    def owner(self, store: Store | None = None, on_held: OnHeld = "take") -> Ownership:
        return Ownership(
            store or self.store(),
            ledger_pipeline().check(),
            clock=self.clock,
            intervals=2,
            on_held=on_held,
            pause_timeout_ms=PAUSE_MS,
        )


@pytest.fixture
def pond() -> Pond:
    return Pond()


def next_request(owner: Ownership) -> CommitRequest:
    write = IntervalWrite(interval=owner.control.interval, fence=owner.control.next_fence)
    return CommitRequest(kind="superstep", writes=(write,))


def opened(pond: Pond) -> tuple[Store, Ownership, MemoryLeases]:
    """Open an owner, and return its store and leases too."""
    store = pond.store()
    owner = pond.owner(store)
    owner.open()
    leases = store.leases
    assert isinstance(leases, MemoryLeases)
    return store, owner, leases


def suspended(pond: Pond) -> tuple[Store, Ownership, MemoryLeases]:
    """Open an owner, and suspend its lease service."""
    store, owner, leases = opened(pond)
    leases.suspend()
    return store, owner, leases


class TestCuts:
    @given(keys=KEYS, count=st.integers(1, 8))
    def test_each_interval_contains_a_key_of_the_sample(self, keys: list[str], count: int) -> None:
        cuts = boundaries_of(pa.array(keys, pa.string()), count)

        assert len(cuts) < count or not cuts
        for interval in intervals_from_boundaries("c", cuts):
            assert any(interval.contains(key) for key in keys)

    @given(keys=st.lists(st.text(max_size=3), min_size=8, max_size=40, unique=True), count=st.integers(1, 8))
    def test_distinct_keys_are_distributed_evenly(self, keys: list[str], count: int) -> None:
        """Sizes differ by at most one key."""
        cuts = boundaries_of(pa.array(keys, pa.string()), count)
        intervals = intervals_from_boundaries("c", cuts)
        sizes = [sum(interval.contains(key) for key in keys) for interval in intervals]

        assert len(intervals) == count
        assert max(sizes) - min(sizes) <= 1

    def test_dominant_key_gets_its_own_interval(self) -> None:
        """The sample contains a key as often as it occurs."""
        assert boundaries_of(pa.array(["a"] + ["hot"] * 50 + ["z"]), 4) == ("hot",)

    @pytest.mark.parametrize("keys", [[], ["a"], ["a", "a", "a"]])
    def test_fewer_than_two_distinct_keys_are_not_cut(self, keys: list[str]) -> None:
        assert boundaries_of(pa.array(keys, pa.string()), 4) == ()


class TestPatience:
    def test_commit_waits_while_leases_are_suspended(self, pond: Pond) -> None:
        store, owner, leases = suspended(pond)
        version = store.snapshot().version
        seen: list[int] = []
        pond.clock.at_next_sleep = lambda: (seen.append(store.snapshot().version), leases.resume())

        assert owner.commit(next_request(owner)).version == version + 1
        assert seen == [version]

    @pytest.mark.parametrize("jump_ms", [-3_600_000, 3_600_000])
    def test_pause_timeout_ignores_jumps_of_the_wall_clock(self, pond: Pond, jump_ms: int) -> None:
        """The timeout is measured on the monotonic clock."""
        _, owner, _ = suspended(pond)
        began_us = pond.clock.monotonic_us()
        pond.clock.at_next_sleep = lambda: pond.clock.jump_ms(jump_ms)

        with pytest.raises(UnavailableError):
            owner.commit(next_request(owner))
        assert PAUSE_MS <= (pond.clock.monotonic_us() - began_us) / 1_000 <= PAUSE_MS + 100

    def test_commit_fails_after_the_pause_timeout_without_writing(self, pond: Pond) -> None:
        store, owner, _ = suspended(pond)
        version, began_us = store.snapshot().version, pond.clock.monotonic_us()

        with pytest.raises(UnavailableError, match="the lease service is unavailable"):
            owner.commit(next_request(owner))
        assert pond.clock.monotonic_us() - began_us >= PAUSE_MS * 1_000
        assert store.snapshot().version == version

    def test_commit_after_a_lost_session_fails_at_once(self, pond: Pond) -> None:
        """Waiting cannot bring a lost lease back."""
        _, owner, leases = opened(pond)
        leases.expire_session()

        with pytest.raises(FencedError, match="the session has expired"):
            owner.commit(next_request(owner))
        assert pond.clock.slept_ms == []

    @pytest.mark.parametrize("fault", Fault)
    def test_commit_of_unknown_outcome_lands_once(self, pond: Pond, fault: Fault) -> None:
        """Each fault strikes twelve times, with effect, without, or late."""
        store = pond.store()
        owner = pond.owner(store)
        owner.open()
        version = store.snapshot().version
        pond.disk.plan(fault, "put_if_absent", within="_delta_log", times=12)

        committed = owner.commit(next_request(owner))
        pond.disk.land()
        assert committed.version == version + 1
        assert store.snapshot().version == version + 1
        owner.commit(next_request(owner))
        assert store.snapshot().version == version + 2

    def test_commit_to_an_unresponsive_store_raises_and_can_be_repeated(self, pond: Pond) -> None:
        """The repeated request must still land only once."""
        store = pond.store()
        owner = pond.owner(store)
        owner.open()
        version, request = store.snapshot().version, next_request(owner)
        pond.disk.plan(Fault.LOST, "put_if_absent", within="_delta_log", times=10_000)
        pond.disk.plan(Fault.REFUSED, "get", within="_delta_log", times=10_000)

        with pytest.raises((OutcomeUnknownError, UnavailableError)):
            owner.commit(request)
        pond.disk.heal()
        assert owner.commit(request).version == version + 1
        assert store.snapshot().version == version + 1


class TestTakingOver:
    def test_restarted_owner_finds_the_same_intervals(self, pond: Pond) -> None:
        """Each gets a higher sequencer and a new fence."""
        first = pond.owner()
        first.open()
        first.create(ledger_pipeline().check().computations[LEDGER], pa.array(["a", "b", "c", "d"]))
        second = pond.owner()
        second.open()

        assert [owned.interval for owned in second.of(LEDGER)] == [
            Interval(LEDGER, "", "c"),
            Interval(LEDGER, "c"),
        ]
        for owned in second.owned.values():
            assert owned.fence.sequencer > first.owned[owned.interval].fence.sequencer
            assert pond.store().snapshot().fence_of(owned.interval) == owned.fence
            assert first.owned[owned.interval].lease.state is LeaseState.LOST

    def test_owner_of_large_intervals_reads_no_rows(
        self, pond: Pond, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It finds what the last commit recorded, which is what a scan finds."""
        runner = LocalRunner(pond.store(), clock=pond.clock, rng=SeededRng(1), progress=False, intervals=2)
        with runner.start(ledger_pipeline(computation=Reminding()), stepping=True) as run:
            run.inject(ROWS, numbered(range(8)))
            run.run_until_quiet()
        scans: list[Interval] = []

        def scan(objects: Objects, interval: Interval, *rest: Any) -> PendingWork:
            scans.append(interval)
            return scan_interval(objects, interval, *rest)

        monkeypatch.setattr(ownership, "scan_interval", scan)
        found = []
        for large_bytes in (0, 1 << 30):
            monkeypatch.setattr(ownership, "LARGE_BYTES", large_bytes)
            owner = pond.owner()
            owner.open()
            found.append({owned.interval: owned.pending for owned in owner.of(LEDGER)})
            assert scans == ([] if large_bytes == 0 else [*found[0]])

        assert found[0] == found[1]
        assert {pending.next_event_timer for pending in found[0].values()} == {LATER_US}

    def test_on_held_refuse_leaves_leases_and_table_unchanged(self, pond: Pond) -> None:
        first = pond.owner()
        first.open()
        version = pond.store().snapshot().version

        with pytest.raises(ConflictError, match="another writer holds the lease"):
            pond.owner(on_held="refuse").open()
        assert pond.store().snapshot().version == version
        first.commit(next_request(first))
        first.close()
        pond.owner(on_held="refuse").open()

    def test_close_releases_all_leases(self, pond: Pond) -> None:
        """A standby need not wait."""
        owner = pond.owner()
        owner.open()
        owner.close()

        assert not owner.owned
        assert pond.registry.owners == {}

    @pytest.mark.timeout(30)
    def test_owner_that_finds_new_keys_held_fails_at_once(self, pond: Pond) -> None:
        """Only an owner may create intervals, so whoever holds them has overtaken this one."""
        owner = pond.owner(on_held="wait")
        owner.open()
        other = pond.store()
        other.leases.take_all({Interval(LEDGER): Sequencer(0)})

        with pytest.raises(ConflictError, match="another writer holds the lease"):
            owner.create(ledger_pipeline().check().computations[LEDGER], pa.array([], pa.string()))


ACTIONS = st.lists(st.tuples(st.sampled_from(["open", "write", "write"]), st.booleans()), max_size=14)


@given(actions=ACTIONS)
def test_only_the_newest_of_two_owners_writes(actions: list[tuple[str, bool]]) -> None:
    """Both owners believe indefinitely that they hold all leases."""
    pond = Pond()
    # Each owner has its own lease service, so no lease is ever lost and only the table decides.
    services = {False: MemoryRegistry(), True: MemoryRegistry()}
    runs: dict[bool, LocalRun] = {}
    newest: bool | None = None
    expected: list[int] = []
    for number, (action, who) in enumerate(actions):
        if action == "open" or who not in runs:
            store = pond.store(services[who])
            runner = LocalRunner(store, clock=pond.clock, rng=SeededRng(number), progress=False)
            runs[who] = runner.start(ledger_pipeline(), stepping=True)
            newest = who
        runs[who].inject(ROWS, numbered([number], keys=1))
        if who is newest:
            runs[who].run_until_quiet()
            expected.append(number)
        else:
            with pytest.raises(FencedError):
                runs[who].run_until_quiet()
            del runs[who]
        assert ledger_of(pond.store()) == ({"k0": expected} if expected else {})
