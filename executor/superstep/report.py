"""The counts of a superstep, and its report."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import add, attrgetter, sub
from typing import Any, Final

from millpond.executor.inputs.positions import counts_by_computation
from millpond.executor.interval.bundle import DeadLetter
from millpond.executor.interval.row_update import Manifest
from millpond.executor.pipeline.nodes import is_addressed
from millpond.executor.time.observations import InputObservation
from millpond.statestore.app_ids import AppId
from millpond.statestore.types import EventTimeMicros, Superstep, TableVersion

_COUNTERS: Final = (
    "injected",
    "records",
    "late",
    "dropped",
    "duplicates",
    "timers",
    "dead_letters",
    "productions",
)
_values: Final = attrgetter(*_COUNTERS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Counts over the pipeline's whole life, including restarts.

    Attributes:
        injected: readable records from outside, each counted once.
        records: records processed, summed over all computations.
        late: records behind the watermark of their computation.
        dropped: late records that were left out: ``on_late`` kept them from user code, or all of their windows had
            expired.
        duplicates: outside records discarded because their id had been consumed.
        timers: timers fired.
        dead_letters: records and timers that could not be processed.
        productions: records produced.
        by_computation: ``late``, ``dropped``, ``dead_letters`` and the counters of user code, by present
            computation; zeros are left out. With ``time_sorted`` also ``waited``, the records that began to
            wait in their rows until the watermark passes them, and ``resumed``, the records that were processed
            since: the difference is waiting now. And ``retried``, the dead letters that were retried.
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

    @property
    def retried(self) -> int:
        """The dead letters that were retried, of all computations."""
        return sum(counts.get("retried", 0) for counts in self.by_computation.values())

    def items(self) -> Iterator[tuple[str, int]]:
        """Return name and value of each counter of the pipeline as a whole."""
        return zip(_COUNTERS, _values(self), strict=True)

    def positions(self, pipeline: str) -> dict[str, int]:
        """Return the totals as the store keeps them, by application id."""
        kept = {AppId.TOTAL.of(pipeline, name): value for name, value in self.items()}
        for computation, counts in self.by_computation.items():
            for name, value in counts.items():
                kept[AppId.COUNT.of(pipeline, computation, name)] = value
        return kept

    @classmethod
    def restored(cls, positions: Mapping[str, int], pipeline: str, computations: Container[str]) -> Totals:
        whole = {name: positions.get(AppId.TOTAL.of(pipeline, name), 0) for name in _COUNTERS}
        # The counts of a computation that was renamed stay under its former name, too.
        by_computation = {
            name: counts
            for name, counts in counts_by_computation(positions, pipeline).items()
            if name in computations
        }
        return cls(**whole, by_computation=by_computation)

    def plus(self, other: Totals) -> Totals:
        """Return the sums, field by field."""
        return self._with(other, add)

    def minus(self, other: Totals) -> Totals:
        """Return the differences, field by field."""
        return self._with(other, sub)

    def _with(self, other: Totals, operation: Callable[[Any, Any], int]) -> Totals:
        whole = dict(zip(_COUNTERS, map(operation, _values(self), _values(other)), strict=True))
        parts = {name: dict(counts) for name, counts in self.by_computation.items()}
        for computation, counts in other.by_computation.items():
            part = parts.setdefault(computation, {})
            for name, value in counts.items():
                part[name] = operation(part.get(name, 0), value)
        return Totals(**whole, by_computation=_without_zeros(parts))


def _without_zeros(parts: Mapping[str, Mapping[str, int]]) -> dict[str, dict[str, int]]:
    kept: dict[str, dict[str, int]] = {}
    for computation, counts in parts.items():
        if any(counts.values()):
            kept[computation] = {name: value for name, value in counts.items() if value}
    return kept


def count(
    manifests: Sequence[Manifest], letters: Sequence[DeadLetter], inputs: Sequence[InputObservation]
) -> Totals:
    by_computation: defaultdict[str, Counter[str]] = defaultdict(Counter)
    records = duplicates = timers = late = productions = 0
    for manifest in manifests:
        of_bundle = manifest.result.statistics
        records += of_bundle.records
        duplicates += of_bundle.duplicates
        timers += of_bundle.timers
        late += of_bundle.late
        productions += of_bundle.weak
        for summary in manifest.result.productions:
            # A production that is kept under an address was delivered, and counted, as a weak one.
            if not (of_bundle.weak and is_addressed(summary.stream)):
                productions += summary.count
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
    dropped = 0
    for counts in by_computation.values():
        dropped += counts.get("dropped", 0)
    injected = 0
    for seen in inputs:
        injected += seen.records
    return Totals(
        injected=injected,
        records=records,
        late=late,
        dropped=dropped,
        duplicates=duplicates,
        timers=timers,
        dead_letters=len(letters),
        productions=productions,
        by_computation=_without_zeros(by_computation),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """The state of a pipeline after a superstep; a value that any thread may read.

    Attributes:
        watermarks: input low watermark by computation.
        low_watermark: the lowest output watermark; everything before it is done.
        ended: injected streams whose input has ended for good.
        times_in_1970: by injected stream, the records of this run with times in that year.
    """

    superstep: Superstep
    totals: Totals
    watermarks: Mapping[str, EventTimeMicros]
    low_watermark: EventTimeMicros
    ended: frozenset[str] = frozenset()
    times_in_1970: Mapping[str, int] = field(default_factory=dict)


SECONDS_MIN: Final = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class SuperstepReport:
    """The figures of a superstep.

    Attributes:
        superstep: its number.
        version: table version that it committed.
        records: records processed, summed over all computations.
        records_per_second: ``records`` over the superstep's duration.
        late: records behind the watermark of their computation.
        dropped: late records that were left out.
        duplicates: outside records discarded because their id had been consumed.
        dead_letters: records and timers that could not be processed.
        timers: timers fired.
        productions: records produced.
        watermark_us: the pipeline's low watermark after the commit.
        lag_ms: wall time less the watermark.
        commit_ms: duration of the commit.
        duration_ms: duration of the superstep, including the commit.
        pending: productions that wait for the next superstep.
        slots: Spark tasks that had work and ran.
        slots_at_home: tasks that ran in the process that has their soft state, or ran for the first time.
        read_bytes: bytes of row files that the tasks read.
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
        """Return both supersteps as one: the sums of counts and durations, with the positions of this later superstep."""
        if earlier is None:
            return self
        sums = dict(zip(_SUMMED, map(add, _summed(earlier), _summed(self)), strict=True))
        per_second = sums["records"] / max(sums["duration_ms"] / 1_000, SECONDS_MIN)
        return replace(self, records_per_second=per_second, **sums)


_SUMMED: Final = (*_COUNTERS[1:], "commit_ms", "duration_ms", "slots", "slots_at_home", "read_bytes")
_summed: Final = attrgetter(*_SUMMED)
