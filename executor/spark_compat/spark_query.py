"""A streaming frame, code written for Spark's stateful operators, and a store in place of Spark's own state."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Unpack, cast

import pyarrow as pa
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.streaming.state import GroupStateTimeout
from pyspark.sql.streaming.stateful_processor import StatefulProcessor
from pyspark.sql.types import StructType

from millpond.executor.computation.computation import Computation
from millpond.executor.inputs.injector import FieldExtractor
from millpond.executor.pipeline.nodes import OnError
from millpond.executor.pipeline.pipeline import EnginePipeline
from millpond.executor.sinks.columns import TYPED_FIELD
from millpond.executor.sinks.sink import DeltaSink, Sink
from millpond.executor.spark.frames import watermark_column
from millpond.executor.spark.run import SparkRun
from millpond.executor.spark.runner import SparkRunner, SparkRunnerOptions
from millpond.executor.spark.session import refuse_connect
from millpond.executor.spark_compat.group_state import (
    ApplyInArrowWithState,
    ApplyInPandasWithState,
    ArrowFunction,
    PandasFunction,
)
from millpond.executor.spark_compat.schema import parse_schema
from millpond.executor.spark_compat.transform_with_state import INITIAL_STATE, RowsAs, TransformWithState
from millpond.executor.time.watermark_policies import IngressTime
from millpond.statestore.errors import InvalidError, did_you_mean
from millpond.statestore.store import Store

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, GroupedData


INPUT: Final = "input"
"""Name of the injected stream of the frame."""

_TICK_MS: Final = 250
_NO_TICK_MS: Final = 86_400_000
_OUTPUT_MODES: Final = ("append", "update")


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
    tick_ms: float | None = None,
    event_time_column_name: str | None = None,
    **options: Unpack[SparkRunnerOptions],
) -> SparkRun:
    """Run a ``StatefulProcessor`` over a streaming frame, with its state in a store.

    It takes what ``frame.groupBy(*keys).transformWithState(…)`` takes. The event time and its delay are those of
    the frame's ``withWatermark``; rows behind it are left out as Spark leaves them out.

    Args:
        frame: the streaming frame.
        keys: the columns to group by.
        processor: an instance of the user's class.
        output_schema: of the rows that it yields.
        output_mode: ``"Append"`` or ``"Update"``, which mean the same here as in Spark.
        time_mode: ``"None"``, ``"ProcessingTime"`` or ``"EventTime"``.
        initial_state: a bounded frame with the same key columns, given to ``handleInitialState`` before all else,
            once in the life of the store.
        store: path of the store, or an open one.
        sink: where the output goes: a sink, or the path of a Delta table with the columns of ``output_schema``. It can
            be left out to look at the state only.
        trigger: arguments of Spark's ``DataStreamWriter.trigger``; ``None`` takes batches as fast as they come.
        rows_as: ``"pandas"`` for a processor that is written for ``transformWithStateInPandas``.
        name: the computation's name in the store; the class's name otherwise.
        id: column with the record's id; records with the same id count once.
        on_error: what happens to rows whose code fails: ``"stop"`` ends the run as it ends a query of Spark,
            ``"dead_letter"`` puts all rows of the key in the micro-batch aside.
        tick_ms: how long the input must be silent before due timers fire without it: 250 unless given, and not at all
            between the micro-batches of ``availableNow``, as in Spark.
        event_time_column_name: the column of the output that is its rows' event time, as in Spark: sinks get it, and a
            row at or before the watermark fails. In a pipeline, `TransformWithState` has it for the computations after it.
        options: all other options of `SparkRunner`.

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
    query = GroupedQuery(
        frame=frame,
        keys=keys,
        output_schema=output_schema,
        output_mode=output_mode,
        store=store,
        sink=sink,
        trigger=trigger,
        id=id,
        on_error=on_error,
        tick_ms=tick_ms,
        options=options,
    )
    if str(time_mode).lower() == "eventtime" and query.event_time is None:
        raise InvalidError(
            "the time mode EventTime needs the frame's withWatermark, as in frame.withWatermark('time', '10 minutes')",
            columns=frame.columns,
        )
    if event_time_column_name and query.event_time is None:
        raise InvalidError("event_time_column_name needs the frame's withWatermark", columns=frame.columns)
    computation = TransformWithState(
        processor,
        output_schema,
        time_mode,
        keys=query.columns,
        rows_as=rows_as,
        event_time_column_name=event_time_column_name,
        has_watermark=query.event_time is not None,
    )
    return query.start(name or type(processor).__name__, computation, initial_state)


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
    tick_ms: float | None = None,
    **options: Unpack[SparkRunnerOptions],
) -> SparkRun:
    """Run a function written for ``applyInPandasWithState`` over a streaming frame, with its state in a store.

    It takes what ``frame.groupBy(*keys).applyInPandasWithState(…)`` takes. The event time and its delay are those of
    the frame's ``withWatermark``; rows behind it are left out as Spark leaves them out.

    Args:
        frame: the streaming frame.
        keys: the columns to group by.
        function: the user's function of key, frames and `GroupState`.
        output_schema: of the frames that it yields.
        state_schema: of its state.
        output_mode: ``"Append"`` or ``"Update"``, which mean the same here as in Spark.
        timeout: one of Spark's ``GroupStateTimeout``.
        store: path of the store, or an open one.
        sink: where the output goes: a sink, or the path of a Delta table with the columns of ``output_schema``.
        trigger: arguments of Spark's ``DataStreamWriter.trigger``; ``None`` takes batches as fast as they come.
        name: the computation's name in the store; the function's name otherwise.
        id: column with the record's id; records with the same id count once.
        on_error: what happens to rows whose code fails; see `transform_with_state`.
        tick_ms: how long the input must be silent before due timeouts fire without it; see `transform_with_state`.
        options: all other options of `SparkRunner`.

    Returns:
        The running pipeline: call ``await_termination`` and ``stop``.

    Raises:
        InvalidError: the frame is not a stream, or an option, a schema or the timeout does not fit.
        MillpondError: the store cannot be opened; see `SparkRunner.start`.
    """
    query = GroupedQuery(
        frame=frame,
        keys=keys,
        output_schema=output_schema,
        output_mode=output_mode,
        store=store,
        sink=sink,
        trigger=trigger,
        id=id,
        on_error=on_error,
        tick_ms=tick_ms,
        options=options,
    )
    return _start_groups(query, ApplyInPandasWithState, function, state_schema, timeout, name)


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
    tick_ms: float | None = None,
    **options: Unpack[SparkRunnerOptions],
) -> SparkRun:
    """`apply_in_pandas_with_state` with Arrow in and out, which Spark has not: for keys of few rows pandas takes most time.

    The function gets the key, an iterator of record batches, none when the key has timed out, and Spark's `GroupState`;
    it yields record batches or tables. A function written for pandas becomes one of these line by line; state and
    timeouts are the same, and a store of one form is continued by the other.

    Args:
        frame: the streaming frame.
        keys: the columns to group by.
        function: the user's function of key, record batches and `GroupState`.
        output_schema: of the tables that it yields.
        state_schema: of its state.
        output_mode: ``"Append"`` or ``"Update"``.
        timeout: one of Spark's ``GroupStateTimeout``.
        store: path of the store, or an open one.
        sink: where the output goes: a sink, or the path of a Delta table with the columns of ``output_schema``.
        trigger: arguments of Spark's ``DataStreamWriter.trigger``; ``None`` takes batches as fast as they come.
        name: the computation's name in the store; the function's name otherwise.
        id: column with the record's id; records with the same id count once.
        on_error: what happens to rows whose code fails; see `transform_with_state`.
        tick_ms: how long the input must be silent before due timeouts fire without it; see `transform_with_state`.
        options: all other options of `SparkRunner`.

    Returns:
        The running pipeline: call ``await_termination`` and ``stop``.

    Raises:
        InvalidError: the frame is not a stream, or an option, a schema or the timeout does not fit.
        MillpondError: the store cannot be opened; see `SparkRunner.start`.
    """
    query = GroupedQuery(
        frame=frame,
        keys=keys,
        output_schema=output_schema,
        output_mode=output_mode,
        store=store,
        sink=sink,
        trigger=trigger,
        id=id,
        on_error=on_error,
        tick_ms=tick_ms,
        options=options,
    )
    return _start_groups(query, ApplyInArrowWithState, function, state_schema, timeout, name)


