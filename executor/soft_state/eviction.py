"""
Which rows to evict when memory is short (MillWheel §8.3).

A row that waits for its window to close was modified last and will be needed last: the case
that a least-recently-used cache gets wrong. The engine knows the timers, so it first evicts
rows that wait for nothing, then those whose next timer is furthest away.
Policies are functions of plain columns; `least_recently_used` is the baseline to beat.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["NEVER", "EvictionPolicy", "least_recently_used", "window_aware"]

NEVER: Final = float("inf")
"""The wait of a row without timers."""

Waits: TypeAlias = npt.NDArray[np.float64]

EvictionPolicy: TypeAlias = Callable[[Waits], npt.NDArray[np.intp]]
"""
Takes how long each row waits for its next timer, in microseconds (`NEVER`: it has none), for
rows in order of their last use; returns the positions of the rows in order of eviction.
"""


def window_aware(waits: Waits) -> npt.NDArray[np.intp]:
    """
    Rows without timers first, then those with the furthest next timer; among equals, the least recently used.

    Example:
        >>> window_aware(np.array([5.0, NEVER, 90.0])).tolist()
        [1, 2, 0]
    """
    return np.argsort(-waits, kind="stable")


def least_recently_used(waits: Waits) -> npt.NDArray[np.intp]:
    """
    The least recently used first, whatever the rows wait for.
    """
    return np.arange(len(waits), dtype=np.intp)
