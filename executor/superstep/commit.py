"""The commit request of a superstep: the files of every touched interval, positions and counts.

The report of a superstep: its counts, its times, and the pipeline's progress after it.

Running totals of a pipeline, kept with its positions so that restarts do not reset them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, TypeAlias

from millpond.executor.inputs.positions import counts_by_computation
from millpond.executor.interval.bundle import DeadLetter
from millpond.executor.interval.row_update import Manifest
from millpond.executor.ownership.ownership import OwnedInterval
from millpond.executor.pipeline.nodes import DEAD_LETTERS, is_addressed
from millpond.executor.superstep.plan import InputPosition, SuperstepPlan
from millpond.executor.time.observations import InputObservation
from millpond.executor.watermark.pipeline_watermarks import PipelineWatermarks
from millpond.statestore.app_ids import AppId
from millpond.statestore.log.action import JsonValue
from millpond.statestore.log.rules import CommitRequest, IntervalWrite
from millpond.statestore.rows.files import RowFile
from millpond.statestore.system import collector_paused
from millpond.statestore.types import TIME_MIN_US, EventTimeMicros, Superstep, TableVersion, WallTimeMicros


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Counts over the pipeline's whole life, including restarts.

    Attributes:
        injected: readable records from outside, each counted once.
        records: records processed, summed over all computations.
        late: records that were behind the watermark of their computation.
        dropped: records that were left out because they were late: user code did not get them because of
            ``on_late``, or all of their windows had expired.
        duplicates: outside records discarded because their id had been consumed.
        timers: timers fired.
        dead_letters: records and timers that could not be processed.
        productions: records produced.
        by_computation: ``late``, ``dropped``, ``dead_letters`` and the counters of user code, by
            computation; zeros are left out. With ``time_sorted`` also ``waited``, the records that began to
            wait in their rows until the watermark passes them, and ``resumed``, those that were processed
            since: the difference is waiting now. And ``retried``, the dead letters that were given once more.
    """

    injected: int = 0
    records: int = 0
    late: int = 0
    dropped: int = 0
    duplicates: int = 0
    timers: int = 0
    dead_letters: int = 0
    productions: int = 0
    by_computation: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

    def items(self) -> Iterator[tuple[str, int]]:
        """Name and value of each counter of the pipeline as a whole."""
        return ((name, getattr(self, name)) for name in _NAMES)

    def positions(self, pipeline: str) -> dict[str, int]:
        """The totals as the store keeps them, by application id."""
        kept = {AppId.TOTAL.of(pipeline, name): value for name, value in self.items()}
        for computation, counts in self.by_computation.items():
            for name, value in counts.items():
                kept[AppId.COUNT.of(pipeline, computation, name)] = value
        return kept

    @classmethod
    def restored(cls, positions: Mapping[str, int], pipeline: str) -> Totals:
        """The totals that `positions` described."""
        whole = {name: positions.get(AppId.TOTAL.of(pipeline, name), 0) for name in _NAMES}
        return cls(**whole, by_computation=counts_by_computation(positions, pipeline))

    def plus(self, other: Totals) -> Totals:
        """The sums, field by field."""
        return self._with(other, 1)

    def minus(self, other: Totals) -> Totals:
        """The differences, field by field."""
        return self._with(other, -1)

    def _with(self, other: Totals, sign: int) -> Totals:
        whole = {name: value + sign * getattr(other, name) for name, value in self.items()}
        parts = {name: Counter(counts) for name, counts in self.by_computation.items()}
        for computation, counts in other.by_computation.items():
            part = parts.setdefault(computation, Counter())
            for name, value in counts.items():
                part[name] += sign * value
        return Totals(**whole, by_computation=_without_zeros(parts))


_NAMES: Final = (
    "injected",
    "records",
    "late",
    "dropped",
    "duplicates",
    "timers",
    "dead_letters",
    "productions",
)

_Counts: TypeAlias = Mapping[str, Mapping[str, int]]


def _without_zeros(parts: _Counts) -> dict[str, dict[str, int]]:
    kept = {
        computation: {name: value for name, value in counts.items() if value}
        for computation, counts in parts.items()
    }
    return {computation: counts for computation, counts in kept.items() if counts}


def count(
    manifests: Sequence[Manifest], letters: Sequence[DeadLetter], inputs: Sequence[InputObservation]
) -> Totals:
    """The counts that one superstep adds to the totals."""
    by_computation: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for manifest in manifests:
        of_bundle = manifest.result.statistics
        counts = by_computation[manifest.interval.computation]
        # Not `Counter.update`, which takes several times as long for so few.
        counts["late"] += of_bundle.late
        counts["dropped"] += of_bundle.dropped
        counts["waited"] += of_bundle.waited
        counts["resumed"] += of_bundle.resumed
        counts["retried"] += of_bundle.retried
        for name, value in of_bundle.counters.items():
            counts[name] += value
    for letter in letters:
        by_computation[letter.computation]["dead_letters"] += 1
    statistics = [manifest.result.statistics for manifest in manifests]
    return Totals(
        injected=sum(seen.records for seen in inputs),
        records=sum(s.records for s in statistics),
        late=sum(s.late for s in statistics),
        dropped=sum(counts["dropped"] for counts in by_computation.values()),
        duplicates=sum(s.duplicates for s in statistics),
        timers=sum(s.timers for s in statistics),
        dead_letters=len(letters),
        # A production that is kept under an address was delivered, and counted, as a weak one.
        productions=sum(s.weak for s in statistics)
        + sum(p.count for m in manifests for p in m.result.productions if not is_addressed(p.stream)),
        by_computation=_without_zeros(by_computation),
    )


