"""Supersteps over state that is larger than memory: bytes read, speed and memory.

Each key has 400 incompressible bytes of state. The keys are loaded, the pipeline is started again, and supersteps
touch random selections of them. Millpond's workers may keep 128 MiB of rows each. The comparison, if it ends
within the time, is ``transformWithState`` with RocksDB, which may use the same memory.

The state is 400 bytes that each record replaces by a hash of them; or 50 sums, of code that reads and sets them, and of
code that only adds to them (docs/design/027-blind-updates.md). Both take a bundle as a table, and run on the local
runner too.

    python -m benchmarks.state_size --keys 1000000 --touched 1000,20000 --json build/bench/state_size.json
"""

from __future__ import annotations

import hashlib
import multiprocessing
import resource
import tempfile
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from itertools import count, pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Final

import click
import numpy as np
import psutil
import pyarrow as pa

import millpond as mp
from benchmarks.json_result import tell_result
from benchmarks.numbers import numbers
from benchmarks.state_size_spark import ENGINE as ROCKSDB
from benchmarks.state_size_spark import batch_file, run_query, spark_settings, write_batch
from millpond.executor.spark.session import spark_session
from millpond.executor.superstep.plan import InputPosition
from millpond.executor.superstep.report import SuperstepReport
from millpond.statestore.log.snapshot import load
from millpond.statestore.system import SystemClock

if TYPE_CHECKING:
    import numpy.typing as npt
    from pyspark.sql import DataFrame, SparkSession

    from millpond.executor.spark.run import SparkRun

ENGINE: Final = "millpond-spark"
LOCAL: Final = "millpond-local"

_STATE_BYTES: Final = 400
_BUDGET_MIB: Final = 128
_CORES: Final = 2
_AT_ONCE: Final = 250_000
"""How many keys a superstep loads."""

_SUPERSTEPS: Final = 12
_WARM_UP: Final = 4
_BASE_KEYS: Final = 1_000
"""So few that what a worker has in memory is what it needs without any."""

_MIB: Final = 2**20
_WORKER: Final = "millpond.executor.spark.daemon"


class Blob(mp.Computation):
    """Keeps bytes that do not compress, other ones after each record."""

    codec = mp.BytesCodec()

    def process_record(self, context: mp.Context, record: mp.Record) -> None:
        """Replace the state by a hash of itself."""
        before = context.state.get(context.key.encode())
        context.state.set(hashlib.shake_128(before).digest(_STATE_BYTES))


