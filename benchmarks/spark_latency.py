"""Latency on Spark: a thousand records a second of 50,000 keys, counted by Millpond and by Spark's own state.

Twenty files a second arrive while a query runs without pause. A record's latency is the time from the moment at which
it was due to the end of the micro-batch that read it, by Spark's file source and its progress reports. It contains the
wait for its file, up to 50 ms. The engines run one after the other in one session, first each for a third of the time
without being measured; of each measured run the first third does not count. Spark publishes 319 ms (p50) and 463 ms
(p99) for ``transformWithState`` in the JVM at this rate.

    python -m benchmarks.spark_latency --json build/bench/spark_latency.json
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

import millpond as mp
from benchmarks import millpond_spark, spark_counts, transform_with_state
from benchmarks.batches import COLUMNS
from benchmarks.engine_result import as_mapping
from benchmarks.json_result import tell_result
from examples.quiet_spark import quiet_spark
from millpond.statestore.system import SystemClock

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

_KEYS: Final = 50_000
_FILES_A_SECOND: Final = 20
_UNMEASURED: Final = 1 / 3
_OPTIONS: Final = {"spark.driver.memory": "3g", "spark.sql.streaming.numRecentProgressUpdates": "100000"}


@contextmanager
def _millpond(frame: DataFrame, folder: Path) -> Iterator[StreamingQuery]:
    runner = mp.SparkRunner(folder, spark=frame.sparkSession, progress=False)
    run = runner.start(millpond_spark.pipeline(), {"records": frame})
    try:
        yield run.queries[0]
    finally:
        run.stop()


@contextmanager
def _spark(
    count: Callable[[DataFrame], DataFrame], frame: DataFrame, folder: Path
) -> Iterator[StreamingQuery]:
    with transform_with_state.best_settings(frame.sparkSession):
        query = transform_with_state.start(count(frame.select("key", "id")), folder)
        try:
            yield query
        finally:
            query.stop()


ENGINES: Final = {
    millpond_spark.ENGINE: _millpond,
    transform_with_state.ENGINE: partial(_spark, transform_with_state.count_by_rows),
    "spark-native": partial(_spark, spark_counts.COUNTS["spark-native"]),
}


def measure(spark: SparkSession, engine: str, folder: Path, seconds: float, rate: int) -> dict[str, Any]:
    """Feed a query of an engine for some seconds, and return its latencies in milliseconds."""
    inputs, state = folder / "in", folder / "state"
    inputs.mkdir(parents=True)
    frame = spark.readStream.schema(COLUMNS).parquet(str(inputs))
    with ENGINES[engine](frame, state) as query:
        due_ms = _feed(inputs, seconds, rate)
        query.processAllAvailable()
        ended_ms = {
            progress["batchId"]: _end_ms(progress) for progress in map(as_mapping, query.recentProgress)
        }
        batches = batches_by_file(next(state.glob("**/sources/0")))
    first_ms = next(iter(due_ms.values()))[0] + 1_000 * seconds * _UNMEASURED
    measured = {name: moments for name, moments in due_ms.items() if moments[0] >= first_ms}
    latencies = np.concatenate([ended_ms[batches[name]] - moments for name, moments in measured.items()])
    p50, p95, p99 = (round(float(value)) for value in np.percentile(latencies, [50, 95, 99]))
    read_by = {batches[name] for name in measured}
    return {"p50_ms": p50, "p95_ms": p95, "p99_ms": p99, "records": len(latencies), "batches": len(read_by)}


def _feed(inputs: Path, seconds: float, rate: int) -> dict[str, npt.NDArray[np.float64]]:
    """Write files of records as they become due, and return when each record of a file was due."""
    clock, rng = SystemClock(), np.random.default_rng(0)
    began_ms = clock.now_us() / 1_000
    in_file = rate // _FILES_A_SECOND
    due_ms: dict[str, npt.NDArray[np.float64]] = {}
    for number in range(int(seconds * _FILES_A_SECOND)):
        moments = began_ms + (number * in_file + np.arange(in_file)) * 1_000 / rate
        clock.sleep_ms(max(0.0, moments[-1] - clock.now_us() / 1_000))
        records = {
            "key": [f"key-{key}" for key in rng.integers(0, _KEYS, in_file)],
            "id": [f"{number}-{place}" for place in range(in_file)],
            "at": pa.array((moments * 1_000).astype(np.int64)).cast(pa.timestamp("us", "UTC")),
        }
        name = f"{number:08d}.parquet"
        # Spark must not see half a file, and ignores names that begin with a dot.
        pq.write_table(pa.table(records), inputs / f".{name}")
        (inputs / f".{name}").rename(inputs / name)
        due_ms[name] = moments
    return due_ms


def _end_ms(progress: Mapping[str, Any]) -> float:
    began = datetime.fromisoformat(progress["timestamp"])
    return began.timestamp() * 1_000 + progress["durationMs"]["triggerExecution"]


def batches_by_file(log: Path) -> dict[str, int]:
    """Return the micro-batch that read each file, by the log of Spark's file source."""
    entries = (
        json.loads(line)
        for path in log.iterdir()
        if not path.name.startswith(".")
        for line in path.read_text(encoding="utf-8").splitlines()[1:]
    )
    return {entry["path"].rpartition("/")[2]: entry["batchId"] for entry in entries}


@click.command(help=__doc__)
@click.option(
    "--json", "path", type=click.Path(path_type=Path), default=None, help="Write the figures there."
)
@click.option("--seconds", type=click.FloatRange(3), default=45, show_default=True, help="Of each engine.")
@click.option("--rate", type=click.IntRange(_FILES_A_SECOND), default=1_000, show_default=True)
def main(path: Path | None, seconds: float, rate: int) -> None:
    """Measure and print JSON."""
    with tempfile.TemporaryDirectory(prefix="millpond-latency-") as name:
        folder = Path(name)
        log = folder / "spark.log" if path is None else path.with_name("spark_latency.log")
        spark = quiet_spark("millpond-latency", master="local[2]", log=log, options=_OPTIONS)
        try:
            for engine in ENGINES:
                # The JVM would still be compiling for the first of them.
                measure(spark, engine, folder / "warm-up" / engine, seconds / 3, rate)
            engines = {engine: measure(spark, engine, folder / engine, seconds, rate) for engine in ENGINES}
        finally:
            spark.stop()
    tell_result({"rate": rate, "seconds": seconds, "engines": engines}, path, indent=2)


if __name__ == "__main__":
    main()
