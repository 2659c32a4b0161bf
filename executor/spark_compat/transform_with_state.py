"""Spark's ``transformWithState`` as a computation: the user's ``StatefulProcessor``, unchanged.

A bundle is a micro-batch: ``handleInputRows`` gets all rows of a key in the order of their arrival, and afterwards
``handleExpiredTimer`` the timers that the watermark, or the wall time, has reached.

What a ``StatefulProcessor`` gets in ``init``: its state variables and timers.

The rows of a bundle as a processor is given them: Spark's rows, frames of pandas, or Arrow's batches.

A bundle's columns are converted once, and each key is given its part of them.

What a user's function yields, as productions: Spark's rows, frames of pandas, or Arrow's batches, with the fields of a schema.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, Final, Literal, TypeAlias, TypeVar, cast

import cloudpickle
import numpy as np
import pandas as pd
import pyarrow as pa
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
from millpond.executor.spark_compat.schema import columns_of_variables, parse_schema
from millpond.executor.spark_compat.typed_values import StructCodec
from millpond.executor.spark_compat.variables import (
    EXPIRY_TAG,
    KeyTurn,
    ListVariable,
    MapVariable,
    ValueVariable,
    Variable,
)
from millpond.executor.time.clocks import LateDataHorizon
from millpond.executor.time.instants import datetime_us
from millpond.statestore.errors import InvalidError
from millpond.statestore.view_columns import StateColumn

_VariableT = TypeVar("_VariableT", bound=Variable)

TimeMode: TypeAlias = Literal["none", "processingtime", "eventtime"]
"""Spark's time modes, in lower case: Spark takes them in any."""

TIME_MODES: Final[dict[str, DomainName | None]] = {
    "none": None,
    "processingtime": "wall",
    "eventtime": "event",
}
"""The time domain of the timers in each time mode."""


class ProcessorHandle(StatefulProcessorHandle):
    """The handle of one bundle; its variables and timers are those of the key whose hook runs.

    Args:
        time_mode: Spark's time mode, in lower case.

    Attributes:
        turn: the key whose hook runs.
        variables: the declared variables by name.
    """

    def __init__(self, time_mode: TimeMode) -> None:
        self.turn: KeyTurn = KeyTurn()
        self.variables: dict[str, Variable] = {}
        self._time_mode = time_mode
        self._is_open = True

    def initialized(self) -> None:
        """End ``init``: no variable may be declared any more."""
        self._is_open = False

    # -- variables ---------------------------------------------------------------------------

    def getValueState(
        self,
        stateName: str,
        schema: StructType | str,
        ttlDurationMs: int | None = None,
    ) -> ValueState:
        """Declare a variable of one value.

        Raises:
            InvalidError: it is too late for that, the name is taken, or the schema or the time to live is wrong.
        """
        ttl_ms = self._checked(stateName, ttlDurationMs)
        return self._declared(ValueVariable(stateName, self.turn, _codec(stateName, schema), ttl_ms))

    def getListState(
        self,
        stateName: str,
        schema: StructType | str,
        ttlDurationMs: int | None = None,
    ) -> ListState:
        """Declare a variable of a list of values; see `getValueState`."""
        ttl_ms = self._checked(stateName, ttlDurationMs)
        return self._declared(ListVariable(stateName, self.turn, _codec(stateName, schema), ttl_ms))

    def getMapState(
        self,
        stateName: str,
        userKeySchema: StructType | str,
        valueSchema: StructType | str,
        ttlDurationMs: int | None = None,
    ) -> MapState:
        """Declare a variable of values by keys; see `getValueState`."""
        ttl_ms = self._checked(stateName, ttlDurationMs)
        key_codec = _codec(f"{stateName}' (keys of the map) '", userKeySchema)
        return self._declared(
            MapVariable(stateName, self.turn, key_codec, _codec(stateName, valueSchema), ttl_ms)
        )

    def deleteIfExists(self, stateName: str) -> None:
        """Delete a variable of earlier code, key by key as keys have their turns."""
        if not self._is_open:
            raise InvalidError("deleteIfExists is called in init", state=stateName)
        self.variables.pop(stateName, None)
        self.turn.deleted.add(stateName)

    def _checked(self, name: str, ttl_ms: int | None) -> int | None:
        if not self._is_open:
            raise InvalidError("state variables are declared in init, before there is a key", state=name)
        if name in self.variables:
            raise InvalidError("two state variables have one name", state=name)
        if ttl_ms is None:
            return None
        if self._time_mode != "processingtime":
            raise InvalidError(
                "a time to live needs the time mode ProcessingTime", state=name, time_mode=self._time_mode
            )
        if ttl_ms <= 0:
            raise InvalidError("a time to live is more than no time", state=name, ttl_ms=ttl_ms)
        return ttl_ms

    def _declared(self, variable: _VariableT) -> _VariableT:
        self.variables[variable.name] = variable
        return variable

    # -- timers ------------------------------------------------------------------------------

    def registerTimer(self, expiryTimestampMs: int) -> None:
        """Have ``handleExpiredTimer`` called once the watermark, or the wall time, has reached this millisecond.

        Raises:
            InvalidError: the time mode has no timers, or no key's hook runs.
        """
        self.turn.context.set_timer(expiryTimestampMs * 1_000, str(expiryTimestampMs), self._domain())

    def deleteTimer(self, expiryTimestampMs: int) -> None:
        """Delete a timer of the key, if it is pending."""
        self.turn.context.delete_timer(str(expiryTimestampMs), self._domain())

    def listTimers(self) -> Iterator[int]:
        """The pending timers of the key in milliseconds, in their order, with the one that is being handled."""
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


