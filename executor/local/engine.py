"""The local engine: runs a planned superstep in this process and hands the manifests to the commit.

The core is the same as on Spark: an `IntervalWorker` per interval, planned and committed by the
`Coordinator`. Nothing is shuffled, and productions reach their consumers from memory once their
commit is done (strong productions, MillWheel §6.1.2); only what a restart left undelivered is read
from files. Weak productions do not wait for the commit: `WeakRounds` runs their supersteps.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import partial

import pyarrow as pa

from millpond.executor.computation.watchdog import OnStuck
from millpond.executor.inputs.extraction import Rows
from millpond.executor.interval.bundle import Bundle, DeadLetter, Deliveries
from millpond.executor.interval.row_cache import MemoryBudget
from millpond.executor.interval.row_update import BundleResult, Manifest
from millpond.executor.interval.worker import IntervalPlan, IntervalWorker, bundle_of
from millpond.executor.local.intake import ExtractedInputs, OutsideRows, extract_inputs, taken_of
from millpond.executor.local.weak_round import CHECKPOINT_AFTER_MS, RanBundle, WeakRounds
from millpond.executor.maintenance.helpers import INLINE, HelperThread
from millpond.executor.ownership.cuts import Cut
from millpond.executor.pipeline.nodes import ComputationNode
from millpond.executor.superstep.commit import SuperstepReport
from millpond.executor.superstep.coordinator import Coordinator, TopologyParts
from millpond.executor.superstep.delivery import (
    ProductionSource,
    UndeliveredProductions,
    flatten_productions,
    read_productions,
    within,
)
from millpond.executor.superstep.plan import InputPosition, SuperstepPlan
from millpond.executor.time.observations import InputObservation
from millpond.statestore.errors import InvalidError
from millpond.statestore.failpoint import reach
from millpond.statestore.interval import Interval
from millpond.statestore.log.files import LiveFile
from millpond.statestore.rows.files import RowFile
from millpond.statestore.rows.page_index import PAGE_INDEXES
from millpond.statestore.store import Store
from millpond.statestore.types import Clock, EventTimeMicros, Objects, Rng, TableVersion

_LOG = logging.getLogger("millpond")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A superstep whose bundles have run and which is not committed.

    Attributes:
        plan: the intervals that had work.
        manifests: one per interval that ran.
        observations: counts and times of the outside inputs.
        letters: records that never reached an interval.
        produced: productions by the path of the row file that holds them.
    """

    plan: SuperstepPlan
    manifests: list[Manifest]
    observations: list[InputObservation]
    letters: list[DeadLetter]
    produced: dict[str, pa.Table]


