"""Queries as one pipeline, over bounded events or a stream of them, on either runner."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

import millpond as mp
from examples.nexmark.events import KEYS, Events
from examples.nexmark.join_queries import side_input
from examples.nexmark.query import Query

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SIDE: Final = "side"
"""The bounded stream of q13."""

_DISORDER: Final = mp.BoundedDisorder("4s")
"""How far the watermark is behind the newest event, as in Nexmark on Flink."""


def pipeline(queries: Sequence[Query], output: Path, *, watermark: Any = _DISORDER) -> mp.Pipeline:
    """One pipeline for any number of queries, each with a Delta table for its answer.

    Args:
        queries: which.
        output: folder for the tables, one for each query.
        watermark: the policy of the three streams of events.
    """
    made = mp.Pipeline("nexmark")
    streams: dict[str, mp.DataflowStream] = {}
    for name in _inputs(queries):
        key, policy = ("side_key", mp.Monotone()) if name == SIDE else (next(iter(KEYS[name])), watermark)
        streams[name] = made.inject(name, key=key, at="date_time", watermark=policy)
    for query in queries:
        answer = query.build(streams, query.name)
        answer.sink(query.name, mp.DeltaSink(str(output / query.name), schema=query.schema))
    return made


def _inputs(queries: Iterable[Query]) -> list[str]:
    return list(dict.fromkeys(name for query in queries for name in query.inputs))


def wanted(queries: Iterable[Query], events: Events) -> dict[str, pa.Table]:
    """The tables that these queries need, by stream."""
    return {name: side_input() if name == SIDE else events[name] for name in _inputs(queries)}


def run_local(
    queries: Sequence[Query], events: Events, store: mp.Store | Path, output: Path
) -> mp.RunSummary:
    """Run queries over bounded events in this process: the watermarks wait for the end."""
    runner = mp.LocalRunner(store, progress=False)
    return runner.run(pipeline(queries, output), wanted(queries, events))


def stream_local(
    queries: Sequence[Query], pieces: Iterable[Events], store: mp.Store | Path, output: Path
) -> mp.RunSummary:
    """Run queries over a stream of events in this process: the watermarks follow it."""
    names = _inputs(queries)
    with mp.LocalRunner(store, progress=False).start(pipeline(queries, output)) as run:
        if SIDE in names:
            run.inject(SIDE, side_input())
        for piece in pieces:
            for name in names:
                if name != SIDE:
                    run.inject(name, piece[name])
        for name in names:
            run.finish(name)
        run.run_until_quiet()
        return run.summary()


def run_spark(
    queries: Sequence[Query], events: Events, store: mp.Store | Path, output: Path, spark: SparkSession
) -> mp.RunSummary:
    """Run queries over bounded events on Spark."""
    frames = {name: spark.createDataFrame(table) for name, table in wanted(queries, events).items()}
    runner = mp.SparkRunner(store, spark=spark, progress=False)
    return runner.run(pipeline(queries, output), frames)


def stream_spark(
    queries: Sequence[Query], pieces: Iterable[Events], store: Path, output: Path, spark: SparkSession
) -> mp.RunSummary:
    """Run queries on Spark over a stream of events in files next to the store; a micro-batch takes one file of each kind."""
    folder = store.with_name(f"{store.name}-input")
    write_events(_inputs(queries), pieces, folder)
    return run_stream_on_spark(queries, folder, store, output, spark)


def run_stream_on_spark(
    queries: Sequence[Query], folder: Path, store: Path, output: Path, spark: SparkSession
) -> mp.RunSummary:
    """Run queries on Spark over the files of `write_events`."""
    runner = mp.SparkRunner(store, spark=spark, progress=False)
    return runner.run(pipeline(queries, output), stream_frames(_inputs(queries), folder, spark))


def stream_frames(names: Iterable[str], folder: Path, spark: SparkSession) -> dict[str, DataFrame]:
    """The files of `write_events` as streaming frames, one file a micro-batch."""
    frames = {}
    for name in names:
        schema = spark.read.parquet(str(folder / name)).schema
        reader = spark.readStream.schema(schema).option("maxFilesPerTrigger", 1)
        frames[name] = reader.parquet(str(folder / name))
    return frames


def write_events(names: Sequence[str], pieces: Iterable[Events], folder: Path) -> None:
    """Write a Parquet file of each kind a piece."""
    for name in names:
        (folder / name).mkdir(parents=True, exist_ok=True)
    if SIDE in names:
        pq.write_table(side_input(), folder / SIDE / "00000.parquet")
    for place, piece in enumerate(pieces):
        for name in names:
            if name != SIDE:
                pq.write_table(piece[name], folder / name / f"{place:05}.parquet")
