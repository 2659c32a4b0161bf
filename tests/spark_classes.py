"""
Archive the classes that a test's Spark loads, already parsed and verified, for the next JVM to map into its memory.

Tests start some thirty Spark drivers of their own. ``make test`` runs this once before; without the archive, or with
that of another Java, tests are slower and no different.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from pyspark import SparkContext

from millpond.executor.spark.session import spark_session
from tests.short_lived import CLASSES, PLAIN_JAVA
from tests.tidy import ROOT

__all__ = ["archive"]


def archive(file: Path) -> None:
    """
    Write the archive; there is none before Spark has ended well.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_suffix(f".{os.getpid()}")
    options = {
        "spark.driver.extraJavaOptions": f'{PLAIN_JAVA} -XX:ArchiveClassesAtExit="{unfinished}" -Xlog:disable',
        "spark.ui.enabled": "false",
        "spark.sql.shuffle.partitions": "2",
    }
    spark = spark_session("classes", master="local[2]", options=options)
    spark.sparkContext.setLogLevel("OFF")
    gateway = SparkContext._gateway
    with tempfile.TemporaryDirectory() as folder:
        table = f"{folder}/table"
        spark.range(100).selectExpr("cast(id as string) as key", "id").write.format("delta").save(table)
        frame = spark.readStream.format("delta").load(table).repartition("key")
        frame = frame.mapInArrow(lambda batches: batches, frame.schema)
        query = (
            frame.writeStream.foreachBatch(lambda batch, _: batch.toArrow())
            .option("checkpointLocation", f"{folder}/checkpoint")
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
        spark.stop()
    # The JVM writes the archive as it ends, which it does with its standard input.
    gateway.shutdown()
    gateway.proc.stdin.close()
    gateway.proc.wait(timeout=240)
    unfinished.replace(file)


if __name__ == "__main__":
    archive(CLASSES)
    print(f"{CLASSES.stat().st_size >> 20} MiB of classes in {CLASSES.relative_to(ROOT)}")
