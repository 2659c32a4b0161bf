"""The driver's work in a superstep, by the number of intervals.

A real store on disk, whose intervals all have work in every superstep. The driver plans, pickles the plan for
Spark, reads the reports of the tasks, and commits. The work of tasks and Spark in between is prepared beforehand and
not counted: each interval gets a row file with one row, and a report that names it.

Intervals get a file in each superstep, so their number of files rises during the measurement: from ``--files`` on, by
one a superstep. With ``--upkeep`` a helper process on the same machine compacts files meanwhile, as by default.

    python -m benchmarks.driver --intervals 100,1000 --json build/bench/driver.json
"""

from __future__ import annotations

import pickle
import resource
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, Final

import click
import cloudpickle
import pyarrow as pa
from rich.console import Console

from benchmarks.json_result import tell_result
from benchmarks.numbers import numbers
from benchmarks.tables import driver_table
from millpond.executor.computation.computation import Computation
from millpond.executor.interval.bundle import BundleStatistics, IntervalPlan
from millpond.executor.interval.row_update import BundleResult, Manifest, PendingWork
from millpond.executor.maintenance.policy import UpkeepPolicy
from millpond.executor.pipeline.pipeline import EnginePipeline
from millpond.executor.spark.routing import routes_of
from millpond.executor.spark.slots import Slots
from millpond.executor.spark.task import make_task
from millpond.executor.spark.task_plan import (
    RoutedColumns,
    RoutedInput,
    SlotParts,
    SlotReport,
    TaskPlan,
    WorkerSetting,
    pack_parts,
    read_slot_reports,
)
from millpond.executor.superstep.coordinator import Coordinator
from millpond.executor.superstep.options import PipelineOptions
from millpond.executor.superstep.plan import InputPosition, SuperstepPlan
from millpond.executor.time.observations import InputObservation, TimesSeen
from millpond.executor.time.watermark_policies import BoundedDisorder
from millpond.statestore.leases.memory import MemoryLeases, MemoryRegistry
from millpond.statestore.log.log import commit_path
from millpond.statestore.log.snapshot import load
from millpond.statestore.objects.disk_tier import DiskOptions
from millpond.statestore.rows.files import write_row_file
from millpond.statestore.store import Store
from millpond.statestore.system import SystemClock, SystemRng
from millpond.statestore.types import EventTimeMicros
from tests.fixtures.row_updates import row_updates
from tests.fixtures.supersteps import commit

PHASES: Final = ("plan", "pack", "reports", "commit", "upkeep")
"""The parts of the driver's work in a superstep, in their order."""

SLOTS: Final = 400
"""As a cluster of 100 executors with a core each has them, unless there are fewer intervals."""

_STREAM: Final = "visits"
_RECORDS: Final = 10
_SECOND_US: Final = 1_000_000
_KIB: Final = 1_024
_CACHE_BYTES: Final = 1 << 28
_WIDTH: Final = 120


class Visits(Computation):
    """Stands for user code, which the driver never runs."""


