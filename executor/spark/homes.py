"""Where slots run: each in the same worker process in every superstep, so that its soft state is there.

On one machine the worker processes find each other (`hand_over`), whichever of them Spark gives a task to. On a cluster
a slot is tied to an executor first: Spark prefers, for a task whose data hangs by narrow dependencies on a cached
partition, the executor that has it. So there is a cached table with a row for each slot, the anchor, and what a slot
gets is joined to it, with the anchor on the left: the scheduler takes the first dependency that has a preference.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, Protocol

from pyspark.sql.functions import col, expr, lit

from millpond.executor.spark.session import is_one_machine

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

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
