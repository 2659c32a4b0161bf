"""A key's turn in a bundle: its due timers, its records, and the timers that these made due.

User code first runs at full speed. If it raises, the whole turn is undone and run again carefully, one record or
timer at a time with a savepoint before each, so that only the effects of the failing one are rolled back (MillWheel
§6.1.1: user code runs as if idempotent). A turn with retried dead letters is run carefully from the start.

A record that waits for the low watermark is an entry among its row's timers, because like a timer it must wake its
key, hold the output watermark and survive the process. Its domain is `TimeDomain.RECORD`, its tag the record as JSON.
"""

from __future__ import annotations

import base64
import json
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from functools import partial
from typing import Any, Final, TypeVar

import orjson
import pyarrow as pa

from millpond.executor.computation.computation import UpgradingState, upgrade
from millpond.executor.computation.context import Context, Counters, Productions
from millpond.executor.computation.quick_turn import MakesQuickTurns, QuickTurn, QuickTurns
from millpond.executor.computation.records import InputTime, RecordColumns, Records
from millpond.executor.computation.state import FormerState, KeyState, StoredState, key_state
from millpond.executor.computation.timers import KeyTimers, Timer, Timers
from millpond.executor.computation.values import PythonValues
from millpond.executor.computation.watchdog import CodeTimeoutError, UserCodeWatchdog
from millpond.executor.interval.bundle import Bundle, DeadLetter, id_base64, id_text
from millpond.executor.interval.letters import (
    RetriedLetter,
    describe_value,
    error_line,
    is_whole,
    letter_columns,
    timer_value,
    typed_text,
)
from millpond.executor.interval.table_turns import ProcessRecords, process_records_of
from millpond.executor.pipeline.nodes import ComputationNode
from millpond.executor.time.clocks import Clocks
from millpond.executor.time.instants import INSTANT_MAX_US
from millpond.statestore.errors import DataError, InvalidError
from millpond.statestore.rows.row import TimeDomain
from millpond.statestore.rows.value_text import PlainObject, typed_value
from millpond.statestore.types import TIME_MAX_US, TIME_MIN_US

_MARK: Final = "$"
_MARK_BYTES: Final = b'"$":'
_MARKED: Final = frozenset({datetime, date, time, timedelta, Decimal, bytes})
_NESTED: Final = frozenset({dict, list})
_OPTIONS: Final = (
    orjson.OPT_PASSTHROUGH_DATETIME | orjson.OPT_PASSTHROUGH_DATACLASS | orjson.OPT_PASSTHROUGH_SUBCLASS
)
_LOST: Final = "a record that waits for its turn in time has a value that no text can keep"


def waiting_timer(columns: RecordColumns, index: int, superstep: int, lag_us: int) -> Timer:
    """Return the entry of a waiting record among its key's timers; its productions may be ``lag_us`` before it.

    The superstep and the position in the bundle make its tag unique.
    """
    at, record_id = columns.at[index], columns.scoped_id(index)
    header: dict[str, Any] = {"stream": columns.streams[index], "number": [superstep, columns.sources[index]]}
    if record_id is not None:
        header["id"] = base64.b64encode(record_id).decode()
    value = columns.value(index)
    if type(value) is PlainObject:
        # The mark keeps an object with the fields of a pane from becoming a pane when it is read again.
        header["plain"], value = True, dict(value)
    described = typed_text(value)
    if not is_whole(described.types):
        raise InvalidError(_LOST, type=type(value).__qualname__)
    if described.types:
        header["types"] = dict(described.types)
    return Timer(
        tag=f'{orjson.dumps(header).decode()[:-1]},"value":{described.text}}}',
        domain=TimeDomain.RECORD,
        at=at + 1,
        output_at=max(TIME_MIN_US, at - lag_us),
    )


def _unmarked(value: Any) -> Any:
    if type(value) is list:
        return [_unmarked(part) for part in value]
    if type(value) is not dict:
        return value
    if _MARK in value:
        kind, text = value[_MARK]
        return typed_value(text, {"": kind})
    return {name: _unmarked(part) if type(part) in _NESTED else part for name, part in value.items()}


