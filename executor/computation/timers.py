"""Timers: hooks that wait for a low watermark or a wall time (MillWheel §4.6).

A key's pending timers are stored in its row and identified by (tag, domain). In memory an interval keeps only
the earliest timer of each key and domain, in heaps that give the due keys and the next firing time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from operator import itemgetter
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from millpond.executor.time.clocks import EXACT, Clocks, PercentileTimes
from millpond.statestore.rows.row import TimeDomain
from millpond.statestore.types import EventTimeMicros, WallTimeMicros

_NEVER: Final = float("inf")
_STALE_MIN: Final = 1_024
_REBUILD_SHARE: Final = 8


class Timer(NamedTuple):
    """A timer, as `Context.set_timer` set it (MillWheel §4.6); times are in microseconds.

    Attributes:
        at: when it fires: once the clock of ``domain`` has reached this time.
        output_at: the event time of its productions. In a fired timer that does not hold the
            output watermark, it is at least the input watermark.
        percentile: the event-time watermark that it waits for; 100 is the low watermark.
        holds: the output watermark stays at ``output_at`` until the timer has fired.
    """

    tag: str
    domain: TimeDomain
    at: int
    output_at: int
    percentile: float = EXACT
    holds: bool = True


Timers = tuple[Timer, ...]
"""All pending timers of a key, in firing order."""

_FIRING_ORDER: Final = itemgetter(2, 1, 4, 0)


def firing_order(timers: Iterable[Timer]) -> Timers:
    """Return the timers by time, then domain, then percentile (lower ones fire first), then tag."""
    return tuple(sorted(timers, key=_FIRING_ORDER))


def hold_of(timers: Iterable[Timer]) -> int | None:
    """Return the earliest output time that the timers hold; ``None`` when they hold none."""
    held = [timer.output_at for timer in timers if timer.holds]
    return min(held) if held else None


def oldest_but(at: npt.NDArray[np.int64], percentiles: Iterable[float]) -> dict[float, EventTimeMicros]:
    """Return the earliest time by percentile *p*, skipping the earliest 100 - *p* percent of the times."""
    ordered = np.sort(at)
    count = len(ordered)
    skipped = {share: min(int(count * (EXACT - share) / EXACT), count - 1) for share in percentiles}
    return {share: EventTimeMicros(int(ordered[index])) for share, index in skipped.items()}


@dataclass(frozen=True, slots=True)
class KeyTimes:
    keys: pa.StringArray
    at: npt.NDArray[np.int64]


@dataclass(slots=True)
class EarliestByKey:
    """One time per key, with the earliest at hand: a heap of at most two entries per key plus `_STALE_MIN`.

    Outdated entries stay in the heap and are skipped.
    """

    _at: dict[str, int] = field(default_factory=dict)
    _heap: list[tuple[int, str]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self._at)

    def items(self) -> Iterable[tuple[str, int]]:
        return self._at.items()

    def at_of(self, key: str) -> int | None:
        return self._at.get(key)

    def put(self, times: Mapping[str, int], without: Iterable[str] = ()) -> None:
        known, heap = self._at, self._heap
        for key in without if known else ():
            known.pop(key, None)
        # So many changes at once: building the heap again costs less than pushing each.
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

    def fill(self, times: KeyTimes) -> None:
        keys, at = times.keys.to_pylist(), times.at
        self._at = dict(zip(keys, at.tolist(), strict=True))
        order = np.argsort(at)
        # A sorted list is a heap already.
        self._heap = list(zip(at[order].tolist(), [keys[index] for index in order.tolist()], strict=True))

    def _clean(self) -> None:
        self._heap = [(at, key) for key, at in self._at.items()]
        heapify(self._heap)

    def earliest(self) -> int | None:
        heap = self._heap
        while heap:
            at, key = heap[0]
            if self._at.get(key) == at:
                return at
            heappop(heap)
        return None

    def until(self, bound: int) -> set[str]:
        """Return the keys whose time is not after ``bound``; they stay in."""
        heap, keys, nodes = self._heap, set[str](), [0]
        # A child in a heap is never earlier than its parent, so whole branches are skipped.
        while nodes:
            node = nodes.pop()
            if node < len(heap) and heap[node][0] <= bound:
                at, key = heap[node]
                if self._at.get(key) == at:
                    keys.add(key)
                nodes += (2 * node + 1, 2 * node + 2)
        return keys


class TimerQueue:
    """The firing and held output times of an interval's keys: one time per key, domain and purpose."""

    __slots__ = ("_event", "_hold", "_wall")

    def __init__(self) -> None:
        # By percentile; the low watermark's queue is always there.
        self._event: dict[float, EarliestByKey] = {EXACT: EarliestByKey()}
        self._wall = EarliestByKey()
        self._hold = EarliestByKey()

    def put(self, timers_by_key: Mapping[str, Timers]) -> None:
        """Replace the timers of some keys; each key's timers are in firing order."""
        event: dict[float, dict[str, int]] = {percentile: {} for percentile in self._event}
        wall: dict[str, int] = {}
        hold: dict[str, int] = {}
        exact = event[EXACT]
        # For each timer of a bundle's keys: a call for each would take as long again.
        for key, timers in timers_by_key.items():
            held: int | None = None
            for _, domain, at, output_at, percentile, holds in timers:
                if holds and (held is None or output_at < held):
                    held = output_at
                if domain is TimeDomain.WALL:
                    wall.setdefault(key, at)
                elif domain is TimeDomain.HOLD:
                    continue
                elif percentile == EXACT:
                    exact.setdefault(key, at)
                else:
                    event.setdefault(percentile, {}).setdefault(key, at)
            if held is not None:
                hold[key] = held
        touched = timers_by_key.keys()
        queues = [(self._event.setdefault(each, EarliestByKey()), times) for each, times in event.items()]
        for queue, times in (*queues, (self._wall, wall), (self._hold, hold)):
            queue.put(times, touched - times.keys() if len(queue) else ())

    def fill(self, event: Mapping[float, KeyTimes], wall: KeyTimes, hold: KeyTimes) -> None:
        self._event = {EXACT: EarliestByKey()}
        for percentile, times in event.items():
            self._event.setdefault(percentile, EarliestByKey()).fill(times)
        self._wall.fill(wall)
        self._hold.fill(hold)

    def due_keys(
        self,
        event_us: EventTimeMicros,
        wall_us: WallTimeMicros,
        percentile_watermarks: PercentileTimes | None = None,
    ) -> set[str]:
        """Return the keys with a timer that fires at this low watermark, wall time or percentile watermark."""
        due = self._wall.until(wall_us)
        for percentile, queue in self._event.items():
            due |= queue.until((percentile_watermarks or {}).get(percentile, event_us))
        return due

    def next_percentile_timers(self) -> dict[float, EventTimeMicros]:
        """Return the earliest timer that waits for each percentile watermark."""
        earliest = {each: queue.earliest() for each, queue in self._event.items() if each != EXACT}
        return {each: EventTimeMicros(at) for each, at in earliest.items() if at is not None}

    def next_at(self, domain: TimeDomain) -> int | None:
        return (self._event[EXACT] if domain is TimeDomain.EVENT else self._wall).earliest()

    def hold(self) -> int | None:
        """Return the earliest output time of any timer or hold; ``None`` without one."""
        return self._hold.earliest()

    def holds(self, percentiles: Iterable[float]) -> dict[float, EventTimeMicros]:
        """Return the earliest output time by percentile *p*, skipping 100 - *p* percent of the keys.

        It costs a pass over all keys with timers or holds; only pipelines with percentiles need it.
        """
        wanted = list(percentiles)
        if not wanted or not len(self._hold):
            return {}
        return oldest_but(np.fromiter((at for _, at in self._hold.items()), np.int64), wanted)

    def wait_of(self, key: str, event_us: int, wall_us: int) -> float:
        """Return how long a key waits for its next timer in microseconds, as in `waits`; infinity without one."""
        queues = [(self._wall, wall_us), *((queue, event_us) for queue in self._event.values())]
        waits = [at - now for queue, now in queues if (at := queue.at_of(key)) is not None]
        return float(min(waits, default=_NEVER))

    def waits(self, event_us: int = 0, wall_us: int = 0) -> dict[str, float]:
        """Return how long each key waits for its next timer in microseconds, on whichever clock is nearer."""
        waits: dict[str, float] = {}
        for queue, now in ((self._wall, wall_us), *((queue, event_us) for queue in self._event.values())):
            for key, at in queue.items():
                waits[key] = min(waits.get(key, _NEVER), float(at - now))
        return waits


