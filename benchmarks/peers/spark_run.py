"""A Spark session for an engine on Spark, and the records as a stream of files."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

from benchmarks.peers.contract import Answer, Task, answer_tasks
from benchmarks.transform_with_state import ROCKSDB
from examples.quiet_spark import quiet_spark

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_COLUMNS: Final = "key STRING, at TIMESTAMP, value BIGINT"


def answer_on_spark(run: Callable[[SparkSession, Task], Answer]) -> None:
    """Run the tasks of the command line in one session, whose settings suit every engine on Spark."""
    cores = os.cpu_count() or 1
    spark = quiet_spark(
        "millpond-peers",
        master=f"local[{cores}]",
        log=Path("build/bench/spark.log"),
        options={**ROCKSDB, "spark.sql.shuffle.partitions": str(cores), "spark.driver.memory": "3g"},
    )
    try:
        answer_tasks(lambda task: run(spark, task))
    finally:
        spark.stop()


def records_of(spark: SparkSession, task: Task) -> DataFrame:
    """Return the records as a stream of the load's files, a micro-batch a file."""
    columns = f"{_COLUMNS}, id STRING" if task.with_ids else _COLUMNS
    return spark.readStream.schema(columns).option("maxFilesPerTrigger", 1).parquet(task.inputs)
