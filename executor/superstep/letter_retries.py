"""Dead letters that are given to their computations once more, or dropped, because a request says so.

What a superstep retries is chosen when it is planned: some letters of the first request that waits, the oldest first.
Each travels with the plan of the interval that has its key, and the commit of the superstep deletes those that the
manifests name. So it is retried once, whatever happens between request and commit: while its row is there it has not
been, and afterwards no process finds it.

Requests for dead letters: asked for by a position in the table, honoured by the pipeline that wrote the letters.

The pipeline alone may write its letters' rows and give records to its code, so a tool writes what it wants: an even
number under the name of the selection. It also says up to which superstep letters are meant, so that a letter that
fails again, which is a new one, is not retried for ever. A request outlives the process that made it and the one that
runs the pipeline. That none of its letters is left is all that its answer, the next odd number, says: that each letter
is retried once rests on the commit that deletes it, not on the answer.

Dead letters as the table has them, and which of them are meant.

Letters of records that never reached the code, because no key, time or id could be read from them: read once more.

The letter has the row, or the production, that was to be read, so a mended extractor may find in it what the former one
did not. The id was never consumed: it is checked as that of any record, and the record is a duplicate if it was injected
again meanwhile.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from itertools import islice
from typing import Any, Final, Literal, TypeAlias, cast

import orjson

from millpond.executor.inputs.extraction import read_injected
from millpond.executor.inputs.injector import InjectorNode
from millpond.executor.inputs.keys import extract_key
from millpond.executor.inputs.payload import rows_to_extract, value_of_row
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
from millpond.statestore.interval import Interval
from millpond.statestore.log.rules import CommitRequest
from millpond.statestore.log.snapshot import Snapshot
from millpond.statestore.store import Store
from millpond.statestore.types import Clock, EventTimeMicros, Objects
from millpond.statestore.view import RowsView

_NAME_PARTS = 3


@dataclass(frozen=True, slots=True)
class StoredLetter:
    """A dead letter and its name.

    Attributes:
        name: the key of its row: ``pipeline/superstep/number``.
        fields: what it says.
    """

    name: str
    fields: Mapping[str, Any]

    @property
    def pipeline(self) -> str:
        """The pipeline that wrote it."""
        return self.name.rsplit("/", 2)[0]

    @property
    def superstep(self) -> int:
        """The superstep in which it was written."""
        return int(self.name.rsplit("/", 2)[1])

    @property
    def is_unread(self) -> bool:
        """Whether its record never reached the code, because its key, time or id could not be read: it has no traceback."""
        return self.fields.get("diagnostics") == ""

    @property
    def lost(self) -> str | None:
        """Why no code can get its record or timer again; ``None`` if it has all that it takes."""
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
    """The dead letters of a table, by name.

    Args:
        snapshot: the table.
        objects: its root.
        names: only these.

    Raises:
        DataError: a file is missing or its bytes are wrong.
    """
    rows = RowsView.of(snapshot, objects, DEAD_LETTERS).to_arrow(names)
    for name, state in zip(rows.column("key").to_pylist(), rows.column("state").to_pylist(), strict=True):
        parts = name.rsplit("/", 2)
        if state is not None and len(parts) == _NAME_PARTS and parts[1].isdecimal():
            yield StoredLetter(name, orjson.loads(state))


@dataclass(frozen=True, slots=True, kw_only=True)
class LetterSelection:
    """Which dead letters are meant: those for which all that is said holds; all of them if nothing is.

    Attributes:
        computation: whose code failed.
        stream: the stream of the record; ``""`` for timers.
        key: the key of the record or timer.
        before_us: it failed before this time, in microseconds.
        error: a part of the error.
        letter: the name of the letter.

    Raises:
        InvalidError: a part is of the wrong type.

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
        """Refuse what cannot be compared with a letter."""
        for part in fields(self):
            value = getattr(self, part.name)
            kind = int if part.name == "before_us" else str
            if value is not None and type(value) is not kind:
                raise InvalidError("a selection of dead letters has a part of the wrong type", part=part.name)

    @property
    def text(self) -> str:
        """The selection as JSON, the same text for the same selection."""
        said = {name: value for name, value in asdict(self).items() if value is not None}
        return orjson.dumps(said, option=orjson.OPT_SORT_KEYS).decode()

    @classmethod
    def of(cls, text: str) -> LetterSelection:
        """The selection of `text`."""
        return cls(**orjson.loads(text))

    def has(self, letter: StoredLetter) -> bool:
        """Whether a letter is meant."""
        told = letter.fields
        same = (
            (self.computation, told.get("computation")),
            (self.stream, told.get("stream")),
            (self.key, told.get("key")),
            (self.letter, letter.name),
        )
        if any(wanted is not None and wanted != found for wanted, found in same):
            return False
        if self.error is not None and self.error not in str(told.get("error", "")):
            return False
        return self.before_us is None or self._failed_before(told)

    def _failed_before(self, told: Mapping[str, Any]) -> bool:
        failed_at = told.get("failed_at")
        # Letters of the first versions do not say when they failed; they are older than any time that is asked for.
        return failed_at is None or letter_time_us(failed_at) < (self.before_us or 0)


