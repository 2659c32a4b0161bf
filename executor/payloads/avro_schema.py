"""Avro schemas, parsed: what a user gave, ready for the library, with the values that defaults stand for.

The library gives a field that the writer did not have its default as it stands in JSON. There bytes are text, and a
time is a number; so each default is replaced by the value that the same bytes would have been decoded to.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final, cast

import orjson

from millpond.statestore.errors import InvalidError

_NAMED: Final = "__named_schemas"
_PARSED: Final = "__fastavro_parsed"
_TEXT_OF_BYTES: Final = frozenset({"bytes", "fixed"})


def parsed_schema(text: str, what: str) -> dict[str, Any]:
    """The schema of a record, parsed.

    Args:
        text: the schema in JSON.
        what: what it is, for the error.

    Raises:
        InvalidError: it is no Avro schema, or not that of a record.
    """
    import fastavro

    given = orjson.loads(text)
    try:
        parsed = cast(dict[str, Any], fastavro.parse_schema(_without_uuids(given)))
    except Exception as cause:
        # Of a malformed schema the library raises what its code meets: KeyError, TypeError and more.
        raise InvalidError(f"{what} is no Avro schema", reason=f"{type(cause).__name__}: {cause}") from cause
    if not isinstance(given, dict) or given.get("type") != "record" or "fields" not in given:
        raise InvalidError(f"{what} is not that of a record, so its values have no fields", schema=text[:200])
    _make_defaults(parsed)
    return parsed


def sub_schema(schema: Any, whole: Mapping[str, Any]) -> Any:
    """A part of a parsed schema, which the library reads without parsing it again; a name as what it stands for.

    Args:
        schema: the part.
        whole: the parsed schema that it is in.
    """
    named = whole[_NAMED]
    if isinstance(schema, str) and schema in named:
        schema = named[schema]
    return {**schema, _PARSED: True, _NAMED: named} if isinstance(schema, dict) else schema


def _without_uuids(schema: Any) -> Any:
    """A schema whose UUIDs are the text that they are: neither JSON nor a dead letter has a word for more."""
    if isinstance(schema, list):
        return [_without_uuids(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    is_uuid = schema.get("logicalType") == "uuid"
    return {
        name: part if name == "default" else _without_uuids(part)
        for name, part in schema.items()
        if not (is_uuid and name == "logicalType")
    }


def _make_defaults(parsed: Mapping[str, Any]) -> None:
    named = parsed[_NAMED]
    fields = {id(field): field for root in (parsed, *named.values()) for field in _fields_in(root)}
    # All are made before any is replaced: one may hold another.
    made = [
        (field, _value_of(field["type"], field["default"], named))
        for field in fields.values()
        if "default" in field
    ]
    for field, value in made:
        field["default"] = value


def _fields_in(schema: Any) -> Iterator[dict[str, Any]]:
    if isinstance(schema, list):
        for branch in schema:
            yield from _fields_in(branch)
    elif isinstance(schema, dict):
        for field in schema.get("fields", ()):
            yield field
            yield from _fields_in(field["type"])
        for inner in ("items", "values", "type"):
            if not isinstance(schema.get(inner), str):
                yield from _fields_in(schema.get(inner))


def _value_of(schema: Any, default: Any, named: Mapping[str, Any]) -> Any:
    """The value that a default in JSON stands for."""
    if isinstance(schema, list):
        branch = next((one for one in schema if (one == "null") == (default is None)), schema[0])
        return _value_of(branch, default, named)
    if isinstance(schema, str):
        if schema in named:
            return _value_of(named[schema], default, named)
        return _primitive(schema, default)
    kind = schema["type"]
    if kind == "record":
        return {
            field["name"]: _value_of(field["type"], default.get(field["name"], field.get("default")), named)
            for field in schema["fields"]
        }
    if kind == "array":
        return [_value_of(schema["items"], item, named) for item in default]
    if kind == "map":
        return {name: _value_of(schema["values"], part, named) for name, part in default.items()}
    if not isinstance(kind, str):
        return _value_of(kind, default, named)
    return _logical(schema, _primitive(kind, default))


def _primitive(kind: str, default: Any) -> Any:
    if kind in _TEXT_OF_BYTES:
        return default.encode("iso-8859-1")
    return float(default) if kind in {"float", "double"} else default


def _logical(schema: dict[str, Any], plain: Any) -> Any:
    from fastavro.read import LOGICAL_READERS

    read = LOGICAL_READERS.get(f"{schema['type']}-{schema.get('logicalType')}")
    return plain if read is None else read(plain, schema, schema)
