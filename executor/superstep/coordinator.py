"""The coordinator: it runs one superstep after another, each of which ends in exactly one fenced commit.

Both runners drive it the same way::

    coordinator = Coordinator(store, topology, clock=clock, rng=rng)
    coordinator.open()                          # leases, fences, the initial scan
    plan = coordinator.begin(inputs={"queries"})
    manifests = ...                             # run the intervals of the plan
    report = coordinator.commit(plan, manifests, position=InputPosition(...))

Superstep *n* delivers every production of earlier supersteps, so productions need no acknowledgement of their
own: one commit consumes them and stores the effects.
A coordinator is used by one thread at a time. Implements MillWheel §6.1 and §7.1.

The parts of a coordinator that belong to one topology; a changed pipeline gets new ones.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from typing import Final

import pyarrow as pa

from millpond.executor.inputs.positions import superstep_of
from millpond.executor.interval.bundle import DeadLetter
from millpond.executor.interval.row_update import Manifest
from millpond.executor.interval.worker import IntervalPlan
from millpond.executor.maintenance.policy import CompactionWorkers, UpkeepPolicy
from millpond.executor.maintenance.upkeep import Upkeep
from millpond.executor.ownership.balancer import BalancePolicy, Balancer
from millpond.executor.ownership.catalog_recorder import CatalogRecorder
from millpond.executor.ownership.cuts import Cut
from millpond.executor.ownership.ownership import OwnedInterval, OwnedNames, Ownership
from millpond.executor.pipeline.nodes import DEAD_LETTERS, ComputationNode
from millpond.executor.pipeline.topology import Topology
from millpond.executor.superstep.admission import ForgottenWatermarks, InputAdmission, SuspectTimes
from millpond.executor.superstep.backfills import Backfills
from millpond.executor.superstep.commit import SuperstepReport, Totals, count, report_of, superstep_request
from millpond.executor.superstep.dead_letters import DeadLetterLimit, DeadLetters, WrittenLetters
from millpond.executor.superstep.delivery import keys_of, read_productions
from millpond.executor.superstep.key_columns import KeyColumns
from millpond.executor.superstep.pending import (
    PendingProductions,
    keep_undelivered,
    pending_of,
    recover_pending,
)
from millpond.executor.superstep.plan import InputPosition, SuperstepPlan, interval_plans
from millpond.executor.superstep.sink_delivery import SinkDelivery
from millpond.executor.time.observations import InputObservation
from millpond.executor.watermark.pipeline_watermarks import PipelineWatermarks
from millpond.statestore.app_ids import bare_ids_app_id
from millpond.statestore.failpoint import reach
from millpond.statestore.interval import Interval
from millpond.statestore.leases.lease import OnHeld
from millpond.statestore.store import Store
from millpond.statestore.system import collector_paused
from millpond.statestore.types import Clock, EventTimeMicros, Rng, Superstep, TableVersion, WallTimeMicros

_NONE: Final = Superstep(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartOptions:
    """What the parts of every topology of a run have in common.

    Attributes:
        store: the open store.
        clock: the source of time.
        names: the source of file names.
        accept_checkpoint: whether to accept an outside source that the store does not know.
        accept_ended: whether to accept records of a stream that an earlier run has ended.
        balance: when intervals are split and merged; ``None``: only by hand.
        threads: whether sinks are written in parallel with the next superstep.
        dead_letter_limit: how much may become dead letters before the run stops; ``None``: all of it.
    """

    store: Store
    clock: Clock
    names: OwnedNames
    accept_checkpoint: bool
    accept_ended: bool
    balance: BalancePolicy | None
    threads: bool
    dead_letter_limit: DeadLetterLimit | None


@dataclass(slots=True)
class TopologyParts:
    """The time, inputs, sinks and cuts of one topology, and where it stands.

    Attributes:
        store: the open store.
        topology: the checked pipeline.
        watermarks: its injectors and watermarks.
        inputs: which outside inputs it accepts.
        sinks: the sinks that committed supersteps are delivered to.
        balancer: decides on cuts.
        forgotten: warns of streams without a declared watermark.
        suspects: warns of times that are likely to be mistakes.
        backfills: the computations that are given history before anything else.
        keys: what typed keys are made of.
        letters: what could not be processed, and what of it is given once more.
        pending: productions that wait for their consumers.
        superstep: the number of the last committed superstep; 0 before the first.
        totals: the counts over the pipeline's whole life.
    """

    store: Store
    topology: Topology
    watermarks: PipelineWatermarks
    inputs: InputAdmission
    sinks: SinkDelivery
    balancer: Balancer
    forgotten: ForgottenWatermarks
    backfills: Backfills
    keys: KeyColumns
    dead_letter_limit: InitVar[DeadLetterLimit | None]
    clock: InitVar[Clock]
    letters: DeadLetters = field(init=False)
    suspects: SuspectTimes = field(init=False)
    pending: PendingProductions = field(default_factory=PendingProductions)
    superstep: Superstep = _NONE
    totals: Totals = field(default_factory=Totals)

    @classmethod
    def of(cls, topology: Topology, ownership: Ownership, options: PartOptions) -> TopologyParts:
        """The parts of a topology, which know nothing of the store yet; see `restore`."""
        store, clock = options.store, options.clock
        watermarks = PipelineWatermarks(topology, clock)
        return cls(
            store,
            topology,
            watermarks,
            InputAdmission(
                store,
                topology,
                watermarks,
                accept_checkpoint=options.accept_checkpoint,
                accept_ended=options.accept_ended,
            ),
            SinkDelivery(store, topology, clock, options.names, in_background=options.threads),
            Balancer(ownership, tuple(topology.computations), clock, options.balance),
            ForgottenWatermarks(topology, watermarks),
            Backfills(store, topology, ownership, watermarks),
            KeyColumns(store, topology, ownership),
            options.dead_letter_limit,
            clock,
        )

    def __post_init__(self, dead_letter_limit: DeadLetterLimit | None, clock: Clock) -> None:
        """Make what asks the other parts."""
        self.letters = DeadLetters(self.store, self.topology, clock, dead_letter_limit, self.id_scope)
        self.suspects = SuspectTimes(self.topology)

    def id_scope(self, computation: str, stream: str) -> bytes:
        """The prefix of the record ids of ``stream`` in a computation's rows; see `Topology.id_scope`."""
        bare = self.store.committer.snapshot.txns.get(bare_ids_app_id(computation))
        return self.topology.id_scope(computation, stream, bare)

    def restore(self, store: Store, ownership: Ownership, former: TopologyParts | None = None) -> None:
        """Go on from what the store says: superstep, watermarks, counts, and productions that wait.

        Args:
            store: the open store.
            ownership: the intervals, already taken.
            former: the parts that served the pipeline until now, in this process.

        Raises:
            DataError: a file is missing or its bytes are wrong.
        """
        self.backfills.open()
        positions, pipeline = store.committer.snapshot.txns, self.topology.name
        self.superstep = superstep_of(positions, pipeline)
        self.watermarks.restore(positions, None if former is None else former.watermarks)
        self.totals = Totals.restored(positions, pipeline)
        self.wait_for(recover_pending(store, self.topology, self.superstep))
        reach("recovery.productions_found")
        for owned in ownership.all():
            self.observe(owned)
        if former is not None:
            self.sinks.on_failure = former.sinks.on_failure
            self.balancer.follow_update(former.balancer)

    def follow(self, topology: Topology) -> None:
        """Go on with a topology that differs only in how streams without a record so far make their watermarks."""
        self.watermarks.follow(topology)
        self.forgotten = ForgottenWatermarks(topology, self.watermarks)
        self.topology = topology

    def wait_for(self, pending: PendingProductions) -> None:
        """Replace the productions that wait, which hold watermarks."""
        self.pending = pending
        self.watermarks.set_undelivered(pending.summaries)

    def observe(self, owned: OwnedInterval) -> None:
        """Take in what an interval still owes."""
        if owned.interval.computation != DEAD_LETTERS:
            summary = owned.summary
            self.watermarks.update_interval(
                owned.interval, owned.fence.sequencer, summary.hold, summary.percentile_holds
            )


