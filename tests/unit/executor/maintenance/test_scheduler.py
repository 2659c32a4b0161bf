"""Upkeep of a running pipeline."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import Executor, Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from millpond.executor.computation.computation import Computation
from millpond.executor.local.engine import LocalBatch
from millpond.executor.local.run import LocalRun
from millpond.executor.local.runner import LocalRunner
from millpond.executor.maintenance.policy import UpkeepPolicy
from millpond.executor.pipeline.pipeline import EnginePipeline
from millpond.executor.time.watermark_policies import BoundedDisorder
from millpond.gc.compaction import Compacted, CompactionPolicy
from millpond.statestore.errors import FencedError, UnavailableError
from millpond.statestore.leases.memory import MemoryLeases, MemoryRegistry
from millpond.statestore.log.commit_file import decode
from millpond.statestore.objects.memory import MemoryObjects
from millpond.statestore.store import Store
from millpond.statestore.system import SystemClock
from millpond.statestore.types import TableVersion
from millpond.testing.faults.faulty_objects import Fault, FaultyObjects
from millpond.testing.fixtures.determinism import ManualClock, SeededRng

pytestmark = pytest.mark.slow

SECOND = 1_000_000
COMPACTIONS = CompactionPolicy(fan_in=4, files_max=8)


class Window(Computation):
    """A count that is deleted ten seconds after its first record."""

    def process_record(self, context, record):
        count = context.state.get()
        if count is None:
            context.set_timer(record.at + 10 * SECOND)
        context.state.set((count or 0) + 1)
        context.produce("seen", {"key": record.key})

    def process_timer(self, context, timer):
        context.state.delete()


class Total(Computation):
    def process_record(self, context, record):
        context.state.set((context.state.get() or 0) + 1)


def pipeline() -> EnginePipeline:
    made = EnginePipeline("p")
    made.inject("in", key="k", at="at", id="id", watermark=BoundedDisorder("1s"), id_slack="5s")
    made.add(Window(), name="window", subscribes={"in": None}, produces=["seen"])
    made.add(Total(), name="total", subscribes={"seen": None}, produces=[])
    return made


class Pond:
    """A store in memory, and a stepped pipeline on it."""

    def __init__(self, upkeep: UpkeepPolicy | None = None, objects: Any = None) -> None:
        self.disk = MemoryObjects() if objects is None else objects
        self.registry = MemoryRegistry()
        self.clock = ManualClock()
        self.upkeep = upkeep or UpkeepPolicy(compaction=COMPACTIONS)
        self.opened = 0
        self.seed: str | None = None
        self.start()

    def start(self) -> None:
        self.opened += 1
        self.store = Store.in_memory(
            objects=self.disk, registry=self.registry, clock=self.clock, rng=SeededRng(self.opened)
        )
        runner = LocalRunner(
            self.store,
            clock=self.clock,
            rng=SeededRng(self.seed or f"runner{self.opened}"),
            intervals=2,
            progress=False,
            upkeep=self.upkeep,
        )
        self.run: LocalRun = runner.start(pipeline(), stepping=True)

    def step(self, second: int, keys: int = 8) -> None:
        rows = [
            {"k": f"{second % 3}{key}", "at": second * SECOND, "id": f"{second}/{key}"} for key in range(keys)
        ]
        self.clock.advance_ms(1_000)
        self.run.inject("in", rows)
        self.run.step()

    def live_bytes(self) -> int:
        """Compact everything, and return the size of the files."""
        self.run.stop()
        self.store.close()
        self.upkeep = UpkeepPolicy(compaction=CompactionPolicy(fan_in=2, files_max=2, garbage_ratio=1e-9))
        self.start()
        before = -1
        while before != self.store.committer.snapshot.version:
            before = self.store.committer.snapshot.version
            self.run.step()
        return self.store.committer.snapshot.size_bytes

    def files_per_interval(self) -> Counter[str]:
        return Counter(file.interval_id for file in self.store.committer.snapshot.files)

    def rows(self, computation: str) -> dict[str, str]:
        table = self.store.rows_view(computation).to_arrow()
        return dict(zip(table.column("key").to_pylist(), table.column("state").to_pylist(), strict=True))

    def kinds(self) -> Counter[str]:
        kinds: Counter[str] = Counter()
        for version in self.store.log.inventory().versions:
            for action in decode(self.store.log.require(version)):
                if (own := getattr(action, "millpond", None)) is not None:
                    kinds[str(own["kind"])] += 1
        return kinds


def test_number_and_size_of_files_stay_bounded():
    """After 300 supersteps the files are at most three times the size of the live rows."""
    pond, most = Pond(), 0
    for second in range(300):
        pond.step(second)
        most = max(most, *pond.files_per_interval().values())
    snapshot = pond.store.committer.snapshot
    held = sum(file.size_bytes for file in snapshot.files)
    compactions, totals = pond.kinds()["compaction"], pond.rows("total")
    live = pond.live_bytes()

    assert most <= COMPACTIONS.files_max + COMPACTIONS.fan_in
    assert held <= 3 * live
    assert sum(map(int, totals.values())) == 299 * 8
    assert compactions > 10


def test_compactions_change_no_rows_counts_or_duplicates():
    compacted, plain = Pond(), Pond(UpkeepPolicy(compaction=CompactionPolicy(fan_in=10**6)))
    for second in range(40):
        for pond in (compacted, plain):
            pond.step(second)
            pond.step(second)  # send everything again, with the same ids
            if second % 20 == 19:
                pond.run.stop()
                pond.store.close()
                pond.start()

    assert compacted.kinds()["compaction"]
    assert not plain.kinds()["compaction"]
    assert compacted.run.summary().totals == plain.run.summary().totals
    for computation in ("window", "total"):
        assert compacted.rows(computation) == plain.rows(computation)


def test_undelivered_productions_survive_compaction_and_restart():
    pond = Pond()
    for second in range(9):
        pond.step(second)
    pond.run.stop()
    pond.store.close()
    pond.start()
    pond.run.run_until_quiet()

    assert pond.kinds()["compaction"]
    assert sum(int(count) for count in pond.rows("total").values()) == 9 * 8


def test_compaction_of_a_former_owner_is_fenced():
    pond = Pond()
    for second in range(3):
        pond.step(second)
    coordinator = pond.run._worker.coordinator
    pond.start()
    before = pond.store.committer.snapshot.version
    # Make the compaction due at once: a superstep would be fenced first.
    schedule, coordinator.upkeep.due_version = coordinator.upkeep._compactions, 0
    schedule.files.update(dict.fromkeys(schedule.files, COMPACTIONS.fan_in))
    schedule.policy = UpkeepPolicy(compaction=CompactionPolicy(fan_in=2), background=False)

    with pytest.raises(FencedError):
        coordinator.maintain()
    assert pond.store.committer.refresh().version == before


def test_upkeep_none_disables_compactions():
    disk = MemoryObjects()
    store = Store.in_memory(objects=disk, clock=ManualClock(), rng=SeededRng(1))
    run = LocalRunner(store, clock=ManualClock(), rng=SeededRng(2), progress=False, upkeep=None).start(
        pipeline(), stepping=True
    )
    for second in range(20):
        run.inject("in", [{"k": "a", "at": second * SECOND, "id": str(second)}])
        run.step()

    assert len(store.committer.snapshot.files) >= 20


def test_compaction_that_cannot_be_prepared_is_tried_again():
    faulty = FaultyObjects(MemoryObjects())
    pond = Pond(objects=faulty)
    for second in range(3):
        pond.step(second)
    faulty.plan(Fault.REFUSED, "get", within="computation=", times=1)
    for second in range(3, 20):
        pond.step(second)

    assert pond.kinds()["compaction"]
    assert max(pond.files_per_interval().values()) <= COMPACTIONS.files_max + COMPACTIONS.fan_in


def test_damaged_file_is_not_compacted():
    """A compaction would hide the damage or spread it."""
    pond = Pond()
    for second in range(2):
        pond.step(second)
    damaged = pond.store.committer.snapshot.files_in("window")[0].path
    data = bytearray(pond.disk.get(damaged))
    data[50] ^= 4
    pond.disk.put(damaged, bytes(data))
    for second in range(2, 20):
        pond.step(second)

    assert pond.store.committer.snapshot.file(damaged) is not None


def test_threaded_run_compacts_in_the_background():
    store = Store.in_memory(rng=SeededRng(1))
    runner = LocalRunner(store, progress=False, upkeep=UpkeepPolicy(compaction=COMPACTIONS))
    with runner.start(pipeline()) as run:
        for second in range(40):
            run.inject("in", [{"k": "a", "at": second * SECOND, "id": str(second)}]).wait()
        run.run_until_quiet()
    live = {file.path for file in store.committer.snapshot.files}
    table = store.rows_view("total").to_arrow()

    assert table.column("state").to_pylist() == ["40"]
    assert len(live) < 40
    assert store.snapshot(TableVersion(1)) is not None


def test_restart_with_the_same_seed_chooses_new_file_names():
    """Otherwise it would meet the uncommitted files of the killed process."""
    pond = Pond()
    pond.seed = "one and the same"
    for second in range(40):
        # Abandon the run without a stop, so that its prepared files remain, and start again.
        pond.start()
        pond.step(second)
        pond.run._worker.superstep.prepare(LocalBatch())
    names = [path for path in pond.disk.list("") if path.endswith(".parquet")]
    tokens = [name.rpartition("-")[2] for name in names]
    assert len(set(tokens)) == len(tokens) > 40
    assert len(pond.rows("total")) == 24


class Held(Executor):
    """An executor that keeps its work until released."""

    def __init__(self) -> None:
        self.work: list[tuple[Future[Compacted], partial[Compacted]]] = []

    def compact(self, work: partial[Compacted]) -> Future[Compacted]:
        future: Future[Compacted] = Future()
        self.work.append((future, work))
        return future

    def release(self) -> None:
        for future, work in self.work:
            future.set_result(work())
        self.work.clear()


def test_large_compaction_blocks_no_small_ones():
    """Younger files are compacted and garbage is collected until it commits."""
    policy = UpkeepPolicy(compaction=COMPACTIONS, collect_every=8, retention="0s")
    pond, plain = (
        Pond(policy),
        Pond(UpkeepPolicy(compaction=CompactionPolicy(fan_in=10_000, files_max=10_000))),
    )
    held = Held()
    schedule = pond.run._worker.coordinator.upkeep._compactions
    schedule.workers = replace(schedule.workers, large=held)
    for second in range(40):
        # The first compactions are large.
        is_large = not schedule._large
        schedule.policy = replace(
            policy, compaction=replace(COMPACTIONS, memory_bytes_max=0 if is_large else 1 << 20)
        )
        pond.step(second)
        plain.step(second)
        assert max(pond.files_per_interval().values()) <= 2 * COMPACTIONS.files_max + COMPACTIONS.fan_in
    large = {interval: task.parts[0] for interval, task in schedule._large.items()}
    assert large
    held.release()
    files_before = sum(pond.files_per_interval().values())
    pond.run._worker.coordinator.maintain()

    live = {file.path for file in pond.store.committer.snapshot.files}
    assert not any(file.path in live for compaction in large.values() for file in compaction.files)
    assert sum(pond.files_per_interval().values()) < files_before
    for name in ("window", "total"):
        assert pond.rows(name) == plain.rows(name)


class Nights:
    """A store on disk that is served by short runs only, as `millpond run` in a crontab does."""

    def __init__(self, folder: Path) -> None:
        self.registry = MemoryRegistry()
        self.folder = folder
        self.time_us = 0

    def run(self, *, fails: bool = False, upkeep: UpkeepPolicy | None = None) -> None:
        """Add a record of each of 20 keys in a run that is over before a helper has started."""

        def leases(_: str, writer_id: str) -> MemoryLeases:
            return MemoryLeases(self.registry, SystemClock(), writer_id=writer_id)

        made = EnginePipeline("p")
        made.inject("in", key="k", at="at").apply(Total(), name="total")
        self.time_us += SECOND
        options = {} if upkeep is None else {"upkeep": upkeep}
        with Store.open(self.folder, leases=leases) as store:
            run = LocalRunner(store, progress=False, **options).start(made)
            try:
                run.inject("in", [{"k": f"k{key}", "at": self.time_us} for key in range(20)]).wait()
                if fails:
                    run._worker.lifecycle.fail(UnavailableError("it was interrupted"))
            finally:
                run.stop()

    @property
    def store(self) -> Store:
        return Store.open(self.folder, read_only=True)

    def counts(self) -> set[str]:
        with self.store as store:
            return set(store.rows_view("total").to_arrow().column("state").to_pylist())

    def state(self) -> tuple[int, int]:
        """Return the number of live files, and of commits since the last checkpoint."""
        with self.store as store:
            snapshot, checkpoints = store.snapshot(), store.log.inventory().checkpoints
            last = max((checkpoint.version for checkpoint in checkpoints), default=0)
            return len(snapshot.files), snapshot.version - last


def test_short_runs_compact_and_write_checkpoints(tmp_path: Path) -> None:
    nights = Nights(tmp_path / "pond")
    states = []
    for _ in range(24):
        nights.run()
        states.append(nights.state())

    assert max(files for files, _ in states) <= 9
    assert max(commits for _, commits in states) < 40
    assert nights.counts() == {"24"}


def test_run_that_failed_does_no_upkeep_at_its_close(tmp_path: Path) -> None:
    nights = Nights(tmp_path / "pond")
    for _ in range(9):
        nights.run(fails=True)
    assert nights.state()[0] == 9
    nights.run()
    assert nights.state()[0] == 2


def test_closing_merges_young_files_only_where_the_old_one_is_large(tmp_path: Path) -> None:
    nights = Nights(tmp_path / "pond")
    for _ in range(10):
        nights.run()
    with nights.store as store:
        [old, *_] = sorted(store.snapshot().files, key=lambda file: file.added_version)
    # Larger than the first tier, and than what is merged in memory.
    limits = CompactionPolicy(
        small_bytes=1, fan_in=8, memory_bytes_max=old.size_bytes - 1, garbage_ratio=0.01
    )
    for _ in range(12):
        nights.run(upkeep=UpkeepPolicy(compaction=limits))

    with nights.store as store:
        assert old.path in {file.path for file in store.snapshot().files}
    assert nights.counts() == {"22"}
