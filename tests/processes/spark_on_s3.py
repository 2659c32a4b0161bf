"""A driver that does on Spark and S3 what the page about clusters shows, until it is killed or told to stop.

``python -m tests.processes.spark_on_s3 BUCKET ADDRESS HOSTS`` counts the views of users, from JSON files in a folder of
the bucket, in a store and a sink of the same bucket. It prints ``started``. On a line from standard input it stops, and
prints as JSON what Spark and Millpond read of the store and the sink, and what shows the secret of the bucket.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Final

import millpond as mp
from millpond.testing.servers.s3_server import s3_options
from tests.processes.tree import command_of, descendants_of

SECRET: Final = "the-secret-of-the-bucket"
SCHEMA: Final = "id string, user string, page string, time timestamp"


def options_for(address: str) -> dict[str, str]:
    return s3_options(address) | {"aws_secret_access_key": SECRET}


class Count(mp.Computation):
    def process_record(self, context: mp.Context, record: mp.Record) -> None:
        views = context.state.get(0) + 1
        context.state.set(views)
        context.produce("counts", {"user": record.key, "views": views})


def pipeline(bucket: str, options: dict[str, str]) -> mp.Pipeline:
    shop = mp.Pipeline("shop")
    counts = shop.inject("views", key="user", at="time", id="id").apply(Count(), name="counts")
    counts.sink("counts", mp.DeltaSink(f"{bucket}/counts", storage_options=options))
    return shop


def main(arguments: list[str]) -> None:
    bucket, address, hosts = arguments
    options, pond = options_for(address), f"{bucket}/pond"
    spark = mp.spark_session("shop", master="local[2]", store=pond, storage_options=options)
    spark.sparkContext.setLogLevel("ERROR")
    stream = spark.readStream.schema(SCHEMA).json(f"{bucket}/views".replace("s3://", "s3a://"))
    runner = mp.SparkRunner(
        pond,
        spark=spark,
        zookeeper=hosts,
        storage_options=options,
        on_held="wait",
        upkeep=mp.UpkeepPolicy(place="spark", compaction=mp.CompactionPolicy(fan_in=2)),
        progress=False,
    )
    run = runner.start(
        pipeline(bucket, options), {"views": stream}, trigger={"processingTime": "100 milliseconds"}
    )
    _say("started")
    sys.stdin.readline()
    run.stop()
    embedded = _embedded(spark, bucket, hosts, options)
    with mp.Store.open(pond, hosts, storage_options=options, read_only=True) as store:
        view = store.rows_view("counts")
        answers = {
            "by_millpond": _pairs(view.to_arrow().select(["key", "state"]).to_pylist()),
            "by_spark": _pairs(row.asDict() for row in view.to_spark(spark).select("key", "state").collect()),
        }
    sink = spark.read.format("delta").load(f"{bucket}/counts".replace("s3://", "s3a://"))
    answers["sink"] = sorted(json.loads(row.value)["views"] for row in sink.collect())
    _say(json.dumps(answers | {"embedded": embedded, "shown": _shown(spark)}))
    spark.stop()


def _embedded(spark: Any, bucket: str, hosts: str, options: dict[str, str]) -> dict[str, str]:
    """Count again in a query of the user's own, with its checkpoint on S3."""
    stream = spark.readStream.schema(SCHEMA).json(f"{bucket}/views")
    shop = mp.Pipeline("again")
    shop.inject("views", key="user", at="time", id="id").apply(Count(), name="counts")
    given = {"zookeeper": hosts, "storage_options": options, "progress": False}
    with shop.foreach_batch(f"{bucket}/again", into="views", **given) as function:
        query = stream.writeStream.foreachBatch(function).trigger(availableNow=True)
        query.option("checkpointLocation", f"{bucket}/checkpoints").start().awaitTermination()
    with mp.Store.open(f"{bucket}/again", hosts, storage_options=options, read_only=True) as store:
        return _pairs(store.rows_view("counts").to_arrow().select(["key", "state"]).to_pylist())


def _pairs(rows: Any) -> dict[str, str]:
    return {row["key"]: row["state"] for row in rows}


def _shown(spark: Any) -> list[str]:
    """Return the commands and settings that contain the secret."""
    own = int(Path("/proc/self").resolve().name)
    commands = [command_of(process) for process in (own, *descendants_of(own))]
    settings = [f"{name}={value}" for name, value in spark.sparkContext.getConf().getAll()]
    return [text for text in (*commands, *settings) if SECRET in text]


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
