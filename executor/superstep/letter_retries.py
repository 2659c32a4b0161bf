"""Dead letters that a request retries or drops.

A request is a position in the table, because only the pipeline that wrote the letters may write their rows and give
records to its code. A tool writes an even number under the name of the selection; the number also bounds the
supersteps whose letters are meant, so that a letter that fails again, which is a new letter, is not retried forever.
The pipeline answers with the next odd number once no letter of the request is left.

Each letter is retried exactly once, because the commit of the superstep that retries it deletes its row. The oldest
letters of the first waiting request travel with the plans of the intervals that have their keys. The answer is only
a notice: a process that dies before it answers finds no letter left, and answers again.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from itertools import islice
from typing import Any, Final, Literal, TypeAlias, cast

import orjson

from millpond.executor.inputs.extraction import read_injected, rows_to_extract
from millpond.executor.inputs.keys import extract_key
from millpond.executor.inputs.payload import value_of_row
from millpond.executor.interval.letters import (
    RetriedLetter,
    check_types_kept,
    describe_value,
    is_whole,
    letter_time_us,
    letter_value,
)
from millpond.executor.interval.row_update import Manifest
from millpond.executor.pipeline.nodes import DEAD_LETTERS, ComputationNode, Subscription
from millpond.executor.pipeline.topology import Topology
from millpond.executor.time.instants import Moment, to_micros
from millpond.statestore.app_ids import AppId
from millpond.statestore.errors import ConflictError, InvalidError, UnavailableError
from millpond.statestore.log.rules import CommitRequest
from millpond.statestore.log.snapshot import Snapshot
from millpond.statestore.objects.ranges import ParallelObjects
from millpond.statestore.store import Store
from millpond.statestore.types import Clock, EventTimeMicros, Objects
from millpond.statestore.view import RowsView


@dataclass(frozen=True, slots=True)
class StoredLetter:
    """A dead letter in the table; its name is the key of its row, ``pipeline/superstep/number``."""

    name: str
    fields: Mapping[str, Any]

    @property
    def pipeline(self) -> str:
        return self.name.rsplit("/", 2)[0]

    @property
    def superstep(self) -> int:
        return int(self.name.rsplit("/", 2)[1])

    @property
    def is_unread(self) -> bool:
        """True if no key, time or id could be read, so that the record never reached the code; it has no traceback."""
        return self.fields.get("diagnostics") == ""

    @property
    def lost(self) -> str | None:
        """The reason why the record or timer cannot be restored; ``None`` if it can."""
        try:
            if self.is_unread:
                check_types_kept(self.fields)
                letter_value(self.fields)
            else:
                RetriedLetter.read(self.name, self.fields)
        except InvalidError as error:
            return error.message
        return None


def stored_letters(
    snapshot: Snapshot, objects: Objects, names: Collection[str] | None = None
) -> Iterator[StoredLetter]:
    """Yield the dead letters of a table, or only the letters with these names, in the order of their names."""
    rows = RowsView.of(snapshot, objects, DEAD_LETTERS).to_arrow(names)
    for name, state in zip(rows.column("key").to_pylist(), rows.column("state").to_pylist(), strict=True):
        parts = name.rsplit("/", 2)
        if state is not None and len(parts) == 3 and parts[1].isdecimal():
            yield StoredLetter(name, orjson.loads(state))


@dataclass(frozen=True, slots=True, kw_only=True)
class LetterSelection:
    """A choice of dead letters: a letter must match every part that is given; `retry_dead_letters` explains each.

    Example:
        >>> selection = LetterSelection(computation="average", key="cup")
        >>> selection.text
        '{"computation":"average","key":"cup"}'
        >>> LetterSelection.of(selection.text) == selection
        True
    """

    computation: str | None = None
    stream: str | None = None
    key: str | None = None
    before_us: int | None = None
    error: str | None = None
    letter: str | None = None

    def __post_init__(self) -> None:
        for part in fields(self):
            value = getattr(self, part.name)
            kind = int if part.name == "before_us" else str
            if value is not None and type(value) is not kind:
                raise InvalidError("a selection of dead letters has a part of the wrong type", part=part.name)

    @property
    def text(self) -> str:
        """The selection as JSON; equal selections have the same text."""
        given = {name: value for name, value in asdict(self).items() if value is not None}
        return orjson.dumps(given, option=orjson.OPT_SORT_KEYS).decode()

    @classmethod
    def of(cls, text: str) -> LetterSelection:
        return cls(**orjson.loads(text))

    def has(self, letter: StoredLetter) -> bool:
        fields = letter.fields
        same = (
            (self.computation, fields.get("computation")),
            (self.stream, fields.get("stream")),
            (self.key, fields.get("key")),
            (self.letter, letter.name),
        )
        if any(wanted is not None and wanted != found for wanted, found in same):
            return False
        if self.error is not None and self.error not in str(fields.get("error", "")):
            return False
        failed_at = fields.get("failed_at")
        # Letters of the first releases have no time of failure; they are older than any time in a request.
        return self.before_us is None or failed_at is None or letter_time_us(failed_at) < self.before_us


LetterAction: TypeAlias = Literal["retry", "drop"]

_REPEATS_BITS: Final = 16
"""The low bits of a request's number count repetitions of its selection after the same superstep."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LetterRequest:
    """A request to retry or to drop some of a pipeline's dead letters; its number is even, the answer the next odd one."""

    pipeline: str
    action: LetterAction
    selection: LetterSelection
    number: int

    @property
    def app_id(self) -> str:
        return AppId.LETTERS.of(self.pipeline, self.action, self.selection.text)

    @property
    def until(self) -> int:
        """The last superstep whose letters the request covers."""
        return self.number >> _REPEATS_BITS

    @property
    def answer(self) -> Mapping[str, int]:
        return {self.app_id: self.number + 1}

    @classmethod
    def next(
        cls, txns: Mapping[str, int], pipeline: str, action: LetterAction, selection: LetterSelection
    ) -> LetterRequest:
        """Return the request to write now; a waiting request for the same letters is returned unchanged."""
        known = txns.get(AppId.LETTERS.of(pipeline, action, selection.text), 0)
        wanted = txns.get(AppId.SUPERSTEP.of(pipeline), 0) << _REPEATS_BITS
        number = max(wanted, known + known % 2)
        return cls(pipeline=pipeline, action=action, selection=selection, number=number)

    def has(self, letter: StoredLetter) -> bool:
        is_old = letter.pipeline == self.pipeline and letter.superstep <= self.until
        return is_old and self.selection.has(letter)


