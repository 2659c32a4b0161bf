"""Parting of shared files while a pipeline runs."""

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
    """A store in memory, and a stepped run on it."""

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
        """Return the files that more than one live interval reads."""
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
def test_files_shared_after_a_split_are_parted(memory_bytes_max: int) -> None:
    """With a memory limit of one byte the parting goes through the disk."""
    pond = Pond(memory_bytes_max)
    pond.feed(3)
    pond.coordinator.recut(Cut.split(WHOLE, ["m"]))
    assert pond.shared()

    pond.feed(6)

    assert not pond.shared()
    assert set(pond.counts()) == set(KEYS)
    assert len(set(pond.counts().values())) == 1
    assert not verify_store(pond.disk).findings


def test_split_of_an_earlier_run_is_parted() -> None:
    pond = Pond()
    pond.feed(3)
    pond.coordinator.recut(Cut.split(WHOLE, ["m"]))
    pond.run.stop()
    pond.run = pond.start()
    assert pond.shared()

    pond.feed(2)

    assert not pond.shared()


def test_files_of_two_splits_are_parted_in_turn() -> None:
    """The first interval's files are parted among all three."""
    pond = Pond()
    pond.feed(3)
    pond.coordinator.recut(Cut.split(WHOLE, ["m"]))
    pond.feed(1)
    pond.coordinator.recut(Cut.split(Interval("count", "", "m"), ["b"]))

    pond.feed(14)

    assert not pond.shared()
    assert set(pond.counts().values()) == {pond.counts()["a"]}
    assert not verify_store(pond.disk).findings


def test_merge_after_a_split_makes_parting_unnecessary() -> None:
    """The merged interval owns the shared files and compacts them."""
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


def test_parting_that_cannot_be_prepared_is_tried_again() -> None:
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
