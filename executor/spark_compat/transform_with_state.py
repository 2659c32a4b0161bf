"""Spark's ``transformWithState`` as a computation that runs the user's ``StatefulProcessor`` unchanged.

A bundle is a micro-batch: ``handleInputRows`` gets all rows of a key in the order of their arrival, then
``handleExpiredTimer`` gets the timers that the watermark or the wall time has reached. A bundle's columns are
converted to Spark's rows, pandas frames or Arrow batches once, and each key gets its part of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import Any, Final, Literal, TypeAlias, TypeVar, cast

import cloudpickle
import numpy as np
import pandas as pd
import pyarrow as pa
from pyspark.errors import PySparkTypeError
from pyspark.sql.conversion import ArrowBatchTransformer
from pyspark.sql.streaming.stateful_processor import (
    ExpiredTimerInfo,
    ListState,
    MapState,
    StatefulProcessor,
    StatefulProcessorHandle,
    TimerValues,
    ValueState,
)
from pyspark.sql.types import Row, StructType, TimestampType

from millpond.executor.computation.computation import Computation
from millpond.executor.computation.context import Context, DomainName
from millpond.executor.computation.records import RecordColumns, Records
from millpond.executor.computation.timers import Timer
from millpond.executor.computation.values import ArrowValues
from millpond.executor.pipeline.checks import check_overrides
from millpond.executor.spark_compat.schema import StructCodec, parse_schema, zone_named
from millpond.executor.spark_compat.variables import (
    EXPIRY_TAG,
    KeyTurn,
    ListVariable,
    MapVariable,
    ValueVariable,
    Variable,
    columns_of_variables,
)
from millpond.executor.time.clocks import LateDataHorizon
from millpond.executor.time.instants import INSTANT_MAX_US, datetime_us
from millpond.statestore.arguments import check_flags, check_instance
from millpond.statestore.errors import InvalidError
from millpond.statestore.rows.row import TimeDomain
from millpond.statestore.view_columns import StateColumn

_VariableT = TypeVar("_VariableT", bound=Variable)

TimeMode: TypeAlias = Literal["none", "processingtime", "eventtime"]
"""Spark's time modes in lower case. Spark ignores their case."""

TIME_MODES: Final[dict[str, DomainName | None]] = {
    "none": None,
    "processingtime": "wall",
    "eventtime": "event",
}
"""The time domain of each time mode's timers."""