def waiting_columns(timers: Sequence[Timer]) -> RecordColumns:
    """Return the records that wait under these entries, in the same order; none of them is late."""
    entries = [_read(timer) for timer in timers]
    ids = [base64.b64decode(entry["id"]) if "id" in entry else None for entry in entries]
    return RecordColumns(
        at=[timer.at - 1 for timer in timers],
        streams=[entry["stream"] for entry in entries],
        sources=range(len(entries)),
        values=PythonValues([entry["value"] for entry in entries]),
        ids=pa.array(ids, pa.binary()),
        watermark=TIME_MIN_US,
    )


def _read(timer: Timer) -> dict[str, Any]:
    try:
        # A value with types takes another parser: it may have integers of more than 64 bits.
        entry: dict[str, Any] = json.loads(timer.tag) if '"types":' in timer.tag else orjson.loads(timer.tag)
        # Earlier versions marked each part of another type.
        if "marks" in entry:
            entry["value"] = _unmarked(entry["value"])
        if "types" in entry:
            entry["value"] = typed_value(entry["value"], entry["types"])
        if "plain" in entry:
            entry["value"] = PlainObject(entry["value"])
    except (ValueError, LookupError, TypeError) as cause:
        raise DataError("a waiting record cannot be read", at=timer.at - 1, tag=timer.tag[:200]) from cause
    return entry


# For one key, within a second of event time, and only timers that were set in the bundle itself.
FIRINGS_MAX: Final = 100_000
_PROGRESS_US: Final = 1_000_000

# Encoding a state once more costs as much as setting it: the first turns of a bundle show what the code does.
_WATCHED_TURNS: Final = 100

_Result = TypeVar("_Result")
_DIAGNOSTICS_MAX: Final = 8_000
# Code counts records that it dropped because they were late.
_DROPPED: Final = "dropped"


@dataclass(frozen=True, slots=True)
class Failure:
    """The exception of a hook's last attempt, and the number of that attempt."""

    error: BaseException
    attempt: int


