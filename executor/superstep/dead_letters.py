"""Dead letters: records and timers that user code could not process, kept as rows.

Each letter is a row of the computation ``dead_letters``, committed with its superstep, so that SQL can list it. It is
also a production to the stream ``dead_letters``, to which computations and sinks can subscribe.

A single bad record is the record's fault, a flood of bad records is the program's: `DeadLetters.judge` stops the run
before the commit, so the records stay unconsumed and the mended program gets them again.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Final

import orjson
import pyarrow as pa

from millpond.executor.computation.values import printable
from millpond.executor.interval.bundle import DeadLetter, ProductionSummary
from millpond.executor.interval.row_update import Manifest
from millpond.executor.pipeline.nodes import DEAD_LETTERS, control_interval
from millpond.executor.pipeline.topology import Topology
from millpond.executor.superstep.letter_retries import LetterRetries
from millpond.executor.superstep.plan import SuperstepPlan
from millpond.executor.time.instants import EPOCH
from millpond.statestore.arguments import check_count, check_number
from millpond.statestore.errors import InvalidError
from millpond.statestore.rows.files import RowFile, write_row_file
from millpond.statestore.rows.row import ROW_SCHEMA, Fence
from millpond.statestore.store import Store
from millpond.statestore.types import EventTimeMicros, Superstep

_RARE: Final = frozenset({"id_base64", "retried"})


def dead_letter_updates(
    pipeline: str,
    letters: Sequence[DeadLetter],
    *,
    superstep: Superstep,
    fence: Fence,
    at: EventTimeMicros,
    produce: bool,
    settled: Collection[str] = (),
) -> pa.Table:
    """Return the row updates of a superstep's dead letters; the key of a letter is ``pipeline/superstep/number``.

    ``at`` is the wall time of the failure, and the event time of a production whose letter has no readable time.
    ``settled`` letters were retried or dropped: their rows are deleted, their productions stay.
    """
    stamps = {"sequencer": fence.sequencer, "commit_number": fence.commit_number, "superstep": superstep}
    rows = [{"key": key, **stamps, "deleted": True} for key in sorted(settled)]
    for number, letter in enumerate(letters):
        key = f"{pipeline}/{superstep:010d}/{number:06d}"
        text = orjson.dumps(_readable(letter, at)).decode()
        letter_at = at if letter.at is None else letter.at
        production = {"stream": DEAD_LETTERS, "key": key, "value": text, "value_bytes": None, "at": letter_at}
        rows.append(
            {
                "key": key,
                **stamps,
                "state": text,
                "productions": [production] if produce else None,
                "deleted": False,
            }
        )
    return pa.Table.from_pylist(rows, schema=ROW_SCHEMA)


def _readable(letter: DeadLetter, failed_at: int) -> dict[str, object]:
    fields: dict[str, object] = {
        # An error may hold lone surrogates, which JSON cannot encode.
        name: printable(value) if isinstance(value, str) else value
        for name, value in asdict(letter).items()
    }
    fields["failed_at"] = _date(failed_at)
    if letter.at is not None:
        fields["at"] = _date(letter.at)
    if letter.value_types:
        fields["value_types"] = dict(letter.value_types)
    else:
        del fields["value_types"]
    return {name: value for name, value in fields.items() if value or name not in _RARE}


def _date(at: int) -> str | int:
    try:
        return (EPOCH + timedelta(microseconds=at)).isoformat()
    except OverflowError:
        # A timer may lie outside the calendar.
        return at


_ALL_MIN: Final = 2
"""A superstep whose only record fails does not stop the run: on a quiet stream each record is alone.

Of a bounded input supersteps are added up, because its silences cut it.
"""

_LOG: Final = logging.getLogger("millpond")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetterLimit:
    """The share of a computation's records and timers that may become dead letters before the run stops.

    The run stops before it commits the superstep in which

    - all of two or more records of a computation fail; of a bounded input, all so far, or
    - more than ``share`` of its records fail, counted over supersteps until there are ``records_min``.

    Retried letters that fail again do not count.

    Attributes:
        share: share that may fail, from 0 to 1.
        records_min: least number of records by which the share is judged.

    Raises:
        InvalidError: ``share`` is not between 0 and 1, or ``records_min`` is less than 1.

    Example:
        ``LocalRunner("pond", dead_letter_limit=DeadLetterLimit(share=0.01, records_min=1_000))``
    """

    share: float = 0.2
    records_min: int = 100

    def __post_init__(self) -> None:
        """Refuse values that are out of range."""
        check_number("the share of a dead letter limit", self.share, least=0, most=1)
        check_count("records_min", self.records_min)


@dataclass(slots=True)
class _Tally:
    """The records and timers that a computation handled, and the letters among them."""

    records: int = 0
    letters: int = 0
    first: DeadLetter | None = None

    def plus(self, other: _Tally) -> _Tally:
        return _Tally(self.records + other.records, self.letters + other.letters, self.first or other.first)


@dataclass(frozen=True, slots=True)
class LettersOfSuperstep:
    """The letters that a superstep writes, the keys of letters that it deletes, and its failures by computation."""

    new: Sequence[DeadLetter]
    settled: frozenset[str]
    tallies: Mapping[str, _Tally]


@dataclass(frozen=True, slots=True)
class WrittenLetters:
    """The file of a superstep's dead letters, and the summary of its productions."""

    file: RowFile | None = None
    productions: tuple[ProductionSummary, ...] = ()


