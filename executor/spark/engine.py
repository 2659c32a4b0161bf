"""The Spark engine: runs a planned superstep as one Spark job and hands the manifests to the commit.

Rows of the outside input are routed to the slot of their interval, a Python task processes the
intervals of a slot, and the driver collects the reports and commits once (architecture §5). Where
productions are weak, a superstep has further jobs, one per wave of computations; it still ends in
one commit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final

import cloudpickle
import pyarrow as pa

from millpond.executor.inputs.payload import rows_to_extract
from millpond.executor.inputs.positions import BOUNDED_SOURCE, after_the_end
from millpond.executor.interval.worker import IntervalPlan
from millpond.executor.pipeline.nodes import ComputationNode, is_addressed
from millpond.executor.pipeline.topology import Topology
from millpond.executor.spark.frames import flat_frame
from millpond.executor.spark.hand_over import has_abstract_addresses
from millpond.executor.spark.key_sql import arrow_key_columns
from millpond.executor.spark.routing import (
    Router,
    are_shuffled,
    production_routes,
    routed_productions,
    routes_of,
    slot_of_row,
)
from millpond.executor.spark.slots import Slots, homes_for
from millpond.executor.spark.task import make_task
from millpond.executor.spark.task_plan import (
    SLOT_REPORT_SCHEMA,
    ProcessHomes,
    RoutedInput,
    SlotParts,
    SlotReport,
    TaskPlan,
    WorkerSetting,
    pack_parts,
    read_slot_reports,
)
from millpond.executor.superstep.commit import SuperstepReport
from millpond.executor.superstep.coordinator import Coordinator, TopologyParts
from millpond.executor.superstep.delivery import (
    ProductionSource,
    addresses_of,
    keys_of,
    read_productions,
    weak_only,
)
from millpond.executor.superstep.key_columns import ROWS_READ
from millpond.executor.superstep.plan import InputPosition, SuperstepPlan
from millpond.executor.time.watermark_policies import MarkColumn
from millpond.statestore.errors import check
from millpond.statestore.objects.disk_tier import DiskOptions
from millpond.statestore.store import Store
from millpond.statestore.types import TIME_MAX_US, EventTimeMicros, Rng, TableVersion

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_SAMPLE_ROWS = 20_000
_LEVELLED_EVERY: Final = 8
"""After how many supersteps the work of the slots is compared."""

_END: Final = EventTimeMicros(TIME_MAX_US)
_UNKNOWN: Final[Mapping[str, EventTimeMicros]] = {}


def plan_once(session: SparkSession) -> None:
    """Turn adaptive execution off for a session.

    The partitions of a superstep are fixed, so there is nothing to adapt, and it takes 40 ms.
    """
    session.conf.set("spark.sql.adaptive.enabled", "false")


class SparkEngine:
    """Runs the supersteps of one pipeline on Spark; used by one thread at a time.

    Args:
        spark: the session.
        store: the open store.
        coordinator: plans and commits supersteps; already open.
        intervals: into how many intervals a computation is divided, if it does not say.
        cache_bytes: soft-state budget of a worker process, in bytes.
        disk: whether row files are kept on the workers' disks.
        rng: makes the secret by which the run's tasks know each other.
    """

    def __init__(
        self,
        spark: SparkSession,
        store: Store,
        coordinator: Coordinator,
        *,
        intervals: int,
        cache_bytes: int,
        disk: DiskOptions,
        rng: Rng,
    ) -> None:
        # A session of our own: its settings must not affect the user's queries.
        self._session = spark.newSession()
        plan_once(self._session)
        self._store = store
        self._coordinator = coordinator
        self._homes = homes_for(self._session, intervals, rng.token())
        self._slots = Slots(self._homes.slots)
        coordinator.on_recut = self._slots.apply
        coordinator.balancer.parallelism = self._slots.count
        self._writers: Mapping[str, int] = {}
        self._setting_of = partial(WorkerSetting.of, store, cache_bytes=cache_bytes, disk=disk)
        self._follow(coordinator.topology)
        self._secret = rng.token() if has_abstract_addresses() else None

    def _follow(self, topology: Topology) -> None:
        """Note what depends on the topology; tasks of other code than their process has load theirs first."""
        self._routers = {name: Router(node) for name, node in topology.injectors.items()}
        # Between tasks weak productions travel in their producers' files.
        self._weak = {name: topology.weak_streams(name, keep_all=True) for name in topology.fused}
        self._setting = self._setting_of(topology.computations)

    def update(self, parts: TopologyParts) -> TableVersion:
        """Go on with a changed pipeline, between two supersteps; see `Coordinator.update`.

        Args:
            parts: the changed pipeline, prepared.

        Raises:
            FencedError: another process has taken over.
            UnavailableError: a service is away for longer than the runner waits.
        """
        version = self._coordinator.update(parts)
        self._slots.keep(
            one for name in parts.topology.computations for one in self._coordinator.intervals_of(name)
        )
        self._follow(parts.topology)
        return version

    def consume(
        self, frame: DataFrame, position: InputPosition, *, is_last: bool = False
    ) -> SuperstepReport | None:
        """Run one superstep with a batch of an outside input.

        Args:
            frame: the batch.
            position: the stream, the streaming query and the number of the batch.
            is_last: whether the stream ends with it.

        Returns:
            What the superstep did; ``None`` if the store has consumed the batch already.

        Raises:
            InvalidError: the checkpoint does not belong to this store, an earlier run has ended the
                stream, or the input cannot be read.
            FencedError: another process has taken over.
        """
        if not self._coordinator.inputs.admit(position):
            return None
        # Where records are sorted by time, those of the last batch wait for no others.
        after = {position.stream: _END} if is_last and self._coordinator.topology.sorts else _UNKNOWN
        return self._take_in(frame, position.stream, position, after)

    def inject(self, frame: DataFrame, stream: str) -> SuperstepReport:
        """Run one superstep with records that no outside position counts: only their ids tell them from repeated ones.

        Raises:
            InvalidError: an earlier run has ended the stream, or the records cannot be read.
            FencedError: another process has taken over.
        """
        return self._take_in(frame, stream, None)

    def backfill(self, frame: DataFrame, position: InputPosition, computation: str) -> SuperstepReport:
        """Run one superstep with the history of a stream, which only one computation gets.

        Args:
            frame: the history.
            position: that of the backfill once all of it is consumed.
            computation: the computation.

        Raises:
            InvalidError: the history cannot be read.
            FencedError: another process has taken over.
        """
        self._note_keys(frame, position.stream, computation)
        if not self._coordinator.intervals_of(computation):
            self._create_intervals_of(
                self._coordinator.topology.computations[computation], frame, position.stream
            )
        self._homes.settle()
        plan = self._coordinator.begin(backfilled=computation)
        reports = self._run_input(frame, position.stream, self._first_wave(plan), only=computation)
        reports += self._run_later_waves(plan, reports)
        # The records say nothing of the stream's time, and have been counted when they came.
        return self._commit(plan, tuple(replace(report, inputs=()) for report in reports), position)

    def _take_in(
        self,
        frame: DataFrame,
        stream: str,
        position: InputPosition | None,
        after: Mapping[str, EventTimeMicros] = _UNKNOWN,
    ) -> SuperstepReport:
        if stream in self._coordinator.inputs.closed and not frame.isEmpty():
            raise after_the_end(stream)
        frame = flat_frame(self._coordinator.topology.injectors[stream].change, frame)
        self._note_keys(frame, stream)
        self._create_intervals(frame, stream)
        self._homes.settle()
        plan = self._coordinator.begin(inputs={stream}, after=after)
        reports = self._run_input(frame, stream, self._first_wave(plan))
        if position is not None and position.source == BOUNDED_SOURCE:
            position = replace(position, rows=self._rows_of(stream, reports))
        reports += self._run_later_waves(plan, reports)
        for injected, at in after.items():
            self._coordinator.watermarks.promise(injected, at)
        return self._commit(plan, reports, position)

    def count(self, frame: DataFrame, stream: str) -> int:
        """How many records the whole input of a stream has."""
        return flat_frame(self._coordinator.topology.injectors[stream].change, frame).count()

    def read(self, path: str) -> DataFrame:
        """A Parquet file."""
        return self._session.read.parquet(path)

    def frame(self, rows: pa.Table) -> DataFrame:
        """Rows of this process as a frame, in one partition, so that their order stays."""
        return self._session.createDataFrame(rows).coalesce(1)

    def advance(self) -> SuperstepReport:
        """Run one superstep without outside input: deliver productions and fire due timers.

        Raises:
            InvalidError: user code failed and failures stop the pipeline.
            FencedError: another process has taken over.
        """
        self._homes.settle()
        plan = self._coordinator.begin()
        reports = self._run_without_input(self._first_wave(plan))
        reports += self._run_later_waves(plan, reports)
        return self._commit(plan, reports, None)

    def close(self) -> None:
        """Give back what Spark keeps for the run."""
        self._homes.close()

    def _rows_of(self, stream: str, reports: tuple[SlotReport, ...]) -> int | None:
        """How many rows the tasks have read of a stream, the unreadable ones included; ``None`` without a consumer."""
        consumers = self._coordinator.topology.consumers_of(stream)
        if not consumers:
            return None
        first = consumers[0].computation.name
        letters = [letter for report in reports for letter in report.dead_letters]
        unreadable = sum(letter.stream == stream and letter.computation == first for letter in letters)
        return unreadable + sum(seen.records for report in reports for seen in report.inputs)

    def _commit(
        self, plan: SuperstepPlan, reports: tuple[SlotReport, ...], position: InputPosition | None
    ) -> SuperstepReport:
        committed = self._coordinator.commit(
            plan,
            [manifest for report in reports for manifest in report.manifests],
            position=position,
            inputs=[observation for report in reports for observation in report.inputs],
            dead_letters=[letter for report in reports for letter in report.dead_letters],
        )
        self._writers = {
            manifest.file.path: report.slot
            for report in reports
            for manifest in report.manifests
            if manifest.file is not None
        }
        self._slots.record(manifest for report in reports for manifest in report.manifests)
        if self._coordinator.balancer.is_on and committed.superstep % _LEVELLED_EVERY == 0:
            self._slots.level()
        worked = {report.slot: report.process for report in reports if report.manifests}
        return replace(
            committed,
            slots=len(worked),
            slots_at_home=self._slots.at_home(worked),
            read_bytes=sum(report.read_bytes for report in reports),
        )

    # -- jobs ------------------------------------------------------------------------------

    def _run_input(
        self, frame: DataFrame, stream: str, plan: SuperstepPlan, *, only: str | None = None
    ) -> tuple[SlotReport, ...]:
        topology = self._coordinator.topology
        parts = self._slots.parts_of(plan.intervals)
        routes = routes_of(topology, stream, parts, only)
        if not routes:
            # The stream has no consumer: only its position moves.
            return self._run_without_input(plan)
        routed = self._routers[stream].route(frame, routes)
        injector = topology.injectors[stream]
        needs_rows = bool(injector.members) or isinstance(injector.watermark, MarkColumn)
        source = RoutedInput(
            stream=stream,
            columns=routed.columns,
            first_targets=frozenset(routes[0].positions),
            id_scopes={
                consumer.computation.name: self._coordinator.id_scope(consumer.computation.name, stream)
                for consumer in topology.consumers_of(stream)
            },
            watch=self._coordinator.watermarks.watch(stream),
            injector=cloudpickle.dumps(injector) if needs_rows else None,
            payload=injector.payload,
            times=injector.times,
        )
        return self._run(routed.frame, replace(self._task_plan(plan, parts), input=source), parts)

    def _run_without_input(
        self, plan: SuperstepPlan, handed_on: tuple[ProductionSource, ...] = ()
    ) -> tuple[SlotReport, ...]:
        if not plan.intervals:
            # Only time has passed: the driver commits that without a job.
            return ()
        parts = self._slots.parts_of(plan.intervals)
        return self._run(None, replace(self._task_plan(plan, parts), handed_on=handed_on), parts)

    def _first_wave(self, plan: SuperstepPlan) -> SuperstepPlan:
        """The part of a superstep that waits for no weak production."""
        waves = self._coordinator.topology.waves(_computations(plan))
        if len(waves) < 2:
            return plan
        first = tuple(part for part in plan.intervals if part.interval.computation in waves[0])
        return replace(plan, intervals=first)

    def _run_later_waves(
        self, plan: SuperstepPlan, reports: tuple[SlotReport, ...]
    ) -> tuple[SlotReport, ...]:
        """Hand weak productions on, job after job; all jobs belong to one superstep and one commit.

        Only files whose manifests have been collected are handed on: other files that a repeated
        task wrote are never read.

        Args:
            plan: the whole superstep.
            reports: what the first wave reported.

        Returns:
            What the later waves reported.
        """
        later: tuple[SlotReport, ...] = ()
        for wave in self._coordinator.topology.waves(_computations(plan))[1:]:
            handed_on = _handed_on(plan, reports + later)
            parts = [part for name in wave for part in self._parts(plan, name, handed_on)]
            if parts:
                later += self._run_without_input(replace(plan, intervals=tuple(parts)), handed_on)
        return later

    def _parts(
        self, plan: SuperstepPlan, name: str, handed_on: tuple[ProductionSource, ...]
    ) -> list[IntervalPlan]:
        node = self._coordinator.topology.computations[name]
        addresses = addresses_of(node)
        wanted = [source for source in handed_on if source.concerns(addresses)]
        if not wanted:
            return [part for part in plan.intervals if part.interval.computation == name]
        if not self._coordinator.intervals_of(name):
            productions = weak_only(read_productions(self._store.objects, wanted))
            self._coordinator.create_intervals(name, keys_of(productions, node))
        return self._coordinator.parts_of(name, plan.wall_time)

    def _note_keys(self, frame: DataFrame, stream: str, only: str | None = None) -> None:
        # The batches of an input have the same columns.
        if not self._coordinator.keys.is_known(stream, only):
            node = self._coordinator.topology.injectors[stream]
            if node.payload is None:
                self._coordinator.keys.note_columns(stream, arrow_key_columns(frame.schema), only)
            else:
                first = frame.limit(ROWS_READ).toArrow()
                self._coordinator.keys.note(stream, rows_to_extract(node, first), only)

    def _create_intervals(self, frame: DataFrame, stream: str) -> None:
        for node in self._coordinator.computations_without_intervals([stream]):
            self._create_intervals_of(node, frame, stream)

    def _create_intervals_of(self, node: ComputationNode, frame: DataFrame, stream: str) -> None:
        subscription = node.subscription(stream)
        key = None if subscription is None else subscription.key
        keys = self._routers[stream].keys(frame, key, _SAMPLE_ROWS).toArrow()
        self._coordinator.create_intervals(node.name, keys.column(0).combine_chunks())

    def _task_plan(self, plan: SuperstepPlan, parts: SlotParts) -> TaskPlan:
        """The instructions of a superstep without outside input."""
        return TaskPlan(
            setting=self._setting,
            superstep=plan.superstep,
            wall_time=plan.wall_time,
            slots=self._slots.count,
            parts=pack_parts(parts, self._slots.count),
            sources=plan.sources,
            input=None,
            weak=self._weak,
            homes=self._process_homes(),
        )

    def _process_homes(self) -> ProcessHomes | None:
        if self._secret is None:
            return None
        return ProcessHomes(secret=self._secret, slots_max=self._homes.slots_per_process)

    def _run(self, routed: DataFrame | None, plan: TaskPlan, parts: SlotParts) -> tuple[SlotReport, ...]:
        """Run every slot that has work; return exactly one report of each.

        Spark starts no task for a partition that it knows to be empty: a frame without rows may have
        no partition, though productions and timers wait in every slot. Those slots run without it.

        Args:
            routed: the rows of the outside input; ``None`` without one.
            plan: the instructions.
            parts: what is to run.
        """
        tasks = self._slots.tasks_for(parts)
        frame, plan = self._with_productions(routed, plan, parts)
        if frame is None:
            reports = self._collect(self._homes.empty(tasks), plan)
        else:
            placed = self._homes.place(frame, slot_of_row(self._slots.count), tasks)
            reports = self._collect(placed, plan)
        missing = plan.parts.keys() - {report.slot for report in reports}
        if missing and frame is routed:
            rest = self._collect(self._homes.empty(tasks), replace(plan, input=None))
            reports += tuple(report for report in rest if report.slot in missing)
        ran = sorted(report.slot for report in reports if report.slot in plan.parts)
        check(ran == sorted(plan.parts), "each slot reports once", slots=sorted(plan.parts), reports=ran)
        return reports

    def _with_productions(
        self, routed: DataFrame | None, plan: TaskPlan, parts: SlotParts
    ) -> tuple[DataFrame | None, TaskPlan]:
        """Routed rows with those of the committed productions, where a shuffle brings them; else what was given."""
        count, topology = self._coordinator.undelivered, self._coordinator.topology
        if topology.fused or not plan.sources or not are_shuffled(count, len(plan.parts)):
            return routed, plan
        routes = production_routes(
            self._setting, topology, parts, self._slots.count, plan.sources, self._writers
        )
        productions = routed_productions(self._homes.empty(self._slots.count), routes)
        both = productions if routed is None else productions.unionByName(routed, allowMissingColumns=True)
        return both, replace(plan, sources=())

    def _collect(self, frame: DataFrame, plan: TaskPlan) -> tuple[SlotReport, ...]:
        reports = read_slot_reports(frame.mapInArrow(make_task(plan), SLOT_REPORT_SCHEMA).toArrow())
        for report in reports:
            if report.failure is not None:
                raise report.failure
        return reports


def _computations(plan: SuperstepPlan) -> set[str]:
    return {part.interval.computation for part in plan.intervals}


def _handed_on(plan: SuperstepPlan, reports: tuple[SlotReport, ...]) -> tuple[ProductionSource, ...]:
    """The uncommitted files with weak productions."""
    sources = []
    for manifest in (manifest for report in reports for manifest in report.manifests):
        streams = frozenset(summary.stream for summary in manifest.result.productions)
        if manifest.file is not None and any(map(is_addressed, streams)):
            path = manifest.file.path
            sources.append(ProductionSource(path=path, superstep=plan.superstep, streams=streams))
    return tuple(sources)
