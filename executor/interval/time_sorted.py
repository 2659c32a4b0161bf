"""A key's turn in the order of time: its records and its event timers one by one, in whatever order they arrived.

Up to a time that no later record can precede, user code gets a key's inputs in the order of event times: records
that waited in the row, records of this bundle, and timers, with a timer before a record of the same time. Records
after that time wait in the row (`millpond.executor.interval.key_executor`). User code sees an order that follows from
the times alone, so it does not depend on how the input was cut into bundles.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush
from itertools import groupby
from operator import attrgetter, itemgetter
from typing import Final

from millpond.executor.computation.computation import Computation
from millpond.executor.computation.context import Context
from millpond.executor.computation.records import InputTime, Record, RecordColumns, Records
from millpond.executor.computation.state import StoredState
from millpond.executor.computation.timers import KeyTimers, Timer, Timers, TimersSavepoint, firing_order
from millpond.executor.interval.key_executor import Failure, KeyExecutor, waiting_columns, waiting_timer
from millpond.executor.time.clocks import EXACT, Clocks
from millpond.statestore.errors import InvalidError
from millpond.statestore.rows.row import TimeDomain
from millpond.statestore.types import TIME_MAX_US, EventTimeMicros

_FIRING_TIME: Final = attrgetter("at")


class _TimeSortedTimers(KeyTimers):
    """The timers of a key, with event timers that take their turn among its records, and the waiting records.

    Unlike in `KeyTimers`, a time that was held only at the start of the turn is no permitted output time: where a
    turn starts depends on how the input was cut.

    Attributes:
        event_due: the event timers up to ``until``, which are due, as a heap.
        ready: the entries of the waiting records before ``until``, whose turn has come.
    """

    __slots__ = ("_still", "_stored", "_until", "added", "event_due", "ready")

    def __init__(self, clocks: Clocks, until: int) -> None:
        self._until = until
        self.event_due: list[tuple[int, str, Timer]] = []
        super().__init__(clocks)

    def bind(self, row: Timers) -> None:
        waiting = tuple(timer for timer in row if timer.domain is TimeDomain.RECORD)
        self.event_due.clear()
        super().bind(
            tuple(timer for timer in row if timer.domain is not TimeDomain.RECORD) if waiting else row
        )
        self._stored = row
        self._row_owed_at = None
        if self._row:
            self._new = [(timer.output_at, timer) for timer in self._opened().values() if timer.holds]
            heapify(self._new)
        ends = bisect_right(waiting, self._until, key=_FIRING_TIME)
        self.ready: tuple[Timer, ...] = waiting[:ends]
        self._still = waiting[ends:]
        self.added: list[Timer] = []

    @property
    def waiting(self) -> int:
        return len(self._still) + len(self.added)

    def pop_event_due(self, limit: int) -> Timer | None:
        due = self.event_due
        while due and due[0][0] <= limit:
            timer = heappop(due)[2]
            if self.take(timer):
                return timer
        return None

    def changed(self) -> Timers | None:
        """Return all pending timers and waiting records by time; ``None`` when they equal the row's."""
        if not (self.ready or self.added):
            return super().changed() if not self._still else self._merged(super().changed())
        return self._merged(self._row if self._pending is None else firing_order(self._pending.values()))

    def _merged(self, timers: Timers | None) -> Timers | None:
        if timers is None:
            return None
        merged = tuple(sorted((*timers, *self._still, *self.added), key=_FIRING_TIME))
        return None if merged == self._stored else merged

    def restore(self, savepoint: TimersSavepoint) -> None:
        super().restore(savepoint)
        self.event_due.clear()
        for timer in savepoint.pending.values():
            if _is_event(timer):
                self._note(timer)

    def _note(self, timer: Timer) -> None:
        if not _is_event(timer):
            super()._note(timer)
        elif timer.at <= self._until:
            heappush(self.event_due, (timer.at, timer.tag, timer))


def _is_event(timer: Timer) -> bool:
    return timer.domain is TimeDomain.EVENT and timer.percentile == EXACT


class _TimeSortedRecords(Records):
    """Records, each after the timers that are due before it and with its own time as the watermark.

    ``fire`` fires the timers of ``due`` up to a time.
    """

    __slots__ = ("_context", "_due", "_fire")

    def __init__(
        self,
        columns: RecordColumns,
        input_time: InputTime,
        *,
        context: Context,
        due: list[tuple[int, str, Timer]],
        fire: Callable[[int], None],
    ) -> None:
        super().__init__(columns, input_time)
        self._context = context
        self._due = due
        self._fire = fire

    def bind(self, key: str, start: int, stop: int) -> None:
        super().bind(key, start, stop)
        self._context.watermark = EventTimeMicros(self._columns.at[start])

    def one_by_one(self) -> Iterator[Record]:
        """Iterate the records, each as a separate input, after the timers that come before it."""
        # A copy of `Records.one_by_one` with a check of the timers, because a call per record would cost too much.
        input_time, context = self._input, self._context
        new, columns, key = Record.__new__, self._columns, self._key
        at, sources, due = columns.at, columns.sources, self._due
        for index in range(self._start, self._stop):
            moment = at[index]
            if due and due[0][0] <= moment:
                self._fire(moment)
            record = new(Record)
            record.key = key
            input_time.at = input_time.floor_at = moment
            record.at = context.watermark = moment  # type: ignore[assignment]
            record._columns = columns  # noqa: SLF001 - as there
            record._index = index  # noqa: SLF001
            if columns.values_are_wanted:
                try:
                    record.value = columns.read(sources[index])
                except Exception:  # noqa: BLE001 - as there
                    columns.values_are_wanted = False
            yield record


