"""Conversion of Arrow schemas into Delta schema strings."""

from __future__ import annotations

from typing import Any, Final

import orjson
import pyarrow as pa

from millpond.statestore.errors import InvalidError

_SIMPLE: Final[dict[pa.DataType, str]] = {
    pa.string(): "string",
    pa.large_string(): "string",
    pa.binary(): "binary",
    pa.large_binary(): "binary",
    pa.bool_(): "boolean",
    pa.int8(): "byte",
    pa.int16(): "short",
    pa.int32(): "integer",
    pa.int64(): "long",
    pa.float32(): "float",
    pa.float64(): "double",
    pa.date32(): "date",
}


def delta_schema(schema: pa.Schema) -> str:
    """The schema string of Delta's metadata for an Arrow schema.

    Example:
        >>> delta_schema(pa.schema([pa.field("key", pa.string())]))
        '{"type":"struct","fields":[{"name":"key","type":"string","nullable":true,"metadata":{}}]}'

    Raises:
        InvalidError: the basic Delta protocol lacks a column's type.
    """
    return orjson.dumps(_struct(list(schema))).decode()


def _struct(fields: list[pa.Field]) -> dict[str, Any]:
    return {
        "type": "struct",
        "fields": [
            {
                "name": field.name,
                "type": _type(field.type, field.name),
                "nullable": field.nullable,
                "metadata": {},
            }
            for field in fields
        ],
    }


def _type(kind: pa.DataType, name: str) -> Any:
    if kind in _SIMPLE:
        return _SIMPLE[kind]
    if pa.types.is_timestamp(kind) and kind.tz is not None:
        return "timestamp"
    if pa.types.is_decimal128(kind):
        return f"decimal({kind.precision},{kind.scale})"
    if pa.types.is_struct(kind):
        return _struct(list(kind))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return {"type": "array", "elementType": _type(kind.value_type, name), "containsNull": True}
    if pa.types.is_map(kind):
        return {
            "type": "map",
            "keyType": _type(kind.key_type, name),
            "valueType": _type(kind.item_type, name),
            "valueContainsNull": True,
        }
    raise InvalidError("the basic Delta protocol lacks the column's type", column=name, type=kind)
