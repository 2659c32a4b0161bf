"""Dead letters as the table has them, and which of them are meant."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import orjson

from millpond.executor.bundle.letter_value import letter_value
from millpond.executor.bundle.retried_letter import RetriedLetter, check_types_kept, letter_time_us
from millpond.executor.pipeline.names import DEAD_LETTERS
from millpond.statestore.errors import InvalidError
from millpond.statestore.log.snapshot import Snapshot
from millpond.statestore.types import Objects
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
                raise InvalidError(
                    "a selection of dead letters has a part of the wrong type", part=part.name
                )

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
