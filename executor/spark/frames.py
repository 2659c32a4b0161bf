"""The frames that feed a run: whether they fit their streams, and the watermarks that they bring along.

A frame's own watermark, the delay of ``withWatermark``, is the policy of a stream that declares no other. Spark's
analyser notes the delay at the column that it holds for, in the analysed plan's output, from where it goes on through
``select``, ``withColumn`` and renamings of that column; so the frame's schema tells it, and that of each batch, too.

Changes in a DataFrame as flat rows, made in the JVM: what `millpond.executor.inputs.changes` makes of rows in memory.

Rows of the driver as a table, which Spark makes a frame of.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

import pyarrow as pa
from pyspark.sql import types as T  # noqa: N812 - the name that every Spark user knows

from millpond.executor.inputs.changes import (
    CHANGE_ERROR,
    CHANGE_SIGN,
    ENVELOPE_WORDS,
    SIGN_OF_WORD,
    UNKNOWN_CHANGE,
    meta_field,
    renamed,
)
from millpond.executor.inputs.injector import InjectorNode
from millpond.executor.inputs.payload import ROW_PREFIX
from millpond.executor.pipeline.topology import Topology
from millpond.executor.spark.session import refuse_connect
from millpond.executor.spark.worker_process import check_importable
from millpond.executor.time.instants import duration_text
from millpond.executor.time.watermark_policies import BoundedDisorder
from millpond.statestore.errors import InvalidError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType


_IMAGE: Final = meta_field("image")
_SIGN_OF_IMAGE: Final = {"before": -1, "after": 1}


def flat_frame(change: str | None, frame: DataFrame) -> DataFrame:
    """The changes in a frame as flat rows; the frame itself if its rows are no changes.

    Args:
        change: the column that says what kind of change a row is; ``None``: each row is an element.
        frame: a batch, or a whole input.

    Raises:
        InvalidError: there is no such column, or ``before`` and ``after`` are no rows.
    """
    if change is None:
        return frame
    if change not in frame.columns:
        raise InvalidError("the input has no such change column", column=change, columns=frame.columns)
    if {"before", "after"} <= set(frame.columns):
        return _unfolded(change, frame)
    words = ", ".join(f"'{word}', {sign}" for word, sign in SIGN_OF_WORD.items())
    sign = f"coalesce(element_at(map({words}), CAST({_quoted(change)} AS STRING)), 0)"
    return frame.selectExpr(
        *(f"{_quoted(name)} AS {_quoted(renamed(change, name))}" for name in frame.columns),
        f"CAST({sign} AS TINYINT) AS {CHANGE_SIGN}",
        f"CASE WHEN {sign} = 0 THEN '{UNKNOWN_CHANGE}' END AS {CHANGE_ERROR}",
    )


def _unfolded(change: str, frame: DataFrame) -> DataFrame:
    for name in ("before", "after"):
        kind = frame.schema[name].dataType
        if not isinstance(kind, T.StructType):
            raise InvalidError(
                "before and after of a change are rows: parse the text of Debezium with from_json",
                column=name,
                type=kind.simpleString(),
            )
    meta = [name for name in frame.columns if name not in ("before", "after")]
    word = _quoted(change)
    whens = [
        f"WHEN {word} = '{known}' AND {' AND '.join(f'{name} IS NOT NULL' for name in wanted)} "
        f"THEN array({', '.join(_image(_SIGN_OF_IMAGE[name], name) for name in wanted)})"
        for known, wanted in ENVELOPE_WORDS.items()
    ]
    # A tombstone has nothing to unfold.
    tombstone = f"WHEN {word} IS NULL AND before IS NULL AND after IS NULL THEN NULL"
    other = f"ELSE array({_image(0, 'coalesce(after, before)')})"
    images = f"explode(CASE {tombstone} {' '.join(whens)} {other} END) AS {_IMAGE}"
    unfolded = frame.selectExpr(*(f"{_quoted(name)} AS {_quoted(meta_field(name))}" for name in meta), images)
    return unfolded.selectExpr(
        *(_quoted(meta_field(name)) for name in meta),
        f"{_IMAGE}.sign AS {CHANGE_SIGN}",
        f"{_IMAGE}.error AS {CHANGE_ERROR}",
        f"{_IMAGE}.image.*",
    )


def _image(sign: int, row: str) -> str:
    error = f"'{UNKNOWN_CHANGE}'" if not sign else "CAST(NULL AS STRING)"
    return f"named_struct('sign', CAST({sign} AS TINYINT), 'error', {error}, 'image', {row})"


def _quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"


_LOG: Final = logging.getLogger("millpond")
_DELAY_KEY: Final = "spark.watermarkDelayMs"
_MILLISECOND_US: Final = 1_000


def checkpoint_path(root: str, stream: str) -> str:
    """Where the checkpoint of an input's streaming query lies, in the store's folder.

    Args:
        root: the store.
        stream: an injected stream.
    """
    return f"{root}/checkpoints/{quote(stream, safe='')}"


class InputFrames:
    """The frames of a run, by stream: those that it is opened with, and the first batch of each other stream.

    Args:
        spark: the session of the run.
        frames: those that are known when it is opened.
    """

    def __init__(self, spark: SparkSession, frames: Mapping[str, DataFrame]) -> None:
        self._spark = spark
        self._frames = dict(frames)

    def fit(self, topology: Topology) -> Topology:
        """A pipeline that the frames feed: it can read them, and has their watermarks where it declares none.

        Frames of streams that it does not have are left alone.

        Args:
            topology: the checked pipeline.

        Raises:
            InvalidError: a frame is none of Spark's or lacks a column, or the workers cannot import a module of the code.
        """
        frames = {stream: frame for stream, frame in self._frames.items() if stream in topology.injectors}
        _check_frames(topology, frames)
        check_importable(self._spark, topology)
        return _with_frame_watermarks(topology, frames)

    def meet(self, topology: Topology, stream: str, frame: DataFrame) -> Topology:
        """The pipeline that runs, once the first batch of a stream shows its columns.

        Args:
            topology: the pipeline that runs.
            stream: an injected stream of it.
            frame: a batch; it tells something only if no frame of the stream is known.

        Raises:
            InvalidError: the batch lacks a column.
        """
        if stream in self._frames:
            return topology
        _check_frames(topology, {stream: frame})
        self._frames[stream] = frame
        return _with_frame_watermarks(topology, {stream: frame})


def watermark_column(schema: StructType) -> str | None:
    """The column of a frame's ``withWatermark``; ``None`` without one."""
    return next(iter(_delays_us(schema)), None)


