"""
Holds: event times that a key's state still owes something for (MillWheel §5.2).

While a state holds a time, the computation's output watermark does not pass it, and the key
may produce at it, whatever time its input has by then. Holds are kept among the key's timers,
in the same atomic row update as the state, so they survive whatever the state survives.
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

__all__ = ["Holds"]


class Holds:
    """
    The holds of the key at hand.

    Args:
        timers: the key's timers, which they are kept among.
        input_time: the time of what the code is busy with.
    """

    __slots__ = ("_input", "_timers")

    def __init__(self, timers: KeyTimers, input_time: InputTime) -> None:
        self._timers = timers
        self._input = input_time

    def set(self, at: Moment, tag: str) -> None:
        """
        Hold a time, in place of what the same tag held.

        Raises:
            InvalidError: not a time, or below both the input's and every time that the key owes.
        """
        moment = to_micros(at)
        if moment < self.floor():
            raise InvalidError("a hold may not be below the input", input_at=self._input.floor_at, at=moment)
        self._timers.set(Timer(tag, TimeDomain.HOLD, moment, moment, EXACT))

    def release(self, tag: str) -> None:
        """
        Let go of what a tag holds, if it does.
        """
        self._timers.delete(tag, TimeDomain.HOLD)

    def release_all(self) -> None:
        """
        Let go of everything.
        """
        for timer in self._timers.holds():
            self._timers.delete(timer.tag, TimeDomain.HOLD)

    def oldest(self) -> int | None:
        """
        The oldest time that is held.
        """
        return min((timer.at for timer in self._timers.holds()), default=None)

    def floor(self) -> int:
        """
        Nothing may be produced below this: the input's time, or an older one that the key owes already.

        A key owes what its state holds and what its timers are to produce.
        """
        owed, floor = self._timers.owed_at(), max(TIME_MIN_US, self._input.floor_at - self._input.slack_us)
        return floor if owed is None else min(owed, floor)