class TimeSortedExecutor(KeyExecutor):
    """Runs one key after the other, each in the order of time; see `KeyExecutor`."""

    timers: _TimeSortedTimers

    def _make_timers(self, clocks: Clocks) -> KeyTimers:
        self._until = self._bundle.plan.until
        return _TimeSortedTimers(clocks, self._until)

    def _make_records(self, columns: RecordColumns) -> Records:
        due = self.timers.event_due
        return _TimeSortedRecords(columns, self._input, context=self._context, due=due, fire=self._fire_until)

    def run(
        self, key: str, encoded: StoredState | None, timers: Timers, start: int, stop: int
    ) -> StoredState | None:
        settled = super().run(key, encoded, timers, start, stop)
        self.waited: int = self.waited + len(self.timers.added)
        self.resumed: int = self.resumed + len(self.timers.ready)
        return settled

    def _begin(self, key: str, encoded: StoredState | None, timers: Timers, records: int) -> None:
        super()._begin(key, encoded, timers, records)
        self._context.watermark = EventTimeMicros(self._watermark)

    # ------------------------------------------------------------- which records, in which order

    def _ready(self, start: int, stop: int) -> tuple[list[tuple[Records, int, int]], int]:
        """Return the records whose turn has come, in order, and the first of the bundle's records that must wait.

        They come as ranges of consecutive records in the same columns.
        """
        first_waiting = bisect_left(self._columns.at, self._until, start, stop)
        ready = []
        if not self.timers.ready:
            if first_waiting > start:
                ready.append((self._records, start, first_waiting))
            return ready, first_waiting
        waiting = self._make_records(waiting_columns(self.timers.ready))
        ranked = [
            *self._ranked(waiting, 0, len(self.timers.ready)),
            *self._ranked(self._records, start, first_waiting),
        ]
        # Records that waited arrived earlier, so they come first among records of one time and stream.
        ranked.sort(key=itemgetter(0, 1))
        # Within a range, the index in the columns rises with the position in the order.
        for _, group in groupby(
            enumerate(ranked), key=lambda entry: (id(entry[1][2]), entry[1][3] - entry[0])
        ):
            run = [record for _, record in group]
            ready.append((run[0][2], run[0][3], run[-1][3] + 1))
        return ready, first_waiting

    def _ranked(self, records: Records, start: int, stop: int) -> Iterator[tuple[int, int, Records, int]]:
        at, streams, rank_of = records.columns.at, records.columns.streams, self._node.rank
        return ((at[index], rank_of(streams[index]), records, index) for index in range(start, stop))

    # ------------------------------------------------------------- at full speed

    def _run_at_once(self, key: str, start: int, stop: int) -> StoredState | None:
        if self.timers.due:
            self._fire_due(self._process_timer)
        ready, first_waiting = self._ready(start, stop)
        self._input.slack_us = self._records_slack_us
        is_batch = type(self._node.computation).process_records is not Computation.process_records
        for records, first, last in ready:
            if not is_batch:
                records.bind(key, first, last)
                self._node.computation.process_records(self._context, records)
                continue
            # Code that takes several records at once gets one, because it may set a timer that is due before the next.
            for index in range(first, last):
                self._fire_until(records.columns.at[index])
                records.bind(key, index, index + 1)
                self._node.computation.process_records(self._context, records)
        self._fire_rest(self._process_timer)
        self._check_room(stop - first_waiting)
        for index in range(first_waiting, stop):
            self._keep(index)
        return self.state.settle()

    def _fire_until(self, limit: int, fire: Callable[[Timer], None] | None = None) -> None:
        due = self.timers.event_due
        if not due or due[0][0] > limit:
            return
        while (timer := self.timers.pop_event_due(limit)) is not None:
            self._count_firing(timer)
            self._context.watermark = EventTimeMicros(timer.at)
            (fire or self._process_timer)(timer)
        self._input.slack_us = self._records_slack_us

    def _fire_rest(self, fire: Callable[[Timer], None]) -> None:
        """Fire the timers after the last record, and timers of other clocks that have become due."""
        # A superstep whose records are the last does not know yet how far they reach: the next one fires the rest.
        until = self._watermark if self._until == TIME_MAX_US else self._until
        while True:
            self._fire_until(until, fire)
            if not self.timers.due:
                return
            self._context.watermark = EventTimeMicros(until)
            self._fire_due(fire)

    # ------------------------------------------------------------- one at a time

    def _run_carefully(self, key: str, start: int, stop: int) -> StoredState | None:
        self._fire_due(self._try_timer)
        ready, first_waiting = self._ready(start, stop)
        for records, first, last in ready:
            for index in range(first, last):
                self._fire_until(records.columns.at[index], self._try_timer)
                self._try_record(key, records, index)
        self._fire_rest(self._try_timer)
        self._check_room(stop - first_waiting)
        for index in range(first_waiting, stop):
            try:
                self._keep(index)
            except Exception as failure:  # noqa: BLE001 - reading a value may raise anything
                self._fail_record(self._columns, index, Failure(failure, 1))
        return self.state.settle()

    # ------------------------------------------------------------- what waits

    def _check_room(self, more: int) -> None:
        most = self._node.computation.waiting_max
        if more and self.timers.waiting + more > most:
            raise InvalidError(
                "more records of a key wait for the watermark than waiting_max of its computation allows",
                computation=self._node.name,
                key=self._context.key,
                waiting=self.timers.waiting + more,
                waiting_max=most,
            )

    def _keep(self, index: int) -> None:
        superstep, horizon_us = self._bundle.superstep, self._node.horizon_us
        self.timers.added.append(waiting_timer(self._columns, index, superstep, horizon_us))
