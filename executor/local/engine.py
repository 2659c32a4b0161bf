"""The local engine: extracts a batch and runs the intervals of a superstep in this process.

Nothing is shuffled, and productions reach their consumers from memory once their commit is done (strong productions,
MillWheel §6.1.2); only productions that a restart left undelivered are read from files. Weak productions do not wait
for the commit: `WeakRounds` runs their supersteps.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from functools import partial

import pyarrow as pa

from millpond.executor.computation.state import StateLayout
from millpond.executor.computation.watchdog import OnStuck
from millpond.executor.inputs.extraction import Rows
from millpond.executor.interval.bundle import Bundle, Deliveries, IntervalPlan
from millpond.executor.interval.row_cache import MemoryBudget
from millpond.executor.interval.row_update import BundleResult, Manifest
from millpond.executor.interval.worker import IntervalWorker
from millpond.executor.local.intake import ExtractedInputs, OutsideRows, extract_inputs, taken_of
from millpond.executor.local.weak_round import RanBundle, WeakRounds
from millpond.executor.maintenance.helpers import INLINE, HelperThread
from millpond.executor.ownership.cuts import Cut
from millpond.executor.pipeline.nodes import ComputationNode
from millpond.executor.pipeline.topology import Topology
from millpond.executor.run.options import RunnerOptions
from millpond.executor.superstep.coordinator import Coordinator
from millpond.executor.superstep.delivery import (
    ProductionSource,
    UndeliveredProductions,
    flatten_productions,
    read_productions,
    within,
)
from millpond.executor.superstep.plan import SuperstepPlan
from millpond.executor.superstep.report import SuperstepReport
from millpond.executor.superstep.sink_delivery import SinkDelivery
from millpond.executor.superstep.superstep import Batch, Engine, Inputs, Results
from millpond.executor.time.observations import InputObservation, Watch
from millpond.statestore.durations import duration_ms
from millpond.statestore.errors import InvalidError
from millpond.statestore.failpoint import reach
from millpond.statestore.interval import Interval
from millpond.statestore.log.files import LiveFile
from millpond.statestore.rows.files import RowFile
from millpond.statestore.rows.pages import PAGE_INDEXES
from millpond.statestore.types import EventTimeMicros, TableVersion

_LOG = logging.getLogger("millpond")


def _kept_by(node: ComputationNode) -> tuple[bool, bool, StateLayout]:
    return node.time_sorted, node.exactly_once, StateLayout.of(node.computation)


"""What decides which parts of its rows a computation keeps in memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalBatch(Batch):
    """Injected rows for one superstep.

    Attributes:
        is_bounded: the input has a known end, so its watermark waits for the end instead of following the records.
        observed: stream and rows that were consumed before and that move its watermark now.
    """

    outside: Sequence[OutsideRows] = ()
    is_bounded: bool = False
    observed: tuple[str, Iterable[Rows]] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalInputs(Inputs):
    """Extracted rows, with the observations of rows that were consumed before."""

    extracted: ExtractedInputs
    observed: Sequence[InputObservation] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalResults(Results):
    """Results, with the productions by the path of the row file that holds them."""

    produced: Mapping[str, pa.Table] = field(default_factory=dict)