class PartsInUse:
    """What a coordinator shows of the parts that serve its present topology.

    Args:
        parts: those of the first topology.
    """

    def __init__(self, parts: TopologyParts) -> None:
        self._parts = parts

    @property
    def topology(self) -> Topology:
        """The checked pipeline."""
        return self._parts.topology

    @property
    def watermarks(self) -> PipelineWatermarks:
        """The injectors and watermarks of the pipeline."""
        return self._parts.watermarks

    @property
    def inputs(self) -> InputAdmission:
        """Which outside inputs the pipeline accepts."""
        return self._parts.inputs

    @property
    def backfills(self) -> Backfills:
        """The computations that are given history before anything else."""
        return self._parts.backfills

    @property
    def keys(self) -> KeyColumns:
        """What typed keys are made of."""
        return self._parts.keys

    @property
    def sinks(self) -> SinkDelivery:
        """The sinks that committed supersteps are delivered to."""
        return self._parts.sinks

    @property
    def balancer(self) -> Balancer:
        """Decides on cuts; the runner tells it how many tasks run at once."""
        return self._parts.balancer

    @property
    def superstep(self) -> Superstep:
        """The number of the last committed superstep; 0 before the first."""
        return self._parts.superstep

    @property
    def totals(self) -> Totals:
        """The counts over the pipeline's whole life."""
        return self._parts.totals

    @property
    def undelivered(self) -> int:
        """The number of productions to deliver in the next superstep."""
        return self._parts.pending.count


