"""What this machine does with a small load: records per second, latency, and what a commit costs.

All of it is measured through the local runner as users have it, on a store on disk with its own ZooKeeper. Spark
is not measured. The figures say what is to be expected of a machine and its disk, and are no comparison of engines.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa

from millpond.cli.terminal.output import Told
from millpond.executor.computation.computation import Computation
from millpond.executor.computation.context import Context
from millpond.executor.computation.records import Record
from millpond.executor.local.runner import LocalRunner
from millpond.executor.pipeline.pipeline import EnginePipeline
from millpond.executor.time.watermark_policies import BoundedDisorder
from millpond.statestore.store import Store
from millpond.statestore.types import Clock

_BEGIN_US: Final = 1_400_000_000_000_000
_WARM_UP_SHARE: Final = 0.2
_WARM_UP_RECORDS: Final = 20_000
_COMMIT_RECORDS: Final = 100
_WARM_UP_COMMITS: Final = 20
_QUIET_MS: Final = 60_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What was measured on.

    Attributes:
        processors: how many this process may use.
        system: the operating system and its release.
        python: the version of Python.
    """

    processors: int
    system: str
    python: str

    @classmethod
    def of_this_process(cls) -> Machine:
        """The machine that this process runs on."""
        available = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
        return cls(
            processors=available,
            system=f"{platform.system()} {platform.release()}",
            python=platform.python_version(),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Throughput:
    """A bounded input, counted by key: how fast it went.

    Attributes:
        records: how many there were, without those to warm up.
        keys: of how many keys.
        elapsed_ms: how long it took from the first one to the last commit.
        records_per_second: the rate.
    """

    records: int
    keys: int
    elapsed_ms: float
    records_per_second: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """Records one by one, through two computations: how long it took from injection to the second one, after the commit
    in which the first one produced.

    Attributes:
        records: how many were measured, without those to warm up.
        rate: how many were injected in a second.
        p50_ms: half of them took at most so long.
        p95_ms: 95 in a hundred.
        p99_ms: 99 in a hundred.
    """

    records: int
    rate: int
    p50_ms: float
    p95_ms: float
    p99_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Commits:
    """Supersteps of a hundred records, one after the other: what each took, and what of that was its commit.

    Attributes:
        commits: how many were measured, without those to warm up.
        records: of how many records each.
        commit_p50_ms: half of the commits took at most so long.
        commit_p99_ms: 99 in a hundred.
        superstep_p50_ms: half of the supersteps took at most so long, with their commits.
    """

    commits: int
    records: int
    commit_p50_ms: float
    commit_p99_ms: float
    superstep_p50_ms: float


class _Count(Computation):
    """Counts a key's records."""

    def process_record(self, context: Context, record: Record) -> None:
        """Add one."""
        del record
        context.state.set((context.state.get() or 0) + 1)


class _Forward(_Count):
    """Counts a key's records, and sends each on."""

    def process_record(self, context: Context, record: Record) -> None:
        """Add one, and produce."""
        super().process_record(context, record)
        context.produce("visits", {"city": record.value["city"], "injected_us": record.value["injected_us"]})


class _Arrive(_Count):
    """Counts a key's records, and notes how long each was under way.

    Args:
        clock: the source of time.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.seen: list[tuple[int, int]] = []

    def process_record(self, context: Context, record: Record) -> None:
        """Note, and add one."""
        injected_us = record.value["injected_us"]
        self.seen.append((injected_us, self.clock.monotonic_us() - injected_us))
        super().process_record(context, record)


def measure_throughput(store: Store, clock: Clock, *, records: int, keys: int) -> Throughput:
    """Count the records of a table by key.

    Args:
        store: an open store.
        clock: the source of time.
        records: how many.
        keys: of how many keys, in turn.
    """
    pipeline = EnginePipeline("throughput")
    events = pipeline.inject("events", key="key", at="at", watermark=BoundedDisorder("1s"))
    events.apply(_Count(), name="counted")
    rows = _rows(_WARM_UP_RECORDS + records, keys)
    runner = LocalRunner(store, progress=False, clock=clock)
    runner.run(pipeline, {"events": rows.slice(0, _WARM_UP_RECORDS)}, finish=False)
    summary = runner.run(pipeline, {"events": rows})
    return Throughput(
        records=summary.run.records,
        keys=keys,
        elapsed_ms=round(summary.elapsed_ms, 1),
        records_per_second=round(summary.run.records / summary.elapsed_ms * 1_000),
    )


def measure_latency(store: Store, clock: Clock, *, seconds: float, rate: int, told: Told) -> Latency:
    """Inject records one by one at an even rate.

    Args:
        store: an open store.
        clock: the source of time.
        seconds: for how long.
        rate: how many in a second.
        told: called after each, with how many were injected and how many there are.
    """
    pipeline, last = EnginePipeline("latency"), _Arrive(clock)
    people = pipeline.inject("people", key="user", at="at", id="id", watermark=BoundedDisorder("1s"))
    people.apply(_Forward(), name="first", produces="visits").apply(last, name="second", key="city")
    count = max(int(seconds * rate), 1)
    with LocalRunner(store, progress=False, clock=clock).start(pipeline) as run:
        started_us = clock.monotonic_us()
        for number in range(count):
            due_us = started_us + number * 1_000_000 // rate
            wait_us = due_us - clock.monotonic_us()
            if wait_us > 0:
                clock.sleep_ms(wait_us / 1_000)
            row = {
                "user": f"user-{number * 7_919 % 1_000}",
                "city": f"city-{number * 104_729 % 1_000}",
                "at": clock.now_us(),
                "id": number,
                # When it was due: an injection that is held up counts as latency.
                "injected_us": min(due_us, clock.monotonic_us()),
            }
            run.inject("people", row)
            told(number + 1, count)
        run.run_until_quiet(timeout_ms=_QUIET_MS)
    measured_from_us = started_us + _WARM_UP_SHARE * seconds * 1_000_000
    latencies_us = [latency for injected, latency in last.seen if injected >= measured_from_us]
    p50, p95, p99 = _percentiles_ms([latency / 1_000 for latency in latencies_us], (50, 95, 99))
    return Latency(records=len(latencies_us), rate=rate, p50_ms=p50, p95_ms=p95, p99_ms=p99)


def measure_commits(store: Store, clock: Clock, *, commits: int, keys: int, told: Told) -> Commits:
    """Run supersteps of a hundred records, one after the other.

    Args:
        store: an open store.
        clock: the source of time.
        commits: how many.
        keys: of how many keys.
        told: called after each, with how many were made and how many there are.
    """
    pipeline = EnginePipeline("commits")
    events = pipeline.inject("ticks", key="key", at="at", watermark=BoundedDisorder("1s"))
    events.apply(_Count(), name="ticked")
    every = _WARM_UP_COMMITS + commits
    rows, reports = _rows(every * _COMMIT_RECORDS, keys), []
    with LocalRunner(store, progress=False, clock=clock).start(pipeline, stepping=True) as run:
        for number in range(every):
            run.inject("ticks", rows.slice(number * _COMMIT_RECORDS, _COMMIT_RECORDS))
            report = run.step()
            if report is not None and number >= _WARM_UP_COMMITS:
                reports.append(report)
            told(number + 1, every)
        run.run_until_quiet()
    commit_p50, commit_p99 = _percentiles_ms([report.commit_ms for report in reports], (50, 99))
    (superstep_p50,) = _percentiles_ms([report.duration_ms for report in reports], (50,))
    return Commits(
        commits=len(reports),
        records=_COMMIT_RECORDS,
        commit_p50_ms=commit_p50,
        commit_p99_ms=commit_p99,
        superstep_p50_ms=superstep_p50,
    )


def _rows(count: int, keys: int) -> pa.Table:
    numbers = np.arange(count)
    return pa.table(
        {
            "key": pa.array([f"key-{number:07d}" for number in numbers * 7_919 % keys]),
            "at": pa.array(_BEGIN_US + numbers * 1_000),
        }
    )


def _percentiles_ms(times_ms: Sequence[float], percents: Sequence[float]) -> list[float]:
    return [round(float(value), 2) for value in np.percentile(times_ms, percents)]
