"""``millpond bench``: a small load on this machine, measured.

The local runner processes it as users have it, on a store on disk with its own ZooKeeper.
"""

from __future__ import annotations

import os
import platform
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import click
import numpy as np
import pyarrow as pa

from millpond.cli.terminal.cli_help import command
from millpond.cli.terminal.options import json_option, number, option
from millpond.cli.terminal.output import OnProgress, print_table, progress_bar, result_as_json
from millpond.executor.computation.computation import Computation
from millpond.executor.computation.context import Context
from millpond.executor.computation.records import Record
from millpond.executor.local.runner import LocalRunner
from millpond.executor.pipeline.pipeline import EnginePipeline
from millpond.executor.time.watermark_policies import BoundedDisorder
from millpond.statestore.store import Store
from millpond.statestore.system import SystemClock
from millpond.statestore.types import DURABILITIES, Clock, Durability

_BEGIN_US: Final = 1_400_000_000_000_000
_WARM_UP_SHARE: Final = 0.2
_WARM_UP_RECORDS: Final = 20_000
_COMMIT_RECORDS: Final = 100
_WARM_UP_COMMITS: Final = 20
_QUIET: Final = "60s"


@command(
    "millpond bench --seconds 1 --records 20000 --commits 20",
    "millpond bench --seconds 1 --records 20000 --commits 20 --durability disk --folder . --json | jq .commits",
)
@option(
    "--folder",
    "Where the temporary store lies, on the disk that is to be measured; by default the system's temporary folder.",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
)
@number("--records", "How many records the rate is measured with.", 200_000)
@number("--keys", "How many keys they have.", 10_000)
@option("--seconds=N", "For how long the latency is measured.", type=click.FloatRange(min=0.1), default=5.0)
@number("--rate", "How many records in a second it is measured with.", 1_000)
@number("--commits", "How many commits are measured.", 200)
@option(
    "--durability",
    "What commits survive: the end of the process, or with disk a power cut too.",
    choices=DURABILITIES,
    default="os_cache",
)
@json_option("One JSON object with everything.")
def bench(
    folder: Path | None,
    records: int,
    keys: int,
    seconds: float,
    rate: int,
    commits: int,
    durability: Durability,
    *,
    as_json: bool,
) -> None:
    """Measure a small load on this machine, with the local runner, in a temporary store that is deleted afterwards.

    Three figures: how many records a second are counted by key from a bounded input; how long a record takes from
    its injection to the second of two computations, after the commit in which the first one produced it; and how long
    a commit takes. Each is measured alone, after a warm-up. What else runs on the machine counts.

    The figures describe this machine and its disk now. They do not measure Spark, and compare no engines: the
    benchmarks in the repository do.
    """
    clock = SystemClock()
    with ExitStack() as resources:
        result = resources.enter_context(result_as_json(as_json))
        place = resources.enter_context(tempfile.TemporaryDirectory(prefix="millpond-bench-", dir=folder))
        with progress_bar("opening a store"):
            store = resources.enter_context(Store.open(Path(place) / "pond", durability=durability))
        with progress_bar("records per second"):
            throughput = _measure_throughput(store, clock, records=records, keys=keys)
        with progress_bar("latency") as on_progress:
            latency = _measure_latency(store, clock, on_progress, seconds=seconds, rate=rate)
        with progress_bar("commits") as on_progress:
            made = _measure_commits(store, clock, on_progress, commits=commits, keys=keys)
        available = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
        machine = {
            "processors": available,
            "system": f"{platform.system()} {platform.release()}",
            "python": platform.python_version(),
        }
        result |= {"machine": machine, "durability": durability}
        result |= {"throughput": throughput, "latency": latency, "commits": made}
        if not as_json:
            _print(result)


