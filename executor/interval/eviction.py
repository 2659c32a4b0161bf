"""Which rows to evict when memory is short (MillWheel §8.3).

A row that waits for its window to close was modified last and will be needed last: the case that a
least-recently-used cache gets wrong. The engine knows the timers, so it estimates when each row is needed next: at its
next timer, or with its next record, whichever comes first. Of records it knows how long ago the last one came, and how
often a row that waits for a timer is needed by a record before. So it first evicts the rows that are needed last.

Policies are functions of plain columns; `least_recently_used` is the baseline to beat, and `python -m benchmarks.cache`
compares them with the optimum.

When rows were used last, at the cost of one entry for a bundle.

A cache keeps its rows in order of their last use. So it is enough to know when the first row of each bundle was used:
those behind it were used then, up to the first row of the next bundle.

What rows are used by: learned from a sample of uses, each followed to the row's next use.

A sample is followed whether or not its row is evicted meanwhile, so what is learned does not depend on what is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

NEVER: Final = float("inf")
"""The wait of a row without timers, and the age of one that was never used."""

Waits: TypeAlias = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectations:
    """What rows are used by, in this interval.

    Attributes:
        by_record: how often a row that waits for a timer is used by a record before, of all its uses.
        record_gap: how long after a use that record comes on average, in microseconds.
        free_gap: how long a row without timers is not used on average, in microseconds.
    """

    by_record: float = 0.0
    record_gap: float = 0.0
    free_gap: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """Rows of which some are to be evicted, in order of their last use.

    Attributes:
        keys: their keys.
        waits: how long each waits for its next timer, in microseconds; `NEVER`: it has none.
        ages: how long ago each was used, in microseconds; `NEVER`: not since it was read.
        expectations: what rows are used by.
    """

    keys: Iterable[str]
    waits: Waits
    ages: Waits
    expectations: Expectations = Expectations()


EvictionPolicy: TypeAlias = Callable[[Candidates], npt.NDArray[np.intp]]
"""Returns the positions of the rows in order of eviction."""


def window_aware(candidates: Candidates) -> npt.NDArray[np.intp]:
    """The rows first that are expected to be needed last; among equals the least recently used.

    A row that waits for a timer is needed then, or before by a record: that is the less likely the longer none has
    come. A row without timers is expected to be unused for as long as it has been, or as such rows are on average.

    Example:
        >>> waits, ages = np.array([5.0, NEVER, 90.0]), np.array([40.0, 30.0, 20.0])
        >>> window_aware(Candidates(keys="abc", waits=waits, ages=ages)).tolist()
        [2, 1, 0]
    """
    expected, waits, ages = candidates.expectations, candidates.waits, candidates.ages
    gap = max(expected.record_gap, 1.0)
    still = expected.by_record * np.exp(-ages / gap)
    by_record = still / (still + 1 - expected.by_record) if expected.by_record < 1 else np.ones(len(ages))
    is_free = np.isinf(waits)
    waiting = by_record * gap + (1 - by_record) * np.where(is_free, 0.0, waits)
    needed = np.where(is_free, np.maximum(ages, expected.free_gap), waiting)
    return np.argsort(-needed, kind="stable")


def least_recently_used(candidates: Candidates) -> npt.NDArray[np.intp]:
    """The least recently used first, whatever the rows wait for."""
    return np.arange(len(candidates.waits), dtype=np.intp)


class LastUses:
    """The times at which runs of rows were used last, on two clocks.

    Example:
        >>> uses = LastUses()
        >>> uses.note("a", (10, 0))
        >>> uses.note("c", (30, 1))
        >>> uses.ages(["a", "b", "c"], (50, 1)).tolist()
        [40.0, 40.0, 20.0]
    """

    def __init__(self) -> None:
        self._at: dict[str, tuple[int, int]] = {}

    def note(self, first: str, clocks: tuple[int, int]) -> None:
        """Note a bundle by the first of its rows, which are now the last ones of the cache.

        Args:
            first: its key.
            clocks: low watermark and wall time.
        """
        self._at[first] = clocks

    def ages(self, keys: Iterable[str], clocks: tuple[int, int]) -> npt.NDArray[np.float64]:
        """How long ago each row was used, in microseconds of the clock on which that is longer.

        A bundle whose first row has been used again counts to the one before.

        Args:
            keys: all rows in order of their last use.
            clocks: low watermark and wall time.
        """
        now_event, now_wall = clocks
        age = float("inf")
        ages: list[float] = []
        for key in keys:
            at = self._at.get(key)
            if at is not None:
                # Of a row that was put back, an older bundle's entry is left.
                age = min(age, float(max(now_event - at[0], now_wall - at[1])))
            ages.append(age)
        return np.array(ages, np.float64)

    def keep_only(self, keys: Iterable[str]) -> None:
        """Forget the bundles that begin with any other row."""
        self._at = {key: self._at[key] for key in self._at.keys() & set(keys)}


_SAMPLED: Final = 64
_FOLLOWED_MAX: Final = 8_192
_WEIGHT_MAX: Final = 4_096.0
"""How many uses of a bundle are sampled, how many are followed at once, and after how many older ones count half."""

_Clocks: TypeAlias = tuple[int, int]
_WaitOf: TypeAlias = Callable[[str], float]


class UseStatistics:
    """How often records come to rows that wait for a timer, and how soon, and how soon rows without timers are used again."""

    def __init__(self) -> None:
        self._followed: dict[str, tuple[_Clocks, bool]] = {}
        self._by_record = self._by_timer = 1.0
        self._record_gaps = 0.0
        self._free_uses = 1.0
        self._free_gaps = 0.0

    def note_uses(self, keys: Sequence[str], wait_of: _WaitOf, clocks: _Clocks) -> None:
        """Note the uses of a bundle, before it changes any timer.

        Args:
            keys: the rows that it uses.
            wait_of: how long a row waits for its next timer; 0 or less: the timer is why it is used.
            clocks: low watermark and wall time.
        """
        for key in filter(self._followed.__contains__, keys):
            at, waits = self._followed.pop(key)
            gap = _between(at, clocks)
            if not waits:
                self._free_uses += 1
                self._free_gaps += gap
            elif wait_of(key) <= 0:
                self._by_timer += 1
            else:
                self._by_record += 1
                self._record_gaps += gap
        self._forget()

    def follow(self, keys: Sequence[str], wait_of: _WaitOf, clocks: _Clocks) -> None:
        """Follow some uses of a bundle from now on, after it has changed timers."""
        for key in keys[:: len(keys) // _SAMPLED + 1]:
            self._followed[key] = clocks, wait_of(key) != NEVER
        while len(self._followed) > _FOLLOWED_MAX:
            at, waits = self._followed.pop(next(iter(self._followed)))
            if not waits:
                # It was not used for so long: that is known of it as well.
                self._free_gaps += _between(at, clocks)

    def expectations(self, clocks: _Clocks) -> Expectations:
        """What to expect of rows."""
        unused = sum(_between(at, clocks) for at, waits in self._followed.values() if not waits)
        return Expectations(
            by_record=self._by_record / (self._by_record + self._by_timer),
            record_gap=self._record_gaps / self._by_record,
            free_gap=(self._free_gaps + unused) / self._free_uses,
        )

    def _forget(self) -> None:
        if self._by_record + self._by_timer > _WEIGHT_MAX:
            self._by_record, self._by_timer = self._by_record / 2, self._by_timer / 2
            self._record_gaps /= 2
        if self._free_uses > _WEIGHT_MAX:
            self._free_uses, self._free_gaps = self._free_uses / 2, self._free_gaps / 2


def _between(at: _Clocks, now: _Clocks) -> float:
    """How long ago that was, on the clock that has gone further."""
    return float(max(now[0] - at[0], now[1] - at[1]))