class Driver:
    """The driver of a pipeline of one computation, and what its tasks would report.

    Args:
        store: the open store.
        intervals: how many the computation has.
        upkeep: when the store is compacted; ``None``: never.
    """

    def __init__(self, store: Store, intervals: int, upkeep: UpkeepPolicy | None = None) -> None:
        pipeline = EnginePipeline("driver")
        pipeline.inject(_STREAM, key="k", at="at", watermark=BoundedDisorder("1s"))
        pipeline.add(Visits(), name="visits", subscribes={_STREAM: None}, produces=(), intervals=intervals)
        self._store = store
        self._clock, self._rng = SystemClock(), SystemRng()
        self._topology = pipeline.check()
        self.coordinator: Coordinator = Coordinator(
            store, self._topology, PipelineOptions(clock=self._clock, rng=self._rng, upkeep=upkeep)
        )
        self._slots = Slots(min(SLOTS, intervals))
        self._setting = WorkerSetting.of(store, self._topology.computations, _CACHE_BYTES, DiskOptions())
        self._intervals = intervals

    def open(self) -> None:
        """Take the leases, and cut the keys: each interval gets one of the sampled keys."""
        self.coordinator.open()
        sample = pa.array([f"key-{number:08d}" for number in range(self._intervals)])
        self.coordinator.create_intervals("visits", sample)

    def close(self) -> None:
        """Give the leases back."""
        self.coordinator.close()

    def step(self) -> dict[str, float]:
        """Run a superstep; return the milliseconds of its phases, and the bytes sent and written."""
        figures: defaultdict[str, float] = defaultdict(float)
        with self._timed(figures, "plan"):
            batch = self.coordinator.superstep
            position = InputPosition(stream=_STREAM, source="driver", batch=batch)
            self.coordinator.inputs.admit(position)
            plan = self.coordinator.begin(inputs={_STREAM})
        with self._timed(figures, "pack"):
            parts = self._slots.parts_of(plan.intervals)
            command = cloudpickle.dumps(make_task(self._task_plan(plan, parts)))
        collected = self._collected(plan, parts)
        with self._timed(figures, "reports"):
            reports = read_slot_reports(collected)
            manifests = [manifest for report in reports for manifest in report.manifests]
            inputs = [observation for report in reports for observation in report.inputs]
        with self._timed(figures, "commit"):
            report = commit(self.coordinator, plan, manifests, position=position, inputs=inputs)
        with self._timed(figures, "upkeep"):
            self.coordinator.maintain()
        entry = self._store.objects.get(commit_path(report.version))
        return figures | {
            "log_ms": report.commit_ms,
            "plan_kib": len(command) / _KIB,
            "reports_kib": collected.nbytes / _KIB,
            "commit_kib": len(entry) / _KIB,
            "files": sum(len(part.files) for part in plan.intervals) / len(plan.intervals),
        }

    def replay_ms(self) -> float:
        """How long another process reads a log entry, on average over the whole log."""
        started_us = self._clock.monotonic_us()
        snapshot = load(self._store.log)
        return (self._clock.monotonic_us() - started_us) / 1_000 / (snapshot.version + 1)

    def _task_plan(self, plan: SuperstepPlan, parts: SlotParts) -> TaskPlan:
        """The plan as `SparkEngine` makes it of a batch."""
        (route,) = routes_of(self._topology, _STREAM, parts)
        return TaskPlan(
            setting=self._setting,
            superstep=plan.superstep,
            wall_time=plan.conditions.wall_time,
            slots=self._slots.count,
            parts=pack_parts(parts, self._slots.count),
            sources=plan.sources,
            input=RoutedInput(
                stream=_STREAM,
                columns=RoutedColumns(key="k", at="at", id=None, error=None, own=("k", "at")),
                first_targets=frozenset(route.positions),
                id_scopes={"visits": self.coordinator.id_scope("visits", _STREAM)},
                watch=self.coordinator.watermarks.watch(_STREAM),
            ),
        )

    def _collected(self, plan: SuperstepPlan, parts: SlotParts) -> pa.Table:
        """What Spark would collect of the tasks, whose files are written here."""
        manifests: defaultdict[int, list[Manifest]] = defaultdict(list)
        for position, part in parts.items():
            manifests[position % self._slots.count].append(self._manifest(plan, part))
        newest_at = EventTimeMicros(int(plan.superstep) * _SECOND_US)
        reports = [
            SlotReport(
                slot=slot,
                manifests=tuple(mine),
                inputs=(
                    InputObservation(
                        stream=_STREAM,
                        records=_RECORDS * len(mine),
                        times=TimesSeen(newest_at=newest_at, oldest_at=newest_at),
                    ),
                ),
                process=f"process-{slot}",
            )
            for slot, mine in manifests.items()
        ]
        return pa.table({"report": pa.array([pickle.dumps(report) for report in reports], pa.binary())})

    def _manifest(self, plan: SuperstepPlan, part: IntervalPlan) -> Manifest:
        order = {"sequencer": part.fence.sequencer, "commit_number": part.fence.commit_number}
        key = part.interval.low or "key-"
        rows = row_updates([{**order, "superstep": plan.superstep, "key": key, "state": "1"}])
        file = write_row_file(
            self._store.objects,
            part.interval,
            rows,
            superstep=plan.superstep,
            fence=part.fence,
            token=self._rng.token(),
        )
        at = EventTimeMicros(int(plan.superstep) * _SECOND_US)
        statistics = BundleStatistics(records=_RECORDS, keys=1)
        result = BundleResult(
            updates=None, statistics=statistics, pending=PendingWork(next_event_timer=at, hold=at)
        )
        return Manifest(interval=part.interval, fence=part.fence, file=file, result=result)

    @contextmanager
    def _timed(self, figures: dict[str, float], phase: str) -> Iterator[None]:
        started_us, used_s = self._clock.monotonic_us(), _cpu_s()
        yield
        figures[f"{phase}_ms"] = (self._clock.monotonic_us() - started_us) / 1_000
        figures["cpu_ms"] += 1_000 * (_cpu_s() - used_s)


