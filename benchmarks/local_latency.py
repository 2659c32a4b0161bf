"""Latency of the local runner: strong productions and exactly-once through one stage.

Each record is injected with an id, deduplicated, counted and produced by ``first`` and reaches
``second`` under another key, after the commit that made its production durable. The figure is
the time from the injection to ``second``'s hook. MillWheel §8.1 reports a median of 33.7 ms and
a 95th percentile of 93.8 ms for the same guarantees (on a cluster, between machines).

    python -m benchmarks.local_latency --seconds 20 --rate 1000
    python -m benchmarks.local_latency --productions both --stages 4
    python -m benchmarks.local_latency --durability both

The second form has four stages in a row, once with strong and once with weak productions (§6.1.3) in
turns in one process, and reports how many times sooner weak productions reach the last stage. The third
reports in the same way what it costs to sync every commit to the disk.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from millpond.executor.computation.computation import Computation
from millpond.executor.computation.context import Context
from millpond.executor.computation.records import Record
from millpond.executor.local.run import LocalRun
from millpond.executor.local.runner import LocalRunner
from millpond.executor.pipeline.nodes import ProductionMode
from millpond.executor.pipeline.pipeline import EnginePipeline
from millpond.executor.time.watermark_policies import BoundedDisorder
from millpond.statestore.store import Store
from millpond.statestore.system import SystemClock
from millpond.statestore.types import DURABILITIES, Durability

KEYS = 1_000
WARM_UP_SHARE = 0.2


class First(Computation):
    """Counts per user, and produces to the city."""

    def process_record(self, context: Context, record: Record) -> None:
        context.state.set((context.state.get() or 0) + 1)
        context.produce("visits", {"city": record.value["city"], "injected_us": record.value["injected_us"]})


class Second(Computation):
    """Counts per city, and records each record's latency."""

    latencies_us: list[tuple[int, int]] = []  # noqa: RUF012 - shared with the process that measures

    def process_record(self, context: Context, record: Record) -> None:
        now_us = SystemClock().monotonic_us()
        Second.latencies_us.append((record.value["injected_us"], now_us - record.value["injected_us"]))
        context.state.set((context.state.get() or 0) + 1)


class Hop(Computation):
    """Counts its records and forwards them."""

    def __init__(self, output: str) -> None:
        self.output = output

    def process_record(self, context: Context, record: Record) -> None:
        context.state.set((context.state.get() or 0) + 1)
        context.produce(self.output, record.value)


def build(stages: int = 1, productions: ProductionMode = "strong") -> EnginePipeline:
    """A chain of stages, followed by the measuring one."""
    pipeline = EnginePipeline("latency")
    people = pipeline.inject("people", key="user", at="at", id="id", watermark=BoundedDisorder("1s"))
    stream = people.apply(First(), name="first", produces="visits", productions=productions)
    for number in range(1, stages):
        name = f"hop{number}"
        stream = stream.apply(Hop(name), name=name, key="city", productions=productions)
    stream.apply(Second(), name="second", key="city")
    return pipeline


def compare(seconds: float, rate: int, stages: int, rounds: int = 3) -> dict[str, Any]:
    """Measure strong and weak productions through the same stages, in turns; figures are medians of the rounds."""
    modes: tuple[ProductionMode, ProductionMode] = ("strong", "weak")
    results = [
        {mode: measure(seconds / rounds, rate, stages=stages, productions=mode) for mode in modes}
        for _ in range(rounds)
    ]
    figures: dict[str, Any] = {
        f"{mode}_{name}": float(np.median([result[mode][name] for result in results]))
        for mode in modes
        for name in ("p50_ms", "p95_ms", "p99_ms")
    }
    ratios = [result["strong"]["p50_ms"] / result["weak"]["p50_ms"] for result in results]
    return {**figures, "p50_ratio": round(float(np.median(ratios)), 2), "stages": stages, "rate": rate}


