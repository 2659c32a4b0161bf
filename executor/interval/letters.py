"""Dead letters: values as JSON text from which they can be restored, and letters that are retried.

A value of a type that JSON lacks is written as the text that a reader expects (a time in ISO 8601, bytes in base64),
and its type is kept next to it, under its JSON pointer (RFC 6901). `letter_value` reverses this, so the record can be
injected again unchanged. A letter can be retried only if it has all of its record or timer.
"""

from __future__ import annotations

import base64
import binascii
import json
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final, SupportsIndex

import pyarrow as pa

from millpond.executor.computation.records import RecordColumns
from millpond.executor.computation.timers import Timer
from millpond.executor.computation.values import PythonValues
from millpond.executor.inputs.record_size import CutValue
from millpond.executor.time.clocks import EXACT
from millpond.executor.time.instants import datetime_us
from millpond.statestore.errors import InvalidError, MillpondError
from millpond.statestore.rows.row import TimeDomain
from millpond.statestore.rows.value_text import PlainObject, Shown, TypedText, typed_value
from millpond.statestore.rows.value_text import typed_text as text_of
from millpond.statestore.types import quickly_pickled

# Characters of a value in a letter; a longer value is cut, and marked as such.
VALUE_MAX: Final = 1 << 20
_ERROR_MAX: Final = 1_000
_WHOLE: Final = ""
_PLAIN: Final = "plain"
_LOST: Final = frozenset({"cut", "repr", "unreadable"})


def describe_value(read: Callable[[], Any]) -> TypedText:
    """Return a record's value for its letter, or the error if ``read`` raises."""
    try:
        value = read()
    except Exception as error:  # noqa: BLE001 - an unreadable value is often why the record failed
        return TypedText(json.dumps(f"<unreadable: {error_line(error)}>"), {_WHOLE: "unreadable"})
    if isinstance(value, CutValue):
        return TypedText(typed_text(value.value).text[:VALUE_MAX], {_WHOLE: "cut"})
    described = typed_text(value)
    if len(described.text) > VALUE_MAX:
        described = TypedText(described.text[:VALUE_MAX], {_WHOLE: "cut"})
    if type(value) is PlainObject and _WHOLE not in described.types:
        # The mark keeps an object with the fields of a pane from becoming a pane when it is read again.
        return TypedText(described.text, {**described.types, _WHOLE: _PLAIN})
    return described


def typed_text(value: Any) -> TypedText:
    """Return a value of any length as JSON text, with the types that JSON lacks; see `is_whole`."""
    try:
        return text_of(value, _nearest)
    except Exception:  # noqa: BLE001 - a letter is made of anything: objects may raise where they are looked at
        return TypedText(json.dumps(_shown(value)), {_WHOLE: "repr"})


def _nearest(_: str, value: Any) -> Shown:
    """Return what people may read of an object: the code would get another type if it were restored."""
    match value:
        case str():
            return Shown(str.__str__(value))
        case Mapping():
            return Shown(dict(value))
        case list() | tuple():
            return Shown(list(value))
        case SupportsIndex():
            return Shown(int(value.__index__()))
    return Shown(_shown(value))


def is_whole(types: Mapping[str, str]) -> bool:
    """Return True if `typed_value` can restore the value that has these types."""
    return _LOST.isdisjoint(types.values())


def letter_value(letter: Mapping[str, Any]) -> Any:
    """Return the value of the record that became a dead letter, with its original types.

    Args:
        letter: a dead letter: the JSON in the column ``state`` of the table ``dead_letters``, or the value of
            a record of the stream `DEAD_LETTERS`.

    Returns:
        The value. Tuples come back as lists, times with the offset of their zone.

    Raises:
        InvalidError: the letter does not have the whole value: it was too long, could not be read, or has
            objects in it that are none of the model's types, such as enumerations.

    Example:
        >>> letter_value({"value": '{"paid":"1.10"}', "value_types": {"/paid": "decimal"}})
        {'paid': Decimal('1.10')}
    """
    types = letter.get("value_types") or {}
    for pointer, kind in types.items():
        if kind in _LOST:
            raise InvalidError("the letter does not have the whole value", pointer=pointer, reason=kind)
    try:
        plain = json.loads(letter["value"])
    except ValueError as cause:
        raise InvalidError(
            "the value of the letter is not JSON", value=letter["value"][:_ERROR_MAX]
        ) from cause
    try:
        return typed_value(plain, types)
    except (ArithmeticError, LookupError, TypeError, ValueError) as cause:
        raise InvalidError("the value of the letter cannot be restored", reason=error_line(cause)) from cause


def error_line(error: BaseException) -> str:
    # The module of our own classes means nothing to readers.
    is_ours = isinstance(error, MillpondError)
    lines = [f"{type(error).__name__}: {error}"] if is_ours else traceback.format_exception_only(error)
    text = "".join(lines).strip()
    return text.splitlines()[0][:_ERROR_MAX] if text else type(error).__name__


def _shown(value: Any) -> str:
    try:
        return repr(value)[:VALUE_MAX]
    except Exception as error:  # noqa: BLE001 - the user's own code
        return f"<{type(value).__name__}, whose repr raised {type(error).__name__}>"


@quickly_pickled
@dataclass(frozen=True, slots=True, kw_only=True)
class RetriedLetter:
    """A letter to retry, with the whole input of the code.

    Attributes:
        stream: the stream on which the record arrived; ``""`` for a timer.
        at: the event time, in microseconds.
        value_types: the types that JSON lacks; see `letter_value`.
        unseen_id: the id for deduplication, if the record never reached the code and has one.
        timer: the timer to fire once more; ``None`` for a record.
        retried: the number of retries of the letter, this one included.
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
        """Read a letter from the fields of its row in the table ``dead_letters``; ``name`` is the row's key."""
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
    """Refuse a record's letter of a version that wrote values without their types: a time in it is only text."""
    if letter.get("failed_at") is None:
        raise InvalidError(
            "the letter is of a version that did not keep the types of values: inject its value"
        )


def letter_time_us(at: str | int) -> int:
    """Return a time of a letter in microseconds."""
    return at if isinstance(at, int) else datetime_us(datetime.fromisoformat(at))


def letter_columns(letter: RetriedLetter, watermark: int, *, with_id: bool) -> RecordColumns:
    """Return the record of a letter as the columns of a bundle, at the computation's input low watermark."""
    value = letter_value({"value": letter.value, "value_types": letter.value_types})
    has_id = with_id and letter.id is not None
    # The columns take one scope off, and the publisher's own id may begin like a scope.
    scoped = f"{letter.stream}\0".encode() + (letter.id or b"")
    return RecordColumns(
        at=[letter.at],
        streams=[letter.stream],
        sources=[0],
        values=PythonValues([value]),
        ids=pa.array([scoped]) if has_id else None,
        watermark=watermark,
    )


def _id(letter: Mapping[str, Any]) -> bytes | None:
    exact, text = letter.get("id_base64"), letter.get("id")
    if exact is None:
        return None if text is None else str(text).encode()
    try:
        return base64.b64decode(exact, validate=True)
    except binascii.Error as cause:
        raise InvalidError("the letter's id cannot be read", id=exact) from cause


def timer_value(timer: Timer) -> dict[str, Any]:
    """Return a timer as the value of its letter, which is plain JSON."""
    return {**timer._asdict(), "domain": timer.domain.value}


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