@contextmanager
def _opened(folder: Path, intervals: int, upkeep: UpkeepPolicy | None = None) -> Iterator[Driver]:
    """A driver over a new store in an empty folder."""
    registry, clock = MemoryRegistry(), SystemClock()
    with Store.open(
        folder, leases=lambda _, writer_id: MemoryLeases(registry, clock, writer_id=writer_id)
    ) as store:
        driver = Driver(store, intervals, upkeep)
        driver.open()
        try:
            yield driver
        finally:
            driver.close()


def _cpu_s() -> float:
    """Processor seconds of this process so far, all threads included."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def run_once(
    intervals: int, supersteps: int, files: int, upkeep: UpkeepPolicy | None = None
) -> dict[str, Any]:
    """Run supersteps, and return their medians.

    Args:
        intervals: how many the computation has.
        supersteps: how many are measured.
        files: how many supersteps come before: each interval gets a file in each.
        upkeep: when the store is compacted; ``None``: never.
    """
    with (
        tempfile.TemporaryDirectory(prefix="millpond-driver-") as folder,
        _opened(Path(folder), intervals, upkeep) as driver,
    ):
        steps = [driver.step() for _ in range(files + supersteps)][files:]
        replay_ms = driver.replay_ms()
    figures = {name: round(median(step[name] for step in steps), 2) for name in steps[0]}
    totals = [sum(step[f"{phase}_ms"] for phase in PHASES) for step in steps]
    return {
        "intervals": intervals,
        "upkeep": upkeep is not None,
        **figures,
        "superstep_ms": round(median(totals), 2),
        "superstep_max_ms": round(max(totals), 2),
        "replay_ms": round(replay_ms, 2),
    }


def measure(
    intervals: Sequence[int], supersteps: int, files: int, upkeep: UpkeepPolicy | None = None
) -> list[dict[str, Any]]:
    """Measure each number of intervals, one after the other; see `run_once`."""
    return [run_once(number, supersteps, files, upkeep) for number in intervals]


@click.command(help=__doc__)
@click.option("--intervals", default="100,1000", callback=numbers(int), show_default=True)
@click.option("--supersteps", default=8, show_default=True, help="How many are measured.")
@click.option("--files", default=8, show_default=True, help="How many files an interval has before.")
@click.option("--upkeep/--no-upkeep", default=False, help="Compact meanwhile, in a helper process.")
@click.option("--json", "path", type=click.Path(path_type=Path), help="Write the figures there.")
def main(intervals: list[int], supersteps: int, files: int, upkeep: bool, path: Path | None) -> None:
    """Run the benchmark."""
    runs = measure(intervals, supersteps, files, UpkeepPolicy() if upkeep else None)
    Console(stderr=True, width=_WIDTH).print(driver_table(runs))
    tell_result({"runs": runs}, path, indent=2)


if __name__ == "__main__":
    main()
