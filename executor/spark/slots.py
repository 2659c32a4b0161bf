"""Slots: which task of a superstep runs which intervals, the same ones in each superstep."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from itertools import count
from typing import Final

from millpond.executor.bundle.interval_plan import IntervalPlan
from millpond.executor.bundle.result import Manifest
from millpond.executor.ownership.cut import Cut
from millpond.executor.python_workers.task_plan import SlotParts
from millpond.statestore.interval import Interval

_REMEMBERED: Final = 4
"""Over about how many supersteps the work of an interval is averaged."""

_UNEVEN: Final = 1.5
"""How many times the mean a slot may have before an interval of it moves."""

_WORTH_MOVING: Final = 0.1
"""The least part of the gap that a move closes: less is not worth reading the rows again."""


class Slots:
    """The position of each interval, by which a task is found: the slot is the position modulo the number of slots.

    An interval keeps its position, so that its slot has its soft state. One that comes later goes to the slot with the
    least work; while none is known, to the slots in turn.

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
        self._work_us: dict[Interval, float] = {}
        self._processes: dict[int, str] = {}

    def position_of(self, interval: Interval) -> int:
        """The position of an interval, from now on if it has had none."""
        if interval not in self._positions:
            self._positions[interval] = self._free_position(self._least_loaded())
        return self._positions[interval]

    def note(self, manifests: Iterable[Manifest]) -> None:
        """Take in how much work intervals were."""
        for manifest in manifests:
            before = self._work_us.get(manifest.interval, manifest.work_us)
            self._work_us[manifest.interval] = before + (manifest.work_us - before) / _REMEMBERED

    def follow(self, cut: Cut) -> None:
        """Give intervals that replace others their slots: the first keeps the one whose process knows its rows."""
        first = self._positions.get(cut.replaced[0])
        work_us = sum(self._work_us.pop(interval, 0.0) for interval in cut.replaced)
        for interval in cut.replaced:
            self._positions.pop(interval, None)
        if first is None:
            return
        self._positions[cut.by[0]] = first
        for interval in cut.by:
            self._work_us[interval] = work_us / len(cut.by)
            self.position_of(interval)

    def keep(self, intervals: Iterable[Interval]) -> None:
        """Forget all other intervals: the pipeline no longer has them."""
        for gone in self._positions.keys() - set(intervals):
            del self._positions[gone]
            self._work_us.pop(gone, None)

    def level(self) -> Interval | None:
        """Move an interval from the slot with the most work to the one with the least, where that evens them out much.

        Returns:
            The interval that has moved: its next process reads its rows again.
        """
        work_us = self._work_by_slot()
        most, least = max(work_us, key=work_us.__getitem__), min(work_us, key=work_us.__getitem__)
        mean = sum(work_us.values()) / self.count
        if work_us[most] <= _UNEVEN * mean:
            return None
        gap = work_us[most] - work_us[least]
        there = [one for one, position in self._positions.items() if position % self.count == most]
        # What moves must not make the other slot the fuller one; a hot interval alone is split instead.
        movable = [one for one in there if 0 < self._work_us.get(one, 0.0) <= gap / 2]
        if len(there) < 2 or not movable:
            return None
        moved = max(movable, key=lambda one: self._work_us[one])
        if self._work_us[moved] < _WORTH_MOVING * gap:
            return None
        self._positions[moved] = self._free_position(least)
        return moved

    def _work_by_slot(self) -> dict[int, float]:
        work_us = dict.fromkeys(range(self.count), 0.0)
        for interval, position in self._positions.items():
            work_us[position % self.count] += self._work_us.get(interval, 0.0)
        return work_us

    def _least_loaded(self) -> int:
        """The slot with the least work; of those with as little, the one with the fewest intervals."""
        work_us = self._work_by_slot()
        held = Counter(position % self.count for position in self._positions.values())
        return min(range(self.count), key=lambda slot: (work_us[slot], held[slot], slot))

    def _free_position(self, slot: int) -> int:
        taken = set(self._positions.values())
        return next(position for position in count(slot, self.count) if position not in taken)

    def parts_of(self, parts: Iterable[IntervalPlan]) -> SlotParts:
        """What is to run, by position."""
        return {self.position_of(part.interval): part for part in parts}

    def tasks_for(self, positions: Collection[int]) -> int:
        """How many tasks run these positions: those of the slots up to the last one that has any."""
        return 1 + max((position % self.count for position in positions), default=0)

    def at_home(self, processes: Mapping[int, str]) -> int:
        """How many slots ran in the process that they ran in before; the first time counts as well.

        Args:
            processes: the process of each slot that ran.
        """
        at_home = sum(self._processes.get(slot, process) == process for slot, process in processes.items())
        self._processes.update(processes)
        return at_home
