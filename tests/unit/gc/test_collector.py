"""Garbage collection across changes of owner."""

from __future__ import annotations

import pytest

from millpond.executor.local.run import LocalRun
from millpond.executor.local.runner import LocalRunner
from millpond.executor.maintenance.policy import UpkeepPolicy
from millpond.gc.collectors import CollectionRound, Owned, Retention, collect_garbage
from millpond.gc.compaction import (
    Compacted,
    CompactionPolicy,
    CompactionRules,
    compact_files,
    plan_compaction,
)
from millpond.statestore.interval import Interval
from millpond.statestore.leases.memory import MemoryRegistry
from millpond.statestore.log.log import Log
from millpond.statestore.log.rules import CommitRequest, IntervalWrite
from millpond.statestore.log.snapshot import load
from millpond.statestore.objects.memory import MemoryObjects
from millpond.statestore.rows.record_ids import IdRetention
from millpond.statestore.rows.row import Fence
from millpond.statestore.store import Store
from millpond.statestore.types import TIME_MIN_US, CommitNumber, Sequencer, Superstep, WallTimeMicros
from millpond.testing.fixtures.determinism import ManualClock, SeededRng
from millpond.testing.processes.ledger import LEDGER, ROWS, ledger_pipeline, numbered

DEFAULT_MEMBER = Interval(LEDGER)
HOUR_MS = 3_600_000


class Pond:
    """A store in memory whose owners may not know of each other."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.objects = MemoryObjects()
        self.registry = MemoryRegistry()
        self.rng = SeededRng(1)

    def start(self, upkeep: UpkeepPolicy | None = None) -> tuple[Store, LocalRun]:
        store = Store.in_memory(objects=self.objects, registry=self.registry, clock=self.clock, rng=self.rng)
        runner = LocalRunner(store, clock=self.clock, rng=self.rng, progress=False, upkeep=upkeep)
        return store, runner.start(ledger_pipeline(), stepping=True)

    def collect(self, owned: dict[Interval, Owned]) -> CollectionRound:
        retention = Retention(keep_ms=0, checkpoint_every=1)
        return collect_garbage(
            self.objects, None, self.clock, announce=None, retention=retention, owned=owned
        )


def owned_by(run: LocalRun, store: Store) -> dict[Interval, Owned]:
    """Return a run's sequencer and superstep, as its owner passes them to a collection."""
    fence = store.committer.snapshot.fence_of(DEFAULT_MEMBER)
    return {DEFAULT_MEMBER: Owned(fence.sequencer, Superstep(run.summary().superstep))}


def a_compaction(store: Store) -> Compacted:
    """Write a full compaction without committing it."""
    snapshot = store.committer.snapshot
    newest = Superstep(max(int(file.tags["superstep"]) for file in snapshot.files_of(DEFAULT_MEMBER)))
    compaction = plan_compaction(
        snapshot.files_of(DEFAULT_MEMBER),
        DEFAULT_MEMBER,
        before=newest,
        policy=CompactionPolicy(),
        everything=True,
    )
    return compact_files(
        store.objects,
        compaction,
        CompactionRules(pending_from=newest, ids=IdRetention.of(TIME_MIN_US, WallTimeMicros(0), slack_us=0)),
        fence=snapshot.fence_of(DEFAULT_MEMBER),
        token="f" * 32,
    )


def a_run_of(pond: Pond, supersteps: int) -> tuple[Store, LocalRun]:
    store, run = pond.start()
    for number in range(supersteps):
        run.inject(ROWS, numbered([number]))
        run.step()
    return store, run


def test_former_owner_keeps_its_successors_uncommitted_compaction() -> None:
    """The new owner is about to commit the file, so it is no orphan."""
    pond = Pond()
    former_store, former = a_run_of(pond, 6)
    owned = owned_by(former, former_store)
    store, _ = pond.start()
    prepared = a_compaction(store)

    pond.collect(owned)

    assert prepared.file.path in pond.objects.list("")


def test_owner_collects_its_own_orphans() -> None:
    """The file is of a past superstep and was never committed."""
    pond = Pond()
    store, run = a_run_of(pond, 6)
    orphan = a_compaction(store)

    collected = pond.collect(owned_by(run, store))

    assert orphan.file.path in {path for collection in collected.collections for path in collection.paths}
    assert orphan.file.path not in pond.objects.list("")


@pytest.mark.parametrize("jump_ms", [0, 2 * HOUR_MS, -2 * HOUR_MS])
def test_jump_of_the_collectors_clock_fails_no_other_writer(jump_ms: int) -> None:
    """The other writer must still be able to follow the log."""
    pond = Pond()
    upkeep = UpkeepPolicy(background=False, collect_every=4)
    _, run = pond.start(upkeep)
    other, neighbour = (
        Store.in_memory(objects=pond.objects, registry=pond.registry, clock=pond.clock),
        Interval("n"),
    )
    other.committer.commit(fence_of(neighbour, 0))
    for number in range(60):
        if number == 50:
            pond.clock.jump_ms(jump_ms)
        run.inject(ROWS, numbered([number]))
        run.step()

    other.committer.commit(fence_of(neighbour, 1))

    assert load(Log(pond.objects)).fence_of(neighbour) == Fence(Sequencer(1), CommitNumber(1))


def test_log_of_a_running_pipeline_is_truncated() -> None:
    pond = Pond()
    _, run = pond.start(UpkeepPolicy(background=False, collect_every=4, retention="1m"))
    for number in range(100):
        pond.clock.advance_ms(10_000)
        run.inject(ROWS, numbered([number]))
        run.step()

    assert Log(pond.objects).inventory().versions[0] > 50


def fence_of(interval: Interval, number: int) -> CommitRequest:
    fence = Fence(Sequencer(1), CommitNumber(number))
    return CommitRequest(kind="test", writes=(IntervalWrite(interval=interval, fence=fence),))
