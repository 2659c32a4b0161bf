"""Thrift's compact protocol, as far as Parquet's metadata needs it: structs as their numbered fields.

It does not know what fields mean. Maps, sets and floating-point numbers do not occur in what is read with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Any, Final, TypeAlias


class FieldType(IntEnum):
    """What a field is, in the protocol's own numbers."""

    TRUE = 1
    FALSE = 2
    BYTE = 3
    I16 = 4
    I32 = 5
    I64 = 6
    DOUBLE = 7
    BINARY = 8
    LIST = 9
    STRUCT = 12


Field: TypeAlias = tuple[int, FieldType, Any]
"""
Number, type and value of a field to be written. A list's value is the type of its elements and the elements; a struct's
is its fields, in the order of their numbers; one that is given as bytes is written as it is.
"""

_INTEGERS: Final = frozenset({FieldType.I16, FieldType.I32, FieldType.I64})
_LONG_LIST: Final = 15
_DOUBLE_BYTES: Final = 8


def read_struct(data: memoryview | bytes, start: int) -> tuple[dict[int, Any], int]:
    """The fields of a struct by their numbers, and where it ends.

    A list is a list of its elements, a struct a dict like this one.

    Raises:
        IndexError: the data end within it.
        ValueError: the data are no such struct.

    Example:
        >>> read_struct(write_struct([(1, FieldType.I32, -5), (3, FieldType.BINARY, b"key")]), 0)
        ({1: -5, 3: b'key'}, 8)
    """
    fields: dict[int, Any] = {}
    number, at = 0, start
    while True:
        head = data[at]
        at += 1
        if head == 0:
            return fields, at
        step = head >> 4
        if step:
            number += step
        else:
            raw, at = _read_varint(data, at)
            number = _unzigzag(raw)
        fields[number], at = _read_value(data, at, head & 15)


def _read_value(data: memoryview | bytes, at: int, kind: int) -> tuple[Any, int]:
    if kind in _INTEGERS:
        raw, at = _read_varint(data, at)
        return _unzigzag(raw), at
    if kind == FieldType.STRUCT:
        return read_struct(data, at)
    if kind == FieldType.BINARY:
        size, at = _read_varint(data, at)
        return bytes(data[at : at + size]), at + size
    if kind == FieldType.LIST:
        return read_list(data, at)
    if kind in {FieldType.TRUE, FieldType.FALSE}:
        return kind == FieldType.TRUE, at
    if kind == FieldType.BYTE:
        return data[at], at + 1
    if kind == FieldType.DOUBLE:
        return bytes(data[at : at + _DOUBLE_BYTES]), at + _DOUBLE_BYTES
    raise ValueError(f"a field of Thrift's type {kind}")


def read_list(data: memoryview | bytes, at: int) -> tuple[list[Any], int]:
    """The elements of a list, and where it ends.

    Raises:
        IndexError: the data end within it.
        ValueError: the data are no such list.
    """
    head = data[at]
    at += 1
    size, kind = head >> 4, head & 15
    if size == _LONG_LIST:
        size, at = _read_varint(data, at)
    if size > len(data):
        raise ValueError("a list longer than the data")
    elements = []
    for _ in range(size):
        if kind in {FieldType.TRUE, FieldType.FALSE}:
            element, at = data[at] == FieldType.TRUE, at + 1
        else:
            element, at = _read_value(data, at, kind)
        elements.append(element)
    return elements, at


def _read_varint(data: memoryview | bytes, at: int) -> tuple[int, int]:
    number = shift = 0
    while True:
        part = data[at]
        at += 1
        number |= (part & 0x7F) << shift
        if part < 0x80:
            return number, at
        shift += 7


def _unzigzag(number: int) -> int:
    return (number >> 1) ^ -(number & 1)


def write_struct(fields: Sequence[Field], before: int = 0) -> bytes:
    """A struct of these fields, whose numbers rise.

    Args:
        fields: the fields.
        before: the number of the field before them, where they continue a struct whose end was cut off.
    """
    out = bytearray()
    _write_struct(out, fields, before)
    return bytes(out)


def _write_struct(out: bytearray, fields: Sequence[Field], before: int = 0) -> None:
    for number, kind, value in fields:
        step = number - before
        if not 0 < step < 16:
            raise ValueError(f"field {number} comes after field {before}")
        out.append(step << 4 | kind)
        _write_value(out, kind, value)
        before = number
    out.append(0)


def _write_value(out: bytearray, kind: FieldType, value: Any) -> None:
    if isinstance(value, bytes) and kind is not FieldType.BINARY:
        out += value
    elif kind in _INTEGERS:
        _write_varint(out, (value << 1) ^ (value >> 63))
    elif kind is FieldType.BINARY:
        _write_varint(out, len(value))
        out += value
    elif kind is FieldType.LIST:
        element_kind, elements = value
        if len(elements) < _LONG_LIST:
            out.append(len(elements) << 4 | element_kind)
        else:
            out.append(_LONG_LIST << 4 | element_kind)
            _write_varint(out, len(elements))
        for element in elements:
            _write_value(out, element_kind, element)
    elif kind is FieldType.STRUCT:
        _write_struct(out, value)
    else:
        raise ValueError(f"fields of type {kind.name} are not written")


def _write_varint(out: bytearray, number: int) -> None:
    while number >= 0x80:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