class LocalEngine(Engine[LocalBatch, LocalInputs, LocalResults]):
    """Runs the intervals of one pipeline in this process; used by one thread at a time.

    ``writers`` threads write row files while the next bundle runs; with 0 files are written in turn, so that a
    simulation is repeatable. ``on_stuck`` is called if user code exceeds its time limit and cannot be interrupted.
    """

    in_process = True

    def __init__(self, coordinator: Coordinator, options: RunnerOptions, *, writers: int = 0) -> None:
        self._coordinator = coordinator
        self._store = coordinator.store
        self._objects = coordinator.row_files
        self._options = options
        self._memory = MemoryBudget(options.cache_bytes, lambda: PAGE_INDEXES.size_bytes)
        self._writer: Executor = ThreadPoolExecutor(writers, "millpond-writer") if writers else INLINE
        self._has_threads = bool(writers)
        self._helper: HelperThread | None = None
        self._weak = self._weak_rounds()
        self._workers: dict[Interval, IntervalWorker] = {}
        self._produced: Mapping[str, pa.Table] = {}
        self._version: TableVersion | None = None
        self._stuck: InvalidError | None = None
        self.on_stuck: OnStuck = partial(_LOG.error, "%s")
        coordinator.on_recut = self._forget_cut

    def _weak_rounds(self) -> WeakRounds:
        """Return the weak rounds of the present pipeline, with a helper thread if a slow consumer may be abandoned."""
        if self._helper is not None:
            self._helper.shutdown(wait=True)
        has_helper = self._has_threads and bool(self._coordinator.topology.fused)
        self._helper = HelperThread("millpond-weak") if has_helper else None
        return WeakRounds(
            self._coordinator,
            self._worker_of,
            self._files_of,
            clock=self._options.clock,
            checkpoint_after_ms=duration_ms(
                "checkpoint_weak_after", self._options.checkpoint_weak_after, least=None
            ),
            helper=self._helper,
        )

    def update(self, topology: Topology, sinks: SinkDelivery) -> TableVersion:
        # Abandoned code must not run into the changed pipeline.
        self._weak.await_code()
        former = self._coordinator.topology.computations
        version = self._coordinator.update(topology, sinks)
        # The productions in memory have their former names: read them from the files, as after a restart.
        self._produced = {}
        for interval in list(self._workers):
            node, before = topology.computations.get(interval.computation), former[interval.computation]
            # Soft state holds stored rows, which changed code can read.
            if node is not None and _kept_by(node) == _kept_by(before):
                self._workers[interval].take_code(node)
            else:
                self._workers.pop(interval).leave()
        self._weak = self._weak_rounds()
        return version

    def close(self, *, wait_for_code: bool = True) -> None:
        self._writer.shutdown()
        if self._helper is not None:
            self._helper.shutdown(wait=wait_for_code)

    # -- the steps of a superstep ----------------------------------------------------------

    def extract(self, batch: LocalBatch) -> LocalInputs:
        coordinator, outside = self._coordinator, batch.outside
        watermarks = coordinator.watermarks
        watches: dict[str, Watch] = {}
        stamps: dict[str, EventTimeMicros] = {}
        live: list[OutsideRows] = []
        for rows in outside:
            # Before the rows are read: keys of another kind would be written where no reader finds them.
            coordinator.keys.record(rows.stream, rows.rows, rows.backfill)
            watches[rows.stream] = watch = watermarks.watch(rows.stream)
            if watch.stamp_at is not None:
                stamps[rows.stream] = watch.stamp_at
            if rows.backfill is None:
                live.append(rows)
        extracted = extract_inputs(
            coordinator.topology,
            outside,
            is_bounded=batch.is_bounded,
            watches=watches,
            id_scope=coordinator.id_scope,
        )
        return LocalInputs(
            streams=watches.keys() if batch.backfilled is None else (),
            after=watermarks.foresee(extracted.observations) if batch.after is None else batch.after,
            stamps=stamps,
            taken=() if batch.is_bounded else taken_of(live),
            extracted=extracted,
            observed=() if batch.observed is None else self._observations_of(*batch.observed),
        )

    def _observations_of(self, stream: str, rows: Iterable[Rows]) -> list[InputObservation]:
        """Observe the times of rows that were consumed before; no record is counted again."""
        topology, watch = self._coordinator.topology, self._coordinator.watermarks.watch(stream)
        observations: list[InputObservation] = []
        for piece in rows:
            part = OutsideRows(stream=stream, rows=piece)
            seen = extract_inputs(topology, [part], is_bounded=False, watches={stream: watch})
            observations += [replace(one, records=0, in_1970=0) for one in seen.observations]
        return observations

    def sample_keys(self, inputs: LocalInputs, node: ComputationNode) -> pa.Array:
        keys = [deliveries.keys for deliveries in inputs.extracted.by_computation.get(node.name, ())]
        return pa.concat_arrays(keys) if keys else pa.array([], pa.string())

    def run_intervals(self, plan: SuperstepPlan, inputs: LocalInputs) -> LocalResults:
        self._follow_log()
        productions = None
        if plan.sources:
            productions = UndeliveredProductions(plan.sources, self._productions_in)
            # All files now: a missing file must fail the superstep before any user code has run.
            productions.read_committed()
            reach("delivery.read")
        topology, letters = self._coordinator.topology, list(inputs.extracted.letters)
        if productions is not None:
            for name in dict.fromkeys([part.interval.computation for part in plan.intervals]):
                letters += productions.letters(topology.computations[name])
        if topology.fused:
            ran, keyless = self._weak.run(
                plan, lambda part: self._deliveries(part, inputs.extracted, productions)
            )
            bundles = self._write(ran, len(ran))
            letters += keyless
        else:
            work = self._work(plan, inputs.extracted, productions)
            bundles = self._write(self._run_bundles(plan, work), len(work))
        if self._stuck is not None:
            # User code returned after the run had ended because of it: its bundle must not be committed.
            raise self._stuck
        return LocalResults(
            manifests=[manifest for manifest, _ in bundles],
            observations=[*inputs.extracted.observations, *inputs.observed],
            letters=letters,
            produced={
                manifest.file.path: productions
                for manifest, productions in bundles
                if manifest.file is not None and productions is not None
            },
        )

    def confirm(self, results: LocalResults, report: SuperstepReport) -> SuperstepReport:
        self._produced = results.produced
        # Another writer's commit lies in between otherwise: the next superstep reads the files again.
        if self._version is not None and report.version == self._version + 1:
            for manifest in results.manifests:
                self._workers[manifest.interval].confirm(manifest.file)
            self._version = TableVersion(report.version)
        if self._memory.is_exceeded:
            for worker in self._workers.values():
                worker.shrink()
        return report

    # -- the work --------------------------------------------------------------------------

    def _follow_log(self) -> None:
        """Let every interval read the committed files again unless this engine made every commit since the last superstep.

        A change by another writer (a compaction, Spark's OPTIMIZE) shows in the version, so the cost of a superstep
        does not grow with the number of files.
        """
        version = self._coordinator.committer.snapshot.version
        if version != self._version:
            for worker in self._workers.values():
                worker.fall_behind()
            self._version = version

    def _work(
        self, plan: SuperstepPlan, inputs: ExtractedInputs, productions: UndeliveredProductions | None
    ) -> list[tuple[IntervalPlan, list[Deliveries]]]:
        waiting: list[tuple[IntervalPlan, list[Deliveries]]] = []
        others: list[tuple[IntervalPlan, list[Deliveries]]] = []
        for part in plan.intervals:
            deliveries = self._deliveries(part, inputs, productions)
            if deliveries or part.due:
                node = self._coordinator.topology.computations[part.interval.computation]
                # Consumers of productions run first: their records have waited for a commit already.
                is_waiting = productions is not None and productions.extracted(node)
                (waiting if is_waiting else others).append((part, deliveries))
        return [*waiting, *others]

    def _run_bundles(
        self, plan: SuperstepPlan, work: Sequence[tuple[IntervalPlan, list[Deliveries]]]
    ) -> Iterator[RanBundle]:
        for part, deliveries in work:
            worker = self._worker_of(part.interval)
            bundle = Bundle(
                plan=part,
                deliveries=deliveries,
                superstep=plan.superstep,
                wall_time=plan.conditions.wall_time,
            )
            result = worker.process(bundle, partial(self._files_of, part.interval))
            reach("superstep.bundle_processed")
            yield RanBundle(worker, bundle, result)

    def _write(self, bundles: Iterable[RanBundle], count: int) -> list[tuple[Manifest, pa.Table | None]]:
        """Write the file of each of ``count`` bundles, while the next bundle runs."""
        started: list[tuple[RanBundle, BundleResult, Future[RowFile | None] | RowFile | None]] = []
        try:
            for ran in bundles:
                result = ran.settled() if ran.stragglers else ran.result
                token = self._coordinator.names.token()
                if len(started) < count - 1:
                    writing = self._writer.submit(ran.worker.write, ran.bundle, result, token)
                    started.append((ran, result, writing))
                else:
                    # The last file has nothing to overlap with, so this thread writes it.
                    started.append((ran, result, ran.worker.write(ran.bundle, result, token)))
            written = []
            for ran, result, file in started:
                done = file.result() if isinstance(file, Future) else file
                productions = flatten_productions(result.updates) if result.productions else None
                written.append((ran.worker.finish(ran.bundle, result, done), productions))
            return written
        finally:
            # After a failure too: no file may still be written when the work is repeated.
            wait([file for *_, file in started if isinstance(file, Future)])

    def _productions_in(self, source: ProductionSource) -> pa.Table:
        kept = self._produced.get(source.path)
        return read_productions(self._objects, [source]) if kept is None else kept

    def _deliveries(
        self, part: IntervalPlan, inputs: ExtractedInputs, productions: UndeliveredProductions | None
    ) -> list[Deliveries]:
        node = self._coordinator.topology.computations[part.interval.computation]
        found = [] if productions is None else productions.deliveries(node, part.interval)
        for deliveries in inputs.by_computation.get(node.name, ()):
            inside = within(deliveries, part.interval)
            if inside is not None and len(inside.at):
                found.append(inside)
        return found

    def _files_of(self, interval: Interval) -> tuple[LiveFile, ...]:
        return self._coordinator.committer.snapshot.files_of(interval)

    def _worker_of(self, interval: Interval, renew: bool = False) -> IntervalWorker:
        """Return the worker of an interval; with ``renew`` a new worker, whose soft state is empty."""
        if renew or interval not in self._workers:
            self._workers[interval] = IntervalWorker(
                self._coordinator.topology.computations[interval.computation],
                interval,
                self._objects,
                row_format=self._store.row_format,
                memory=self._memory,
                stopwatch=self._options.clock.monotonic_us,
                on_stuck=self._strand,
            )
        return self._workers[interval]

    def _forget_cut(self, cut: Cut) -> None:
        for interval in cut.replaced:
            worker = self._workers.pop(interval, None)
            if worker is not None:
                worker.leave()

    def _strand(self, error: InvalidError) -> None:
        self._stuck = error
        # First end the run: the thread that is released next must see that it has ended.
        self.on_stuck(error)
        self._weak.strand(error)
