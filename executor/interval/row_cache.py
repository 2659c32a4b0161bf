"""The row cache: encoded states and timers of keys, within a budget of bytes (MillWheel §8.3).

Until the first eviction, a key that is not here has no row. After it, a filter of all keys
that ever had a row answers for most new keys, and the others are read.

What soft state needs to know about all rows at once, without decoding them.

When a new owner scans its rows (MillWheel §7.1), there may be millions: their next timers,
holds and sizes are computed on whole columns, and only rows that fit the cache are decoded.

The memory budget of a process: the soft state of its intervals shares one bound (MillWheel §8.3).

An interval may use what the others leave, and its part of the budget always. So one that is alone, or hot, has nearly
all of it, and what an idle one has kept is taken back when others need it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import repeat
from typing import Final, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from millpond.executor.computation.state import StoredState
from millpond.executor.computation.timers import KeyTimes, Timers
from millpond.executor.interval.eviction import (
    NEVER,
    Candidates,
    EvictionPolicy,
    Expectations,
    LastUses,
    Waits,
    window_aware,
)
from millpond.executor.interval.row_reader import ColdRows, LoadedRows
from millpond.executor.time.clocks import EXACT, FREE, parse_timer_clock
from millpond.statestore.interval import Interval
from millpond.statestore.rows.record_ids import RecordIdFilter
from millpond.statestore.rows.row import TimeDomain, lengths_of

ROW_BYTES: Final = 240
"""What a cached row costs in CPython without its characters: two strings and its share of a dict."""

TIMER_BYTES: Final = 160
"""What a cached timer costs without its tag. Only a waiting record's tag is long, and is counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSummary:
    """Next timers, holds and costs of merged rows.

    Attributes:
        event: the earliest event timer of each key that has one.
        wall: the same for wall timers.
        percentiles: the same for those that wait for a percentile watermark, by percentile.
        hold: the oldest output time that the timers of each key hold, for keys that hold any.
        waits: for each row, the time of its next timer on either clock; `NEVER`: none.
        weights: for each row, what it costs in the cache, by estimate.
    """

    event: KeyTimes
    wall: KeyTimes
    percentiles: Mapping[float, KeyTimes]
    hold: KeyTimes
    waits: Waits
    weights: npt.NDArray[np.int64]


def summarise_rows(merged: pa.Table) -> RowSummary:
    """Summarise merged rows, one per key."""
    keys = merged.column("key").combine_chunks()
    lists = merged.column("timers").combine_chunks()
    rows = pc.list_parent_indices(lists).to_numpy()
    flat = lists.flatten()
    at = flat.field("at").view(pa.int64()).to_numpy(zero_copy_only=False)
    output_at = flat.field("output_at").view(pa.int64()).to_numpy(zero_copy_only=False)
    clock_of = flat.field("domain")
    waits = np.full(merged.num_rows, NEVER)
    np.minimum.at(waits, rows, at.astype(np.float64))

    def earliest(names: list[str]) -> KeyTimes:
        if not names:
            return _earliest(keys, rows[:0], at[:0])
        of_clock = pc.is_in(clock_of, pa.array(names, pa.string())).to_numpy(zero_copy_only=False)
        return _earliest(keys, rows[of_clock], at[of_clock])

    clocks = clock_names(clock_of)
    is_holding = pc.invert(pc.ends_with(clock_of, FREE)).to_numpy(zero_copy_only=False)
    return RowSummary(
        event=earliest(clocks.event),
        wall=earliest(clocks.wall),
        percentiles={percentile: earliest(names) for percentile, names in clocks.percentiles.items()},
        hold=_earliest(keys, rows[is_holding], output_at[is_holding]),
        waits=waits,
        weights=_weights(merged, lists),
    )


@dataclass(frozen=True, slots=True)
class ClockNames:
    """The names of the clocks that timers wait for; one clock may have several names.

    Records that wait for the low watermark count as its timers.
    """

    event: list[str] = field(default_factory=list)
    wall: list[str] = field(default_factory=list)
    percentiles: dict[float, list[str]] = field(default_factory=dict)