def waiting_letter_requests(
    txns: Mapping[str, int], pipeline: str | None = None
) -> tuple[LetterRequest, ...]:
    """Return the unanswered requests, of all pipelines or of one: drops first, so that no dropped letter is retried."""
    found = []
    for app_id, number in txns.items():
        if number % 2 == 0 and app_id.startswith(AppId.LETTERS):
            name, action, text = AppId.LETTERS.parts(app_id)
            if pipeline in (None, name):
                request = LetterRequest(
                    pipeline=name,
                    action=cast("LetterAction", action),
                    selection=LetterSelection.of(text),
                    number=number,
                )
                found.append(request)
    return tuple(sorted(found, key=lambda one: (one.action != "drop", one.number, one.app_id)))


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedLetters:
    """The number of letters that a request covers, of letters that cannot be restored by reason, and the pipelines."""

    letters: int
    lost: Mapping[str, int]
    pipelines: tuple[str, ...]


def ask_for_letters(store: Store, action: LetterAction, selection: LetterSelection) -> AskedLetters:
    """Ask the pipelines of a store to retry or to drop some of their dead letters."""
    snapshot = store.committer.refresh()
    meant = [letter for letter in stored_letters(snapshot, store.objects) if selection.has(letter)]
    if not meant:
        raise InvalidError(
            "the store has no such dead letter: `millpond dead-letters list` shows those that there are",
            selection=selection.text,
        )
    lost = Counter(reason for letter in meant if action == "retry" and (reason := letter.lost) is not None)
    if lost.total() == len(meant):
        raise InvalidError(
            "no code can get these dead letters again", letters=len(meant), reason="; ".join(sorted(lost))
        )
    pipelines = tuple(sorted({letter.pipeline for letter in meant}))
    requests = [LetterRequest.next(snapshot.txns, name, action, selection) for name in pipelines]
    # A waiting request for the same letters has the same number: repeating it must not retry them twice.
    positions = {
        request.app_id: request.number
        for request in requests
        if snapshot.txns.get(request.app_id) != request.number
    }
    if positions:
        store.committer.commit(CommitRequest(kind="request", positions=positions))
    return AskedLetters(letters=len(meant) - lost.total(), lost=dict(lost), pipelines=pipelines)


