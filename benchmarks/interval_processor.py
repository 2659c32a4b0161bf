"""The processor time of a record and of a key in the interval processor, without Spark.

Run it with ``python -m benchmarks.interval_processor``; ``--profile`` adds a profile. The bundle is
the throughput benchmark's: a keyed count with state and record ids.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import resource
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from millpond.executor.computation.computation import Computation
from millpond.executor.computation.context import Context
from millpond.executor.computation.records import Record, Records
from millpond.executor.computation.timers import Timer
from millpond.executor.computation.values import ArrowValues
from millpond.executor.interval.bundle import Bundle, Deliveries, IntervalPlan
from millpond.executor.interval.processor import IntervalProcessor
from millpond.executor.interval.row_reader import RowReader
from millpond.executor.interval.row_update import BundleResult
from millpond.executor.interval.soft_state import SoftState
from millpond.executor.pipeline.nodes import ComputationNode
from millpond.statestore.interval import Interval
from millpond.statestore.log.files import LiveFile, row_file_to_add
from millpond.statestore.objects.memory import MemoryObjects
from millpond.statestore.rows.files import RowFile, write_row_file
from millpond.statestore.rows.row import Fence
from millpond.statestore.system import SystemRng
from millpond.statestore.types import (
    TIME_MIN_US,
    CommitNumber,
    EventTimeMicros,
    Sequencer,
    Superstep,
    TableVersion,
    WallTimeMicros,
)

_INTERVAL = Interval("counter", "", None)
_HOUR_US = 3_600_000_000


class CountRecords(Computation):
    """A count with one call per record."""

    def process_record(self, context: Context, record: Record) -> None:
        """Read, add one, set."""
        state = context.state.get()
        count = 1 if state is None else state["count"] + 1
        context.state.set({"count": count})


class CountBatches(Computation):
    """A count with one call per key: one get and one set."""

    def process_records(self, context: Context, records: Records) -> None:
        """Read, add all, set."""
        state = context.state.get()
        count = 0 if state is None else state["count"]
        context.state.set({"count": count + len(records)})


class CountWindows(Computation):
    """An hourly count with a timer at its end, one call per record, which reads one value."""

    def process_record(self, context: Context, record: Record) -> None:
        """Add the value to its window, and set the timer."""
        end = (record.at // _HOUR_US + 1) * _HOUR_US
        windows = context.state.get({})
        name = str(end)
        windows[name] = windows.get(name, 0) + record.value["amount"]
        context.state.set(windows)
        context.set_timer(end, name)

    def process_timer(self, context: Context, timer: Timer) -> None:
        """Produce the window and delete it."""
        windows = context.state.get()
        context.produce("windows", windows.pop(timer.tag))
        if windows:
            context.state.set(windows)
        else:
            context.state.delete()


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The size of a bundle."""

    records: int
    keys: int
    bundles: int


def deliveries(load: Load, number: int) -> Deliveries:
    """One bundle's records: random keys, new ids, times in disorder within their hour."""
    rng = np.random.default_rng(number)
    keys = pa.array(np.char.add("key-", rng.integers(0, load.keys, load.records).astype("U8")), pa.string())
    ids = np.arange(number * load.records, (number + 1) * load.records).astype("S16")
    at = number * _HOUR_US + rng.integers(0, _HOUR_US, load.records)
    values = ArrowValues(pa.table({"amount": pa.array(rng.integers(0, 100, load.records))}))
    return Deliveries(
        stream="input", keys=keys, at=at, values=values, ids=pa.array(ids.tolist(), pa.binary())
    )