def clock_names(clocks: pa.Array) -> ClockNames:
    """The names of the clocks that timers wait for; holds wait for none."""
    names = ClockNames()
    for name in pc.unique(clocks).to_pylist():
        domain, percentile, _ = parse_timer_clock(name)
        if domain is TimeDomain.WALL:
            names.wall.append(name)
        elif domain is TimeDomain.RECORD or (domain is TimeDomain.EVENT and percentile == EXACT):
            names.event.append(name)
        elif domain is TimeDomain.EVENT:
            names.percentiles.setdefault(percentile, []).append(name)
    return names


def _earliest(keys: pa.StringArray, rows: npt.NDArray[np.int64], at: npt.NDArray[np.int64]) -> KeyTimes:
    """The earliest time of each row; ``rows`` is sorted."""
    if not len(rows):
        return KeyTimes(keys.slice(0, 0), at)
    owners, starts = np.unique(rows, return_index=True)
    return KeyTimes(keys.take(pa.array(owners)), np.minimum.reduceat(at, starts))


def _weights(merged: pa.Table, timers: pa.ListArray) -> npt.NDArray[np.int64]:
    characters = np.zeros(merged.num_rows, np.int64)
    for name in ("key", "state", "state_bytes"):
        column = merged.column(name)
        if column.null_count < len(column):
            lengths = pc.binary_length(column)
            lengths = pc.fill_null(lengths, 0) if lengths.null_count else lengths
            characters += lengths.to_numpy(zero_copy_only=False)
    counts = lengths_of(timers)
    if len(timers.values):
        flat = timers.flatten()
        waits = pc.equal(flat.field("domain"), TimeDomain.RECORD.value).to_numpy(zero_copy_only=False)
        if waits.any():
            lengths = pc.binary_length(flat.field("tag")).to_numpy(zero_copy_only=False)
            np.add.at(characters, pc.list_parent_indices(timers).to_numpy()[waits], lengths[waits])
    weights: npt.NDArray[np.int64] = ROW_BYTES + characters + TIMER_BYTES * counts
    return weights


_KEEP: Final = 0.9
"""Eviction stops at this share of the limit, so that it does not run in every bundle."""

_NOTHING_LEARNED: Final = Expectations()
_FILTER_CAPACITY_MIN: Final = 1_024
_FILTER_CAPACITY_MAX: Final = 16_777_216
_FILTER_ERROR_RATE: Final = 0.001
_FILTER_BYTES: Final = 3
"""Of the filter of all keys, for a key, at most."""

_FILTER_SHARE: Final = 3
_FILTER_AFFORDED: Final = 65_536
"""The filter takes this part of the limit at most, where that is enough for so many keys: it grows with the state."""


class _Absence(Enum):
    MISSING = "missing"


_MISSING: Final = _Absence.MISSING
_Cached: TypeAlias = StoredState | Literal[_Absence.MISSING] | None


@dataclass(frozen=True, slots=True)
class CacheUndo:
    """What a bundle overwrote."""

    keys: Sequence[str]
    states: list[_Cached]
    timers: dict[str, Timers]


def timers_weight(timers: Timers) -> int:
    """What timers cost in the cache, by estimate."""
    return TIMER_BYTES * len(timers)


def waiting_weight(timers: Timers) -> int:
    """What timers cost in the cache, by estimate, where records may wait among them."""
    return TIMER_BYTES * len(timers) + sum(
        len(timer.tag) for timer in timers if timer.domain is TimeDomain.RECORD
    )