LetterAction: TypeAlias = Literal["retry", "drop"]

_REPEATS_BITS: Final = 16
"""The low bits of a number count requests of one selection that were made after the same superstep."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LetterRequest:
    """Some of a pipeline's dead letters, to be retried or dropped.

    Attributes:
        pipeline: its name.
        action: ``retry`` or ``drop``.
        selection: which letters.
        number: the position that asks for it, even; the next one answers.
    """

    pipeline: str
    action: LetterAction
    selection: LetterSelection
    number: int

    @property
    def app_id(self) -> str:
        """The name of its position."""
        return AppId.LETTERS.of(self.pipeline, self.action, self.selection.text)

    @property
    def until(self) -> int:
        """The last superstep whose letters are meant."""
        return self.number >> _REPEATS_BITS

    @property
    def answer(self) -> Mapping[str, int]:
        """The position that says that none of its letters is left."""
        return {self.app_id: self.number + 1}

    @classmethod
    def next(
        cls, txns: Mapping[str, int], pipeline: str, action: LetterAction, selection: LetterSelection
    ) -> LetterRequest:
        """The request to write now, given the table's transactions; one that waits already for all letters is the same."""
        known = txns.get(AppId.LETTERS.of(pipeline, action, selection.text), 0)
        wanted = txns.get(AppId.SUPERSTEP.of(pipeline), 0) << _REPEATS_BITS
        number = max(wanted, known + known % 2)
        return cls(pipeline=pipeline, action=action, selection=selection, number=number)

    def has(self, letter: StoredLetter) -> bool:
        """Whether a letter is meant."""
        is_old = letter.pipeline == self.pipeline and letter.superstep <= self.until
        return is_old and self.selection.has(letter)


def waiting_letter_requests(
    txns: Mapping[str, int], pipeline: str | None = None
) -> tuple[LetterRequest, ...]:
    """The requests that no commit has answered: first what is dropped, so that it is not retried; the oldest first.

    Args:
        txns: the table's transactions.
        pipeline: only those to this pipeline.
    """
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
    """What was asked for.

    Attributes:
        letters: how many letters are meant, without those that no code can get again.
        lost: how many those are, by the reason; letters are dropped whatever they have lost.
        pipelines: the pipelines that wrote them, which honour the request.
    """

    letters: int
    lost: Mapping[str, int]
    pipelines: tuple[str, ...]


def ask_for_letters(store: Store, action: LetterAction, selection: LetterSelection) -> AskedLetters:
    """Ask the pipelines of a store to retry or to drop some of their dead letters.

    Raises:
        InvalidError: no letter is meant, or none of them has all that it takes; or the store was opened read-only.
        ConflictError: another process asks for the same at this moment.
    """
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
    positions = {
        request.app_id: request.number
        for request in requests
        if snapshot.txns.get(request.app_id) != request.number
    }
    if positions:
        store.committer.commit(CommitRequest(kind="request", positions=positions))
    return AskedLetters(letters=len(meant) - lost.total(), lost=dict(lost), pipelines=pipelines)


def withdraw_letter_requests(store: Store) -> tuple[LetterRequest, ...]:
    """Withdraw the requests of a store that wait; what they have done until then stays.

    Returns:
        The requests.

    Raises:
        ConflictError: a pipeline answers one of them at this moment.
        InvalidError: the store was opened read-only.
    """
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
    """Have dead letters given to their computations once more, exactly once, after their code was mended.

    The pipeline that wrote them does it in one of its next supersteps or, if it is stopped, when it runs again. A
    letter leaves the table in the commit that has its effects; if it fails again it is a new letter. Without an
    argument all letters are meant, with several those for which all hold.

    Args:
        store: the store, not opened read-only.
        computation: whose code failed.
        stream: the stream of the record; ``""`` for timers.
        key: the key of the record or timer.
        before: it failed before this time.
        error: a part of the error.
        letter: the key of the letter's row in the table ``dead_letters``.

    Returns:
        How many letters will be retried.

    Raises:
        InvalidError: no letter is meant, or none of them has all that the code got.

    Example::

        with mp.Store.open("pond") as store:
            mp.retry_dead_letters(store, computation="average")
    """
    selection = _selection(computation, stream, key, before, error, letter)
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
    """Have dead letters deleted; the arguments are those of `retry_dead_letters`.

    Returns:
        How many letters will be deleted.

    Raises:
        InvalidError: no letter is meant.
    """
    selection = _selection(computation, stream, key, before, error, letter)
    return ask_for_letters(store, "drop", selection).letters


