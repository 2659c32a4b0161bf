"""
Weak rounds: the bundles of one superstep in which some productions do not wait for the commit.

Computations run in the order in which fused streams lead from one to the next. A consumer that
takes too long does not hold up those before it: what it has not got, or not finished with, is
checkpointed with its producer's rows, its producer's senders are acknowledged by the commit, and
it gets the record from the checkpoint in the next superstep (MillWheel §6.1.3, figure 11).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from dataclasses import dataclass, field, replace
from typing import Final

import pyarrow as pa

from millpond.executor.bundle.bundle import DeadLetter, Deliveries
from millpond.executor.bundle.result import BundleResult
from millpond.executor.bundle.row_update import summarise_kept
from millpond.executor.bundle.weak_productions import Straggler, WeakProductions
from millpond.executor.local.interval import LocalInterval
from millpond.executor.pipeline.nodes import ComputationNode
from millpond.executor.superstep.coordinator import Coordinator
from millpond.executor.superstep.delivery import (
    Extracted,
    deliveries_of,
    keyless_letters,
    positions_within,
    within,
)
from millpond.executor.superstep.plan import IntervalPlan, SuperstepPlan
from millpond.statestore.errors import InvalidError
from millpond.statestore.failpoint import reach
from millpond.statestore.interval import Interval
from millpond.statestore.log.snapshot import Snapshot
from millpond.statestore.types import Clock, Superstep

__all__ = ["CHECKPOINT_AFTER_MS", "RanBundle", "WeakRounds"]

CHECKPOINT_AFTER_MS: Final = 1_000.0
"""A weak production that has not been taken by then is checkpointed (MillWheel §6.1.3)."""


@dataclass(slots=True)
class RanBundle:
    """
    A bundle whose code has run.

    Attributes:
        interval: whose soft state has it.
        part: what was planned.
        result: what came of it.
        stragglers: its weak productions that were not taken in time.
    """

    interval: LocalInterval
    part: IntervalPlan
    result: BundleResult
    stragglers: list[Straggler] = field(default_factory=list)

    def settled(self) -> BundleResult:
        """
        The result with every production in its rows that still waits for somebody.
        """
        weak = self.result.weak
        if weak is None or not self.stragglers:
            return self.result
        draft = weak.keeping(self.stragglers)
        productions = summarise_kept(draft.kept, draft.bundle.percentile_watermarks)
        return replace(self.result, updates=draft.updates(), productions=productions)


@dataclass(frozen=True, slots=True)
class _Running:
    """
    A bundle that was not done in time; its records are checkpointed in ``superstep``.
    """

    future: Future[BundleResult]
    superstep: Superstep
    records: int


class WeakRounds:
    """
    Runs the bundles of supersteps in a pipeline with weak productions; used by one thread.

    Args:
        coordinator: plans.
        interval_of: the running side of an interval; with ``True`` a new one, which knows nothing.
        snapshot_of: the table as it is.
        clock: measures how long a production waits.
        checkpoint_after_ms: how long a weak production may wait for its consumer.
        helper: runs bundles that might turn out to be slow; ``None`` runs all in turn, so that
            productions are checkpointed between bundles only.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        interval_of: Callable[[Interval, bool], LocalInterval],
        snapshot_of: Callable[[], Snapshot],
        *,
        clock: Clock,
        checkpoint_after_ms: float,
        helper: Executor | None,
    ) -> None:
        self._coordinator = coordinator
        self._topology = coordinator.topology
        self._interval_of = interval_of
        self._snapshot_of = snapshot_of
        self._clock = clock
        self._checkpoint_after_us = int(checkpoint_after_ms * 1_000)
        self._helper = helper
        self._running: dict[Interval, _Running] = {}
        self._stranded: Future[BundleResult] = Future()

    def run(
        self, plan: SuperstepPlan, own_of: Callable[[IntervalPlan], Sequence[Deliveries]]
    ) -> tuple[list[RanBundle], list[DeadLetter]]:
        """
        Run every bundle of a superstep.

        Args:
            plan: what is to be done for outside records, strong productions and timers.
            own_of: the deliveries of an interval that do not come from this very superstep.

        Returns:
            The bundles, and letters for weak productions from which nobody got a key.
        """
        self._forget_outdated(plan.superstep)
        round_ = _FusedRound(plan, self._clock.monotonic_us() + self._checkpoint_after_us)
        planned: dict[str, list[IntervalPlan]] = {}
        for part in plan.intervals:
            planned.setdefault(part.interval.computation, []).append(part)
        for name in self._topology.fused_order:
            node = self._topology.computations[name]
            incoming = self._incoming(round_, node)
            for part in self._parts(plan, node, planned.get(name, []), incoming):
                weak = [found for each in incoming if (found := within(each.deliveries, part.interval))]
                own = own_of(part)
                if own or weak or part.due or part.interval in self._running:
                    self._run_part(round_, node, part, own, weak)
        return round_.done, round_.letters

    def strand(self, error: InvalidError) -> None:
        """
        Code cannot be interrupted: whoever waits for a bundle that was left behind gets the error instead.

        Any thread may say so.
        """
        if not self._stranded.done():
            self._stranded.set_exception(error)

    # -- what goes in ----------------------------------------------------------------------

    def _incoming(self, round_: _FusedRound, node: ComputationNode) -> tuple[Extracted, ...]:
        tables = [weak.table for _, weak in round_.feeding(node)]
        found = deliveries_of(pa.concat_tables(tables), node) if tables else ()
        for extracted in found:
            round_.letters += keyless_letters(node.name, extracted) if extracted.errors else ()
        return found

    def _parts(
        self,
        plan: SuperstepPlan,
        node: ComputationNode,
        planned: list[IntervalPlan],
        incoming: Sequence[Extracted],
    ) -> list[IntervalPlan]:
        if not incoming:
            return planned
        if not self._coordinator.intervals_of(node.name):
            keys = [extracted.deliveries.keys.drop_null() for extracted in incoming]
            self._coordinator.create_intervals(node.name, pa.concat_arrays(keys))
        return self._coordinator.parts_of(node.name, plan.wall_time, with_files=False)

    # -- what is done ----------------------------------------------------------------------

    def _run_part(
        self,
        round_: _FusedRound,
        node: ComputationNode,
        part: IntervalPlan,
        own: Sequence[Deliveries],
        weak: Sequence[Deliveries],
    ) -> None:
        running = self._running.pop(part.interval, None)
        if running is not None:
            adopted = self._adopt(round_.plan, part, own, running)
            if adopted is not None:
                # What is new for it comes after what it has been busy with.
                round_.straggle(node, part.interval)
                round_.done.append(adopted)
                return
        left_us = round_.deadline_us - self._clock.monotonic_us()
        if weak and left_us <= 0:
            round_.straggle(node, part.interval)
            weak = ()
        if not own and not part.due:
            if weak:
                self._run_in_time(round_, node, part, weak, left_us)
            return
        round_.done.append(self._run_now(round_.plan, part, [*own, *weak]))

    def _run_now(
        self, plan: SuperstepPlan, part: IntervalPlan, deliveries: Sequence[Deliveries]
    ) -> RanBundle:
        interval = self._interval_of(part.interval, False)
        return RanBundle(interval, part, self._process(interval, plan, part, deliveries))

    def _process(
        self,
        interval: LocalInterval,
        plan: SuperstepPlan,
        part: IntervalPlan,
        deliveries: Sequence[Deliveries],
    ) -> BundleResult:
        weak = self._topology.weak_streams(part.interval.computation)
        result = interval.process(plan, part, deliveries, self._snapshot_of(), weak)
        reach("superstep.bundle_processed")
        return result

    def _run_in_time(
        self,
        round_: _FusedRound,
        node: ComputationNode,
        part: IntervalPlan,
        weak: Sequence[Deliveries],
        left_us: int,
    ) -> None:
        """
        Run a bundle that only this superstep's weak productions ask for; leave it behind if it is slow.
        """
        if self._helper is None:
            round_.done.append(self._run_now(round_.plan, part, weak))
            return
        interval = self._interval_of(part.interval, False)
        future = self._helper.submit(self._process, interval, round_.plan, part, weak)
        wait([future], left_us / 1_000_000)
        if future.done():
            round_.done.append(RanBundle(interval, part, future.result()))
            return
        round_.straggle(node, part.interval)
        records = sum(len(each.at) for each in weak)
        self._running[part.interval] = _Running(future, round_.plan.superstep, records)

    def _adopt(
        self, plan: SuperstepPlan, part: IntervalPlan, own: Sequence[Deliveries], running: _Running
    ) -> RanBundle | None:
        """
        The bundle that was left behind, as part of this superstep; ``None`` if there is more to do now.

        What it was given then is among ``own`` now, from its checkpoint.

        Raises:
            InvalidError: its code cannot be interrupted.
        """
        wait([running.future, self._stranded], return_when=FIRST_COMPLETED)
        if not running.future.done():
            self._stranded.result()
        if sum(len(each.at) for each in own) != running.records or running.future.exception() is not None:
            self._interval_of(part.interval, True)
            return None
        interval = self._interval_of(part.interval, False)
        return RanBundle(interval, part, interval.restamped(running.future.result(), plan, part))

    def _forget_outdated(self, superstep: Superstep) -> None:
        """
        Let go of bundles whose superstep was not committed: their records come another way.
        """
        for interval in [i for i, running in self._running.items() if running.superstep + 1 != superstep]:
            del self._running[interval]
            self._interval_of(interval, True)


@dataclass(slots=True)
class _FusedRound:
    """
    One superstep's bundles as they get done.
    """

    plan: SuperstepPlan
    deadline_us: int
    done: list[RanBundle] = field(default_factory=list)
    letters: list[DeadLetter] = field(default_factory=list)

    def feeding(self, node: ComputationNode) -> list[tuple[RanBundle, WeakProductions]]:
        """
        The bundles with weak productions that a computation may get.
        """
        wanted = {subscription.stream for subscription in node.subscriptions}
        return [
            (bundle, bundle.result.weak)
            for bundle in self.done
            if bundle.result.weak is not None and not wanted.isdisjoint(bundle.result.weak.streams)
        ]

    def straggle(self, node: ComputationNode, interval: Interval) -> None:
        """
        Have everything checkpointed that an interval should have got in this superstep.
        """
        for bundle, weak in self.feeding(node):
            positions = positions_within(weak.table, node, interval)
            if len(positions):
                bundle.stragglers.append(Straggler(positions, node.name))
