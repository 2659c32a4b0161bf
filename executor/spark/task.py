"""
A Spark task: runs the intervals of one slot, for one superstep.

A task is pure with respect to the store: Spark may run it twice, at once or again (F12), and the
files that it writes count only once the driver commits the manifests that it collected. Soft state
lives in the Python worker process and is trusted only for committed files that this very process
wrote or read; `IntervalWorker` sees to that.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

import cloudpickle
import pyarrow as pa

from millpond.executor.bundle.bundle import Deliveries
from millpond.executor.bundle.result import Manifest
from millpond.executor.pipeline.nodes import ComputationNode
from millpond.executor.pipeline.weak import STRONG
from millpond.executor.spark.importable import import_error
from millpond.executor.spark.routed_records import RoutedRecords
from millpond.executor.spark.task_plan import SlotReport, TaskPlan
from millpond.executor.superstep.delivery import read_productions
from millpond.executor.superstep.interval_worker import IntervalWorker, bundle_of
from millpond.executor.superstep.plan import IntervalPlan
from millpond.executor.superstep.undelivered import UndeliveredProductions
from millpond.statestore.errors import DataError, InvalidError
from millpond.statestore.interval import Interval
from millpond.statestore.objects.obstore import open_objects
from millpond.statestore.system import SystemRng

__all__ = ["make_task", "run_slot"]

_INTERVALS_MAX: Final = 4_096
"""The most intervals whose soft state a worker process keeps."""


def make_task(plan: TaskPlan) -> Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """
    The function that ``mapInArrow`` runs on each partition; partition *n* is slot *n*.
    """

    def task(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext

        context = TaskContext.get()
        slot = 0 if context is None else context.partitionId()
        yield _attempt(plan, slot, batches).to_batch()

    return task


def _attempt(plan: TaskPlan, slot: int, batches: Iterable[pa.RecordBatch]) -> SlotReport:
    """
    Run a slot; report an error that a retry would repeat, so that the driver raises it as it is.
    """
    try:
        return run_slot(plan, slot, batches)
    except (InvalidError, DataError) as failure:
        failure.add_note(traceback.format_exc())
        return SlotReport(slot=slot, failure=failure)


def run_slot(plan: TaskPlan, slot: int, batches: Iterable[pa.RecordBatch]) -> SlotReport:
    """
    Process every interval of a slot.

    Args:
        plan: the superstep.
        slot: which intervals.
        batches: the routed records of the outside input; ignored if the plan names none.

    Raises:
        InternalError: records of another slot are among them; no other task would process them.
        InvalidError: user code failed and failures stop the pipeline.
        DataError: a committed file is missing or its bytes are wrong.
    """
    process = _WorkerProcess.of(plan)
    records = RoutedRecords.read(plan, batches)
    if records is not None:
        records.check_slot(slot, plan.slots)
    manifests: list[Manifest] = []
    letters = [] if records is None else list(records.dead_letters())
    productions = process.undelivered(plan)
    for position in range(slot, len(plan.intervals), plan.slots):
        part = plan.intervals[position]
        node = process.nodes[part.interval.computation]
        if not part.interval.low:
            # One of the computation's intervals reports them, whatever task it is in.
            letters += productions.letters(node)
        deliveries = [
            *(() if records is None else records.deliveries(position)),
            *productions.deliveries(node, part.interval),
        ]
        if deliveries or part.due:
            manifests.append(process.run(plan, part, node, deliveries))
    process.sync()
    return SlotReport(
        slot=slot,
        manifests=tuple(manifests),
        dead_letters=tuple(letters),
        inputs=() if records is None else (records.observation(),),
    )


class _WorkerProcess:
    """
    What a Python worker process keeps between tasks; all of it can be rebuilt at any time.
    """

    _current: _WorkerProcess | None = None

    def __init__(self, plan: TaskPlan) -> None:
        self.url = plan.url
        self.durability = plan.durability
        self.code_digest = plan.code_digest
        self._objects = open_objects(plan.url, plan.storage_options, durability=plan.durability)
        self.nodes: dict[str, ComputationNode] = _loaded(plan.code)
        self._workers: dict[Interval, IntervalWorker] = {}
        self._rng = SystemRng()

    @classmethod
    def of(cls, plan: TaskPlan) -> _WorkerProcess:
        """
        This process's state for the plan's store and code; that of another store or other code is dropped.
        """
        current = cls._current
        wanted = (plan.url, plan.durability, plan.code_digest)
        if current is None or (current.url, current.durability, current.code_digest) != wanted:
            current = cls._current = _WorkerProcess(plan)
        return current

    def undelivered(self, plan: TaskPlan) -> UndeliveredProductions:
        """
        The productions that the superstep delivers; a file is read when an interval first needs it.
        """
        return UndeliveredProductions(
            plan.sources,
            lambda source: read_productions(self._objects, [source]),
            handed_on=plan.handed_on,
        )

    def run(
        self, plan: TaskPlan, part: IntervalPlan, node: ComputationNode, deliveries: Sequence[Deliveries]
    ) -> Manifest:
        """
        Process one interval's bundle and write its row file, uncommitted.
        """
        weak = plan.weak.get(node.name, STRONG)
        bundle = bundle_of(part, deliveries, superstep=plan.superstep, wall_time=plan.wall_time, weak=weak)
        return self._worker_of(plan, part, node).run(bundle, lambda: part.files, self._rng.token())

    def sync(self) -> None:
        """
        Let the files that were written survive a power cut: it is another process that will commit them.
        """
        self._objects.sync()

    def _worker_of(self, plan: TaskPlan, part: IntervalPlan, node: ComputationNode) -> IntervalWorker:
        worker = self._workers.get(part.interval)
        if worker is None:
            if len(self._workers) >= _INTERVALS_MAX:
                self._workers.pop(next(iter(self._workers)))
            worker = IntervalWorker(node, part.interval, self._objects, cache_bytes=plan.cache_bytes)
            self._workers[part.interval] = worker
        return worker


def _loaded(code: bytes) -> dict[str, ComputationNode]:
    """
    The computations, if this worker, which may be younger than the run, can import their modules.

    Raises:
        InvalidError: names the module that it cannot import.
    """
    try:
        nodes: dict[str, ComputationNode] = cloudpickle.loads(code)
    except ImportError as failure:
        raise import_error(failure.name, failure) from failure
    return nodes