class KeyExecutor:
    """Runs one key after the other, with one context for all of them.

    ``slack_us`` is how far the productions of a record may lie before it.

    Attributes:
        waited: the number of records that have begun to wait for their turn in time.
        resumed: the number of waiting records that were processed.
        unset: a key whose state was changed in place and not set.
        retried: the number of retried dead letters, ``retried_records`` of which were records.
    """

    def __init__(
        self,
        node: ComputationNode,
        bundle: Bundle,
        columns: RecordColumns,
        slack_us: int,
        limit: UserCodeWatchdog | None = None,
    ) -> None:
        computation = node.computation
        self._bundle = bundle
        clocks = Clocks(
            watermark=bundle.plan.watermark,
            wall_time=bundle.wall_time,
            percentile_watermarks=bundle.plan.percentile_watermarks,
        )
        self._limit = limit
        self._node = node
        self._process_records: ProcessRecords = process_records_of(computation)
        self._input = InputTime()
        self.timers: KeyTimers = self._make_timers(clocks)
        self.state: KeyState = (
            UpgradingState(computation.codec, self.timers, self._input, self._upgrade)
            if computation.state_version
            else key_state(computation.codec, self.timers, self._input)
        )
        self.productions: Productions = Productions()
        self.counters: Counters = Counters()
        self.dead_letters: list[DeadLetter] = []
        self.fired: int = 0
        self.waited: int = 0
        self.resumed: int = 0
        self.retried: int = 0
        self.retried_records: int = 0
        self._letters: dict[str, list[RetriedLetter]] = {}
        for letter in bundle.plan.retried:
            self._letters.setdefault(letter.key, []).append(letter)
        self._context = Context(
            node, self.state, self.timers, self.productions, self._input, clocks, self.counters
        )
        self._columns = columns
        self._records = self._make_records(columns)
        if bundle.plan.late_before is not None:
            self._context.late_before = bundle.plan.late_before
        self.unset: str | None = None
        self.state.is_watched = True
        self._watched_left = _WATCHED_TURNS
        self._firings_max = self._firings_left = 0
        self._progress_at: int = TIME_MIN_US
        # The end of the times at which a firing counts as progress, and of those at which it may set event timers.
        self._last_at = TIME_MAX_US if bundle.plan.last_event is None else bundle.plan.last_event
        ends = node.drain == "last_event" and node.sets_timers
        self._over_after = self._last_at if ends else TIME_MAX_US
        self._watermark = clocks.watermark
        self._records_slack_us = slack_us
        self._quick = self._quick_turns(clocks)
        self._stream_names: dict[str, str] = dict(node.production_names)
        # The watermark is held at a timer's output time, so only an unbounded horizon may go below it.
        self._timers_slack_us = slack_us if slack_us == TIME_MAX_US else 0

    def _quick_turns(self, clocks: Clocks) -> QuickTurns | None:
        # At the end of the input, within time limits and in cycles hooks have rules that a quick turn has not.
        is_open = self._over_after == TIME_MAX_US and self._limit is None and not self._node.cycle
        computation = self._node.computation
        if type(self) is not KeyExecutor or not is_open or not isinstance(computation, MakesQuickTurns):
            return None
        return computation.quick_turns(clocks, self._columns)

    def _upgrade(self, former: FormerState) -> FormerState:
        return upgrade(self._node.computation, self._node.name, self._context.key, former)

    def _make_timers(self, clocks: Clocks) -> KeyTimers:
        return KeyTimers(clocks)

    def _make_records(self, columns: RecordColumns) -> Records:
        return Records(columns, self._input)

    def run(
        self, key: str, encoded: StoredState | None, timers: Timers, start: int, stop: int
    ) -> StoredState | None:
        letters = self._letters.get(key, ())
        if self._quick is not None and not letters:
            turn = self._quick.turn(key, encoded, timers, start, stop)
            if turn is not None:
                return self._take(key, turn)
        produced, fired = len(self.productions.at), self.fired
        self.counters.settle()
        self._begin(key, encoded, timers, stop - start + len(letters))
        if letters:
            self._retry(key, letters)
            return self._run_carefully(key, start, stop)
        settled, has_failed = None, False
        try:
            if self._limit is None:
                settled = self._run_at_once(key, start, stop)
            else:
                settled = self._within_limit(lambda: self._run_at_once(key, start, stop))
        except (Exception, CodeTimeoutError):  # noqa: BLE001 - the careful run raises it again
            has_failed = True
        if not has_failed and self._context.mistake is None:
            if self.state.is_watched:
                self._watch(key)
            return settled
        # The turn must leave no trace: otherwise the careful run would repeat its effects.
        self._context.state = self.state
        self.productions.truncate(produced)
        self.counters.truncate(0)
        self.fired = fired
        self._begin(key, encoded, timers, stop - start)
        return self._run_carefully(key, start, stop)

    def _take(self, key: str, turn: QuickTurn) -> StoredState | None:
        self.fired += turn.fired
        for stream, text, at in turn.productions:
            self.productions.append_text(self._stream_names[stream], key, text, at)
        self.timers.replace(turn.timers)
        return turn.state

    def _watch(self, key: str) -> None:
        self._watched_left -= 1
        if self._context.state is not self.state or self.state.is_changed_in_place():
            self._context.state = self.state
            self.unset = key
            self._watched_left = 0
        self.state.is_watched = self._watched_left > 0

    def _within_limit(self, code: Callable[[], _Result]) -> _Result:
        limit = self._limit
        if limit is None:
            return code()
        try:
            limit.begin(self._context.key)
            return code()
        finally:
            limit.end()

    def _begin(self, key: str, encoded: StoredState | None, timers: Timers, records: int) -> None:
        self._context.key = key
        self._context.mistake = None
        self.state.bind(encoded)
        self.timers.bind(timers)
        self._firings_max = self._firings_left = FIRINGS_MAX + len(timers) + records
        self._progress_at = TIME_MIN_US

    # ------------------------------------------------------------- at full speed

    def _run_at_once(self, key: str, start: int, stop: int) -> StoredState | None:
        if self.timers.due:
            self._fire_due(self._process_timer)
        if stop > start:
            self._input.slack_us = self._records_slack_us
            self._records.bind(key, start, stop)
            self._process_records(self._context, self._records)
            if self.timers.due:
                self._fire_due(self._process_timer)
        return self.state.settle()

    def _fire_due(self, fire: Callable[[Timer], None]) -> None:
        while (timer := self.timers.pop_due()) is not None:
            self._count_firing(timer)
            fire(timer)

    def _process_timer(self, timer: Timer) -> None:
        if timer.domain is TimeDomain.RECORD:
            # The record began to wait when the computation was still `time_sorted`.
            self._input.slack_us = self._records_slack_us
            records = Records(waiting_columns([timer]), self._input)
            records.bind(self._context.key, 0, 1)
            self._process_records(self._context, records)
            return
        # At the end of the input the watermark is beyond the times of records.
        if not timer.holds and timer.output_at < self._watermark <= INSTANT_MAX_US:
            # Consumers' watermarks may have passed the output time of a timer without a hold.
            timer = timer._replace(output_at=self._watermark)
        self._input.slack_us = self._timers_slack_us
        self._input.at = self._input.floor_at = timer.output_at
        # Otherwise timers that renew themselves would fire for ever once the input has ended.
        self.timers.are_over = timer.at > self._over_after and timer.domain is TimeDomain.EVENT
        try:
            self._node.computation.process_timer(self._context, timer)
        finally:
            self.timers.are_over = False

    def _count_firing(self, timer: Timer) -> None:
        self.fired += 1
        self._firings_left -= 1
        if self._progress_at + _PROGRESS_US <= timer.at <= self._last_at:
            # A beat over a long silence may fire any number of times, because it comes to an end.
            self._progress_at, self._firings_left = timer.at, self._firings_max
        if self._firings_left < 0:
            reason = (
                'timers of a key keep setting timers after the last event: leave out drain="all", so that they end'
                if timer.at > self._last_at and self._node.drain == "all"
                else "timers of a key keep setting timers that are already due"
            )
            raise InvalidError(
                reason, computation=self._node.name, key=self._context.key, firings=FIRINGS_MAX
            )

    # ------------------------------------------------------------- one at a time

    def _run_carefully(self, key: str, start: int, stop: int) -> StoredState | None:
        self._fire_due(self._try_timer)
        for index in range(start, stop):
            self._try_record(key, self._records, index)
        self._fire_due(self._try_timer)
        return self.state.settle()

    def _try_record(self, key: str, records: Records, index: int) -> None:
        self._input.slack_us = self._records_slack_us
        records.bind(key, index, index + 1)
        process_records, value = self._process_records, partial(records.columns.value, index)
        failure = self._attempt(lambda: process_records(self._context, records), value)
        if failure is not None:
            self._fail_record(records.columns, index, failure)

    def _fail_record(self, columns: RecordColumns, index: int, failure: Failure, *, retried: int = 0) -> None:
        value = partial(columns.value, index)
        self._fail(
            columns.streams[index], value, columns.at[index], failure, columns.id(index), retried=retried
        )

    def _try_timer(self, timer: Timer, *, retried: int = 0) -> None:
        if timer.domain is TimeDomain.RECORD:
            self._try_record(self._context.key, Records(waiting_columns([timer]), self._input), 0)
            return
        failure = self._attempt(lambda: self._process_timer(timer), partial(timer_value, timer))
        if failure is not None:
            self._fail("", partial(timer_value, timer), timer.output_at, failure, retried=retried)

    # ------------------------------------------------------------- dead letters, once more

    def _retry(self, key: str, letters: Sequence[RetriedLetter]) -> None:
        """Give the code the records and timers of dead letters, before all else of the turn.

        They keep their times, so their productions may be late, like a late record's productions.
        """
        for letter in letters:
            self.retried += 1
            if letter.timer is None:
                self.retried_records += 1
                self._retry_record(key, letter)
            else:
                self._count_firing(letter.timer)
                self._try_timer(letter.timer, retried=letter.retried)

    def _retry_record(self, key: str, letter: RetriedLetter) -> None:
        columns = letter_columns(letter, self._watermark, with_id=self._node.exactly_once)
        records = Records(columns, self._input)

        def process() -> None:
            counted = len(self.counters)
            self._process_records(self._context, records)
            if self.counters.has(_DROPPED, counted):
                # Otherwise the retry would count as a success and lose the record.
                raise InvalidError("the record comes too late: the code drops it, so it stays a dead letter")

        self._input.slack_us = self._records_slack_us
        records.bind(key, 0, 1)
        failure = self._attempt(process, partial(columns.value, 0))
        if failure is not None:
            self._fail_record(columns, 0, failure, retried=letter.retried)

    def _attempt(self, hook: Callable[[], None], value: Callable[[], Any]) -> Failure | None:
        """Run a hook until it succeeds or has no attempts left; return the last failure.

        ``value`` reads the value of the hook's input.
        """
        state, timers = self.state.settle(), self.timers.savepoint()
        produced, counted = len(self.productions.at), len(self.counters)
        failure: Failure | None = None
        for attempt in range(1, 2 + self._node.retries):
            failure = None
            try:
                self._within_limit(hook)
                self.state.settle()
            except (Exception, CodeTimeoutError) as raised:  # noqa: BLE001 - user code may raise anything
                failure = Failure(raised, attempt)
                self.state.bind(state)
                self.timers.restore(timers)
                self.productions.truncate(produced)
                self.counters.truncate(counted)
                if self._limit is not None and isinstance(raised, CodeTimeoutError):
                    # It exceeded its limit at full speed and alone, so a third try would only cost the limit again.
                    error = self._limit.error()
                    error.__cause__ = raised
                    return Failure(error, attempt)
            # The run ends if the code has used what its program does not declare, even if it caught the exception.
            mistake, self._context.mistake = self._context.mistake, None
            # A name from the input is the input's mistake: code that routes by a field cannot know all names.
            if mistake is not None and (
                mistake.name is None or json.dumps(mistake.name) not in describe_value(value).text
            ):
                raise mistake.error
            if failure is None:
                return None
        return failure

    def _fail(
        self,
        stream: str,
        value: Callable[[], Any],
        at: int,
        failure: Failure,
        record_id: bytes | None = None,
        *,
        retried: int = 0,
    ) -> None:
        # A letter that fails again stays a letter, so its retry never stops a run.
        if self._node.on_error == "stop" and not retried:
            raise InvalidError(
                "user code failed, and on_error says to stop",
                computation=self._node.name,
                key=self._context.key,
                stream=stream,
                error=error_line(failure.error),
            ) from failure.error
        described = describe_value(value)
        self.dead_letters.append(
            DeadLetter(
                computation=self._node.name,
                stream=stream,
                key=self._context.key,
                value=described.text,
                value_types=described.types,
                at=at,
                error=error_line(failure.error),
                diagnostics="".join(traceback.format_exception(failure.error))[-_DIAGNOSTICS_MAX:],
                id=id_text(record_id),
                id_base64=id_base64(record_id),
                attempt=failure.attempt,
                retried=retried,
            )
        )


