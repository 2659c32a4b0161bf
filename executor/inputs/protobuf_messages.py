"""Protobuf messages: their types from descriptor sets, and ``dict`` values of their fields.

Only `ProtobufPayload` imports this module, and late, because the package ``protobuf`` is optional.

The reader of each field is chosen once per type. Protobuf's own conversion to JSON turns numbers and bytes
into text, so it is not used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from datetime import datetime, timedelta
from graphlib import CycleError, TopologicalSorter
from operator import attrgetter
from typing import Any, Final

from google.protobuf import (
    any_pb2,
    descriptor_pb2,
    descriptor_pool,
    duration_pb2,
    empty_pb2,
    field_mask_pb2,
    struct_pb2,
    timestamp_pb2,
    wrappers_pb2,
)
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass
from google.protobuf.unknown_fields import UnknownFieldSet

from millpond.executor.inputs.payload import misfit
from millpond.executor.time.instants import EPOCH
from millpond.statestore.errors import InvalidError

_SHIPPED: Final = {
    module.DESCRIPTOR.name: module.DESCRIPTOR.serialized_pb
    for module in (
        any_pb2,
        descriptor_pb2,
        duration_pb2,
        empty_pb2,
        field_mask_pb2,
        struct_pb2,
        timestamp_pb2,
        wrappers_pb2,
    )
}
"""Files that Protobuf itself ships; a descriptor set may leave them out."""


def message_type(descriptor_set: bytes, name: str) -> Any:
    """Return the descriptor of a type, in a separate pool, so that two versions of a type do not meet."""
    try:
        listed = descriptor_pb2.FileDescriptorSet.FromString(descriptor_set).file
    except DecodeError as cause:
        raise InvalidError(
            "descriptor_set must be a descriptor set: make it with protoc --include_imports --descriptor_set_out=FILE",
            reason=cause,
        ) from cause
    files = {file.name: file for file in listed}
    pool = descriptor_pool.DescriptorPool()
    try:
        # Each file comes after its imports, the files that Protobuf ships first.
        wanted = [*TopologicalSorter({name: file.dependency for name, file in files.items()}).static_order()]
        for file in wanted:
            if file in _SHIPPED and file not in files:
                pool.AddSerializedFile(_SHIPPED[file])
        for file in wanted:
            if file in files:
                pool.AddSerializedFile(files[file].SerializeToString())
    except (TypeError, CycleError) as cause:
        raise InvalidError(
            "the descriptor set is not complete: make it with protoc --include_imports", reason=cause
        ) from cause
    try:
        return pool.FindMessageTypeByName(name)
    except KeyError as cause:
        known = [
            f"{file.package}.{message.name}".removeprefix(".")
            for file in files.values()
            for message in file.message_type
        ]
        raise InvalidError(
            "the descriptor set has no such message: use its full name, with the package",
            type=name,
            types=known,
        ) from cause


_VARINT: Final = 0
_FIXED_64: Final = 1
PACKED: Final = 2
"""The wire type of every value with a length: text, bytes, messages, and repeated numbers."""

_GROUP: Final = 3
_FIXED_32: Final = 5
_VARINT_BYTES_MAX: Final = 10
_DEPTH_MAX: Final = 100
# A microsecond each: a thousand payloads of a megabyte may consist of nothing else.
_SEARCHED_FIELDS_MAX: Final = 10_000

EXPECTED_WIRE_TYPES: Final = {
    **dict.fromkeys(range(1, 19), _VARINT),
    **dict.fromkeys(
        (FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FIXED64, FieldDescriptor.TYPE_SFIXED64), _FIXED_64
    ),
    **dict.fromkeys(
        (FieldDescriptor.TYPE_FLOAT, FieldDescriptor.TYPE_FIXED32, FieldDescriptor.TYPE_SFIXED32), _FIXED_32
    ),
    **dict.fromkeys(
        (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES, FieldDescriptor.TYPE_MESSAGE), PACKED
    ),
    FieldDescriptor.TYPE_GROUP: _GROUP,
}
"""Wire type of each field type."""


def first_failure(payload: bytes, descriptor: Any) -> tuple[str, str]:
    """Return the path of a message's first unreadable part, and the reason; both empty if it is not found among many fields."""
    return _first_failure(payload, descriptor, "", _DEPTH_MAX, iter(range(_SEARCHED_FIELDS_MAX)))


def _first_failure(
    payload: bytes, descriptor: Any, path: str, depth: int, searched: Iterator[int]
) -> tuple[str, str]:
    at = 0
    while at < len(payload) and next(searched, None) is not None:
        tag, after = read_varint(payload, at)
        if after is None:
            return path, "the payload ends within a field's tag"
        number, wire = tag >> 3, tag & 7
        field = descriptor.fields_by_number.get(number)
        here = f"{path}.{field.name if field is not None else number}".removeprefix(".")
        begin, end = _extent(payload, after, wire)
        if begin is None:
            return here, f"there is no wire type {wire}"
        if end is None or end > len(payload):
            return here, "the payload ends within it"
        if wire == PACKED and field is not None and depth:
            part = payload[begin:end]
            if field.type == FieldDescriptor.TYPE_MESSAGE:
                found = _first_failure(part, field.message_type, here, depth - 1, searched)
                if found[1]:
                    return found
            if field.type == FieldDescriptor.TYPE_STRING:
                try:
                    part.decode()
                except UnicodeDecodeError as error:
                    return here, f"it is not UTF-8: {error.reason}"
        at = end
    return "", ""


def _extent(payload: bytes, at: int, wire: int) -> tuple[int | None, int | None]:
    """Return begin and end of a field's value; no begin: unknown wire type, no end: its length is cut."""
    if wire == _VARINT:
        return at, read_varint(payload, at)[1]
    if wire == _FIXED_64:
        return at, at + 8
    if wire == _FIXED_32:
        return at, at + 4
    if wire in {_GROUP, _GROUP + 1}:
        # A group is two tags without a value, with its fields between them.
        return at, at
    if wire == PACKED:
        length, after = read_varint(payload, at)
        return (at, None) if after is None else (after, after + length)
    return None, None


def read_varint(payload: bytes, at: int) -> tuple[int, int | None]:
    """Return the number at a position and the position after it; ``None`` if the payload ends within."""
    number = 0
    for place in range(min(_VARINT_BYTES_MAX, len(payload) - at)):
        byte = payload[at + place]
        number |= (byte & 0x7F) << (7 * place)
        if byte < 0x80:
            return number, at + place + 1
    return number, None


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
    """Return the conversion of a message; a recursive type finds its own conversion in ``known``."""
    name = descriptor.full_name
    if name in known:
        return known[name]
    if name in _SPECIAL:
        return _SPECIAL[name]
    # A recursive field must reach `made`, which is defined only below.
    known[name] = lambda message: made(message)  # noqa: PLW0108
    fields = [(field.name, _of_field(field, known)) for field in descriptor.fields]
    expected = {field.number: field for field in descriptor.fields}

    def made(message: Any) -> dict[str, Any]:
        # The parser keeps a value of the wrong wire type as an unknown field, and the field itself unset.
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


def _time(message: Any) -> datetime:
    try:
        return EPOCH + timedelta(seconds=message.seconds, microseconds=message.nanos // 1_000)
    except OverflowError as error:
        raise _UnfitError(f"outside the calendar: {message.seconds} seconds since 1970") from error


def _duration(message: Any) -> timedelta:
    try:
        # Seconds and nanos share the duration's sign; int() rounds the nanoseconds towards zero.
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
    **{f"google.protobuf.{kind}Value": attrgetter("value") for kind in _WRAPPED},
}