def withdraw_letter_requests(store: Store) -> tuple[LetterRequest, ...]:
    """Withdraw and return the waiting requests of a store; letters that were retried or dropped stay so."""
    waiting = waiting_letter_requests(store.committer.refresh().txns)
    positions = {app_id: number for request in waiting for app_id, number in request.answer.items()}
    if positions:
        store.committer.commit(CommitRequest(kind="request", positions=positions))
    return waiting


def retry_dead_letters(
    store: Store,
    *,
    computation: str | None = None,
    stream: str | None = None,
    key: str | None = None,
    before: Moment | None = None,
    error: str | None = None,
    letter: str | None = None,
) -> int:
    """Retry dead letters exactly once, after their computations' code was mended.

    The pipeline that wrote the letters retries them in one of its next supersteps or, if it is stopped, when it runs
    again. A letter leaves the table in the commit that has its effects; a letter that fails again is a new letter.
    A letter must match every argument that is given; without arguments all letters are retried.

    Args:
        store: the store, not opened read-only.
        computation: computation whose code failed.
        stream: stream of the record; ``""`` for timers.
        key: key of the record or timer.
        before: only letters that failed before this time.
        error: substring of the error.
        letter: key of the letter's row in the table ``dead_letters``.

    Returns:
        The number of letters that will be retried.

    Raises:
        InvalidError: no letter matches, or every matching letter has lost a part of its record.

    Example::

        with mp.Store.open("pond") as store:
            mp.retry_dead_letters(store, computation="average")
    """
    selection = _selection(
        before, computation=computation, stream=stream, key=key, error=error, letter=letter
    )
    return ask_for_letters(store, "retry", selection).letters


def drop_dead_letters(
    store: Store,
    *,
    computation: str | None = None,
    stream: str | None = None,
    key: str | None = None,
    before: Moment | None = None,
    error: str | None = None,
    letter: str | None = None,
) -> int:
    """Delete dead letters; `retry_dead_letters` explains the arguments.

    Returns:
        The number of letters that will be deleted.

    Raises:
        InvalidError: no letter matches.
    """
    selection = _selection(
        before, computation=computation, stream=stream, key=key, error=error, letter=letter
    )
    return ask_for_letters(store, "drop", selection).letters


def _selection(before: Moment | None, **parts: str | None) -> LetterSelection:
    return LetterSelection(before_us=None if before is None else to_micros(before), **parts)


_LOG: Final = logging.getLogger("millpond")
_LOOK_EVERY_US: Final = 1_000_000
"""Interval between searches for requests: a table may have thousands of transactions."""

_RETRIED_MAX: Final = 1_000
"""Letters that a superstep retries at most: each runs alone, with a savepoint before it."""

_RETRIED_BYTES_MAX: Final = 8 << 20
"""Approximate size of the values that travel with the plan of a superstep, at most."""

_DROPPED_MAX: Final = 100_000
"""Letters that a superstep drops at most: each is a row update."""


@dataclass(frozen=True, slots=True)
class ChosenLetters:
    """The letters that one superstep retries, by computation, and drops."""

    retried: Mapping[str, list[RetriedLetter]] = field(default_factory=dict)
    dropped: frozenset[str] = frozenset()


