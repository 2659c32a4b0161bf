"""Protobuf's wire format, as far as it takes to say which field of a broken message cannot be read."""

from __future__ import annotations

from typing import Any, Final

from google.protobuf.descriptor import FieldDescriptor

_VARINT: Final = 0
_FIXED_64: Final = 1
PACKED: Final = 2
"""The wire type of everything that says its length: text, bytes, messages, and repeated numbers."""

_GROUP: Final = 3
_FIXED_32: Final = 5
_VARINT_BYTES_MAX: Final = 10
_DEPTH_MAX: Final = 100

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
"""How a field of each type is written."""


def first_failure(payload: bytes, descriptor: Any) -> tuple[str, str]:
    """The path of the first part of a message that cannot be read, and why; both empty if that is not found.

    Args:
        payload: the message.
        descriptor: its type.
    """
    return _failure_in(payload, descriptor, "", _DEPTH_MAX)


def _failure_in(payload: bytes, descriptor: Any, path: str, depth: int) -> tuple[str, str]:
    at = 0
    while at < len(payload):
        tag, after = _varint(payload, at)
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
            found = _failure_of(payload[begin:end], field, here, depth)
            if found[1]:
                return found
        at = end
    return "", ""


def _failure_of(part: bytes, field: Any, path: str, depth: int) -> tuple[str, str]:
    if field.type == FieldDescriptor.TYPE_MESSAGE:
        return _failure_in(part, field.message_type, path, depth - 1)
    if field.type == FieldDescriptor.TYPE_STRING:
        try:
            part.decode()
        except UnicodeDecodeError as error:
            return path, f"it is no UTF-8: {error.reason}"
    return "", ""


def _extent(payload: bytes, at: int, wire: int) -> tuple[int | None, int | None]:
    """Where the value of a field begins and ends; without a beginning if there is no such wire type, without an end if its
    length is cut.
    """
    if wire == _VARINT:
        return at, _varint(payload, at)[1]
    if wire == _FIXED_64:
        return at, at + 8
    if wire == _FIXED_32:
        return at, at + 4
    if wire in {_GROUP, _GROUP + 1}:
        # A group's fields follow one by one, between two tags without a value.
        return at, at
    if wire == PACKED:
        length, after = _varint(payload, at)
        return (at, None) if after is None else (after, after + length)
    return None, None


def _varint(payload: bytes, at: int) -> tuple[int, int | None]:
    number = 0
    for place in range(min(_VARINT_BYTES_MAX, len(payload) - at)):
        byte = payload[at + place]
        number |= (byte & 0x7F) << (7 * place)
        if byte < 0x80:
            return number, at + place + 1
    return number, None
