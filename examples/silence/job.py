"""The job on either runner, whole or in pieces."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

import millpond as mp
from examples.silence.alarm import silence_pipeline

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_SCHEMA: Final = pa.schema([("company", pa.string()), ("at", pa.timestamp("us", tz="UTC"))])


def run_local(
    rows: Sequence[dict[str, Any]],
    store: mp.Store | Path,
    output: Path,
    pieces: int | None = None,
    *,
    disorder: mp.Duration = 0,
    time_sorted: bool = True,
) -> mp.RunSummary:
    """Run the job on the local runner.

    Args:
        rows: the mentions, in the order in which they come.
        store: where its rows are.
        output: the Delta table that gets the alarms.
        pieces: in how many pieces they come; ``None``: as one bounded input.
        disorder: how far a mention may come behind a later one.
        time_sorted: whether mentions and timers come in the order of time.
    """
    runner = mp.LocalRunner(store, progress=False)
    pipeline = silence_pipeline(mp.DeltaSink(str(output)), time_sorted=time_sorted, disorder=disorder)
    if pieces is None:
        return runner.run(pipeline, {"mentions": _table(rows)})
    with runner.start(pipeline, stepping=True) as run:
        for piece in _cut(rows, pieces):
            run.inject("mentions", _table(piece))
            run.run_until_quiet()
        run.finish("mentions")
        run.run_until_quiet()
        return run.summary()


def run_spark(
    rows: Sequence[dict[str, Any]],
    store: mp.Store | Path,
    output: Path,
    spark: SparkSession,
    pieces: int | None = None,
    *,
    disorder: mp.Duration = 0,
) -> mp.RunSummary:
    """Run the job on Spark: over a bounded frame, or over files of which a micro-batch takes one.

    The arguments are those of `run_local`; the files lie next to the table of alarms.
    """
    folder = output.with_name(f"{output.name}-input")
    folder.mkdir(parents=True)
    for place, piece in enumerate(_cut(rows, pieces or 1)):
        file = folder / f"{place:05}.parquet"
        pq.write_table(_table(piece), file)
        # Spark reads files in the order of their times, and in any order within a millisecond.
        os.utime(file, (place, place))
    bounded = spark.read.parquet(str(folder))
    frame: DataFrame = bounded
    if pieces is not None:
        reader = spark.readStream.schema(bounded.schema).option("maxFilesPerTrigger", 1)
        frame = reader.parquet(str(folder))
    pipeline = silence_pipeline(mp.DeltaSink(str(output)), disorder=disorder)
    return mp.SparkRunner(store, spark=spark, progress=False).run(pipeline, {"mentions": frame})


def read_alarms(output: Path) -> list[tuple[str, datetime]]:
    """The alarms in a table: the company, and when it was mentioned last."""
    values = mp.read_table(output).column("value").to_pylist()
    alarms = map(orjson.loads, values)
    return sorted((alarm["company"], _EPOCH + timedelta(microseconds=alarm["last"])) for alarm in alarms)


def _cut(rows: Sequence[dict[str, Any]], pieces: int) -> Iterator[Sequence[dict[str, Any]]]:
    size = -(-len(rows) // pieces)
    return (rows[start : start + size] for start in range(0, len(rows), size))


def _table(rows: Sequence[dict[str, Any]]) -> pa.Table:
    return pa.Table.from_pylist(list(rows), _SCHEMA)