class Run:
    """One interval's bundles in sequence, as a task runs them."""

    def __init__(self, computation: Computation) -> None:
        self.objects = MemoryObjects()
        self.soft_state = SoftState(_INTERVAL, RowReader(self.objects))
        node = ComputationNode(
            name="counter", computation=computation, subscriptions=(), produces=("windows",)
        )
        self.processor = IntervalProcessor(node, _INTERVAL, self.soft_state)
        self.files: list[LiveFile] = []

    def bundle(self, number: int, arrived: Deliveries) -> Bundle:
        """The bundle of superstep ``number``; its watermark is the end of the hour before."""
        plan = IntervalPlan(
            interval=_INTERVAL,
            fence=Fence(Sequencer(1), CommitNumber(number)),
            watermark=EventTimeMicros(number * _HOUR_US if number > 1 else TIME_MIN_US),
        )
        return Bundle(
            plan=plan,
            superstep=Superstep(number),
            wall_time=WallTimeMicros(0),
            deliveries=[arrived],
        )

    def step(self, bundle: Bundle) -> tuple[BundleResult, float, float]:
        """Process, write and adopt; the result, and CPU milliseconds of processing and of writing."""
        self.soft_state.synchronise(self.files)
        started_us = cpu_us()
        result = self.processor.process(bundle)
        processed_us = cpu_us()
        if result.updates is not None:
            self._write(bundle, result.updates)
        written_us = cpu_us()
        return result, (processed_us - started_us) / 1_000, (written_us - processed_us) / 1_000

    def _write(self, bundle: Bundle, updates: pa.Table) -> None:
        file = write_row_file(
            self.objects,
            _INTERVAL,
            updates,
            superstep=bundle.superstep,
            fence=bundle.plan.fence,
            token=SystemRng().token(),
        )
        self.soft_state.adopt(file)
        self.files.append(live(file))


def cpu_us() -> float:
    """Processor time of this process in microseconds, which is less sensitive to other load than wall time."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return (usage.ru_utime + usage.ru_stime) * 1e6


def live(file: RowFile) -> LiveFile:
    """The file as a snapshot lists it after its commit."""
    version = TableVersion(int(file.superstep))
    add = row_file_to_add(file, _INTERVAL, version=version, modification_time_ms=0)
    return LiveFile.from_add(add, version)


def measure(computation: Computation, load: Load, *, profile: bool) -> Run:
    """Run the load and print a line per bundle."""
    run = Run(computation)
    arrived = [deliveries(load, number) for number in range(1, load.bundles + 1)]
    profiler = cProfile.Profile()
    print(f"{type(computation).__name__}: {load.records:,} records, {load.keys:,} keys a bundle")
    for number, delivered in enumerate(arrived, start=1):
        bundle = run.bundle(number, delivered)
        if profile:
            profiler.enable()
        result, process_ms, write_ms = run.step(bundle)
        profiler.disable()
        keys = result.statistics.keys
        print(
            f"  bundle {number}: process {process_ms:6.0f} ms = {1_000 * process_ms / load.records:5.2f} µs a record"
            f" = {1_000 * process_ms / keys:5.2f} µs a key; write {write_ms:4.0f} ms;"
            f" timers fired {result.statistics.timers:,}"
        )
    if profile:
        pstats.Stats(profiler).sort_stats("tottime").print_stats(25)
    return run


def measure_rebuild(run: Run) -> None:
    """Read the run's files into empty soft state: all at once, and only the last."""
    soft_state = SoftState(_INTERVAL, RowReader(run.objects))
    for name, files in (("cold", run.files[:-1]), ("catch-up of one file", run.files)):
        started_us = cpu_us()
        soft_state.synchronise(files)
        print(f"  {name}: {(cpu_us() - started_us) / 1_000:.0f} ms")


def main() -> None:
    """Measure all three computations."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, default=250_000)
    parser.add_argument("--keys", type=int, default=50_000)
    parser.add_argument("--bundles", type=int, default=4)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--only", choices=["records", "batches", "windows"])
    arguments = parser.parse_args()
    load = Load(records=arguments.records, keys=arguments.keys, bundles=arguments.bundles)
    computations = {"batches": CountBatches(), "records": CountRecords(), "windows": CountWindows()}
    for name, computation in computations.items():
        if arguments.only in (None, name):
            measure_rebuild(measure(computation, load, profile=arguments.profile))


if __name__ == "__main__":
    main()
