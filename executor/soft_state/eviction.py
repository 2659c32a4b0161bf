"""Which rows to evict when memory is short (MillWheel §8.3).

A row that waits for its window to close was modified last and will be needed last: the case that a
least-recently-used cache gets wrong. The engine knows the timers, so it estimates when each row is needed next: at its
next timer, or with its next record, whichever comes first. Of records it knows how long ago the last one came, and how
often a row that waits for a timer is needed by a record before. So it first evicts the rows that are needed last.

Policies are functions of plain columns; `least_recently_used` is the baseline to beat, and `python -m benchmarks.cache`
compares them with the optimum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
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
