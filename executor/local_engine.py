"""
The local engine: runs a planned superstep in this process and hands the manifests to the commit.

The core is the same as on Spark: `IntervalProcessor` over `SoftState`, planned and committed by
the `Coordinator`. What differs is the way between them: nothing is shuffled, and productions go
to their consumers from memory once their commit is done (strong productions, MillWheel §6.1.2);
only what a restart finds undelivered is read from files.

Where weak productions go: `_run_intervals` would hand the productions of an interval to intervals
that come later in the same superstep, instead of keeping them until the commit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa

from millpond.executor.bundle import Bundle, DeadLetter, Deliveries, InputObservation, Manifest
from millpond.executor.delivery import (
    Extracted,
    ProductionSource,
    deliveries_of,
    describe_value,
    flatten_productions,
    keyless_letters,
    read_productions,
    take,
    within,
)
from millpond.executor.injection import Injected, Rows, read_injected, row_values
from millpond.executor.interval_processor import IntervalProcessor
from millpond.executor.position import input_positions
from millpond.executor.progress import SuperstepReport
from millpond.executor.soft_state import SoftState, StoreRowReader
from millpond.executor.superstep import Coordinator
from millpond.executor.superstep_plan import InputPosition, IntervalPlan, SuperstepPlan
from millpond.executor.topology import Topology
from millpond.statestore.interval import Interval
from millpond.statestore.rowfile import RowFile, write_row_file
from millpond.statestore.store import Store
from millpond.statestore.types import EventTimeMicros, Rng, TableVersion

__all__ = ["LocalEngine", "OutsideRows", "Prepared"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OutsideRows:
    """
    Rows of one injected stream for one superstep.
    """

    stream: str
    rows: Rows


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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Input:
    """
    Outside rows as each consumer gets them.
    """

    by_computation: Mapping[str, list[Deliveries]]
    letters: list[DeadLetter]
    observations: list[InputObservation]


class LocalEngine:
    """
    One pipeline's supersteps in this process; used by one thread at a time.

    Args:
        store: the open store.
        coordinator: plans and commits; already open.
        rng: the source of file names.
        cache_bytes: soft-state budget of one interval.
    """

    def __init__(self, store: Store, coordinator: Coordinator, rng: Rng, *, cache_bytes: int) -> None:
        self._store = store
        self._coordinator = coordinator
        self._rng = rng
        self._cache_bytes = cache_bytes
        self._workers: dict[Interval, _IntervalWorker] = {}
        self._produced: dict[str, pa.Table] = {}
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
        entered = self._enter(outside, is_bounded=is_bounded)
        self._cut_intervals(entered)
        plan = self._coordinator.begin(inputs={rows.stream for rows in outside})
        self._follow(self._store.committer.snapshot.version)
        manifests, produced, letters = self._run_intervals(plan, entered)
        return Prepared(
            plan=plan,
            manifests=manifests,
            observations=entered.observations,
            letters=[*entered.letters, *letters],
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
                self._workers[manifest.interval].confirm(manifest.file)
            self._version = TableVersion(report.version)
        return report

    def _follow(self, version: TableVersion) -> None:
        """
        Look at all files again unless every commit since the last look was this engine's own.

        The cost of a superstep must not grow with the number of files; what somebody else
        may have changed (a fold, Spark's OPTIMIZE) shows in the version.
        """
        if version != self._version:
            for worker in self._workers.values():
                worker.is_behind = True
            self._version = version

    def settle_sinks(self) -> None:
        """
        Wait until the sinks have what the last commit gave them.

        Raises:
            MillpondError: what a sink raised.
        """
        self._coordinator._sinks.wait()  # noqa: SLF001 - the coordinator's own, and no thread but ours uses it

    def consumed(self, stream: str) -> dict[str, int]:
        """
        How far outside inputs of a stream have been consumed, by their source.
        """
        snapshot = self._store.committer.snapshot
        return input_positions(snapshot.txns, self._coordinator.topology.name, stream)

    # -- what goes in ----------------------------------------------------------------------

    def _enter(self, outside: Sequence[OutsideRows], *, is_bounded: bool) -> _Input:
        by_computation: dict[str, list[Deliveries]] = {}
        letters: list[DeadLetter] = []
        observations: list[InputObservation] = []
        topology = self._coordinator.topology
        for each in _merged(outside):
            readings = _read_for_consumers(topology, each)
            for name, injected in readings.items():
                deliveries, unreadable = _split(each, name, injected)
                by_computation.setdefault(name, []).append(deliveries)
                letters += unreadable
            observations.append(_observation(each, list(readings.values()), is_bounded=is_bounded))
        return _Input(by_computation=by_computation, letters=letters, observations=observations)

    def _cut_intervals(self, entered: _Input) -> None:
        streams = {seen.stream for seen in entered.observations}
        for node in self._coordinator.computations_without_intervals(streams):
            keys = [deliveries.keys for deliveries in entered.by_computation.get(node.name, [])]
            sample = pa.concat_arrays(keys) if keys else pa.array([], pa.string())
            self._coordinator.create_intervals(node.name, sample)

    # -- what is done ----------------------------------------------------------------------

    def _run_intervals(
        self, plan: SuperstepPlan, entered: _Input
    ) -> tuple[list[Manifest], dict[str, pa.Table], list[DeadLetter]]:
        extracted = self._extract(plan)
        letters = [
            letter for name, found in extracted.items() for one in found for letter in _letters(name, one)
        ]
        work = [(part, self._deliveries(part, entered, extracted)) for part in plan.intervals]
        # Whoever has productions to consume goes first: those records have waited a commit already.
        work.sort(key=lambda each: each[0].interval.computation not in extracted)
        manifests: list[Manifest] = []
        produced: dict[str, pa.Table] = {}
        for part, deliveries in work:
            if deliveries or part.due:
                manifest, productions = self._worker(part.interval).run(plan, part, deliveries)
                manifests.append(manifest)
                if manifest.file is not None and productions is not None:
                    produced[manifest.file.path] = productions
        return manifests, produced, letters

    def _extract(self, plan: SuperstepPlan) -> dict[str, tuple[Extracted, ...]]:
        """
        The undelivered productions as each consumer gets them.
        """
        if not plan.sources:
            return {}
        tables = [(source, self._productions(source)) for source in plan.sources]
        found: dict[str, tuple[Extracted, ...]] = {}
        for name in dict.fromkeys(part.interval.computation for part in plan.intervals):
            node = self._coordinator.topology.computations[name]
            streams = [subscription.stream for subscription in node.subscriptions]
            wanted = [table for source, table in tables if source.concerns(streams)]
            extracted = deliveries_of(pa.concat_tables(wanted), node) if wanted else ()
            if extracted:
                found[name] = extracted
        return found

    def _productions(self, source: ProductionSource) -> pa.Table:
        kept = self._produced.get(source.path)
        return read_productions(self._store.objects, [source]) if kept is None else kept

    def _deliveries(
        self, part: IntervalPlan, entered: _Input, extracted: Mapping[str, tuple[Extracted, ...]]
    ) -> list[Deliveries]:
        name = part.interval.computation
        whole = [
            *(one.deliveries for one in extracted.get(name, ())),
            *entered.by_computation.get(name, ()),
        ]
        cut = (within(deliveries, part.interval) for deliveries in whole)
        return [deliveries for deliveries in cut if deliveries is not None and len(deliveries.at)]

    def _worker(self, interval: Interval) -> _IntervalWorker:
        if interval not in self._workers:
            node = self._coordinator.topology.computations[interval.computation]
            soft_state = SoftState(interval, StoreRowReader(self._store.objects), self._cache_bytes)
            processor = IntervalProcessor(node, interval, soft_state)
            self._workers[interval] = _IntervalWorker(self._store, processor, soft_state, self._rng)
        return self._workers[interval]


class _IntervalWorker:
    """
    What this process keeps of an interval between supersteps; all of it can be rebuilt.
    """

    def __init__(self, store: Store, processor: IntervalProcessor, soft_state: SoftState, rng: Rng) -> None:
        self._store = store
        self._processor = processor
        self._soft_state = soft_state
        self._rng = rng
        self.is_behind = True

    def confirm(self, file: RowFile | None) -> None:
        """
        The file of the last bundle has been committed, and nobody else has changed anything.
        """
        self._soft_state._settle_tentative({file.path} if file is not None else set())  # noqa: SLF001
        self.is_behind = False

    def run(
        self, plan: SuperstepPlan, part: IntervalPlan, deliveries: Sequence[Deliveries]
    ) -> tuple[Manifest, pa.Table | None]:
        """
        Process a bundle and write its row updates, still uncommitted; its productions come beside.
        """
        if self.is_behind:
            self._soft_state.synchronise(part.files)
        self.is_behind = True
        bundle = Bundle(
            interval=part.interval,
            fence=part.fence,
            superstep=plan.superstep,
            watermark=part.watermark,
            wall_time=plan.wall_time,
            deliveries=deliveries,
        )
        try:
            result = self._processor.process(bundle)
            file = self._write(plan, part, result.updates)
            self._soft_state.adopt(file)
        except BaseException:
            self._soft_state.reset()
            raise
        productions = flatten_productions(result.updates) if result.productions else None
        stripped = replace(result, updates=None)
        return Manifest(interval=part.interval, fence=part.fence, file=file, result=stripped), productions

    def _write(self, plan: SuperstepPlan, part: IntervalPlan, updates: pa.Table | None) -> RowFile | None:
        if updates is None:
            return None
        return write_row_file(
            self._store.objects,
            part.interval,
            updates,
            superstep=plan.superstep,
            fence=part.fence,
            token=self._rng.token(),
        )


def _merged(outside: Iterable[OutsideRows]) -> list[OutsideRows]:
    """
    One entry a stream for rows that are Python objects; tables stay as they are, for their columns may differ.
    """
    rows_of: dict[str, list[Mapping[str, Any]]] = {}
    merged: list[OutsideRows] = []
    for each in outside:
        if isinstance(each.rows, pa.Table):
            merged.append(each)
            # Order of arrival counts: rows that come after a table must not join those before it.
            rows_of.pop(each.stream, None)
        elif each.stream in rows_of:
            rows_of[each.stream].extend(each.rows)
        else:
            rows_of[each.stream] = list(each.rows)
            merged.append(OutsideRows(stream=each.stream, rows=rows_of[each.stream]))
    return merged


def _read_for_consumers(topology: Topology, outside: OutsideRows) -> dict[str, Injected]:
    injector = topology.injectors[outside.stream]
    return {
        consumer.computation.name: read_injected(injector, consumer.subscription.key, outside.rows)
        for consumer in topology.consumers_of(outside.stream)
    }


def _split(outside: OutsideRows, computation: str, injected: Injected) -> tuple[Deliveries, list[DeadLetter]]:
    values = row_values(outside.rows)
    deliveries = Deliveries(
        stream=outside.stream, keys=injected.keys, at=injected.at, values=values, ids=injected.ids
    )
    if not injected.errors:
        return deliveries, []
    keys = injected.keys
    letters = [
        DeadLetter(
            computation=computation,
            stream=outside.stream,
            key=keys[row].as_py(),
            value=describe_value(values.value(row)),
            at=None if row in injected.untimed else int(injected.at[row]),
            error=error,
        )
        for row, error in injected.errors.items()
    ]
    chosen = np.setdiff1d(np.arange(len(keys)), np.fromiter(injected.errors, np.int64), assume_unique=True)
    return take(deliveries, chosen), letters


def _observation(outside: OutsideRows, readings: Sequence[Injected], *, is_bounded: bool) -> InputObservation:
    readable = readings[0].at if readings else np.empty(0, np.int64)
    if readings and readings[0].errors:
        readable = np.delete(readable, list(readings[0].errors))
    newest = None if is_bounded or not len(readable) else EventTimeMicros(int(readable.max()))
    return InputObservation(stream=outside.stream, records=len(readable), newest_at=newest)


def _letters(computation: str, extracted: Extracted) -> tuple[DeadLetter, ...]:
    return keyless_letters(computation, extracted) if extracted.errors else ()
