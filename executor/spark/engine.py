"""The Spark engine: runs the intervals of a superstep as one Spark job.

Rows of the outside input are routed to the slot of their interval, a Python task extracts and processes them, and the
driver collects the reports (architecture §5). Where productions are weak, a superstep has further jobs, one per wave
of computations; it still ends in one commit.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import cloudpickle
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from millpond.executor.inputs.extraction import mended_texts, rows_to_extract
from millpond.executor.inputs.positions import BOUNDED_SOURCE, after_the_end, digest_in, digest_place
from millpond.executor.inputs.row_digest import added
from millpond.executor.interval.bundle import IntervalPlan
from millpond.executor.pipeline.nodes import INPUT, Backfill, ComputationNode, is_addressed
from millpond.executor.pipeline.topology import Topology
from millpond.executor.run.options import RunnerOptions
from millpond.executor.spark.direct import DirectRuns, InputSizes
from millpond.executor.spark.frames import backfill_table, flat_frame, rows_and_digest
from millpond.executor.spark.key_sql import arrow_key_columns
from millpond.executor.spark.queries import refuse_stopped
from millpond.executor.spark.routed import ROUTED_SCHEMA, ProductionRoutes, make_routing_task
from millpond.executor.spark.routing import (
    Routed,
    Router,
    are_shuffled,
    before_sql,
    check_frame,
    routes_by_computation,
    routes_of,
    slot_of_row,
    time_sql,
)
from millpond.executor.spark.session import refuse_connect
from millpond.executor.spark.slots import Slots, homes_for
from millpond.executor.spark.task import make_task
from millpond.executor.spark.task_plan import (
    SLOT_REPORT_SCHEMA,
    RoutedInput,
    SlotParts,
    SlotReport,
    TaskPlan,
    WorkerSetting,
    pack_parts,
    read_slot_reports,
)
from millpond.executor.superstep.admission import ROWS_READ
from millpond.executor.superstep.backfills import backfill_position
from millpond.executor.superstep.coordinator import Coordinator
from millpond.executor.superstep.delivery import (
    ProductionSource,
    addresses_of,
    keys_of,
    read_productions,
    weak_only,
)
from millpond.executor.superstep.plan import InputPosition, SuperstepPlan
from millpond.executor.superstep.report import SuperstepReport
from millpond.executor.superstep.sink_delivery import SinkDelivery
from millpond.executor.superstep.superstep import Batch, Engine, Inputs, Results, Superstep
from millpond.executor.time.watermark_policies import MarkColumn
from millpond.statestore.errors import InvalidError, check
from millpond.statestore.types import TIME_MAX_US, TIME_MIN_US, EventTimeMicros, TableVersion

_SAMPLE_ROWS = 20_000
_LEVELLED_EVERY: Final = 8
"""Number of supersteps between comparisons of the slots' work."""

_END: Final = EventTimeMicros(TIME_MAX_US)


_OWN: Final = "spark.millpond.own"


def take_over(session: SparkSession) -> None:
    """Make a session that runs no queries of the user's Millpond's own, with the settings that supersteps need."""
    session.conf.set(_OWN, "true")
    # Adaptive execution takes 40 ms, and a superstep's partitions are fixed.
    session.conf.set("spark.sql.adaptive.enabled", "false")


def is_own(session: SparkSession) -> bool:
    return session.conf.get(_OWN, None) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class SparkBatch(Batch):
    """A frame for one superstep; without a frame only productions are delivered and timers fire.

    ``until`` is the end of a piece of a bounded frame, ``None`` for the last. With ``in_steps`` its records move no
    watermark.
    """

    frame: DataFrame | None = None
    stream: str = ""
    in_steps: bool = False
    until: EventTimeMicros | None = None

    @property
    def is_bounded(self) -> bool:
        return self.position is not None and self.position.source == BOUNDED_SOURCE

    @property
    def piece(self) -> dict[str, int]:
        """What is recorded about a piece of a bounded frame."""
        batch: dict[str, int] = {} if self.position is None else {"batch": self.position.batch}
        return batch if self.until is None else {**batch, "until": self.until}

    def check_running(self) -> None:
        """Raise `QueryStoppedError` if the batch's streaming query is being stopped."""
        if self.frame is not None and self.position is not None and not self.is_bounded:
            refuse_stopped(self.frame, self.position.source, self.stream)