def _start_groups(
    query: GroupedQuery,
    kind: type[ApplyInPandasWithState | ApplyInArrowWithState],
    function: Callable[..., Any],
    state_schema: StructType | str,
    timeout: str,
    name: str | None,
) -> SparkRun:
    if timeout == GroupStateTimeout.EventTimeTimeout and query.event_time is None:
        raise InvalidError(
            "the timeout EventTimeTimeout needs the frame's withWatermark, as in "
            "frame.withWatermark('time', '10 minutes')",
            columns=query.frame.columns,
        )
    computation = kind(
        function, query.output_schema, state_schema, timeout, has_watermark=query.event_time is not None
    )
    return query.start(name or str(getattr(function, "__name__", "function")), computation)


@dataclass(frozen=True, kw_only=True)
class GroupedQuery:
    """A frame, grouped by key columns, on its way to a store."""

    frame: DataFrame
    keys: str | Sequence[str]
    output_schema: StructType | str
    output_mode: str
    store: Store | str | Path
    sink: Sink | str | Path | None
    trigger: Mapping[str, Any] | None
    id: FieldExtractor | None
    on_error: OnError
    tick_ms: float | None
    options: SparkRunnerOptions

    def __post_init__(self) -> None:
        """Refuse a frame, keys or an output mode that do not fit."""
        frame = self.frame
        refuse_connect(frame, input=INPUT)
        if not frame.isStreaming:
            raise InvalidError(
                "the frame is no stream: read it with spark.readStream, or give a bounded one to SparkRunner.run",
                columns=frame.columns,
            )
        if str(self.output_mode).lower() not in _OUTPUT_MODES:
            raise InvalidError("an output mode is Append or Update", output_mode=self.output_mode)
        for column in self.columns:
            if column not in frame.columns:
                raise InvalidError(
                    f"keys names a column that the frame has not{did_you_mean(column, frame.columns)}",
                    key=column,
                    columns=frame.columns,
                )

    @property
    def columns(self) -> tuple[str, ...]:
        """The key's columns."""
        return (self.keys,) if isinstance(self.keys, str) else tuple(self.keys)

    @property
    def event_time(self) -> str | None:
        """The column of the frame's ``withWatermark``."""
        return watermark_column(self.frame.schema)

    def start(
        self, name: str, computation: Computation, initial_state: DataFrame | GroupedData | None = None
    ) -> SparkRun:
        """Run a computation over the frame."""
        graph, event_time = EnginePipeline(name), self.event_time
        # A typed key, of one text column too: as in Spark, null is a key.
        key = list(self.columns)
        graph.inject(INPUT, key=key, at=IngressTime() if event_time is None else event_time, id=self.id)
        inputs = {INPUT: self.frame}
        if initial_state is not None:
            graph.inject(INITIAL_STATE, key=key, at=IngressTime())
            inputs[INITIAL_STATE] = _frame_of(initial_state)
        graph.add(
            computation,
            name=name,
            subscribes=dict.fromkeys(inputs),
            produces=[name],
            on_error=self.on_error,
            on_late={INPUT: "process" if event_time is None else "drop"},
        )
        if self.sink is not None:
            table = self.sink if isinstance(self.sink, Sink) else _table(str(self.sink), self.output_schema)
            graph.add_sink(name, name, table)
        runner = SparkRunner(self.store, tick_ms=self._tick_ms, **self.options)
        return runner.start(graph, inputs, trigger=self.trigger)

    @property
    def _tick_ms(self) -> float:
        if self.tick_ms is not None:
            return self.tick_ms
        ends = self.trigger is not None and bool({"availableNow", "once"} & self.trigger.keys())
        return _NO_TICK_MS if ends else _TICK_MS


def _table(path: str, schema: StructType | str) -> DeltaSink:
    fields = to_arrow_schema(parse_schema(schema), timezone="UTC")
    return DeltaSink(path, pa.schema([field.with_metadata(TYPED_FIELD) for field in fields]))


def _frame_of(initial_state: DataFrame | GroupedData) -> DataFrame:
    # What Spark wants grouped is grouped here by the key of the stream.
    frame = cast("DataFrame", getattr(initial_state, "_df", initial_state))
    if frame.isStreaming:
        raise InvalidError("the initial state is a bounded frame")
    return frame
