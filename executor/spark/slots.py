"""
Slots: which task of a superstep runs which intervals, the same ones in each superstep.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from millpond.executor.python_workers.task_plan import SlotParts
from millpond.executor.superstep.plan import IntervalPlan
from millpond.statestore.interval import Interval

__all__ = ["Slots"]


class Slots:
    """
    The position of each interval, by which a task is found: the slot is the position modulo the number of slots.

    An interval keeps its position, so that its slot has its soft state. Those that come later are dealt to the slots
    in turn.

    Args:
        count: the number of slots.

    Example:
        >>> slots = Slots(2)
        >>> [slots.position_of(Interval("c", "", "m")), slots.position_of(Interval("c", "m"))]
        [0, 1]
        >>> slots.position_of(Interval("c", "", "m"))
        0
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._positions: dict[Interval, int] = {}
        self._processes: dict[int, str] = {}

    def position_of(self, interval: Interval) -> int:
        """
        The position of an interval, from now on if it has had none.
        """
        return self._positions.setdefault(interval, len(self._positions))

    def parts_of(self, parts: Iterable[IntervalPlan]) -> SlotParts:
        """
        What is to run, by position.
        """
        return {self.position_of(part.interval): part for part in parts}

    def tasks_for(self, positions: Collection[int]) -> int:
        """
        How many tasks run these positions: those of the slots up to the last one that has any.
        """
        return 1 + max((position % self.count for position in positions), default=0)

    def at_home(self, processes: Mapping[int, str]) -> int:
        """
        How many slots ran in the process that they ran in before; the first time counts as well.

        Args:
            processes: the process of each slot that ran.
        """
        at_home = sum(self._processes.get(slot, process) == process for slot, process in processes.items())
        self._processes.update(processes)
        return at_home
