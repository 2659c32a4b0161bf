"""The timers of the current key, while its hooks run (MillWheel §4.6)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import TypeAlias

from millpond.executor.computation.timer import Timer, Timers, firing_order, hold_of
from millpond.executor.event_time.clocks import EXACT, Clocks
from millpond.statestore.rows.row import TimeDomain

_Entry: TypeAlias = tuple[int, str, float, str, Timer]
_TimerId: TypeAlias = tuple[str, TimeDomain]


@dataclass(frozen=True, slots=True)
class TimersSavepoint:
    """A copy of the timers between two hooks, for `KeyTimers.restore`."""

    pending: dict[_TimerId, Timer]
    due: list[_Entry]


class KeyTimers:
    """Sets, replaces, deletes and fires timers; one object serves all keys of a bundle.

    Args:
        clocks: timers up to their times are due.
    """

    __slots__ = ("_clocks", "_new", "_pending", "_row", "_row_owed_at", "due")

    def __init__(self, clocks: Clocks) -> None:
        self._clocks = clocks
        self._row: Timers = ()
        self._row_owed_at: int | None = None
        self._pending: dict[_TimerId, Timer] | None = None
        self._new: list[tuple[int, Timer]] = []
        self.due: list[_Entry] = []

    def bind(self, row: Timers) -> None:
        """Switch to the timers of another key."""
        self._row = row
        self._row_owed_at = hold_of(row) if row else None
        self._pending = None
        self._new = []
        self.due = []
        for timer in row:
            self._note(timer)

    def has(
        self,
        tag: str,
        domain: TimeDomain,
        at: int,
        output_at: int,
        percentile: float = EXACT,
        holds: bool = True,
    ) -> bool:
        """Whether exactly this timer is pending."""
        pending = self._pending
        if pending is None:
            pending = self._opened()
        return pending.get((tag, domain)) == (tag, domain, at, output_at, percentile, holds)

    def set(self, timer: Timer) -> None:
        """Add a timer; replaces one of the same tag and domain."""
        self._opened()[(timer.tag, timer.domain)] = timer
        if timer.holds:
            heappush(self._new, (timer.output_at, timer))
        self._note(timer)

    def delete(self, tag: str, domain: TimeDomain) -> None:
        """Remove a timer if it is pending."""
        self._opened().pop((tag, domain), None)

    def holds(self) -> list[Timer]:
        """The holds of the state, which are stored as timers that never fire."""
        return self.pending(TimeDomain.HOLD)

    def owed_at(self) -> int | None:
        """The earliest output time that the key's timers and holds hold, including those at the start of its turn.

        The latter hold the watermark until the bundle is committed, so no consumer's watermark has passed them.
        """
        # A hook may ask for each production: neither the row's timers nor those set since are searched.
        pending, new, owed_at = self._pending or {}, self._new, self._row_owed_at
        while new and pending.get((new[0][1].tag, new[0][1].domain)) is not new[0][1]:
            heappop(new)
        if not new:
            return owed_at
        return new[0][0] if owed_at is None else min(owed_at, new[0][0])

    def pop_due(self) -> Timer | None:
        """Remove and return the first due timer by (time, domain, percentile, tag); ``None`` if none is due."""
        while self.due:
            # The entry of a timer that was deleted or replaced stays in the heap.
            timer = heappop(self.due)[4]
            if self.take(timer):
                return timer
        return None

    def take(self, timer: Timer) -> bool:
        """Remove a timer, if it is still the pending one and was not deleted or replaced."""
        pending, name = self._opened(), (timer.tag, timer.domain)
        if pending.get(name) is not timer:
            return False
        del pending[name]
        return True

    def take_due(self) -> list[Timer]:
        """All timers that are due now, in the order of `pop_due`; they stay pending, and `pop_due` no more knows them."""
        pending, due = self._opened(), sorted(self.due)
        self.due = []
        return [entry[4] for entry in due if pending.get((entry[4].tag, entry[4].domain)) is entry[4]]

    def pending(self, domain: TimeDomain) -> list[Timer]:
        """The pending timers of a domain, in no order."""
        return [timer for timer in self._all() if timer.domain is domain]

    def pending_at(self, tag: str, domain: TimeDomain) -> int | None:
        """When a pending timer fires; ``None`` if there is none of this name."""
        timer = self._opened().get((tag, domain))
        return None if timer is None else timer.at

    def changed(self) -> Timers | None:
        """All pending timers in firing order; ``None`` when they equal those in the row."""
        if self._pending is None:
            return None
        timers = firing_order(self._pending.values())
        return None if timers == self._row else timers

    def count(self) -> int:
        """How many timers are pending."""
        return len(self._row if self._pending is None else self._pending)

    def savepoint(self) -> TimersSavepoint:
        """Copy the timers for `restore`."""
        return TimersSavepoint(dict(self._opened()), list(self.due))

    def restore(self, savepoint: TimersSavepoint) -> None:
        """Undo all changes since the savepoint, which stays usable."""
        self._pending = dict(savepoint.pending)
        self._new = [(timer.output_at, timer) for timer in savepoint.pending.values() if timer.holds]
        heapify(self._new)
        self.due = list(savepoint.due)

    def _all(self) -> Iterable[Timer]:
        return self._row if self._pending is None else self._pending.values()

    def _opened(self) -> dict[_TimerId, Timer]:
        pending = self._pending
        if pending is None:
            pending = self._pending = {(timer.tag, timer.domain): timer for timer in self._row}
        return pending

    def _note(self, timer: Timer) -> None:
        if timer.at <= self._clocks.of(timer.domain, timer.percentile):
            heappush(self.due, (timer.at, timer.domain, timer.percentile, timer.tag, timer))
