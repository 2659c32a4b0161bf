"""The parts of a coordinator that belong to one topology; a changed pipeline gets new ones."""

from __future__ import annotations

from dataclasses import InitVar, dataclass, field
from typing import Final

from millpond.executor.balance.balancer import Balancer
from millpond.executor.balance.policy import BalancePolicy
from millpond.executor.dead_letters.dead_letter_limit import DeadLetterLimit
from millpond.executor.ownership.file_names import OwnedNames
from millpond.executor.ownership.owned_interval import OwnedInterval
from millpond.executor.ownership.ownership import Ownership
from millpond.executor.pipeline.names import DEAD_LETTERS
from millpond.executor.pipeline.positions import superstep_of
from millpond.executor.pipeline.topology import Topology
from millpond.executor.superstep.backfills import Backfills
from millpond.executor.superstep.dead_letters import DeadLetters
from millpond.executor.superstep.forgotten_watermarks import ForgottenWatermarks
from millpond.executor.superstep.input_admission import InputAdmission
from millpond.executor.superstep.key_columns import KeyColumns
from millpond.executor.superstep.pending import PendingProductions, recover_pending
from millpond.executor.superstep.sink_delivery import SinkDelivery
from millpond.executor.superstep.suspect_times import SuspectTimes
from millpond.executor.superstep.totals import Totals
from millpond.executor.watermark.pipeline_watermarks import PipelineWatermarks
from millpond.statestore.app_ids import bare_ids_app_id
from millpond.statestore.failpoint import reach
from millpond.statestore.store import Store
from millpond.statestore.types import Clock, Superstep

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