def _selection(
    computation: str | None,
    stream: str | None,
    key: str | None,
    before: Moment | None,
    error: str | None,
    letter: str | None,
) -> LetterSelection:
    return LetterSelection(
        computation=computation,
        stream=stream,
        key=key,
        before_us=None if before is None else to_micros(before),
        error=error,
        letter=letter,
    )


def read_again(
    name: str,
    letter: Mapping[str, Any],
    node: ComputationNode,
    subscription: Subscription,
    injector: InjectorNode | None,
    id_scope: Callable[[str, str], bytes],
) -> RetriedLetter:
    """The record of a letter, read by the extractors of now.

    Args:
        name: the key of the letter's row.
        letter: its fields.
        node: the computation that the record is for.
        subscription: its subscription to the record's stream.
        injector: of the stream; ``None`` for a stream of productions.
        id_scope: returns the prefix of record ids, by computation and stream.

    Raises:
        InvalidError: the record still cannot be read.
    """
    check_types_kept(letter)
    value = letter_value(letter)
    if injector is None:
        key = extract_key(subscription.key, None, value)
        return RetriedLetter.read(name, {**letter, "key": key})
    if injector.change is not None:
        raise InvalidError("a change of a table that could not be read is not read again: inject it")
    told_at = letter.get("at")
    stamp_at = None if told_at is None else EventTimeMicros(letter_time_us(told_at))
    rows = rows_to_extract(injector, [value])
    read = read_injected(injector, subscription.key, rows, stamp_at)
    if read.errors:
        raise InvalidError(f"the record still cannot be read: {next(iter(read.errors.values()))}")
    text, types = str(letter["value"]), dict(letter.get("value_types") or {})
    if injector.payload is not None:
        text, types = _decoded(rows[0])
    own_id = None if read.ids is None else read.ids[0].as_py()
    return RetriedLetter(
        name=name,
        stream=subscription.stream,
        key=read.keys[0].as_py(),
        at=int(read.at[0]),
        value=text,
        value_types=types,
        id=own_id,
        unseen_id=None if own_id is None else id_scope(node.name, subscription.stream) + own_id,
        retried=int(letter.get("retried") or 0) + 1,
    )


def _decoded(row: Any) -> tuple[str, dict[str, str]]:
    """The value of a row whose payload could be decoded now, as letters keep values."""
    described = describe_value(lambda: value_of_row(row))
    if not is_whole(described.types):
        raise InvalidError("the decoded value cannot be kept as a letter: inject the row")
    return described.text, dict(described.types)


_LOG: Final = logging.getLogger("millpond")
_LOOK_EVERY_US: Final = 1_000_000
"""How often the table is searched for requests: it may have thousands of transactions."""

_RETRIED_MAX: Final = 1_000
"""How many letters a superstep retries: each is run alone, with a savepoint before it."""

_RETRIED_BYTES_MAX: Final = 8 << 20
"""About how large the values may be that travel with the plan of a superstep."""

_DROPPED_MAX: Final = 100_000
"""How many letters a superstep drops: each is a row update."""


@dataclass(frozen=True, slots=True)
class _Chosen:
    """What one superstep does."""

    retried: Mapping[str, list[RetriedLetter]] = field(default_factory=dict)
    dropped: frozenset[str] = frozenset()


