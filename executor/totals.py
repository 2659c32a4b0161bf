"""
Running totals of a pipeline, kept with its positions so that restarts do not reset them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from millpond.executor.bundle import DeadLetter, InputObservation, Manifest
from millpond.executor.weak import is_addressed

__all__ = ["Totals", "count"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """
    Counts over the pipeline's whole life, restarts included.

    Attributes:
        injected: readable records that came from outside, each counted once.
        records: records processed, summed over all computations.
        late: records that were behind the watermark of their computation.
        dropped: those of them that user code was not given, because ``on_late`` says so.
        duplicates: outside records discarded because their id had been consumed.
        timers: timers fired.
        dead_letters: records and timers that could not be processed.
        productions: records produced.
    """

    injected: int = 0
    records: int = 0
    late: int = 0
    dropped: int = 0
    duplicates: int = 0
    timers: int = 0
    dead_letters: int = 0
    productions: int = 0

    def items(self) -> Iterator[tuple[str, int]]:
        """
        Name and value of each counter.
        """
        return ((name, getattr(self, name)) for name in self.__slots__)

    def plus(self, other: Totals) -> Totals:
        """
        The sums, field by field.
        """
        return Totals(**{name: getattr(self, name) + getattr(other, name) for name in self.__slots__})

    def minus(self, other: Totals) -> Totals:
        """
        The differences, field by field.
        """
        return Totals(**{name: getattr(self, name) - getattr(other, name) for name in self.__slots__})


def count(
    manifests: Sequence[Manifest], letters: Sequence[DeadLetter], inputs: Sequence[InputObservation]
) -> Totals:
    """
    What one superstep adds to the totals.
    """
    statistics = [manifest.result.statistics for manifest in manifests]
    return Totals(
        injected=sum(seen.records for seen in inputs),
        records=sum(s.records for s in statistics),
        late=sum(s.late for s in statistics),
        dropped=sum(s.dropped for s in statistics),
        duplicates=sum(s.duplicates for s in statistics),
        timers=sum(s.timers for s in statistics),
        dead_letters=len(letters),
        # What is kept under an address was delivered, and counted, as a weak production.
        productions=sum(s.weak for s in statistics)
        + sum(p.count for m in manifests for p in m.result.productions if not is_addressed(p.stream)),
    )
