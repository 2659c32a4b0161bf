"""Two places for compactions: supersteps on Spark next to a compacting helper process, and next to compacting Spark jobs.

Two pipelines on two stores get the same batches in turns, so other load on the machine affects both.
Compactions are so frequent that one is running nearly all the time. The figure is the ratio of the
times of a superstep, including its commit and the maintenance after it.

    python -m benchmarks.compaction_place --supersteps 60 --master 'local[2]'
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pandas as pd

from millpond.executor.maintenance.policy import Place, UpkeepPolicy
from millpond.executor.spark.run import SparkRun
from millpond.executor.spark.runner import SparkRunner
from millpond.executor.spark.session import spark_session
from millpond.executor.superstep.plan import InputPosition
from millpond.gc.compaction import CompactionPolicy
from millpond.statestore.leases.memory import MemoryLeases, MemoryRegistry
from millpond.statestore.store import Store
from millpond.statestore.system import SystemClock
from millpond.testing.processes.ledger import ROWS, ledger_pipeline, numbered

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_PLACES: Final[tuple[Place, ...]] = ("process", "spark")
_WARM_UP: Final = 10


def measure(spark: SparkSession, supersteps: int = 60, records: int = 5_000) -> dict[str, Any]:
    """Run the supersteps with compactions in either place.

    Returns:
        By place the median and the 95th percentile of a superstep in milliseconds and the files of an
        interval at the end; ``ratio`` of the medians, and ``ratio_p95``, Spark jobs to helper process.
    """
    clock = SystemClock()
    with tempfile.TemporaryDirectory(prefix="millpond-compaction-place-") as folder:
        stores = [_open(Path(folder) / place, clock) for place in _PLACES]
        runs = [_run(store, spark, place) for store, place in zip(stores, _PLACES, strict=True)]
        took: list[list[float]] = [[] for _ in _PLACES]
        for number in range(_WARM_UP + supersteps):
            rows = numbered(range(number * records, (number + 1) * records), keys=records)
            frame = spark.createDataFrame(pd.DataFrame(rows)).coalesce(1)
            for run, durations_ms in zip(runs, took, strict=True):
                started_us = clock.monotonic_us()
                run.consume(frame, InputPosition(stream=ROWS, source="benchmark", batch=number))
                durations_ms.append((clock.monotonic_us() - started_us) / 1_000)
        for run in runs:
            run.stop()
        p50, p95 = np.percentile([durations_ms[_WARM_UP:] for durations_ms in took], [50, 95], axis=1)
        files = [len(store.committer.snapshot.files) for store in stores]
        for store in stores:
            store.close()
    return {
        "supersteps": supersteps,
        "records": records,
        "p50_ms": dict(zip(_PLACES, p50.round(1).tolist(), strict=True)),
        "p95_ms": dict(zip(_PLACES, p95.round(1).tolist(), strict=True)),
        "files": dict(zip(_PLACES, files, strict=True)),
        "ratio": round(float(p50[1] / p50[0]), 3),
        "ratio_p95": round(float(p95[1] / p95[0]), 3),
    }


def _open(path: Path, clock: SystemClock) -> Store:
    registry = MemoryRegistry()
    return Store.open(path, leases=lambda _, writer_id: MemoryLeases(registry, clock, writer_id=writer_id))


def _run(store: Store, spark: SparkSession, place: Place) -> SparkRun:
    policy = UpkeepPolicy(compaction=CompactionPolicy(fan_in=2), place=place)
    return SparkRunner(store, spark=spark, progress=False, upkeep=policy).open(ledger_pipeline())


def main() -> None:
    """Measure, print one line of JSON, and write it to the file in ``--json``."""
    parser = argparse.ArgumentParser(description="where to prepare compactions")
    parser.add_argument("--supersteps", type=int, default=60)
    parser.add_argument("--records", type=int, default=5_000)
    parser.add_argument("--master", default="local[2]")
    parser.add_argument("--json", type=Path, default=None)
    given = parser.parse_args()
    spark = spark_session("compaction-place", master=given.master)
    text = json.dumps(measure(spark, given.supersteps, given.records))
    if given.json is not None:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