class Coordinator(PartsInUse):
    """Owns a pipeline's intervals, plans its supersteps and commits their manifests.

    Args:
        store: the open store.
        topology: the checked pipeline.
        clock: the source of time.
        rng: the source of file names.
        intervals: the number of intervals of a computation that declares none.
        accept_checkpoint: whether to accept an outside source that the store does not know.
        accept_ended: whether to accept records of a stream that an earlier run has ended.
        pause_timeout_ms: how long to wait for ZooKeeper to return before giving up.
        on_held: what to do when another process holds an interval: ``take``, ``wait``, ``refuse``.
        upkeep: when the store is compacted and its garbage collected; ``None``: never.
        balance: when intervals are split and merged; ``None``: only by hand.
        compaction_workers: where compactions are prepared; ``None`` for this machine.
        threads: whether sinks are written in parallel with the next superstep; if not, before it.
        dead_letter_limit: how much may become dead letters before the run stops; ``None``: all of it.

    Attributes:
        names: the source of file names that are unique to this owner; usable once it is open.
        on_recut: called after each cut of a computation's keys.
    """

    def __init__(
        self,
        store: Store,
        topology: Topology,
        *,
        clock: Clock,
        rng: Rng,
        intervals: int = 1,
        accept_checkpoint: bool = False,
        accept_ended: bool = False,
        pause_timeout_ms: float = 300_000,
        on_held: OnHeld = "take",
        upkeep: UpkeepPolicy | None = None,
        balance: BalancePolicy | None = None,
        compaction_workers: CompactionWorkers | None = None,
        threads: bool = True,
        dead_letter_limit: DeadLetterLimit | None = None,
    ) -> None:
        self._store = store
        self._clock = clock
        self._journal = CatalogRecorder(store, topology)
        self._ownership = Ownership(
            store,
            topology,
            clock=clock,
            intervals=intervals,
            on_held=on_held,
            pause_timeout_ms=pause_timeout_ms,
            on_taken=self._journal.record,
            keep_undelivered=lambda computations, fence: keep_undelivered(
                store, topology.name, computations, fence=fence, token=self.names.token()
            ),
        )
        self.names: OwnedNames = OwnedNames(
            rng, topology.name, lambda: self._ownership.control.fence.sequencer
        )
        self._options = PartOptions(
            store=store,
            clock=clock,
            names=self.names,
            accept_checkpoint=accept_checkpoint,
            accept_ended=accept_ended,
            balance=balance,
            threads=threads,
            dead_letter_limit=dead_letter_limit,
        )
        super().__init__(TopologyParts.of(topology, self._ownership, self._options))
        self._upkeep = Upkeep(
            store,
            self._ownership,
            topology,
            clock=clock,
            rng=self.names,
            policy=upkeep,
            compaction_workers=compaction_workers,
        )
        self.on_recut: Callable[[Cut], None] | None = None

    # -- life cycle ------------------------------------------------------------------------

    def open(self) -> None:
        """Take the leases, fence former owners, and recover pending productions.

        Raises:
            ConflictError: another process holds an interval and ``on_held`` is ``refuse``.
            UnavailableError: ZooKeeper or the object store is unavailable.
            DataError: a file is missing or its bytes are wrong.
            InvalidError: the pipeline has changed in a way that its rows do not allow; see `plan_evolution`.
        """
        self._ownership.open()
        parts = self._parts
        parts.restore(self._store, self._ownership)
        parts.sinks.open(parts.superstep)
        parts.sinks.catch_up(parts.superstep, parts.pending.sources)
        self._journal.open()
        self._upkeep.open()

    def close(self) -> None:
        """Wait for the sinks, then release the leases. Uncommitted work is lost."""
        try:
            self.sinks.close()
        finally:
            self._upkeep.close()
            self._journal.close()
            self._ownership.close()

    def prepare_update(self, topology: Topology) -> TopologyParts:
        """Check a changed pipeline of the same name between two supersteps, and open its sinks; the old one may go on.

        Raises:
            InvalidError: the pipeline cannot go on like this; see `plan_evolution`.
            DataError: a sink is ahead of the store.
            FencedError: another process has taken the pipeline.
        """
        self.sinks.wait()
        self._ownership.check_update(topology)
        parts = TopologyParts.of(topology, self._ownership, self._options)
        parts.backfills.refuse_pending()
        parts.sinks.open(self.superstep)
        reach("update.checked")
        return parts

    def update(self, parts: TopologyParts) -> TableVersion:
        """Go on with a changed pipeline; the leases on what it keeps stay held.

        After an error the run cannot go on. The store is as of the last superstep, for either pipeline.

        Args:
            parts: what `prepare_update` returned, before any other call.

        Returns:
            The version of the commit that says that it runs.

        Raises:
            FencedError: another process has taken the pipeline.
            UnavailableError: a service is away for longer than the runner waits.
        """
        self.sinks.close()
        version = self._ownership.update(parts.topology)
        parts.restore(self._store, self._ownership, former=self._parts)
        self._parts = parts
        parts.sinks.catch_up(parts.superstep, parts.pending.sources)
        self._upkeep.update(parts.topology)
        reach("update.done")
        return version

    def follow(self, topology: Topology) -> None:
        """Go on with a topology that differs only in how streams without a record so far make their watermarks.

        Nothing is written: a restart would have begun with it.
        """
        self._parts.follow(topology)

    def give_up(self) -> None:
        """Stop waiting for services, so that the run can end; may be called from any thread."""
        self._ownership.patience.end()

    def check_owner(self) -> None:
        """Check that this process owns the pipeline; see `Ownership.check_owner`.

        Raises:
            FencedError: another process has taken it.
        """
        self._ownership.check_owner()

    def check_leases(self) -> None:
        """Check that no lease is known to be lost; see `Ownership.check_leases`.

        Raises:
            FencedError: another process has taken an interval.
        """
        self._ownership.check_leases()

    def has_work(self) -> bool:
        """Whether a superstep without new input would do anything: deliver productions or fire timers.

        Only ``watermarks.tick`` reads the clock, so call it first.
        """
        if self.watermarks.has_changed:
            return True
        if any(self.topology.consumers_of(stream) for stream in self._parts.pending.summaries):
            return True
        now, mark = self._clock.now_us(), self.watermarks.mark
        is_due = any(owned.is_due(now, mark) for owned in self._ownership.all())
        return is_due or self._parts.letters.retries.is_waiting()

    def next_wall_timer(self) -> WallTimeMicros | None:
        """The time of the next wall timer of any interval; ``None`` without one."""
        return self._ownership.next_wall_timer()

    # -- intervals -------------------------------------------------------------------------

    def computations_without_intervals(self, streams: Iterable[str]) -> tuple[ComputationNode, ...]:
        """Consumers of ``streams`` that have never run, and have no intervals yet."""
        nodes, readers = self.topology.computations.values(), self.topology.sampled_by(streams)
        return tuple(node for node in nodes if node.name in readers and not self._ownership.of(node.name))

    def create_intervals(self, computation: str, sample: pa.Array) -> None:
        """Divide a computation's keys into intervals by a sample of its keys, and take their leases.

        Args:
            computation: its name.
            sample: a string array of keys, repeated as often as they occur.
        """
        self._ownership.create(self.topology.computations[computation], sample)

    def id_scope(self, computation: str, stream: str) -> bytes:
        """The prefix of the record ids of ``stream`` in a computation's rows; see `Topology.id_scope`."""
        return self._parts.id_scope(computation, stream)

    def intervals_of(self, computation: str) -> tuple[Interval, ...]:
        """The computation's intervals, in key order."""
        return tuple(owned.interval for owned in self._ownership.of(computation))

    def recut(self, cut: Cut, answer: Mapping[str, int] | None = None) -> None:
        """Split an interval or merge neighbours, between two supersteps; timers, ids, holds and rows stay as they are.

        Args:
            cut: of intervals of the pipeline.
            answer: positions for the same commit; see `CutRequest.answer`.

        Raises:
            FencedError: another process owns the pipeline; nothing was written.
        """
        self._ownership.recut(cut, answer or {})
        for interval in cut.by:
            self._parts.observe(self._ownership.get(interval))
        self._upkeep.follow(cut)
        self.balancer.follow(cut)
        if self.on_recut is not None:
            self.on_recut(cut)

    # -- a superstep -----------------------------------------------------------------------

    def begin(
        self,
        inputs: Collection[str] = (),
        *,
        backfilled: str | None = None,
        with_files: bool = True,
        after: Mapping[str, EventTimeMicros] | None = None,
    ) -> SuperstepPlan:
        """Plan the next superstep.

        Args:
            inputs: injected streams with new records; their consumers must have intervals
                (see `create_intervals`).
            backfilled: the computation that is given records of its backfill.
            with_files: whether to list each interval's files; a runner that follows the log
                itself saves that cost.
            after: by injected stream, its watermark once the superstep is committed, if the runner knows it.
        """
        self.watermarks.tick(inputs)
        self._ownership.patience.run(self._parts.letters.retries.choose)
        self._create_downstream_intervals()
        conditions = self.watermarks.conditions()
        now = conditions.wall_time
        concerned = self.topology.readers_of([*inputs, *self._parts.pending.summaries]) | {backfilled}
        plans = [
            self.parts_of(name, now, only_due=name not in concerned, with_files=with_files, after=after)
            for name in self.topology.computations
        ]
        reach("superstep.planned")
        return SuperstepPlan(
            superstep=Superstep(self._parts.superstep + 1),
            conditions=conditions,
            started_us=self._clock.monotonic_us(),
            intervals=tuple(part for parts in plans for part in parts),
            sources=self._parts.pending.sources,
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
        """The parts of a computation's intervals in the superstep that was planned at ``now``."""
        return interval_plans(
            computation,
            self._ownership.of(computation),
            now,
            in_micro_batches=self.topology.computations[computation].computation.in_micro_batches,
            only_due=only_due,
            watermarks=self.watermarks,
            files_in=self._store.committer.snapshot if with_files else None,
            after=after or {},
            retried_in=self._parts.letters.retries.of,
        )

    def commit(
        self,
        plan: SuperstepPlan,
        manifests: Sequence[Manifest],
        *,
        position: InputPosition | None = None,
        inputs: Sequence[InputObservation] = (),
        dead_letters: Sequence[DeadLetter] = (),
    ) -> SuperstepReport:
        """Make a superstep durable: every manifest, the input's position and the watermarks, in one commit.

        Args:
            plan: what `begin` returned.
            manifests: one per interval that ran; intervals without one are left untouched.
            position: how far the outside input has been consumed by this superstep.
            inputs: what was observed of the outside inputs; advances their injectors' watermarks.
            dead_letters: records that never reached an interval, such as those without a key.

        Raises:
            InvalidError: more became dead letters than the limit allows; nothing was written.
            FencedError: another process has taken an interval; nothing was written.
            OutcomeUnknownError: the store is unavailable for longer than the runner waits.
            UnavailableError: ZooKeeper is unavailable for longer than the runner waits.
        """
        letters = self._parts.letters.judge(manifests, dead_letters)
        self.watermarks.observe(inputs)
        ordered = sorted(manifests, key=lambda manifest: manifest.interval)
        control = self._ownership.control
        written_letters = self._ownership.patience.run(
            lambda: self._parts.letters.write(letters, plan, control.next_fence, self.names.token())
        )
        written = [(self._ownership.get(m.interval), m.file) for m in ordered if m.file is not None]
        counts = count(ordered, letters.new, inputs)
        totals = self._parts.totals.plus(counts)
        request = superstep_request(
            plan,
            [(control, written_letters.file), *written],
            self.watermarks,
            pipeline=self.topology.name,
            counts=counts,
            totals=totals,
            position=position,
            stored=self._store.committer.snapshot.txns,
            loads=self.balancer.report(),
        )
        self.sinks.wait()
        reach("superstep.before_commit")
        committing_us = self._clock.monotonic_us()
        committed = self._ownership.commit(request)
        reach("superstep.committed")
        commit_ms = (self._clock.monotonic_us() - committing_us) / 1_000
        self._upkeep.note(request)
        self.balancer.note(ordered)
        self._parts.letters.note(letters)
        self._parts.forgotten.note(counts)
        self._parts.suspects.note(inputs, self._clock.now_us())
        self._parts.totals = totals
        self._parts.superstep = plan.superstep
        self._apply(ordered, written_letters)
        reach("superstep.applied")
        self.sinks.deliver(plan.superstep, self._parts.pending.sources)
        return report_of(
            plan,
            committed.version,
            counts,
            now_us=self._clock.now_us(),
            elapsed_us=self._clock.monotonic_us() - plan.started_us,
            watermark=self.watermarks.low_watermark(),
            commit_ms=commit_ms,
            pending=self._parts.pending.count,
        )

    def maintain(self) -> None:
        """Run the upkeep between two supersteps, and the cuts that load or a tool asks for; answer other requests.

        Raises:
            FencedError: another process has taken an interval.
        """
        self._upkeep.run(self._parts.superstep, self.watermarks.input_watermark)
        self._parts.letters.answer(self._ownership.record)
        for cut, answer in self.balancer.due(self._store.committer.snapshot.txns):
            self.recut(cut, answer)

    def _apply(self, manifests: Sequence[Manifest], letters: WrittenLetters) -> None:
        self.watermarks.note_commit()
        written = [(letters.file, letters.productions)]
        for manifest in manifests:
            owned = self._ownership.get(manifest.interval)
            owned.observe(manifest.result)
            self._parts.observe(owned)
            written.append((manifest.file, manifest.result.productions))
        self._parts.wait_for(pending_of(written, self.topology, self._parts.superstep))
        self.watermarks.take_effect()

    def _create_downstream_intervals(self) -> None:
        for name, keys in self._parts.letters.retries.computations().items():
            if not self._ownership.of(name):
                self.create_intervals(name, pa.array(keys, pa.string()))
        if missing := self.computations_without_intervals(self._parts.pending.summaries):
            productions = read_productions(self._store.objects, self._parts.pending.sources)
            for node in missing:
                self.create_intervals(node.name, keys_of(productions, node))