def watermark_delay_us(schema: StructType) -> int | None:
    """The delay of a frame's ``withWatermark`` in microseconds; ``None`` without one."""
    return next(iter(_delays_us(schema).values()), None)


def _check_frames(topology: Topology, inputs: Mapping[str, Any]) -> None:
    from pyspark.sql import DataFrame

    from millpond.executor.spark.routing import check_frame

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
    delays_us = _delays_us(schema)
    column = _column_of_time(node)
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
    return replace(node, watermark=BoundedDisorder(delay_us), is_assumed=False)


def _column_of_time(node: InjectorNode) -> str | None:
    """The frame's own column that the event time is read from; ``None`` if a function or a payload has it."""
    if not isinstance(node.at, str) or node.payload is None:
        return node.at if isinstance(node.at, str) else None
    return node.at.removeprefix(ROW_PREFIX) if node.at.startswith(ROW_PREFIX) else None


def _delays_us(schema: StructType) -> dict[str, int]:
    """The delays of ``withWatermark``, by the columns that they are on."""
    return {
        field.name: int(field.metadata[_DELAY_KEY]) * _MILLISECOND_US
        for field in schema.fields
        if _DELAY_KEY in field.metadata
    }


def table_of(rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    """Rows as a table with every field that any of them has.

    Raises:
        InvalidError: a field has several types.
    """
    names = dict.fromkeys(name for row in rows for name in row)
    try:
        return pa.table({name: pa.array([row.get(name) for row in rows]) for name in names})
    except (pa.ArrowException, TypeError, ValueError) as cause:
        raise InvalidError(
            "the rows cannot become a DataFrame: give each field one type",
            reason=str(cause).partition("\n")[0],
        ) from cause
