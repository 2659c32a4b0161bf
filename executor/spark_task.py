"""
What runs in a Spark task: the intervals of one slot, for one superstep.

A task is pure with respect to the store: it may run twice, at once or again (F12), and what
it writes counts only when the driver commits the manifest that it collected. Soft state lives
in the Python worker process and is trusted only for the committed file that this very process
wrote or read; `SoftState.synchronise` sees to that.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import cloudpickle
import pyarrow as pa
import pyarrow.compute as pc

from millpond.executor.bundle import Bundle, DeadLetter, Deliveries, InputObservation, Manifest
from millpond.executor.delivery import (
    ProductionSource,
    deliveries_of,
    describe_value,
    keyless_letters,
    read_productions,
    within,
)
from millpond.executor.interval_processor import IntervalProcessor
from millpond.executor.routed_columns import AT, COLUMNS, ERROR, ID, KEY, TARGET
from millpond.executor.soft_state import SoftState, StoreRowReader
from millpond.executor.superstep_plan import IntervalPlan
from millpond.executor.topology import ComputationNode
from millpond.executor.values import ArrowValues
from millpond.statestore.errors import InvalidError
from millpond.statestore.interval import Interval
from millpond.statestore.objects import open_objects
from millpond.statestore.rowfile import write_row_file
from millpond.statestore.system import SystemRng
from millpond.statestore.types import EventTimeMicros, Objects, Superstep, WallTimeMicros

__all__ = ["SLOT_REPORT_SCHEMA", "SlotReport", "TaskPlan", "make_task", "read_slot_reports"]

SLOT_REPORT_SCHEMA: Final = "report binary"
"""What a task yields: one pickled `SlotReport`."""

_DEAD_LETTERS_MAX: Final = 100_000
_PROCESSORS_MAX: Final = 4_096


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskPlan:
    """
    Everything that the tasks of one superstep are told.

    Attributes:
        url: root of the rows, with ``storage_options`` to open it.
        code: the pickled computations by name; ``code_digest`` tells whether a worker has them already.
        intervals: the intervals of the superstep; the one at position *i* belongs to slot ``i % slots``.
        input_stream: the outside stream whose records come with the partitions, if any.
        first_targets: positions of the input's first consumer, so that each record is counted once.
        cache_bytes: soft-state budget of one interval.
    """

    url: str
    storage_options: dict[str, str]
    pipeline: str
    code: bytes
    code_digest: str
    superstep: Superstep
    wall_time: WallTimeMicros
    slots: int
    intervals: tuple[IntervalPlan, ...]
    sources: tuple[ProductionSource, ...]
    input_stream: str | None
    first_targets: frozenset[int]
    cache_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotReport:
    """
    What one task reports to the driver.
    """

    manifests: tuple[Manifest, ...]
    dead_letters: tuple[DeadLetter, ...]
    inputs: tuple[InputObservation, ...]


def make_task(plan: TaskPlan) -> Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """
    The function that ``mapInArrow`` runs on each partition; partition *n* is slot *n*.
    """

    def task(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext

        context = TaskContext.get()
        slot = 0 if context is None else context.partitionId()
        report = run_slot(plan, slot, batches)
        yield pa.RecordBatch.from_pydict({"report": pa.array([pickle.dumps(report)], pa.binary())})

    return task


def read_slot_reports(pickled: Iterable[bytes]) -> tuple[SlotReport, ...]:
    """
    The reports that the driver collected; they come from its own tasks only.
    """
    return tuple(pickle.loads(data) for data in pickled)  # noqa: S301 - written by our own tasks


def run_slot(plan: TaskPlan, slot: int, batches: Iterable[pa.RecordBatch]) -> SlotReport:
    """
    Process every interval of a slot.

    Args:
        plan: the superstep.
        slot: which intervals.
        batches: the routed records of the outside input; ignored when the plan names none.
    """
    worker = _Worker.of(plan)
    records = _Records.read(plan, batches)
    manifests, letters = [], list(records.dead_letters())
    productions = _Productions(worker.objects, plan.sources)
    for position in range(slot, len(plan.intervals), plan.slots):
        part = plan.intervals[position]
        node = worker.nodes[part.interval.computation]
        found, keyless = productions.deliveries(node, part.interval)
        letters += keyless
        deliveries = [*records.deliveries(position), *found]
        if deliveries or part.due:
            manifests.append(worker.run(plan, part, node, deliveries))
    return SlotReport(
        manifests=tuple(manifests), dead_letters=tuple(letters), inputs=records.observations(plan)
    )


class _Worker:
    """
    What a Python worker process keeps between tasks; all of it can be rebuilt at any time.
    """

    _current: _Worker | None = None

    def __init__(self, plan: TaskPlan) -> None:
        self.url = plan.url
        self.code_digest = plan.code_digest
        self.objects = open_objects(plan.url, plan.storage_options)
        self.nodes: dict[str, ComputationNode] = cloudpickle.loads(plan.code)
        self._processors: dict[Interval, tuple[IntervalProcessor, SoftState]] = {}
        self._rng = SystemRng()

    @classmethod
    def of(cls, plan: TaskPlan) -> _Worker:
        """
        This process's worker for the plan's store and code; another store's or other code's is dropped.
        """
        current = cls._current
        if current is None or (current.url, current.code_digest) != (plan.url, plan.code_digest):
            current = cls._current = _Worker(plan)
        return current

    def run(
        self, plan: TaskPlan, part: IntervalPlan, node: ComputationNode, deliveries: Sequence[Deliveries]
    ) -> Manifest:
        """
        Process one interval's bundle and write its row updates, still uncommitted.
        """
        processor, soft_state = self._processor(plan, part, node)
        soft_state.synchronise(part.files)
        bundle = Bundle(
            interval=part.interval,
            fence=part.fence,
            superstep=plan.superstep,
            watermark=part.watermark,
            wall_time=plan.wall_time,
            deliveries=deliveries,
        )
        try:
            result = processor.process(bundle)
            file = None
            if result.updates is not None:
                file = write_row_file(
                    self.objects,
                    part.interval,
                    result.updates,
                    superstep=plan.superstep,
                    fence=part.fence,
                    token=self._rng.token(),
                )
            soft_state.adopt(file)
        except BaseException:
            soft_state.reset()
            raise
        stripped = replace(result, updates=None)
        return Manifest(interval=part.interval, fence=part.fence, file=file, result=stripped)

    def _processor(
        self, plan: TaskPlan, part: IntervalPlan, node: ComputationNode
    ) -> tuple[IntervalProcessor, SoftState]:
        found = self._processors.get(part.interval)
        if found is None:
            if len(self._processors) >= _PROCESSORS_MAX:
                self._processors.pop(next(iter(self._processors)))
            reader = StoreRowReader(self.objects)
            soft_state = SoftState(part.interval, reader, plan.cache_bytes)
            found = IntervalProcessor(node, part.interval, soft_state), soft_state
            self._processors[part.interval] = found
        return found


class _Records:
    """
    The routed outside records of a slot, in Arrow until user code asks for a value.
    """

    def __init__(self, table: pa.Table | None, plan: TaskPlan) -> None:
        self._table = table
        self._plan = plan
        self._targets = [] if table is None else pc.unique(table.column(TARGET)).to_pylist()

    @classmethod
    def read(cls, plan: TaskPlan, batches: Iterable[pa.RecordBatch]) -> _Records:
        """
        Take the partition's batches, or drain them when the superstep has no outside input.
        """
        collected = [batch for batch in batches if batch.num_rows]
        if plan.input_stream is None or not collected:
            return cls(None, plan)
        return cls(pa.Table.from_batches(collected).combine_chunks(), plan)

    def deliveries(self, position: int) -> tuple[Deliveries, ...]:
        """
        The records of the interval at ``position``.
        """
        if position not in self._targets:
            return ()
        table = self._of_target(position)
        ids = _column(table, ID)
        stream = self._plan.input_stream
        return (
            Deliveries(
                stream="" if stream is None else stream,
                keys=_column(table, KEY),
                at=_column(table, AT).to_numpy(zero_copy_only=False),
                values=ArrowValues(table.drop_columns(list(COLUMNS))),
                ids=None if ids.null_count == len(ids) else ids,
            ),
        )

    def dead_letters(self) -> Iterator[DeadLetter]:
        """
        A letter for each record without a readable key or time.
        """
        unreadable = [target for target in self._targets if target < 0]
        for target in unreadable:
            table = self._of_target(target)
            if table.num_rows > _DEAD_LETTERS_MAX:
                raise InvalidError(
                    "too many unreadable records in one superstep; look at the input first",
                    input=self._plan.input_stream,
                    unreadable=table.num_rows,
                    allowed=_DEAD_LETTERS_MAX,
                )
            yield from self._letters(table, self._plan.intervals[-1 - target].interval.computation)

    def _letters(self, table: pa.Table, computation: str) -> Iterator[DeadLetter]:
        routed = table.select(list(COLUMNS)).to_pylist()
        values = table.drop_columns(list(COLUMNS)).to_pylist()
        for columns, value in zip(routed, values, strict=True):
            yield DeadLetter(
                computation=computation,
                stream=self._plan.input_stream or "",
                key=columns[KEY],
                value=describe_value(value),
                at=columns[AT],
                error=columns[ERROR],
            )

    def observations(self, plan: TaskPlan) -> tuple[InputObservation, ...]:
        """
        How many records came, each counted for its first consumer only, and the newest event time.
        """
        if self._table is None or plan.input_stream is None:
            return ()
        readable = self._table.filter(pc.greater_equal(self._table.column(TARGET), 0))
        newest = pc.max(readable.column(AT)).as_py()
        first = pc.is_in(readable.column(TARGET), pa.array(sorted(plan.first_targets), pa.int32()))
        return (
            InputObservation(
                stream=plan.input_stream,
                records=pc.sum(first).as_py() or 0,
                newest_at=None if newest is None else EventTimeMicros(newest),
            ),
        )

    def _of_target(self, target: int) -> pa.Table:
        table = self._table
        if table is None or len(self._targets) == 1:
            return pa.table({}) if table is None else table
        return table.filter(pc.equal(table.column(TARGET), target))


class _Productions:
    """
    The undelivered productions of a superstep, read once per task and only if somebody wants them.
    """

    def __init__(self, objects: Objects, sources: Sequence[ProductionSource]) -> None:
        self._objects = objects
        self._sources = sources
        self._read: dict[str, pa.Table] = {}

    def deliveries(
        self, node: ComputationNode, interval: Interval
    ) -> tuple[list[Deliveries], tuple[DeadLetter, ...]]:
        """
        An interval's part, and (from its computation's first interval only) letters for the keyless.
        """
        streams = [subscription.stream for subscription in node.subscriptions]
        wanted = [source for source in self._sources if source.concerns(streams)]
        if not wanted:
            return [], ()
        found: list[Deliveries] = []
        letters: list[DeadLetter] = []
        for extracted in deliveries_of(pa.concat_tables(map(self._table, wanted)), node):
            part = within(extracted.deliveries, interval)
            if part is not None:
                found.append(part)
            if not interval.low and extracted.errors:
                letters += keyless_letters(node.name, extracted)
        return found, tuple(letters)

    def _table(self, source: ProductionSource) -> pa.Table:
        if source.path not in self._read:
            self._read[source.path] = read_productions(self._objects, [source])
        return self._read[source.path]


def _column(table: pa.Table, name: str) -> Any:
    column = table.column(name)
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
