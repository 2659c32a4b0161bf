from __future__ import annotations

import datetime as dt
from decimal import Decimal
from typing import Any

import orjson
import pytest

import millpond as mp
from millpond.executor.inputs.avro_payload import parsed_schema, sub_schema

_POINT = {
    "type": "record",
    "name": "Point",
    "fields": [
        {"name": "x", "type": "double", "default": 1},
        {"name": "raw", "type": "bytes", "default": "\u0001"},
    ],
}


def _record(*fields: tuple[str, Any, Any]) -> dict[str, Any]:
    named = [{"name": name, "type": kind, "default": default} for name, kind, default in fields]
    return parsed_schema(
        orjson.dumps({"type": "record", "name": "R", "fields": named}).decode(), "the schema"
    )


@pytest.mark.parametrize(
    ("kind", "default", "value"),
    [
        ("bytes", "\u00ff", b"\xff"),
        ({"type": "fixed", "name": "F", "size": 2}, "ab", b"ab"),
        ("double", 1, 1.0),
        ("string", "é", "é"),
        (["null", "bytes"], None, None),
        (["bytes", "null"], "a", b"a"),
        ({"type": "array", "items": "bytes"}, ["a"], [b"a"]),
        ({"type": "map", "values": "bytes"}, {"k": "a"}, {"k": b"a"}),
        ({"type": "enum", "name": "E", "symbols": ["A"]}, "A", "A"),
        ({"type": "int", "logicalType": "date"}, 1, dt.date(1970, 1, 2)),
        (
            {"type": "long", "logicalType": "timestamp-millis"},
            1_000,
            dt.datetime(1970, 1, 1, 0, 0, 1, tzinfo=dt.UTC),
        ),
        ({"type": "bytes", "logicalType": "decimal", "precision": 4, "scale": 2}, "\u0096", Decimal("-1.06")),
        ({"type": "string", "logicalType": "uuid"}, "u", "u"),
        (_POINT, {"x": 2}, {"x": 2.0, "raw": b"\x01"}),
        ({"type": "array", "items": _POINT}, [{}], [{"x": 1.0, "raw": b"\x01"}]),
    ],
    ids=str,
)
def test_defaults_have_the_types_of_decoded_values(kind: Any, default: Any, value: Any) -> None:
    """In a schema a default is JSON, for example text for bytes."""
    (field,) = _record(("f", kind, default))["fields"]

    assert (field["default"], type(field["default"])) == (value, type(value))


def test_repeated_and_recursive_types_keep_their_defaults() -> None:
    node = {
        "type": "record",
        "name": "Node",
        "fields": [
            {"name": "raw", "type": "bytes", "default": "a"},
            {"name": "next", "type": ["null", "Node"]},
        ],
    }
    text = orjson.dumps(
        {
            "type": "record",
            "name": "R",
            "fields": [{"name": "a", "type": node}, {"name": "b", "type": "Node"}],
        }
    ).decode()
    parsed = parsed_schema(text, "the schema")

    part = sub_schema("Node", parsed)

    assert part["fields"][0]["default"] == b"a"
    assert sub_schema("long", parsed) == "long"
    assert mp.AvroPayload(text).decode(b"\x02x\x00\x02y\x00") == {
        "a": {"raw": b"x", "next": None},
        "b": {"raw": b"y", "next": None},
    }


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"type":"record","name":"R"}', "must describe a record"),
        ('{"type":"record","name":"R","fields":[{"name":"a","type":"nothing"}]}', "is not an Avro schema"),
        ("5", "is not an Avro schema"),
        ('"string"', "must describe a record"),
        ('["null","string"]', "must describe a record"),
    ],
)
def test_malformed_and_fieldless_schemas_are_refused(text: str, reason: str) -> None:
    with pytest.raises(mp.InvalidError, match=f"the schema {reason}"):
        parsed_schema(text, "the schema")
