"""
Spark's ``transformWithState`` as a computation: the user's ``StatefulProcessor``, unchanged.

A bundle is a micro-batch: ``handleInputRows`` gets all rows of a key in the order of their arrival, and afterwards
``handleExpiredTimer`` the timers that the watermark, or the wall time, has reached.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal, TypeAlias, cast

import cloudpickle
import pandas as pd
from pyspark.sql.streaming.stateful_processor import ExpiredTimerInfo, StatefulProcessor, TimerValues
from pyspark.sql.types import Row, StructType

from millpond.executor.computation.computation import Computation
from millpond.executor.computation.context import Context
from millpond.executor.computation.record import Record, Records
from millpond.executor.computation.timer import Timer
from millpond.executor.spark_api.handle import TIME_MODES, ProcessorHandle, TimeMode
from millpond.executor.spark_api.schema import parse_schema
from millpond.executor.spark_api.typed_values import StructCodec
from millpond.executor.spark_api.variables import EXPIRY_TAG, Variable
from millpond.statestore.errors import InvalidError

__all__ = ["INITIAL_STATE", "RowsAs", "TransformWithState"]

RowsAs: TypeAlias = Literal["row", "pandas"]
"""What the processor's rows are: Spark's ``transformWithState`` gives rows, ``transformWithStateInPandas`` frames."""

INITIAL_STATE: Final = "initial_state"
"""The stream whose records are given to ``handleInitialState``."""

_NO_TIME: Final = TimerValues()


class TransformWithState(Computation):
    """
    A computation that runs a ``StatefulProcessor``, with the same answers as Spark from the same micro-batches.

    What the processor yields goes to the computation's first stream, as objects of the fields of ``output_schema``.
    A failure of its code fails all records of the key in the micro-batch.

    Args:
        processor: an instance of the user's class; it is pickled, as in Spark.
        output_schema: of what it yields: a ``StructType`` or text such as ``"id string, count long"``.
        time_mode: ``"None"``, ``"ProcessingTime"`` or ``"EventTime"``, in upper or lower case.
        keys: the columns of the key; the key that the hooks get is a tuple of their values. The record's key as text
            unless given.
        rows_as: ``"row"`` for a processor that is written for ``transformWithState``, ``"pandas"`` for one
            written for ``transformWithStateInPandas``.
        initial_state: the stream whose records go to ``handleInitialState``.

    Attributes:
        variables: the names of the state variables that ``init`` declares.

    Raises:
        InvalidError: the time mode or a schema is wrong, or ``init`` asks for what Spark would refuse.

    Example::

        counts = payments.apply(
            mp.TransformWithState(RunningCount(), "id string, count long"), name="counts", key="id"
        )
    """

    in_micro_batches = True
    in_order_of_arrival = True

    def __init__(
        self,
        processor: StatefulProcessor,
        output_schema: StructType | str,
        time_mode: str = "None",
        *,
        keys: Sequence[str] = (),
        rows_as: RowsAs = "row",
        initial_state: str = INITIAL_STATE,
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
        self._output = StructCodec(parse_schema(output_schema), "the output")
        self._handle: ProcessorHandle | None = None
        self.variables: tuple[str, ...] = tuple(self._declared())

    def _declared(self) -> dict[str, Variable]:
        """
        What ``init`` declares, asked of a copy, as Spark's driver does before the query starts.
        """
        copy: StatefulProcessor = cloudpickle.loads(cloudpickle.dumps(self._processor))
        handle = ProcessorHandle(self._time_mode)
        copy.init(handle)
        copy.close()
        return handle.variables

    def __getstate__(self) -> dict[str, Any]:
        """
        Travel without what belongs to a bundle.
        """
        return {**self.__dict__, "_handle": None}

    def begin_bundle(self) -> None:
        """
        Have the processor declare its state, as Spark does for each partition of a micro-batch.
        """
        self._handle = handle = ProcessorHandle(self._time_mode)
        self._processor.init(handle)
        handle.initialized()

    def end_bundle(self) -> None:
        """
        Let the processor release what it holds.
        """
        self._processor.close()
        self._handle = None

    def process_records(self, context: Context, records: Records) -> None:
        """
        Give the key's rows to ``handleInputRows``; those of the initial state to ``handleInitialState`` before.
        """
        handle, times = self._bound(context), self._times(context)
        initial = [record for record in records if record.stream == self._initial_state]
        given: Iterable[Record] = records
        if initial:
            given = [record for record in records if record.stream != self._initial_state]
        try:
            for row in self._rows(initial):
                self._processor.handleInitialState(self._key(context, initial[0].value), row, times)
            if len(initial) < len(records):
                key = self._key(context, records[0].value if not initial else next(iter(given)).value)
                self._produce(context, self._processor.handleInputRows(key, self._rows(given), times))
        finally:
            handle.turn.release()

    def process_timer(self, context: Context, timer: Timer) -> None:
        """
        Give a timer to ``handleExpiredTimer``, or delete what has outlived its time to live.
        """
        handle = self._bound(context)
        try:
            if timer.tag == EXPIRY_TAG:
                next_ms = handle.turn.variables.expire(handle.turn.now_ms)
                if next_ms is not None:
                    handle.turn.expires(next_ms)
                return
            names = self._keys or ("key",)
            yielded = self._processor.handleExpiredTimer(
                key=Row(*names)(*self._key(context)),
                timerValues=self._times(context),
                expiredTimerInfo=ExpiredTimerInfo(timer.at // 1_000),
            )
            self._produce(context, yielded)
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
        return TimerValues(context.wall_time // 1_000, max(context.watermark // 1_000, 0))

    def _key(self, context: Context, value: Any = None) -> tuple[Any, ...]:
        if value is not None and self._keys:
            return tuple([value.get(name) for name in self._keys])
        return (context.key,)

    def _rows(self, records: Iterable[Record]) -> Iterator[Any]:
        if self._rows_as == "pandas":
            values = [_fields(record.value) for record in records]
            return iter([pd.DataFrame(values)] if values else [])
        return _as_rows(records)

    # -- what comes out ----------------------------------------------------------------------

    def _produce(self, context: Context, yielded: Iterable[Any]) -> None:
        stream, output = context.streams[0], self._output
        if self._rows_as == "pandas":
            for frame in yielded:
                if not isinstance(frame, pd.DataFrame):
                    raise InvalidError("the processor yields pandas DataFrames", type=type(frame).__name__)
                for values in _without_missing(frame):
                    context.produce(stream, output.row_to_json(values))
            return
        for row in yielded:
            if not isinstance(row, Row):
                raise InvalidError(
                    "the processor yields Rows with the output's fields", type=type(row).__name__
                )
            context.produce(stream, output.row_to_json(row.asDict(recursive=True)))


def _as_rows(records: Iterable[Record]) -> Iterator[Row]:
    names: tuple[str, ...] = ()
    factory = Row()
    for record in records:
        fields = _fields(record.value)
        if tuple(fields) != names:
            names = tuple(fields)
            factory = Row(*names)
        yield factory(*fields.values())


def _fields(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {"value": value}


def _without_missing(frame: pd.DataFrame) -> list[dict[str, Any]]:
    objects = frame.astype(object)
    return [
        {str(name): part for name, part in row.items()}
        for row in objects.where(frame.notna(), None).to_dict("records")
    ]
