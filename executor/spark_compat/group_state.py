"""Groups with one state each, as Spark's ``GroupState`` has it: the user's function gets a key's rows in pandas or Arrow."""

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
from millpond.executor.spark_compat.schema import columns_of_fields, parse_schema
from millpond.executor.spark_compat.transform_with_state import (
    ComputationOfRows,
    GivenRows,
    YieldedAs,
    YieldedRows,
)
from millpond.executor.spark_compat.typed_values import StructCodec
from millpond.statestore.errors import InvalidError
from millpond.statestore.view_columns import StateColumn

PandasFunction: TypeAlias = Callable[
    [tuple[Any, ...], Iterator[pd.DataFrame], GroupState], Iterable[pd.DataFrame]
]
"""The user's function: of the key, its rows in frames, and its state; it yields frames."""

ArrowFunction: TypeAlias = Callable[
    [tuple[Any, ...], Iterator[pa.RecordBatch], GroupState], Iterable[pa.RecordBatch | pa.Table]
]
"""The user's function: of the key, its rows in record batches, and its state; it yields batches or tables."""

_Function = TypeVar("_Function", bound=Callable[..., Iterable[Any]])

TIMEOUTS: Final[dict[str, DomainName | None]] = {
    GroupStateTimeout.NoTimeout: None,
    GroupStateTimeout.ProcessingTimeTimeout: "wall",
    GroupStateTimeout.EventTimeTimeout: "event",
}
"""The time domain of the timers of each timeout."""

TIMEOUT_TAG: Final = "timeout"
"""The timer of a key's timeout."""


def timeout_micros(timeout_ms: int) -> int:
    """When the timer of a timeout fires: Spark times a key out once its clock is past the timeout, not at it."""
    return (timeout_ms + 1) * 1_000


class _GroupsWithState(ComputationOfRows, Generic[_Function]):
    """Calls the function once for each key with rows in a bundle, and once for each key whose timeout has passed."""

    _yielded_as: YieldedAs

    def __init__(
        self,
        function: _Function,
        output_schema: StructType | str,
        state_schema: StructType | str,
        timeout: str = GroupStateTimeout.NoTimeout,
        *,
        has_watermark: bool = True,
    ) -> None:
        if timeout not in TIMEOUTS:
            raise InvalidError("there is no such timeout", timeout=timeout, known=sorted(TIMEOUTS))
        self._function = function
        self._timeout = timeout
        self._has_watermark = has_watermark
        self._state = StructCodec(parse_schema(state_schema), "the state")
        self.state_columns: tuple[StateColumn, ...] = columns_of_fields(self._state.schema)
        self._output = YieldedRows(parse_schema(output_schema), self._yielded_as)

    def process_records(self, context: Context, records: Records) -> None:
        """Call the function with the key's rows."""
        self._call(context, self._parts_of(self._given_of(records), *records.range), has_timed_out=False)

    def process_timer(self, context: Context, timer: Timer) -> None:  # noqa: ARG002 - a hook
        """Call the function without rows, for the key has timed out."""
        self._call(context, iter(()), has_timed_out=True)

    def _parts_of(self, given: GivenRows, start: int, stop: int) -> Iterator[Any]:
        raise NotImplementedError

    def _call(self, context: Context, parts: Iterator[Any], *, has_timed_out: bool) -> None:
        state = self._opened(context, has_timed_out=has_timed_out)
        self._output.produce(context, self._function(context.key_values, parts, state))
        if state._removed:  # noqa: SLF001 - Spark's runner reads them too
            context.state.delete()
        elif state._updated:  # noqa: SLF001
            context.state.set(self._state.to_json(state.get))
        self._set_timeout(context, state)

    def _opened(self, context: Context, *, has_timed_out: bool) -> GroupState:
        stored = context.state.get()
        value = None if stored is None else self._state.from_json(stored)
        return GroupState(
            optionalValue=cast(Row, value),
            batchProcessingTimeMs=context.wall_time // 1_000,
            eventTimeWatermarkMs=max(context.watermark // 1_000, 0) if self._has_watermark else -1,
            timeoutConf=self._timeout,
            hasTimedOut=has_timed_out,
            watermarkPresent=self._has_watermark,
            defined=value is not None,
            updated=False,
            removed=False,
            timeoutTimestamp=GroupState.NO_TIMESTAMP,
            keyAsUnsafe=b"",
            valueSchema=self._state.schema,
        )

    def _set_timeout(self, context: Context, state: GroupState) -> None:
        domain = TIMEOUTS[self._timeout]
        if domain is None:
            return
        timeout_ms = int(state._timeout_timestamp)  # noqa: SLF001
        is_set = timeout_ms != GroupState.NO_TIMESTAMP
        if is_set or state._updated or state._removed:  # noqa: SLF001
            # A call that changes nothing leaves the timeout, too; a new state has none unless it is set again.
            context.delete_timer(TIMEOUT_TAG, domain)
        if is_set:
            context.set_timer(timeout_micros(timeout_ms), TIMEOUT_TAG, domain)


class ApplyInPandasWithState(_GroupsWithState[PandasFunction]):
    """A computation that runs a function written for ``applyInPandasWithState``, with the same answers as Spark.

    The function is called once for each key with rows in a bundle, and once for each key whose timeout the watermark,
    or the wall time, has passed. What it yields goes to the computation's first stream. Its state is the object of the
    fields of ``state_schema``, and views show a column of each.

    Args:
        function: the user's function.
        output_schema: of what it yields: a ``StructType`` or text such as ``"id string, count long"``.
        state_schema: of its state.
        timeout: one of Spark's ``GroupStateTimeout``.
        has_watermark: whether ``getCurrentWatermarkMs`` may be asked for; as Spark's frame has one or not.

    Raises:
        InvalidError: the timeout or a schema is wrong.
    """

    _yielded_as = "pandas"

    def _parts_of(self, given: GivenRows, start: int, stop: int) -> Iterator[pd.DataFrame]:
        return given.frames(start, stop)


class ApplyInArrowWithState(_GroupsWithState[ArrowFunction]):
    """The same as `ApplyInPandasWithState` with Arrow in and out, for functions whose time pandas would take.

    The function gets a key's rows as record batches, with times in UTC, and none when the key has timed out. It yields
    record batches or tables with the columns of ``output_schema``, in any order.

    Args:
        function: the user's function.
        output_schema: of what it yields.
        state_schema: of its state.
        timeout: one of Spark's ``GroupStateTimeout``.
        has_watermark: whether ``getCurrentWatermarkMs`` may be asked for.

    Raises:
        InvalidError: the timeout or a schema is wrong.

    Example::

        def count(key, batches, state):
            (before,) = state.getOption or (0,)
            now = before + sum(batch.num_rows for batch in batches)
            state.update((now,))
            yield pa.table({"card": [key[0]], "payments": [now]})
    """

    _yielded_as = "arrow"

    def _parts_of(self, given: GivenRows, start: int, stop: int) -> Iterator[pa.RecordBatch]:
        return given.batches(start, stop)