class ProcessorHandle(StatefulProcessorHandle):
    """The handle of one bundle, passed to ``init``. Its variables and timers belong to the key whose hook runs."""

    def __init__(self, time_mode: TimeMode) -> None:
        self.turn: KeyTurn = KeyTurn()
        self.variables: dict[str, Variable] = {}
        self._time_mode = time_mode
        self.is_open: bool = True

    def getValueState(
        self, stateName: str, schema: StructType | str, ttlDurationMs: int | None = None
    ) -> ValueState:
        ttl_ms = self._checked(stateName, ttlDurationMs)
        return self._declared(ValueVariable(stateName, self.turn, _codec(stateName, schema), ttl_ms))

    def getListState(
        self, stateName: str, schema: StructType | str, ttlDurationMs: int | None = None
    ) -> ListState:
        ttl_ms = self._checked(stateName, ttlDurationMs)
        return self._declared(ListVariable(stateName, self.turn, _codec(stateName, schema), ttl_ms))

    def getMapState(
        self,
        stateName: str,
        userKeySchema: StructType | str,
        valueSchema: StructType | str,
        ttlDurationMs: int | None = None,
    ) -> MapState:
        ttl_ms = self._checked(stateName, ttlDurationMs)
        key_codec = _codec(f"{stateName}' (keys of the map) '", userKeySchema)
        return self._declared(
            MapVariable(stateName, self.turn, key_codec, _codec(stateName, valueSchema), ttl_ms)
        )

    def deleteIfExists(self, stateName: str) -> None:
        # State is stored by key, so a variable of earlier code is deleted when its key has a turn.
        if not self.is_open:
            raise InvalidError("deleteIfExists must be called in init", state=stateName)
        variable = self.variables.pop(stateName, None)
        if variable is not None:
            variable.delete()
        self.turn.deleted.add(stateName)

    def _checked(self, name: str, ttl_ms: int | None) -> int | None:
        if not self.is_open:
            raise InvalidError(
                "state variables must be declared in init, where no key is current", state=name
            )
        if name in self.variables:
            raise InvalidError("names of state variables must be unique", state=name)
        if ttl_ms is None:
            return None
        if self._time_mode != "processingtime":
            raise InvalidError(
                "a time to live needs the time mode ProcessingTime", state=name, time_mode=self._time_mode
            )
        if ttl_ms <= 0:
            raise InvalidError("a time to live must be positive", state=name, ttl_ms=ttl_ms)
        return ttl_ms

    def _declared(self, variable: _VariableT) -> _VariableT:
        self.variables[variable.name] = variable
        return variable

    def registerTimer(self, expiryTimestampMs: int) -> None:
        self.turn.context.set_timer(expiryTimestampMs * 1_000, str(expiryTimestampMs), self._domain())

    def deleteTimer(self, expiryTimestampMs: int) -> None:
        self.turn.context.delete_timer(str(expiryTimestampMs), self._domain())

    def listTimers(self) -> Iterator[int]:
        timers = self.turn.context.timers(self._domain())
        return iter([timer.at // 1_000 for timer in timers if timer.tag != EXPIRY_TAG])

    def _domain(self) -> DomainName:
        domain = TIME_MODES[self._time_mode]
        if domain is None:
            raise InvalidError(
                "timers need the time mode ProcessingTime or EventTime", time_mode=self._time_mode
            )
        return domain


def _codec(name: str, schema: StructType | str) -> StructCodec:
    return StructCodec(parse_schema(schema), f"the state {name!r}")


_UNLIMITED: Final = 2**31 - 1


@dataclass(frozen=True, slots=True)
class FrameLimits:
    """The size of a key's frames, by Spark's two settings and with their defaults; ``rows`` of 0 or less are no limit."""

    rows: int = 10_000
    bytes: int = _UNLIMITED

    def rows_in(self, batch: pa.RecordBatch | None) -> int:
        rows = self.rows if self.rows > 0 else _UNLIMITED
        if batch is None or not batch.num_rows or self.bytes == _UNLIMITED:
            return rows
        # As in Spark, rows count with their average size, and the row that reaches the limit is the frame's last.
        row_bytes: float = max(batch.get_total_buffer_size() / batch.num_rows, 1)
        return min(rows, max(math.ceil(self.bytes / row_bytes), 1))


class GivenRows:
    """The rows of a bundle, by their places in its columns."""

    def __init__(
        self, columns: RecordColumns, time_zone: str, limits: FrameLimits, *, is_widened: bool
    ) -> None:
        self.columns: RecordColumns = columns
        self._time_zone = time_zone
        self._limits = limits
        self._rows_max = limits.rows_in(None)
        self._is_widened = is_widened
        self.streams: frozenset[str] = frozenset(columns.streams)
        values = columns.values  # noqa: PD011 - no frame's
        self._values = values if isinstance(values, ArrowValues) else None
        self._frame: pd.DataFrame | None = None
        self._batch: pa.RecordBatch | None = None
        self._with_nulls: list[int] = []
        self._given_until = 0

    def rows(self, start: int, stop: int) -> Iterator[Row]:
        sources, values = self.columns.sources, self._values
        if values is None:
            for index in range(start, stop):
                fields = _fields(self.columns.value(index))
                yield Row(*fields)(*fields.values())
            return
        names, row_at, new = values.names, values.row, tuple.__new__
        for index in range(start, stop):
            # The same as `Row(*names)(*values)`, at a fifth of its cost.
            row = new(Row, row_at(sources[index]) or (None,) * len(names))
            row.__fields__ = names
            yield row

    def frames(self, start: int, stop: int) -> Iterator[pd.DataFrame]:
        """Yield the rows in frames within the limits, nothing if there are none."""
        values = self._values
        batch = None if values is None or start == stop else self._taken(values)
        for first in range(start, stop, self._rows_max):
            end = min(first + self._rows_max, stop)
            if batch is None:
                yield pd.DataFrame([_fields(self.columns.value(index)) for index in range(first, end)])
            else:
                yield self._frame_part(batch, first, end)

    def _frame_part(self, batch: pa.RecordBatch, start: int, stop: int) -> pd.DataFrame:
        if self._frame is None or start < self._given_until:
            # Keys come in order, so a smaller start is a retry of a key whose code may have changed its part.
            self._frame = _frame_of(batch, self._time_zone)
        self._given_until = stop
        part = self._frame.iloc[start:stop]
        part.index = _index(stop - start)
        # Nobody else has this part's rows: without this, pandas would warn of writes to it.
        part._is_copy = None  # noqa: SLF001
        for place in self._with_nulls:
            # Another key's null must not make floats or objects of this key's numbers.
            column = batch.column(place).slice(start, stop - start)
            if not column.null_count:
                part.isetitem(place, column.to_numpy(zero_copy_only=False))
        return part

    def batches(self, start: int, stop: int) -> Iterator[pa.RecordBatch]:
        """Yield the rows as one record batch, or nothing if there are none."""
        if stop == start:
            return
        values = self._values
        if values is None:
            yield pa.RecordBatch.from_pylist(
                [_fields(self.columns.value(index)) for index in range(start, stop)]
            )
            return
        yield self._taken(values).slice(start, stop - start)

    def _taken(self, values: ArrowValues) -> pa.RecordBatch:
        if self._batch is None:
            rows = values.take(np.asarray(self.columns.sources, dtype=np.int64))
            columns = map(_widened, rows.columns.flatten()) if self._is_widened else rows.columns.flatten()
            self._batch = batch = pa.RecordBatch.from_arrays(list(columns), names=rows.names)
            self._rows_max = self._limits.rows_in(batch)
            whole = (pa.types.is_integer, pa.types.is_boolean)
            self._with_nulls = [
                place
                for place, column in enumerate(batch.columns)
                if column.null_count and any(is_kind(column.type) for is_kind in whole)
            ]
        return self._batch


class ComputationOfRows(Computation):
    """A computation in Spark's micro-batches that converts a bundle's records to rows or frames once."""

    in_micro_batches = True
    in_order_of_arrival = True
    time_zone: str = "UTC"
    """The session's time zone, which times in frames have."""

    frame_limits: FrameLimits = FrameLimits()
    """Where a key's frame ends and its next one begins."""

    widens_frames: bool = False
    """Whether frames have all whole numbers as int64 and all floats as float64."""

    _given: GivenRows | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_given": None}

    def end_bundle(self) -> None:
        """Release the bundle's rows."""
        self._given = None

    def _given_of(self, records: Records) -> GivenRows:
        if self._given is None or self._given.columns is not records.columns:
            self._given = GivenRows(
                records.columns, self.time_zone, self.frame_limits, is_widened=self.widens_frames
            )
        return self._given


@lru_cache(maxsize=1_024)
def _index(rows: int) -> pd.RangeIndex:
    return pd.RangeIndex(rows)


def _widened(column: pa.Array) -> pa.Array:
    if pa.types.is_signed_integer(column.type):
        return column.cast(pa.int64())
    return column.cast(pa.float64()) if pa.types.is_floating(column.type) else column


def _frame_of(batch: pa.RecordBatch, time_zone: str) -> pd.DataFrame:
    # Spark's own batches have times in the session's zone, and its conversion reads the zone there.
    for place, column in enumerate(batch.columns):
        if pa.types.is_timestamp(column.type) and column.type.tz is not None:
            here = column.cast(pa.timestamp(column.type.unit, time_zone))
            batch = batch.set_column(place, batch.column_names[place], here)
    try:
        columns = ArrowBatchTransformer.to_pandas(batch, timezone=time_zone)
    except PySparkTypeError:
        # Types that Spark lacks come from other readers.
        frame: pd.DataFrame = batch.to_pandas(date_as_object=True, maps_as_pydicts="strict")
        return frame
    return pd.concat(columns, axis=1)


def _fields(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {"value": value}


RowsAs: TypeAlias = Literal["row", "pandas"]
"""The form of input and output: rows as in ``transformWithState``, frames as in ``transformWithStateInPandas``."""

YieldedAs: TypeAlias = Literal["row", "pandas", "arrow"]


class YieldedRows:
    """Produces a function's output to the first stream of its computation.

    A field that a row lacks becomes null, and a field that the schema lacks is left out. A frame or batch has the columns
    of the schema: a frame without names has them by place. Times of frames without a zone are in ``time_zone``.
    ``event_time`` is the field with a row's event time. ``None`` or a null keeps the time of the row's input.
    """

    def __init__(
        self,
        schema: StructType,
        yielded_as: YieldedAs,
        event_time: str | None = None,
        *,
        time_zone: str | None = None,
    ) -> None:
        zone = None if time_zone is None else zone_named(time_zone)
        self._codec = StructCodec(schema, "the output", zone, in_json=False)
        self._event_time = event_time
        if event_time is not None and event_time not in schema.names:
            raise InvalidError(
                "the output has no column with the name in event_time_column_name",
                name=event_time,
                columns=schema.names,
            )
        if event_time is not None and not isinstance(kind := schema[event_time].dataType, TimestampType):
            raise InvalidError("an event time must be a timestamp", name=event_time, type=kind.simpleString())
        self._yielded_as = yielded_as

    def produce(self, context: Context, yielded: Iterable[Any]) -> None:
        stream, produce, event_time = context.streams[0], context.produce, self._event_time
        if event_time is not None:
            for value in map(self._codec.encode_row, self._fields(yielded)):
                produce(stream, value, at=_time_of(value[event_time], event_time, context))
            return
        for value in map(self._codec.encode_row, self._fields(yielded)):
            produce(stream, value)

    def _fields(self, yielded: Iterable[Any]) -> Iterator[Mapping[str, Any]]:
        yielded_as = self._yielded_as
        for one in yielded:
            if yielded_as == "pandas" and isinstance(one, pd.DataFrame):
                names = self._names_of(one.columns.tolist())
                for values in one.to_numpy(dtype=object).tolist():
                    yield dict(zip(names, map(_or_none, values), strict=True))
            elif yielded_as == "row" and isinstance(one, Row):
                yield dict(zip(one.__fields__, one, strict=True))
            elif yielded_as == "arrow" and isinstance(one, pa.RecordBatch | pa.Table):
                self._names_of(one.schema.names)
                yield from one.to_pylist(maps_as_pydicts="strict")
            else:
                raise InvalidError(
                    "the function yields something else than it is given: yield rows for rows, frames for frames, "
                    "and record batches or tables for record batches",
                    type=type(one).__name__,
                    rows_as=yielded_as,
                )

    def _names_of(self, columns: list[Any]) -> list[str]:
        """Return the names of yielded columns: the schema's, in another order or, without names, by place."""
        expected = self._codec.names
        names = columns if any(isinstance(column, str) for column in columns) else expected[: len(columns)]
        # An empty frame may have no columns.
        if columns and (len(columns) != len(expected) or set(names) != set(expected)):
            raise InvalidError(
                "the function must yield the columns of its output schema",
                yielded=list(map(str, columns)),
                schema=self._codec.schema.simpleString(),
            )
        return names


def _time_of(time: datetime | None, name: str, context: Context) -> int | None:
    if time is None:
        return None
    at = datetime_us(time)
    # As in Spark's operator, a row behind the watermark fails here, because its consumers would drop it as late.
    # Spark's first watermark is 1970.
    late_before = max(context.late_before, 1) if context.late_before <= INSTANT_MAX_US else 1
    if at < late_before:
        raise InvalidError(
            "the processor yields a row whose event time is at or before the watermark, so its consumers would drop it: "
            "yield it earlier, with a later time, or set a longer delay in withWatermark",
            column=name,
            event_time=time.isoformat(),
            watermark_ms=late_before // 1_000,
        )
    return at


def _or_none(value: Any) -> Any:
    is_missing = value is pd.NaT or value is pd.NA or (type(value) is float and math.isnan(value))
    return None if is_missing else value


def watermark_ms(context: Context, timer: Timer | None = None) -> int:
    """Return the watermark for Spark's code; once the input has ended, the time of the timer or of the oldest record.

    The end itself is no date that code could add a minute to, and Spark refuses timeouts before the watermark.
    """
    watermark: int = context.watermark
    if watermark > INSTANT_MAX_US:
        watermark = timer.at if timer is not None and timer.domain is TimeDomain.EVENT else context.oldest_at
    return max(watermark // 1_000, 0)


INITIAL_STATE: Final = "initial_state"

_NO_TIME: Final = TimerValues()


class TransformWithState(ComputationOfRows):
    """A computation that runs a ``StatefulProcessor``, with Spark's results for the same micro-batches.

    The rows that the processor yields go to the computation's first stream, as objects of the fields of
    ``output_schema``, with Python's values of its types. An error in its code fails all records of the key in the micro-batch.

    Args:
        processor: an instance of the user's class. As in Spark, it is pickled.
        output_schema: of the yielded rows: a ``StructType`` or text such as ``"id string, count long"``.
        time_mode: ``"None"``, ``"ProcessingTime"`` or ``"EventTime"``, in upper or lower case.
        keys: the names of the key's columns in the Row that ``handleExpiredTimer`` gets. The other hooks get the key as
            a tuple.
        rows_as: ``"row"`` for a processor written for ``transformWithState``, ``"pandas"`` for one written for
            ``transformWithStateInPandas``.
        initial_state: the stream whose records go to ``handleInitialState``.
        event_time_column_name: the output's column with the event time for consumers. As in Spark, a row behind the
            watermark fails. Without a column, an output row keeps the time of its input rows or timer.
        has_watermark: whether Spark's frame has a watermark. Without it ``getCurrentWatermarkInMs`` returns 0.
        time_zone: Spark's session time zone, for the times in frames, which have none themselves.

    Attributes:
        variables: the names of the state variables declared in ``init``. Views show a column of each.

    Raises:
        InvalidError: the time mode or a schema is wrong, or Spark would refuse a call in ``init``.

    Example::

        counts = payments.apply(
            mp.spark.TransformWithState(RunningCount(), "id string, count long"), name="counts", key="id"
        )
    """

    def __init__(
        self,
        processor: StatefulProcessor,
        output_schema: StructType | str,
        time_mode: str = "None",
        *,
        keys: Sequence[str] = (),
        rows_as: RowsAs = "row",
        initial_state: str = INITIAL_STATE,
        event_time_column_name: str | None = None,
        has_watermark: bool = True,
        time_zone: str = "UTC",
    ) -> None:
        mode = str(time_mode).lower()
        if mode not in TIME_MODES:
            raise InvalidError("time_mode must be None, ProcessingTime or EventTime", time_mode=time_mode)
        if rows_as not in {"row", "pandas"}:
            raise InvalidError("rows_as must be 'row' or 'pandas'", rows_as=rows_as)
        check_instance("processor", processor, StatefulProcessor)
        check_flags(has_watermark=has_watermark)
        self._processor = processor
        self._time_mode = cast(TimeMode, mode)
        self._keys = (keys,) if isinstance(keys, str) else tuple(keys)
        self._rows_as = rows_as
        self._initial_state = initial_state
        self._has_watermark = has_watermark
        self.time_zone = time_zone
        self._output = YieldedRows(
            parse_schema(output_schema),
            rows_as,
            event_time_column_name or None,
            # Spark takes a row's times to be this process's.
            time_zone=time_zone if rows_as == "pandas" else None,
        )
        if event_time_column_name:
            # As in Spark, the watermark is the only bound of these times: they may precede their input rows.
            self.late_data_horizon: LateDataHorizon = "unbounded"
        self._handle: ProcessorHandle | None = None
        # Like Spark's driver before the query starts, run `init` of a copy: it may have effects on the processor.
        check_overrides(StatefulProcessor, processor)
        copy: StatefulProcessor = cloudpickle.loads(cloudpickle.dumps(processor))  # the caller's own
        handle = ProcessorHandle(self._time_mode)
        copy.init(handle)
        copy.close()
        self.variables: tuple[str, ...] = tuple(handle.variables)
        self.state_columns: tuple[StateColumn, ...] = columns_of_variables(handle.variables.values())

    # Spark makes these frames of Python's values.
    widens_frames = True

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_handle": None}

    def begin_bundle(self) -> None:
        """Have the processor declare its state, as Spark does for each partition of a micro-batch."""
        self._handle = handle = ProcessorHandle(self._time_mode)
        self._processor.init(handle)
        handle.is_open = False

    def end_bundle(self) -> None:
        """Close the processor, so that it can release its resources."""
        self._processor.close()
        self._handle = None
        super().end_bundle()

    def process_records(self, context: Context, records: Records) -> None:
        """Give rows of the initial state to ``handleInitialState``, then the others to ``handleInputRows``."""
        handle, times = self._bound(context), self._times(context)
        start, stop = records.range
        given = self._given_of(records)
        rows = given.rows if self._rows_as == "row" else given.frames
        initial: list[int] = []
        if self._initial_state in given.streams:
            streams = given.columns.streams
            initial = [index for index in range(start, stop) if streams[index] == self._initial_state]
        try:
            for index in initial:
                for row in rows(index, index + 1):
                    self._processor.handleInitialState(context.key_values, row, times)
            if len(initial) < stop - start:
                # The initial state is the first input of a run, so its rows come before a key's other rows.
                some = rows(start + len(initial), stop)
                yielded = self._processor.handleInputRows(context.key_values, some, times)
                self._output.produce(context, yielded)
        finally:
            handle.turn.release()

    def process_timer(self, context: Context, timer: Timer) -> None:
        """Give a timer to ``handleExpiredTimer``, or delete expired values of state variables."""
        handle = self._bound(context)
        try:
            if timer.tag == EXPIRY_TAG:
                next_ms = handle.turn.variables.expire(handle.turn.now_ms)
                if next_ms is not None:
                    context.set_timer(next_ms * 1_000, EXPIRY_TAG, "wall")
                return
            yielded = self._processor.handleExpiredTimer(
                key=Row(*self._keys or ("key",))(*context.key_values),
                timerValues=self._times(context, timer),
                expiredTimerInfo=ExpiredTimerInfo(timer.at // 1_000),
            )
            self._output.produce(context, yielded)
        finally:
            handle.turn.release()

    def _bound(self, context: Context) -> ProcessorHandle:
        handle = self._handle
        if handle is None:
            raise InvalidError("hooks of TransformWithState must run within a bundle")
        handle.turn.bind(context)
        return handle

    def _times(self, context: Context, timer: Timer | None = None) -> TimerValues:
        if self._time_mode == "none":
            return _NO_TIME
        watermark = watermark_ms(context, timer) if self._has_watermark else 0
        return TimerValues(context.wall_time // 1_000, watermark)
