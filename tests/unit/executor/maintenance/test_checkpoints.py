"""Checkpoints between rounds of garbage collection: opening reads few commits, whatever the store's age."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from millpond.executor.local.runner import LocalRunner
from millpond.executor.maintenance.policy import UpkeepPolicy
from millpond.gc.compaction import CompactionPolicy
from millpond.statestore.history.replayed_log import replay_log
from millpond.statestore.log.log import Log
from millpond.statestore.log.snapshot import load
from millpond.statestore.objects.memory import MemoryObjects
from millpond.statestore.store import Store
from millpond.testing.processes.ledger import ROWS, ledger_of, ledger_pipeline, numbered, written

if TYPE_CHECKING:
    from millpond.statestore.types import Objects

UPKEEP = UpkeepPolicy(background=False)
EVERY = 8


class FarObjects(MemoryObjects):
    """Objects that are read many at a time, as in an object store."""

    def get_many(self, paths: Sequence[str]) -> Sequence[bytes | None]:
        return [self._objects.get(path) for path in paths]


class Place(FarObjects):
    """Objects in a place where others were before."""

    @property
    def url(self) -> str:
        return "memory://place"


def run(objects: Objects, numbers: range, upkeep: UpkeepPolicy = UPKEEP) -> None:
    """Run a superstep for each number."""
    with Store.in_memory(objects=objects) as store:
        started = LocalRunner(store, progress=False, upkeep=upkeep).start(ledger_pipeline(), stepping=True)
        for number in numbers:
            started.inject(ROWS, numbered([number]))
            started.run_until_quiet()
        started.stop()


def test_object_store_opens_from_a_recent_checkpoint() -> None:
    objects = FarObjects()
    for first, last in ((0, 20), (20, 61), (61, 62)):
        run(objects, range(first, last))
        snapshot = load(Log(objects))
        assert snapshot.checkpoint > first
        assert snapshot.version - snapshot.checkpoint <= EVERY
    with Store.in_memory(objects=objects) as store:
        assert ledger_of(store) == written(numbered(range(62)))


def test_checkpoint_is_of_the_store_that_is_there_now() -> None:
    """The process remembered a former store in that place, and this one, put back there, got no checkpoint."""
    former, restored = Place(), Place()
    run(former, range(EVERY))
    run(restored, range(100, 100 + EVERY))

    assert load(Log(restored)).checkpoint > 0
    with Store.in_memory(objects=restored) as store:
        assert ledger_of(store) == written(numbered(range(100, 100 + EVERY)))


def test_checkpoint_forgets_files_that_were_deleted() -> None:
    objects = FarObjects()
    # A round writes no checkpoint of its own, because the last one is younger than a sixteenth of this.
    every = 144
    keen = UpkeepPolicy(
        compaction=CompactionPolicy(fan_in=2), retention="0s", collect_every=every, background=False
    )
    # A checkpoint follows the last round.
    run(objects, range(2 * every + 3 * EVERY), keen)

    replayed = replay_log(Log(objects), load(Log(objects)).version)
    gone = replayed.removes.keys() - set(objects.list(""))
    assert len(gone) < every


def test_short_runs_on_an_object_store_leave_a_recent_checkpoint() -> None:
    objects = FarObjects()
    for night in range(20):
        run(objects, range(night, night + 1))
    snapshot = load(Log(objects))
    assert snapshot.version - snapshot.checkpoint <= EVERY + 3


def test_memory_has_no_extra_checkpoints() -> None:
    """The simulator's seeds would find other faults."""
    objects = MemoryObjects()
    run(objects, range(30))
    assert Log(objects).inventory().checkpoints == ()
