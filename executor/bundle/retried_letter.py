"""A dead letter that is given once more to the computation whose code failed.

It has all that the code got: of a record the key, the value with its types, the event time, the stream and the id; of a
timer the timer. A letter that does not have them all is refused, and says why.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import numpy as np
import pyarrow as pa

from millpond.executor.bundle.letter_value import letter_value
from millpond.executor.computation.record_columns import RecordColumns
from millpond.executor.computation.timer import Timer
from millpond.executor.computation.values import PythonValues
from millpond.executor.event_time.clocks import EXACT
from millpond.statestore.errors import InvalidError
from millpond.statestore.quick_pickle import quickly_pickled
from millpond.statestore.rows.row import TimeDomain

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)


@quickly_pickled
@dataclass(frozen=True, slots=True, kw_only=True)
class RetriedLetter:
    """A letter on its way to its key, once more.

    Attributes:
        name: the key of the letter's row.
        stream: the stream on which the record arrived; ``""`` for a timer.
        key: the key whose turn it was.
        at: the event time, in microseconds.
        value: the value as JSON text.
        value_types: the types that JSON lacks; see `letter_value`.
        id: the record's id, as its publisher gave it.
        unseen_id: the id under which it is deduplicated, if its record never reached the code; ``None`` if that
            id is known, or if there is none.
        timer: the timer that is fired once more; ``None`` for a record.
        retried: how often the letter has been retried, this time included.
    """

    name: str
    stream: str
    key: str
    at: int
    value: str
    value_types: Mapping[str, str] = field(default_factory=dict)
    id: bytes | None = None
    unseen_id: bytes | None = None
    timer: Timer | None = None
    retried: int = 1

    @classmethod
    def read(cls, name: str, letter: Mapping[str, Any]) -> RetriedLetter:
        """A letter, as the table ``dead_letters`` has it.

        Args:
            name: the key of its row.
            letter: its fields.

        Raises:
            InvalidError: it does not have all that the code got.
        """
        key, at = letter.get("key"), letter.get("at")
        if key is None:
            raise InvalidError("the record has no key")
        if at is None:
            raise InvalidError("the record has no event time")
        value, stream = letter_value(letter), str(letter["stream"])
        if stream:
            check_types_kept(letter)
        return cls(
            name=name,
            stream=stream,
            key=str(key),
            at=letter_time_us(at),
            value=str(letter["value"]),
            value_types=dict(letter.get("value_types") or {}),
            id=_id(letter),
            timer=None if stream else _timer(value),
            retried=int(letter.get("retried") or 0) + 1,
        )


def check_types_kept(letter: Mapping[str, Any]) -> None:
    """Refuse a record's letter of a version that wrote values without their types: a time in it is a text now.

    Raises:
        InvalidError: it is one; such letters do not say when they were written either.
    """
    if letter.get("failed_at") is None:
        raise InvalidError(
            "the letter is of a version that did not keep the types of values: inject its value"
        )


def letter_time_us(told: str | int) -> int:
    """A time as a letter tells it, in microseconds.

    Example:
        >>> letter_time_us("1970-01-01T00:00:01.500000+00:00")
        1500000
    """
    return told if isinstance(told, int) else (datetime.fromisoformat(told) - _EPOCH) // _MICROSECOND


def letter_columns(letter: RetriedLetter, watermark: int, *, with_id: bool) -> RecordColumns:
    """The record of a letter, as the columns of a bundle.

    Args:
        letter: the letter of a record.
        watermark: the computation's input low watermark.
        with_id: whether the computation's records have their ids.
    """
    value = letter_value({"value": letter.value, "value_types": letter.value_types})
    has_id = with_id and letter.id is not None
    # The scope that the columns take off: the publisher's own id may begin like one.
    scoped = [f"{letter.stream}\0".encode() + (letter.id or b"")] if has_id else None
    return RecordColumns(
        np.array([letter.at], np.int64),
        [letter.stream],
        np.zeros(1, np.int64),
        PythonValues([value]),
        None if scoped is None else pa.array(scoped, pa.binary()),
        watermark,
    )


def _id(letter: Mapping[str, Any]) -> bytes | None:
    exact, text = letter.get("id_base64"), letter.get("id")
    if exact is None:
        return None if text is None else str(text).encode()
    try:
        return base64.b64decode(exact, validate=True)
    except binascii.Error as cause:
        raise InvalidError("the letter's id cannot be read", id=exact) from cause


def _timer(value: Any) -> Timer:
    try:
        return Timer(
            tag=str(value["tag"]),
            domain=TimeDomain(value["domain"]),
            at=int(value["at"]),
            output_at=int(value["output_at"]),
            percentile=float(value.get("percentile", EXACT)),
            holds=bool(value.get("holds", True)),
        )
    except (AttributeError, LookupError, TypeError, ValueError) as cause:
        raise InvalidError("the letter has no timer", value=json.dumps(value, default=repr)[:200]) from cause
