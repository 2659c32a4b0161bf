"""The tree of errors, grouped by the handler's next step.

::

    MillpondError
    ├── ConflictError          read again, then retry
    │   └── ObjectExistsError  put-if-absent found an existing object
    ├── FencedError            stop: another owner has taken the interval
    ├── UnavailableError       retry later: a service is unavailable
    │   └── QueryStoppedError  a streaming query was stopped in the middle of a batch
    ├── OutcomeUnknownError    read back, then decide: a commit may or may not have landed
    ├── DataError              stop: bytes are missing, wrong or older than acknowledged
    │   └── ObjectMissingError a required object does not exist
    ├── InvalidError           fix the call, the pipeline, the input or the configuration
    │   └── UnpicklableError   an object that works only in its process cannot be sent to another
    └── InternalError          a bug in Millpond
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from enum import StrEnum
from functools import partial
from pickle import PickleError

from millpond.statestore.visible import visible, visible_lines, visible_value, without_secrets


class ErrorKind(StrEnum):
    """Stable codes of the error classes; codes are added, never changed."""

    CONFLICT = "conflict"
    FENCED = "fenced"
    UNAVAILABLE = "unavailable"
    OUTCOME_UNKNOWN = "outcome_unknown"
    DATA = "data"
    INVALID = "invalid"
    INTERNAL = "internal"


class MillpondError(Exception):
    """Base of every error that Millpond raises on purpose.

    Longer diagnostics are attached as notes (PEP 678).

    Args:
        message: one lower-case line: the cause and the way out.
        details: values for the reader, printed as ``key=`value` `` pairs of at most 2,000 characters. Control
            characters are printed as Python writes them, passwords of URLs as ``***``.

    Example:
        >>> str(InvalidError("no such stream", stream="querys"))
        'no such stream stream=`querys`'
    """

    kind: ErrorKind = ErrorKind.INTERNAL

    def __init__(self, message: str, **details: object) -> None:
        super().__init__()
        self.message = message
        self.details = details

    def __str__(self) -> str:
        # Made when somebody reads it: each superstep meets an error about the commit that does not exist yet.
        text = visible(without_secrets(self.message))
        for name, value in self.details.items():
            text += f" {name}=`{visible_value(value)}`"
        return text

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r})"

    def add_note(self, note: str) -> None:
        super().add_note(visible_lines(without_secrets(note)))

    def __reduce__(self) -> tuple[object, tuple[object, ...], dict[str, object]]:
        # The default would pass the formatted text as the message; the dictionary has the notes.
        return (partial(type(self), self.message, **self.details), (), self.__dict__)


class ConflictError(MillpondError):
    """Another writer's change came first: read again, then retry."""

    kind = ErrorKind.CONFLICT


class ObjectExistsError(ConflictError):
    """A put-if-absent found an existing object and wrote nothing."""


class FencedError(MillpondError):
    """Another owner holds the interval: stop; this commit wrote nothing.

    Only commits raise it, never inside user code, so an ``except Exception`` in a computation cannot swallow it.
    """

    kind = ErrorKind.FENCED


class UnavailableError(MillpondError):
    """A service (ZooKeeper, the object store) is unavailable: retry later."""

    kind = ErrorKind.UNAVAILABLE


class QueryStoppedError(UnavailableError):
    """A streaming query was stopped in the middle of a batch, which is redelivered when the query restarts."""


class OutcomeUnknownError(MillpondError):
    """A commit may or may not have landed: read back before deciding."""

    kind = ErrorKind.OUTCOME_UNKNOWN


class DataError(MillpondError):
    """Bytes are missing, wrong, or older than acknowledged: stop."""

    kind = ErrorKind.DATA


class ObjectMissingError(DataError):
    """A named object is not in the store."""


class InvalidError(MillpondError):
    """The call, the pipeline, the input or the configuration is wrong: fix it."""

    kind = ErrorKind.INVALID


class UnpicklableError(InvalidError, PickleError):
    """An object that works only in its process was about to be sent to another one."""


class InternalError(MillpondError):
    """A bug in Millpond; never raised for any other reason."""

    kind = ErrorKind.INTERNAL


def check(condition: bool, message: str, **details: object) -> None:
    """Raise `InternalError` unless the condition holds; unlike ``assert``, also under ``python -O``."""
    if not condition:
        raise InternalError(message, **details)


def did_you_mean(name: object, known: Iterable[object]) -> str:
    """Return the end of a message about an unknown name: the nearest known name, or nothing if none is near."""
    names = {str(one).lower(): str(one) for one in known}
    near = get_close_matches(str(name).lower(), names, n=1)
    return f"; did you mean {names[near[0]]!r}?" if near else ""
