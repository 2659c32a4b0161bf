"""
Timers: hooks that wait for a low watermark or a wall time (MillWheel §4.6).

A key's pending timers live in its row; they are known by (tag, domain), and setting one
again replaces it. In memory an interval keeps only the earliest timer of each key and
domain, in heaps: enough to say which keys are due and when the next one will be.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from heapq import heapify, heappop, heappush
from operator import itemgetter
from typing import Final, NamedTuple

from millpond.statestore.row import TimeDomain
from millpond.statestore.types import EventTimeMicros, WallTimeMicros

__all__ = ["EarliestByKey", "Timer", "TimerQueue", "Timers", "firing_order", "hold_of"]

_NEVER: Final = float("inf")
_STALE_MIN: Final = 1_024
"""Below so many entries a heap is not worth cleaning."""

_REBUILD_SHARE: Final = 8
"""When more than one in so many keys changes, making the heap anew is cheaper than pushing."""


class Timer(NamedTuple):
    """
    A pending timer.

    Attributes:
        tag: the user's name for it; ``""`` unless given.
        domain: the clock that it waits for.
        at: when it fires: once the domain's clock has reached this time.
        output_at: event time of what it will produce; holds the low watermark back until then.
    """

    tag: str
    domain: TimeDomain
    at: int
    output_at: int


Timers = tuple[Timer, ...]
"""All pending timers of a key, in firing order."""

_FIRING_ORDER: Final = itemgetter(2, 1, 0)
_OUTPUT_AT: Final = itemgetter(3)


def firing_order(timers: Iterable[Timer]) -> Timers:
    """
    The timers by time, then domain, then tag.
    """
    return tuple(sorted(timers, key=_FIRING_ORDER))


def hold_of(timers: Iterable[Timer]) -> int | None:
    """
    The oldest output time that the timers owe; ``None`` when there are none.
    """
    return min(map(_OUTPUT_AT, timers), default=None)


class EarliestByKey:
    """
    One time per key, the least of all at hand: a heap whose outdated entries are skipped.

    Memory is two entries per key at most, besides `_STALE_MIN`.
    """

    __slots__ = ("_at", "_heap")

    def __init__(self) -> None:
        self._at: dict[str, int] = {}
        self._heap: list[tuple[int, str]] = []

    def __len__(self) -> int:
        return len(self._at)

    def items(self) -> Iterable[tuple[str, int]]:
        """
        Every key that has a time, with it.
        """
        return self._at.items()

    def put(self, times: Mapping[str, int | None]) -> None:
        """
        Give keys their times, or none.
        """
        known, heap = self._at, self._heap
        if len(times) > len(known) // _REBUILD_SHARE + _STALE_MIN:
            self._put_many(times)
            return
        for key, at in times.items():
            if at is None:
                known.pop(key, None)
            elif known.get(key) != at:
                known[key] = at
                heappush(heap, (at, key))
        if len(heap) > 2 * len(known) + _STALE_MIN:
            self._clean()

    def _put_many(self, times: Mapping[str, int | None]) -> None:
        known = self._at
        for key, at in times.items():
            if at is None:
                known.pop(key, None)
            else:
                known[key] = at
        self._clean()

    def _clean(self) -> None:
        self._heap = [(at, key) for key, at in self._at.items()]
        heapify(self._heap)

    def earliest(self) -> int | None:
        """
        The least time of all keys.
        """
        heap = self._heap
        while heap:
            at, key = heap[0]
            if self._at.get(key) == at:
                return at
            heappop(heap)
        return None

    def until(self, bound: int) -> set[str]:
        """
        The keys whose time is not after ``bound``; nothing is taken out.
        """
        heap, found, places = self._heap, set[str](), [0]
        # A child in a heap is never earlier than its parent, so whole branches are left out.
        while places:
            place = places.pop()
            if place < len(heap) and heap[place][0] <= bound:
                at, key = heap[place]
                if self._at.get(key) == at:
                    found.add(key)
                places += (2 * place + 1, 2 * place + 2)
        return found


class TimerQueue:
    """
    When the keys of an interval want to be woken, and what they hold back.

    The timers themselves are in the rows; this has a time per key, domain and purpose.
    """

    __slots__ = ("_event", "_hold", "_wall")

    def __init__(self) -> None:
        self._event = EarliestByKey()
        self._wall = EarliestByKey()
        self._hold = EarliestByKey()

    def __len__(self) -> int:
        return len(self._hold)

    def put(self, timers_by_key: Mapping[str, Timers]) -> None:
        """
        Replace what is known of the keys; each key's timers are in firing order.
        """
        if not timers_by_key:
            return
        event: dict[str, int | None] = {}
        wall: dict[str, int | None] = {}
        hold: dict[str, int | None] = {}
        for key, timers in timers_by_key.items():
            if len(timers) == 1:
                _, domain, at, output_at = timers[0]
                is_event = domain is TimeDomain.EVENT
                event[key], wall[key], hold[key] = (
                    (at, None, output_at) if is_event else (None, at, output_at)
                )
            else:
                event[key] = _first(timers, TimeDomain.EVENT)
                wall[key] = _first(timers, TimeDomain.WALL)
                hold[key] = hold_of(timers)
        self._event.put(event)
        self._wall.put(wall)
        self._hold.put(hold)

    def due_keys(self, event_us: EventTimeMicros, wall_us: WallTimeMicros) -> set[str]:
        """
        The keys with a timer that fires at this low watermark or wall time.
        """
        return self._event.until(event_us) | self._wall.until(wall_us)

    def next_at(self, domain: TimeDomain) -> int | None:
        """
        The earliest firing time in a domain.
        """
        return (self._event if domain is TimeDomain.EVENT else self._wall).earliest()

    def hold(self) -> int | None:
        """
        The oldest output time that any timer owes.
        """
        return self._hold.earliest()

    def waits(self, event_us: int = 0, wall_us: int = 0) -> dict[str, float]:
        """
        How long each key with timers waits for its next one, on whichever clock is nearer.
        """
        waits = {key: float(at - event_us) for key, at in self._event.items()}
        for key, at in self._wall.items():
            waits[key] = min(waits.get(key, _NEVER), float(at - wall_us))
        return waits


def _first(timers: Timers, domain: TimeDomain) -> int | None:
    for timer in timers:
        if timer.domain is domain:
            return timer.at
    return None
