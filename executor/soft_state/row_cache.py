"""The row cache: encoded states and timers of keys, within a budget of bytes (MillWheel §8.3).

Until the first eviction, a key that is not here has no row. After it, a filter of all keys
that ever had a row answers for most new keys, and the others are read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import repeat
from typing import Final, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from millpond.executor.computation.stored_state import StoredState
from millpond.executor.computation.timer import Timers
from millpond.executor.soft_state.cold_rows import ColdRows
from millpond.executor.soft_state.eviction import (
    NEVER,
    Candidates,
    EvictionPolicy,
    Expectations,
    window_aware,
)
from millpond.executor.soft_state.last_uses import LastUses
from millpond.executor.soft_state.row_reader import LoadedRows
from millpond.executor.soft_state.row_summary import ROW_BYTES, TIMER_BYTES, RowSummary
from millpond.statestore.rows.bloom import RecordIdFilter
from millpond.statestore.rows.row import TimeDomain

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
