"""Groups with one state each: functions of Spark's ``GroupState``, in pandas or Arrow, and ``dropDuplicates``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, Generic, TypeAlias, TypeVar, cast

import pandas as pd
import pyarrow as pa
from pyspark.sql.streaming.state import GroupState, GroupStateTimeout
from pyspark.sql.types import Row, StructType

from millpond.executor.computation.context import Context, DomainName
from millpond.executor.computation.records import Records
from millpond.executor.computation.timers import Timer
from millpond.executor.spark.frames import watermark_column
from millpond.executor.spark_compat.schema import StructCodec, parse_schema
from millpond.executor.spark_compat.transform_with_state import (
    ComputationOfRows,
    YieldedAs,
    YieldedRows,
    watermark_ms,
)
from millpond.executor.spark_compat.variables import EXPIRY_TAG, columns_of_fields
from millpond.statestore.arguments import check_flags, check_function
from millpond.statestore.durations import Duration, duration_us
from millpond.statestore.errors import InvalidError
from millpond.statestore.view_columns import StateColumn

PandasFunction: TypeAlias = Callable[
    [tuple[Any, ...], Iterator[pd.DataFrame], GroupState], Iterable[pd.DataFrame]
]
"""The user's function of the key, its rows in frames, and its state. It yields frames."""

ArrowFunction: TypeAlias = Callable[
    [tuple[Any, ...], Iterator[pa.RecordBatch], GroupState], Iterable[pa.RecordBatch | pa.Table]
]
"""The user's function of the key, its rows in record batches, and its state. It yields batches or tables."""

_Function = TypeVar("_Function", bound=Callable[..., Iterable[Any]])

TIMEOUTS: Final[dict[str, DomainName | None]] = {
    GroupStateTimeout.NoTimeout: None,
    GroupStateTimeout.ProcessingTimeTimeout: "wall",
    GroupStateTimeout.EventTimeTimeout: "event",
}
"""The time domain of each timeout's timers."""

TIMEOUT_TAG: Final = "timeout"
EXPIRES_AT: Final = "expiresAtMicros"
"""The field in the state of `DropDuplicates` with the end of a key's life. It is absent in a key without an end."""


def timeout_micros(timeout_ms: int) -> int:
    # Spark times a key out once its clock is past the timeout, not at it.
    return (timeout_ms + 1) * 1_000


class _GroupsWithState(ComputationOfRows, Generic[_Function]):
    """Calls the function once for each key with rows in a bundle, and once for each key that has timed out."""

    _yielded_as: YieldedAs

    def __init__(
        self,
        function: _Function,
        output_schema: StructType | str,
        state_schema: StructType | str,
        timeout: str = GroupStateTimeout.NoTimeout,
        *,
        has_watermark: bool = True,
        time_zone: str = "UTC",
    ) -> None:
        if timeout not in TIMEOUTS:
            raise InvalidError("timeout must be a known one", timeout=timeout, known=sorted(TIMEOUTS))
        check_function("function", function)
        check_flags(has_watermark=has_watermark)
        self._function = function
        self._timeout = timeout
        self._has_watermark = has_watermark
        self._state = StructCodec(parse_schema(state_schema), "the state")
        self.state_columns: tuple[StateColumn, ...] = columns_of_fields(self._state.schema)
        self.time_zone = time_zone
        self._output = YieldedRows(parse_schema(output_schema), self._yielded_as, time_zone=time_zone)

    def process_records(self, context: Context, records: Records) -> None:
        """Call the function with the key's rows."""
        given = self._given_of(records)
        parts = given.frames if self._yielded_as == "pandas" else given.batches
        self._call(context, parts(*records.range))

    def process_timer(self, context: Context, timer: Timer) -> None:
        """Call the function without rows, because the key has timed out."""
        self._call(context, iter(()), timer)

    def _call(self, context: Context, parts: Iterator[Any], timer: Timer | None = None) -> None:
        stored = context.state.get()
        value = None if stored is None else self._state.from_json(stored)
        state = GroupState(
            optionalValue=cast(Row, value),
            batchProcessingTimeMs=context.wall_time // 1_000,
            eventTimeWatermarkMs=watermark_ms(context, timer) if self._has_watermark else -1,
            timeoutConf=self._timeout,
            hasTimedOut=timer is not None,
            watermarkPresent=self._has_watermark,
            defined=value is not None,
            updated=False,
            removed=False,
            timeoutTimestamp=GroupState.NO_TIMESTAMP,
            keyAsUnsafe=b"",
            valueSchema=self._state.schema,
        )
        self._output.produce(context, self._function(context.key_values, parts, state))
        if state._removed:  # noqa: SLF001 - Spark's runner reads them too
            context.state.delete()
        elif state._updated:  # noqa: SLF001
            context.state.set(self._state.encode(state.get))
        domain = TIMEOUTS[self._timeout]
        if domain is None:
            return
        timeout_ms = int(state._timeout_timestamp)  # noqa: SLF001
        is_set = timeout_ms != GroupState.NO_TIMESTAMP
        if is_set or state._updated or state._removed:  # noqa: SLF001
            # As in Spark, a changed state loses its timeout, and a call without a change keeps it.
            context.delete_timer(TIMEOUT_TAG, domain)
        if is_set:
            context.set_timer(timeout_micros(timeout_ms), TIMEOUT_TAG, domain)