class LetterRetries:
    """Honours the requests for one pipeline's dead letters, superstep by superstep.

    Args:
        store: the open store.
        topology: the checked pipeline.
        clock: the source of time.
        id_scope: returns the prefix of record ids, by computation and stream.
    """

    def __init__(
        self, store: Store, topology: Topology, clock: Clock, id_scope: Callable[[str, str], bytes]
    ) -> None:
        self._store = store
        self._topology = topology
        self._clock = clock
        self._id_scope = id_scope
        self._looked_us: int | None = None
        self._request: LetterRequest | None = None
        self._left: dict[str, None] = {}
        self._answers: dict[str, int] = {}
        self._chosen = _Chosen()

    def is_waiting(self) -> bool:
        """Whether a superstep would retry or drop letters; for a pipeline that has nothing else to do.

        It follows the log, but not each time, and not while the store is away.
        """
        if self._is_time_to_look():
            try:
                self._store.committer.refresh()
                self._look()
            except UnavailableError as error:
                _LOG.debug("no request for dead letters can be read now: %s", error)
        return bool(self._left)

    def choose(self) -> None:
        """Choose what the superstep that is being planned retries and drops; what was chosen before is forgotten.

        Raises:
            DataError: a file with letters is missing or damaged.
            UnavailableError: the store is unavailable.
        """
        self._chosen = _Chosen()
        if self._is_time_to_look():
            self._look()
        if self._left and self._request is not None:
            self._chosen = self._next(self._request)

    def computations(self) -> Mapping[str, list[str]]:
        """The computations whose letters the superstep retries, each with the letters' keys."""
        return {name: [letter.key for letter in letters] for name, letters in self._chosen.retried.items()}

    def of(self, interval: Interval) -> tuple[RetriedLetter, ...]:
        """The letters that an interval gets."""
        letters = self._chosen.retried.get(interval.computation, ())
        return tuple(letter for letter in letters if interval.contains(letter.key))

    def settled(self, manifests: Iterable[Manifest]) -> frozenset[str]:
        """The letters that the commit of these manifests deletes: those that ran, and those that are dropped."""
        return self._chosen.dropped.union(*(manifest.result.retried for manifest in manifests))

    def note(self, settled: Iterable[str]) -> None:
        """A superstep was committed that has deleted these letters."""
        self._chosen = _Chosen()
        for name in settled:
            self._left.pop(name, None)
        if self._request is not None and not self._left:
            self._answers |= self._request.answer
            self._request = None
            # The next request does not wait for its turn to be looked for.
            self._looked_us = None

    def answer(self, record: Callable[[Mapping[str, int]], None]) -> None:
        """Say which requests have no letter left.

        Args:
            record: commits positions.

        Raises:
            FencedError: another process owns the pipeline.
        """
        answers, self._answers = self._answers, {}
        if not answers:
            return
        try:
            record(answers)
        except ConflictError as error:
            # Asked for again meanwhile: it still waits, and is looked at again.
            _LOG.debug("a request for dead letters was repeated while it was answered: %s", error)

    # -- requests --------------------------------------------------------------------------

    def _is_time_to_look(self) -> bool:
        now_us = self._clock.monotonic_us()
        return self._looked_us is None or now_us - self._looked_us >= _LOOK_EVERY_US

    def _look(self) -> None:
        """Find the first request that has letters left; those before it have none, and are answered."""
        waiting = waiting_letter_requests(self._store.committer.snapshot.txns, self._topology.name)
        if self._request is None or waiting[:1] != (self._request,):
            self._request, self._left, self._answers = None, {}, {}
            for request in waiting:
                left = self._meant(request)
                if left:
                    self._request, self._left = request, left
                    break
                self._answers |= request.answer
        self._looked_us = self._clock.monotonic_us()

    def _meant(self, request: LetterRequest) -> dict[str, None]:
        """The names of a request's letters, the oldest first, without those that cannot be retried."""
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
        """The computation that a letter is for, and what it gets.

        Raises:
            InvalidError: the letter cannot be retried.
        """
        told, topology = letter.fields, self._topology
        name = topology.former_names.get(told["computation"], told["computation"])
        node = topology.computations.get(name)
        if node is None:
            raise InvalidError("the pipeline has no such computation", computation=name)
        stream = topology.current_stream(told["stream"]) if told["stream"] else ""
        told = {**told, "stream": stream}
        if not stream:
            return name, RetriedLetter.read(letter.name, told)
        subscription = node.subscription(stream)
        if subscription is None:
            raise InvalidError("the computation does not consume the stream", computation=name, stream=stream)
        if not letter.is_unread:
            return name, RetriedLetter.read(letter.name, told)
        injector = topology.injectors.get(stream)
        return name, read_again(letter.name, told, node, subscription, injector, self._id_scope)

    # -- letters ---------------------------------------------------------------------------

    def _next(self, request: LetterRequest) -> _Chosen:
        if request.action == "drop":
            return _Chosen(dropped=frozenset(islice(self._left, _DROPPED_MAX)))
        names = list(islice(self._left, _RETRIED_MAX))
        retried: dict[str, list[RetriedLetter]] = {}
        size_bytes = 0
        for stored in stored_letters(self._store.committer.snapshot, self._store.objects, names):
            try:
                computation, letter = self._read(stored)
            except InvalidError as error:
                # It could be read a moment ago: an extractor never does the same twice.
                del self._left[stored.name]
                _LOG.warning("a dead letter stays what it is letter=`%s`: %s", stored.name, error)
                continue
            retried.setdefault(computation, []).append(letter)
            size_bytes += len(letter.value)
            if size_bytes > _RETRIED_BYTES_MAX:
                break
        return _Chosen(retried)
