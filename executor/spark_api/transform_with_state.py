"""Spark's ``transformWithState`` as a computation: the user's ``StatefulProcessor``, unchanged.

A bundle is a micro-batch: ``handleInputRows`` gets all rows of a key in the order of their arrival, and afterwards
``handleExpiredTimer`` the timers that the watermark, or the wall time, has reached.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, cast

import cloudpickle
from pyspark.sql.streaming.stateful_processor import ExpiredTimerInfo, StatefulProcessor, TimerValues
from pyspark.sql.types import Row, StructType

from millpond.executor.computation.context import Context
from millpond.executor.computation.record import Records
from millpond.executor.computation.timer import Timer
from millpond.executor.event_time.late_data_horizon import LateDataHorizon
from millpond.executor.spark_api.declared_columns import columns_of_variables
from millpond.executor.spark_api.given_rows import ComputationOfRows, GivenRows
from millpond.executor.spark_api.handle import TIME_MODES, ProcessorHandle, TimeMode
from millpond.executor.spark_api.schema import parse_schema
from millpond.executor.spark_api.variables import EXPIRY_TAG, Variable
from millpond.executor.spark_api.yielded_rows import RowsAs, YieldedRows
from millpond.statestore.errors import InvalidError
from millpond.statestore.views.state_columns import StateColumn

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
            mp.TransformWithState(RunningCount(), "id string, count long"), name="counts", key="id"
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
