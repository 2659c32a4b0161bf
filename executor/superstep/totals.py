"""Running totals of a pipeline, kept with its positions so that restarts do not reset them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from millpond.executor.bundle.bundle import DeadLetter
from millpond.executor.bundle.result import Manifest
from millpond.executor.injectors.observation import InputObservation
from millpond.executor.pipeline.positions import counts_by_computation
from millpond.executor.pipeline.weak import is_addressed
from millpond.statestore.app_ids import count_app_id, total_app_id


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
        kept = {total_app_id(pipeline, name): value for name, value in self.items()}
        for computation, counts in self.by_computation.items():
            for name, value in counts.items():
                kept[count_app_id(pipeline, computation, name)] = value
        return kept

    @classmethod
    def restored(cls, positions: Mapping[str, int], pipeline: str) -> Totals:
        """The totals that `positions` described."""
        whole = {name: positions.get(total_app_id(pipeline, name), 0) for name in _NAMES}
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
