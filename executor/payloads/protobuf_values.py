"""Values of Protobuf messages: what parses one, and what makes a ``dict`` of its fields.

How each field is read is settled once, for the type. Protobuf's own way to JSON makes text of numbers and of bytes, so it
is not used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from operator import attrgetter
from typing import Any, Final

from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass
from google.protobuf.unknown_fields import UnknownFieldSet

from millpond.executor.payloads.payload import misfit
from millpond.executor.payloads.protobuf_wire import EXPECTED_WIRE_TYPES, PACKED, first_failure

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_WRAPPED: Final = ("Double", "Float", "Int64", "UInt64", "Int32", "UInt32", "Bool", "String", "Bytes")

_Convert = Callable[[Any], Any]


class _UnfitError(Exception):
    """A part of a message has no value; its path grows on the way out."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.path: str = ""

    def within(self, part: str) -> _UnfitError:
        self.path = f"{part}{self.path if self.path.startswith('[') or not self.path else '.' + self.path}"
        return self


def reader_of(descriptor: Any) -> Callable[[bytes], dict[str, Any]]:
    """What reads messages of a type.

    Args:
        descriptor: the type.
    """
    kind, name = GetMessageClass(descriptor), descriptor.full_name
    convert = _of_message(descriptor, {})

    def read(payload: bytes) -> dict[str, Any]:
        message = kind()
        try:
            message.ParseFromString(payload)
        except DecodeError as error:
            field, reason = first_failure(payload, descriptor)
            raise misfit(name, reason or error, field) from error
        if not message.IsInitialized():
            missing = message.FindInitializationErrors()
            raise misfit(name, "required fields are missing", ", ".join(missing))
        try:
            value: dict[str, Any] = convert(message)
        except _UnfitError as error:
            raise misfit(name, error, error.path) from error
        return value

    return read


def _of_message(descriptor: Any, known: dict[str, _Convert]) -> _Convert:
    """What makes a value of a message; a type that has itself as a part finds what is being made in ``known``."""
    name = descriptor.full_name
    if name in known:
        return known[name]
    if name in _SPECIAL:
        return _SPECIAL[name]
    # Not its name: it is made below.
    known[name] = lambda message: made(message)  # noqa: PLW0108
    fields = [(field.name, _of_field(field, known)) for field in descriptor.fields]
    expected = {field.number: field for field in descriptor.fields}

    def made(message: Any) -> dict[str, Any]:
        # The parser has put aside what it could not read as the type of its field.
        if unread := UnknownFieldSet(message):
            _check_unread(unread, expected)
        value = {}
        for field, read in fields:
            try:
                value[field] = read(message)
            except _UnfitError as error:
                raise error.within(field) from error
        return value

    known[name] = made
    return made


def _check_unread(unread: Any, expected: Mapping[int, Any]) -> None:
    for part in unread:
        field = expected.get(part.field_number)
        if field is None:
            continue
        wanted = EXPECTED_WIRE_TYPES[field.type]
        if part.wire_type != wanted and not (_is_repeated(field) and part.wire_type == PACKED):
            raise _UnfitError(
                f"it was written as another type: wire type {part.wire_type} instead of {wanted}"
            ).within(field.name)


def _is_repeated(field: Any) -> bool:
    return bool(field.is_repeated)


def _of_field(field: Any, known: dict[str, _Convert]) -> _Convert:
    """What reads a field of a message."""
    name, get = field.name, attrgetter(field.name)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        convert = _of_value(field.message_type.fields_by_name["value"], known)
        return lambda message: {key: _inner(convert, part, key) for key, part in get(message).items()}
    convert = _of_value(field, known)
    if _is_repeated(field):
        if convert is _same:
            return lambda message: [*get(message)]
        return lambda message: [_inner(convert, part, place) for place, part in enumerate(get(message))]
    if not field.has_presence or (field.has_default_value and field.message_type is None):
        return get if convert is _same else lambda message: convert(get(message))
    return lambda message: convert(get(message)) if message.HasField(name) else None


def _inner(convert: _Convert, part: Any, place: object) -> Any:
    try:
        return convert(part)
    except _UnfitError as error:
        raise error.within(f"[{place}]") from error


def _of_value(field: Any, known: dict[str, _Convert]) -> _Convert:
    if field.message_type is not None:
        return _of_message(field.message_type, known)
    if field.enum_type is not None:
        names = {value.number: value.name for value in reversed(field.enum_type.values)}
        return lambda number: names.get(number, number)
    return _same


def _same(value: Any) -> Any:
    return value


def _wrapped(message: Any) -> Any:
    return message.value


def _time(message: Any) -> datetime:
    try:
        return _EPOCH + timedelta(seconds=message.seconds, microseconds=message.nanos // 1_000)
    except OverflowError as error:
        raise _UnfitError(f"no time of the calendar: {message.seconds} seconds since 1970") from error


def _duration(message: Any) -> timedelta:
    try:
        # Both have the sign of the duration, and nanoseconds go towards zero.
        return timedelta(seconds=message.seconds, microseconds=int(message.nanos / 1_000))
    except OverflowError as error:
        raise _UnfitError(f"too long: {message.seconds} seconds") from error


def _struct(message: Any) -> dict[str, Any]:
    return {name: _json_value(part) for name, part in message.fields.items()}


def _list_value(message: Any) -> list[Any]:
    return [_json_value(part) for part in message.values]


def _json_value(message: Message) -> Any:
    kind = message.WhichOneof("kind")
    if kind is None or kind == "null_value":
        return None
    part = getattr(message, kind)
    if kind == "struct_value":
        return _struct(part)
    return _list_value(part) if kind == "list_value" else part


_SPECIAL: Final[Mapping[str, _Convert]] = {
    "google.protobuf.Timestamp": _time,
    "google.protobuf.Duration": _duration,
    "google.protobuf.Struct": _struct,
    "google.protobuf.ListValue": _list_value,
    "google.protobuf.Value": _json_value,
    **{f"google.protobuf.{kind}Value": _wrapped for kind in _WRAPPED},
}