class ApplyInPandasWithState(_GroupsWithState[PandasFunction]):
    """A computation that runs a function written for ``applyInPandasWithState``, with Spark's results.

    The function is called once for each key with rows in a bundle, and once for each key whose timeout the watermark
    or the wall time has passed. The rows that it yields go to the computation's first stream. The state is the object
    of the fields of ``state_schema``, and views show a column of each.

    Args:
        function: the user's function.
        output_schema: of the yielded frames: a ``StructType`` or text such as ``"id string, count long"``.
        state_schema: of the state.
        timeout: one of Spark's ``GroupStateTimeout``.
        has_watermark: whether Spark's frame has a watermark, so that ``getCurrentWatermarkMs`` may be called.
        time_zone: Spark's session time zone, for the times in frames, which have none themselves.

    Raises:
        InvalidError: the timeout or a schema is wrong.
    """

    _yielded_as = "pandas"


class ApplyInArrowWithState(_GroupsWithState[ArrowFunction]):
    """`ApplyInPandasWithState` with Arrow in and out, for functions that would spend most of their time in pandas.

    The function gets a key's rows as record batches, with times in UTC, and no batch when the key has timed out. It
    yields record batches or tables with the columns of ``output_schema``, in any order.

    Example::

        def count(key, batches, state):
            (before,) = state.getOption or (0,)
            now = before + sum(batch.num_rows for batch in batches)
            state.update((now,))
            yield pa.table({"card": [key[0]], "payments": [now]})
    """

    _yielded_as = "arrow"


class DropDuplicates(ComputationOfRows):
    """A computation that produces the first record of each key and drops the others.

    The state of a known key is an object, ``{}`` for a key that is kept indefinitely.

    Args:
        schema: of the records, which are produced unchanged.
        kept: how long a key is kept after the event time of its first record. ``None`` keeps it indefinitely.
            ``dropDuplicatesWithinWatermark`` uses the watermark's delay. Zero is right where the event time is part of
            the key, since later records of the key are late.

    Example::

        firsts = payments.apply(mp.spark.DropDuplicates("id string, cents long", kept="1h"), name="firsts", key="id")
    """

    def __init__(self, schema: StructType | str, kept: Duration | None = None) -> None:
        self._output = YieldedRows(parse_schema(schema), "row")
        self._kept_us = None if kept is None else duration_us(kept)
        self._time = watermark_column(parse_schema(schema))

    def process_records(self, context: Context, records: Records) -> None:
        """Produce the first record of a new key."""
        if context.state.get() is not None:
            return
        start, _ = records.range
        (row,) = self._given_of(records).rows(start, start + 1)
        self._output.produce(context, (row,))
        is_untimed = self._time is not None and row[self._time] is None
        # As in Spark, a null in the key never falls behind the watermark, and a delay begins with 1970.
        if self._kept_us is None or (is_untimed and not self._kept_us):
            context.state.set({})
            return
        times = records.columns.at
        expires_at = (0 if is_untimed else times[start]) + self._kept_us
        if expires_at > context.watermark:
            context.state.set({EXPIRES_AT: expires_at})
            context.set_timer(expires_at, EXPIRY_TAG)

    def process_timer(self, context: Context, timer: Timer) -> None:  # noqa: ARG002 - a hook
        """Delete the key. A later record of it is late, or is new again."""
        context.state.delete()
