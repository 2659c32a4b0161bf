"""Spark's ``dropDuplicates`` and ``dropDuplicatesWithinWatermark``: the keys that were seen are rows of a store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Unpack

from pyspark.sql.types import StructType

from millpond.executor.computation.context import Context
from millpond.executor.computation.records import Records
from millpond.executor.computation.timers import Timer
from millpond.executor.pipeline.nodes import OnError
from millpond.executor.sinks.sink import Sink
from millpond.executor.spark.frames import watermark_delay_us
from millpond.executor.spark.run import SparkRun
from millpond.executor.spark.runner import SparkRunnerOptions
from millpond.executor.spark_compat.schema import parse_schema
from millpond.executor.spark_compat.spark_query import GroupedQuery
from millpond.executor.spark_compat.transform_with_state import ComputationOfRows, YieldedRows
from millpond.executor.spark_compat.variables import EXPIRY_TAG
from millpond.executor.time.instants import Duration, duration_us
from millpond.statestore.errors import InvalidError
from millpond.statestore.store import Store

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


EXPIRES_AT: Final = "expiresAtMicros"
"""The field of a key's state that says until when it is kept, if that is so."""


class DropDuplicates(ComputationOfRows):
    """A computation that produces the first record of each key and drops the others.

    Its state is the object ``{}`` for each key that was seen, with the time until which the key is kept if it is not
    kept for ever.

    Args:
        schema: of the records, which it produces as they are.
        kept: how long a key is kept after the event time of its first record, as a duration: the delay of the
            watermark, as ``dropDuplicatesWithinWatermark`` has it; zero where the event time is part of the key, since
            later records of the key are late. ``None`` keeps it for ever.

    Example::

        firsts = payments.apply(mp.spark.DropDuplicates("id string, cents long", kept="1h"), name="firsts", key="id")
    """

    def __init__(self, schema: StructType | str, kept: Duration | None = None) -> None:
        self._output = YieldedRows(parse_schema(schema), "row")
        self._kept_us = None if kept is None else duration_us(kept)

    def process_records(self, context: Context, records: Records) -> None:
        """Produce the first record of a key that was not seen before."""
        if context.state.get() is not None:
            return
        start, _ = records.range
        self._output.produce(context, self._given_of(records).rows(start, start + 1))
        if self._kept_us is None:
            context.state.set({})
            return
        expires_at = records.columns.at[start] + self._kept_us
        context.state.set({EXPIRES_AT: expires_at})
        context.set_timer(expires_at, EXPIRY_TAG)

    def process_timer(self, context: Context, timer: Timer) -> None:  # noqa: ARG002 - a hook
        """Forget the key: what comes of it now is late, or is taken for new."""
        context.state.delete()


def drop_duplicates(
    frame: DataFrame,
    keys: str | Sequence[str],
    *,
    within_watermark: bool = False,
    store: Store | str | Path,
    sink: Sink | str | Path | None = None,
    trigger: Mapping[str, Any] | None = None,
    name: str = "drop_duplicates",
    on_error: OnError = "stop",
    tick_ms: float | None = None,
    **options: Unpack[SparkRunnerOptions],
) -> SparkRun:
    """Drop duplicates from a streaming frame, with the keys that were seen in a store.

    It answers as ``frame.dropDuplicates(keys)`` and ``frame.dropDuplicatesWithinWatermark(keys)`` do: a key is kept
    for ever; until the watermark has passed it, if the event time is part of the key; or within the watermark's delay.

    Args:
        frame: the streaming frame.
        keys: the columns by which rows are duplicates.
        within_watermark: whether to keep a key for the delay of the frame's ``withWatermark`` only.
        store: path of the store, or an open one.
        sink: where the rows go: a sink, or the path of a Delta table with the columns of the frame.
        trigger: arguments of Spark's ``DataStreamWriter.trigger``; ``None`` takes batches as fast as they come.
        name: the computation's name in the store.
        on_error: what happens to rows whose code fails; see `transform_with_state`.
        tick_ms: how long the input must be silent before keys expire without it; see `transform_with_state`.
        options: all other options of `SparkRunner`.

    Returns:
        The running pipeline: call ``await_termination`` and ``stop``.

    Raises:
        InvalidError: the frame is not a stream, or has no watermark where one is needed, or a key is not a column.
        MillpondError: the store cannot be opened; see `SparkRunner.start`.

    Example::

        run = mp.spark.drop_duplicates(payments.withWatermark("time", "1 hour"), ["id", "time"], store="pond", sink="firsts")
    """
    query = GroupedQuery(
        frame=frame,
        keys=keys,
        output_schema=frame.schema,
        output_mode="append",
        store=store,
        sink=sink,
        trigger=trigger,
        id=None,
        on_error=on_error,
        tick_ms=tick_ms,
        options=options,
    )
    delay_us = watermark_delay_us(frame.schema)
    if within_watermark and delay_us is None:
        raise InvalidError("to drop duplicates within the watermark, the frame needs a withWatermark")
    has_time = query.event_time in query.columns
    kept = delay_us if within_watermark else 0 if has_time else None
    return query.start(name, DropDuplicates(frame.schema, kept))