@collector_paused()
def superstep_request(
    plan: SuperstepPlan,
    touched: Iterable[tuple[OwnedInterval, RowFile | None]],
    watermarks: PipelineWatermarks,
    *,
    pipeline: str,
    counts: Totals,
    totals: Totals,
    position: InputPosition | None,
    stored: Mapping[str, int],
    loads: Mapping[str, JsonValue] | None = None,
) -> CommitRequest:
    """The commit that makes a superstep durable.

    Args:
        plan: the superstep.
        touched: the intervals, each with the file that it has written, if any.
        watermarks: the pipeline's watermarks, journaled with the commit.
        pipeline: the pipeline's name.
        counts: the superstep's own counts.
        totals: the totals, including the superstep's counts.
        position: how far the outside input has been consumed.
        stored: the positions in the table; unchanged ones are not written again.
        loads: the load of intervals, where it is told with this commit.
    """
    wanted: dict[str, int] = {AppId.SUPERSTEP.of(pipeline): plan.superstep}
    offsets: dict[str, str] = {}
    metadata: dict[str, JsonValue] = {
        "pipeline": pipeline,
        "counts": dict(counts.items()),
        "conditions": plan.conditions.to_json(),
    }
    if position is not None and position.backfill is not None:
        wanted[AppId.BACKFILL.of(pipeline, position.backfill, position.stream)] = position.batch
        metadata["backfill"] = position.backfill
    elif position is not None:
        source = AppId.INPUT.of(pipeline, position.stream, position.source)
        wanted[source] = position.batch
        if position.offsets is not None:
            offsets[source] = position.offsets
        if position.rows is not None:
            wanted[AppId.INPUT_ROWS.of(pipeline, position.stream)] = position.rows
        metadata |= {"input": position.stream, "batch": position.batch}
    if plan.taken:
        metadata["taken"] = [[stream, count] for stream, count in plan.taken]
        for stream, taken in plan.taken:
            injected = AppId.INJECTED.of(pipeline, stream)
            wanted[injected] = wanted.get(injected, stored.get(injected, 0)) + taken
    if loads:
        metadata["loads"] = dict(loads)
    wanted |= watermarks.positions() | totals.positions(pipeline)
    return CommitRequest(
        kind="superstep",
        writes=tuple(_write_of(owned, file, watermarks) for owned, file in touched),
        positions={
            app_id: version
            for app_id, version in wanted.items()
            if stored.get(app_id) != version and version != TIME_MIN_US
        },
        metadata=metadata,
        source_offsets=offsets,
    )


def _write_of(owned: OwnedInterval, file: RowFile | None, watermarks: PipelineWatermarks) -> IntervalWrite:
    name = owned.interval.computation
    return IntervalWrite(
        interval=owned.interval,
        fence=owned.next_fence,
        added=() if file is None else (file,),
        watermark=None if name == DEAD_LETTERS else watermarks.input_watermark(name),
    )


_SECONDS_MIN: Final = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class SuperstepReport:
    """The figures of a superstep.

    Attributes:
        superstep: its number.
        version: the table version that it committed.
        records: records processed, summed over all computations.
        records_per_second: ``records`` over the superstep's duration.
        late: records that were behind the watermark of their computation.
        dropped: records that were left out because they were late.
        duplicates: outside records discarded because their id had been consumed.
        dead_letters: records and timers that could not be processed.
        timers: timers fired.
        productions: records produced.
        watermark_us: the pipeline's low watermark after the commit.
        lag_ms: wall time less the watermark.
        commit_ms: how long the commit took.
        duration_ms: how long the superstep took, including the commit.
        pending: productions that wait for the next superstep.
        slots: tasks that ran on Spark, of those that had work.
        slots_at_home: how many of them ran in the process that has their soft state, or ran for the first time.
        read_bytes: how much they read of row files.
    """

    superstep: Superstep
    version: TableVersion
    records: int
    records_per_second: float
    late: int
    dropped: int
    duplicates: int
    dead_letters: int
    timers: int
    productions: int
    watermark_us: EventTimeMicros
    lag_ms: float
    commit_ms: float
    duration_ms: float
    pending: int
    slots: int = 0
    slots_at_home: int = 0
    read_bytes: int = 0

    def after(self, earlier: SuperstepReport | None) -> SuperstepReport:
        """Both supersteps as one: counts and durations are added, positions are those of this, the later one."""
        if earlier is None:
            return self
        records = earlier.records + self.records
        duration_ms = earlier.duration_ms + self.duration_ms
        return replace(
            self,
            records=records,
            records_per_second=records / max(duration_ms / 1_000, _SECONDS_MIN),
            late=earlier.late + self.late,
            dropped=earlier.dropped + self.dropped,
            duplicates=earlier.duplicates + self.duplicates,
            dead_letters=earlier.dead_letters + self.dead_letters,
            timers=earlier.timers + self.timers,
            productions=earlier.productions + self.productions,
            commit_ms=earlier.commit_ms + self.commit_ms,
            duration_ms=duration_ms,
            slots=earlier.slots + self.slots,
            slots_at_home=earlier.slots_at_home + self.slots_at_home,
            read_bytes=earlier.read_bytes + self.read_bytes,
        )


def report_of(
    plan: SuperstepPlan,
    version: TableVersion,
    counts: Totals,
    *,
    now_us: WallTimeMicros,
    elapsed_us: int,
    watermark: EventTimeMicros,
    commit_ms: float,
    pending: int,
) -> SuperstepReport:
    """The report of a superstep that has just been committed."""
    return SuperstepReport(
        superstep=plan.superstep,
        version=version,
        records=counts.records,
        records_per_second=counts.records / max(elapsed_us / 1_000_000, _SECONDS_MIN),
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
        pending=pending,
    )