class RowCache:
    """Rows in order of their last use.

    Args:
        limit_bytes: what rows may occupy now, by estimate.
        policy: which rows to evict first.
        weigh: what a key's timers cost, by estimate.
        state_version: that of the computation's code.
    """

    def __init__(
        self,
        limit_bytes: Callable[[], int],
        policy: EvictionPolicy = window_aware,
        weigh: Callable[[Timers], int] = timers_weight,
        state_version: int = 0,
    ) -> None:
        self._state_version = state_version
        self._limit_bytes = limit_bytes
        self._policy = policy
        self._weigh = weigh
        self._states: dict[str, StoredState | None] = {}
        self._timers: dict[str, Timers] = {}
        self._cold: ColdRows | None = None
        self._existing: RecordIdFilter | None = None
        self._uses = LastUses()
        self.used_bytes: int = 0

    def __len__(self) -> int:
        return len(self._states) + (0 if self._cold is None else len(self._cold))

    def __contains__(self, key: str) -> bool:
        return key in self._states

    @property
    def is_complete(self) -> bool:
        """Whether every key that has a row is here."""
        return self._existing is None

    @property
    def filter_bytes(self) -> int:
        """What the filter of all keys occupies, which is not in ``used_bytes``."""
        return 0 if self._existing is None else self._existing.size_bytes

    @property
    def is_over_budget(self) -> bool:
        """Whether rows must be evicted."""
        return self.used_bytes > self._limit_bytes()

    def warm(self, keys: Sequence[str]) -> None:
        """Decode those of the keys' rows that are still cold; comes before any other use of the keys."""
        cold = self._cold
        if cold is None:
            return
        cold_keys = cold.among(keys)
        if cold_keys:
            rows, weight = cold.take(cold_keys)
            self.used_bytes -= weight
            self._take_in(rows)
        if not len(cold):
            self._cold = None

    def replace_cold(self, keys: Sequence[str]) -> None:
        """Forget the cold rows of these keys, each of which is about to be put in full."""
        if self._cold is not None:
            self.used_bytes -= self._cold.drop(self._cold.among(keys))

    def absent(self, keys: Sequence[str]) -> list[str]:
        """The keys that are not here, even after `warm`, and may have a row."""
        if self._existing is None:
            return []
        states = self._states
        unknown = [key for key in keys if key not in states]
        if not unknown:
            return []
        may_exist = self._existing.might_contain(pa.array(unknown, pa.string()))
        return [unknown[index] for index in np.flatnonzero(may_exist).tolist()]

    def states_of(self, keys: Sequence[str]) -> list[StoredState | None]:
        """The states of keys, none of them `absent`; ``None`` for a key without a state."""
        return list(map(self._states.get, keys))

    def timers_of(self, key: str) -> Timers:
        """The timers of a key that is not `absent`."""
        return self._timers.get(key, ())

    def fill(self, merged: pa.Table, summary: RowSummary) -> None:
        """Keep as many of all rows as the limit allows, in reverse order of eviction, as cold rows."""
        limit = self._limit_bytes()
        if int(summary.weights.sum()) <= limit:
            self._keep_cold(merged, summary.weights)
            return
        self._forget_completeness(merged.num_rows)
        self._remember(merged.column("key"))
        candidates = Candidates(
            keys=merged.column("key"), waits=summary.waits, ages=np.full(merged.num_rows, NEVER)
        )
        order = self._policy(candidates)[::-1]
        used = np.cumsum(summary.weights[order])
        kept = np.zeros(merged.num_rows, np.bool_)
        kept[order[: int(np.searchsorted(used, _KEEP * limit))]] = True
        # A filter works chunk by chunk: all states together may be more than one array holds.
        self._keep_cold(merged.filter(pa.array(kept)), summary.weights[kept])

    def start_without_rows(self, keys: int) -> None:
        """Begin with nothing but a filter of the keys that have rows, each of which `remember` is told of.

        Args:
            keys: about how many there are.
        """
        self._forget_completeness(keys)

    def _keep_cold(self, rows: pa.Table, weights: npt.NDArray[np.int64]) -> None:
        if rows.num_rows:
            self._cold = ColdRows(rows, weights, self._state_version)
            self.used_bytes += int(weights.sum())

    def load(self, rows: LoadedRows) -> None:
        """Add rows that were read from files, because `absent` named their keys."""
        self._take_in(rows)

    def _take_in(self, rows: LoadedRows) -> None:
        self._forget(rows.keys)
        self._states.update(zip(rows.keys, rows.states, strict=True))
        self._timers.update(rows.timers)
        self.used_bytes += _weight(rows.keys, rows.states) + sum(map(self._weigh, rows.timers.values()))

    def put(
        self, keys: Sequence[str], states: Sequence[StoredState | None], timers: Mapping[str, Timers]
    ) -> CacheUndo:
        """Apply a bundle's outcome: states of all its keys, timers of those whose timers changed."""
        overwritten = {key: self._timers.get(key, ()) for key in timers}
        before = self._take_out(keys)
        self._states.update(zip(keys, states, strict=True))
        self._set_timers(timers)
        self.used_bytes += _weight(keys, states)
        if None in states:
            self._drop_rowless(keys, states)
        if self._existing is not None:
            new = [key for key, old in zip(keys, before, strict=True) if old is _MISSING]
            self._remember(pa.array(new, pa.string()))
        return CacheUndo(keys, before, overwritten)

    def note_use(self, first: str, clocks: tuple[int, int]) -> None:
        """Note when a bundle has used its rows, which were put last.

        Args:
            first: the key of the first of them.
            clocks: low watermark and wall time.
        """
        self._uses.note(first, clocks)

    def undo(self, undo: CacheUndo) -> None:
        """Restore what `put` overwrote, or forget it if it can be read again."""
        if self._existing is not None:
            # Some of these rows may have been evicted since, and only files have all of them. A filter
            # made after the bundle lacks the rows that it deleted, though a file may have them.
            self._forget(undo.keys)
            self._remember(pa.array(undo.keys, pa.string()))
            return
        self._take_out(undo.keys)
        known = [(key, old) for key, old in zip(undo.keys, undo.states, strict=True) if old is not _MISSING]
        self._states.update(known)
        self.used_bytes += _weight([key for key, _ in known], [old for _, old in known])
        self._set_timers(undo.timers)

    def remember(self, keys: Sequence[str] | pa.ChunkedArray) -> None:
        """Note that these keys have rows, though they are not here."""
        self._remember(keys if isinstance(keys, pa.ChunkedArray) else pa.array(keys, pa.string()))

    def evict(
        self,
        waits: Mapping[str, float],
        clocks: tuple[int, int] = (0, 0),
        expectations: Expectations = _NOTHING_LEARNED,
    ) -> int:
        """Evict rows until the cache is below its limit; returns how many.

        Args:
            waits: how long each key with timers waits for the next one.
            clocks: low watermark and wall time.
            expectations: what rows are used by.
        """
        if not self.is_over_budget:
            return 0
        # Cold rows have not been used since they were read, so they come first.
        cold = [] if self._cold is None else self._cold.keys
        keys = [*cold, *self._states]
        if self._existing is None:
            self._forget_completeness(len(keys))
            self._remember(pa.array(keys, pa.string()))
        candidates = Candidates(
            keys=keys,
            waits=np.fromiter(map(waits.get, keys, repeat(NEVER)), np.float64, len(keys)),
            ages=self._uses.ages(keys, clocks),
            expectations=expectations,
        )
        order = self._policy(candidates)
        hot = [ROW_BYTES + len(key) + len(state or "") for key, state in self._states.items()]
        if self._timers:
            of_timers = (self._weigh(self._timers.get(key, ())) for key in self._states)
            hot = [weight + more for weight, more in zip(hot, of_timers, strict=True)]
        weights = np.asarray(hot if self._cold is None else [*self._cold.weights.tolist(), *hot])
        freed = np.cumsum(weights[order])
        surplus = self.used_bytes - int(_KEEP * self._limit_bytes())
        count = min(int(np.searchsorted(freed, surplus)) + 1, len(keys))
        evicted = order[:count]
        self._forget([keys[index] for index in evicted[evicted >= len(cold)].tolist()])
        if self._cold is not None:
            self.used_bytes -= self._cold.drop(keys[index] for index in evicted[evicted < len(cold)].tolist())
        self._uses.keep_only(self._states)
        return count

    def _forget(self, keys: Sequence[str]) -> None:
        self._take_out(keys)
        for key in keys if self._timers else ():
            timers = self._timers.pop(key, None)
            if timers:
                self.used_bytes -= self._weigh(timers)

    def _take_out(self, keys: Sequence[str]) -> list[_Cached]:
        states = self._states
        size = len(states)
        before: list[_Cached] = list(map(states.pop, keys, repeat(_MISSING)))
        if size - len(states) == len(keys):
            self.used_bytes -= _weight(keys, before)
        elif size > len(states):
            known = [index for index, old in enumerate(before) if old is not _MISSING]
            self.used_bytes -= _weight([keys[index] for index in known], [before[index] for index in known])
        return before

    def _set_timers(self, timers: Mapping[str, Timers]) -> None:
        for key, new in timers.items():
            old = self._timers.pop(key, ())
            if new:
                self._timers[key] = new
            self.used_bytes += self._weigh(new) - self._weigh(old)

    def _drop_rowless(self, keys: Sequence[str], states: Sequence[StoredState | None]) -> None:
        timers = self._timers
        gone = [key for key, state in zip(keys, states, strict=True) if state is None and key not in timers]
        self._take_out(gone)

    def _forget_completeness(self, keys: int) -> None:
        affordable = max(self._limit_bytes() // (_FILTER_SHARE * _FILTER_BYTES), _FILTER_AFFORDED)
        capacity_max = min(affordable, _FILTER_CAPACITY_MAX)
        capacity = min(max(2 * keys, _FILTER_CAPACITY_MIN), capacity_max)
        # Of more keys the filter says "maybe" more often, which costs reads.
        self._existing = RecordIdFilter(capacity, _FILTER_ERROR_RATE, capacity_max=capacity_max)

    def _remember(self, keys: pa.Array | pa.ChunkedArray) -> None:
        if self._existing is not None and len(keys):
            self._existing.add(keys)


def _weight(keys: Sequence[str], states: Iterable[_Cached]) -> int:
    return ROW_BYTES * len(keys) + sum(map(len, keys)) + sum(map(len, filter(None, states)))  # type: ignore[arg-type]


_OTHER_SHARE: Final = 2


class MemoryBudget:
    """A bound on what the soft state of all intervals of a process keeps; threads may share it.

    Args:
        budget_bytes: the bound, in bytes by estimate.
        other_bytes: what else the process keeps now, in bytes: soft state has less for it, but half of the
            budget at least.

    Example:
        >>> budget, hot, idle = MemoryBudget(100), Interval("c", "", "m"), Interval("c", "m")
        >>> budget.report(idle, 10)
        >>> budget.limit_of(hot), budget.limit_of(idle)
        (90, 100)
        >>> budget.report(hot, 90)
        >>> budget.limit_of(idle)
        50
    """

    def __init__(self, budget_bytes: int, other_bytes: Callable[[], int] = lambda: 0) -> None:
        self._budget_bytes = budget_bytes
        self._other_bytes = other_bytes
        self._lock = threading.Lock()
        self._used: dict[Interval, int] = {}
        self._total = 0

    @property
    def budget_bytes(self) -> int:
        """What all intervals may use now."""
        return self._budget_bytes - min(self._other_bytes(), self._budget_bytes // _OTHER_SHARE)

    @property
    def used_bytes(self) -> int:
        """What all intervals have reported."""
        return self._total

    @property
    def is_exceeded(self) -> bool:
        """Whether intervals that are over their limit should shrink, though they have nothing to do."""
        return self._total > self.budget_bytes

    def limit_of(self, interval: Interval) -> int:
        """How much the interval may use now: what the others leave, and its part of the budget at least."""
        with self._lock:
            budget_bytes = self.budget_bytes
            others = self._total - self._used.get(interval, 0)
            intervals = len(self._used) + (interval not in self._used)
            return max(budget_bytes - others, budget_bytes // intervals)

    def report(self, interval: Interval, used_bytes: int) -> None:
        """Note how much the interval uses now."""
        with self._lock:
            self._total += used_bytes - self._used.get(interval, 0)
            self._used[interval] = used_bytes

    def leave(self, interval: Interval) -> None:
        """Note that the process keeps nothing of the interval any more."""
        with self._lock:
            self._total -= self._used.pop(interval, 0)
