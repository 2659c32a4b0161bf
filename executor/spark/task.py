"""
What runs in a Spark task: the intervals of one slot, for one superstep.

A task is pure with respect to the store: it may run twice, at once or again (F12), and what
it writes counts only when the driver commits the manifest that it collected. Soft state lives
in the Python worker process and is trusted only for the committed file that this very process
wrote or read; `SoftState.synchronise` sees to that.
"""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import cloudpickle
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from millpond.executor.bundle.bundle import Bundle, DeadLetter, Deliveries
from millpond.executor.bundle.processor import IntervalProcessor
from millpond.executor.bundle.result import Manifest
from millpond.executor.computation.values import ArrowValues
from millpond.executor.event_time.duration import INSTANT_MAX_US, INSTANT_MIN_US
from millpond.executor.injectors.observation import InputObservation, Watch, observe_times
from millpond.executor.pipeline.extract_rows import member_names, newest_mark, scoped_ids
from millpond.executor.pipeline.nodes import ComputationNode
from millpond.executor.pipeline.weak import STRONG, WeakStreams, addressed
from millpond.executor.soft_state.soft_state import SoftState, StoreRowReader
from millpond.executor.spark.routed_columns import TARGET, RoutedColumns
from millpond.executor.superstep.delivery import (
    ProductionSource,
    deliveries_of,
    describe_value,
    keyless_letters,
    read_productions,
    weak_only,
    within,
)
from millpond.executor.superstep.plan import IntervalPlan
from millpond.statestore.check import check
from millpond.statestore.errors import DataError, InvalidError, MillpondError
from millpond.statestore.interval import Interval
from millpond.statestore.objects.obstore import open_objects
from millpond.statestore.rows.files import write_row_file
from millpond.statestore.system import SystemRng
from millpond.statestore.types import Objects, Superstep, WallTimeMicros

__all__ = ["SLOT_REPORT_SCHEMA", "RoutedInput", "SlotReport", "TaskPlan", "make_task", "read_slot_reports"]

SLOT_REPORT_SCHEMA: Final = "report binary"
"""What a task yields: one pickled `SlotReport`."""

