"""The slots of a superstep's intervals, and the homes of slots: worker processes that keep their soft state.

On one machine the worker processes find each other (`hand_over`), whichever of them Spark gives a task to. On a cluster
a slot is tied to an executor: for a task that depends narrowly on a cached partition, Spark prefers the executor with
that partition. So the anchor, a cached table with a row for each slot, is joined to the rows of a superstep, on the left
because the scheduler takes the first dependency with a preference.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from itertools import count
from typing import Any, Final

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql.functions import col, expr, lit

from millpond.executor.interval.bundle import IntervalPlan
from millpond.executor.interval.row_update import Manifest
from millpond.executor.ownership.cuts import Cut
from millpond.executor.spark.key_sql import quoted
from millpond.executor.spark.session import is_one_machine
from millpond.executor.spark.task_plan import SETTLING_MS, SlotParts
from millpond.statestore.interval import Interval

_REMEMBERED: Final = 4
"""Supersteps in the running mean of an interval's work, about."""

_UNEVEN: Final = 1.5
"""A slot's work, as a multiple of the mean, above which one of its intervals moves."""

_WORTH_MOVING: Final = 0.1
"""The least part of the gap that a move must close, because its rows must be read again."""


class Slots:
    """The positions of intervals. The slot is the position modulo the number of slots.

    An interval keeps its position, so that its slot has its soft state. A new interval goes to the slot with the least
    work, or to the slots in turn while no work is known.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._positions: dict[Interval, int] = {}
        self._work_us: dict[Interval, float] = {}
        self._processes: dict[int, str] = {}

    def position_of(self, interval: Interval) -> int:
        if interval not in self._positions:
            # The slot with the least work, then with the fewest intervals.
            work_us = self._work_by_slot()
            held = Counter(position % self.count for position in self._positions.values())
            least = min(range(self.count), key=lambda slot: (work_us[slot], held[slot], slot))
            self._positions[interval] = self._free_position(least)
        return self._positions[interval]

    def record(self, manifests: Iterable[Manifest]) -> None:
        for manifest in manifests:
            before = self._work_us.get(manifest.interval, manifest.work_us)
            self._work_us[manifest.interval] = before + (manifest.work_us - before) / _REMEMBERED

    def apply(self, cut: Cut) -> None:
        """Give new intervals positions. The first keeps the slot whose process has its rows."""
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
        """Drop all other intervals, which the pipeline no longer has."""
        for gone in self._positions.keys() - set(intervals):
            del self._positions[gone]
            self._work_us.pop(gone, None)

    def level(self) -> Interval | None:
        """Move an interval from the slot with the most work to the one with the least, and return it; ``None`` if even."""
        work_us = self._work_by_slot()
        most, least = max(work_us, key=work_us.__getitem__), min(work_us, key=work_us.__getitem__)
        mean = sum(work_us.values()) / self.count
        if work_us[most] <= _UNEVEN * mean:
            return None
        gap = work_us[most] - work_us[least]
        there = [one for one, position in self._positions.items() if position % self.count == most]
        # A move must not make the other slot the fuller one. A hot interval alone is split instead.
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

    def _free_position(self, slot: int) -> int:
        taken = set(self._positions.values())
        return next(position for position in count(slot, self.count) if position not in taken)

    def parts_of(self, parts: Iterable[IntervalPlan]) -> SlotParts:
        return {self.position_of(part.interval): part for part in parts}

    def tasks_for(self, positions: Collection[int]) -> int:
        """Return the number of slots up to the last one with a position."""
        return 1 + max((position % self.count for position in positions), default=0)

    def at_home(self, processes: Mapping[int, str]) -> int:
        """Count the slots that ran in the same process as before, or for the first time."""
        at_home = sum(self._processes.get(slot, process) == process for slot, process in processes.items())
        self._processes.update(processes)
        return at_home


_LOG = logging.getLogger("millpond")
_SLOT: Final = "__millpond_slot"
_ROUNDS_MAX: Final = 4

_SLOTS_A_CORE: Final = 4
"""The growth of a cluster up to which every executor gets slots, at the price of a task for each slot."""


def homes_for(session: SparkSession, intervals: int, name: str) -> OneMachine | Anchor:
    """Return the homes of a pipeline's slots that suit the master.

    One machine has as many slots as tasks run at once. A cluster may grow, so a core has several slots there, up to the
    number of a computation's ``intervals``: executors that join get some. Executors of several cores get one slot for
    each core, because a process that is home to two slots could not run them at once. ``name`` distinguishes the
    anchors of several runs.
    """
    context = session.sparkContext
    at_once = max(1, context.defaultParallelism)
    if is_one_machine(context.master or "local"):
        return OneMachine(session, at_once)
    cores = int(context.getConf().get("spark.executor.cores", "1") or 1)
    grown = min(intervals, _SLOTS_A_CORE * at_once) if cores == 1 else 0
    return Anchor(session, max(at_once, grown), cores, name)


class OneMachine:
    """Slots on the driver's machine, one for each worker process."""

    slots_per_process: int = 1
    is_one_machine: bool = True

    def __init__(self, session: SparkSession, slots: int) -> None:
        self._session = session
        self.slots = slots

    def settle(self) -> None:
        """Adapt to the living executors before a superstep: the machine stays the same."""

    def place(self, frame: DataFrame, slot: Column, tasks: int) -> DataFrame:
        """Move the rows of a frame to the partitions of their slots, of which the first ``tasks`` have work."""
        return frame.repartitionById(tasks, slot)

    def empty(self, tasks: int) -> DataFrame:
        """Return a frame with a partition for each task, whose rows have no meaning."""
        return self._session.range(0, tasks, 1, tasks)

    def close(self) -> None:
        """Release Spark's resources: there are none."""