_ALONE: Final = "value"
"""The only column of values that are no rows."""


class GivenRows:
    """The rows of a bundle, by their places in its columns.

    Args:
        columns: the bundle's records.

    Attributes:
        columns: the same.
        streams: those that the records came on.
    """

    def __init__(self, columns: RecordColumns) -> None:
        self.columns: RecordColumns = columns
        self.streams: frozenset[str] = frozenset(columns.streams)
        values = columns.values  # noqa: PD011 - no frame's
        self._values = values if isinstance(values, ArrowValues) else None
        self._frame: pd.DataFrame | None = None
        self._batch: pa.RecordBatch | None = None
        self._given_until = 0

    @classmethod
    def of(cls, columns: RecordColumns, former: GivenRows | None) -> GivenRows:
        """Those of some columns; the former ones, if they are of these."""
        return former if former is not None and former.columns is columns else cls(columns)

    def rows(self, start: int, stop: int) -> Iterator[Row]:
        """The rows from ``start`` to ``stop``, each made when it is asked for."""
        sources, values = self.columns.sources, self._values
        if values is None:
            for index in range(start, stop):
                fields = _fields(self.columns.value(index))
                yield Row(*fields)(*fields.values())
            return
        names, row_at, new = values.names, values.row, tuple.__new__
        for index in range(start, stop):
            # What `Row(*names)(*values)` does, at a fifth of its cost.
            row = new(Row, row_at(sources[index]) or (None,) * len(names))
            row.__fields__ = names
            yield row

    def frames(self, start: int, stop: int) -> Iterator[pd.DataFrame]:
        """The rows from ``start`` to ``stop`` as one frame, if there are any."""
        if stop == start:
            return
        values = self._values
        if values is None:
            yield pd.DataFrame([_fields(self.columns.value(index)) for index in range(start, stop)])
            return
        if self._frame is None or start < self._given_until:
            # Keys come in order: this one comes again, after its code may have changed its part.
            self._frame = _frame_of(values.take(np.asarray(self.columns.sources, dtype=np.int64)))
        self._given_until = stop
        part = self._frame.iloc[start:stop]
        part.index = _index(stop - start)
        # It is a part of no one else's frame.
        part._is_copy = None  # noqa: SLF001
        yield part

    def batches(self, start: int, stop: int) -> Iterator[pa.RecordBatch]:
        """The rows from ``start`` to ``stop`` as one record batch, if there are any."""
        if stop == start:
            return
        values = self._values
        if values is None:
            yield pa.RecordBatch.from_pylist(
                [_fields(self.columns.value(index)) for index in range(start, stop)]
            )
            return
        if self._batch is None:
            rows = values.take(np.asarray(self.columns.sources, dtype=np.int64))
            self._batch = pa.RecordBatch.from_arrays(rows.columns.flatten(), names=rows.names)
        yield self._batch.slice(start, stop - start)


