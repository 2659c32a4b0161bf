"""
The Spark engine: runs a planned superstep as one Spark job and hands the manifests to the commit.

Rows of the outside input are routed to the slot of their interval, a Python task processes the
intervals of a slot, the driver collects the reports and commits once (architecture §5).
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import TYPE_CHECKING

import cloudpickle
import pyarrow as pa

from millpond.executor.injectors.policies import MarkColumn
from millpond.executor.pipeline.weak import addressed, is_addressed
from millpond.executor.reporting.progress import SuperstepReport
from millpond.executor.spark.routing import Router, routes_of
from millpond.executor.spark.task import (
    SLOT_REPORT_SCHEMA,
    RoutedInput,
    SlotReport,
    TaskPlan,
    make_task,
    read_slot_reports,
)
from millpond.executor.superstep.coordinator import Coordinator
from millpond.executor.superstep.delivery import ProductionSource, keys_of, read_productions, weak_only
from millpond.executor.superstep.plan import InputPosition, IntervalPlan, SuperstepPlan
from millpond.statestore.check import check
from millpond.statestore.store import Store

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["SparkEngine", "plan_once"]

_SAMPLE_ROWS = 20_000


def plan_once(session: SparkSession) -> None:
    """
    Have the session's queries planned before they run, and not again after each shuffle.

    Adaptive execution has nothing to gain from a superstep, whose partitions are fixed, and
    takes 40 ms of it.
    """
    session.conf.set("spark.sql.adaptive.enabled", "false")


class SparkEngine:
    """
    One pipeline's supersteps on Spark; used by one thread at a time.

    Args:
        spark: the session.
        store: the open store.
        coordinator: plans and commits; already open.
        slots: how many tasks a superstep has.
        cache_bytes: soft-state budget of one interval in a worker.
    """

    def __init__(
        self, spark: SparkSession, store: Store, coordinator: Coordinator, *, slots: int, cache_bytes: int
    ) -> None:
        # A session of our own, for what is set in it concerns nobody else's queries.
        self._session = spark.newSession()
        plan_once(self._session)
        self._store = store
        self._coordinator = coordinator
        self._slots = slots
        self._cache_bytes = cache_bytes
        self._routers = {name: Router(node) for name, node in coordinator.topology.injectors.items()}
        # Between tasks weak productions travel in their producers' files.
        topology = coordinator.topology
        self._weak = {name: topology.weak_streams(name, keep_all=True) for name in topology.fused}
        self._code = cloudpickle.dumps(dict(coordinator.topology.computations))
        self._code_digest = hashlib.sha256(self._code).hexdigest()

    def consume(self, frame: DataFrame, position: InputPosition) -> SuperstepReport | None:
        """
        One superstep with the records of an outside input; ``None`` when the batch is a replay.

        Raises:
            InvalidError: the checkpoint does not belong to this store, or the input cannot be read.
            FencedError: another process has taken over.
        """
        if not self._coordinator.admit(position):
            return None
        self._cut_intervals(frame, position.stream)
        whole = self._coordinator.begin(inputs={position.stream})
        plan = self._first_wave(whole)
        topology = self._coordinator.topology
        routes = routes_of(topology, position.stream, plan)
        if not routes:
            # Nobody consumes the stream: its position moves, and that is all its records do.
            return self._commit(whole, self._without_input(plan), position)
        slots = self._slots_of(plan)
        routed = self._routers[position.stream].route(frame, routes, slots)
        first = frozenset(range(routes[0].first, routes[0].first + len(routes[0].lows)))
        injector = topology.injectors[position.stream]
        needs_rows = bool(injector.members) or isinstance(injector.watermark, MarkColumn)
        source = RoutedInput(
            stream=position.stream,
            columns=routed.columns,
            first_targets=first,
            id_scopes={
                name: self._coordinator.id_scope(name, position.stream)
                for name in (consumer.computation.name for consumer in topology.consumers_of(position.stream))
            },
            watch=self._coordinator.watermarks.watch(position.stream),
            injector=cloudpickle.dumps(injector) if needs_rows else None,
        )
        reports = self._run(routed.frame, self._task_plan(plan, slots, source))
        return self._commit(whole, reports, position)

    def _without_input(
        self, plan: SuperstepPlan, handed_on: tuple[ProductionSource, ...] = ()
    ) -> tuple[SlotReport, ...]:
        if not plan.intervals:
            # Only time has passed: that is the driver's to commit, and no work for Spark.
            return ()
        slots = self._slots_of(plan)
        return self._run(self._empty(slots), replace(self._task_plan(plan, slots, None), handed_on=handed_on))

    def advance(self) -> SuperstepReport:
        """
        One superstep without outside input: delivers productions and fires due timers.
        """
        whole = self._coordinator.begin()
        plan = self._first_wave(whole)
        return self._commit(whole, self._without_input(plan), None)

    def _first_wave(self, plan: SuperstepPlan) -> SuperstepPlan:
        """
        The part of a superstep that waits for no weak production.
        """
        waves = self._coordinator.topology.waves(_computations(plan))
        if len(waves) < 2:
            return plan
        return replace(plan, intervals=tuple(p for p in plan.intervals if p.interval.computation in waves[0]))

    def _later_waves(self, plan: SuperstepPlan, reports: tuple[SlotReport, ...]) -> tuple[SlotReport, ...]:
        """
        Hand weak productions on, job after job; all of it is one superstep and one commit.

        Only files whose manifests have been collected are handed on, so what a task that ran
        twice has written besides is nobody's.
        """
        for wave in self._coordinator.topology.waves(_computations(plan))[1:]:
            handed_on = _handed_on(plan, reports)
            parts = [part for name in wave for part in self._parts(plan, name, handed_on)]
            if parts:
                reports += self._without_input(replace(plan, intervals=tuple(parts)), handed_on)
        return reports

    def _parts(
        self, plan: SuperstepPlan, name: str, handed_on: tuple[ProductionSource, ...]
    ) -> list[IntervalPlan]:
        node = self._coordinator.topology.computations[name]
        kept = {addressed(subscription.stream) for subscription in node.subscriptions}
        wanted = [source for source in handed_on if source.concerns(kept)]
        if not wanted:
            return [part for part in plan.intervals if part.interval.computation == name]
        if not self._coordinator.intervals_of(name):
            productions = weak_only(read_productions(self._store.objects, wanted))
            self._coordinator.create_intervals(name, keys_of(productions, node))
        return self._coordinator.parts_of(name, plan.wall_time)

    def _cut_intervals(self, frame: DataFrame, stream: str) -> None:
        for node in self._coordinator.computations_without_intervals([stream]):
            subscription = node.subscription(stream)
            key = None if subscription is None else subscription.key
            keys = self._routers[stream].keys(frame, key).limit(_SAMPLE_ROWS).toArrow()
            self._coordinator.create_intervals(node.name, keys.column(0).combine_chunks())

    def _slots_of(self, plan: SuperstepPlan) -> int:
        return max(1, min(self._slots, len(plan.intervals)))

    def _task_plan(self, plan: SuperstepPlan, slots: int, source: RoutedInput | None) -> TaskPlan:
        return TaskPlan(
            url=self._store.objects.url,
            storage_options=dict(self._store.storage_options),
            pipeline=self._coordinator.topology.name,
            code=self._code,
            code_digest=self._code_digest,
            superstep=plan.superstep,
            wall_time=plan.wall_time,
            slots=slots,
            intervals=plan.intervals,
            sources=plan.sources,
            input=source,
            cache_bytes=self._cache_bytes,
            weak=self._weak,
        )

    def _run(self, frame: DataFrame, plan: TaskPlan) -> tuple[SlotReport, ...]:
        """
        Run every slot exactly once, as far as its report counts.

        Spark leaves out what it knows to be empty: a frame without rows may have no partition, and
        so no task, though productions and timers wait in every slot. Those slots are run without it.
        """
        found = self._collect(frame, plan)
        missing = set(range(plan.slots)) - {report.slot for report in found}
        if missing:
            rest = self._collect(self._empty(plan.slots), replace(plan, input=None))
            found += tuple(report for report in rest if report.slot in missing)
        ran = sorted(report.slot for report in found)
        check(ran == list(range(plan.slots)), "each slot reports once", slots=plan.slots, reports=ran)
        return found

    def _collect(self, frame: DataFrame, plan: TaskPlan) -> tuple[SlotReport, ...]:
        reports = frame.mapInArrow(make_task(plan), SLOT_REPORT_SCHEMA).toArrow()
        found = read_slot_reports(reports.column("report").cast(pa.binary()).to_pylist())
        for report in found:
            if report.failure is not None:
                raise report.failure
        return found

    def _empty(self, slots: int) -> DataFrame:
        """
        A partition for each slot, and nothing that a task would look at.
        """
        return self._session.range(0, slots, 1, slots)

    def _commit(
        self, plan: SuperstepPlan, reports: tuple[SlotReport, ...], position: InputPosition | None
    ) -> SuperstepReport:
        reports = self._later_waves(plan, reports)
        return self._coordinator.commit(
            plan,
            [manifest for report in reports for manifest in report.manifests],
            position=position,
            inputs=[seen for report in reports for seen in report.inputs],
            dead_letters=[letter for report in reports for letter in report.dead_letters],
        )


def _computations(plan: SuperstepPlan) -> set[str]:
    return {part.interval.computation for part in plan.intervals}


def _handed_on(plan: SuperstepPlan, reports: tuple[SlotReport, ...]) -> tuple[ProductionSource, ...]:
    """
    The files, written and not yet committed, that hold weak productions.
    """
    manifests = (manifest for report in reports for manifest in report.manifests)
    made = ((m.file, frozenset(s.stream for s in m.result.productions)) for m in manifests)
    return tuple(
        ProductionSource(path=file.path, superstep=plan.superstep, streams=streams)
        for file, streams in made
        if file is not None and any(map(is_addressed, streams))
    )
