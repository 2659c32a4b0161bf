"""The frames that feed a run: their fit with their streams, their watermarks and their changes.

A frame's own watermark, the delay of ``withWatermark``, is the policy of a stream that declares no other. Spark's
analyser records the delay in the column's metadata, where it survives ``select``, ``withColumn`` and renames. So the
schemas of the frame and of each batch have it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, Final
from urllib.parse import quote

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import types as T  # noqa: N812 - the name that every Spark user knows
from pyspark.sql.types import StructType

from millpond.executor.inputs.changes import (
    CHANGE_ERROR,
    CHANGE_SIGN,
    ENVELOPE_WORDS,
    META_PREFIX,
    SIGN_OF_WORD,
    UNKNOWN_CHANGE,
    meta_field,
    renamed,
)
from millpond.executor.inputs.extraction import InjectorNode, rows_from
from millpond.executor.inputs.payload import ROW_PREFIX
from millpond.executor.inputs.reserved import refuse_reserved
from millpond.executor.inputs.row_digest import added, unordered_digest
from millpond.executor.pipeline.topology import Topology
from millpond.executor.spark.key_sql import quoted
from millpond.executor.spark.routing import check_frame
from millpond.executor.spark.session import refuse_connect
from millpond.executor.spark.worker_process import check_importable
from millpond.executor.time.watermark_policies import BoundedDisorder
from millpond.statestore.durations import duration_text
from millpond.statestore.errors import InvalidError

_IMAGE: Final = meta_field("image")
_SIGN_OF_IMAGE: Final = {"before": -1, "after": 1}


def flat_frame(change: str | None, frame: DataFrame) -> DataFrame:
    """Return the changes in a frame as flat rows, like `millpond.executor.inputs.changes` for rows in memory.

    ``change`` is the column with the kind of change; ``None`` if the rows are no changes.
    """
    if change is None:
        return frame
    refuse_reserved(frame.columns, META_PREFIX)
    if change not in frame.columns:
        raise InvalidError("the input has no such change column", column=change, columns=frame.columns)
    if {"before", "after"} <= set(frame.columns):
        return _unfolded(change, frame)
    words = ", ".join(f"'{word}', {sign}" for word, sign in SIGN_OF_WORD.items())
    sign = f"coalesce(element_at(map({words}), CAST({quoted(change)} AS STRING)), 0)"
    return frame.selectExpr(
        *(f"{quoted(name)} AS {quoted(renamed(change, name))}" for name in frame.columns),
        f"CAST({sign} AS TINYINT) AS {CHANGE_SIGN}",
        f"CASE WHEN {sign} = 0 THEN '{UNKNOWN_CHANGE}' END AS {CHANGE_ERROR}",
    )


def _unfolded(change: str, frame: DataFrame) -> DataFrame:
    for name in ("before", "after"):
        kind = frame.schema[name].dataType
        if not isinstance(kind, T.StructType):
            raise InvalidError(
                "before and after of a change must be rows: parse the text of Debezium with from_json",
                column=name,
                type=kind.simpleString(),
            )
        refuse_reserved(kind.names, META_PREFIX)
    meta = [name for name in frame.columns if name not in ("before", "after")]
    word = quoted(change)
    whens = [
        f"WHEN {word} = '{known}' AND {' AND '.join(f'{name} IS NOT NULL' for name in wanted)} "
        f"THEN array({', '.join(_image(_SIGN_OF_IMAGE[name], name) for name in wanted)})"
        for known, wanted in ENVELOPE_WORDS.items()
    ]
    # A tombstone has no rows to unfold.
    tombstone = f"WHEN {word} IS NULL AND before IS NULL AND after IS NULL THEN NULL"
    other = f"ELSE array({_image(0, 'coalesce(after, before)')})"
    images = f"explode(CASE {tombstone} {' '.join(whens)} {other} END) AS {_IMAGE}"
    unfolded = frame.selectExpr(*(f"{quoted(name)} AS {quoted(meta_field(name))}" for name in meta), images)
    return unfolded.selectExpr(
        *(quoted(meta_field(name)) for name in meta),
        f"{_IMAGE}.sign AS {CHANGE_SIGN}",
        f"{_IMAGE}.error AS {CHANGE_ERROR}",
        f"{_IMAGE}.image.*",
    )


def _image(sign: int, row: str) -> str:
    error = f"'{UNKNOWN_CHANGE}'" if not sign else "CAST(NULL AS STRING)"
    return f"named_struct('sign', CAST({sign} AS TINYINT), 'error', {error}, 'image', {row})"


_LOG: Final = logging.getLogger("millpond")
_DELAY_KEY: Final = "spark.watermarkDelayMs"
_MILLISECOND_US: Final = 1_000


def checkpoint_path(checkpoints: str, stream: str) -> str:
    """Return the path of the checkpoint of an input's streaming query in the folder of all checkpoints."""
    return f"{checkpoints}/{quote(stream, safe='')}"


