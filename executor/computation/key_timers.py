"""
The timers of the key at hand, while its hooks run (MillWheel §4.6).
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush
from typing import TypeAlias

from millpond.executor.computation.timer import Timer, Timers, firing_order, hold_of
from millpond.executor.event_time.clocks import EXACT, Clocks
from millpond.statestore.rows.row import TimeDomain

__all__ = ["KeyTimers", "TimersSavepoint"]

_Entry: TypeAlias = tuple[int, str, float, str, Timer]
_TimerId: TypeAlias = tuple[str, TimeDomain]


@dataclass(frozen=True, slots=True)
class TimersSavepoint:
    """
    Timers as they stood between two hooks.
    """

    pending: dict[_TimerId, Timer]
    due: list[_Entry]


class KeyTimers:
    """
    Set, replaced, deleted, fired; one object for all keys of a bundle.

    Args:
        clocks: timers up to what they show are due.
    """

    __slots__ = ("_clocks", "_pending", "_row", "due")

    def __init__(self, clocks: Clocks) -> None:
        self._clocks = clocks
        self._row: Timers = ()
        self._pending: dict[_TimerId, Timer] | None = None
        self.due: list[_Entry] = []

    def bind(self, row: Timers) -> None:
        """
        Become the timers of another key.
        """
        self._row = row
        self._pending = None
        self.due = []
        for timer in row:
            self._note(timer)

    def has(self, tag: str, domain: TimeDomain, at: int, output_at: int, percentile: float = EXACT) -> bool:
        """
        Whether this very timer is pending.
        """
        pending = self._pending
        if pending is None:
            pending = self._opened()
        return pending.get((tag, domain)) == (tag, domain, at, output_at, percentile)

    def set(self, timer: Timer) -> None:
        """
        Add the timer, replacing the one of the same tag and domain.
        """
        self._opened()[(timer.tag, timer.domain)] = timer
        self._note(timer)

    def delete(self, tag: str, domain: TimeDomain) -> None:
        """
        Remove the timer, if it is pending.
        """
        self._opened().pop((tag, domain), None)

    def holds(self) -> list[Timer]:
        """
        What the state holds: timers that never fire.
        """
        pending = self._row if self._pending is None else self._pending.values()
        return [timer for timer in pending if timer.domain is TimeDomain.HOLD]

    def owed_at(self) -> int | None:
        """
        The oldest output time that the key owes, or owed when its turn began.

        The bundle's commit settles what it owed then, so nobody's watermark has passed it yet.
        """
        row = self._row
        return hold_of(row if self._pending is None else (*row, *self._pending.values()))

    def pop_due(self) -> Timer | None:
        """
        Take out the first due timer by (time, domain, percentile, tag).
        """
        pending = self._opened()
        while self.due:
            timer = heappop(self.due)[4]
            name = (timer.tag, timer.domain)
            # An entry that was deleted or replaced since is no longer the pending object.
            if pending.get(name) is timer:
                del pending[name]
                return timer
        return None

    def changed(self) -> Timers | None:
        """
        All pending timers in firing order; ``None`` when they are the row's.
        """
        if self._pending is None:
            return None
        timers = firing_order(self._pending.values())
        return None if timers == self._row else timers

    def count(self) -> int:
        """
        How many timers are pending.
        """
        return len(self._row if self._pending is None else self._pending)

    def savepoint(self) -> TimersSavepoint:
        """
        What `restore` goes back to.
        """
        return TimersSavepoint(dict(self._opened()), list(self.due))

    def restore(self, savepoint: TimersSavepoint) -> None:
        """
        Undo what was done since the savepoint; it may be used again.
        """
        self._pending = dict(savepoint.pending)
        self.due = list(savepoint.due)

    def _opened(self) -> dict[_TimerId, Timer]:
        pending = self._pending
        if pending is None:
            pending = self._pending = {(timer.tag, timer.domain): timer for timer in self._row}
        return pending

    def _note(self, timer: Timer) -> None:
        if timer.at <= self._clocks.of(timer.domain, timer.percentile):
            heappush(self.due, (timer.at, timer.domain, timer.percentile, timer.tag, timer))
