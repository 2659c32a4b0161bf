"""Recovery: the time until a new owner is at work, and its rate through undelivered productions.

A store gets a number of rows (state, a pending timer and a record id each) in one computation, and its
process releases it. Then a new owner opens it: leases, fences, the initial scan of timers, holds and
undelivered productions (MillWheel §6.2, §7.1), up to the commit of the first new record. After that the
process is replaced again while productions are undelivered, and the time is measured until all of
them are consumed and committed; finally the rate of new records is compared with the previous rate.

    python -m benchmarks.recovery --rows 1000000 --undelivered 100000 --json build/recovery.json

Only the operating system's file cache and the imported code are warm: the new owner has no soft state.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
import pyarrow as pa

from benchmarks.json_result import tell_result
from millpond.executor.computation.computation import Computation
from millpond.executor.computation.context import Context
from millpond.executor.computation.records import Record
from millpond.executor.computation.timers import Timer
from millpond.executor.local.run import LocalRun
from millpond.executor.local.runner import LocalRunner
from millpond.executor.pipeline.pipeline import EnginePipeline
from millpond.executor.time.watermark_policies import ManualWatermark
from millpond.statestore.store import Store
from millpond.statestore.system import SystemClock

FAN_OUT: Final = 5
BUNDLE: Final = 20_000
START_US: Final = 1_700_000_000_000_000
DAY_US: Final = 86_400_000_000


class Holder(Computation):
    """Counts its records, and sets timers that never become due."""

    def process_record(self, context: Context, record: Record) -> None:
        context.state.set(
            {"count": (context.state.get() or {"count": 0})["count"] + 1, "last": record.value["n"]}
        )
        context.set_timer(START_US + DAY_US)

    def process_timer(self, context: Context, timer: Timer) -> None:
        context.state.delete()


class Spread(Computation):
    """Produces each record several times."""

    def process_record(self, context: Context, record: Record) -> None:
        for number in range(FAN_OUT):
            context.produce(
                "parts", {"n": record.value["n"] * FAN_OUT + number}, key=f"part-{number}-{context.key}"
            )


def build() -> EnginePipeline:
    """``rows`` into ``holder``; ``bursts`` into ``spread``, whose productions go to ``counter``."""
    pipeline = EnginePipeline("recovery")
    pipeline.inject("rows", key="key", at="at", id="id", watermark=ManualWatermark()).apply(
        Holder(), name="holder"
    )
    bursts = pipeline.inject("bursts", key="key", at="at", id="id", watermark=ManualWatermark())
    bursts.apply(Spread(), name="spread", produces="parts").apply(Holder(), name="counter")
    return pipeline


def records(first: int, count: int, keys: int) -> Iterator[pa.Table]:
    """Tables of records, one per bundle; keys recur after ``keys`` records."""
    for start in range(first, first + count, BUNDLE):
        numbers = np.arange(start, min(start + BUNDLE, first + count))
        # As in practice, neighbours in time are not neighbours in key order.
        spread = numbers % keys * 7_919 % keys
        yield pa.table(
            {
                "key": pa.array([f"key-{number:08d}" for number in spread.tolist()]),
                "at": pa.array(START_US + numbers),
                "id": pa.array(numbers),
                "n": pa.array(numbers),
            }
        )


def measure(rows: int, undelivered: int, intervals: int = 4) -> dict[str, Any]:
    """Build a store with a timer per row, and take it over twice, the second time with undelivered productions.

    Returns:
        ``open_s``: until the runner has started; ``first_commit_s``: from its start until a new
        record is durable; ``replay_s``: from the start until the undelivered productions are consumed;
        ``rate_before`` and ``rate_after`` in records a second, over keys that have rows.
    """
    clock = SystemClock()
    with tempfile.TemporaryDirectory(prefix="millpond-recovery-") as folder, _Pond(folder, intervals) as pond:
        built_us = clock.monotonic_us()
        with pond.start() as run:
            _feed(run, "rows", 0, rows, rows)
        build_s = (clock.monotonic_us() - built_us) / 1e6
        with pond.start() as run:
            before = _rate(run, rows, rows)
        first = _take_over(pond, rows)
        with pond.start(stepping=True) as run:
            _feed(run, "bursts", 0, undelivered // FAN_OUT, rows)
            left = run.summary().run.productions
        replayed_us = clock.monotonic_us()
        with pond.start() as run:
            run.run_until_quiet()
            replay_s = (clock.monotonic_us() - replayed_us) / 1e6
            consumed = run.summary().run.records
            after = _rate(run, rows + 2_000_000, rows)
    return {
        "rows": rows,
        "intervals": intervals,
        "build_s": round(build_s, 2),
        **first,
        "undelivered": left,
        "replayed": consumed,
        "replay_s": round(replay_s, 3),
        "rate_before": round(before),
        "rate_after": round(after),
        "rate_ratio": round(after / before, 3),
    }


def _take_over(pond: _Pond, rows: int) -> dict[str, float]:
    """Open for work: from nothing to the first commit, and to a record for every interval."""
    clock = SystemClock()
    started_us = clock.monotonic_us()
    with pond.start() as run:
        opened_us = clock.monotonic_us()
        run.inject("rows", next(records(rows + 1_000_000, 1, rows))).wait()
        first_us = clock.monotonic_us()
        run.inject("rows", next(records(rows + 1_100_000, 1_000, rows))).wait()
        all_us = clock.monotonic_us()
    return {
        "open_s": round((opened_us - started_us) / 1e6, 3),
        "first_commit_s": round((first_us - started_us) / 1e6, 3),
        "every_interval_s": round((all_us - started_us) / 1e6, 3),
    }


def _rate(run: LocalRun, first: int, keys: int, count: int = 100_000) -> float:
    clock = SystemClock()
    # The first bundle pays for soft state, which `first_commit_s` includes already.
    _feed(run, "rows", first, 1_000, keys)
    started_us = clock.monotonic_us()
    _feed(run, "rows", first + 1_000, count, keys)
    return count * 1e6 / (clock.monotonic_us() - started_us)


def _feed(run: LocalRun, stream: str, first: int, count: int, keys: int) -> None:
    for table in records(first, count, keys):
        run.inject_durably(stream, table)


class _Pond:
    """A store on disk with its ZooKeeper; each run starts without soft state."""

    def __init__(self, folder: str, intervals: int) -> None:
        self._intervals = intervals
        self._store = Store.open(Path(folder) / "pond")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._store.close()

    def start(self, *, stepping: bool = False) -> LocalRun:
        """A new run with separate soft state."""
        runner = LocalRunner(self._store, intervals=self._intervals, progress=False)
        return runner.start(build(), stepping=stepping)


def main() -> None:
    """Measure, print one line of JSON, and write it to the file in ``--json``."""
    parser = argparse.ArgumentParser(description="recovery of a new owner")
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--undelivered", type=int, default=100_000)
    parser.add_argument("--intervals", type=int, default=4)
    parser.add_argument("--json", type=Path, default=None)
    given = parser.parse_args()
    tell_result(measure(given.rows, given.undelivered, given.intervals), given.json)


if __name__ == "__main__":
    main()
