"""Backfills of the Spark runner: the history of a stream is one frame, and one superstep.

A key's records are given in the order of their times, as those of a bounded input are; its timers that the history has
made due fire in the next superstep.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import pyarrow as pa

from millpond.executor.inputs.positions import BOUNDED_SOURCE
from millpond.executor.pipeline.nodes import INPUT, Backfill
from millpond.executor.spark.frames import table_of
from millpond.executor.spark.routing import check_frame
from millpond.executor.spark.session import refuse_connect
from millpond.executor.superstep.backfills import backfill_position
from millpond.executor.superstep.coordinator import Coordinator
from millpond.executor.superstep.plan import InputPosition
from millpond.statestore.errors import InvalidError
from millpond.statestore.types import TIME_MIN_US

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


class _Engine(Protocol):
    def frame(self, rows: pa.Table) -> DataFrame: ...
    def read(self, path: str) -> DataFrame: ...
    def count(self, frame: DataFrame, stream: str) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class BackfillFrame:
    """The history of one stream for one computation.

    Attributes:
        computation: its name.
        frame: the history.
        position: that of the backfill once it is consumed.
    """

    computation: str
    frame: DataFrame
    position: InputPosition


def backfill_frames(
    coordinator: Coordinator, engine: _Engine, inputs: Mapping[str, DataFrame]
) -> Iterator[BackfillFrame]:
    """What is still to be given; ask for the next one once one is committed.

    Args:
        coordinator: knows which computations have not got all of their history.
        engine: makes frames.
        inputs: the inputs of the run.

    Raises:
        InvalidError: a history does not fit its stream, or is not known here.
    """
    pending = {
        name: {
            stream: _frame(coordinator, engine, name, stream, inputs)
            for stream, consumed in coordinator.backfills.consumed(name).items()
            if consumed is not None
        }
        for name in coordinator.backfills.pending
    }
    for name, frames in pending.items():
        coordinator.backfills.join(name)
        for stream, frame in frames.items():
            if frame is not None:
                batch = backfill_position(0, is_all=True)
                position = InputPosition(stream=stream, source="", batch=batch, backfill=name)
                yield BackfillFrame(computation=name, frame=frame, position=position)
        coordinator.backfills.end(name, {stream: 0 for stream, frame in frames.items() if frame is None})


def _frame(
    coordinator: Coordinator, engine: _Engine, computation: str, stream: str, inputs: Mapping[str, DataFrame]
) -> DataFrame | None:
    """The history of a stream; ``None`` if there is none."""
    from pyspark.sql import DataFrame

    topology = coordinator.topology
    if coordinator.backfills.consumed(computation)[stream]:
        raise InvalidError(
            "the local runner has given the computation a part of its backfill: go on with that one until it has all",
            computation=computation,
            stream=stream,
        )
    given: Backfill = topology.backfills[computation][stream]
    if isinstance(given, str) and given == INPUT:
        return _of_input(coordinator, engine, stream, inputs)
    refuse_connect(given, computation=computation, stream=stream)
    if isinstance(given, DataFrame):
        if given.isStreaming:
            raise InvalidError("a backfill is a bounded DataFrame", computation=computation, stream=stream)
        frame = given
    elif isinstance(given, str | Path):
        frame = engine.read(str(given))
    else:
        frame = engine.frame(_table(given))
    check_frame(topology, stream, frame.schema)
    return None if frame.isEmpty() else frame


def _of_input(
    coordinator: Coordinator, engine: _Engine, stream: str, inputs: Mapping[str, DataFrame]
) -> DataFrame | None:
    """The bounded input, if the store has consumed it."""
    frame, known = inputs.get(stream), coordinator.inputs.consumed(stream)
    if frame is not None and not frame.isStreaming and known.keys() == {BOUNDED_SOURCE}:
        rows = engine.count(frame, stream)
        if rows != coordinator.inputs.input_rows(stream):
            raise InvalidError(
                "the bounded DataFrame is not the one that was consumed, so it is not the history",
                input=stream,
                rows=rows,
                consumed=coordinator.inputs.input_rows(stream),
            )
        return frame
    if known or coordinator.watermarks.injector_watermark(stream) > TIME_MIN_US:
        raise InvalidError(
            'backfill="input" is of a bounded DataFrame that the store has consumed: give it the history as a bounded '
            "DataFrame or as rows",
            stream=stream,
        )
    return None


def _table(given: Any) -> pa.Table:
    """Rows of this process as a table."""
    if isinstance(given, pa.Table):
        return given
    is_pandas = type(given).__module__.partition(".")[0] == "pandas"
    try:
        if is_pandas:
            return pa.Table.from_pandas(given, preserve_index=False)
        if hasattr(given, "__arrow_c_stream__"):
            return pa.table(given)
        rows = list(given)
    except (pa.ArrowException, TypeError, ValueError) as cause:
        raise InvalidError(
            "a backfill is a bounded DataFrame, a table, the path of a Parquet file, or mappings",
            type=type(given).__name__,
            reason=str(cause).partition("\n")[0],
        ) from cause
    if not all(isinstance(row, Mapping) for row in rows):
        raise InvalidError("a row is a mapping of fields", type=type(rows[0]).__name__)
    return table_of(rows)