class LocalEngine:
    """Runs the supersteps of one pipeline in this process; used by one thread at a time.

    Attributes:
        on_stuck: called if user code exceeds its time limit and cannot be interrupted.

    Args:
        store: the open store.
        objects: where row files are read and written: the store's, or a disk tier before them.
        coordinator: plans and commits supersteps; already open.
        rng: the source of file names.
        cache_bytes: soft-state budget of all intervals, in bytes.
        writers: threads that write row files while the next bundle runs; with 0 files are written
            in turn, so that a simulation is repeatable.
        clock: measures how long weak productions wait.
        checkpoint_after_ms: how long a weak production may wait before it is checkpointed.
    """

    def __init__(
        self,
        store: Store,
        objects: Objects,
        coordinator: Coordinator,
        rng: Rng,
        *,
        cache_bytes: int,
        clock: Clock,
        writers: int = 0,
        checkpoint_after_ms: float = CHECKPOINT_AFTER_MS,
    ) -> None:
        self._store = store
        self._objects = objects
        self._coordinator = coordinator
        self._rng = rng
        self._clock = clock
        self._memory = MemoryBudget(cache_bytes, lambda: PAGE_INDEXES.size_bytes)
        self._writer: Executor = ThreadPoolExecutor(writers, "millpond-writer") if writers else INLINE
        self._has_threads = bool(writers)
        self._checkpoint_after_ms = checkpoint_after_ms
        self._helper: HelperThread | None = None
        self._weak = self._weak_rounds()
        self._workers: dict[Interval, IntervalWorker] = {}
        self._produced: dict[str, pa.Table] = {}
        self.on_stuck: OnStuck = _log_stuck
        coordinator.on_recut = self._follow
        self._version: TableVersion | None = None

    def _weak_rounds(self) -> WeakRounds:
        """The rounds of the pipeline as it is, with a thread of their own where a consumer may be left behind."""
        if self._helper is not None:
            self._helper.shutdown(wait=True)
        has_helper = self._has_threads and bool(self._coordinator.topology.fused)
        self._helper = HelperThread("millpond-weak") if has_helper else None
        return WeakRounds(
            self._coordinator,
            self._worker_of,
            self._files_of,
            clock=self._clock,
            checkpoint_after_ms=self._checkpoint_after_ms,
            helper=self._helper,
        )

    def update(self, parts: TopologyParts) -> TableVersion:
        """Go on with a changed pipeline, between two supersteps; see `Coordinator.update`.

        Soft state is rows as they are stored, so that of a computation with other code stays valid. What was
        produced and waits is read from the committed files, as after a restart.

        Args:
            parts: the changed pipeline, prepared.

        Raises:
            InvalidError: user code that was left behind cannot be interrupted.
            FencedError: another process has taken over.
            UnavailableError: a service is away for longer than the runner waits.
        """
        self._weak.await_code()
        former = self._coordinator.topology.computations
        version = self._coordinator.update(parts)
        self._produced = {}
        for interval in list(self._workers):
            node, before = parts.topology.computations.get(interval.computation), former[interval.computation]
            if node is not None and _keep_rows_alike(node, before):
                self._workers[interval].take_code(node)
            else:
                self._workers.pop(interval).leave()
        self._weak = self._weak_rounds()
        return version

    def prepare(
        self,
        outside: Sequence[OutsideRows] = (),
        *,
        is_bounded: bool = False,
        after: Mapping[str, EventTimeMicros] | None = None,
    ) -> Prepared:
        """Run the bundles of one superstep: outside rows, undelivered productions and due timers.

        Nothing takes effect before `commit`; after a failure it may be called again.

        Args:
            outside: injected rows.
            is_bounded: whether the input has a known end; then its low watermark waits for that
                end instead of following the records.
            after: by stream, a time that no row of a later superstep is before; ``None``: follows from the rows.

        Raises:
            InvalidError: user code failed and failures stop the pipeline.
            UnavailableError: a service cannot be reached; soft state stays valid.
        """
        for rows in outside:
            self._coordinator.keys.note(rows.stream, rows.rows, rows.backfill)
        watches = {rows.stream: self._coordinator.watermarks.watch(rows.stream) for rows in outside}
        inputs = extract_inputs(
            self._coordinator.topology,
            outside,
            is_bounded=is_bounded,
            watches=watches,
            id_scope=self._coordinator.id_scope,
        )
        backfilled = next((rows.backfill for rows in outside if rows.backfill is not None), None)
        self._create_intervals(inputs, backfilled)
        known = self._coordinator.watermarks.foresee(inputs.observations) if after is None else after
        streams = {rows.stream for rows in outside if rows.backfill is None}
        plan = self._coordinator.begin(inputs=streams, backfilled=backfilled, with_files=False, after=known)
        plan = replace(
            plan,
            conditions=plan.conditions.stamped({stream: watch.stamp_at for stream, watch in watches.items()}),
            taken=() if is_bounded else taken_of([rows for rows in outside if rows.backfill is None]),
        )
        self._note_version(self._store.committer.snapshot.version)
        manifests, produced, letters = self._run_intervals(plan, inputs)
        return Prepared(
            plan=plan,
            manifests=manifests,
            observations=inputs.observations,
            letters=[*inputs.letters, *letters],
            produced=produced,
        )

    def observations_of(self, stream: str, rows: Iterable[Rows]) -> list[InputObservation]:
        """What the times of rows that were consumed before say about their stream; no record is counted again.

        Args:
            stream: the injected stream.
            rows: the rows, in pieces.
        """
        topology, watch = self._coordinator.topology, self._coordinator.watermarks.watch(stream)
        observations: list[InputObservation] = []
        for piece in rows:
            part = OutsideRows(stream=stream, rows=piece)
            seen = extract_inputs(topology, [part], is_bounded=False, watches={stream: watch})
            observations += [replace(one, records=0) for one in seen.observations]
        return observations

    def commit(self, prepared: Prepared, position: InputPosition | None = None) -> SuperstepReport:
        """Make a prepared superstep durable, and keep its productions for the next one.

        Args:
            prepared: the last result of `prepare`.
            position: how far the superstep has consumed an outside input.

        Raises:
            FencedError: another process has taken over; nothing was written.
            OutcomeUnknownError: the store stays away for longer than the runner waits.
            UnavailableError: ZooKeeper stays away for longer than the runner waits.
        """
        report = self._coordinator.commit(
            prepared.plan,
            prepared.manifests,
            position=position,
            inputs=prepared.observations,
            dead_letters=prepared.letters,
        )
        self._produced = prepared.produced
        if self._version is not None and report.version == self._version + 1:
            for manifest in prepared.manifests:
                self._workers[manifest.interval].confirm(manifest.file)
            self._version = TableVersion(report.version)
        if self._memory.is_exceeded:
            for worker in self._workers.values():
                worker.shrink()
        return report

    def _note_version(self, version: TableVersion) -> None:
        """Make every interval read the committed files again unless this engine made every commit since the last call.

        A change by another writer (a compaction, Spark's OPTIMIZE) shows in the version, so the cost
        of a superstep does not grow with the number of files.
        """
        if version != self._version:
            for worker in self._workers.values():
                worker.fall_behind()
            self._version = version

    def _follow(self, cut: Cut) -> None:
        """Forget the soft state of intervals that were replaced: their successors read what they need."""
        for interval in cut.replaced:
            worker = self._workers.pop(interval, None)
            if worker is not None:
                worker.leave()

    def close(self, *, wait_for_code: bool = True) -> None:
        """Stop the threads.

        Args:
            wait_for_code: whether to wait for user code that is still running.
        """
        self._writer.shutdown()
        if self._helper is not None:
            self._helper.shutdown(wait=wait_for_code)

    def settle_sinks(self) -> None:
        """Wait until the sinks have written the last committed superstep.

        Raises:
            MillpondError: the error of a sink.
        """
        self._coordinator.sinks.wait()

    def consumed(self, stream: str) -> dict[str, int]:
        """How far outside inputs of a stream have been consumed, by their source."""
        return self._coordinator.inputs.consumed(stream)

    # -- what goes in ----------------------------------------------------------------------

    def _create_intervals(self, inputs: ExtractedInputs, backfilled: str | None) -> None:
        streams = {seen.stream for seen in inputs.observations}
        names = [node.name for node in self._coordinator.computations_without_intervals(streams)]
        if backfilled is not None and not self._coordinator.intervals_of(backfilled):
            names.append(backfilled)
        for name in names:
            keys = [deliveries.keys for deliveries in inputs.by_computation.get(name, [])]
            sample = pa.concat_arrays(keys) if keys else pa.array([], pa.string())
            self._coordinator.create_intervals(name, sample)

    # -- the work --------------------------------------------------------------------------

    def _run_intervals(
        self, plan: SuperstepPlan, inputs: ExtractedInputs
    ) -> tuple[list[Manifest], dict[str, pa.Table], list[DeadLetter]]:
        productions = self._undelivered(plan)
        nodes = [
            self._coordinator.topology.computations[name]
            for name in dict.fromkeys(part.interval.computation for part in plan.intervals)
        ]
        letters = [letter for node in nodes for letter in productions.letters(node)]
        if self._coordinator.topology.fused:
            ran, keyless = self._weak.run(plan, lambda part: self._deliveries(part, inputs, productions))
            return *_by_file(self._write_all(ran)), [*letters, *keyless]
        work = [(part, self._deliveries(part, inputs, productions)) for part in plan.intervals]
        # Consumers of productions run first: those records have waited for a commit already.
        consumers = {node.name for node in nodes if productions.extracted(node)}
        work.sort(key=lambda part_work: part_work[0].interval.computation not in consumers)
        work = [(part, deliveries) for part, deliveries in work if deliveries or part.due]
        return *_by_file(self._run_bundles(plan, work)), letters

    def _write_all(self, ran: Sequence[RanBundle]) -> list[tuple[Manifest, pa.Table | None]]:
        """Write the files of bundles that have run, in parallel."""
        started: list[_Writing] = []
        try:
            for number, bundle in enumerate(ran, 1):
                result = bundle.settled()
                is_last = number == len(ran)
                started.append(self._start_writing(bundle.worker, bundle.bundle, result, is_last=is_last))
            return [writing.finish() for writing in started]
        finally:
            wait([writing.file for writing in started])

    def _run_bundles(
        self, plan: SuperstepPlan, work: Sequence[tuple[IntervalPlan, list[Deliveries]]]
    ) -> list[tuple[Manifest, pa.Table | None]]:
        """Process interval after interval, while the files of the earlier ones are being written."""
        started: list[_Writing] = []
        try:
            for number, (part, deliveries) in enumerate(work, 1):
                worker = self._worker_of(part.interval)
                bundle = bundle_of(part, deliveries, superstep=plan.superstep, wall_time=plan.wall_time)
                result = worker.process(bundle, partial(self._files_of, part.interval))
                reach("superstep.bundle_processed")
                started.append(self._start_writing(worker, bundle, result, is_last=number == len(work)))
            return [writing.finish() for writing in started]
        finally:
            # After a failure too: no file may still be written when the work is repeated.
            wait([writing.file for writing in started])

    def _start_writing(
        self, worker: IntervalWorker, bundle: Bundle, result: BundleResult, *, is_last: bool
    ) -> _Writing:
        # The last file has nothing to overlap with, so this thread writes it.
        writer = INLINE if is_last else self._writer
        token = self._rng.token()
        return _Writing(worker, bundle, result, writer.submit(worker.write, bundle, result, token))

    # -- productions and soft state --------------------------------------------------------

    def _undelivered(self, plan: SuperstepPlan) -> UndeliveredProductions:
        productions = UndeliveredProductions(plan.sources, self._productions_in)
        if plan.sources:
            productions.read_committed()
            reach("delivery.read")
        return productions

    def _productions_in(self, source: ProductionSource) -> pa.Table:
        kept = self._produced.get(source.path)
        return read_productions(self._objects, [source]) if kept is None else kept

    def _deliveries(
        self, part: IntervalPlan, inputs: ExtractedInputs, productions: UndeliveredProductions
    ) -> list[Deliveries]:
        node = self._coordinator.topology.computations[part.interval.computation]
        parts = (within(deliveries, part.interval) for deliveries in inputs.by_computation.get(node.name, ()))
        return [
            *productions.deliveries(node, part.interval),
            *(deliveries for deliveries in parts if deliveries is not None and len(deliveries.at)),
        ]

    def _files_of(self, interval: Interval) -> tuple[LiveFile, ...]:
        return self._store.committer.snapshot.files_of(interval)

    def _worker_of(self, interval: Interval, renew: bool = False) -> IntervalWorker:
        """The worker of an interval; with ``renew`` a new one, whose soft state is empty."""
        if renew or interval not in self._workers:
            self._workers[interval] = IntervalWorker(
                self._coordinator.topology.computations[interval.computation],
                interval,
                self._objects,
                row_format=self._store.row_format,
                memory=self._memory,
                stopwatch=self._clock.monotonic_us,
                on_stuck=self._strand,
            )
        return self._workers[interval]

    def _strand(self, error: InvalidError) -> None:
        # First end the run: the thread that is released next must see that it has ended.
        self.on_stuck(error)
        self._weak.strand(error)