@dataclass(frozen=True, slots=True, kw_only=True)
class SparkInputs(Inputs):
    """A flat frame, whose rows the tasks extract."""

    batch: SparkBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class SparkResults(Results):
    reports: tuple[SlotReport, ...] = ()


class SparkEngine(Engine[SparkBatch, SparkInputs, SparkResults]):
    """Runs the intervals of one pipeline on Spark; used by one thread at a time."""

    in_process = False

    def __init__(self, spark: SparkSession, coordinator: Coordinator, options: RunnerOptions) -> None:
        # A separate session: its settings must not affect the user's queries.
        self._session = spark.newSession()
        take_over(self._session)
        self._store = coordinator.store
        self._coordinator = coordinator
        self._superstep: Superstep[SparkBatch, SparkInputs, SparkResults] = Superstep(coordinator, self)
        self._homes = homes_for(self._session, options.intervals or 1, options.rng.token())
        self._slots = Slots(self._homes.slots)
        coordinator.on_recut = self._slots.apply
        coordinator.balancer.parallelism = self._slots.count
        self._writers: Mapping[str, int] = {}
        self._options = options
        # Only Linux has the abstract sockets at which processes hand slots over.
        self._secret = options.rng.token() if sys.platform == "linux" else None
        self._follow(coordinator.topology)
        self._sizes = InputSizes()
        self._direct = DirectRuns(self._session, self._slots.count, options.clock, self._sizes)

    def _follow(self, topology: Topology) -> None:
        """Replace the parts that depend on the topology; a task whose process has other code loads the new code first."""
        self._routers = {name: Router(node) for name, node in topology.injectors.items()}
        # Between tasks weak productions travel in their producers' files.
        self._weak = {name: topology.weak_streams(name, keep_all=True) for name in topology.fused}
        # Only in the main thread of its process, which has Spark's tasks, can a blocking call be interrupted.
        has_limits = any(node.user_code_timeout is not None for node in topology.computations.values())
        self._runs_directly = self._homes.is_one_machine and self._secret is not None and not has_limits
        options = self._options
        self._setting = WorkerSetting.of(
            self._store, topology.computations, options.cache_bytes, options.disk
        )

    def update(self, topology: Topology, sinks: SinkDelivery) -> TableVersion:
        version = self._coordinator.update(topology, sinks)
        self._slots.keep(
            one for name in topology.computations for one in self._coordinator.intervals_of(name)
        )
        self._follow(topology)
        return version

    def close(self) -> None:
        self._homes.close()

    # -- batches ---------------------------------------------------------------------------

    def consume(
        self,
        frame: DataFrame,
        position: InputPosition,
        *,
        is_last: bool = False,
        in_steps: bool = False,
        until: EventTimeMicros | None = None,
    ) -> SuperstepReport | None:
        """Run one superstep on a batch of an outside input, unless the store has consumed the batch.

        No later batch of the input has a record before ``until``.
        """
        # Spark repeats a batch whose superstep was committed right before a crash: its position is in the table.
        if not self._coordinator.inputs.admit(position):
            return None
        # Where records are sorted by time, the records of the last batch wait for no others.
        end = _END if is_last else until
        after = {position.stream: end} if end is not None and self._coordinator.topology.sorts else None
        return self._superstep.run(
            SparkBatch(
                frame=frame,
                stream=position.stream,
                position=position,
                after=after,
                in_steps=in_steps,
                until=until,
            )
        )

    def run(self, batch: SparkBatch) -> SuperstepReport:
        """Run one superstep. Without an outside position, only ids distinguish repeated records."""
        return self._superstep.run(batch)

    def compare(self, frame: DataFrame, stream: str) -> tuple[int, bool]:
        """Return the number of rows of a bounded frame, and whether they can be those that were consumed."""
        flat = flat_frame(self._coordinator.topology.injectors[stream].change, frame)
        known = digest_in(self._coordinator.inputs.bounded_place(stream))
        if known is None:
            return flat.count(), True
        rows, digest = rows_and_digest(self._consumed_part(flat, stream))
        return rows, digest == known

    def _consumed_part(self, frame: DataFrame, stream: str) -> DataFrame:
        until = self._coordinator.inputs.bounded_place(stream).get("until")
        time = time_sql(self._coordinator.topology.injectors[stream], frame.schema)
        return frame if until is None or time is None else frame.where(before_sql(time, until))

    def frame(self, rows: pa.Table) -> DataFrame:
        """Return rows of this process as a frame, in one partition, so that their order stays."""
        active = self._session.getActiveSession()
        frame = self._session.createDataFrame(rows).coalesce(1)
        if active is not None:
            # The call above has made the private session this thread's active one, which `spark_session` would return.
            # PySpark offers no public call to take that back.
            kind: Any = type(active)
            kind._activeSession = active  # noqa: SLF001
            jvm: Any = active._jvm  # noqa: SLF001
            kind._get_j_spark_session_class(jvm).setActiveSession(active._jsparkSession)  # noqa: SLF001
        return frame

    # -- backfills -------------------------------------------------------------------------

    def backfills(self, inputs: Mapping[str, DataFrame]) -> Iterator[tuple[DataFrame, InputPosition]]:
        """Yield the histories that computations still need, each with its position. Commit each before asking for the next.

        On Spark the history of a stream is one frame and one superstep. A key gets its records in the order of their
        times, as from a bounded input. Timers that the history has made due fire in the next superstep.
        """
        backfills = self._coordinator.backfills
        # Read all histories first, so that a wrong one stops the run before anything is committed.
        pending = {
            name: {
                stream: self._history(name, stream, consumed, inputs)
                for stream, consumed in backfills.consumed(name).items()
                if consumed is not None
            }
            for name in backfills.pending
        }
        for name, frames in pending.items():
            backfills.join(name)
            for stream, frame in frames.items():
                if frame is not None:
                    batch = backfill_position(0, is_all=True)
                    yield frame, InputPosition(stream=stream, source="", batch=batch, backfill=name)
            backfills.end(name, {stream: 0 for stream, frame in frames.items() if frame is None})

    def _history(
        self, computation: str, stream: str, consumed: int, inputs: Mapping[str, DataFrame]
    ) -> DataFrame | None:
        """Return the history of a stream, ``None`` without rows."""
        topology = self._coordinator.topology
        if consumed:
            raise InvalidError(
                "the local runner has given the computation a part of its backfill: continue with the local runner "
                "until the backfill ends",
                computation=computation,
                stream=stream,
            )
        given: Backfill = topology.backfills[computation][stream]
        if isinstance(given, str) and given == INPUT:
            return self._consumed_input(stream, inputs.get(stream))
        refuse_connect(given, computation=computation, stream=stream)
        if isinstance(given, DataFrame):
            if given.isStreaming:
                raise InvalidError(
                    "a backfill must be a bounded DataFrame, got a streaming one",
                    computation=computation,
                    stream=stream,
                )
            frame = given
        elif isinstance(given, str | Path):
            frame = self._session.read.parquet(str(given))
        else:
            frame = self.frame(backfill_table(given))
        check_frame(topology, stream, frame.schema)
        return None if frame.isEmpty() else frame

    def _consumed_input(self, stream: str, frame: DataFrame | None) -> DataFrame | None:
        """Return the bounded input, if the store has consumed it."""
        admission = self._coordinator.inputs
        known, consumed = admission.consumed(stream), admission.input_rows(stream)
        if frame is not None and not frame.isStreaming and known.keys() == {BOUNDED_SOURCE}:
            rows, is_same = self.compare(frame, stream)
            if rows != consumed or not is_same:
                raise InvalidError(
                    "the bounded DataFrame is not the one that was consumed, so it is not the history",
                    input=stream,
                    rows=rows,
                    consumed=consumed,
                )
            return self._consumed_part(frame, stream)
        if known or self._coordinator.watermarks.injector_watermark(stream) > TIME_MIN_US:
            raise InvalidError(
                'backfill="input" needs a bounded DataFrame that the store has consumed: give the history as a bounded '
                "DataFrame or as rows",
                stream=stream,
            )
        return None

    # -- the steps of a superstep ----------------------------------------------------------

    def extract(self, batch: SparkBatch) -> SparkInputs:
        """Check the frame and record its key columns; the tasks extract the rows."""
        frame, stream = batch.frame, batch.stream
        if frame is None:
            return SparkInputs(batch=batch)
        if batch.backfilled is None:
            if stream in self._coordinator.inputs.closed and not frame.isEmpty():
                raise after_the_end(stream)
            frame = flat_frame(self._coordinator.topology.injectors[stream].change, frame)
        keys = self._coordinator.keys
        # The batches of an input have the same columns.
        if not keys.is_known(stream, batch.backfilled):
            node = self._coordinator.topology.injectors[stream]
            if node.payload is None:
                keys.record_columns(stream, arrow_key_columns(frame.schema), batch.backfilled)
            else:
                rows = rows_to_extract(node, frame.limit(ROWS_READ).toArrow())
                keys.record(stream, rows, batch.backfilled)
        return SparkInputs(
            batch=replace(batch, frame=frame),
            streams=() if batch.backfilled is not None else (stream,),
            after=batch.after or {},
        )

    def sample_keys(self, inputs: SparkInputs, node: ComputationNode) -> pa.Array:
        frame, stream = inputs.batch.frame, inputs.batch.stream
        if frame is None:
            return pa.array([], pa.string())
        subscription = node.subscription(stream)
        key = None if subscription is None else subscription.key
        # Keys that are no UTF-8 become dead letters later, and must not stop the sampling.
        keys, _ = mended_texts(self._routers[stream].keys(frame, key, _SAMPLE_ROWS).toArrow())
        return keys.column(0).combine_chunks()

    def run_intervals(self, plan: SuperstepPlan, inputs: SparkInputs) -> SparkResults:
        """Run the job of a superstep, and one further job per wave of weak productions."""
        self._homes.settle()
        batch = inputs.batch
        waves = self._coordinator.topology.waves({part.interval.computation for part in plan.intervals})
        first = plan
        if len(waves) > 1:
            # The other intervals wait for weak productions.
            waiting_for_none = [part for part in plan.intervals if part.interval.computation in waves[0]]
            first = replace(plan, intervals=tuple(waiting_for_none))
        if batch.frame is None:
            reports = self._run_without_input(first)
        else:
            reports = self._run_input(batch, batch.frame, first)
        rows = offsets = None
        if batch.is_bounded and (rows := self._rows_of(batch.stream, reports)) is not None:
            before = self._coordinator.inputs.bounded_place(batch.stream)
            rows += before.get("rows", 0)
            digest = added(digest_in(before) or 0, *(report.digest for report in reports))
            offsets = digest_place(rows, digest, **batch.piece)
        reports += self._run_later_waves(plan, waves[1:], reports)
        if batch.backfilled is not None:
            # History moves no watermark, and its records were counted when they arrived first.
            reports = tuple(replace(report, inputs=()) for report in reports)
        seen = [observation for report in reports for observation in report.inputs]
        if batch.in_steps:
            seen = [one.without_times() for one in seen]
        return SparkResults(
            manifests=[manifest for report in reports for manifest in report.manifests],
            observations=seen,
            letters=[letter for report in reports for letter in report.dead_letters],
            rows=rows,
            offsets=offsets,
            reports=reports,
        )

    def confirm(self, results: SparkResults, report: SuperstepReport) -> SuperstepReport:
        """Remember the slots of files and intervals, and add the figures of the slots to the report."""
        reports = results.reports
        self._writers = {
            manifest.file.path: slot.slot
            for slot in reports
            for manifest in slot.manifests
            if manifest.file is not None
        }
        self._slots.record(results.manifests)
        if self._coordinator.balancer.is_on and report.superstep % _LEVELLED_EVERY == 0:
            self._slots.level()
        worked = {slot.slot: slot.process for slot in reports if slot.manifests}
        return replace(
            report,
            slots=len(worked),
            slots_at_home=self._slots.at_home(worked),
            read_bytes=sum(slot.read_bytes for slot in reports),
        )

    def _rows_of(self, stream: str, reports: tuple[SlotReport, ...]) -> int | None:
        """Return the number of rows that the tasks have read of a stream, with unreadable rows; ``None`` without a consumer."""
        consumers = self._coordinator.topology.consumers_of(stream)
        if not consumers:
            return None
        first = consumers[0].computation.name
        letters = [letter for report in reports for letter in report.dead_letters]
        unreadable = sum(letter.stream == stream and letter.computation == first for letter in letters)
        return unreadable + sum(seen.records for report in reports for seen in report.inputs)

    # -- jobs ------------------------------------------------------------------------------

    def _run_input(self, batch: SparkBatch, frame: DataFrame, plan: SuperstepPlan) -> tuple[SlotReport, ...]:
        topology, stream = self._coordinator.topology, batch.stream
        parts = self._slots.parts_of(plan.intervals)
        routes = routes_of(topology, stream, parts, batch.backfilled)
        if not routes:
            # The stream has no consumer: only its position moves.
            return self._run_without_input(plan)
        injector, router = topology.injectors[stream], self._routers[stream]
        needs_rows = bool(injector.members) or isinstance(injector.watermark, MarkColumn)
        id_scopes = {
            consumer.computation.name: self._coordinator.id_scope(consumer.computation.name, stream)
            for consumer in topology.consumers_of(stream)
        }

        def plan_for(routed: Routed) -> TaskPlan:
            source = RoutedInput(
                stream=stream,
                columns=routed.columns,
                first_targets=frozenset(routes[0].positions),
                id_scopes=id_scopes,
                watch=self._coordinator.watermarks.watch(stream),
                injector=cloudpickle.dumps(injector) if needs_rows else None,
                payload=injector.payload,
                times=injector.times,
                max_record_bytes=injector.max_record_bytes,
                digested=tuple(frame.columns) if batch.is_bounded else (),
                untimed_at=max([EventTimeMicros(0), *(part.late_until for part in plan.intervals)]),
            )
            return replace(self._task_plan(plan, parts), input=source)

        if self._runs_directly and self._sizes.rows_to_collect(stream):
            routed = router.route(frame, routes, is_collected=True)
            reports = self._run_directly(plan_for(routed), routed, batch.check_running)
            if reports is not None:
                return reports
        routed = router.route(frame, routes)
        return self._run_by_spark(plan_for(routed), parts, routed.frame)

    def _run_without_input(
        self, plan: SuperstepPlan, handed_on: tuple[ProductionSource, ...] = ()
    ) -> tuple[SlotReport, ...]:
        if not plan.intervals:
            # Only time has passed: the driver commits that without a job.
            return ()
        parts = self._slots.parts_of(plan.intervals)
        tasks = replace(self._task_plan(plan, parts), handed_on=handed_on)
        reports = self._run_directly(tasks)
        return self._run_by_spark(tasks, parts) if reports is None else reports

    def _run_later_waves(
        self, plan: SuperstepPlan, waves: Sequence[Collection[str]], reports: tuple[SlotReport, ...]
    ) -> tuple[SlotReport, ...]:
        """Hand weak productions on, job after job; all jobs belong to one superstep and one commit.

        Only files whose manifests have been collected are handed on: other files of a repeated task are never read.
        """
        later: tuple[SlotReport, ...] = ()
        for wave in waves:
            sources = []
            for manifest in (manifest for report in reports + later for manifest in report.manifests):
                streams = frozenset(summary.stream for summary in manifest.result.productions)
                if manifest.file is not None and any(map(is_addressed, streams)):
                    path = manifest.file.path
                    sources.append(ProductionSource(path=path, superstep=plan.superstep, streams=streams))
            handed_on = tuple(sources)
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
        return self._coordinator.parts_of(name, plan.conditions.wall_time)

    def _task_plan(self, plan: SuperstepPlan, parts: SlotParts) -> TaskPlan:
        """Return the instructions of a superstep without outside input."""
        return TaskPlan(
            setting=self._setting,
            superstep=plan.superstep,
            wall_time=plan.conditions.wall_time,
            slots=self._slots.count,
            parts=pack_parts(parts, self._slots.count),
            sources=plan.sources,
            input=None,
            weak=self._weak,
            secret=self._secret,
            slots_max=self._homes.slots_per_process,
            is_one_machine=self._homes.is_one_machine,
        )

    def _run_directly(
        self, plan: TaskPlan, routed: Routed | None = None, check_running: Callable[[], None] = lambda: None
    ) -> tuple[SlotReport, ...] | None:
        """Run every slot that has work without Spark's tasks; ``None`` if that is not possible."""
        if not self._runs_directly or self._shuffles_productions(plan):
            return None
        reports = self._direct.run(plan, routed, check_running)
        return None if reports is None else self._checked(plan, reports)

    def _run_by_spark(
        self, plan: TaskPlan, parts: SlotParts, routed: DataFrame | None = None
    ) -> tuple[SlotReport, ...]:
        """Run every slot that has work as a task of a Spark job.

        Spark starts no task for a partition that it knows to be empty: a frame without rows may have
        no partition, though productions and timers wait in every slot. Those slots run without it.
        """
        tasks = self._slots.tasks_for(parts)
        frame, plan = self._with_productions(routed, plan, parts)
        if frame is None:
            reports = self._collect(self._homes.empty(tasks), plan)
        else:
            placed = self._homes.place(frame, slot_of_row(self._slots.count), tasks)
            if is_own(placed.sparkSession) and plan.input is not None:
                # Nothing tells the sizes of productions.
                self._sizes.limit_batches(placed.sparkSession, plan.input.stream, is_known=frame is routed)
            reports = self._collect(placed, plan)
        missing = plan.parts.keys() - {report.slot for report in reports}
        if missing and frame is routed:
            rest = self._collect(self._homes.empty(tasks), replace(plan, input=None))
            reports += tuple(report for report in rest if report.slot in missing)
        return self._checked(plan, reports)

    def _checked(self, plan: TaskPlan, reports: tuple[SlotReport, ...]) -> tuple[SlotReport, ...]:
        """Raise the failure of a slot; check that each slot with work has reported once."""
        for report in reports:
            if report.failure is not None:
                raise report.failure
        ran = sorted(report.slot for report in reports if report.slot in plan.parts)
        check(ran == sorted(plan.parts), "each slot reports once", slots=sorted(plan.parts), reports=ran)
        self._sizes.learn(plan, reports)
        return reports

    def _with_productions(
        self, routed: DataFrame | None, plan: TaskPlan, parts: SlotParts
    ) -> tuple[DataFrame | None, TaskPlan]:
        """Add the committed productions to the routed rows, if a shuffle brings them faster than each task's reading."""
        if not self._shuffles_productions(plan):
            return routed, plan
        slots, topology = self._slots.count, self._coordinator.topology
        consumers = {
            name: route
            for name, route in routes_by_computation(parts).items()
            if any(source.concerns(topology.computations[name].inbox) for source in plan.sources)
        }
        by_task: dict[int, list[tuple[int, ProductionSource]]] = {}
        for number, source in enumerate(plan.sources):
            # A file is read in its writer's slot, as far as known, because the slot has it at hand.
            task = self._writers.get(source.path, number) % slots
            by_task.setdefault(task, []).append((number, source))
        routes = ProductionRoutes(setting=self._setting, slots=slots, consumers=consumers, sources=by_task)
        # Rows for each slot and file, not yet moved.
        productions = self._homes.empty(slots).mapInArrow(make_routing_task(routes), ROUTED_SCHEMA)
        both = productions if routed is None else productions.unionByName(routed, allowMissingColumns=True)
        return both, replace(plan, sources=())

    def _shuffles_productions(self, plan: TaskPlan) -> bool:
        is_fused = bool(self._coordinator.topology.fused)
        return (
            bool(plan.sources)
            and not is_fused
            and are_shuffled(self._coordinator.pending.count, len(plan.parts))
        )

    def _collect(self, frame: DataFrame, plan: TaskPlan) -> tuple[SlotReport, ...]:
        reports = read_slot_reports(frame.mapInArrow(make_task(plan), SLOT_REPORT_SCHEMA).toArrow())
        self._direct.note_job()
        return reports