_NAMES: Final = [f"sum{number}" for number in range(_STATE_BYTES // 8)]
_SUMS: Final = pa.schema([(name, pa.int64()) for name in _NAMES])
# Odd numbers, so that the summands of a record look like chance to a compressor.
_FACTORS: Final = np.arange(len(_NAMES), dtype=np.int64) * 0x9E3779B97F4A7 + 0x2545F4914F6CD1D
_BITS: Final = 40


def _summed(table: pa.Table, groups: mp.types.KeyGroups) -> npt.NDArray[np.int64]:
    """Return what the records of each key add to each sum."""
    summands = (table["at"].to_numpy()[None, :] * _FACTORS[:, None]) >> (64 - _BITS)
    return np.add.reduceat(summands, groups.bounds[:-1], axis=1)


class ReadSums(mp.Computation):
    """Reads sums, and sets them."""

    def process_table(
        self, context: mp.types.TableContext, table: pa.Table, groups: mp.types.KeyGroups
    ) -> None:
        """Set each sum to what it was and what the records add."""
        before = [column.fill_null(0).to_numpy() for column in groups.states.flatten()]
        sums = zip(_NAMES, before, _summed(table, groups), strict=True)
        groups.set_states({name: was + added for name, was, added in sums})


class AddedSums(mp.Computation):
    """Adds to sums that it does not read."""

    def process_table(
        self, context: mp.types.TableContext, table: pa.Table, groups: mp.types.KeyGroups
    ) -> None:
        """Add what the records add."""
        groups.add_states(dict(zip(_NAMES, _summed(table, groups), strict=True)))


_LOCALLY: Final = ("sums read", "sums added")
CODES: Final[dict[str, tuple[mp.Computation, Any]]] = {
    "blob": (Blob(), None),
    "sums read": (ReadSums(), _SUMS),
    "sums added": (AddedSums(), mp.types.CombiningState(_SUMS)),
}


def run_on_millpond(keys: int, touched: Sequence[int], code: str) -> list[dict[str, Any]]:
    """Load that many keys, and for each number of touched ones start again and run supersteps."""
    clock, runs = SystemClock(), []
    batches = count()
    with tempfile.TemporaryDirectory(prefix="millpond-state-") as folder:
        inputs = Path(folder, "input")
        with _session({}) as spark:
            begun_us = clock.monotonic_us()
            with _run(spark, Path(folder), code) as run:
                for frame, batch in zip(_loaded(spark, keys), batches, strict=False):
                    _consume(run, _records(frame), batch)
            load_s = (clock.monotonic_us() - begun_us) / 1e6
        for number in touched:
            # Files, as for the comparison: a query that makes its records costs as much as the superstep.
            numbers = [next(batches) for _ in range(_SUPERSTEPS)]
            with _session({}) as spark:
                for step, batch in enumerate(numbers):
                    write_batch(_records(_touched(spark, keys, number, step)), inputs, batch)
            # Other processes: what these have in memory is gone, as after a crash.
            with _session({}) as spark, _run(spark, Path(folder), code) as run, _peak_of(_is_worker) as peak:
                times_us, read_bytes = [clock.monotonic_us()], []
                for batch in numbers:
                    frame = spark.read.schema("k STRING, at BIGINT").parquet(f"{batch_file(inputs, batch)}")
                    report = _consume(run, frame, batch)
                    read_bytes.append(report.read_bytes)
                    times_us.append(clock.monotonic_us())
            times_ms = [(after - before) / 1e3 for before, after in pairwise(times_us)]
            state_bytes = _live_bytes(Path(folder))
            figures = _figures(code, ENGINE, keys, number, times_ms, state_bytes, load_s)
            runs.append({**figures, **_of_processes(read_bytes, state_bytes, peak[0])})
    return runs


def run_on_local_runner(keys: int, touched: Sequence[int], code: str) -> list[dict[str, Any]]:
    """The same in one process without Spark, with as much memory; each superstep is durable before the next begins."""
    clock, runs, rng = SystemClock(), [], np.random.default_rng(3)
    with tempfile.TemporaryDirectory(prefix="millpond-state-") as folder:
        begun_us = clock.monotonic_us()
        with _local_run(Path(folder), code) as run:
            for start in range(0, keys, _AT_ONCE):
                run.inject_durably("records", _table(np.arange(start, min(start + _AT_ONCE, keys))))
        load_s = (clock.monotonic_us() - begun_us) / 1e6
        for number in touched:
            tables = [_table(rng.integers(0, keys, number)) for _ in range(_SUPERSTEPS)]
            with _local_run(Path(folder), code) as run:
                times_us = [clock.monotonic_us()]
                for table in tables:
                    run.inject_durably("records", table)
                    times_us.append(clock.monotonic_us())
            times_ms = [(after - before) / 1e3 for before, after in pairwise(times_us)]
            peak_mib = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
            figures = _figures(code, LOCAL, keys, number, times_ms, _live_bytes(Path(folder)), load_s)
            runs.append({**figures, "peak_process_mib": peak_mib})
    return runs


def _table(ids: npt.NDArray[np.int64]) -> pa.Table:
    scattered = (ids.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)).tolist()
    keys = [f"key{number:016x}{own}" for number, own in zip(scattered, ids.tolist(), strict=True)]
    return pa.table({"k": keys, "at": ids})


@contextmanager
def _local_run(folder: Path, code: str) -> Iterator[mp.LocalRun]:
    with mp.Store.open(folder / "pond") as store:
        runner = mp.LocalRunner(store, progress=False, intervals=2, cache_mib=_CORES * _BUDGET_MIB)
        with runner.start(_pipeline(code)) as run:
            yield run


def run_on_rocksdb(keys: int, touched: Sequence[int], limit_s: float) -> list[dict[str, Any]]:
    """The same on ``transformWithState``, whose RocksDB uses memory of Spark's JVM.

    A query that exceeds ``limit_s`` gives ``unfinished_after_s``.
    """
    clock, runs = SystemClock(), []
    settings = spark_settings(_CORES, _CORES * _BUDGET_MIB)
    batches = count()
    with tempfile.TemporaryDirectory(prefix="millpond-state-") as folder:
        inputs, checkpoint = Path(folder, "input"), Path(folder, "checkpoint")
        with _session(settings) as spark:
            for frame, batch in zip(_loaded(spark, keys), batches, strict=False):
                write_batch(_records(frame).select("k"), inputs, batch)
            begun_us = clock.monotonic_us()
            is_loaded = run_query(spark, inputs, checkpoint, limit_s) is not None
            load_s = (clock.monotonic_us() - begun_us) / 1e6
        for number in touched:
            done = None
            if is_loaded:
                with _session(settings) as spark, _peak_of(_is_jvm) as peak:
                    for step in range(_SUPERSTEPS):
                        frame = _records(_touched(spark, keys, number, step))
                        write_batch(frame.select("k"), inputs, next(batches))
                    done = run_query(spark, inputs, checkpoint, limit_s)
            if done is None:
                unfinished = {"code": "blob", "engine": ROCKSDB, "keys": keys, "touched": number}
                runs.append(unfinished | {"unfinished_after_s": limit_s})
                continue
            times_ms, read_bytes = [batch.batch_ms for batch in done], [batch.read_bytes for batch in done]
            state_bytes = sum(path.stat().st_size for path in checkpoint.rglob("*") if path.is_file())
            figures = _figures("blob", ROCKSDB, keys, number, times_ms, state_bytes, load_s)
            runs.append({**figures, **_of_processes(read_bytes, state_bytes, peak[0])})
    return runs


def _figures(
    code: str,
    engine: str,
    keys: int,
    touched: int,
    times_ms: Sequence[float],
    state_bytes: int,
    load_s: float,
) -> dict[str, Any]:
    return {
        "code": code,
        "engine": engine,
        "keys": keys,
        "touched": touched,
        "records_per_second": round(touched / median(times_ms[_WARM_UP:]) * 1e3),
        "state_mib": round(state_bytes / _MIB),
        "first_commit_s": round(times_ms[0] / 1e3, 2),
        "load_s": round(load_s, 1),
    }


def _of_processes(read_bytes: Sequence[int], state_bytes: int, peak_bytes: int) -> dict[str, Any]:
    """What the processes of Spark read and hold."""
    read = median(read_bytes[_WARM_UP:])
    return {
        "mib_read_per_superstep": round(read / _MIB, 2),
        "share_read": round(read / state_bytes, 5),
        "peak_worker_mib": round(peak_bytes / _MIB),
    }


def _live_bytes(folder: Path) -> int:
    with mp.Store.open(folder / "pond", read_only=True) as store:
        return load(store.log).size_bytes


@contextmanager
def _session(settings: dict[str, str]) -> Iterator[SparkSession]:
    """A session whose processes are new, and end with it."""
    options = {"spark.ui.enabled": "false", **settings}
    spark = spark_session("state-size", master=f"local[{_CORES}]", options=options)
    spark.sparkContext.setLogLevel("ERROR")
    try:
        spark.range(2).count()
        yield spark
    finally:
        spark.stop()


def _loaded(spark: SparkSession, keys: int) -> Iterator[DataFrame]:
    """The numbers of all keys, in the order of the load."""
    for start in range(0, keys, _AT_ONCE):
        yield spark.range(start, min(start + _AT_ONCE, keys), 1, _CORES)


def _touched(spark: SparkSession, keys: int, touched: int, number: int) -> DataFrame:
    """The numbers of the keys that a superstep touches, drawn at random but in each run the same."""
    return spark.range(0, touched, 1, _CORES).selectExpr(
        f"CAST(pmod(xxhash64(id, {number}), {keys}) AS BIGINT) AS id"
    )


def _records(numbers: DataFrame) -> DataFrame:
    return numbers.selectExpr("concat('key', lpad(hex(xxhash64(id)), 16, '0'), id) AS k", "id AS at")


@contextmanager
def _run(spark: SparkSession, folder: Path, code: str) -> Iterator[SparkRun]:
    with mp.Store.open(folder / "pond") as store:
        runner = mp.SparkRunner(store, spark=spark, progress=False, intervals=2, cache_mib=_BUDGET_MIB)
        with runner.open(_pipeline(code)) as run:
            yield run


def _pipeline(code: str) -> mp.Pipeline:
    pipeline = mp.Pipeline("state_size")
    records = pipeline.inject("records", key="k", at="at", at_unit="us", watermark=mp.Monotone())
    computation, state = CODES[code]
    records.apply(computation, name="blobs", state=state)
    return pipeline


def _consume(run: SparkRun, records: DataFrame, batch: int) -> SuperstepReport:
    report = run.consume(records, InputPosition(stream="records", source="state-size", batch=batch))
    assert report is not None
    return report


def _is_worker(process: psutil.Process) -> bool:
    # As a word of its own: Spark's JVM has the module's name in one of its settings.
    return _WORKER in process.cmdline()


def _is_jvm(process: psutil.Process) -> bool:
    return process.name() == "java"


@contextmanager
def _peak_of(is_watched: Callable[[psutil.Process], bool]) -> Iterator[list[int]]:
    """Yield the greatest private memory of any watched process while the block runs, in bytes."""
    peak, done = [0], threading.Event()
    this = psutil.Process()

    def watch() -> None:
        while not done.wait(0.2):
            for process in this.children(recursive=True):
                try:
                    if is_watched(process):
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


def measure(
    keys: Sequence[int], touched: Sequence[int], limit_s: float = 0.0, codes: Collection[str] = tuple(CODES)
) -> list[dict[str, Any]]:
    """Measure each size in a separate process; ``limit_s=0`` leaves ``transformWithState`` out."""
    # By this module's own name, under which the workers import the computation.
    from benchmarks.state_size import run_on_local_runner as on_local_runner
    from benchmarks.state_size import run_on_millpond as on_millpond
    from benchmarks.state_size import run_on_rocksdb as on_rocksdb

    (base,) = _in_process(on_millpond, _BASE_KEYS, [_BASE_KEYS], "blob")
    runs = []
    for size in keys:
        for code in codes:
            ours = _in_process(on_millpond, size, touched, code)
            runs += [run | {"base_worker_mib": base["peak_worker_mib"]} for run in ours]
            if code in _LOCALLY:
                runs += _in_process(on_local_runner, size, touched, code)
        if limit_s:
            runs += _in_process(on_rocksdb, size, touched, limit_s)
        click.echo("\n".join(f"{run}" for run in runs if run["keys"] == size), err=True)
    return runs


def _in_process(run: Callable[..., list[dict[str, Any]]], *arguments: Any) -> list[dict[str, Any]]:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(run, *arguments).result()


@click.command(help=__doc__)
@click.option("--keys", default="1000000,4000000,16000000", callback=numbers(int), show_default=True)
@click.option("--touched", default="1000,20000", callback=numbers(int), show_default=True)
@click.option(
    "--code",
    "codes",
    type=click.Choice(tuple(CODES)),
    multiple=True,
    default=tuple(CODES),
    help="Only this; may be repeated.",
)
@click.option(
    "--limit-s", default=600.0, show_default=True, help="How long transformWithState may take; 0: without it."
)
@click.option("--json", "path", type=click.Path(path_type=Path), help="Write the figures there.")
def main(
    keys: list[int], touched: list[int], codes: tuple[str, ...], limit_s: float, path: Path | None
) -> None:
    """Run the benchmark."""
    tell_result({"runs": measure(keys, touched, limit_s, codes)}, path, indent=2)


if __name__ == "__main__":
    main()
