"""The cost of a superstep by the number of executors, for the same work.

A pipeline of one or two stages counts records by key on Spark's ``local-cluster``, whose executors are processes of
one core each; 0 executors are ``local[2]``, in one process. All share this machine, so the cost of executors shows in
the processor time of all processes, not in the elapsed time, and lost soft state shows in the bytes read.

    python -m benchmarks.scale_out --executors 1,2,4,8 --stages 1,2 --json build/bench/scale_out.json
"""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Final

import click

import millpond as mp
from benchmarks.json_result import tell_result
from benchmarks.numbers import numbers
from benchmarks.processor_time import used_seconds_by_kind
from millpond.executor.spark.session import spark_session
from millpond.executor.superstep.plan import InputPosition
from millpond.executor.superstep.report import SuperstepReport
from millpond.statestore.system import SystemClock
from tests.processes.local_cluster import local_cluster

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_WARM_UP: Final = 64
"""By then the JVMs of new executors have compiled what they run."""

_MIB: Final = 2**20


class Visits(mp.Computation):
    """Counts the records of a key, and passes each on under another key.

    Args:
        output: the stream; ``None`` for the last stage.
    """

    def __init__(self, output: str | None) -> None:
        self._output = output

    def process_record(self, context: mp.Context, record: mp.Record) -> None:
        """Count and pass on."""
        context.state.set(context.state.get(0) + 1)
        if self._output is not None:
            context.produce(self._output, {"k": record.value["other"]})


def run_once(executors: int, stages: int, records: int, supersteps: int) -> dict[str, Any]:
    """Run a pipeline of one or two stages, and return the medians of its supersteps; all records have different keys.

    The executors have one core each; 0 is ``local[2]``.
    """
    with tempfile.TemporaryDirectory(prefix="millpond-scale-") as folder:
        spark = _session(Path(folder), executors)
        try:
            return _measured(spark, Path(folder), executors, stages, records, supersteps)
        finally:
            spark.stop()


def _session(folder: Path, executors: int) -> SparkSession:
    options = {"spark.sql.shuffle.partitions": "2", "spark.locality.wait.process": "60s"}
    if executors:
        spark = local_cluster(folder, executors, options=options)
    else:
        spark = spark_session(
            "scale-out", master="local[2]", options={"spark.ui.enabled": "false", **options}
        )
    spark.sparkContext.setLogLevel("ERROR")
    while spark.sparkContext.defaultParallelism < executors:
        SystemClock().sleep_ms(100)
    return spark


def _measured(
    spark: SparkSession, folder: Path, executors: int, stages: int, records: int, supersteps: int
) -> dict[str, Any]:
    frame = spark.range(0, records, 1, 2).selectExpr(
        "concat('key', id) AS k", "id AS at", f"concat('other', id * 7919 % {records}) AS other"
    )
    used: dict[str, list[float]] = {"jvm": [], "python": []}
    reports: list[SuperstepReport] = []
    with mp.Store.open(folder / "pond") as store:
        runner = mp.SparkRunner(store, spark=spark, progress=False, intervals=16, upkeep=None)
        with runner.open(_pipeline(stages)) as run:
            for batch in range(_WARM_UP + supersteps):
                before = used_seconds_by_kind()
                report = run.consume(frame, InputPosition(stream="visits", source="scale-out", batch=batch))
                after = used_seconds_by_kind()
                if report is not None and batch >= _WARM_UP:
                    reports.append(report)
                    for kind, seconds in used.items():
                        seconds.append(after[kind] - before[kind])
    assert len(reports) == supersteps
    return {
        "executors": executors,
        "stages": stages,
        "cpu_s": round(median(map(sum, zip(*used.values(), strict=True))), 3),
        "jvm_cpu_s": round(median(used["jvm"]), 3),
        "python_cpu_s": round(median(used["python"]), 3),
        "mib_read": round(median(report.read_bytes for report in reports) / _MIB, 3),
        "home_share": round(
            sum(report.slots_at_home for report in reports) / sum(report.slots for report in reports), 4
        ),
        "slots": max(report.slots for report in reports),
        "ms": round(median(report.duration_ms for report in reports)),
    }


def _pipeline(stages: int) -> mp.Pipeline:
    pipeline = mp.Pipeline("scale_out")
    visits = pipeline.inject("visits", key="k", at="at", at_unit="us", watermark=mp.Monotone())
    first = visits.apply(
        Visits("again" if stages > 1 else None), name="first", produces="again" if stages > 1 else None
    )
    if stages > 1:
        first.apply(Visits(None), name="second", key="k")
    return pipeline


def measure(
    executors: Sequence[int], stages: Sequence[int], records: int, supersteps: int
) -> list[dict[str, Any]]:
    """Measure each number of stages on each number of executors, each in a separate process."""
    # By this module's own name, under which the executors import the computation.
    from benchmarks.scale_out import run_once as run_by_name

    context = multiprocessing.get_context("spawn")
    runs = []
    for count in stages:
        for number in executors:
            with ProcessPoolExecutor(1, mp_context=context) as pool:
                run = pool.submit(run_by_name, number, count, records, supersteps).result()
            click.echo(f"{run}", err=True)
            runs.append(run)
    return runs


@click.command(help=__doc__)
@click.option("--executors", default="1,2,4,8", callback=numbers(int), show_default=True)
@click.option("--stages", default="1,2", callback=numbers(int), show_default=True)
@click.option("--records", default=100_000, show_default=True, help="Records of a superstep.")
@click.option("--supersteps", default=8, show_default=True, help="How many are measured.")
@click.option("--json", "path", type=click.Path(path_type=Path), help="Write the figures there.")
def main(executors: list[int], stages: list[int], records: int, supersteps: int, path: Path | None) -> None:
    """Run the benchmark."""
    tell_result({"runs": measure(executors, stages, records, supersteps)}, path, indent=2)


if __name__ == "__main__":
    main()