class DeadLetters:
    """The dead letters of one pipeline: judged before the commit, written with it, and retried on request.

    Attributes:
        is_bounded: the input has a known end, and may be cut into supersteps of one record.
    """

    def __init__(
        self, store: Store, topology: Topology, limit: DeadLetterLimit | None, retries: LetterRetries
    ) -> None:
        self._store = store
        self._topology = topology
        self._limit = limit
        self.is_bounded: bool = False
        self._judged: dict[str, _Tally] = {}
        self._warned: set[str] = set()
        self.retries: LetterRetries = retries

    def judge(self, manifests: Sequence[Manifest], unreadable: Sequence[DeadLetter]) -> LettersOfSuperstep:
        tallies = _tallies(manifests, unreadable)
        if self._limit is not None:
            for computation, tally in tallies.items():
                earlier = self._judged.get(computation)
                if not tally.letters and (earlier is None or not earlier.letters):
                    continue
                judged = tally if earlier is None else tally.plus(earlier)
                alone = judged if self.is_bounded else tally
                if alone.letters >= _ALL_MIN and alone.letters == alone.records:
                    raise _flood(computation, alone, self._limit)
                is_full = judged.records >= self._limit.records_min
                if is_full and judged.letters > self._limit.share * judged.records:
                    raise _flood(computation, judged, self._limit)
        new = list(unreadable)
        for manifest in manifests:
            new += manifest.result.dead_letters
        settled = frozenset[str]() if self.retries.chosen is None else self.retries.settled(manifests)
        return LettersOfSuperstep(new, settled, tallies)

    def write(
        self, letters: LettersOfSuperstep, plan: SuperstepPlan, fence: Fence, token: str
    ) -> WrittenLetters:
        """Write a superstep's new letters, and the deletion of settled letters, to an uncommitted row file."""
        failed_at = EventTimeMicros(int(plan.conditions.wall_time))
        produce = bool(letters.new) and DEAD_LETTERS in self._topology.wanted_streams
        updates = dead_letter_updates(
            self._topology.name,
            letters.new,
            superstep=plan.superstep,
            fence=fence,
            at=failed_at,
            produce=produce,
            settled=letters.settled,
        )
        file = write_row_file(
            self._store.objects,
            control_interval(self._topology.name),
            updates,
            superstep=plan.superstep,
            fence=fence,
            token=token,
            row_format=self._store.row_format,
        )
        if not produce:
            return WrittenLetters(file)
        times = [failed_at if letter.at is None else EventTimeMicros(letter.at) for letter in letters.new]
        summary = ProductionSummary(stream=DEAD_LETTERS, count=len(times), oldest_at=min(times))
        return WrittenLetters(file, (summary,))

    def committed(self, letters: LettersOfSuperstep) -> None:
        for computation, tally in letters.tallies.items():
            judged = self._judged[computation] = tally.plus(self._judged.get(computation, _Tally()))
            # A full sample has been judged: the next one begins, so that old successes do not cover a new bug.
            if self._limit is None or judged.records >= self._limit.records_min:
                del self._judged[computation]
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
        failed = sum(letter.retried > 0 for letter in letters.new) if letters.new else 0
        if failed:
            _LOG.warning("%d of %d dead letters that were retried failed again", failed, len(letters.settled))
        if self.retries.chosen is not None:
            self.retries.committed(letters.settled)


def _tallies(manifests: Iterable[Manifest], unreadable: Sequence[DeadLetter]) -> dict[str, _Tally]:
    tallies: dict[str, _Tally] = {}
    for manifest in manifests:
        ran = manifest.result.statistics
        tally = tallies.setdefault(manifest.interval.computation, _Tally())
        tally.records += ran.records - ran.dropped + ran.timers - ran.retried
        for letter in manifest.result.dead_letters:
            if not letter.retried:
                tally.letters += 1
                tally.first = tally.first or letter
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