class LetterRetries:
    """The requests for one pipeline's dead letters, honoured superstep by superstep.

    Attributes:
        look_us: the monotonic time of the next search for requests.
        left: the letters of the first request that are neither retried nor dropped yet, the oldest first.
        chosen: the letters that the planned superstep retries and drops, if there are any.
        answers: answers to requests that have no letter left.
    """

    def __init__(
        self, store: Store, topology: Topology, clock: Clock, id_scope: Callable[[str, str], bytes]
    ) -> None:
        self._store = store
        self._topology = topology
        self._clock = clock
        self._id_scope = id_scope
        self._request: LetterRequest | None = None
        self.look_us: int = 0
        self.left: dict[str, None] = {}
        self.chosen: ChosenLetters | None = None
        self.answers: dict[str, int] = {}

    def lying(self) -> int:
        """Count the pipeline's letters that are neither retried nor dropped."""
        letters = stored_letters(self._store.committer.snapshot, self._store.objects)
        return sum(letter.pipeline == self._topology.name for letter in letters)

    def look_again(self) -> None:
        """Read the log for requests, unless the store is away; called once a second by an idle pipeline."""
        committer = self._store.committer
        unseen_us = self._clock.monotonic_us() - committer.seen_us
        try:
            # The put of a superstep has followed the log, and saves the request that a look costs in an object store.
            if unseen_us >= _LOOK_EVERY_US or not isinstance(self._store.objects, ParallelObjects):
                committer.refresh()
            self._look()
        except UnavailableError as error:
            _LOG.debug("no request for dead letters can be read now: %s", error)

    def choose(self) -> None:
        """Choose the letters that the superstep under planning retries and drops, in place of any earlier choice."""
        # A plan that was not committed retries nothing: its letters are still in the table, and are chosen again.
        self.chosen = None
        if self._clock.monotonic_us() >= self.look_us:
            self._look()
        if self._request is None or not self.left:
            return
        if self._request.action == "drop":
            self.chosen = ChosenLetters(dropped=frozenset(islice(self.left, _DROPPED_MAX)))
            return
        names = list(islice(self.left, _RETRIED_MAX))
        retried: dict[str, list[RetriedLetter]] = {}
        size_bytes = 0
        for stored in stored_letters(self._store.committer.snapshot, self._store.objects, names):
            try:
                computation, letter = self._read(stored)
            except InvalidError as error:
                # Extractors are user code: an extractor that succeeded in `_meant` may still fail here.
                del self.left[stored.name]
                _LOG.warning("a dead letter stays what it is letter=`%s`: %s", stored.name, error)
                continue
            retried.setdefault(computation, []).append(letter)
            size_bytes += len(letter.value)
            if size_bytes > _RETRIED_BYTES_MAX:
                break
        self.chosen = ChosenLetters(retried)

    def settled(self, manifests: Iterable[Manifest]) -> frozenset[str]:
        """Return the letters that the commit of these manifests deletes: retried and dropped letters."""
        dropped = frozenset[str]() if self.chosen is None else self.chosen.dropped
        return dropped.union(*[manifest.result.retried for manifest in manifests])

    def committed(self, settled: Iterable[str]) -> None:
        self.chosen = None
        for name in settled:
            self.left.pop(name, None)
        if self._request is not None and not self.left:
            self.answers |= self._request.answer
            self._request = None
            # Search at once for the next request.
            self.look_us = 0

    def answer(self, record: Callable[[Mapping[str, int]], None]) -> None:
        """Commit the answers to requests that have no letter left."""
        answers, self.answers = self.answers, {}
        try:
            record(answers)
        except ConflictError as error:
            # The request was repeated meanwhile: it still waits, and the next search finds it.
            _LOG.debug("a request for dead letters was repeated while it was answered: %s", error)

    def _look(self) -> None:
        """Find the first request with letters left; the requests before it have none, and are answered."""
        waiting = waiting_letter_requests(self._store.committer.snapshot.txns, self._topology.name)
        if self._request is None or waiting[:1] != (self._request,):
            self._request, self.left, self.answers = None, {}, {}
            for request in waiting:
                left = self._meant(request)
                if left:
                    self._request, self.left = request, left
                    break
                self.answers |= request.answer
        self.look_us = self._clock.monotonic_us() + _LOOK_EVERY_US

    def _meant(self, request: LetterRequest) -> dict[str, None]:
        """Return the names of a request's letters that can be retried, the oldest first."""
        names: dict[str, None] = {}
        refused: Counter[str] = Counter()
        for letter in stored_letters(self._store.committer.snapshot, self._store.objects):
            if not request.has(letter):
                continue
            try:
                if request.action == "retry":
                    self._read(letter)
                names[letter.name] = None
            except InvalidError as error:
                refused[error.message] += 1
        for reason, count in refused.items():
            _LOG.warning(
                "%d dead letters stay what they are, because they cannot be retried: %s", count, reason
            )
        return names

    def _read(self, letter: StoredLetter) -> tuple[str, RetriedLetter]:
        """Return the computation that a letter is for, and the letter as the computation gets it."""
        fields, topology = letter.fields, self._topology
        name = topology.former_names.get(fields["computation"], fields["computation"])
        node = topology.computations.get(name)
        if node is None:
            raise InvalidError("the pipeline has no such computation", computation=name)
        stream = topology.current_stream(fields["stream"]) if fields["stream"] else ""
        fields = {**fields, "stream": stream}
        if not stream:
            return name, RetriedLetter.read(letter.name, fields)
        subscription = node.subscription(stream)
        if subscription is None:
            raise InvalidError("the computation does not consume the stream", computation=name, stream=stream)
        if not letter.is_unread:
            return name, RetriedLetter.read(letter.name, fields)
        return name, self._read_again(letter.name, fields, node, subscription)

    def _read_again(
        self, name: str, letter: Mapping[str, Any], node: ComputationNode, subscription: Subscription
    ) -> RetriedLetter:
        """Read the record of a letter that never reached the code, with the pipeline's present extractors.

        The id was never consumed: it is checked as the id of any record, and the record is a duplicate if it was
        injected again meanwhile.
        """
        check_types_kept(letter)
        value = letter_value(letter)
        injector = self._topology.injectors.get(subscription.stream)
        if injector is None:
            key = extract_key(subscription.key, None, value)
            return RetriedLetter.read(name, {**letter, "key": key})
        if injector.change is not None:
            raise InvalidError("a change of a table that could not be read is not read again: inject it")
        at = letter.get("at")
        stamp_at = None if at is None else EventTimeMicros(letter_time_us(at))
        rows = rows_to_extract(injector, [value])
        read = read_injected(injector, subscription.key, rows, stamp_at)
        if read.errors:
            raise InvalidError(f"the record still cannot be read: {next(iter(read.errors.values()))}")
        text, types = str(letter["value"]), dict(letter.get("value_types") or {})
        if injector.payload is not None:
            # The payload can be decoded now: its value in the form that letters keep.
            described = describe_value(lambda: value_of_row(rows[0]))
            if not is_whole(described.types):
                raise InvalidError("the decoded value cannot be kept as a letter: inject the row")
            text, types = described.text, dict(described.types)
        own_id = None if read.ids is None else read.ids[0].as_py()
        read_at = int(read.at[0])
        if stamp_at is not None and injector.ahead is not None and injector.ahead.on_ahead == "clamp":
            # It was clamped when it arrived, and a day later its own time would no longer be.
            read_at = min(read_at, stamp_at)
        return RetriedLetter(
            name=name,
            stream=subscription.stream,
            key=read.keys[0].as_py(),
            at=read_at,
            value=text,
            value_types=types,
            id=own_id,
            unseen_id=None if own_id is None else self._id_scope(node.name, subscription.stream) + own_id,
            retried=int(letter.get("retried") or 0) + 1,
        )
