"""Requests for dead letters: asked for by a position in the table, honoured by the pipeline that wrote the letters.

The pipeline alone may write its letters' rows and give records to its code, so a tool writes what it wants: an even
number under the name of the selection. It also says up to which superstep letters are meant, so that a letter that
fails again, which is a new one, is not retried for ever. A request outlives the process that made it and the one that
runs the pipeline. That none of its letters is left is all that its answer, the next odd number, says: that each letter
is retried once rests on the commit that deletes it, not on the answer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, cast

from millpond.executor.dead_letters.stored_letter import LetterSelection, StoredLetter, stored_letters
from millpond.executor.event_time.instants import Moment, to_micros
from millpond.statestore.app_ids import LETTERS_PREFIX, app_id_parts, letters_app_id, superstep_app_id
from millpond.statestore.commit.request import CommitRequest
from millpond.statestore.errors import InvalidError
from millpond.statestore.store import Store

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
        return letters_app_id(self.pipeline, self.action, self.selection.text)

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
        known = txns.get(letters_app_id(pipeline, action, selection.text), 0)
        wanted = txns.get(superstep_app_id(pipeline), 0) << _REPEATS_BITS
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
        if number % 2 == 0 and app_id.startswith(LETTERS_PREFIX):
            name, action, text = app_id_parts(app_id, LETTERS_PREFIX)
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
