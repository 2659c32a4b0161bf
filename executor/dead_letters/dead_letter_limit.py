"""The limit of dead letters: one bad record is the record's fault, a flood of them is the program's.

A run that turns most of its input into dead letters has not succeeded. It stops before the commit, so the
records stay unconsumed and the fixed program gets them again.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from millpond.executor.bundle.bundle import DeadLetter
from millpond.executor.bundle.result import Manifest
from millpond.executor.computation.utf8 import printable
from millpond.statestore.errors import InvalidError

_ALL_MIN: Final = 2
"""A superstep whose only record fails does not stop the run: on a quiet stream each record is alone."""

_LOG: Final = logging.getLogger("millpond")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetterLimit:
    """How many of a computation's records and timers may become dead letters before the run stops.

    The run stops before it commits the superstep in which

    - all of two or more records of a computation fail, or
    - more than ``share`` of them fail, counted over supersteps until there are ``records_min``.

    Letters that are retried, and fail again, do not count.

    Attributes:
        share: the share that may fail, from 0 to 1.
        records_min: the least number of records by which the share is judged.

    Raises:
        InvalidError: ``share`` is not a share, or ``records_min`` is less than 1.

    Example:
        ``LocalRunner("pond", dead_letter_limit=DeadLetterLimit(share=0.01, records_min=1_000))``
    """

    share: float = 0.2
    records_min: int = 100

    def __post_init__(self) -> None:
        """Refuse values out of range."""
        if isinstance(self.share, bool) or not 0 <= self.share <= 1:
            raise InvalidError("the share of a dead letter limit is from 0 to 1", share=self.share)
        if self.records_min < 1:
            raise InvalidError("records_min is at least 1", records_min=self.records_min)


@dataclass(slots=True)
class _Tally:
    """What a computation has handled, and how much of it failed."""

    records: int = 0
    letters: int = 0
    first: DeadLetter | None = None

    def plus(self, other: _Tally) -> _Tally:
        return _Tally(self.records + other.records, self.letters + other.letters, self.first or other.first)


Tallies: TypeAlias = Mapping[str, _Tally]
"""What was handled, by computation."""


class DeadLetterMonitor:
    """Watches the dead letters of one run, by computation.

    Args:
        limit: when to stop; ``None`` never does.
    """

    def __init__(self, limit: DeadLetterLimit | None) -> None:
        self._limit = limit
        self._judged: dict[str, _Tally] = {}
        self._warned: set[str] = set()

    def check(self, manifests: Iterable[Manifest], unreadable: Sequence[DeadLetter]) -> Tallies:
        """Judge a superstep before its commit; pass what this returns to `note` after it.

        Args:
            manifests: the intervals that ran.
            unreadable: the letters of records that never reached an interval.

        Raises:
            InvalidError: too much of the superstep became dead letters; includes the first one's error.
        """
        tallies = _tallies(manifests, unreadable)
        if self._limit is None:
            return tallies
        for computation, tally in tallies.items():
            if tally.letters >= _ALL_MIN and tally.letters == tally.records:
                raise _flood(computation, tally, self._limit)
            judged = tally.plus(self._judged.get(computation, _Tally()))
            is_enough = judged.records >= self._limit.records_min
            if is_enough and judged.letters > self._limit.share * judged.records:
                raise _flood(computation, judged, self._limit)
        return tallies

    def note(self, tallies: Tallies) -> None:
        """Remember a committed superstep, and warn of each computation's first dead letter."""
        for computation, tally in tallies.items():
            judged = tally.plus(self._judged.pop(computation, _Tally()))
            if self._limit is not None and judged.records < self._limit.records_min:
                self._judged[computation] = judged
            if tally.first is not None and computation not in self._warned:
                self._warned.add(computation)
                _LOG.warning(
                    "a record became a dead letter computation=`%s` stream=`%s` key=`%s` error=`%s`; "
                    "later ones of this computation are only counted",
                    computation,
                    tally.first.stream,
                    printable(str(tally.first.key)),
                    printable(tally.first.error),
                )


def _tallies(manifests: Iterable[Manifest], unreadable: Sequence[DeadLetter]) -> dict[str, _Tally]:
    tallies: dict[str, _Tally] = {}
    for manifest in manifests:
        ran = manifest.result.statistics
        letters = [letter for letter in manifest.result.dead_letters if not letter.retried]
        tally = tallies.setdefault(manifest.interval.computation, _Tally())
        tally.records += ran.records - ran.dropped + ran.timers - ran.retried
        tally.letters += len(letters)
        tally.first = tally.first or next(iter(letters), None)
    for letter in unreadable:
        tally = tallies.setdefault(letter.computation, _Tally())
        tally.records += 1
        tally.letters += 1
        tally.first = tally.first or letter
    return tallies


def _flood(computation: str, tally: _Tally, limit: DeadLetterLimit) -> InvalidError:
    error = InvalidError(
        "too many records become dead letters, so the run stops before it commits them: "
        "fix the code or the input, or raise dead_letter_limit",
        computation=computation,
        dead_letters=tally.letters,
        records=tally.records,
        share=limit.share,
        stream="" if tally.first is None else tally.first.stream,
        key=None if tally.first is None else printable(str(tally.first.key)),
        error="" if tally.first is None else printable(tally.first.error),
    )
    if tally.first is not None and tally.first.diagnostics:
        error.add_note(printable(tally.first.diagnostics))
    return error
