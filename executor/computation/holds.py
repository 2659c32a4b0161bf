"""Holds: event times at which a key's state may still produce (MillWheel §5.2).

While a state holds a time, the computation's output watermark does not pass it, and the key may
produce at it, however late its input is by then. Holds are stored among the key's timers, in the same
atomic row update as the state, so they are as durable as the state.
"""

from __future__ import annotations

from millpond.executor.computation.key_timers import KeyTimers
from millpond.executor.computation.record_columns import InputTime
from millpond.executor.computation.timer import Timer
from millpond.executor.event_time.clocks import EXACT
from millpond.executor.event_time.instants import Moment, to_micros
from millpond.statestore.errors import InvalidError
from millpond.statestore.rows.row import TimeDomain
from millpond.statestore.types import TIME_MIN_US


class Holds:
    """The holds of the current key.

    Args:
        timers: the key's timers, among which holds are stored.
        input_time: the time of the record or timer that user code is processing.
    """

    __slots__ = ("_input", "_timers")

    def __init__(self, timers: KeyTimers, input_time: InputTime) -> None:
        self._timers = timers
        self._input = input_time

    def set(self, at: Moment, tag: str) -> None:
        """Hold a time; replaces a hold of the same tag.

        Raises:
            InvalidError: ``at`` is not a time, or is before `floor`.
        """
        moment = to_micros(at)
        if moment < self.floor():
            raise InvalidError("a hold may not be before the input", input_at=self._input.floor_at, at=moment)
        self._timers.set(Timer(tag, TimeDomain.HOLD, moment, moment, EXACT))

    def release(self, tag: str) -> None:
        """Release the hold called ``tag``; does nothing if there is none."""
        self._timers.delete(tag, TimeDomain.HOLD)

    def release_all(self) -> None:
        """Release every hold."""
        for timer in self._timers.holds():
            self._timers.delete(timer.tag, TimeDomain.HOLD)

    def oldest(self) -> int | None:
        """The earliest held time; ``None`` without a hold."""
        return min((timer.at for timer in self._timers.holds()), default=None)

    def floor(self) -> int:
        """The earliest time that may be produced at: the input's less its slack, or an earlier one that is held.

        A key holds the times of its holds and the output times of those timers that hold them.
        """
        owed, floor = self._timers.owed_at(), max(TIME_MIN_US, self._input.floor_at - self._input.slack_us)
        return floor if owed is None else min(owed, floor)
