"""A three-stage copy on a Spark cluster of several processes, whose processes are killed by tests.

``python -m tests.processes.cluster_copy FOLDER RECORDS FILES`` writes that many numbered records as files
into the folder (unless they are there), and copies them through three computations, each with other
keys, into the Delta table ``copy``: on two executors in separate
processes, with speculation on and failed tasks retried. Restarted after a kill, it continues from
its checkpoint. A task of each kind fails at its first attempt, with an error that no record causes.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq

from millpond.executor.computation.computation import Computation
from millpond.executor.computation.context import Context
from millpond.executor.computation.records import Record
from millpond.executor.pipeline.pipeline import EnginePipeline
from millpond.executor.sinks.sink import DeltaSink
from millpond.executor.spark.runner import SparkRunner
from millpond.statestore.store import Store
from tests.processes.local_cluster import local_cluster

EXECUTORS: Final = 2
"""Executors, of one core and a gigabyte each."""

COPY: Final = "copy"
"""The table that the records end up in."""

_KEYS: Final = (997, 1_009, 1_013)
_START_US: Final = 1_700_000_000_000_000


class TaskFailedError(BaseException):
    """Fails the task, not the record: the engine handles only an `Exception`."""


class Stage(Computation):
    """Counts every record and forwards it.

    Args:
        number: the stage, from 0.
        marks: folder in which a file is left when a task was made to fail.
    """

    def __init__(self, number: int, marks: str) -> None:
        self._number = number
        self._marks = marks

    def process_record(self, context: Context, record: Record) -> None:
        """Count and produce; fail once, at one record."""
        context.state.set(context.state.get(0) + 1)
        context.produce(f"stage-{self._number}", {"n": record.value["n"]})
        if record.value["n"] == 1_000 * (self._number + 1):
            try:
                (Path(self._marks) / f"failed-{self._number}").touch(exist_ok=False)
            except FileExistsError:
                return
            raise TaskFailedError(record.value["n"])


def _key(number: int, value: dict[str, int]) -> str:
    return f"k{value['n'] % _KEYS[number]:04d}"


def copy_pipeline(folder: Path) -> EnginePipeline:
    pipeline = EnginePipeline("copy")
    stream = pipeline.inject("numbers", key="k", at="at", id="id")
    for number in range(len(_KEYS)):
        key = partial(_key, number) if number else None
        stream = stream.apply(Stage(number, str(folder)), name=f"stage-{number}", key=key)
    stream.sink(COPY, DeltaSink(str(folder / COPY), pa.schema([("n", pa.int64())])))
    return pipeline


def _write_input(folder: Path, records: int, files: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for file in range(files):
        path = folder / f"{file:03d}.parquet"
        if not path.exists():
            numbers = range(file * records // files, (file + 1) * records // files)
            columns = {
                "k": [f"k{number % _KEYS[0]:04d}" for number in numbers],
                "at": [_START_US + number for number in numbers],
                "id": [str(number) for number in numbers],
                "n": list(numbers),
            }
            pq.write_table(pa.table(columns), path)


def main(arguments: list[str]) -> None:
    folder, records, files = Path(arguments[0]).resolve(), int(arguments[1]), int(arguments[2])
    _write_input(folder / "input", records, files)
    spark = local_cluster(
        folder,
        EXECUTORS,
        options={
            "spark.speculation": "true",
            "spark.speculation.interval": "100ms",
            "spark.speculation.multiplier": "1.5",
            "spark.speculation.quantile": "0.5",
            "spark.speculation.minTaskRuntime": "200ms",
            "spark.sql.shuffle.partitions": "2",
            "spark.task.maxFailures": "8",
        },
    )
    spark.sparkContext.setLogLevel("ERROR")
    frame = (
        spark.readStream.schema("k string, at long, id string, n long")
        .option("maxFilesPerTrigger", "1")
        .parquet(str(folder / "input"))
    )
    with Store.open(folder / "pond") as store:
        SparkRunner(store, spark=spark, progress=False, intervals=2).run(
            copy_pipeline(folder), {"numbers": frame}
        )
    spark.stop()


if __name__ == "__main__":
    main(sys.argv[1:])
