"""Parting while a pipeline runs: after a split each interval gets files of its own, and no answer changes."""

from __future__ import annotations

import pytest

from millpond.executor.local.run import LocalRun
from millpond.executor.local.runner import LocalRunner
from millpond.executor.maintenance.policy import UpkeepPolicy
from millpond.executor.ownership.cuts import Cut
from millpond.executor.pipeline.pipeline import EnginePipeline
from millpond.executor.superstep.coordinator import Coordinator
from millpond.gc.compaction import CompactionPolicy
from millpond.statestore.history.verification import verify_store
from millpond.statestore.interval import Interval
from millpond.statestore.leases.memory import MemoryRegistry
from millpond.statestore.objects.memory import MemoryObjects
from millpond.statestore.store import Store
from millpond.testing.faults.faulty_objects import Fault, FaultyObjects
from millpond.testing.fixtures.determinism import ManualClock, SeededRng
from tests.fixtures.computations import Count

WHOLE = Interval("count")
KEYS = "abcxyz"


class Pond:
    """A store in memory, and a run over it that is stepped."""

    def __init__(self, memory_bytes_max: int = 1 << 26) -> None:
        self.clock, self.rng = ManualClock(), SeededRng(1)
        self.disk, self.registry = FaultyObjects(MemoryObjects()), MemoryRegistry()
        self.upkeep = UpkeepPolicy(
            compaction=CompactionPolicy(fan_in=4, files_max=8, memory_bytes_max=memory_bytes_max)
        )
        self.superstep = 0
        self.run = self.start()

    def start(self) -> LocalRun:
        self.store = Store.in_memory(
            objects=self.disk, registry=self.registry, clock=self.clock, rng=self.rng
        )
        pipeline = EnginePipeline("p")
        pipeline.inject("in", key="k", at="at").apply(Count(), name="count")
        runner = LocalRunner(
            self.store, clock=self.clock, rng=self.rng, progress=False, intervals=1, upkeep=self.upkeep
        )
        return runner.start(pipeline, stepping=True)

    @property
    def coordinator(self) -> Coordinator:
        return self.run._worker.coordinator

    def feed(self, supersteps: int = 1, keys: str = KEYS) -> None:
        for _ in range(supersteps):
            self.superstep += 1
            self.run.inject("in", [{"k": key, "at": self.superstep, "n": 1} for key in keys])
            self.run.run_until_quiet()

    def shared(self) -> list[str]:
        """The files that more than one live interval reads."""
        snapshot = self.store.committer.snapshot
        live = snapshot.live_intervals("count")
        return [
            file.path
            for file in snapshot.files_in("count")
            if sum(file.overlaps(interval) for interval in live) > 1
        ]

    def counts(self) -> dict[str, str]:
        rows = self.store.rows_view("count").to_arrow().to_pylist()
        return {row["key"]: row["state"] for row in rows}


@pytest.mark.parametrize("memory_bytes_max", [1 << 26, 1])
def test_shared_files_are_parted_once_the_parts_have_files_of_their_own(memory_bytes_max: int) -> None:
    """In memory and through the disk; the rows are those of before, and the store is sound."""
    pond = Pond(memory_bytes_max)
    pond.feed(3)
    pond.coordinator.recut(Cut.split(WHOLE, ["m"]))
    assert pond.shared()

    pond.feed(6)

    assert not pond.shared()
    assert set(pond.counts()) == set(KEYS)
    assert len(set(pond.counts().values())) == 1
    assert not verify_store(pond.disk).findings


def test_a_split_that_an_earlier_run_left_is_parted() -> None:
    """A new owner finds the files of intervals that are no more."""
    pond = Pond()
    pond.feed(3)
    pond.coordinator.recut(Cut.split(WHOLE, ["m"]))
    pond.run.stop()
    pond.run = pond.start()
    assert pond.shared()

    pond.feed(2)

    assert not pond.shared()


def test_split_again_before_it_is_parted() -> None:
    """The files of the first interval are parted among all three, then those of the second."""
    pond = Pond()
    pond.feed(3)
    pond.coordinator.recut(Cut.split(WHOLE, ["m"]))
    pond.feed(1)
    pond.coordinator.recut(Cut.split(Interval("count", "", "m"), ["b"]))

    pond.feed(14)

    assert not pond.shared()
    assert set(pond.counts().values()) == {pond.counts()["a"]}
    assert not verify_store(pond.disk).findings


def test_a_merge_undoes_it() -> None:
    """What was shared belongs to the one interval again, and its own compactions take it."""
    pond = Pond()
    pond.feed(3)
    cut = Cut.split(WHOLE, ["m"])
    pond.coordinator.recut(cut)
    pond.feed(1)
    pond.coordinator.recut(Cut.merge(cut.by))

    pond.feed(12)

    assert not pond.shared()
    assert len(pond.store.committer.snapshot.files_in("count")) < 10
    assert not verify_store(pond.disk).findings


def test_a_store_that_is_away_puts_it_off() -> None:
    """A parting that could not be prepared is tried again later, and leaves nothing behind."""
    pond = Pond()
    pond.feed(3)
    pond.coordinator.recut(Cut.split(WHOLE, ["m"]))
    pond.feed(3)
    first = pond.shared()[0]
    pond.run.stop()
    pond.run = pond.start()
    pond.disk.plan(Fault.REFUSED, "get", within=first)
    pond.feed(1, keys="")
    assert pond.shared()

    pond.feed(20)

    assert first not in pond.shared()
    assert not pond.shared()
