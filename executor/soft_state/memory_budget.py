"""The memory budget of a process: the soft state of its intervals shares one bound (MillWheel §8.3).

An interval may use what the others leave, and its part of the budget always. So one that is alone, or hot, has nearly
all of it, and what an idle one has kept is taken back when others need it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

from millpond.statestore.interval import Interval

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
