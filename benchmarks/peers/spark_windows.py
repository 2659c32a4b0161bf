"""The windowed sum by Spark's own operators: a watermark, windows in RocksDB, and panes appended to Parquet files.

The files cost Spark less than a Delta table. With ids, ``dropDuplicatesWithinWatermark`` comes before; it forgets an id ten minutes after its record's time.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.peers.contract import Answer, Task
from benchmarks.peers.spark_run import answer_on_spark, records_of
from benchmarks.processor_time import used_seconds

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def run(spark: SparkSession, task: Task) -> Answer:
    """Run the query over all files."""
    from pyspark.sql import functions

    records, sink = records_of(spark, task), Path(task.work) / "panes"
    before = used_seconds()
    if task.with_ids:
        records = records.withWatermark("at", "10 minutes").dropDuplicatesWithinWatermark(["id"])
    else:
        records = records.withWatermark("at", "0 seconds")
    sums = records.groupBy(functions.window("at", "10 minutes"), "key").agg(
        functions.sum("value").alias("total")
    )
    query = (
        sums.writeStream.format("parquet")
        .outputMode("append")
        .option("checkpointLocation", str(Path(task.work) / "checkpoint"))
        .trigger(availableNow=True)
        .option("path", str(sink))
        .start()
    )
    query.awaitTermination()
    seconds = used_seconds() - before
    start = functions.unix_micros("window.start").alias("start")
    panes = spark.read.parquet(str(sink)).select("key", start, "total")
    return Answer(seconds, panes.toArrow())


if __name__ == "__main__":
    answer_on_spark(run)