def _print(result: Mapping[str, Any]) -> None:
    machine, throughput, latency, made = (
        result[name] for name in ("machine", "throughput", "latency", "commits")
    )
    click.echo(
        f"{machine['processors']} processors, {machine['system']}, Python {machine['python']}; "
        f"durability {result['durability']}"
    )
    of_keys = f"{throughput['records']:,} of {throughput['keys']:,} keys"
    one_by_one = f"{latency['records']:,} records at {latency['rate']:,} a second"
    in_commits = f"{made['commits']:,} commits of {made['records']:,} records"
    rows = [
        ("records per second", f"{throughput['records_per_second']:,}", of_keys),
        ("latency, p50", f"{latency['p50_ms']} ms", one_by_one),
        ("latency, p95", f"{latency['p95_ms']} ms", ""),
        ("latency, p99", f"{latency['p99_ms']} ms", ""),
        ("commit, p50", f"{made['commit_p50_ms']} ms", in_commits),
        ("commit, p99", f"{made['commit_p99_ms']} ms", ""),
        ("superstep, p50", f"{made['superstep_p50_ms']} ms", "the same, with the work and the commit"),
    ]
    print_table("", ("figure", "here", "measured with"), rows)


class _Count(Computation):
    def process_record(self, context: Context, record: Record) -> None:
        del record
        context.state.set((context.state.get() or 0) + 1)


class _Forward(_Count):
    def process_record(self, context: Context, record: Record) -> None:
        super().process_record(context, record)
        context.produce("visits", {"city": record.value["city"], "injected_us": record.value["injected_us"]})


class _Arrive(_Count):
    """A count that also records how long each record was under way."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.seen: list[tuple[int, int]] = []

    def process_record(self, context: Context, record: Record) -> None:
        injected_us = record.value["injected_us"]
        self.seen.append((injected_us, self.clock.monotonic_us() - injected_us))
        super().process_record(context, record)


def _measure_throughput(store: Store, clock: Clock, *, records: int, keys: int) -> dict[str, Any]:
    """Count the records of a bounded input by key."""
    pipeline = EnginePipeline("throughput")
    events = pipeline.inject("events", key="key", at="at", watermark=BoundedDisorder("1s"))
    events.apply(_Count(), name="counted")
    rows = _rows(_WARM_UP_RECORDS + records, keys)
    runner = LocalRunner(store, progress=False, clock=clock)
    runner.run(pipeline, {"events": rows.slice(0, _WARM_UP_RECORDS)}, finish=False)
    summary = runner.run(pipeline, {"events": rows})
    return {
        "records": summary.run.records,
        "keys": keys,
        "elapsed_ms": round(summary.elapsed_ms, 1),
        "records_per_second": round(summary.run.records / summary.elapsed_ms * 1_000),
    }


def _measure_latency(
    store: Store, clock: Clock, on_progress: OnProgress, *, seconds: float, rate: int
) -> dict[str, Any]:
    """Inject records one by one, ``rate`` a second, and measure until the second of two computations has each.

    The first computation's commit lies in between.
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
                # The time it was due, so that a delayed injection counts as latency.
                "injected_us": min(due_us, clock.monotonic_us()),
            }
            run.inject("people", row)
            on_progress(number + 1, count)
        run.run_until_quiet(timeout=_QUIET)
    measured_from_us = started_us + _WARM_UP_SHARE * seconds * 1_000_000
    latencies_us = [latency for injected, latency in last.seen if injected >= measured_from_us]
    p50, p95, p99 = _percentiles_ms([latency / 1_000 for latency in latencies_us], (50, 95, 99))
    return {"records": len(latencies_us), "rate": rate, "p50_ms": p50, "p95_ms": p95, "p99_ms": p99}


def _measure_commits(
    store: Store, clock: Clock, on_progress: OnProgress, *, commits: int, keys: int
) -> dict[str, Any]:
    """Run supersteps of a hundred records, one after the other."""
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
            on_progress(number + 1, every)
        run.run_until_quiet()
    commit_p50, commit_p99 = _percentiles_ms([report.commit_ms for report in reports], (50, 99))
    (superstep_p50,) = _percentiles_ms([report.duration_ms for report in reports], (50,))
    return {
        "commits": len(reports),
        "records": _COMMIT_RECORDS,
        "commit_p50_ms": commit_p50,
        "commit_p99_ms": commit_p99,
        "superstep_p50_ms": superstep_p50,
    }


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
