"""Dead letters: records and timers that user code could not process, kept as rows.

Each is a row of the computation ``dead_letters``, committed with its superstep, so that SQL can list it. It is
also a production to the stream ``dead_letters``, to which computations and sinks can subscribe.

The dead letters of a run: judged before the commit, written with it, and given once more if that is asked for.

The limit of dead letters: one bad record is the record's fault, a flood of them is the program's.

A run that turns most of its input into dead letters has not succeeded. It stops before the commit, so the
records stay unconsumed and the fixed program gets them again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from typing import Final, TypeAlias

import orjson
import pyarrow as pa

from millpond.executor.computation.values import printable
from millpond.executor.interval.bundle import DeadLetter, ProductionSummary
from millpond.executor.interval.row_update import Manifest
from millpond.executor.pipeline.nodes import DEAD_LETTERS, control_interval
from millpond.executor.pipeline.topology import Topology
from millpond.executor.superstep.letter_retries import LetterRetries
from millpond.executor.superstep.plan import SuperstepPlan
from millpond.statestore.errors import InvalidError
from millpond.statestore.rows.files import RowFile, write_row_file
from millpond.statestore.rows.row import ROW_SCHEMA, Fence
from millpond.statestore.store import Store
from millpond.statestore.types import Clock, EventTimeMicros, Superstep, WallTimeMicros

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
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
    """The row updates of dead letters, one per letter, with the key ``pipeline/superstep/number``.

    Those that were retried or dropped are deleted. What they have produced to the stream ``dead_letters`` stays.

    Args:
        pipeline: the pipeline's name.
        letters: the dead letters.
        superstep: the superstep in which they failed.
        fence: the fence of the control interval.
        at: when they failed, in wall time; also the event time of a production whose letter has no readable time.
        produce: whether the letters also go to the stream ``dead_letters``.
        settled: the keys of letters of earlier supersteps that are deleted.
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


@dataclass(frozen=True, slots=True)
class WrittenLetters:
    """The file of a superstep's dead letters, and the summary of its productions."""

    file: RowFile | None = None
    productions: tuple[ProductionSummary, ...] = ()


def write_dead_letters(
    store: Store,
    topology: Topology,
    letters: Sequence[DeadLetter],
    *,
    superstep: Superstep,
    fence: Fence,
    at: WallTimeMicros,
    token: str,
    settled: Collection[str] = (),
) -> WrittenLetters:
    """Write a superstep's dead letters to an uncommitted row file; writes nothing without a letter.

    Args:
        store: the open store.
        topology: the pipeline, which knows whether its dead letters have a consumer.
        letters: the dead letters.
        superstep: its number.
        fence: the fence of the commit that will add the file.
        at: the superstep's wall time: that of letters without a time of their own.
        token: makes the file's name unique.
        settled: the keys of letters that it deletes, because they were retried or dropped.
    """
    if not letters and not settled:
        return WrittenLetters()
    failed_at = EventTimeMicros(int(at))
    produce = bool(letters) and DEAD_LETTERS in topology.wanted_streams
    updates = dead_letter_updates(
        topology.name,
        letters,
        superstep=superstep,
        fence=fence,
        at=failed_at,
        produce=produce,
        settled=settled,
    )
    file = write_row_file(
        store.objects,
        control_interval(topology.name),
        updates,
        superstep=superstep,
        fence=fence,
        token=token,
        row_format=store.row_format,
    )
    times = [failed_at if letter.at is None else EventTimeMicros(letter.at) for letter in letters]
    if not produce:
        return WrittenLetters(file)
    summary = ProductionSummary(stream=DEAD_LETTERS, count=len(letters), oldest_at=min(times))
    return WrittenLetters(file, (summary,))


def _readable(letter: DeadLetter, failed_at: int) -> dict[str, object]:
    fields: dict[str, object] = {
        # The text of an error may hold any string; JSON needs one with a UTF-8 form.
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
    # Most letters have neither.
    return {name: value for name, value in fields.items() if value or name not in _RARE}


def _date(at: int) -> str | int:
    try:
        return (_EPOCH + timedelta(microseconds=at)).isoformat()
    except OverflowError:
        # The time of a timer may lie outside the calendar.
        return at


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


@dataclass(frozen=True, slots=True)
class LettersOfSuperstep:
    """What a superstep does to dead letters.

    Attributes:
        new: those that it writes.
        settled: the names of those that it deletes, because they were retried or dropped.
        tallies: how much of each computation's work failed.
    """

    new: Sequence[DeadLetter]
    settled: frozenset[str]
    tallies: Tallies


class DeadLetters:
    """The dead letters of one pipeline.

    Args:
        store: the open store.
        topology: the checked pipeline.
        clock: the source of time.
        limit: how much may become dead letters before the run stops; ``None``: all of it.
        id_scope: returns the prefix of record ids, by computation and stream.

    Attributes:
        retries: those that are given once more.
    """

    def __init__(
        self,
        store: Store,
        topology: Topology,
        clock: Clock,
        limit: DeadLetterLimit | None,
        id_scope: Callable[[str, str], bytes],
    ) -> None:
        self._store = store
        self._topology = topology
        self._monitor = DeadLetterMonitor(limit)
        self.retries: LetterRetries = LetterRetries(store, topology, clock, id_scope)

    def judge(self, manifests: Sequence[Manifest], unreadable: Sequence[DeadLetter]) -> LettersOfSuperstep:
        """The letters of a superstep that is about to be committed.

        Args:
            manifests: the intervals that ran.
            unreadable: the letters of records that never reached an interval.

        Raises:
            InvalidError: too much of the superstep became dead letters.
        """
        tallies = self._monitor.check(manifests, unreadable)
        new = [*unreadable, *(letter for manifest in manifests for letter in manifest.result.dead_letters)]
        return LettersOfSuperstep(new, self.retries.settled(manifests), tallies)

    def write(
        self, letters: LettersOfSuperstep, plan: SuperstepPlan, fence: Fence, token: str
    ) -> WrittenLetters:
        """Write new letters, and that others are deleted, to an uncommitted row file.

        Args:
            letters: the letters.
            plan: the superstep.
            fence: the fence of the commit that will add the file.
            token: makes the file's name unique.

        Raises:
            UnavailableError: the store is unavailable.
        """
        return write_dead_letters(
            self._store,
            self._topology,
            letters.new,
            settled=letters.settled,
            superstep=plan.superstep,
            fence=fence,
            at=plan.wall_time,
            token=token,
        )

    def note(self, letters: LettersOfSuperstep) -> None:
        """The superstep of these letters was committed."""
        self._monitor.note(letters.tallies)
        failed = sum(letter.retried > 0 for letter in letters.new)
        if failed:
            _LOG.warning("%d of %d dead letters that were retried failed again", failed, len(letters.settled))
        self.retries.note(letters.settled)

    def answer(self, record: Callable[[Mapping[str, int]], None]) -> None:
        """Say which requests have no letter left; see `LetterRetries.answer`."""
        self.retries.answer(record)
