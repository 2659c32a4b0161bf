"""The coordinator: one process's ownership of a pipeline, with the pipeline's time, input positions and sinks.

It takes the leases, recovers the state of the last owner, and plans supersteps; `Superstep` runs and commits them.
Superstep *n* delivers every production of earlier supersteps, so productions need no separate acknowledgement:
one commit consumes them and stores the effects. Implements MillWheel §6.1 and §7.1.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping

import pyarrow as pa

from millpond.executor.inputs.positions import superstep_of
from millpond.executor.interval.bundle import IntervalPlan, ProductionSummary
from millpond.executor.interval.row_update import Manifest
from millpond.executor.maintenance.policy import CompactionWorkers
from millpond.executor.maintenance.upkeep import Upkeep
from millpond.executor.ownership.balancer import Balancer
from millpond.executor.ownership.catalog_recorder import CatalogRecorder
from millpond.executor.ownership.cuts import Cut
from millpond.executor.ownership.ownership import OwnedInterval, OwnedNames, Ownership
from millpond.executor.pipeline.nodes import DEAD_LETTERS, ComputationNode
from millpond.executor.pipeline.topology import Topology
from millpond.executor.superstep.admission import (
    InputAdmission,
    KeyColumns,
    LateRecords,
    SuspectTimes,
    UnsetStates,
)
from millpond.executor.superstep.backfills import Backfills
from millpond.executor.superstep.dead_letters import DeadLetters, WrittenLetters
from millpond.executor.superstep.delivery import (
    PendingProductions,
    ProductionSource,
    keys_of,
    merged_pending,
    read_productions,
)
from millpond.executor.superstep.letter_retries import LetterRetries
from millpond.executor.superstep.options import PipelineOptions
from millpond.executor.superstep.pending import keep_undelivered, recover_pending
from millpond.executor.superstep.plan import SuperstepPlan
from millpond.executor.superstep.report import RunStatus, Totals
from millpond.executor.superstep.sink_delivery import SinkDelivery
from millpond.executor.watermark.pipeline_watermarks import PipelineWatermarks
from millpond.statestore.app_ids import AppId
from millpond.statestore.durations import duration_ms
from millpond.statestore.failpoint import reach
from millpond.statestore.interval import Interval
from millpond.statestore.log.committer import Committer
from millpond.statestore.objects.disk_tier import without_keeping
from millpond.statestore.store import Store
from millpond.statestore.system import collector_paused
from millpond.statestore.types import (
    Clock,
    EventTimeMicros,
    Objects,
    Superstep,
    TableVersion,
    WallTimeMicros,
)


class Coordinator:
    """The owner of a pipeline's intervals; used by one thread at a time.

    Everything that depends on the topology is an attribute, which `update` replaces between two supersteps.

    Attributes:
        row_files: where row files are read, by default the store; a runner may put the machine's disk in front of it.
        names: source of file names that are unique to this owner; usable once it is open.
        times_in_1970: by stream, the number of records with times in 1970 that this owner has committed.
        on_recut: called after each cut of a computation's keys.
    """

    def __init__(
        self,
        store: Store,
        topology: Topology,
        options: PipelineOptions,
        *,
        threads: bool = True,
        compaction_workers: CompactionWorkers | None = None,
        row_files: Objects | None = None,
    ) -> None:
        self.store = store
        self.row_files: Objects = row_files or store.objects
        self.clock: Clock = options.clock
        self._options = options
        self._threads = threads
        self.journal: CatalogRecorder = CatalogRecorder(store, topology)
        self.ownership: Ownership = Ownership(
            store,
            topology,
            clock=options.clock,
            intervals=options.intervals or 1,
            has_own_intervals=options.has_own_intervals,
            on_held=options.on_held,
            pause_timeout_ms=duration_ms("pause_timeout", options.pause_timeout),
            rng=options.rng,
            on_taken=self.journal.record,
            keep_undelivered=lambda computations, fence: keep_undelivered(
                store, topology.name, computations, fence=fence, token=self.names.token()
            ),
            row_files=self.row_files,
        )
        self.committer: Committer = self.ownership.committer
        self.names: OwnedNames = OwnedNames(
            options.rng, topology.name, lambda: self.ownership.control.fence.sequencer
        )
        self.upkeep: Upkeep = Upkeep(
            store,
            self.ownership,
            topology,
            clock=options.clock,
            rng=self.names,
            policy=options.upkeep,
            compaction_workers=compaction_workers,
            row_files=without_keeping(self.row_files),
        )
        self.on_recut: Callable[[Cut], None] | None = None
        self.superstep: Superstep = Superstep(0)
        self.totals: Totals = Totals()
        self.times_in_1970: Counter[str] = Counter()
        self.pending: PendingProductions = PendingProductions()
        self._serve(topology, self._sinks_of(topology))

    # -- life cycle ------------------------------------------------------------------------

    def open(self, *, is_current: bool = False) -> None:
        """Take the leases, fence former owners, and recover pending productions.

        ``is_current`` means that the caller has just followed the log.
        """
        # Own first, read afterwards: a former owner may change the table until the fence is committed.
        self.ownership.open(is_current=is_current)
        self._restore()
        # The last owner may have died between its commit and the sinks: they get the last superstep before a new one.
        self.sinks.open(self.superstep)
        self.sinks.catch_up(self.superstep, self.pending.for_sinks)
        self.journal.open()
        self.upkeep.open()

    def close(self, *, has_failed: bool = False) -> None:
        try:
            # The leases outlast the sinks, so that no successor writes a superstep to a sink ahead of this owner.
            self.sinks.close()
            if not has_failed:
                self.upkeep.finish(self.superstep, self.watermarks.input_watermark)
        finally:
            self.upkeep.close()
            self.journal.close()
            self.ownership.close()

    def _sinks_of(self, topology: Topology) -> SinkDelivery:
        return SinkDelivery(
            self.store,
            topology,
            self.clock,
            self.names,
            in_background=self._threads,
            has_upkeep=self._options.upkeep is not None,
            row_files=self.row_files,
        )

    def _serve(self, topology: Topology, sinks: SinkDelivery) -> None:
        """Replace the parts that depend on the topology; `_restore` fills them from the store."""
        store, options = self.store, self._options
        self.topology: Topology = topology
        self.sinks: SinkDelivery = sinks
        self.watermarks: PipelineWatermarks = PipelineWatermarks(topology, options.clock)
        self.inputs: InputAdmission = InputAdmission(store, topology, self.watermarks, options)
        self.backfills: Backfills = Backfills(store, topology, self.ownership, self.watermarks)
        names = tuple(topology.computations)
        self.balancer: Balancer = Balancer(self.ownership, names, options.clock, options.balance)
        self.keys: KeyColumns = KeyColumns(store, topology, self.ownership)
        retries = LetterRetries(store, topology, options.clock, self.id_scope)
        self.letters: DeadLetters = DeadLetters(store, topology, options.dead_letter_limit, retries)
        self.late: LateRecords = LateRecords(topology, self.watermarks)
        self.suspects: SuspectTimes = SuspectTimes(topology, self.times_in_1970)
        self.unset_states: UnsetStates = UnsetStates()
        self._id_scopes: dict[tuple[str, str, int | None], bytes] = {}

    def _restore(self, former: PipelineWatermarks | None = None) -> None:
        # Before the watermarks are restored: a computation without all of its history must not see time pass.
        self.backfills.open()
        positions, pipeline = self.committer.snapshot.txns, self.topology.name
        self.superstep = superstep_of(positions, pipeline)
        self.watermarks.restore(positions, former)
        self.totals = Totals.restored(positions, pipeline, self.topology.computations)
        self._await(recover_pending(self.committer.snapshot, self.row_files, self.topology, self.superstep))
        reach("recovery.productions_found")
        for owned in self.ownership.owned.values():
            self._observe(owned)

    def check_update(self, topology: Topology) -> SinkDelivery:
        """Check a changed pipeline of the same name, and return its opened sinks; after an error the old one may continue."""
        self.sinks.wait()
        self.ownership.check_update(topology)
        Backfills(self.store, topology, self.ownership, self.watermarks).refuse_pending()
        sinks = self._sinks_of(topology)
        sinks.open(self.superstep)
        reach("update.checked")
        return sinks

    def update(self, topology: Topology, sinks: SinkDelivery) -> TableVersion:
        """Continue with a changed pipeline and its checked sinks; the leases that it keeps stay held.

        No superstep may have run since `check_update`. After an error the run cannot continue; the store is as of the
        last superstep, for either pipeline. Return the version of the commit that records the change.
        """
        # The old sinks end first: a sink of both pipelines would have two writers otherwise.
        self.sinks.close()
        sinks.on_failure = self.sinks.on_failure
        version = self.ownership.update(topology)
        watermarks, balancer = self.watermarks, self.balancer
        self._serve(topology, sinks)
        self._restore(watermarks)
        self.balancer.continue_from(balancer)
        self.sinks.catch_up(self.superstep, self.pending.for_sinks)
        self.upkeep.update(topology)
        reach("update.done")
        return version

    def follow(self, topology: Topology) -> None:
        """Continue with a topology that differs only in the watermark policies of streams without a record so far.

        Nothing is written: a restart would have begun with it.
        """
        self.watermarks.follow(topology)
        self.late = LateRecords(topology, self.watermarks)
        self.topology = topology

    def give_up(self) -> None:
        """Stop waiting for services, so that the run can end; any thread may call it."""
        self.ownership.patience.end()

    # -- intervals -------------------------------------------------------------------------

    def computations_without_intervals(
        self, streams: Collection[str], backfilled: str | None = None
    ) -> tuple[ComputationNode, ...]:
        """Return the consumers of ``streams``, and the backfilled computation, that have never run."""
        owned = self.ownership.by_computation
        if all(owned.values()):
            return ()
        names = self.topology.sampled_by(streams)
        return tuple(
            node
            for name, node in self.topology.computations.items()
            if not owned[name] and (name in names or name == backfilled)
        )

    def create_intervals(self, computation: str, sample: pa.Array) -> None:
        """Divide a computation's keys into intervals by a sample of keys, and take their leases."""
        self.ownership.create(self.topology.computations[computation], sample)

    def id_scope(self, computation: str, stream: str) -> bytes:
        """Return the prefix of the record ids of a stream in a computation's rows; see `Topology.id_scope`."""
        bare = self.committer.snapshot.txns.get(AppId.BARE_IDS.of(computation))
        known = self._id_scopes.get((computation, stream, bare))
        if known is None:
            known = self.topology.id_scope(computation, stream, bare)
            self._id_scopes[computation, stream, bare] = known
        return known

    def intervals_of(self, computation: str) -> tuple[Interval, ...]:
        return tuple(owned.interval for owned in self.ownership.of(computation))

    def recut(self, cut: Cut, answer: Mapping[str, int] | None = None) -> None:
        """Split an interval or merge neighbours, between two supersteps; the same commit records the ``answer``."""
        # One commit replaces the old intervals and fences the new ones, so that no key has two owners or none.
        self.ownership.recut(cut, answer or {})
        for interval in cut.by:
            self._observe(self.ownership.owned[interval])
        # A compaction that was prepared for a replaced interval must not be committed.
        self.upkeep.follow(cut, self.superstep)
        self.balancer.apply(cut)
        if self.on_recut is not None:
            self.on_recut(cut)

    def _observe(self, owned: OwnedInterval) -> None:
        """Let the watermarks wait for what an interval still owes."""
        if owned.interval.computation != DEAD_LETTERS:
            hold, percentile_holds = owned.pending.hold, owned.pending.percentile_holds
            self.watermarks.update_interval(owned.interval, owned.fence.sequencer, hold, percentile_holds)

    # -- supersteps ------------------------------------------------------------------------

    def has_work(self) -> bool:
        """Return True if a superstep without new input would deliver productions or fire timers.

        Only ``watermarks.tick`` reads the clock, so call it first.
        """
        if self.watermarks.has_changed or self.pending.summaries:
            return True
        now, mark = self.clock.now_us(), self.watermarks.mark
        for owned in self.ownership.owned.values():
            if owned.is_due(now, mark):
                return True
        retries = self.letters.retries
        if self.clock.monotonic_us() >= retries.look_us:
            retries.look_again()
        return bool(retries.left)

    def status(self) -> RunStatus:
        return RunStatus(
            superstep=self.superstep,
            totals=self.totals,
            watermarks=self.watermarks.input_watermarks(),
            low_watermark=self.watermarks.low_watermark(),
            ended=self.watermarks.ended,
            times_in_1970=dict(self.times_in_1970),
        )

    def next_wall_timer(self) -> WallTimeMicros | None:
        return self.ownership.next_wall_timer()

    def begin(
        self,
        inputs: Collection[str] = (),
        *,
        backfilled: str | None = None,
        with_files: bool = True,
        after: Mapping[str, EventTimeMicros] | None = None,
    ) -> SuperstepPlan:
        """Plan the next superstep; consumers of ``inputs``, the streams with new records, must have intervals.

        ``after`` are the watermarks of injected streams once the superstep is committed. A runner that follows the log
        itself saves the cost of ``with_files``.
        """
        started_us = self.clock.monotonic_us()
        # Idle streams stop holding the watermark now, because the plan fixes it for the whole superstep.
        self.watermarks.tick(inputs)
        retries = self.letters.retries
        if retries.left or started_us >= retries.look_us:
            # Retried letters are part of the plan, so that the commit that has their effects deletes them.
            self.ownership.patience.run(retries.choose)
        # The consumers of waiting productions must have intervals, or the superstep would deliver to nobody.
        self._create_downstream_intervals()
        conditions = self.watermarks.conditions()
        concerned = {backfilled}
        for stream in (*inputs, *self.pending.summaries):
            for consumer in self.topology.consumers.get(stream, ()):
                concerned.add(consumer.computation.name)
        intervals: list[IntervalPlan] = []
        for name in self.topology.computations:
            intervals += self.parts_of(
                name,
                conditions.wall_time,
                only_due=name not in concerned,
                with_files=with_files,
                after=after,
            )
        reach("superstep.planned")
        return SuperstepPlan(
            superstep=Superstep(self.superstep + 1),
            conditions=conditions,
            started_us=started_us,
            intervals=tuple(intervals),
            sources=self.pending.sources,
        )

    @collector_paused()
    def parts_of(
        self,
        computation: str,
        now: WallTimeMicros,
        *,
        only_due: bool = False,
        with_files: bool = True,
        after: Mapping[str, EventTimeMicros] | None = None,
    ) -> list[IntervalPlan]:
        """Return the parts of a computation's intervals in the superstep that was planned at ``now``.

        With ``only_due`` intervals without a due timer and without a dead letter to retry are left out.
        """
        watermarks, chosen = self.watermarks, self.letters.retries.chosen
        retried = () if chosen is None else chosen.retried.get(computation, ())
        node, late_before = self.topology.computations[computation], None
        if node.computation.in_micro_batches:
            # Spark's lateness rule is one superstep behind the watermark, which begins at 0. It counts whole milliseconds,
            # and the watermark itself is late.
            former = max(watermarks.former_watermark(computation), 0)
            late_before = EventTimeMicros(former // 1_000 * 1_000 + 1)
        watermark = watermarks.input_watermark(computation)
        percentiles = watermarks.percentile_watermarks(computation)
        settled = watermarks.settled(computation, after) if after and node.time_sorted else None
        last_event = watermarks.last_event(computation)
        parts: list[IntervalPlan] = []
        for owned in self.ownership.by_computation[computation]:
            own = (
                tuple(letter for letter in retried if owned.interval.contains(letter.key)) if retried else ()
            )
            due = owned.is_due(now, watermarks.mark) or bool(own)
            if due or not only_due:
                part = IntervalPlan(
                    interval=owned.interval,
                    fence=owned.next_fence,
                    watermark=watermark,
                    files=self.committer.snapshot.files_of(owned.interval) if with_files else (),
                    due=due,
                    percentile_watermarks=percentiles,
                    settled=settled,
                    late_before=late_before,
                    retried=own,
                    last_event=last_event,
                )
                parts.append(part)
        return parts

    def apply(
        self,
        superstep: Superstep,
        totals: Totals,
        manifests: Collection[Manifest],
        letters: WrittenLetters,
    ) -> None:
        self.superstep, self.totals = superstep, totals
        self.unset_states.observe(manifests)
        # Keep the journaled watermarks before holds and observations change: Spark's lateness rule refers to them.
        self.watermarks.record_commit()
        files = self.upkeep.files
        written = [(letters.file, letters.productions)]
        files[self.ownership.control.interval] += letters.file is not None
        for manifest in manifests:
            owned = self.ownership.owned[manifest.interval]
            owned.pending = manifest.result.pending
            self._observe(owned)
            files[manifest.interval] += manifest.file is not None
            written.append((manifest.file, manifest.result.productions))
        # Productions hold the watermark before observations move it: otherwise their consumers would see them late.
        sources: list[ProductionSource] = []
        summaries: list[ProductionSummary] = []
        for file, produced in written:
            summaries += produced
            if file is not None and produced:
                streams = frozenset([summary.stream for summary in produced])
                sources.append(ProductionSource(path=file.path, superstep=superstep, streams=streams))
        self._await(merged_pending(sources, summaries, self.topology))
        self.watermarks.take_effect()

    def maintain(self) -> None:
        """Run the upkeep between two supersteps, answer requests, and make the cuts that load or a tool asks for."""
        now_us = self.clock.monotonic_us()
        # Between supersteps, because a compaction takes the next commit number of its interval, as a superstep does.
        if self.committer.snapshot.version >= self.upkeep.due_version or now_us >= self.upkeep.due_us:
            self.upkeep.run(self.superstep, self.watermarks.input_watermark)
        if self.letters.retries.answers:
            self.letters.retries.answer(self.ownership.record)
        if self.balancer.is_on or now_us >= self.balancer.ask_us:
            for cut, answer in self.balancer.due(self.committer.snapshot.txns):
                self.recut(cut, answer)

    def _await(self, pending: PendingProductions) -> None:
        self.pending = pending
        self.watermarks.set_undelivered(pending.summaries)

    def _create_downstream_intervals(self) -> None:
        chosen = self.letters.retries.chosen
        for name, letters in {} if chosen is None else chosen.retried.items():
            if not self.ownership.by_computation[name]:
                self.create_intervals(name, pa.array([letter.key for letter in letters], pa.string()))
        if missing := self.computations_without_intervals(self.pending.summaries):
            productions = read_productions(self.store.objects, self.pending.sources)
            for node in missing:
                self.create_intervals(node.name, keys_of(productions, node))
