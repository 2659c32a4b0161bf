"""The choice of rows to evict when memory is short (MillWheel §8.3).

A row that waits for its window to close was modified last and is needed last: the case that a least-recently-used
cache gets wrong. The engine knows the timers, so it expects each row at its next timer or its next record, whichever
comes first, and evicts the row that is expected last. It estimates when records come from the age of each row's last
use, and from a sample of uses, each followed to the row's next use.

`least_recently_used` is the baseline to beat; `python -m benchmarks.cache` compares both with the optimum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

# The wait of a row without timers, and the age of a row that was never used.
NEVER: Final = float("inf")

Waits: TypeAlias = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectations:
    """The causes of row uses in an interval.

    Attributes:
        by_record: the share of uses of timer-waiting rows that a record causes before the timer.
        record_gap: the average time from a use to that record, in microseconds.
        free_gap: the average time between uses of a row without timers, in microseconds.
    """

    by_record: float = 0.0
    record_gap: float = 0.0
    free_gap: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """Rows among which to evict, in order of their last use.

    Attributes:
        waits: the time until each row's next timer, in microseconds, or `NEVER`.
        ages: the time since each row's last use, in microseconds; `NEVER`: not since it was read.
    """

    keys: Iterable[str]
    waits: Waits
    ages: Waits
    expectations: Expectations = Expectations()


EvictionPolicy: TypeAlias = Callable[[Candidates], npt.NDArray[np.intp]]
"""Returns the positions of the rows in order of eviction."""


def window_aware(candidates: Candidates) -> npt.NDArray[np.intp]:
    """Order the rows by the time at which they are expected, latest first; among equals the least recently used first.

    A row that waits for a timer is needed then, or earlier by a record, which is the less likely the longer none has
    come. A row without timers is expected to be unused for its age, or for the average gap of such rows if longer.
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
    """Keep the rows in the order of their last use, whatever they wait for."""
    return np.arange(len(candidates.waits), dtype=np.intp)


# Uses sampled in a bundle, and uses followed at once.
_SAMPLED: Final = 64
_FOLLOWED_MAX: Final = 8_192
# After so many uses, older ones count half.
_WEIGHT_MAX: Final = 4_096.0

# The low watermark and the wall time.
_Clocks: TypeAlias = tuple[int, int]
_WaitOf: TypeAlias = Callable[[str], float]


class UseStatistics:
    """Learns how often and how soon records come to rows, with and without timers.

    A sample is followed even if its row is evicted meanwhile, so the result does not depend on the cache's content.
    """

    def __init__(self) -> None:
        self._followed: dict[str, tuple[_Clocks, bool]] = {}
        self._by_record = self._by_timer = 1.0
        self._record_gaps = 0.0
        self._free_uses = 1.0
        self._free_gaps = 0.0

    def record_uses(self, keys: Sequence[str], wait_of: _WaitOf, clocks: _Clocks) -> None:
        """Record the uses of a bundle, before it changes any timer.

        ``wait_of`` returns a row's wait for its next timer; if it is 0 or less, the timer causes the use.
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
        if self._by_record + self._by_timer > _WEIGHT_MAX:
            self._by_record, self._by_timer = self._by_record / 2, self._by_timer / 2
            self._record_gaps /= 2
        if self._free_uses > _WEIGHT_MAX:
            self._free_uses, self._free_gaps = self._free_uses / 2, self._free_gaps / 2

    def follow(self, keys: Sequence[str], wait_of: _WaitOf, clocks: _Clocks) -> None:
        """Follow some uses of a bundle from now on, after it has changed timers."""
        for key in keys[:: len(keys) // _SAMPLED + 1]:
            self._followed[key] = clocks, wait_of(key) != NEVER
        while len(self._followed) > _FOLLOWED_MAX:
            at, waits = self._followed.pop(next(iter(self._followed)))
            if not waits:
                # The time without a use counts too, otherwise rarely used rows would seem used often.
                self._free_gaps += _between(at, clocks)

    def expectations(self, clocks: _Clocks) -> Expectations:
        unused = sum(_between(at, clocks) for at, waits in self._followed.values() if not waits)
        return Expectations(
            by_record=self._by_record / (self._by_record + self._by_timer),
            record_gap=self._record_gaps / self._by_record,
            free_gap=(self._free_gaps + unused) / self._free_uses,
        )


def _between(at: _Clocks, now: _Clocks) -> float:
    return float(max(now[0] - at[0], now[1] - at[1]))