def compare_durabilities(seconds: float, rate: int, rounds: int = 5) -> dict[str, Any]:
    """Measure with and without syncs, in turns; the price is the median of the rounds' differences."""
    results = [
        {name: measure(seconds / rounds, rate, durability=name) for name in DURABILITIES}
        for _ in range(rounds)
    ]
    figures: dict[str, Any] = {
        f"{name}_{figure}": float(np.median([result[name][figure] for result in results]))
        for name in DURABILITIES
        for figure in ("p50_ms", "p95_ms", "p99_ms", "supersteps")
    }
    prices = [result["disk"]["p50_ms"] - result["os_cache"]["p50_ms"] for result in results]
    return {
        **figures,
        "p50_price_ms": round(float(np.median(prices)), 2),
        "p50_prices_ms": [round(price, 2) for price in prices],
        "rate": rate,
    }


def measure(
    seconds: float = 20.0,
    rate: int = 1_000,
    store: Store | None = None,
    *,
    stages: int = 1,
    productions: ProductionMode = "strong",
    durability: Durability | None = None,
) -> dict[str, Any]:
    """Inject ``rate`` records per second one by one, evenly, and measure the latency of each.

    Without ``store`` a new one is on disk with its own ZooKeeper, as for a user. ``stages`` come before the measuring one.

    Returns:
        ``p50_ms``, ``p95_ms``, ``p99_ms``, and the settings.
    """
    Second.latencies_us.clear()
    with (
        _store(store, durability) as opened,
        LocalRunner(opened, progress=False).start(build(stages, productions)) as run,
    ):
        started_us = SystemClock().monotonic_us()
        count = _inject_evenly(run, int(seconds * rate), rate)
        run.run_until_quiet(timeout="1m")
        supersteps = run.summary().supersteps
    return _figures(started_us + WARM_UP_SHARE * seconds * 1e6, count, rate, supersteps)


def _inject_evenly(run: LocalRun, count: int, rate: int) -> int:
    clock = SystemClock()
    started_us = clock.monotonic_us()
    for number in range(count):
        due_us = started_us + number * 1_000_000 // rate
        wait_us = due_us - clock.monotonic_us()
        if wait_us > 0:
            clock.sleep_ms(wait_us / 1_000)
        row = {
            "user": f"user-{number * 7_919 % KEYS}",
            "city": f"city-{number * 104_729 % KEYS}",
            "at": clock.now_us(),
            "id": number,
            # The time at which the record was due, so that a delayed injection counts as latency.
            "injected_us": min(due_us, clock.monotonic_us()),
        }
        run.inject("people", row)
    return count


def _figures(measured_from_us: float, count: int, rate: int, supersteps: int) -> dict[str, Any]:
    latencies_us = np.array(
        [latency for injected, latency in Second.latencies_us if injected >= measured_from_us]
    )
    p50, p95, p99 = (float(round(value / 1_000, 2)) for value in np.percentile(latencies_us, [50, 95, 99]))
    return {
        "p50_ms": p50,
        "p95_ms": p95,
        "p99_ms": p99,
        "records": count,
        "delivered": len(Second.latencies_us),
        "measured": len(latencies_us),
        "rate": rate,
        "supersteps": supersteps,
    }


@contextmanager
def _store(given: Store | None, durability: Durability | None) -> Iterator[Store]:
    if given is not None:
        yield given
        return
    with (
        tempfile.TemporaryDirectory(prefix="millpond-latency-") as folder,
        Store.open(Path(folder) / "pond", durability=durability) as store,
    ):
        yield store


def main() -> None:
    """Measure and print one line of JSON."""
    parser = argparse.ArgumentParser(description="latency of the local runner")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--rate", type=int, default=1_000)
    parser.add_argument("--stages", type=int, default=1)
    parser.add_argument("--productions", choices=["strong", "weak", "both"], default="strong")
    parser.add_argument("--durability", choices=[*DURABILITIES, "both"])
    given = parser.parse_args()
    if given.durability == "both":
        print(json.dumps(compare_durabilities(given.seconds, given.rate)))
    elif given.productions == "both":
        print(json.dumps(compare(given.seconds, given.rate, given.stages)))
    else:
        figures = measure(
            given.seconds,
            given.rate,
            stages=given.stages,
            productions=given.productions,
            durability=given.durability,
        )
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
