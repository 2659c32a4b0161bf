"""The row cache: encoded states and timers of keys, within a budget of bytes (MillWheel §8.3).

Until the first eviction, a key that is not here has no row. After it, a filter of all keys that ever had a row
answers for most new keys, and the others are read. A new owner may scan millions of rows (MillWheel §7.1): their next
timers, holds and sizes are computed on whole columns, and only rows that fit are decoded.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import repeat
from typing import Final, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from millpond.executor.computation.state import CELL_BYTES, StateLayout, StoredState, size_of_states
from millpond.executor.computation.timers import KeyTimes, Timers
from millpond.executor.interval.eviction import (
    NEVER,
    Candidates,
    EvictionPolicy,
    Expectations,
    Waits,
    window_aware,
)
from millpond.executor.interval.row_reader import ColdRows, LoadedRows
from millpond.executor.time.clocks import FREE, parse_timer_clock
from millpond.statestore.interval import Interval
from millpond.statestore.rows.record_ids import RecordIdFilter
from millpond.statestore.rows.row import TimeDomain, lengths_of
from millpond.statestore.rows.state_schema import state_columns_among

# A cached row in CPython without its characters: two strings and its share of a dict.
ROW_BYTES: Final = 240
# A cached timer without its tag. Only a waiting record's tag is long, and is counted.
TIMER_BYTES: Final = 160


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSummary:
    """Next timers, holds and costs of merged rows.

    ``event`` (by percentile) and ``wall`` have the earliest timer of each key, ``hold`` its oldest held output time,
    ``waits`` the time of each row's next timer on any clock (or `NEVER`), ``weights`` its bytes in the cache.
    """

    event: Mapping[float, KeyTimes]
    wall: KeyTimes
    hold: KeyTimes
    waits: Waits
    weights: npt.NDArray[np.int64]


def summarise_rows(merged: pa.Table) -> RowSummary:
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

    event_names, wall_names = clock_names(clock_of)
    is_holding = pc.invert(pc.ends_with(clock_of, FREE)).to_numpy(zero_copy_only=False)
    return RowSummary(
        event={percentile: earliest(names) for percentile, names in event_names.items()},
        wall=earliest(wall_names),
        hold=_earliest(keys, rows[is_holding], output_at[is_holding]),
        waits=waits,
        weights=_weights(merged, lists),
    )


def clock_names(clocks: pa.Array) -> tuple[dict[float, list[str]], list[str]]:
    """Return the names of the clocks that timers wait for: of event time, by percentile, and of wall time.

    Records that wait for the low watermark count as its timers; holds wait for no clock.
    """
    event: dict[float, list[str]] = {}
    wall: list[str] = []
    for name in pc.unique(clocks).to_pylist():
        domain, percentile, _ = parse_timer_clock(name)
        if domain is TimeDomain.WALL:
            wall.append(name)
        elif domain is not TimeDomain.HOLD:
            event.setdefault(percentile, []).append(name)
    return event, wall


def _earliest(keys: pa.StringArray, rows: npt.NDArray[np.int64], at: npt.NDArray[np.int64]) -> KeyTimes:
    if not len(rows):
        return KeyTimes(keys.slice(0, 0), at)
    owners, starts = np.unique(rows, return_index=True)
    return KeyTimes(keys.take(pa.array(owners)), np.minimum.reduceat(at, starts))


def _weights(merged: pa.Table, timers: pa.ListArray) -> npt.NDArray[np.int64]:
    characters = np.zeros(merged.num_rows, np.int64)
    for name in ("key", "state", "state_bytes"):
        column = merged.column(name)
        if column.null_count < len(column):
            characters += pc.fill_null(pc.binary_length(column), 0).to_numpy(zero_copy_only=False)
    for name in state_columns_among(merged.column_names):
        column = merged.column(name)
        # As many bytes as an average state, and an object for each of its fields.
        bytes_of_one = column.nbytes // max(len(column), 1) + CELL_BYTES * column.type.num_fields
        characters += np.where(column.is_valid().to_numpy(), bytes_of_one, 0)
    counts = lengths_of(timers)
    if len(timers.values):
        flat = timers.flatten()
        waits = pc.equal(flat.field("domain"), TimeDomain.RECORD.value).to_numpy(zero_copy_only=False)
        if waits.any():
            lengths = pc.binary_length(flat.field("tag")).to_numpy(zero_copy_only=False)
            np.add.at(characters, pc.list_parent_indices(timers).to_numpy()[waits], lengths[waits])
    weights: npt.NDArray[np.int64] = ROW_BYTES + characters + TIMER_BYTES * counts
    return weights


# Eviction stops at this share of the limit, so that it does not run in every bundle.
_KEEP: Final = 0.9

_NOTHING_LEARNED: Final = Expectations()
_FILTER_CAPACITY_MIN: Final = 1_024
_FILTER_CAPACITY_MAX: Final = 16_777_216
_FILTER_ERROR_RATE: Final = 0.001
# The filter of all keys takes at most so many bytes for a key, and this part of the limit, or more if that is not
# enough for so many keys. It grows with the state.
_FILTER_BYTES: Final = 3
_FILTER_SHARE: Final = 3
_FILTER_AFFORDED: Final = 65_536


class _Absence(Enum):
    MISSING = "missing"


_MISSING: Final = _Absence.MISSING
_Cached: TypeAlias = StoredState | Literal[_Absence.MISSING] | None


@dataclass(frozen=True, slots=True)
class CacheUndo:
    """The states and timers that a bundle overwrote."""

    keys: Sequence[str]
    states: list[_Cached]
    timers: dict[str, Timers]


def timers_weight(timers: Timers) -> int:
    return TIMER_BYTES * len(timers)


def waiting_weight(timers: Timers) -> int:
    """Estimate the cost of timers in the cache, in bytes, where records may wait among them."""
    return TIMER_BYTES * len(timers) + sum(
        len(timer.tag) for timer in timers if timer.domain is TimeDomain.RECORD
    )


class LastUses:
    """The last use of each run of rows, on two clocks, at the cost of one entry for a bundle.

    A cache keeps its rows in order of their last use. So the rows behind the first row of a bundle were used with it,
    up to the first row of the next bundle.
    """

    def __init__(self) -> None:
        self._at: dict[str, tuple[int, int]] = {}

    def record(self, first: str, clocks: tuple[int, int]) -> None:
        """Record a bundle by the key of its first row; its rows are now the last ones of the cache."""
        self._at[first] = clocks

    def ages(self, keys: Iterable[str], clocks: tuple[int, int]) -> npt.NDArray[np.float64]:
        """Return the time since each row's use, in microseconds, on the clock on which that is longer.

        ``keys`` are all rows in order of their last use. If the first row of a bundle has been used again, its other
        rows count to the bundle before.
        """
        now_event, now_wall = clocks
        age = NEVER
        ages: list[float] = []
        for key in keys:
            at = self._at.get(key)
            if at is not None:
                # A row that was put back may still have the entry of an older bundle.
                age = min(age, float(max(now_event - at[0], now_wall - at[1])))
            ages.append(age)
        return np.array(ages, np.float64)

    def keep_only(self, keys: Iterable[str]) -> None:
        self._at = {key: self._at[key] for key in self._at.keys() & set(keys)}


class RowCache:
    """Rows in order of their last use.

    Attributes:
        is_complete: every key that has a row is here.
    """

    def __init__(
        self,
        limit_bytes: Callable[[], int],
        policy: EvictionPolicy = window_aware,
        weigh: Callable[[Timers], int] = timers_weight,
        layout: StateLayout = StateLayout(),  # noqa: B008 - immutable
    ) -> None:
        self._layout = layout
        self._limit_bytes = limit_bytes
        self._policy = policy
        self._weigh = weigh
        self._states: dict[str, StoredState | None] = {}
        self._timers: dict[str, Timers] = {}
        self._cold: ColdRows | None = None
        self._existing: RecordIdFilter | None = None
        self.is_complete: bool = True
        self.uses: LastUses = LastUses()
        self.used_bytes: int = 0

    def __contains__(self, key: str) -> bool:
        return key in self._states

    @property
    def filter_bytes(self) -> int:
        """The memory of the filter of all keys, which is not in ``used_bytes``."""
        return 0 if self._existing is None else self._existing.size_bytes

    def warm(self, keys: Sequence[str]) -> None:
        """Decode the cold rows of these keys; call it before any other use of the keys."""
        cold = self._cold
        if cold is None:
            return
        cold_keys = cold.among(keys)
        if cold_keys:
            rows, weight = cold.take(cold_keys)
            self.used_bytes -= weight
            self.load(rows)
        if not len(cold):
            self._cold = None

    def replace_cold(self, keys: Sequence[str]) -> None:
        """Drop the cold rows of these keys, each of which is about to be put in full."""
        if self._cold is not None:
            self.used_bytes -= self._cold.drop(self._cold.among(keys))

    def absent(self, keys: Sequence[str]) -> list[str]:
        """Return the keys that are not here, even after `warm`, and may have a row."""
        if self._existing is None:
            return []
        states = self._states
        unknown = [key for key in keys if key not in states]
        if not unknown:
            return []
        may_exist = self._existing.might_contain(pa.array(unknown, pa.string()))
        return [unknown[index] for index in np.flatnonzero(may_exist).tolist()]

    def among(self, keys: Sequence[str]) -> list[str]:
        """Return those of the keys that are here, after `warm`."""
        states = self._states
        return [key for key in keys if key in states] if states else []

    def states_of(self, keys: Sequence[str]) -> list[StoredState | None]:
        """Return the states of keys, none of them `absent`; ``None`` for a key without a state."""
        return list(map(self._states.get, keys))

    def timers_of(self, keys: Sequence[str]) -> list[Timers]:
        return list(map(self._timers.get, keys, repeat(())))

    def fill(self, merged: pa.Table, summary: RowSummary) -> None:
        """Keep as many of all rows as the limit allows, in reverse order of eviction, as cold rows."""
        limit = self._limit_bytes()
        weights = summary.weights
        if int(weights.sum()) > limit:
            self.start_without_rows(merged.num_rows)
            self.remember(merged.column("key"))
            candidates = Candidates(
                keys=merged.column("key"), waits=summary.waits, ages=np.full(merged.num_rows, NEVER)
            )
            order = self._policy(candidates)[::-1]
            used = np.cumsum(weights[order])
            kept = np.zeros(merged.num_rows, np.bool_)
            kept[order[: int(np.searchsorted(used, _KEEP * limit))]] = True
            # A filter works chunk by chunk: all states together may be more than one array holds.
            merged, weights = merged.filter(pa.array(kept)), weights[kept]
        if merged.num_rows:
            self._cold = ColdRows(merged, weights, self._layout)
            self.used_bytes += int(weights.sum())

    def start_without_rows(self, keys: int) -> None:
        """Begin a filter of the keys that have rows, about ``keys`` of them; `remember` adds each."""
        affordable = max(self._limit_bytes() // (_FILTER_SHARE * _FILTER_BYTES), _FILTER_AFFORDED)
        capacity_max = min(affordable, _FILTER_CAPACITY_MAX)
        capacity = min(max(2 * keys, _FILTER_CAPACITY_MIN), capacity_max)
        # With more keys than its capacity the filter has more false hits, which cost reads.
        self._existing = RecordIdFilter(capacity, _FILTER_ERROR_RATE, capacity_max=capacity_max)
        self.is_complete = False

    def load(self, rows: LoadedRows) -> None:
        """Add rows that were read from files, because `absent` named their keys."""
        self.forget(rows.keys)
        self._states.update(zip(rows.keys, rows.states, strict=True))
        self._timers.update(rows.timers)
        self.used_bytes += _weight(rows.keys, rows.states) + sum(map(self._weigh, rows.timers.values()))

    def put(
        self, keys: Sequence[str], states: Sequence[StoredState | None], timers: Mapping[str, Timers]
    ) -> CacheUndo:
        """Apply a bundle's outcome: states of all its keys, timers of those whose timers changed."""
        before = self._take_out(keys)
        self._states.update(zip(keys, states, strict=True))
        overwritten = self._set_timers(timers) if timers else {}
        self.used_bytes += _weight(keys, states)
        if None in states:
            # A key without state and timers has no row, so it must not stay here.
            without = [key for key, state in zip(keys, states, strict=True) if state is None]
            self._take_out([key for key in without if key not in self._timers])
        if not self.is_complete:
            self.remember([key for key, old in zip(keys, before, strict=True) if old is _MISSING])
        return CacheUndo(keys, before, overwritten)

    def overwritten(
        self, keys: Sequence[str], states: Sequence[StoredState | None], timers: Mapping[str, Timers]
    ) -> CacheUndo:
        """Return the undo that gives keys these rows; a key without state and timers had none."""
        before = [
            _MISSING if state is None and not timers.get(key) else state
            for key, state in zip(keys, states, strict=True)
        ]
        return CacheUndo(keys, before, {key: timers.get(key, ()) for key in keys})

    def undo(self, undo: CacheUndo) -> None:
        if not self.is_complete:
            # Some of these rows may have been evicted since, and only files have all of them. A filter
            # made after the bundle lacks the rows that it deleted, though a file may have them.
            self.forget(undo.keys)
            self.remember(undo.keys)
            return
        self._take_out(undo.keys)
        known = [(key, old) for key, old in zip(undo.keys, undo.states, strict=True) if old is not _MISSING]
        self._states.update(known)
        self.used_bytes += _weight([key for key, _ in known], [old for _, old in known])
        self._set_timers(undo.timers)

    def remember(self, keys: Sequence[str] | pa.ChunkedArray) -> None:
        """Add keys that have rows, though they are not here, to the filter."""
        if self._existing is not None and len(keys):
            self._existing.add(keys if isinstance(keys, pa.ChunkedArray) else pa.array(keys, pa.string()))

    def evict(
        self,
        waits: Mapping[str, float],
        clocks: tuple[int, int] = (0, 0),
        expectations: Expectations = _NOTHING_LEARNED,
    ) -> int:
        """Evict rows until the cache is below its limit; return their number.

        ``waits`` are the times until the next timer, ``clocks`` the low watermark and the wall time.
        """
        if self.used_bytes <= self._limit_bytes():
            return 0
        # Cold rows have not been used since they were read, so they come first.
        cold = [] if self._cold is None else self._cold.keys
        keys = [*cold, *self._states]
        if self.is_complete:
            # From now on a missing key may have a row: the filter must know all keys before the first one goes.
            self.start_without_rows(len(keys))
            self.remember(keys)
        candidates = Candidates(
            keys=keys,
            waits=np.fromiter(map(waits.get, keys, repeat(NEVER)), np.float64, len(keys)),
            ages=self.uses.ages(keys, clocks),
            expectations=expectations,
        )
        order = self._policy(candidates)
        hot = [ROW_BYTES + len(key) + len(state or "") for key, state in self._states.items()]
        if self._timers:
            of_timers = (self._weigh(self._timers.get(key, ())) for key in self._states)
            hot = [weight + more for weight, more in zip(hot, of_timers, strict=True)]
        weights = np.asarray(hot if self._cold is None else [*self._cold.weights.tolist(), *hot])
        freed = np.cumsum(weights[order])
        # The filter takes a part of the limit, which may be less than before.
        surplus = self.used_bytes - int(_KEEP * self._limit_bytes())
        count = min(int(np.searchsorted(freed, surplus)) + 1, len(keys))
        evicted = order[:count]
        self.forget([keys[index] for index in evicted[evicted >= len(cold)].tolist()])
        if self._cold is not None:
            self.used_bytes -= self._cold.drop(keys[index] for index in evicted[evicted < len(cold)].tolist())
        self.uses.keep_only(self._states)
        return count

    def forget(self, keys: Sequence[str]) -> None:
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

    def _set_timers(self, timers: Mapping[str, Timers]) -> dict[str, Timers]:
        former = {}
        for key, new in timers.items():
            old = former[key] = self._timers.pop(key, ())
            if new:
                self._timers[key] = new
            self.used_bytes += self._weigh(new) - self._weigh(old)
        return former