_DEAD_LETTERS_MAX: Final = 100_000
_PROCESSORS_MAX: Final = 4_096


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedInput:
    """
    The outside input whose records come with the partitions.

    Attributes:
        stream: the injected stream.
        columns: where the parts of a record are.
        first_targets: positions of the first consumer's intervals, so that each record is counted once.
        id_scopes: what goes before record ids, by consumer.
        watch: what to look at in the records.
        injector: the pickled injector, if more than times matters to its watermark.
    """

    stream: str
    columns: RoutedColumns
    first_targets: frozenset[int]
    id_scopes: Mapping[str, bytes]
    watch: Watch
    injector: bytes | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskPlan:
    """
    Everything that the tasks of one superstep are told.

    Attributes:
        url: root of the rows, with ``storage_options`` to open it.
        code: the pickled computations by name; ``code_digest`` tells whether a worker has them already.
        intervals: the intervals of the superstep; the one at position *i* belongs to slot ``i % slots``.
        input: the outside input of this superstep, if any.
        cache_bytes: soft-state budget of one interval.
        weak: what becomes of productions before the commit, by computation.
        handed_on: files of this very superstep, not yet committed, with weak productions.
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
    input: RoutedInput | None
    cache_bytes: int
    weak: Mapping[str, WeakStreams] = field(default_factory=dict)
    handed_on: tuple[ProductionSource, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotReport:
    """
    What one task reports to the driver.

    Attributes:
        slot: which one.
        manifests: one per interval that had work.
        dead_letters: unreadable records.
        inputs: what was seen of the outside input.
        failure: why the task gave up, where another attempt could only fail again.
    """

    slot: int
    manifests: tuple[Manifest, ...] = ()
    dead_letters: tuple[DeadLetter, ...] = ()
    inputs: tuple[InputObservation, ...] = ()
    failure: MillpondError | None = None


def make_task(plan: TaskPlan) -> Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """
    The function that ``mapInArrow`` runs on each partition; partition *n* is slot *n*.
    """

    def task(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext

        context = TaskContext.get()
        slot = 0 if context is None else context.partitionId()
        report = _attempt(plan, slot, batches)
        yield pa.RecordBatch.from_pydict({"report": pa.array([pickle.dumps(report)], pa.binary())})

    return task


def _attempt(plan: TaskPlan, slot: int, batches: Iterable[pa.RecordBatch]) -> SlotReport:
    """
    Run a slot; what no retry can mend is reported instead of raised, so that the driver raises it whole.
    """
    try:
        return run_slot(plan, slot, batches)
    except (InvalidError, DataError) as failure:
        failure.add_note(traceback.format_exc())
        return SlotReport(slot=slot, failure=failure)


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

    Raises:
        InternalError: records of another slot are among them; nobody would process these.
    """
    worker = _Worker.of(plan)
    records = _Records.read(plan, batches)
    if records is not None:
        records.check_slot(slot, plan.slots)
    manifests: list[Manifest] = []
    letters = [] if records is None else list(records.dead_letters())
    productions = _Productions(worker.objects, plan.sources, plan.handed_on)
    for position in range(slot, len(plan.intervals), plan.slots):
        part = plan.intervals[position]
        node = worker.nodes[part.interval.computation]
        found, keyless = productions.deliveries(node, part.interval)
        letters += keyless
        deliveries = [*(() if records is None else records.deliveries(position)), *found]
        if deliveries or part.due:
            manifests.append(worker.run(plan, part, node, deliveries))
    return SlotReport(
        slot=slot,
        manifests=tuple(manifests),
        dead_letters=tuple(letters),
        inputs=() if records is None else (records.observation(),),
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
            percentile_watermarks=part.percentile_watermarks,
            weak=plan.weak.get(node.name, STRONG),
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
        stripped = replace(result, updates=None, weak=None)
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

    def __init__(self, source: RoutedInput, table: pa.Table, intervals: Sequence[IntervalPlan]) -> None:
        self._source = source
        self._columns = source.columns
        self._table = _stamped(table, source)
        self._intervals = intervals
        self._targets = pc.unique(table.column(TARGET)).to_pylist()

    @classmethod
    def read(cls, plan: TaskPlan, batches: Iterable[pa.RecordBatch]) -> _Records | None:
        """
        Take the partition's batches, or drain them when the superstep has no outside input.
        """
        collected = [batch for batch in batches if batch.num_rows]
        if plan.input is None or not collected:
            return None
        return cls(plan.input, pa.Table.from_batches(collected).combine_chunks(), plan.intervals)

    def check_slot(self, slot: int, slots: int) -> None:
        """
        Refuse records that Spark has brought to the wrong partition, rather than pass over them.
        """
        positions = (target if target >= 0 else -1 - target for target in self._targets)
        strays = sorted(position for position in positions if position % slots != slot)
        check(not strays, "records come to the slot of their interval", slot=slot, slots=slots, strays=strays)

    def deliveries(self, position: int) -> tuple[Deliveries, ...]:
        """
        The records of the interval at ``position``.
        """
        if position not in self._targets:
            return ()
        table = self._of_target(position)
        return (
            Deliveries(
                stream=self._source.stream,
                keys=_column(table, self._columns.key),
                at=_times(table, self._columns.at).to_numpy(zero_copy_only=False),
                values=ArrowValues(table.select(self._columns.own)),
                ids=self._ids(table, self._intervals[position].interval.computation),
            ),
        )

    def dead_letters(self) -> Iterator[DeadLetter]:
        """
        A letter for each record without a readable key or time.
        """
        for target in self._targets:
            if target >= 0:
                continue
            table = self._of_target(target)
            if table.num_rows > _DEAD_LETTERS_MAX:
                raise InvalidError(
                    "too many unreadable records in one superstep; look at the input first",
                    input=self._source.stream,
                    unreadable=table.num_rows,
                    allowed=_DEAD_LETTERS_MAX,
                )
            yield from self._letters(table, self._intervals[-1 - target].interval.computation)

    def _letters(self, table: pa.Table, computation: str) -> Iterator[DeadLetter]:
        columns = self._columns
        keys = _column(table, columns.key).to_pylist()
        times = _times(table, columns.at).to_pylist()
        errors = (
            [None] * table.num_rows if columns.error is None else _column(table, columns.error).to_pylist()
        )
        values = table.select(columns.own).to_pylist()
        for key, at, error, value in zip(keys, times, errors, values, strict=True):
            timed = at is not None and INSTANT_MIN_US <= at <= INSTANT_MAX_US
            yield DeadLetter(
                computation=computation,
                stream=self._source.stream,
                key=key,
                value=describe_value(value),
                at=at if timed else None,
                error=_why_unreadable(key, at) if error is None else error,
            )

    def observation(self) -> InputObservation:
        """
        How many records came, each counted for its first consumer only, and the times of all.
        """
        readable = self._table.filter(pc.greater_equal(self._table.column(TARGET), 0))
        first = pc.is_in(readable.column(TARGET), pa.array(sorted(self._source.first_targets), pa.int32()))
        records = pc.sum(first).as_py() or 0
        at = _times(readable, self._columns.at).to_numpy(zero_copy_only=False)
        if self._source.injector is None:
            return observe_times(self._source.watch, at, records=records)
        node, own = cloudpickle.loads(self._source.injector), readable.select(self._columns.own)
        seen = observe_times(self._source.watch, at, member_names(node, own), records=records)
        return replace(seen, mark_at=newest_mark(node, own))

    def _ids(self, table: pa.Table, computation: str) -> pa.Array | None:
        if self._columns.id is None:
            return None
        ids = _column(table, self._columns.id)
        if pa.types.is_integer(ids.type):
            ids = ids.cast(pa.string())
        if ids.null_count == len(ids):
            return None
        return scoped_ids(ids.cast(pa.binary()), self._source.id_scopes.get(computation, b""))

    def _of_target(self, target: int) -> pa.Table:
        if len(self._targets) == 1:
            return self._table
        return self._table.filter(pc.equal(self._table.column(TARGET), target))


class _Productions:
    """
    The undelivered productions of a superstep, read once per task and only if somebody wants them.
    """

    def __init__(
        self,
        objects: Objects,
        sources: Sequence[ProductionSource],
        handed_on: Sequence[ProductionSource],
    ) -> None:
        self._objects = objects
        self._sources = sources
        self._handed_on = handed_on
        self._read: dict[str, pa.Table] = {}

    def deliveries(
        self, node: ComputationNode, interval: Interval
    ) -> tuple[list[Deliveries], tuple[DeadLetter, ...]]:
        """
        An interval's part, and (from its computation's first interval only) letters for the keyless.
        """
        wanted = [self._table(source) for source in self._sources if source.concerns(node.inbox)]
        kept = {addressed(subscription.stream) for subscription in node.subscriptions}
        wanted += [weak_only(self._table(source)) for source in self._handed_on if source.concerns(kept)]
        if not wanted:
            return [], ()
        found: list[Deliveries] = []
        letters: list[DeadLetter] = []
        for extracted in deliveries_of(pa.concat_tables(wanted), node):
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


def _stamped(table: pa.Table, source: RoutedInput) -> pa.Table:
    """
    The records with the time of their arrival, where that is their event time.
    """
    stamp_at, name = source.watch.stamp_at, source.columns.at
    if stamp_at is None:
        return table
    times = pa.array(np.full(table.num_rows, stamp_at, np.int64))
    return table.set_column(table.column_names.index(name), name, times)


def _why_unreadable(key: str | None, at: int | None) -> str:
    if key is None:
        return "the key is null"
    if at is None:
        return "the event time is null or unreadable"
    return "the time lies outside the years 1 to 9999"


def _times(table: pa.Table, name: str) -> Any:
    # A timestamp of Spark is a number of microseconds already: only its type changes.
    return _column(table, name).cast(pa.int64())


def _column(table: pa.Table, name: str) -> Any:
    column = table.column(name)
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
