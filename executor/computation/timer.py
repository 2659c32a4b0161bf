"""
Timers: hooks that wait for a low watermark or a wall time (MillWheel §4.6).

A key's pending timers live in its row; they are known by (tag, domain), and setting one
again replaces it. In memory an interval keeps only the earliest timer of each key and
domain, in heaps: enough to say which keys are due and when the next one will be.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from operator import itemgetter
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from millpond.executor.event_time.clocks import EXACT, PercentileTimes
from millpond.statestore.rows.row import TimeDomain
from millpond.statestore.types import EventTimeMicros, WallTimeMicros

__all__ = [
    "EarliestByKey",
    "KeyTimes",
    "Timer",
    "TimerQueue",
    "Timers",
    "firing_order",
    "hold_of",
    "oldest_but",
]

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
        percentile: which watermark it waits for, in event time; 100 is the low watermark.
    """

    tag: str
    domain: TimeDomain
    at: int
    output_at: int
    percentile: float = EXACT


Timers = tuple[Timer, ...]
"""All pending timers of a key, in firing order."""

_FIRING_ORDER: Final = itemgetter(2, 1, 4, 0)
_OUTPUT_AT: Final = itemgetter(3)


def firing_order(timers: Iterable[Timer]) -> Timers:
    """
    The timers by time, then domain, then percentile, for the hasty ones come first, then tag.
    """
    return tuple(sorted(timers, key=_FIRING_ORDER))


def hold_of(timers: Iterable[Timer]) -> int | None:
    """
    The oldest output time that the timers owe; ``None`` when there are none.
    """
    return min(map(_OUTPUT_AT, timers), default=None)


def oldest_but(at: npt.NDArray[np.int64], percentiles: Iterable[float]) -> dict[float, EventTimeMicros]:
    """
    The oldest of some times when the oldest few are left out: at *p*, at most 100 - *p* percent of them.

    Args:
        at: the times, at least one.
        percentiles: above 0 and not above 100.

    Example:
        >>> oldest_but(np.array([50, 10, 20, 40]), [100, 75, 50])
        {100: 10, 75: 20, 50: 40}
    """
    ordered = np.sort(at)
    count = len(ordered)
    left_out = {each: min(int(count * (EXACT - each) / EXACT), count - 1) for each in percentiles}
    return {each: EventTimeMicros(int(ordered[place])) for each, place in left_out.items()}


@dataclass(frozen=True, slots=True)
class KeyTimes:
    """
    One time for each of some keys.
    """

    keys: pa.StringArray
    at: npt.NDArray[np.int64]


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

    def put(self, times: Mapping[str, int], without: Iterable[str] = ()) -> None:
        """
        Give keys their times, and take away those of the keys ``without``.
        """
        known, heap = self._at, self._heap
        for key in without if known else ():
            known.pop(key, None)
        if len(times) > len(known) // _REBUILD_SHARE + _STALE_MIN:
            known.update(times)
            self._clean()
            return
        for key, at in times.items():
            if known.get(key) != at:
                known[key] = at
                heappush(heap, (at, key))
        if len(heap) > 2 * len(known) + _STALE_MIN:
            self._clean()

    def fill(self, keys: Sequence[str], at: npt.NDArray[np.int64]) -> None:
        """
        Start anew with these keys and times.
        """
        self._at = dict(zip(keys, at.tolist(), strict=True))
        order = np.argsort(at)
        # A sorted list is a heap already.
        self._heap = list(zip(at[order].tolist(), [keys[place] for place in order.tolist()], strict=True))

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

    __slots__ = ("_event", "_hold", "_percentiles", "_wall")

    def __init__(self) -> None:
        self._event = EarliestByKey()
        self._percentiles: dict[float, EarliestByKey] = {}
        self._wall = EarliestByKey()
        self._hold = EarliestByKey()

    def __len__(self) -> int:
        return len(self._hold)

    def put(self, timers_by_key: Mapping[str, Timers]) -> None:
        """
        Replace what is known of the keys; each key's timers are in firing order.
        """
        event: dict[str, int] = {}
        wall: dict[str, int] = {}
        hold: dict[str, int] = {}
        percentiles: dict[float, dict[str, int]] = {}
        for key, timers in timers_by_key.items():
            if timers:
                hold[key] = timers[0].output_at if len(timers) == 1 else min(map(_OUTPUT_AT, timers))
            for timer in timers:
                if timer.domain is TimeDomain.WALL:
                    wall.setdefault(key, timer.at)
                elif timer.domain is TimeDomain.EVENT and timer.percentile == EXACT:
                    event.setdefault(key, timer.at)
                elif timer.domain is TimeDomain.EVENT:
                    percentiles.setdefault(timer.percentile, {}).setdefault(key, timer.at)
        touched = timers_by_key.keys()
        for percentile in percentiles.keys() | self._percentiles.keys():
            times = percentiles.get(percentile, {})
            self._percentiles.setdefault(percentile, EarliestByKey()).put(times, touched - times.keys())
        for queue, times in ((self._event, event), (self._wall, wall), (self._hold, hold)):
            queue.put(times, touched - times.keys() if len(queue) else ())

    def fill(
        self,
        event: KeyTimes,
        wall: KeyTimes,
        hold: KeyTimes,
        percentiles: Mapping[float, KeyTimes] | None = None,
    ) -> None:
        """
        Start anew with the earliest times of all keys.
        """
        self._percentiles = {percentile: EarliestByKey() for percentile in percentiles or {}}
        for percentile, times in (percentiles or {}).items():
            self._percentiles[percentile].fill(times.keys.to_pylist(), times.at)
        self._event.fill(event.keys.to_pylist(), event.at)
        self._wall.fill(wall.keys.to_pylist(), wall.at)
        self._hold.fill(hold.keys.to_pylist(), hold.at)

    def due_keys(
        self,
        event_us: EventTimeMicros,
        wall_us: WallTimeMicros,
        percentile_watermarks: PercentileTimes | None = None,
    ) -> set[str]:
        """
        The keys with a timer that fires at this low watermark, wall time or percentile watermark.
        """
        due = self._event.until(event_us) | self._wall.until(wall_us)
        for percentile, queue in self._percentiles.items():
            due |= queue.until((percentile_watermarks or {}).get(percentile, event_us))
        return due

    def next_percentile_timers(self) -> dict[float, EventTimeMicros]:
        """
        The earliest firing time of those that wait for each percentile watermark.
        """
        found = {percentile: queue.earliest() for percentile, queue in self._percentiles.items()}
        return {percentile: EventTimeMicros(at) for percentile, at in found.items() if at is not None}

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

    def holds(self, percentiles: Iterable[float]) -> dict[float, EventTimeMicros]:
        """
        The oldest output times that keys owe, when a share of the keys is left out of account.

        Costs a pass over all keys that owe anything: it is for pipelines that ask for percentiles.
        """
        wanted = list(percentiles)
        if not wanted or not len(self._hold):
            return {}
        return oldest_but(np.fromiter((at for _, at in self._hold.items()), np.int64), wanted)

    def waits(self, event_us: int = 0, wall_us: int = 0) -> dict[str, float]:
        """
        How long each key with timers waits for its next one, on whichever clock is nearer.
        """
        waits = {key: float(at - event_us) for key, at in self._event.items()}
        for queue in self._percentiles.values():
            for key, at in queue.items():
                waits[key] = min(waits.get(key, _NEVER), float(at - event_us))
        for key, at in self._wall.items():
            waits[key] = min(waits.get(key, _NEVER), float(at - wall_us))
        return waits