def _weight(keys: Sequence[str], states: Iterable[_Cached]) -> int:
    return ROW_BYTES * len(keys) + sum(map(len, keys)) + size_of_states(filter(None, states))  # type: ignore[arg-type]


class MemoryBudget:
    """A bound on the soft state of all intervals of a process; threads may share it.

    An interval may use the memory that the others leave, and its part of the budget always. So a lone or hot interval has
    nearly all of it, and an idle one gives up its surplus when others need it.

    Args:
        budget_bytes: the bound, in bytes by estimate.
        other_bytes: returns the process's other memory, which soft state gives way to with at most half of its budget.
    """

    def __init__(self, budget_bytes: int, other_bytes: Callable[[], int] = lambda: 0) -> None:
        self._budget_bytes = budget_bytes
        self._least_bytes = budget_bytes - budget_bytes // 2
        self._other_bytes = other_bytes
        self._lock = threading.Lock()
        self._used: dict[Interval, int] = {}
        self.used_bytes: int = 0

    @property
    def is_exceeded(self) -> bool:
        """True if intervals over their limit should shrink, even while they are idle."""
        return self.used_bytes > max(self._budget_bytes - self._other_bytes(), self._least_bytes)

    def limit_of(self, interval: Interval) -> int:
        with self._lock:
            return self._limit(interval, len(self._used) + (interval not in self._used))

    def report(self, interval: Interval, used_bytes: int) -> int:
        with self._lock:
            self.used_bytes += used_bytes - self._used.get(interval, 0)
            self._used[interval] = used_bytes
            return self._limit(interval, len(self._used))

    def leave(self, interval: Interval) -> None:
        with self._lock:
            self.used_bytes -= self._used.pop(interval, 0)

    def _limit(self, interval: Interval, intervals: int) -> int:
        budget_bytes = max(self._budget_bytes - self._other_bytes(), self._least_bytes)
        others = self.used_bytes - self._used.get(interval, 0)
        return max(budget_bytes - others, budget_bytes // intervals)
