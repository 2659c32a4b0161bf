"""Weak rounds: the bundles of one superstep in which some productions do not wait for the commit.

Computations run in the order in which fused streams lead from one to the next. A consumer that takes too long does
not delay its producers: productions that it has not received, or not finished, are checkpointed with the producer's
rows, the commit acknowledges the producer's senders, and the consumer gets the records from the checkpoint in the
next superstep (MillWheel §6.1.3, figure 11).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import pyarrow as pa

from millpond.executor.interval.bundle import Bundle, DeadLetter, Deliveries, IntervalPlan
from millpond.executor.interval.row_update import BundleResult, Straggler, WeakProductions
from millpond.executor.interval.worker import IntervalWorker
from millpond.executor.pipeline.nodes import ComputationNode
from millpond.executor.superstep.coordinator import Coordinator
from millpond.executor.superstep.delivery import (
    Extracted,
    deliveries_of,
    keyless_letters,
    positions_within,
    within,
)
from millpond.executor.superstep.plan import SuperstepPlan
from millpond.statestore.errors import InvalidError
from millpond.statestore.failpoint import reach
from millpond.statestore.interval import Interval
from millpond.statestore.log.files import LiveFile
from millpond.statestore.rows.row import ROW_SCHEMA, Fence
from millpond.statestore.types import Clock, Superstep


@dataclass(slots=True)
class RanBundle:
    """A bundle whose user code has run; its stragglers are weak productions that were not consumed in time."""

    worker: IntervalWorker
    bundle: Bundle
    result: BundleResult
    stragglers: list[Straggler] = field(default_factory=list)

    def settled(self) -> BundleResult:
        """Return the result with every production that a consumer still waits for in its row updates."""
        weak = self.result.weak
        if weak is None:
            return self.result
        draft = weak.keeping(self.stragglers)
        return replace(self.result, updates=draft.updates(), productions=draft.summaries())


@dataclass(frozen=True, slots=True)
class _Running:
    """An abandoned bundle, which did not finish in time; its superstep checkpoints its records."""

    bundle: Bundle
    future: Future[BundleResult]


class WeakRounds:
    """The bundles of supersteps in a pipeline with weak productions; used by one thread.

    Args:
        worker_of: returns the worker of an interval; with ``True`` a new worker without soft state.
        files_of: returns the live files of an interval; any thread may call it.
        helper: runs bundles that may be slow; without a helper bundles run in turn, and productions are
            checkpointed between bundles only.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        worker_of: Callable[[Interval, bool], IntervalWorker],
        files_of: Callable[[Interval], Sequence[LiveFile]],
        *,
        clock: Clock,
        checkpoint_after_ms: float,
        helper: Executor | None,
    ) -> None:
        self._coordinator = coordinator
        self._topology = coordinator.topology
        self._worker_of = worker_of
        self._files_of = files_of
        self._clock = clock
        self._checkpoint_after_us = int(checkpoint_after_ms * 1_000)
        self._helper = helper
        self._running: dict[Interval, _Running] = {}
        self._stranded: Future[BundleResult] = Future()

    def run(
        self, plan: SuperstepPlan, own_of: Callable[[IntervalPlan], Sequence[Deliveries]]
    ) -> tuple[list[RanBundle], list[DeadLetter]]:
        """Run every bundle of a superstep; return the bundles, and letters for weak productions without a key.

        ``own_of`` returns an interval's deliveries from outside of this superstep.
        """
        for interval, running in list(self._running.items()):
            # A bundle whose superstep was not committed: no checkpoint redelivers exactly its records.
            if running.bundle.superstep + 1 != plan.superstep:
                del self._running[interval]
                self._worker_of(interval, True)
        round_ = _FusedRound(plan, self._clock.monotonic_us() + self._checkpoint_after_us)
        planned: dict[str, list[IntervalPlan]] = {}
        for part in plan.intervals:
            planned.setdefault(part.interval.computation, []).append(part)
        for name in self._topology.fused_order:
            node = self._topology.computations[name]
            incoming = self._incoming(round_, node)
            for part in self._parts(plan, node, planned.get(name, []), incoming):
                parts = (within(extracted.deliveries, part.interval) for extracted in incoming)
                weak = [deliveries for deliveries in parts if deliveries]
                own = own_of(part)
                if own or weak or part.due or part.interval in self._running:
                    self._run_part(round_, node, part, own, weak)
        return round_.done, round_.letters

    def await_code(self) -> None:
        """Wait for abandoned bundles, and forget them: their records are redelivered from their checkpoints."""
        for interval, running in list(self._running.items()):
            self._await(running)
            del self._running[interval]
            self._worker_of(interval, True)

    def _await(self, running: _Running) -> None:
        wait([running.future, self._stranded], return_when=FIRST_COMPLETED)
        if not running.future.done():
            self._stranded.result()

    def strand(self, error: InvalidError) -> None:
        """Give up on user code that cannot be interrupted: `await_code` and `run` raise the error; any thread may call it."""
        if not self._stranded.done():
            self._stranded.set_exception(error)

    def _incoming(self, round_: _FusedRound, node: ComputationNode) -> tuple[Extracted, ...]:
        tables = [weak.table for _, weak in round_.feeding(node)]
        incoming = deliveries_of(pa.concat_tables(tables), node) if tables else ()
        for extracted in incoming:
            round_.letters += keyless_letters(node.name, extracted) if extracted.errors else ()
        return incoming

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
        return self._coordinator.parts_of(node.name, plan.conditions.wall_time, with_files=False)

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
                # Checkpoint this superstep's records: they come after the records of the adopted bundle.
                round_.straggle(node, part.interval)
                round_.done.append(adopted)
                return
        left_us = round_.deadline_us - self._clock.monotonic_us()
        if weak and left_us <= 0:
            round_.straggle(node, part.interval)
            weak = ()
        if not own and not part.due and not weak:
            return
        bundle = Bundle(
            plan=part,
            deliveries=[*own, *weak],
            superstep=round_.plan.superstep,
            wall_time=round_.plan.conditions.wall_time,
            weak=self._topology.weak_streams(part.interval.computation),
        )
        worker = self._worker_of(part.interval, False)
        if own or part.due or self._helper is None:
            round_.done.append(RanBundle(worker, bundle, self._process(worker, bundle)))
            return
        # The bundle has this superstep's weak productions only: abandon it if it is slow.
        future = self._helper.submit(self._process, worker, bundle)
        wait([future], left_us / 1_000_000)
        if future.done():
            round_.done.append(RanBundle(worker, bundle, future.result()))
            return
        round_.straggle(node, part.interval)
        self._running[part.interval] = _Running(bundle, future)

    def _process(self, worker: IntervalWorker, bundle: Bundle) -> BundleResult:
        result = worker.process(bundle, partial(self._files_of, bundle.plan.interval))
        reach("superstep.bundle_processed")
        return result

    def _adopt(
        self, plan: SuperstepPlan, part: IntervalPlan, own: Sequence[Deliveries], running: _Running
    ) -> RanBundle | None:
        """Return the abandoned bundle as part of this superstep; ``None`` if the interval has other records too.

        The records of the bundle are among ``own``, from their checkpoint.
        """
        self._await(running)
        own_records = sum(len(deliveries.at) for deliveries in own)
        records = sum(len(deliveries.at) for deliveries in running.bundle.deliveries)
        if own_records != records or running.future.exception() is not None:
            # Its soft state has effects that are not committed: begin again from the committed rows.
            self._worker_of(part.interval, True)
            return None
        return RanBundle(
            self._worker_of(part.interval, False),
            running.bundle.restamped(part.fence, plan.superstep),
            _restamped(running.future.result(), part.fence, plan.superstep),
        )