class MicroBatchExecutor(KeyExecutor):
    """Runs a key's turn as Spark's stateful operators do: all records as one call, then the timers that are due then.

    As in Spark the due timers are looked up first: a timer fires even if another deletes it, and the timers that they
    set wait for the next turn. Each is pending until its hook has returned, so a timer that is set again with the
    same time is gone afterwards.
    """

    def _make_timers(self, clocks: Clocks) -> KeyTimers:
        # Spark's watermark begins at 0, so a timer that is set to the first watermark is due.
        return KeyTimers(replace(clocks, watermark=max(clocks.watermark, 0)))

    def _run_at_once(self, key: str, start: int, stop: int) -> StoredState | None:
        if stop > start:
            self._bind_records(key, start, stop)
            self._node.computation.process_records(self._context, self._records)
        for timer in self.timers.take_due():
            self._count_firing(timer)
            self._process_timer(timer)
            self.timers.take(timer)
        return self.state.settle()

    def _run_carefully(self, key: str, start: int, stop: int) -> StoredState | None:
        if stop > start:
            self._bind_records(key, start, stop)
            process_records, columns = self._node.computation.process_records, self._columns
            failure = self._attempt(
                lambda: process_records(self._context, self._records),
                lambda: [columns.value(index) for index in range(start, stop)],
            )
            if failure is not None:
                # Only the code knows which record failed, and its effects are undone: so all become dead letters.
                for index in range(start, stop):
                    self._fail_record(columns, index, failure)
        for timer in self.timers.take_due():
            self._count_firing(timer)
            self._try_timer(timer)
            self.timers.take(timer)
        return self.state.settle()

    def _bind_records(self, key: str, start: int, stop: int) -> None:
        self._input.slack_us = self._records_slack_us
        self._records.bind(key, start, stop)