@dataclass(frozen=True, slots=True)
class _Writing:
    """A bundle that has run and whose row file is being written."""

    worker: IntervalWorker
    bundle: Bundle
    result: BundleResult
    file: Future[RowFile | None]

    def finish(self) -> tuple[Manifest, pa.Table | None]:
        """Wait for the file; return the manifest and the productions, ``None`` if there are none."""
        manifest = self.worker.finish(self.bundle, self.result, self.file.result())
        productions = flatten_productions(self.result.updates) if self.result.productions else None
        return manifest, productions


def _keep_rows_alike(node: ComputationNode, former: ComputationNode) -> bool:
    """Whether two computations keep the same things of their rows in memory."""
    kept = (node.time_sorted, node.exactly_once, node.computation.state_version)
    return kept == (former.time_sorted, former.exactly_once, former.computation.state_version)


def _by_file(
    bundles: Sequence[tuple[Manifest, pa.Table | None]],
) -> tuple[list[Manifest], dict[str, pa.Table]]:
    """The manifests, and their productions by the path of the file that holds them."""
    produced = {
        manifest.file.path: productions
        for manifest, productions in bundles
        if manifest.file is not None and productions is not None
    }
    return [manifest for manifest, _ in bundles], produced


def _log_stuck(error: InvalidError) -> None:
    _LOG.error("%s", error)
