"""One superstep: a batch of records becomes durable effects in exactly one fenced commit.

Both runners run `Superstep.run`; only their `Engine` differs, which reads the batch and runs the intervals. The
order of the steps is the engine's guarantee: a crash between any two of them loses no record and repeats no effect
(MillWheel §5.1, §6.1).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter
from typing import ClassVar, Generic, TypeVar

import pyarrow as pa

from millpond.executor.interval.bundle import DeadLetter
from millpond.executor.interval.row_update import Manifest
from millpond.executor.ownership.ownership import OwnedInterval
from millpond.executor.pipeline.nodes import ComputationNode
from millpond.executor.superstep.coordinator import Coordinator
from millpond.executor.superstep.dead_letters import WrittenLetters
from millpond.executor.superstep.plan import InputPosition, SuperstepPlan
from millpond.executor.superstep.report import SECONDS_MIN, SuperstepReport, Totals, count
from millpond.executor.time.observations import InputObservation
from millpond.statestore.app_ids import AppId
from millpond.statestore.failpoint import reach
from millpond.statestore.log.action import JsonValue
from millpond.statestore.log.rules import CommitRequest, IntervalWrite
from millpond.statestore.rows.files import RowFile
from millpond.statestore.system import collector_paused
from millpond.statestore.types import TIME_MIN_US, EventTimeMicros


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The input of one superstep; each runner adds the rows in its own form.

    Attributes:
        position: how far the superstep consumes an outside input.
        after: by injected stream, a time that no record of a later superstep is before; ``None``: foresee it.
        backfilled: the only computation that gets the rows, as a part of its backfill.
    """

    position: InputPosition | None = None
    after: Mapping[str, EventTimeMicros] | None = None
    backfilled: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """An extracted batch, as far as planning needs it; each runner adds the columns in its own form.

    Attributes:
        after: by injected stream, its watermark once the superstep is committed, if it is known.
        stamps: by injected stream, the arrival of records, where it has a part in their event times.
        taken: order of arrival: streams, each with its number of consecutive records.
    """

    streams: Collection[str] = ()
    after: Mapping[str, EventTimeMicros] = field(default_factory=dict)
    stamps: Mapping[str, EventTimeMicros] = field(default_factory=dict)
    taken: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """The reports of a superstep's intervals; each runner adds its soft state for the next superstep.

    Attributes:
        manifests: one per interval that ran; other intervals are left untouched.
        observations: counts and times of the outside inputs, which advance their watermarks.
        letters: records that never reached an interval, such as records without a key.
        rows: number of rows of a bounded input that count towards its watermark.
        offsets: what is recorded about these rows.
    """

    manifests: Sequence[Manifest] = ()
    observations: Sequence[InputObservation] = ()
    letters: Sequence[DeadLetter] = ()
    rows: int | None = None
    offsets: str | None = None


_Batch = TypeVar("_Batch", bound=Batch)
_Inputs = TypeVar("_Inputs", bound=Inputs)
_Results = TypeVar("_Results", bound=Results)


