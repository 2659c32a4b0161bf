"""Spark's stateful operators on a streaming frame, with a store in place of Spark's own state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, Unpack, cast

import pyarrow as pa
from pyspark.sql import DataFrame, GroupedData
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.streaming.state import GroupStateTimeout
from pyspark.sql.streaming.stateful_processor import StatefulProcessor
from pyspark.sql.types import StructType

from millpond.executor.inputs.extraction import FieldExtractor
from millpond.executor.pipeline.nodes import OnError
from millpond.executor.pipeline.pipeline import EnginePipeline
from millpond.executor.pipeline.topology import Topology
from millpond.executor.run.options import SparkRunnerOptions
from millpond.executor.sinks.columns import TYPED_FIELD
from millpond.executor.sinks.sink import DeltaSink, Sink
from millpond.executor.spark.frames import watermark_column, watermark_delay_us
from millpond.executor.spark.run import SparkRun
from millpond.executor.spark.runner import SparkRunner
from millpond.executor.spark.session import refuse_connect
from millpond.executor.spark_compat.group_state import (
    ApplyInArrowWithState,
    ApplyInPandasWithState,
    ArrowFunction,
    DropDuplicates,
    PandasFunction,
)
from millpond.executor.spark_compat.schema import parse_schema
from millpond.executor.spark_compat.transform_with_state import (
    INITIAL_STATE,
    ComputationOfRows,
    FrameLimits,
    RowsAs,
    TransformWithState,
)
from millpond.executor.time.watermark_policies import IngressTime
from millpond.statestore.arguments import check_flags
from millpond.statestore.errors import InvalidError, did_you_mean
from millpond.statestore.store import Store

INPUT: Final = "input"

_NO_TICK: Final = "1d"
_OUTPUT_MODES: Final = ("append", "update")


class _SparkQuery(EnginePipeline):
    """A pipeline of one operator, for which rows without an event time are never late, as in Spark."""

    def check(self, inputs: Iterable[str] | None = None) -> Topology:
        topology = super().check(inputs)
        injectors = {name: replace(node, keeps_null_times=True) for name, node in topology.injectors.items()}
        return replace(topology, injectors=injectors)


def transform_with_state(
    frame: DataFrame,
    *,
    keys: str | Sequence[str],
    processor: StatefulProcessor,
    output_schema: StructType | str,
    output_mode: str = "Update",
    time_mode: str = "None",
    initial_state: DataFrame | GroupedData | None = None,
    store: Store | str | Path,
    sink: Sink | str | Path | None = None,
    trigger: Mapping[str, Any] | None = None,
    rows_as: RowsAs = "row",
    name: str | None = None,
    id: FieldExtractor | None = None,  # noqa: A002 - the word of the paper and of the users
    on_error: OnError = "stop",
    event_time_column_name: str | None = None,
    **options: Unpack[SparkRunnerOptions],
) -> SparkRun:
    """Run a ``StatefulProcessor`` over a streaming frame, with its state in a store.

    The arguments resemble ``frame.groupBy(*keys).transformWithState(…)``. The frame's ``withWatermark`` gives the event
    time and its delay. As in Spark, rows behind the watermark are dropped in the time mode ``"EventTime"``, and a row
    without an event time is never late.

    Args:
        frame: the streaming frame.
        keys: the columns to group by.
        processor: an instance of the user's class.
        output_schema: of the rows that it yields.
        output_mode: ``"Append"`` or ``"Update"``, with the same meaning as in Spark.
        time_mode: ``"None"``, ``"ProcessingTime"`` or ``"EventTime"``.
        initial_state: a bounded frame with the same key columns, given to ``handleInitialState`` before all other rows,
            once in the life of the store.
        store: path of the store, or an open one.
        sink: a sink for the output, or the path of a Delta table with the columns of ``output_schema``, which a `DeltaSink`
            without a schema has too. Without a sink, only views show results.
        trigger: arguments of Spark's ``DataStreamWriter.trigger``. ``None`` starts each batch when the last one ends.
        rows_as: ``"pandas"`` for a processor written for ``transformWithStateInPandas``.
        name: the computation's name in the store, by default the name of the processor's class.
        id: column with the record's id. Records with the same id count once.
        on_error: the fate of rows whose code fails. ``"stop"`` ends the run, as Spark ends a query. ``"dead_letter"``
            keeps all rows of the key in the micro-batch as dead letters.
        event_time_column_name: the output's column with the event time for sinks. As in Spark, a row at or before the
            watermark fails. In a pipeline, pass it to `TransformWithState` for the computations that follow.
        options: the options of `SparkRunner`. As in Spark, timers do not fire between the micro-batches of
            ``availableNow``, unless you give a ``tick``.

    Returns:
        The running pipeline, also with ``trigger={"availableNow": True}``: call ``await_termination`` and ``stop``.

    Raises:
        InvalidError: the frame is not a stream, or an option, a schema or the time mode does not fit.
        MillpondError: the store cannot be opened; see `SparkRunner.start`.

    Example::

        run = mp.transform_with_state(
            payments.withWatermark("time", "10 minutes"),
            keys="card", processor=RunningTotal(), output_schema="card string, total double",
            time_mode="EventTime", store="pond", sink="totals",
        )
    """
    columns = _key_columns(frame, keys, output_mode)
    has_watermark = watermark_column(frame.schema) is not None
    is_in_event_time = str(time_mode).lower() == "eventtime"
    if is_in_event_time and not has_watermark:
        raise InvalidError(
            "the time mode EventTime needs the frame's withWatermark, as in frame.withWatermark('time', '10 minutes')",
            columns=frame.columns,
        )
    if event_time_column_name and not has_watermark:
        raise InvalidError("event_time_column_name needs the frame's withWatermark", columns=frame.columns)
    computation = TransformWithState(
        processor,
        output_schema,
        time_mode,
        keys=columns,
        rows_as=rows_as,
        event_time_column_name=event_time_column_name,
        has_watermark=has_watermark,
        time_zone=_time_zone(frame),
    )
    name = name or type(processor).__name__
    inputs = {INPUT: frame}
    if initial_state is not None:
        # Spark wants the initial state grouped. Here the stream's key groups it.
        inputs[INITIAL_STATE] = cast("DataFrame", getattr(initial_state, "_df", initial_state))
        if inputs[INITIAL_STATE].isStreaming:
            raise InvalidError("the initial state must be a bounded frame, got a streaming one")
    return _start(
        *(computation, name, columns, inputs, sink, output_schema, store, trigger, id, on_error, options),
        # As in Spark since 4.0.1 (SPARK-51758), other time modes have no late rows.
        drops_late=is_in_event_time,
    )


def apply_in_pandas_with_state(
    frame: DataFrame,
    *,
    keys: str | Sequence[str],
    function: PandasFunction,
    output_schema: StructType | str,
    state_schema: StructType | str,
    output_mode: str = "Update",
    timeout: str = GroupStateTimeout.NoTimeout,
    store: Store | str | Path,
    sink: Sink | str | Path | None = None,
    trigger: Mapping[str, Any] | None = None,
    name: str | None = None,
    id: FieldExtractor | None = None,  # noqa: A002 - the word of the paper and of the users
    on_error: OnError = "stop",
    **options: Unpack[SparkRunnerOptions],
) -> SparkRun:
    """Run a function written for ``applyInPandasWithState`` over a streaming frame, with its state in a store.

    The arguments resemble ``frame.groupBy(*keys).applyInPandasWithState(…)``. The other arguments, the result and the
    errors are those of `transform_with_state`.

    ``function`` takes a key, frames and a `GroupState`, and yields frames of ``output_schema``; its name is the
    computation's, unless ``name`` is given. ``state_schema`` describes its state, and ``timeout`` is one of Spark's
    ``GroupStateTimeout``.

    Raises:
        InvalidError: the frame is not a stream, or an option, a schema or the timeout does not fit.
    """
    return _start_groups(
        ApplyInPandasWithState,
        function,
        output_schema,
        *(state_schema, timeout, frame, keys, output_mode, store, sink, trigger, name, id, on_error, options),
    )


def apply_in_arrow_with_state(
    frame: DataFrame,
    *,
    keys: str | Sequence[str],
    function: ArrowFunction,
    output_schema: StructType | str,
    state_schema: StructType | str,
    output_mode: str = "Update",
    timeout: str = GroupStateTimeout.NoTimeout,
    store: Store | str | Path,
    sink: Sink | str | Path | None = None,
    trigger: Mapping[str, Any] | None = None,
    name: str | None = None,
    id: FieldExtractor | None = None,  # noqa: A002 - the word of the paper and of the users
    on_error: OnError = "stop",
    **options: Unpack[SparkRunnerOptions],
) -> SparkRun:
    """Run a function over a streaming frame like `apply_in_pandas_with_state`, but with Arrow in and out.

    Spark has no such operator. With few rows a key, pandas would take most of the time. State and timeouts are the same,
    so either form can continue a store of the other. The function gets the key, an iterator of record batches, and
    `GroupState`. The iterator is empty when the key has timed out. The function yields record batches or tables. See
    `apply_in_pandas_with_state` for the other arguments and the errors.
    """
    return _start_groups(
        ApplyInArrowWithState,
        function,
        output_schema,
        *(state_schema, timeout, frame, keys, output_mode, store, sink, trigger, name, id, on_error, options),
    )


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
    **options: Unpack[SparkRunnerOptions],
) -> SparkRun:
    """Drop duplicates from a streaming frame, with the known keys in a store.

    The results equal ``frame.dropDuplicates(keys)`` and ``frame.dropDuplicatesWithinWatermark(keys)``. A key is
    kept until the watermark has passed it if the event time is part of the key, and indefinitely otherwise. The other
    arguments, the result and the errors are those of `transform_with_state`.

    ``keys`` are the columns by which rows are duplicates. ``within_watermark`` keeps a key for the delay of the frame's
    ``withWatermark`` only. ``sink`` may be the path of a Delta table with the columns of the frame.

    Raises:
        InvalidError: the frame is not a stream, or has no watermark where one is needed, or a key is not a column.

    Example::

        run = mp.spark.drop_duplicates(payments.withWatermark("time", "1 hour"), ["id", "time"], store="pond", sink="firsts")
    """
    check_flags(within_watermark=within_watermark)
    columns = _key_columns(frame, keys, "append")
    delay_us = watermark_delay_us(frame.schema)
    if within_watermark and delay_us is None:
        raise InvalidError("to drop duplicates within the watermark, the frame needs a withWatermark")
    has_time = watermark_column(frame.schema) in columns
    delay = None if delay_us is None else timedelta(microseconds=delay_us)
    computation = DropDuplicates(frame.schema, delay if within_watermark else 0 if has_time else None)
    return _start(
        computation,
        name,
        columns,
        {INPUT: frame},
        sink,
        frame.schema,
        store,
        trigger,
        None,
        on_error,
        options,
    )


def _key_columns(frame: DataFrame, keys: str | Sequence[str], output_mode: str) -> tuple[str, ...]:
    """Return the columns of the key, once frame, keys and output mode are known to fit."""
    refuse_connect(frame, input=INPUT)
    if not frame.isStreaming:
        raise InvalidError(
            "the frame is no stream: read it with spark.readStream, or give a bounded one to SparkRunner.run",
            columns=frame.columns,
        )
    if str(output_mode).lower() not in _OUTPUT_MODES:
        raise InvalidError("output_mode must be Append or Update", output_mode=output_mode)
    columns = (keys,) if isinstance(keys, str) else tuple(keys)
    for column in columns:
        if column not in frame.columns:
            raise InvalidError(
                f"keys names a column that the frame has not{did_you_mean(column, frame.columns)}",
                key=column,
                columns=frame.columns,
            )
    return columns


def _time_zone(frame: DataFrame) -> str:
    return str(frame.sparkSession.conf.get("spark.sql.session.timeZone"))


def _has_watermark(frame: DataFrame, timeout: str) -> bool:
    has_watermark = watermark_column(frame.schema) is not None
    if timeout == GroupStateTimeout.EventTimeTimeout and not has_watermark:
        raise InvalidError(
            "the timeout EventTimeTimeout needs the frame's withWatermark, as in "
            "frame.withWatermark('time', '10 minutes')",
            columns=frame.columns,
        )
    return has_watermark


def _start_groups(
    kind: Callable[..., ComputationOfRows],
    function: Callable[..., Any],
    output_schema: StructType | str,
    state_schema: StructType | str,
    timeout: str,
    frame: DataFrame,
    keys: str | Sequence[str],
    output_mode: str,
    store: Store | str | Path,
    sink: Sink | str | Path | None,
    trigger: Mapping[str, Any] | None,
    name: str | None,
    id_: FieldExtractor | None,
    on_error: OnError,
    options: SparkRunnerOptions,
) -> SparkRun:
    columns = _key_columns(frame, keys, output_mode)
    computation = kind(
        *(function, output_schema, state_schema, timeout),
        has_watermark=_has_watermark(frame, timeout),
        time_zone=_time_zone(frame),
    )
    name = name or str(getattr(function, "__name__", "function"))
    return _start(
        computation,
        name,
        columns,
        {INPUT: frame},
        sink,
        output_schema,
        store,
        trigger,
        id_,
        on_error,
        options,
        drops_late=timeout == GroupStateTimeout.EventTimeTimeout,
    )


def _start(
    computation: ComputationOfRows,
    name: str,
    keys: Sequence[str],
    inputs: Mapping[str, DataFrame],
    sink: Sink | str | Path | None,
    schema: StructType | str,
    store: Store | str | Path,
    trigger: Mapping[str, Any] | None,
    id_: FieldExtractor | None,
    on_error: OnError,
    options: SparkRunnerOptions,
    *,
    drops_late: bool = True,
) -> SparkRun:
    # Spark's own object, because `conf.get` returns a size as the user wrote it, such as 64m.
    conf = inputs[INPUT].sparkSession._jsparkSession.sessionState().conf()  # noqa: SLF001
    computation.frame_limits = FrameLimits(conf.arrowMaxRecordsPerBatch(), conf.arrowMaxBytesPerBatch())
    # As in Spark, timers do not fire between the micro-batches of a bounded query.
    if trigger is not None and {"availableNow", "once"} & trigger.keys():
        options = {"tick": _NO_TICK, **options}
    runner = SparkRunner(store, **options)
    graph, event_time = _SparkQuery(name), watermark_column(inputs[INPUT].schema)
    # A list makes a typed key even of one text column, because in Spark null is a key.
    key = list(keys)
    graph.inject(INPUT, key=key, at=IngressTime() if event_time is None else event_time, id=id_)
    if INITIAL_STATE in inputs:
        graph.inject(INITIAL_STATE, key=key, at=IngressTime())
    graph.add(
        computation,
        name=name,
        subscribes=dict.fromkeys(inputs),
        produces=[name],
        on_error=on_error,
        # As in Spark, without a watermark no row is late.
        on_late={INPUT: "drop" if drops_late and event_time is not None else "process"},
    )
    if sink is not None:
        graph.add_sink(name, name, sink_of(sink, schema))
    return runner.start(graph, inputs, trigger=trigger)


def sink_of(sink: Sink | str | Path, schema: StructType | str) -> Sink:
    """Return the sink of an output; a `DeltaSink` without a schema has the output's columns."""
    columns = pa.schema(
        [field.with_metadata(TYPED_FIELD) for field in to_arrow_schema(parse_schema(schema), timezone="UTC")]
    )
    if not isinstance(sink, Sink):
        return DeltaSink(str(sink), columns)
    if not isinstance(sink, DeltaSink):
        return sink
    # Columns of the output's names hold its values, also bytes and those under the names of a record's own columns.
    known = set(columns.names)
    typed = (
        field.with_metadata(TYPED_FIELD) if field.name in known else field for field in sink.schema or ()
    )
    return replace(sink, schema=columns if sink.schema is None else pa.schema(typed))