class Anchor:
    """Slots on the executors of a cluster, each of which runs ``cores`` tasks at once.

    Slots of a lost executor go to others, and executors that join get their share of slots, both within a short job of
    Spark. Spark would take two anchors for the same table if they had one name.
    """

    is_one_machine: bool = False

    def __init__(self, session: SparkSession, slots: int, cores: int, name: str) -> None:
        self._context: Any = session.sparkContext._jsc.sc()  # noqa: SLF001 - only the JVM has the scheduler
        self._jvm: Any = session.sparkContext._jvm  # noqa: SLF001
        self.slots = slots
        self._cores = cores
        self._executors: frozenset[str] | None = None
        numbers = session.range(slots).select(col("id").cast("int").alias(_SLOT))
        settling = expr(f"java_method('java.lang.Thread', 'sleep', {SETTLING_MS}L)")
        self._frame = numbers.repartitionById(slots, col(_SLOT)).select(_SLOT, settling, lit(name)).cache()
        cached = self._frame._jdf.queryExecution().withCachedData()  # noqa: SLF001
        self._cached_id: int = cached.cacheBuilder().cachedColumnBuffers().id()

    def settle(self) -> None:
        ids = self._context.getExecutorIds()
        executors = frozenset(str(ids.apply(index)) for index in range(ids.size()))
        if executors == self._executors:
            return
        self._executors = executors
        # A count caches the slots without an executor. Uncaching the surplus lets the next count move it elsewhere.
        for _ in range(_ROUNDS_MAX):
            self._frame.count()
            surplus = self.surplus()
            if not surplus:
                return
            for slot in surplus:
                self._blocks.removeBlock(self._block(slot))
        self._frame.count()
        _LOG.info(
            "some executors have more slots than others: %s", Counter(self.executors_by_slot().values())
        )

    @property
    def slots_per_process(self) -> int:
        return -(-self.slots // max(1, self._cores * self._size))

    def place(self, frame: DataFrame, slot: Column, tasks: int) -> DataFrame:
        del tasks
        routed = frame.withColumn(_SLOT, slot).repartitionById(self.slots, col(_SLOT))
        return self._frame.select(_SLOT).hint("merge").join(routed, _SLOT).select(*map(quoted, frame.columns))

    def empty(self, tasks: int) -> DataFrame:
        del tasks
        return self._frame.select(_SLOT)

    def close(self) -> None:
        self._frame.unpersist()

    def executors_by_slot(self) -> Mapping[int, str]:
        executors = {}
        for slot in range(self.slots):
            places = self._blocks.getLocations(self._block(slot))
            if places.size():
                executors[slot] = str(places.apply(0).executorId())
        return executors

    def surplus(self) -> list[int]:
        share = -(-self.slots // max(1, self._size))
        taken: Counter[str] = Counter()
        surplus = []
        for slot, executor in self.executors_by_slot().items():
            taken[executor] += 1
            if taken[executor] > share:
                surplus.append(slot)
        return surplus

    @property
    def _size(self) -> int:
        return len(self._executors or ())

    @property
    def _blocks(self) -> Any:
        return self._context.env().blockManager().master()

    def _block(self, slot: int) -> Any:
        return self._jvm.org.apache.spark.storage.RDDBlockId(self._cached_id, slot)
