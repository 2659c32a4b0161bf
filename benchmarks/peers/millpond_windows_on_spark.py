"""The windowed sum on Millpond's Spark runner, a micro-batch a file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import millpond as mp
from benchmarks.peers.contract import Answer, Task
from benchmarks.peers.millpond_windows import panes_in, pipeline_of
from benchmarks.peers.spark_run import answer_on_spark, records_of
from benchmarks.processor_time import used_seconds

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def run(spark: SparkSession, task: Task) -> Answer:
    """Run the pipeline as a streaming query over the files."""
    frame, sink, pond = records_of(spark, task), Path(task.work) / "panes", Path(task.work) / "pond"
    with mp.Store.open(pond) as store:
        before = used_seconds(server_of=pond)
        runner = mp.SparkRunner(store, spark=spark, progress=False)
        run = runner.start(pipeline_of(task, sink), {"records": frame}, trigger={"availableNow": True})
        run.await_termination()
        run.stop()
        return Answer(used_seconds(server_of=pond) - before, panes_in(sink))


if __name__ == "__main__":
    answer_on_spark(run)