class ComputationOfRows(Computation):
    """A computation in Spark's micro-batches, whose code is given rows or frames: those of a bundle are made once."""

    in_micro_batches = True
    in_order_of_arrival = True
    _given: GivenRows | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Travel without what belongs to a bundle."""
        return {**self.__dict__, "_given": None}

    def end_bundle(self) -> None:
        """Release the bundle's rows."""
        self._given = None

    def _given_of(self, records: Records) -> GivenRows:
        given = self._given = GivenRows.of(records.columns, self._given)
        return given


@lru_cache(maxsize=1_024)
def _index(rows: int) -> pd.RangeIndex:
    return pd.RangeIndex(rows)


def _frame_of(rows: ArrowValues) -> pd.DataFrame:
    table = pa.Table.from_arrays(rows.columns.flatten(), names=rows.names)
    frame: pd.DataFrame = table.to_pandas(date_as_object=True)
    for name in rows.names:
        if isinstance(frame[name].dtype, pd.DatetimeTZDtype):
            # Spark's frames have times of the session's zone, without the zone.
            frame[name] = frame[name].dt.tz_localize(None)
    return frame


def _fields(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {_ALONE: value}


RowsAs: TypeAlias = Literal["row", "pandas"]
"""What a function takes and yields: Spark's ``transformWithState`` has rows, ``transformWithStateInPandas`` frames."""


YieldedAs: TypeAlias = Literal["row", "pandas", "arrow"]
"""What a function yields: Spark's rows, frames of pandas, or Arrow's record batches and tables."""


class YieldedRows:
    """Produces what a function yields, to the first stream of its computation.

    Args:
        schema: the fields; one that a row has not is null, and one that the schema has not is left out.
        yielded_as: whether the function yields rows, frames or tables.
        event_time: the field that is a row's event time; that of what it was made of, if ``None`` or null.

    Raises:
        InvalidError: the schema has no such field, or one of another type than ``timestamp``.
    """

    __slots__ = ("_codec", "_event_time", "_yielded_as")

    def __init__(self, schema: StructType, yielded_as: YieldedAs, event_time: str | None = None) -> None:
        self._codec = StructCodec(schema, "the output")
        self._event_time = event_time
        if event_time is not None:
            _check_event_time(schema, event_time)
        self._yielded_as = yielded_as

    def produce(self, context: Context, yielded: Iterable[Any]) -> None:
        """Produce each row as it is yielded.

        Raises:
            InvalidError: something else was yielded, a value does not have its field's type, or a row's event time
                is behind the watermark, as Spark's operator refuses it.
        """
        stream, produce, event_time = context.streams[0], context.produce, self._event_time
        if event_time is not None:
            for value in map(self._codec.row_to_json, self._fields(yielded)):
                produce(stream, value, at=_time_of(value[event_time], event_time, context))
            return
        for value in map(self._codec.row_to_json, self._fields(yielded)):
            produce(stream, value)

    def _fields(self, yielded: Iterable[Any]) -> Iterator[Mapping[str, Any]]:
        yielded_as = self._yielded_as
        for one in yielded:
            if yielded_as == "pandas" and isinstance(one, pd.DataFrame):
                names = list(map(str, one.columns.tolist()))
                for values in one.to_numpy(dtype=object).tolist():
                    yield dict(zip(names, map(_or_none, values), strict=True))
            elif yielded_as == "row" and isinstance(one, Row):
                yield dict(zip(one.__fields__, one, strict=True))
            elif yielded_as == "arrow" and isinstance(one, pa.RecordBatch | pa.Table):
                yield from one.to_pylist(maps_as_pydicts="strict")
            else:
                raise InvalidError(
                    "the function yields something else than it is given: rows for rows, frames for frames, and "
                    "record batches or tables for record batches",
                    type=type(one).__name__,
                    rows_as=yielded_as,
                )


def _check_event_time(schema: StructType, name: str) -> None:
    if name not in schema.names:
        raise InvalidError(
            "event_time_column_name names a column that the output has not", name=name, columns=schema.names
        )
    kind = schema[name].dataType
    if not isinstance(kind, TimestampType):
        raise InvalidError("an event time is a timestamp", name=name, type=kind.simpleString())


def _time_of(text: str | None, name: str, context: Context) -> int | None:
    """The event time of a row that is yielded, which must not be late for those that get it."""
    if text is None:
        return None
    at = datetime_us(datetime.fromisoformat(text))
    # Spark's first watermark is 1970.
    if at < max(context.late_before, 1):
        raise InvalidError(
            "the processor yields a row whose event time is at or before the watermark, so it would be late where it "
            "is used next: yield it earlier, with a later time, or have a longer delay in withWatermark",
            column=name,
            event_time=text,
            watermark_ms=max(context.late_before, 1) // 1_000,
        )
    return at


def _or_none(value: Any) -> Any:
    """A value of a frame, with ``None`` for what pandas takes for missing."""
    is_missing = value is pd.NaT or value is pd.NA or (type(value) is float and math.isnan(value))
    return None if is_missing else value


INITIAL_STATE: Final = "initial_state"
"""The stream whose records are given to ``handleInitialState``."""

_NO_TIME: Final = TimerValues()


class TransformWithState(ComputationOfRows):
    """A computation that runs a ``StatefulProcessor``, with the same answers as Spark from the same micro-batches.

    What the processor yields goes to the computation's first stream, as objects of the fields of ``output_schema``.
    A failure of its code fails all records of the key in the micro-batch.

    Args:
        processor: an instance of the user's class; it is pickled, as in Spark.
        output_schema: of what it yields: a ``StructType`` or text such as ``"id string, count long"``.
        time_mode: ``"None"``, ``"ProcessingTime"`` or ``"EventTime"``, in upper or lower case.
        keys: the names of the key's columns, for the Row that ``handleExpiredTimer`` gets as the key; the other hooks
            get a tuple of the key's values.
        rows_as: ``"row"`` for a processor that is written for ``transformWithState``, ``"pandas"`` for one
            written for ``transformWithStateInPandas``.
        initial_state: the stream whose records go to ``handleInitialState``.
        event_time_column_name: the column of the output that is its rows' event time, for what consumes them; without it
            that of the rows, or of the timer, that they were made of. As in Spark, one that is behind the watermark
            fails.
        has_watermark: whether ``getCurrentWatermarkInMs`` tells the watermark, and not 0, as Spark's frame has one or not.

    Attributes:
        variables: the names of the state variables that ``init`` declares; views show a column of each.

    Raises:
        InvalidError: the time mode or a schema is wrong, or ``init`` asks for what Spark would refuse.

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
    ) -> None:
        mode = str(time_mode).lower()
        if mode not in TIME_MODES:
            raise InvalidError("a time mode is None, ProcessingTime or EventTime", time_mode=time_mode)
        if rows_as not in {"row", "pandas"}:
            raise InvalidError("rows_as is 'row' or 'pandas'", rows_as=rows_as)
        self._processor = processor
        self._time_mode = cast(TimeMode, mode)
        self._keys = (keys,) if isinstance(keys, str) else tuple(keys)
        self._rows_as = rows_as
        self._initial_state = initial_state
        self._has_watermark = has_watermark
        self._output = YieldedRows(parse_schema(output_schema), rows_as, event_time_column_name or None)
        if event_time_column_name:
            # Spark bounds them by the watermark, and not by the rows that they were made of.
            self.late_data_horizon: LateDataHorizon = "unbounded"
        self._handle: ProcessorHandle | None = None
        declared = self._declared()
        self.variables: tuple[str, ...] = tuple(declared)
        self.state_columns: tuple[StateColumn, ...] = columns_of_variables(declared.values())

    def _declared(self) -> dict[str, Variable]:
        """What ``init`` declares, asked of a copy, as Spark's driver does before the query starts."""
        copy: StatefulProcessor = cloudpickle.loads(cloudpickle.dumps(self._processor))
        handle = ProcessorHandle(self._time_mode)
        copy.init(handle)
        copy.close()
        return handle.variables

    def __getstate__(self) -> dict[str, Any]:
        """Travel without what belongs to a bundle."""
        return {**super().__getstate__(), "_handle": None}

    def begin_bundle(self) -> None:
        """Have the processor declare its state, as Spark does for each partition of a micro-batch."""
        self._handle = handle = ProcessorHandle(self._time_mode)
        self._processor.init(handle)
        handle.initialized()

    def end_bundle(self) -> None:
        """Let the processor release what it holds."""
        self._processor.close()
        self._handle = None
        super().end_bundle()

    def process_records(self, context: Context, records: Records) -> None:
        """Give the key's rows to ``handleInputRows``; those of the initial state to ``handleInitialState`` before."""
        handle, times = self._bound(context), self._times(context)
        start, stop = records.range
        given = self._given_of(records)
        rows = given.rows if self._rows_as == "row" else given.frames
        initial = self._initial_of(given, start, stop)
        try:
            for index in initial:
                for row in rows(index, index + 1):
                    self._processor.handleInitialState(context.key_values, row, times)
            if len(initial) < stop - start:
                # Of a key that has both, the rows of the initial state arrived first.
                some = rows(start + len(initial), stop)
                yielded = self._processor.handleInputRows(context.key_values, some, times)
                self._output.produce(context, yielded)
        finally:
            handle.turn.release()

    def process_timer(self, context: Context, timer: Timer) -> None:
        """Give a timer to ``handleExpiredTimer``, or delete what has outlived its time to live."""
        handle = self._bound(context)
        try:
            if timer.tag == EXPIRY_TAG:
                next_ms = handle.turn.variables.expire(handle.turn.now_ms)
                if next_ms is not None:
                    context.set_timer(next_ms * 1_000, EXPIRY_TAG, "wall")
                return
            yielded = self._processor.handleExpiredTimer(
                key=Row(*self._keys or ("key",))(*context.key_values),
                timerValues=self._times(context),
                expiredTimerInfo=ExpiredTimerInfo(timer.at // 1_000),
            )
            self._output.produce(context, yielded)
        finally:
            handle.turn.release()

    # -- what goes in ------------------------------------------------------------------------

    def _bound(self, context: Context) -> ProcessorHandle:
        handle = self._handle
        if handle is None:
            raise InvalidError("a hook of TransformWithState runs within a bundle only")
        handle.turn.bind(context)
        return handle

    def _times(self, context: Context) -> TimerValues:
        if self._time_mode == "none":
            return _NO_TIME
        watermark = context.watermark if self._has_watermark else 0
        return TimerValues(context.wall_time // 1_000, max(watermark // 1_000, 0))

    def _initial_of(self, given: GivenRows, start: int, stop: int) -> Sequence[int]:
        """The records of the initial state among those of a key."""
        if self._initial_state not in given.streams:
            return ()
        streams = given.columns.streams
        return [index for index in range(start, stop) if streams[index] == self._initial_state]
