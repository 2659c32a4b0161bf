"""Slots: which task of a superstep runs which intervals, the same ones in each superstep.

Where slots run: each in the same worker process in every superstep, so that its soft state is there.

On one machine the worker processes find each other (`hand_over`), whichever of them Spark gives a task to. On a cluster
a slot is tied to an executor first: Spark prefers, for a task whose data hangs by narrow dependencies on a cached
partition, the executor that has it. So there is a cached table with a row for each slot, the anchor, and what a slot
gets is joined to it, with the anchor on the left: the scheduler takes the first dependency that has a preference.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from itertools import count
from typing import TYPE_CHECKING, Any, Final, Protocol

from pyspark.sql.functions import col, expr, lit

from millpond.executor.interval.row_update import Manifest
from millpond.executor.interval.worker import IntervalPlan
from millpond.executor.ownership.cuts import Cut
from millpond.executor.spark.session import is_one_machine
from millpond.executor.spark.task_plan import SlotParts
from millpond.statestore.interval import Interval

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession


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


_LOG = logging.getLogger("millpond")
_SLOT: Final = "__millpond_slot"
_SETTLING_MS: Final = 50
"""How long it takes to settle a slot: so long that no executor settles two of them before another one has got any."""

_ROUNDS_MAX: Final = 4

_SLOTS_A_CORE: Final = 4
"""How far a cluster may grow before some of it has nothing to do, by the price of a task for each slot."""


class Homes(Protocol):
    """Brings to each slot what it gets."""

    @property
    def slots(self) -> int:
        """How many slots there are."""
        ...

    def settle(self) -> None:
        """Follow the executors: called before each superstep."""
        ...

    @property
    def slots_per_process(self) -> int:
        """How many slots a worker process is home to."""
        ...

    def place(self, frame: DataFrame, slot: Column, tasks: int) -> DataFrame:
        """The rows of a frame, each in the partition of its slot.

        Args:
            frame: the rows.
            slot: their slots, as an integer.
            tasks: the number of slots up to the last one with work.
        """
        ...

    def empty(self, tasks: int) -> DataFrame:
        """A frame with a partition for each slot, whose rows mean nothing."""
        ...

    def close(self) -> None:
        """Give back what Spark keeps."""
        ...


def homes_for(session: SparkSession, intervals: int, name: str) -> Homes:
    """The homes of a pipeline's slots, as it suits the master.

    On one machine there are as many slots as tasks run at once. A cluster may grow: there a core has several slots, so
    that executors that join get some, but not more than a computation has intervals. Executors of several cores get
    one for each: a process that is home to two could not run them at once.

    Args:
        session: the engine's session, without adaptive execution.
        intervals: into how many intervals a computation is divided.
        name: tells the anchor from those of other runs.
    """
    context = session.sparkContext
    at_once = max(1, context.defaultParallelism)
    if is_one_machine(context.master or "local"):
        return OneMachine(session, at_once)
    cores = int(context.getConf().get("spark.executor.cores", "1") or 1)
    grown = min(intervals, _SLOTS_A_CORE * at_once) if cores == 1 else 0
    return Anchor(session, max(at_once, grown), cores, name)


class OneMachine:
    """Slots on the driver's machine, one for each worker process.

    Args:
        session: the engine's session.
        slots: how many tasks run at once.
    """

    def __init__(self, session: SparkSession, slots: int) -> None:
        self._session = session
        self.slots = slots

    def settle(self) -> None:
        """Do nothing: the machine stays the same."""

    @property
    def slots_per_process(self) -> int:
        """One."""
        return 1

    def place(self, frame: DataFrame, slot: Column, tasks: int) -> DataFrame:
        """The rows in as many partitions as there are tasks."""
        return frame.repartitionById(tasks, slot)

    def empty(self, tasks: int) -> DataFrame:
        """As many partitions as there are tasks, without a shuffle."""
        return self._session.range(0, tasks, 1, tasks)

    def close(self) -> None:
        """Do nothing: Spark keeps nothing."""


class Anchor:
    """Slots on the executors of a cluster.

    The slots of an executor that is lost are settled on others, once; executors that join get their share of those of the
    others. Spark does both within a job that takes a moment.

    Args:
        session: the engine's session, without adaptive execution.
        slots: how many there are.
        cores: how many tasks an executor runs at once.
        name: tells it from the anchors of other runs, which Spark would take for the same.
    """

    def __init__(self, session: SparkSession, slots: int, cores: int, name: str) -> None:
        self._context: Any = session.sparkContext._jsc.sc()  # noqa: SLF001 - the JVM's, as all of Spark's scheduler
        self._jvm: Any = session.sparkContext._jvm  # noqa: SLF001
        self.slots = slots
        self._cores = cores
        self._executors: frozenset[str] | None = None
        numbers = session.range(slots).select(col("id").cast("int").alias(_SLOT))
        settling = expr(f"java_method('java.lang.Thread', 'sleep', {_SETTLING_MS}L)")
        self._frame = numbers.repartitionById(slots, col(_SLOT)).select(_SLOT, settling, lit(name)).cache()
        cached = self._frame._jdf.queryExecution().withCachedData()  # noqa: SLF001
        self._cached_id: int = cached.cacheBuilder().cachedColumnBuffers().id()

    def settle(self) -> None:
        """Settle the slots that have no executor, and move those that others have too many of."""
        executors = self._living()
        if executors == self._executors:
            return
        self._executors = executors
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
        """The slots by the cores of all executors, rounded up."""
        return -(-self.slots // max(1, self._cores * self._size))

    def place(self, frame: DataFrame, slot: Column, tasks: int) -> DataFrame:
        """The rows joined to the anchor, in a partition for each slot, with work or without."""
        del tasks
        routed = frame.withColumn(_SLOT, slot).repartitionById(self.slots, col(_SLOT))
        return (
            self._frame.select(_SLOT).hint("merge").join(routed, _SLOT).select(*map(_quoted, frame.columns))
        )

    def empty(self, tasks: int) -> DataFrame:
        """The anchor itself."""
        del tasks
        return self._frame.select(_SLOT)

    def close(self) -> None:
        """Drop the anchor."""
        self._frame.unpersist()

    def executors_by_slot(self) -> Mapping[int, str]:
        """The executor of each slot that has one."""
        executors = {}
        for slot in range(self.slots):
            places = self._blocks.getLocations(self._block(slot))
            if places.size():
                executors[slot] = str(places.apply(0).executorId())
        return executors

    def surplus(self) -> list[int]:
        """The slots that executors have beyond their share."""
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

    def _living(self) -> frozenset[str]:
        ids = self._context.getExecutorIds()
        return frozenset(str(ids.apply(index)) for index in range(ids.size()))


def _quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"