_Entry: TypeAlias = tuple[int, str, float, str, Timer]
_TimerId: TypeAlias = tuple[str, TimeDomain]


@dataclass(frozen=True, slots=True)
class TimersSavepoint:
    """A copy of the timers between two hooks, for `KeyTimers.restore`."""

    pending: dict[_TimerId, Timer]
    due: list[_Entry]


class KeyTimers:
    """The timers of the current key while its hooks run; one object serves all keys of a bundle.

    Attributes:
        are_over: an event timer that is set is left out, and replaces a pending one all the same.
    """

    __slots__ = ("_clocks", "_new", "_pending", "_replaced", "_row", "_row_owed_at", "are_over", "due")

    def __init__(self, clocks: Clocks) -> None:
        self._clocks = clocks
        self.are_over: bool = False
        self.bind(())

    def bind(self, row: Timers) -> None:
        self._row = row
        self._row_owed_at: int | None = hold_of(row) if row else None
        self._pending: dict[_TimerId, Timer] | None = None
        self._replaced: Timers | None = None
        self._new: list[tuple[int, Timer]] = []
        self.due: list[_Entry] = []
        for timer in row:
            self._note(timer)

    def has(self, timer: tuple[str, TimeDomain, int, int, float, bool]) -> bool:
        pending = self._pending
        if pending is None:
            pending = self._opened()
        return pending.get(timer[:2]) == timer

    def set(self, timer: Timer) -> None:
        if self.are_over and timer.domain is TimeDomain.EVENT:
            self.delete(timer.tag, timer.domain)
            return
        self._opened()[(timer.tag, timer.domain)] = timer
        if timer.holds:
            heappush(self._new, (timer.output_at, timer))
        self._note(timer)

    def delete(self, tag: str, domain: TimeDomain) -> None:
        self._opened().pop((tag, domain), None)

    def owed_at(self) -> int | None:
        """Return the earliest output time that the key's timers hold or held at the start of its turn.

        The latter hold the watermark until the bundle commits, so no consumer's watermark has passed them.
        """
        # Called for each production, so neither the row's timers nor later ones are searched.
        pending, new, owed_at = self._pending or {}, self._new, self._row_owed_at
        while new and pending.get((new[0][1].tag, new[0][1].domain)) is not new[0][1]:
            heappop(new)
        if not new:
            return owed_at
        return new[0][0] if owed_at is None else min(owed_at, new[0][0])

    def pop_due(self) -> Timer | None:
        """Remove and return the first due timer by (time, domain, percentile, tag); ``None`` if none is due."""
        while self.due:
            # Deleted and replaced timers leave their entries in the heap.
            timer = heappop(self.due)[4]
            if self.take(timer):
                return timer
        return None

    def take(self, timer: Timer) -> bool:
        """Remove a timer and return True, unless the timer was deleted or replaced."""
        pending, name = self._opened(), (timer.tag, timer.domain)
        if pending.get(name) is not timer:
            return False
        del pending[name]
        return True

    def take_due(self) -> list[Timer]:
        """Return all due timers in the order of `pop_due`; they stay pending, but `pop_due` skips them."""
        pending, due = self._opened(), sorted(self.due)
        self.due = []
        return [entry[4] for entry in due if pending.get((entry[4].tag, entry[4].domain)) is entry[4]]

    def pending(self, domain: TimeDomain) -> list[Timer]:
        timers = self._row if self._pending is None else self._pending.values()
        return [timer for timer in timers if timer.domain is domain]

    def pending_at(self, tag: str, domain: TimeDomain) -> int | None:
        timer = self._opened().get((tag, domain))
        return None if timer is None else timer.at

    def changed(self) -> Timers | None:
        """Return all pending timers in firing order; ``None`` when they equal the timers in the row."""
        if self._pending is None:
            return self._replaced
        timers = firing_order(self._pending.values())
        return None if timers == self._row else timers

    def replace(self, timers: Timers | None) -> None:
        """Take the result of a turn without hooks, as `changed` is to return it."""
        self._pending, self._replaced = None, timers

    def savepoint(self) -> TimersSavepoint:
        return TimersSavepoint(dict(self._opened()), list(self.due))

    def restore(self, savepoint: TimersSavepoint) -> None:
        self._pending = dict(savepoint.pending)
        # Keep the floor of productions exact: a failed hook's timers must not lower it.
        self._new = [(timer.output_at, timer) for timer in savepoint.pending.values() if timer.holds]
        heapify(self._new)
        self.due = list(savepoint.due)

    def _opened(self) -> dict[_TimerId, Timer]:
        pending = self._pending
        if pending is None:
            pending = self._pending = {(timer.tag, timer.domain): timer for timer in self._row}
        return pending

    def _note(self, timer: Timer) -> None:
        if timer.at <= self._clocks.of(timer.domain, timer.percentile):
            heappush(self.due, (timer.at, timer.domain, timer.percentile, timer.tag, timer))
