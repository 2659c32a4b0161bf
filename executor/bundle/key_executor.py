"""
A key's turn in a bundle: its due timers, its records, and the timers that these made due.

User code runs at full speed first. If it raises, the whole turn is undone and run again
carefully, one record or timer at a time with a savepoint before each, so that only the
failing one's effects are rolled back (MillWheel §6.1.1: user code runs as if idempotent).
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar

from millpond.executor.bundle.bundle import DeadLetter
from millpond.executor.computation.context import Context
from millpond.executor.computation.counters import Counters
from millpond.executor.computation.holds import Holds
from millpond.executor.computation.key_timers import KeyTimers, TimersSavepoint
from millpond.executor.computation.productions import Productions
from millpond.executor.computation.record import Records
from millpond.executor.computation.record_columns import InputTime, RecordColumns
from millpond.executor.computation.state import Encoded, KeyState
from millpond.executor.computation.timer import Timer, Timers
from millpond.executor.computation.watchdog import CodeTimeoutError, UserCodeWatchdog
from millpond.executor.event_time.late_data_horizon import slack_us
from millpond.statestore.errors import InvalidError
from millpond.statestore.rows.codec import JsonCodec

if TYPE_CHECKING:
    from millpond.executor.bundle.bundle import Bundle
    from millpond.executor.pipeline.nodes import ComputationNode

__all__ = ["FIRINGS_MAX", "KeyExecutor"]

FIRINGS_MAX: Final = 100_000
"""So many timers that were set in the bundle itself may fire for one key."""

_Result = TypeVar("_Result")
_ERROR_MAX: Final = 1_000
_DIAGNOSTICS_MAX: Final = 8_000
_VALUE_MAX: Final = 100_000


@dataclass(frozen=True, slots=True)
class _RollbackPoint:
    state: Encoded | None
    timers: TimersSavepoint
    productions: int
    counts: int


class KeyExecutor:
    """
    Runs one key after the other, with one context for all of them.

    Args:
        node: the computation whose code runs, and its handling of failures.
        bundle: the clocks.
        columns: the records.
        limit: how long the code may take for a key; ``None``: no limit.

    Attributes:
        state: the state of the key that had the last turn.
        timers: its timers.
        productions: what all keys have produced.
        counters: what they have counted.
        dead_letters: what failed.
        fired: how many timers have fired.
    """

    def __init__(
        self,
        node: ComputationNode,
        bundle: Bundle,
        columns: RecordColumns,
        limit: UserCodeWatchdog | None = None,
    ) -> None:
        self._limit = limit
        self._input = InputTime()
        self.timers: KeyTimers = KeyTimers(bundle.clocks)
        holds = Holds(self.timers, self._input)
        self.state: KeyState = KeyState(node.computation.codec, holds)
        self.productions: Productions = Productions()
        self.counters: Counters = Counters()
        self.dead_letters: list[DeadLetter] = []
        self.fired: int = 0
        self._node = node
        self._columns = columns
        self._records = Records(columns, self._input, self.state)
        self._context = Context(
            node,
            self.state,
            self.timers,
            self.productions,
            self._input,
            bundle.clocks,
            holds,
            self.counters,
        )
        self._firings_left = 0
        # A timer's output time is all that is held for it: no horizon goes below that.
        self._records_slack_us = slack_us(node.computation.late_data_horizon)
        self._timers_slack_us = self._records_slack_us if not node.horizon_us else 0

    def run(self, key: str, encoded: Encoded | None, timers: Timers, start: int, stop: int) -> Encoded | None:
        """
        Give a key its turn; its new state is returned.

        Args:
            key: the key.
            encoded: its state.
            timers: its pending timers.
            start: its first record.
            stop: one past its last record.

        Raises:
            InvalidError: the code failed and failures stop the pipeline, or timers never end.
        """
        produced, fired = len(self.productions), self.fired
        self.counters.settle()
        self._begin(key, encoded, timers, stop - start)
        try:
            if self._limit is None:
                return self._run_at_once(key, start, stop)
            return self._within_limit(lambda: self._run_at_once(key, start, stop))
        except (Exception, CodeTimeoutError):  # noqa: BLE001 - whatever it was, the careful run meets it again
            self.productions.truncate(produced)
            self.counters.truncate(0)
            self.fired = fired
        self._begin(key, encoded, timers, stop - start)
        return self._run_carefully(key, start, stop)

    def _within_limit(self, code: Callable[[], _Result]) -> _Result:
        limit = self._limit
        if limit is None:
            return code()
        try:
            limit.begin(self._context.key)
            return code()
        finally:
            limit.end()

    def _begin(self, key: str, encoded: Encoded | None, timers: Timers, records: int) -> None:
        self._context.key = key
        self.state.bind(encoded)
        self.timers.bind(timers)
        self._firings_left = FIRINGS_MAX + len(timers) + records

    # ------------------------------------------------------------- at full speed

    def _run_at_once(self, key: str, start: int, stop: int) -> Encoded | None:
        if self.timers.due:
            self._fire_due()
        if stop > start:
            self._input.slack_us = self._records_slack_us
            self._records.bind(key, start, stop)
            self._node.computation.process_records(self._context, self._records)
            if self.timers.due:
                self._fire_due()
        return self.state.settle()

    def _fire_due(self) -> None:
        self.state.end_hook()
        while (timer := self.timers.pop_due()) is not None:
            self._count_firing()
            self._process_timer(timer)
            self.state.end_hook()

    def _process_timer(self, timer: Timer) -> None:
        self._input.slack_us = self._timers_slack_us
        self._input.of_one(timer.output_at)
        self._node.computation.process_timer(self._context, timer)

    def _count_firing(self) -> None:
        self.fired += 1
        self._firings_left -= 1
        if self._firings_left < 0:
            raise InvalidError(
                "timers of a key keep setting timers that are due already",
                computation=self._node.name,
                key=self._context.key,
                firings=FIRINGS_MAX,
            )

    # ------------------------------------------------------------- one at a time

    def _run_carefully(self, key: str, start: int, stop: int) -> Encoded | None:
        self._fire_due_carefully()
        for index in range(start, stop):
            self._input.slack_us = self._records_slack_us
            self._records.bind(key, index, index + 1)
            self._try_record(index)
        self._fire_due_carefully()
        return self.state.settle()

    def _try_record(self, index: int) -> None:
        process_records, records = self._node.computation.process_records, self._records
        error = self._attempt(lambda: process_records(self._context, records))
        if error is not None:
            columns = self._columns
            self._fail(columns.streams[index], lambda: columns.value(index), columns.at[index], error)

    def _fire_due_carefully(self) -> None:
        while (timer := self.timers.pop_due()) is not None:
            self._count_firing()
            self._try_timer(timer)

    def _try_timer(self, timer: Timer) -> None:
        error = self._attempt(lambda: self._process_timer(timer))
        if error is not None:
            self._fail("", timer._asdict, timer.output_at, error)

    def _attempt(self, hook: Callable[[], None]) -> Exception | None:
        """
        Run a hook until it succeeds or its tries are used up; then its last exception.
        """
        savepoint = _RollbackPoint(
            self.state.settle(), self.timers.savepoint(), len(self.productions), len(self.counters)
        )
        error: Exception | None = None
        for _ in range(1 + self._node.retries):
            try:
                self._within_limit(hook)
                self.state.settle()
            except CodeTimeoutError as raised:
                self._go_back(savepoint)
                return self._too_slow(raised)
            except Exception as raised:  # noqa: BLE001 - user code may raise anything
                error = raised
                self._go_back(savepoint)
            else:
                self.state.end_hook()
                return None
        return error

    def _too_slow(self, raised: CodeTimeoutError) -> Exception | None:
        """
        It has hung twice by now, at full speed and alone: a third time would only take as long again.
        """
        error = None if self._limit is None else self._limit.error()
        if error is not None:
            error.__cause__ = raised
        return error

    def _go_back(self, savepoint: _RollbackPoint) -> None:
        self.state.bind(savepoint.state)
        self.timers.restore(savepoint.timers)
        self.productions.truncate(savepoint.productions)
        self.counters.truncate(savepoint.counts)

    def _fail(self, stream: str, value: Callable[[], Any], at: int, error: Exception) -> None:
        if self._node.on_error == "stop":
            self._stop(stream, error)
        self.dead_letters.append(
            DeadLetter(
                computation=self._node.name,
                stream=stream,
                key=self._context.key,
                value=_described(value),
                at=at,
                error=_one_line(error),
                diagnostics=_diagnostics(error),
            )
        )

    def _stop(self, stream: str, error: Exception) -> NoReturn:
        raise InvalidError(
            "user code failed, and on_error says to stop",
            computation=self._node.name,
            key=self._context.key,
            stream=stream,
            error=_one_line(error),
        ) from error


def _one_line(error: Exception) -> str:
    text = "".join(traceback.format_exception_only(error)).strip()
    return text.splitlines()[0][:_ERROR_MAX] if text else type(error).__name__


def _diagnostics(error: Exception) -> str:
    return "".join(traceback.format_exception(error))[-_DIAGNOSTICS_MAX:]


def _described(value: Callable[[], Any]) -> str:
    """
    A value as JSON text if it can be, else as Python writes it, else why not.
    """
    try:
        decoded = value()
    except Exception as error:  # noqa: BLE001 - an unreadable value is often why the record failed
        return f"<unreadable: {_one_line(error)}>"
    try:
        return JsonCodec().encode(decoded)
    except InvalidError:
        return repr(decoded)[:_VALUE_MAX]