class Engine(ABC, Generic[_Batch, _Inputs, _Results]):
    """The part of a superstep in which the runners differ.

    Attributes:
        in_process: user code runs in this process, which follows the log itself.
    """

    in_process: ClassVar[bool]

    @abstractmethod
    def extract(self, batch: _Batch) -> _Inputs:
        """Read key, time and id of the rows, or prepare the tasks that do."""

    @abstractmethod
    def sample_keys(self, inputs: _Inputs, node: ComputationNode) -> pa.Array:
        """Return keys of a computation that has no intervals yet, repeated as often as they occur."""

    @abstractmethod
    def run_intervals(self, plan: SuperstepPlan, inputs: _Inputs) -> _Results:
        """Run user code for every interval of the plan, and write the row files, which stay uncommitted."""

    @abstractmethod
    def confirm(self, results: _Results, report: SuperstepReport) -> SuperstepReport:
        """Keep the soft state of a committed superstep; return the report with the runner's own figures."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared(Generic[_Results]):
    """A superstep whose intervals have run and which is not committed."""

    plan: SuperstepPlan
    results: _Results
    position: InputPosition | None = None
    promised: Mapping[str, EventTimeMicros] = field(default_factory=dict)


class Superstep(Generic[_Batch, _Inputs, _Results]):
    """Runs the supersteps of one pipeline, one after another; used by one thread at a time."""

    def __init__(self, coordinator: Coordinator, engine: Engine[_Batch, _Inputs, _Results]) -> None:
        self._coordinator = coordinator
        self._engine = engine

    def run(self, batch: _Batch) -> SuperstepReport:
        """Run one superstep: extract, plan, run the intervals; then commit, apply and deliver."""
        if not self._engine.in_process:
            # Spark repeats its tasks itself.
            return self.commit(self.prepare(batch))
        # Nothing counts before the commit, so prepare the superstep again while a service is away.
        return self.commit(self._coordinator.ownership.patience.run(partial(self.prepare, batch)))

    def prepare(self, batch: _Batch) -> Prepared[_Results]:
        coordinator, engine = self._coordinator, self._engine

        # Extract first, because rows that do not fit their stream are refused before anything else is spent on them.
        inputs = engine.extract(batch)

        # The first keys of a computation are the only sample by which its keys can be divided, and only intervals
        # whose leases are held can be planned.
        for node in coordinator.computations_without_intervals(inputs.streams, batch.backfilled):
            coordinator.create_intervals(node.name, engine.sample_keys(inputs, node))

        # Plan: the plan fixes time, watermarks and fences, so that every interval meets the same conditions, and so
        # that a replay can meet them again.
        plan = coordinator.begin(
            inputs.streams,
            backfilled=batch.backfilled,
            with_files=not engine.in_process,
            after=inputs.after,
        )
        if inputs.taken:
            plan = replace(plan, taken=inputs.taken)
        if inputs.stamps:
            plan = replace(plan, conditions=replace(plan.conditions, stamps=inputs.stamps))

        # Run the intervals: user code runs, and row files are written under names that nothing refers to yet.
        # A crash from here to the commit leaves orphans, which gc deletes, and no effect.
        results = engine.run_intervals(plan, inputs)

        position = batch.position
        if position is not None and results.rows is not None:
            position = replace(position, rows=results.rows, offsets=results.offsets or position.offsets)
        coordinator.suspects.check(results.observations)
        return Prepared(plan=plan, results=results, position=position, promised=batch.after or {})

    def commit(self, prepared: Prepared[_Results]) -> SuperstepReport:
        """Make a prepared superstep durable; then let it take effect."""
        coordinator, plan, results = self._coordinator, prepared.plan, prepared.results

        # A flood of dead letters ends the run before the commit, so that a mended program gets the same records.
        letters = coordinator.letters.judge(results.manifests, results.letters)
        # The commit journals the watermarks, so observe the inputs first: a restart must not see an earlier time
        # than this run. What was observed takes effect after the commit, because a commit that fails moves no time.
        for stream, at in prepared.promised.items():
            coordinator.watermarks.promise(stream, at)
        coordinator.watermarks.observe(results.observations)

        manifests = sorted(results.manifests, key=attrgetter("interval"))
        ownership = coordinator.ownership
        if letters.new or letters.settled:
            fence = ownership.control.next_fence
            written = ownership.patience.run(
                lambda: coordinator.letters.write(letters, plan, fence, coordinator.names.token())
            )
        else:
            # Draw a name all the same: saved seeds of the simulation reach their faults by the number of draws.
            coordinator.names.token()
            written = WrittenLetters()
        counts = count(manifests, letters.new, results.observations)
        totals = coordinator.totals.plus(counts)
        # The control interval is part of every commit, because its fence proves ownership of the pipeline.
        touched = [
            (ownership.control, written.file, None),
            *(
                (ownership.owned[one.interval], one.file, one.result.pending.to_text())
                for one in manifests
                if one.file is not None
            ),
        ]
        request = _request(coordinator, plan, prepared.position, touched, counts, totals)

        # The sinks must have superstep n before n + 1 is durable: after a crash only the productions of the last
        # superstep can be read again.
        has_sinks = bool(coordinator.topology.sinks)
        if has_sinks:
            coordinator.sinks.wait()
            request = _with_sinks(request, coordinator, plan, manifests, written)
        reach("superstep.before_commit")

        # Commit: rows, record ids, timers, productions, positions and watermarks in one table version, under the
        # fence of every interval that it touches. A process that lost an interval is refused here.
        committing_us = coordinator.clock.monotonic_us()
        committed = ownership.commit(request)
        reach("superstep.committed")
        commit_ms = (coordinator.clock.monotonic_us() - committing_us) / 1_000
        now_us = coordinator.clock.now_us()

        # Apply: only now do timers, holds, watermarks and pending productions change, because only now are they
        # durable. Senders are acknowledged after this method returns.
        if coordinator.balancer.is_on:
            coordinator.balancer.record(manifests)
        coordinator.letters.committed(letters)
        coordinator.late.observe(counts, now_us)
        coordinator.suspects.observe(results.observations, now_us)
        coordinator.apply(plan.superstep, totals, manifests, written)
        reach("superstep.applied")

        # Deliver: the sinks get the productions of this superstep while the next one runs.
        if has_sinks:
            coordinator.sinks.deliver(plan.superstep, coordinator.pending.for_sinks)
        elapsed_us = coordinator.clock.monotonic_us() - plan.started_us
        watermark = coordinator.watermarks.low_watermark()
        report = SuperstepReport(
            superstep=plan.superstep,
            version=committed.version,
            records=counts.records,
            records_per_second=counts.records / max(elapsed_us / 1_000_000, SECONDS_MIN),
            late=counts.late,
            dropped=counts.dropped,
            duplicates=counts.duplicates,
            dead_letters=counts.dead_letters,
            timers=counts.timers,
            productions=counts.productions,
            watermark_us=watermark,
            lag_ms=(now_us - watermark) / 1_000,
            commit_ms=commit_ms,
            duration_ms=elapsed_us / 1_000,
            pending=coordinator.pending.count,
        )
        return self._engine.confirm(results, report)


def _with_sinks(
    request: CommitRequest,
    coordinator: Coordinator,
    plan: SuperstepPlan,
    manifests: Sequence[Manifest],
    written: WrittenLetters,
) -> CommitRequest:
    produced = {summary.stream for one in manifests for summary in one.result.productions}
    produced |= {summary.stream for summary in written.productions}
    # In the commit itself: after any crash the store and its sinks agree on what the sinks must have.
    records = coordinator.sinks.records(plan.superstep, coordinator.committer.snapshot.txns, produced)
    return replace(request, positions={**request.positions, **records}) if records else request


@collector_paused()
def _request(
    coordinator: Coordinator,
    plan: SuperstepPlan,
    position: InputPosition | None,
    files: Iterable[tuple[OwnedInterval, RowFile | None, str | None]],
    counts: Totals,
    totals: Totals,
) -> CommitRequest:
    """Return the commit that makes a superstep durable; ``totals`` include ``counts``."""
    pipeline, watermarks = coordinator.topology.name, coordinator.watermarks
    stored = coordinator.committer.snapshot.txns
    wanted: dict[str, int] = {AppId.SUPERSTEP.of(pipeline): plan.superstep}
    offsets: dict[str, str] = {}
    metadata: dict[str, JsonValue] = {
        "pipeline": pipeline,
        "counts": dict(counts.items()),
        "conditions": plan.conditions.to_json(),
    }
    # The position of the input travels with its effects, so that a restart neither skips nor repeats a batch.
    if position is not None:
        backfill, stream = position.backfill, position.stream
        source = (
            AppId.INPUT.of(pipeline, stream, position.source)
            if backfill is None
            else AppId.BACKFILL.of(pipeline, backfill, stream)
        )
        wanted[source] = position.batch
        if position.offsets is not None:
            offsets[source] = position.offsets
        if position.rows is not None:
            wanted[AppId.INPUT_ROWS.of(pipeline, stream)] = position.rows
        metadata |= {"input": stream, "batch": position.batch} if backfill is None else {"backfill": backfill}
    if plan.taken:
        metadata["taken"] = [[stream, count] for stream, count in plan.taken]
        for stream, taken in plan.taken:
            injected = AppId.INJECTED.of(pipeline, stream)
            wanted[injected] = wanted.get(injected, stored.get(injected, 0)) + taken
    if coordinator.balancer.is_on and (loads := coordinator.balancer.report()):
        # Published now and then for readers of the log.
        metadata["loads"] = dict(loads)
    wanted |= watermarks.positions() | totals.positions(pipeline)
    inputs = watermarks.input_watermarks()
    return CommitRequest(
        kind="superstep",
        writes=tuple(
            [
                IntervalWrite(
                    interval=owned.interval,
                    fence=owned.next_fence,
                    added=() if file is None else (file,),
                    # The control interval belongs to no computation.
                    watermark=inputs.get(owned.interval.computation),
                    pending=pending,
                )
                for owned, file, pending in files
            ]
        ),
        # Only changes are written: most of a pipeline's positions are the same from commit to commit.
        positions={
            app_id: version
            for app_id, version in wanted.items()
            if stored.get(app_id) != version and version != TIME_MIN_US
        },
        metadata=metadata,
        source_offsets=offsets,
    )
