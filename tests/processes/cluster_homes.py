"""Supersteps of two stages on a Spark cluster of several processes, one for each line of standard input.

``python -m tests.processes.cluster_homes FOLDER EXECUTORS INTERVALS`` counts the same keys in each
superstep, and writes its report as a line of JSON. From the reports, a test that kills executors sees which
slots are still at home. At the end of its input it writes the counts of all keys.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import orjson

from millpond.executor.computation.computation import Computation
from millpond.executor.computation.context import Context
from millpond.executor.computation.records import Record
from millpond.executor.pipeline.pipeline import EnginePipeline
from millpond.executor.spark.runner import SparkRunner
from millpond.executor.superstep.plan import InputPosition
from millpond.statestore.store import Store
from millpond.statestore.system import SystemClock
from tests.processes.local_cluster import local_cluster

KEYS: Final = 2_000
"""Keys, and records of a superstep."""


class Passing(Computation):
    """Counts the records of a key, and forwards them if it has an output.

    Args:
        output: the stream.
    """

    def __init__(self, output: str | None = None) -> None:
        self._output = output

    def process_record(self, context: Context, record: Record) -> None:
        context.state.set(context.state.get(0) + 1)
        if self._output is not None:
            context.produce(self._output, {"k": f"{record.value['n'] * 7 % KEYS}"})


def main(arguments: list[str]) -> None:
    folder, executors, intervals = Path(arguments[0]).resolve(), int(arguments[1]), int(arguments[2])
    spark = local_cluster(folder, executors, options={"spark.sql.shuffle.partitions": "2"})
    spark.sparkContext.setLogLevel("ERROR")
    while spark.sparkContext.defaultParallelism < executors:
        SystemClock().sleep_ms(100)
    pipeline = EnginePipeline("homes")
    records = pipeline.inject("records", key="k", at="at", at_unit="us")
    records.apply(Passing("passed"), name="first", produces="passed").apply(Passing(), name="second", key="k")
    frame = spark.range(KEYS).selectExpr("CAST(id AS STRING) AS k", "id AS at", "id AS n")
    with Store.open(folder / "pond") as store:
        runner = SparkRunner(store, spark=spark, progress=False, intervals=intervals, upkeep=None)
        with runner.open(pipeline) as run:
            for batch, _ in enumerate(sys.stdin):
                report = run.consume(frame, InputPosition(stream="records", source="lines", batch=batch))
                assert report is not None
                _say(
                    {
                        "slots": report.slots,
                        "at_home": report.slots_at_home,
                        "read_bytes": report.read_bytes,
                        "executors": spark.sparkContext.defaultParallelism,
                    }
                )
            run.run_until_quiet()
        for name in ("first", "second"):
            states = store.rows_view(name).to_arrow().column("state").to_pylist()
            _say(dict(Counter(states)))
    spark.stop()


def _say(figures: Mapping[str, int]) -> None:
    sys.stdout.buffer.write(orjson.dumps(figures) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
