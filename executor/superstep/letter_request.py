"""
Requests for dead letters: asked for by a position in the table, honoured by the pipeline that wrote the letters.

The pipeline alone may write its letters' rows and give records to its code, so a tool writes what it wants: an even
number under the name of the selection. It also says up to which superstep letters are meant, so that a letter that
fails again, which is a new one, is not retried for ever. A request outlives the process that made it and the one that
runs the pipeline. That none of its letters is left is all that its answer, the next odd number, says: that each letter
is retried once rests on the commit that deletes it, not on the answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, cast

from millpond.executor.superstep.stored_letter import LetterSelection, StoredLetter
from millpond.statestore.app_ids import LETTERS_PREFIX, app_id_parts, letters_app_id, superstep_app_id

__all__ = ["LetterAction", "LetterRequest", "waiting_letter_requests"]

LetterAction: TypeAlias = Literal["retry", "drop"]

_REPEATS_BITS: Final = 16
"""The low bits of a number count requests of one selection that were made after the same superstep."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LetterRequest:
    """
    Some of a pipeline's dead letters, to be retried or dropped.

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
        """
        The name of its position.
        """
        return letters_app_id(self.pipeline, self.action, self.selection.text)

    @property
    def until(self) -> int:
        """
        The last superstep whose letters are meant.
        """
        return self.number >> _REPEATS_BITS

    @property
    def answer(self) -> Mapping[str, int]:
        """
        The position that says that none of its letters is left.
        """
        return {self.app_id: self.number + 1}

    @classmethod
    def next(
        cls, txns: Mapping[str, int], pipeline: str, action: LetterAction, selection: LetterSelection
    ) -> LetterRequest:
        """
        The request to write now, given the table's transactions; one that waits already for all letters is the same.
        """
        known = txns.get(letters_app_id(pipeline, action, selection.text), 0)
        wanted = txns.get(superstep_app_id(pipeline), 0) << _REPEATS_BITS
        number = max(wanted, known + known % 2)
        return cls(pipeline=pipeline, action=action, selection=selection, number=number)

    def has(self, letter: StoredLetter) -> bool:
        """
        Whether a letter is meant.
        """
        is_old = letter.pipeline == self.pipeline and letter.superstep <= self.until
        return is_old and self.selection.has(letter)


def waiting_letter_requests(
    txns: Mapping[str, int], pipeline: str | None = None
) -> tuple[LetterRequest, ...]:
    """
    The requests that no commit has answered, oldest first.

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
    return tuple(sorted(found, key=lambda request: (request.number, request.app_id)))
