"""Watermarks: their lag, the capacity of their authority, and the share of records late at a percentile.

- *Lag*: three computations in a row, each passing every record on; their input watermarks are
  polled as in MillWheel §8.2 (figure 15: 1.8 s at the first stage, then less than 200 ms a stage).
  The first figure is the lag of the first stage behind real time; each other figure is a stage's lag behind the
  stage before it.
- *Authority*: 500,000 intervals report holds in random order, and the watermark is computed now
  and then (§7.2). Then come supersteps in which 2,000 intervals report the least holds of their tasks; the figure is
  the driver's milliseconds to merge them and to compute the watermark.
- *Percentile*: records of heavily skewed disorder under `ObservedPercentile(99)`.

    python -m benchmarks.watermarks --json build/bench/watermarks.json
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa

from benchmarks.json_result import tell_result
from millpond.executor.computation.computation import Computation
from millpond.executor.computation.context import Context
from millpond.executor.computation.records import Record
from millpond.executor.local.runner import LocalRunner
from millpond.executor.pipeline.pipeline import EnginePipeline
from millpond.executor.spark.runner import SparkRunner
from millpond.executor.time.watermark_policies import Monotone, ObservedPercentile
from millpond.executor.watermark.authority import WatermarkAuthority
from millpond.statestore.interval import Interval
from millpond.statestore.store import Store
from millpond.statestore.system import SystemClock
from millpond.statestore.types import TIME_MIN_US, EventTimeMicros, Sequencer

_REPORTERS: Final = 2_000
_SUPERSTEPS: Final = 100

STAGES = ("first", "second", "third")
KEYS = 100
START_US = 1_800_000_000_000_000


class Pass(Computation):
    """Counts its records and forwards each.

    Args:
        stream: the output stream; ``None`` for none.
    """

    def __init__(self, stream: str | None) -> None:
        self.stream = stream

    def process_record(self, context: Context, record: Record) -> None:
        context.state.set(context.state.get(0) + 1)
        if self.stream is not None:
            context.produce(self.stream, {"n": record.value["n"]})


def three_stages(key: Any, at: str) -> EnginePipeline:
    """A stream in order through three computations."""
    pipeline = EnginePipeline("lag")
    stream = pipeline.inject("records", key=key, at=at, watermark=Monotone())
    for name in STAGES[:-1]:
        stream = stream.apply(Pass(f"of_{name}"), name=name, produces=f"of_{name}")
    pipeline.add(Pass(None), name=STAGES[-1], subscribes={stream.name: None})
    return pipeline


# ---------------------------------------------------------------------------------------- lag


def local_lag(seconds: float, rate: int) -> list[float]:
    """Lag per stage in milliseconds on the local runner, with ``rate`` records per second."""
    with _store() as store, LocalRunner(store, progress=False).start(three_stages("key", "at")) as run:
        stopping = threading.Event()

        def inject() -> None:
            number = 0
            while not stopping.wait(1 / rate):
                run.inject("records", {"key": f"{number % KEYS}", "at": SystemClock().now_us(), "n": number})
                number += 1

        injecting = threading.Thread(target=inject)
        injecting.start()
        try:
            return _poll(run.watermark, seconds, every_ms=20, warm_up_s=min(2.0, seconds / 2))
        finally:
            stopping.set()
            injecting.join()


def spark_lag(seconds: float, rate: int) -> tuple[list[float], float]:
    """Lag per stage in milliseconds on Spark, and the mean duration of a superstep."""
    from millpond.executor.spark.session import spark_session

    spark = spark_session("watermarks")
    spark.sparkContext.setLogLevel("ERROR")
    source = spark.readStream.format("rate").option("rowsPerSecond", rate).load()
    frame = source.selectExpr(
        "CAST(value % 100 AS STRING) AS key", "timestamp AS at", "CAST(value AS BIGINT) AS n"
    )
    with _store() as store:
        runner = SparkRunner(store, spark=spark, progress=False, intervals=1)
        run = runner.start(three_stages("key", "at"), {"records": frame})
        try:
            lags = _poll(run.watermark, seconds, every_ms=100, warm_up_s=min(10.0, seconds / 2))
            summary = run.summary()
        finally:
            run.stop()
    return lags, summary.elapsed_ms / max(summary.supersteps, 1)


def _poll(
    watermark: Callable[[str], int], seconds: float, *, every_ms: float, warm_up_s: float
) -> list[float]:
    clock, lags_ms = SystemClock(), []
    started_us = clock.monotonic_us()
    while (elapsed_us := clock.monotonic_us() - started_us) < seconds * 1e6:
        clock.sleep_ms(every_ms)
        marks = [watermark(name) for name in STAGES]
        if elapsed_us >= warm_up_s * 1e6 and marks[-1] != TIME_MIN_US:
            now = clock.now_us()
            lags_ms.append(
                [(ahead - mark) / 1_000 for ahead, mark in zip([now, *marks], marks, strict=False)]
            )
    return [round(float(lag), 1) for lag in np.mean(lags_ms, axis=0)] if lags_ms else []


@contextmanager
def _store() -> Iterator[Store]:
    with (
        tempfile.TemporaryDirectory(prefix="millpond-watermarks-") as folder,
        Store.open(Path(folder) / "pond") as store,
    ):
        yield store


# ---------------------------------------------------------------------------------- authority


def authority(intervals: int, updates: int) -> dict[str, Any]:
    """Updates per second and bytes of an authority with this many intervals; the time that 2,000 of them take a superstep."""
    pipeline = EnginePipeline("authority")
    pipeline.inject("records", key="key", at="at").apply(Pass(None), name="c", produces="out")
    topology = pipeline.check()
    lows = ["", *(f"{number:07}" for number in range(1, intervals))]
    parts = [Interval("c", low, high) for low, high in zip(lows, [*lows[1:], None], strict=True)]
    tracemalloc.start()
    known = WatermarkAuthority(topology)
    for part in parts:
        known.update_interval(part, Sequencer(1), EventTimeMicros(0))
    known.output_watermarks()
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    random = np.random.default_rng(1)
    chosen = random.integers(0, intervals, updates).tolist()
    holds = (np.arange(updates) * 10 + random.integers(0, 1_000, updates)).tolist()
    clock = SystemClock()
    started_us = clock.monotonic_us()
    for index, (part, hold) in enumerate(zip(chosen, holds, strict=True)):
        known.update_interval(parts[part], Sequencer(1), EventTimeMicros(hold))
        if index % 1_000 == 0:
            known.output_watermarks()
    elapsed_us = clock.monotonic_us() - started_us
    superstep_ms = []
    for number in range(_SUPERSTEPS):
        reporters = random.integers(0, intervals, min(_REPORTERS, intervals)).tolist()
        started_us = clock.monotonic_us()
        for part in reporters:
            known.update_interval(parts[part], Sequencer(1), EventTimeMicros(updates * 10 + number))
        known.output_watermarks()
        superstep_ms.append((clock.monotonic_us() - started_us) / 1_000)
    return {
        "intervals": intervals,
        "updates_per_second": round(updates / (elapsed_us / 1e6)),
        "bytes": size,
        "updates": updates,
        "reporters": min(_REPORTERS, intervals),
        "superstep_ms": {
            "p50": round(float(np.percentile(superstep_ms, 50)), 2),
            "p99": round(float(np.percentile(superstep_ms, 99)), 2),
        },
    }


# --------------------------------------------------------------------------------- percentile


def percentile(records: int, p: float = 99) -> dict[str, Any]:
    """The share of late records under `ObservedPercentile`, after a learning phase of a tenth of the records.

    A record is created every millisecond and takes a lognormal time to arrive: 22 ms in the median,
    2.3 s at the 99th percentile, single records take minutes.
    """
    random = np.random.default_rng(11)
    made = START_US + np.arange(records) * 1_000
    at = made[np.argsort(made + random.lognormal(10, 2, records))]
    pipeline = EnginePipeline("late")
    stream = pipeline.inject("records", key="key", at="at", watermark=ObservedPercentile(p))
    stream.apply(Pass(None), name="c", produces="out")
    size, learnt = 1_000, records // 10
    with (
        Store.in_memory(clock=SystemClock()) as store,
        LocalRunner(store, progress=False).start(pipeline, stepping=True) as run,
    ):
        before = None
        for start in range(0, records, size):
            if start >= learnt and before is None:
                before = run.summary().totals
            batch = at[start : start + size]
            keys = [f"{number % KEYS}" for number in range(len(batch))]
            run.inject("records", pa.table({"key": keys, "at": pa.array(batch), "n": pa.array(batch)}))
            run.step()
        counts = run.summary().totals if before is None else run.summary().totals.minus(before)
    return {"p": p, "late_share": round(counts.late / counts.injected, 5), "records": counts.injected}


def main() -> None:
    """Measure everything, print it, and write it to ``--json``."""
    parser = argparse.ArgumentParser(description="watermarks: lag, authority, percentiles")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true", help="a sample of everything, in about a minute")
    parser.add_argument("--without-spark", action="store_true")
    arguments = parser.parse_args()
    quick = arguments.quick
    figures: dict[str, Any] = {
        "percentile": percentile(60_000 if quick else 500_000),
        "authority": authority(50_000 if quick else 500_000, 50_000 if quick else 500_000),
        "lag_ms_per_stage": {"local": local_lag(6 if quick else 30, rate=200), "spark": []},
    }
    if not arguments.without_spark:
        lags, superstep_ms = spark_lag(25 if quick else 60, rate=200)
        figures["lag_ms_per_stage"]["spark"] = lags
        figures["spark_superstep_ms"] = round(superstep_ms, 1)
    tell_result(figures, arguments.json, indent=2)


if __name__ == "__main__":
    main()
