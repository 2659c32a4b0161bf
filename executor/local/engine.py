"""
The local engine: runs a planned superstep in this process and hands the manifests to the commit.

The core is the same as on Spark: `IntervalProcessor` over `SoftState`, planned and committed by
the `Coordinator`. What differs is the way between them: nothing is shuffled, and productions go
to their consumers from memory once their commit is done (strong productions, MillWheel §6.1.2);
only what a restart finds undelivered is read from files. Weak productions do not wait for it:
`WeakRounds` runs their supersteps.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

import pyarrow as pa

from millpond.executor.bundle.bundle import DeadLetter, Deliveries
from millpond.executor.bundle.result import BundleResult, Manifest
from millpond.executor.computation.watchdog import OnStuck
from millpond.executor.injectors.observation import InputObservation
from millpond.executor.local.input import ExtractedInputs, OutsideRows, extract_inputs
from millpond.executor.local.interval import LocalInterval
from millpond.executor.local.weak_round import CHECKPOINT_AFTER_MS, RanBundle, WeakRounds
from millpond.executor.maintenance.helper_thread import HelperThread
from millpond.executor.maintenance.inline import INLINE
from millpond.executor.pipeline.positions import input_positions
from millpond.executor.reporting.progress import SuperstepReport
from millpond.executor.superstep.coordinator import Coordinator
from millpond.executor.superstep.delivery import (
    Extracted,
    ProductionSource,
    deliveries_of,
    keyless_letters,
    read_productions,
    within,
)
from millpond.executor.superstep.plan import InputPosition, IntervalPlan, SuperstepPlan
from millpond.statestore.errors import InvalidError
from millpond.statestore.failpoint import reach
from millpond.statestore.interval import Interval
from millpond.statestore.rows.files import RowFile
from millpond.statestore.store import Store
from millpond.statestore.types import Clock, Rng, TableVersion

__all__ = ["LocalEngine", "Prepared"]

_LOG = logging.getLogger("millpond")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """
    A superstep whose work is done and not committed.

    Attributes:
        plan: what was to be done.
        manifests: what each interval did.
        observations: what was seen of the outside inputs.
        letters: records that never reached an interval.
        produced: productions by the row file that holds them.
    """

    plan: SuperstepPlan
    manifests: list[Manifest]
    observations: list[InputObservation]
    letters: list[DeadLetter]
    produced: dict[str, pa.Table]


class LocalEngine:
    """
    One pipeline's supersteps in this process; used by one thread at a time.

    Attributes:
        on_stuck: told of user code that takes longer than it may and cannot be interrupted.

    Args:
        store: the open store.
        coordinator: plans and commits; already open.
        rng: the source of file names.
        cache_bytes: soft-state budget of one interval.
        writers: threads that write files beside the processing; 0 does everything in turn, so
            that a simulation repeats itself.
        clock: measures how long weak productions wait.
        checkpoint_after_ms: how long a weak production may wait before it is checkpointed.
    """

    def __init__(
        self,
        store: Store,
        coordinator: Coordinator,
        rng: Rng,
        *,
        cache_bytes: int,
        clock: Clock,
        writers: int = 0,
        checkpoint_after_ms: float = CHECKPOINT_AFTER_MS,
    ) -> None:
        self._store = store
        self._coordinator = coordinator
        self._rng = rng
        self._cache_bytes = cache_bytes
        self._writer: Executor = ThreadPoolExecutor(writers, "millpond-writer") if writers else INLINE
        has_helper = bool(writers and coordinator.topology.fused)
        self._helper = HelperThread("millpond-weak") if has_helper else None
        self._weak = WeakRounds(
            coordinator,
            self._interval,
            lambda: store.committer.snapshot,
            clock=clock,
            checkpoint_after_ms=checkpoint_after_ms,
            helper=self._helper,
        )
        self._intervals: dict[Interval, LocalInterval] = {}
        self._produced: dict[str, pa.Table] = {}
        self.on_stuck: OnStuck = _tell
        self._version: TableVersion | None = None

    def prepare(self, outside: Sequence[OutsideRows] = (), *, is_bounded: bool = False) -> Prepared:
        """
        Do the work of one superstep: outside rows, undelivered productions and due timers.

        Nothing of it counts before `commit`; it may be done again, as often as it fails.

        Args:
            outside: rows that came from outside.
            is_bounded: the input's end is known, so its low watermark waits for that end
                instead of following the records.

        Raises:
            InvalidError: user code failed and failures stop the pipeline.
            UnavailableError: a service is away; soft state is sound.
        """
        watches = {rows.stream: self._coordinator.watermarks.watch(rows.stream) for rows in outside}
        inputs = extract_inputs(
            self._coordinator.topology,
            outside,
            is_bounded=is_bounded,
            watches=watches,
            id_scope=self._coordinator.id_scope,
        )
        self._cut_intervals(inputs)
        plan = self._coordinator.begin(inputs={rows.stream for rows in outside}, with_files=False)
        self._follow(self._store.committer.snapshot.version)
        manifests, produced, letters = self._run_intervals(plan, inputs)
        return Prepared(
            plan=plan,
            manifests=manifests,
            observations=inputs.observations,
            letters=[*inputs.letters, *letters],
            produced=produced,
        )

    def commit(self, prepared: Prepared, position: InputPosition | None = None) -> SuperstepReport:
        """
        Make what was prepared durable, and keep its productions for the next superstep.

        Args:
            prepared: what `prepare` returned last.
            position: how far an outside input has been consumed by it.

        Raises:
            FencedError: another process has taken over; nothing was written.
            OutcomeUnknownError: the store is away for longer than the runner waits.
            UnavailableError: ZooKeeper is away for longer than the runner waits.
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
                self._intervals[manifest.interval].confirm(manifest.file)
            self._version = TableVersion(report.version)
        return report

    def _follow(self, version: TableVersion) -> None:
        """
        Look at all files again unless every commit since the last look was this engine's own.

        The cost of a superstep must not grow with the number of files; what somebody else
        may have changed (a compaction, Spark's OPTIMIZE) shows in the version.
        """
        if version != self._version:
            for interval in self._intervals.values():
                interval.fall_behind()
            self._version = version

    def close(self, *, wait_for_code: bool = True) -> None:
        """
        Let the threads go.

        Args:
            wait_for_code: whether to wait for user code that is still at work.
        """
        self._writer.shutdown()
        if self._helper is not None:
            self._helper.shutdown(wait=wait_for_code)

    def settle_sinks(self) -> None:
        """
        Wait until the sinks have what the last commit gave them.

        Raises:
            MillpondError: what a sink raised.
        """
        self._coordinator.sinks.wait()

    def consumed(self, stream: str) -> dict[str, int]:
        """
        How far outside inputs of a stream have been consumed, by their source.
        """
        snapshot = self._store.committer.snapshot
        return input_positions(snapshot.txns, self._coordinator.topology.name, stream)

    # -- what goes in ----------------------------------------------------------------------

    def _cut_intervals(self, inputs: ExtractedInputs) -> None:
        streams = {seen.stream for seen in inputs.observations}
        for node in self._coordinator.computations_without_intervals(streams):
            keys = [deliveries.keys for deliveries in inputs.by_computation.get(node.name, [])]
            sample = pa.concat_arrays(keys) if keys else pa.array([], pa.string())
            self._coordinator.create_intervals(node.name, sample)

    # -- what is done ----------------------------------------------------------------------

    def _run_intervals(
        self, plan: SuperstepPlan, inputs: ExtractedInputs
    ) -> tuple[list[Manifest], dict[str, pa.Table], list[DeadLetter]]:
        extracted = self._extract(plan)
        letters = [
            letter for name, found in extracted.items() for one in found for letter in _letters(name, one)
        ]
        if self._coordinator.topology.fused:
            ran, keyless = self._weak.run(plan, lambda part: self._deliveries(part, inputs, extracted))
            return *_by_file(self._write_all(plan, ran)), [*letters, *keyless]
        work = [(part, self._deliveries(part, inputs, extracted)) for part in plan.intervals]
        # Whoever has productions to consume goes first: those records have waited a commit already.
        work.sort(key=lambda each: each[0].interval.computation not in extracted)
        work = [(part, deliveries) for part, deliveries in work if deliveries or part.due]
        return *_by_file(self._run_bundles(plan, work)), letters

    def _write_all(
        self, plan: SuperstepPlan, ran: Sequence[RanBundle]
    ) -> list[tuple[Manifest, pa.Table | None]]:
        """
        Write the files of bundles that have run, beside one another.
        """
        started: list[tuple[RanBundle, BundleResult, Future[RowFile | None]]] = []
        try:
            for place, bundle in enumerate(ran, 1):
                result = bundle.settled()
                writer = self._writer if place < len(ran) else INLINE
                token = self._rng.token()
                file = writer.submit(bundle.interval.write, plan, bundle.part, result.updates, token)
                started.append((bundle, result, file))
            return [one.interval.finish(one.part, result, file.result()) for one, result, file in started]
        finally:
            wait([file for _, _, file in started])

    def _run_bundles(
        self, plan: SuperstepPlan, work: Sequence[tuple[IntervalPlan, list[Deliveries]]]
    ) -> list[tuple[Manifest, pa.Table | None]]:
        """
        Process interval after interval, while the files of the earlier ones are being written.
        """
        started: list[tuple[LocalInterval, IntervalPlan, BundleResult, Future[RowFile | None]]] = []
        try:
            for place, (part, deliveries) in enumerate(work, 1):
                interval = self._interval(part.interval)
                result = interval.process(plan, part, deliveries, self._store.committer.snapshot)
                writer = self._writer if place < len(work) else INLINE
                reach("superstep.bundle_processed")
                token = self._rng.token()
                file = writer.submit(interval.write, plan, part, result.updates, token)
                started.append((interval, part, result, file))
            return [interval.finish(part, result, file.result()) for interval, part, result, file in started]
        finally:
            # After a failure too: nothing may still be writing when the work is done again.
            wait([file for _, _, _, file in started])

    def _extract(self, plan: SuperstepPlan) -> dict[str, tuple[Extracted, ...]]:
        """
        The undelivered productions as each consumer gets them.
        """
        if not plan.sources:
            return {}
        tables = [(source, self._productions(source)) for source in plan.sources]
        reach("delivery.read")
        found: dict[str, tuple[Extracted, ...]] = {}
        for name in dict.fromkeys(part.interval.computation for part in plan.intervals):
            node = self._coordinator.topology.computations[name]
            wanted = [table for source, table in tables if source.concerns(node.inbox)]
            extracted = deliveries_of(pa.concat_tables(wanted), node) if wanted else ()
            if extracted:
                found[name] = extracted
        return found

    def _productions(self, source: ProductionSource) -> pa.Table:
        kept = self._produced.get(source.path)
        return read_productions(self._store.objects, [source]) if kept is None else kept

    def _deliveries(
        self, part: IntervalPlan, inputs: ExtractedInputs, extracted: Mapping[str, tuple[Extracted, ...]]
    ) -> list[Deliveries]:
        name = part.interval.computation
        whole = [
            *(one.deliveries for one in extracted.get(name, ())),
            *inputs.by_computation.get(name, ()),
        ]
        cut = (within(deliveries, part.interval) for deliveries in whole)
        return [deliveries for deliveries in cut if deliveries is not None and len(deliveries.at)]

    def _interval(self, interval: Interval, anew: bool = False) -> LocalInterval:
        if anew or interval not in self._intervals:
            node = self._coordinator.topology.computations[interval.computation]
            store = self._store
            made = LocalInterval(
                node, interval, store.objects, store.row_format, self._cache_bytes, self._strand
            )
            self._intervals[interval] = made
        return self._intervals[interval]

    def _strand(self, error: InvalidError) -> None:
        # First whoever ends the run: the thread that is let go then is to find it ended.
        self.on_stuck(error)
        self._weak.strand(error)


def _letters(computation: str, extracted: Extracted) -> tuple[DeadLetter, ...]:
    return keyless_letters(computation, extracted) if extracted.errors else ()


def _by_file(
    bundles: Sequence[tuple[Manifest, pa.Table | None]],
) -> tuple[list[Manifest], dict[str, pa.Table]]:
    """
    The manifests, and their productions by the file that holds them.
    """
    produced = {m.file.path: made for m, made in bundles if m.file is not None and made is not None}
    return [manifest for manifest, _ in bundles], produced


def _tell(error: InvalidError) -> None:
    _LOG.error("%s", error)