def _restamped(result: BundleResult, fence: Fence, superstep: Superstep) -> BundleResult:
    """Return the result of a bundle of an earlier superstep under this superstep's fence."""
    stamps = {
        "sequencer": fence.sequencer,
        "commit_number": fence.commit_number,
        "superstep": superstep,
    }
    updates = result.updates
    if updates is not None:
        for name, value in stamps.items():
            column = pa.array(np.full(updates.num_rows, value, np.int64))
            updates = updates.set_column(updates.schema.get_field_index(name), ROW_SCHEMA.field(name), column)
    weak = result.weak
    if weak is not None:
        weak = replace(weak, draft=weak.draft.restamped(fence, superstep))
    return replace(result, updates=updates, weak=weak)


@dataclass(slots=True)
class _FusedRound:
    """The bundles of one superstep that have run so far."""

    plan: SuperstepPlan
    deadline_us: int
    done: list[RanBundle] = field(default_factory=list)
    letters: list[DeadLetter] = field(default_factory=list)

    def feeding(self, node: ComputationNode) -> list[tuple[RanBundle, WeakProductions]]:
        """Return the bundles with weak productions on streams that a computation consumes."""
        wanted = {subscription.stream for subscription in node.subscriptions}
        return [
            (bundle, bundle.result.weak)
            for bundle in self.done
            if bundle.result.weak is not None and not wanted.isdisjoint(bundle.result.weak.streams)
        ]

    def straggle(self, node: ComputationNode, interval: Interval) -> None:
        """Checkpoint all productions that an interval should have received in this superstep."""
        for bundle, weak in self.feeding(node):
            positions = positions_within(weak.table, node, interval)
            if len(positions):
                bundle.stragglers.append(Straggler(positions, node.name))