class InputFrames:
    """The frames of a run, by stream. The first batch of any other stream stands for its frame."""

    def __init__(self, spark: SparkSession, frames: Mapping[str, DataFrame]) -> None:
        self._spark = spark
        self._frames = dict(frames)

    def fit(self, topology: Topology) -> Topology:
        """Return the pipeline with the frames' watermarks, after a check of columns and of the workers' imports."""
        frames = {stream: frame for stream, frame in self._frames.items() if stream in topology.injectors}
        _check_frames(topology, frames)
        check_importable(self._spark, topology)
        return _with_frame_watermarks(topology, frames)

    def meet(self, topology: Topology, stream: str, frame: DataFrame) -> Topology:
        """Return the running pipeline with the watermark of a stream's first batch. Later batches change nothing."""
        if stream in self._frames:
            return topology
        _check_frames(topology, {stream: frame})
        self._frames[stream] = frame
        return _with_frame_watermarks(topology, {stream: frame})


def watermark_column(schema: StructType) -> str | None:
    return next(iter(_delays_us(schema)), None)


def watermark_delay_us(schema: StructType) -> int | None:
    return next(iter(_delays_us(schema).values()), None)


def _check_frames(topology: Topology, inputs: Mapping[str, Any]) -> None:
    for stream, frame in inputs.items():
        refuse_connect(frame, input=stream)
        if not isinstance(frame, DataFrame):
            raise InvalidError(
                "the input is no Spark DataFrame: make one with spark.createDataFrame(…) or spark.readStream, or give "
                "the rows to a LocalRunner",
                input=stream,
                type=type(frame).__name__,
            )
        check_frame(topology, stream, flat_frame(topology.injectors[stream].change, frame).schema)


def _with_frame_watermarks(topology: Topology, inputs: Mapping[str, DataFrame]) -> Topology:
    injectors = {
        stream: _with_delay(node, inputs[stream].schema) if stream in inputs and node.is_assumed else node
        for stream, node in topology.injectors.items()
    }
    return replace(topology, injectors=injectors)


def _with_delay(node: InjectorNode, schema: StructType) -> InjectorNode:
    delays_us, column = _delays_us(schema), node.at if isinstance(node.at, str) else None
    if column is not None and node.payload is not None:
        # Outside of the payload the frame has only its own columns.
        column = column.removeprefix(ROW_PREFIX) if column.startswith(ROW_PREFIX) else None
    delay_us = None if column is None else delays_us.get(column)
    if delay_us is None:
        if delays_us:
            _LOG.warning(
                "withWatermark is on another column than the event time, and is not taken: stream=`%s` at=`%s` "
                "withWatermark=`%s`",
                node.stream,
                node.at,
                sorted(delays_us),
            )
        return node
    _LOG.info("watermark from withWatermark stream=`%s` delay=`%s`", node.stream, duration_text(delay_us))
    return replace(node, watermark=BoundedDisorder(timedelta(microseconds=delay_us)), is_assumed=False)


def _delays_us(schema: StructType) -> dict[str, int]:
    return {
        field.name: int(field.metadata[_DELAY_KEY]) * _MILLISECOND_US
        for field in schema.fields
        if _DELAY_KEY in field.metadata
    }


def rows_and_digest(frame: DataFrame) -> tuple[int, int]:
    """Return the number of rows of a frame, and their digest."""

    def task(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            digest = unordered_digest(pa.Table.from_batches([batch])).to_bytes(8)
            yield pa.RecordBatch.from_pydict({"rows": [batch.num_rows], "digest": [digest]})

    parts = frame.mapInArrow(task, "rows long, digest binary").toArrow().to_pylist()
    digest = added(*(int.from_bytes(part["digest"]) for part in parts))
    return sum(part["rows"] for part in parts), digest


def table_of(rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    """Return rows as a table with every field that any of them has."""
    names = dict.fromkeys(name for row in rows for name in row)
    try:
        return pa.table({name: pa.array([row.get(name) for row in rows]) for name in names})
    except (pa.ArrowException, TypeError, ValueError) as cause:
        raise InvalidError(
            "the rows cannot become a DataFrame: give each field one type",
            reason=str(cause).partition("\n")[0],
        ) from cause


def backfill_table(given: Any) -> pa.Table:
    try:
        rows = rows_from(given)
    except InvalidError as cause:
        raise InvalidError(
            "a backfill must be a bounded DataFrame, a table, the path of a Parquet file, or mappings",
            type=type(given).__name__,
            reason=cause.message,
        ) from cause
    if isinstance(rows, pa.Table):
        return rows
    if not all(isinstance(row, Mapping) for row in rows):
        raise InvalidError("a row must be a mapping of fields", type=type(rows[0]).__name__)
    return table_of(rows)
