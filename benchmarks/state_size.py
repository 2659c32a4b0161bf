"""
Supersteps over state that is larger than memory: what they read, how fast they are, and what they take.

Each key has 400 bytes of state that do not compress. The keys are loaded, the pipeline is started again, and supersteps
touch so many of them, drawn at random. Millpond's workers may keep 128 MiB of rows each; next to it, where it ends
within the time, the same on ``transformWithState`` with RocksDB.

    python -m benchmarks.state_size --keys 1000000 --touched 1000,20000 --json build/bench/state_size.json
"""

from __future__ import annotations

import hashlib
import multiprocessing
import tempfile
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Final

import click
import psutil

import millpond as mp
from benchmarks.json_result import tell_result
from benchmarks.numbers import numbers
from millpond.executor.reporting.progress import SuperstepReport
from millpond.executor.spark.session import spark_session
from millpond.executor.superstep.plan import InputPosition
from millpond.statestore.system import SystemClock

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from millpond.executor.spark.run import SparkRun

__all__ = ["measure", "run_once"]

ENGINE: Final = "millpond-spark"

_STATE_BYTES: Final = 400
_BUDGET_MIB: Final = 128
_LOADED_AT_ONCE: Final = 250_000
_SUPERSTEPS: Final = 8
_MIB: Final = 2**20
_WORKER: Final = "millpond.executor.python_workers.daemon"


class Blob(mp.Computation):
    """
    Keeps bytes that do not compress, other ones after each record.
    """

    codec = mp.BytesCodec()

    def process_record(self, context: mp.Context, record: mp.Record) -> None:
        """
        Replace the state by a hash of itself.
        """
        before = context.state.get(context.key.encode())
        context.state.set(hashlib.shake_128(before).digest(_STATE_BYTES))


def run_once(keys: int, touched: int) -> dict[str, Any]:
    """
    Load that many keys, start again, and run supersteps that touch so many of them.
    """
    clock = SystemClock()
    with tempfile.TemporaryDirectory(prefix="millpond-state-") as folder:
        spark = spark_session("state-size", master="local[2]", options={"spark.ui.enabled": "false"})
        spark.sparkContext.setLogLevel("ERROR")
        begun_us = clock.monotonic_us()
        with _run(spark, Path(folder)) as run:
            for number, start in enumerate(range(0, keys, _LOADED_AT_ONCE)):
                _consume(run, spark.range(start, min(start + _LOADED_AT_ONCE, keys), 1, 2), number)
        loaded_us = clock.monotonic_us()
        # Other processes: what these have in memory is gone, as after a crash.
        spark.stop()
        spark = spark_session("state-size", master="local[2]", options={"spark.ui.enabled": "false"})
        spark.sparkContext.setLogLevel("ERROR")
        spark.range(2).count()
        with _run(spark, Path(folder)) as run, _peak_of_workers() as peak:
            started_us = clock.monotonic_us()
            first = -(-keys // _LOADED_AT_ONCE)
            reports = []
            for number in range(_SUPERSTEPS):
                drawn = spark.range(0, touched, 1, 2).selectExpr(
                    f"CAST(pmod(xxhash64(id, {number}), {keys}) AS BIGINT) AS id"
                )
                reports.append(_consume(run, drawn, first + number))
                if number == 0:
                    first_us = clock.monotonic_us() - started_us
        disk = sum(path.stat().st_size for path in Path(folder, "pond/rows").rglob("*.parquet"))
        spark.stop()
    later = reports[2:]
    read_mib = median(report.read_bytes for report in later) / _MIB
    return {
        "engine": ENGINE,
        "keys": keys,
        "touched": touched,
        "records_per_second": round(median(report.records_per_second for report in later)),
        "mib_read_per_superstep": round(read_mib, 2),
        "share_read": round(read_mib * _MIB / disk, 5),
        "disk_mib": round(disk / _MIB),
        "peak_worker_mib": round(peak[0] / _MIB),
        "first_commit_s": round(first_us / 1e6, 2),
        "load_s": round((loaded_us - begun_us) / 1e6, 1),
    }


@contextmanager
def _run(spark: SparkSession, folder: Path) -> Iterator[SparkRun]:
    pipeline = mp.Pipeline("state_size")
    records = pipeline.inject("records", key="k", at="at", at_unit="us", watermark=mp.Monotone())
    records.apply(Blob(), name="blobs")
    with mp.Store.open(folder / "pond") as store:
        runner = mp.SparkRunner(store, spark=spark, progress=False, intervals=2, cache_mib=_BUDGET_MIB)
        with runner.open(pipeline) as run:
            yield run


def _consume(run: SparkRun, numbers: DataFrame, batch: int) -> SuperstepReport:
    frame = numbers.selectExpr("concat('key', lpad(hex(xxhash64(id)), 16, '0'), id) AS k", "id AS at")
    report = run.consume(frame, InputPosition(stream="records", source="state-size", batch=batch))
    assert report is not None
    return report


@contextmanager
def _peak_of_workers() -> Iterator[list[int]]:
    """
    The most memory that a worker process has of its own, in bytes, as long as the block runs.
    """
    peak, done = [0], threading.Event()
    this = psutil.Process()

    def watch() -> None:
        while not done.wait(0.2):
            for process in this.children(recursive=True):
                try:
                    if _WORKER in " ".join(process.cmdline()):
                        peak[0] = max(peak[0], process.memory_full_info().uss)
                except psutil.Error:
                    continue

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield peak
    finally:
        done.set()
        watcher.join()


def measure(keys: Sequence[int], touched: Sequence[int]) -> list[dict[str, Any]]:
    """
    Measure each size, in a process of its own each.
    """
    # By this module's own name, under which the workers import the computation.
    from benchmarks.state_size import run_once as run_by_name

    runs = []
    for count in keys:
        for number in touched:
            with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
                run = pool.submit(run_by_name, count, number).result()
            click.echo(f"{run}", err=True)
            runs.append(run)
    return runs


@click.command(help=__doc__)
@click.option("--keys", default="1000000,4000000,16000000", callback=numbers(int), show_default=True)
@click.option("--touched", default="1000,20000", callback=numbers(int), show_default=True)
@click.option("--json", "path", type=click.Path(path_type=Path), help="Write the figures there.")
def main(keys: list[int], touched: list[int], path: Path | None) -> None:
    """
    Run the benchmark.
    """
    tell_result({"runs": measure(keys, touched)}, path, indent=2)


if __name__ == "__main__":
    main()
