"""A Spark task: runs the intervals of one slot, for one superstep.

A task is pure with respect to the store: Spark may run it twice, at the same time or later (F12), and its files count
only once the driver commits the manifests that it collected. It runs in the executor's process with the slot's soft
state, if there is one (`hand_over`).
"""

from __future__ import annotations

import os
import pickle
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial

import pyarrow as pa
from pyspark import TaskContext

from millpond.executor.computation.watchdog import OnStuck
from millpond.executor.interval.bundle import DeadLetter
from millpond.executor.interval.row_update import Manifest
from millpond.executor.spark.hand_over import ONE_MACHINE, HandedOver, SlotHomes, hand_over
from millpond.executor.spark.routed import RoutedRecords, pop_productions
from millpond.executor.spark.task_plan import SETTLING_MS, SlotReport, TaskPlan
from millpond.executor.spark.worker_process import WorkerProcess
from millpond.executor.superstep.delivery import UndeliveredProductions
from millpond.statestore.errors import DataError, InvalidError, check
from millpond.statestore.system import SystemClock


def make_task(plan: TaskPlan) -> Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Return the function that ``mapInArrow`` runs on each partition; partition *n* is slot *n*."""

    def task(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        context = TaskContext.get()
        slot = 0 if context is None else context.partitionId()
        report = _run_at_home(plan, slot, [batch for batch in batches if batch.num_rows])
        yield pa.RecordBatch.from_pydict({"report": pa.array([pickle.dumps(report)], pa.binary())})

    return task


def make_settling_task(plan: TaskPlan) -> Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Return the function that makes the process of each partition the home of a slot that has none, whichever it is."""

    def task(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        # The next superstep reports code that cannot be loaded.
        with suppress(InvalidError, DataError):
            homes = _homes_of(WorkerProcess.of(plan.setting), plan)
            if homes is not None:
                for slot in range(plan.slots):
                    homes.take(slot, plan.slots_max)
        SystemClock().sleep_ms(SETTLING_MS)
        yield from batches

    return task


def _run_at_home(plan: TaskPlan, slot: int, batches: list[pa.RecordBatch]) -> SlotReport:
    """Run a slot in the process with its soft state, or in this one if no other process has it."""
    try:
        process = WorkerProcess.of(plan.setting)
        homes = _homes_of(process, plan) if batches or slot in plan.parts else None
        if homes is not None:
            neighbour = homes.neighbour(slot, plan.slots_max)
            if neighbour is not None:
                report = hand_over(neighbour, plan.to_neighbour(slot), batches)
                if report is not None:
                    return report
        return run_slot(process, plan, slot, batches)
    except (InvalidError, DataError) as failure:
        return _failed(slot, failure)


def _homes_of(process: WorkerProcess, plan: TaskPlan) -> SlotHomes | None:
    if plan.home_secret is None:
        return None
    # All workers of an executor have the same parent, the daemon that forked them.
    executor = ONE_MACHINE if plan.is_one_machine else os.getppid()
    return process.homes(plan.home_secret, partial(_serve, process), executor)


def _serve(process: WorkerProcess, handed: HandedOver) -> None:
    """Run a slot for another process, with the soft state of this one."""
    slot, plan = pickle.loads(handed.plan)  # noqa: S301 - the sender has proved that it knows the run's secret
    # With the code or the store of another run, this process would write files that the driver must not commit.
    check(plan.setting.name == process.setting.name, "a slot is handed over within a run", slot=slot)

    def give_up(error: InvalidError) -> None:
        # This thread is stuck in user code, so the watchdog answers the process that waits.
        handed.give(SlotReport(slot=slot, failure=error))

    try:
        handed.give(run_slot(process, plan, slot, handed.batches, on_stuck=give_up))
    except (InvalidError, DataError) as failure:
        handed.give(_failed(slot, failure))


def _failed(slot: int, failure: InvalidError | DataError) -> SlotReport:
    """Report an error that a retry would repeat, because Spark would wrap a raised one and retry the task."""
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

    ``batches`` are the routed records. ``on_stuck`` is called if user code exceeds its time limit and cannot be
    interrupted.
    """
    read_before = process.read_bytes
    parts = plan.parts_of(slot)
    productions, outside = pop_productions(batches)
    records = RoutedRecords.read(plan.input, outside)
    arrived = [] if records is None else outside
    routed = [one for one in (records, productions) if one is not None]
    letters: list[DeadLetter] = []
    for one in routed:
        one.check_slot(slot, plan.slots)
        letters += one.letters(parts)
    undelivered = UndeliveredProductions(plan.sources, process.productions, handed_on=plan.handed_on)
    manifests: list[Manifest] = []
    for position, part in parts.items():
        node = process.nodes[part.interval.computation]
        if not part.interval.low:
            # Only the first interval reports unreadable productions, because each interval would report the same ones.
            letters += undelivered.letters(node)
        deliveries = [delivery for one in routed for delivery in one.deliveries(position, node)]
        deliveries += undelivered.deliveries(node, part.interval)
        if deliveries or part.due:
            manifests.append(process.run(plan, part, node, deliveries, on_stuck))
    # Files must be durable before the driver, another process, commits them.
    process.sync()
    return SlotReport(
        slot=slot,
        manifests=tuple(manifests),
        dead_letters=tuple(letters),
        inputs=() if records is None else (records.observation(),),
        digest=0 if records is None else records.digest,
        process=process.name,
        arrived_rows=sum(batch.num_rows for batch in arrived),
        arrived_bytes=sum(batch.nbytes for batch in arrived),
        read_bytes=process.read_bytes - read_before + (0 if productions is None else productions.read_bytes),
    )
