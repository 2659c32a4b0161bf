"""A Spark task: runs the intervals of one slot, for one superstep.

A task is pure with respect to the store: Spark may run it twice, at once or again (F12), and the files that it writes
count only once the driver commits the manifests that it collected. It runs in the process that has the slot's soft
state, if there is one on this executor (`hand_over`).
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator
from functools import partial

import pyarrow as pa

from millpond.executor.computation.watchdog import OnStuck
from millpond.executor.interval.row_update import Manifest
from millpond.executor.spark.hand_over import HandedOver, hand_over
from millpond.executor.spark.routed_productions import take_productions
from millpond.executor.spark.routed_records import RoutedRecords
from millpond.executor.spark.task_plan import SlotReport, TaskPlan
from millpond.executor.spark.worker_process import WorkerProcess
from millpond.statestore.errors import DataError, InvalidError, check


def make_task(plan: TaskPlan) -> Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """The function that ``mapInArrow`` runs on each partition; partition *n* is slot *n*."""

    def task(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext

        context = TaskContext.get()
        slot = 0 if context is None else context.partitionId()
        yield _run_at_home(plan, slot, [batch for batch in batches if batch.num_rows]).to_batch()

    return task


def _run_at_home(plan: TaskPlan, slot: int, batches: list[pa.RecordBatch]) -> SlotReport:
    """Run a slot in the process that has its soft state, which may be this one."""
    try:
        process = WorkerProcess.of(plan.setting)
        report = _run_in_neighbour(process, plan, slot, batches)
        return run_slot(process, plan, slot, batches) if report is None else report
    except (InvalidError, DataError) as failure:
        return _failed(slot, failure)


def _run_in_neighbour(
    process: WorkerProcess, plan: TaskPlan, slot: int, batches: list[pa.RecordBatch]
) -> SlotReport | None:
    """Have another process of this executor run a slot; ``None`` if none can."""
    has_work = bool(batches) or slot in plan.parts
    if plan.homes is None or not has_work:
        return None
    homes = process.homes(plan.homes.secret, partial(_serve, process))
    neighbour = homes.neighbour(slot, plan.homes.slots_max)
    return None if neighbour is None else hand_over(neighbour, plan.to_neighbour(slot), batches)


def _serve(process: WorkerProcess, handed: HandedOver) -> None:
    """Run a slot for another process, with what this one keeps."""
    slot, plan = TaskPlan.from_neighbour(handed.plan)
    check(plan.setting.name == process.setting.name, "a slot is handed over within a run", slot=slot)

    def give_up(error: InvalidError) -> None:
        handed.give(SlotReport(slot=slot, failure=error))

    try:
        handed.give(run_slot(process, plan, slot, handed.batches, on_stuck=give_up))
    except (InvalidError, DataError) as failure:
        handed.give(_failed(slot, failure))


def _failed(slot: int, failure: InvalidError | DataError) -> SlotReport:
    """The report of an error that a retry would repeat, so that the driver raises it as it is."""
    failure.add_note("".join(traceback.format_exception(failure)))
    return SlotReport(slot=slot, failure=failure)


def run_slot(
    process: WorkerProcess,
    plan: TaskPlan,
    slot: int,
    batches: Iterable[pa.RecordBatch],
    *,
    on_stuck: OnStuck | None = None,
) -> SlotReport:
    """Process every interval of a slot.

    Args:
        process: what this process keeps.
        plan: the superstep.
        slot: which intervals.
        batches: the routed records of the outside input; ignored if the plan names none.
        on_stuck: called if user code exceeds its time limit and cannot be interrupted.

    Raises:
        InternalError: records of another slot are among them; no other task would process them.
        InvalidError: user code failed and failures stop the pipeline.
        DataError: a committed file is missing or its bytes are wrong.
    """
    read_before = process.read_bytes
    parts = plan.parts_of(slot)
    routed, outside = take_productions(batches)
    records = RoutedRecords.read(plan.input, parts, outside)
    if records is not None:
        records.check_slot(slot, plan.slots)
    if routed is not None:
        routed.check_slot(slot, plan.slots)
    manifests: list[Manifest] = []
    letters = [] if records is None else list(records.dead_letters())
    letters += [] if routed is None else routed.letters(parts)
    productions = process.undelivered(plan)
    for position, part in parts.items():
        node = process.nodes[part.interval.computation]
        if not part.interval.low:
            # One of the computation's intervals reports them, whatever task it is in.
            letters += productions.letters(node)
        deliveries = [
            *(() if records is None else records.deliveries(position)),
            *(() if routed is None else routed.deliveries(position, node)),
            *productions.deliveries(node, part.interval),
        ]
        if deliveries or part.due:
            manifests.append(process.run(plan, part, node, deliveries, on_stuck))
    process.sync()
    return SlotReport(
        slot=slot,
        manifests=tuple(manifests),
        dead_letters=tuple(letters),
        inputs=() if records is None else (records.observation(),),
        process=process.name,
        read_bytes=process.read_bytes - read_before + (0 if routed is None else routed.read_bytes),
    )
