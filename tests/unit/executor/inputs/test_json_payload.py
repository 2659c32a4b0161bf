from __future__ import annotations

import sys
from typing import Any

import pytest

import millpond as mp

_SCHEMA = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "$id": "shop:payment",
    "type": "object",
    "required": ["card"],
    "$defs": {"line": {"properties": {"sku": {"type": "string", "minLength": 1}}}},
    "properties": {
        "lines": {"type": "array", "items": {"$ref": "#/$defs/line"}},
        "at": {"type": "string", "format": "date-time"},
        "kind": {"enum": ["buy", "refund"]},
    },
}


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (
            b'{"card":1,"lines":[{"sku":"a"},{"sku":""}]}',
            'field=`lines[1].sku` reason=`"" is shorter than 1 character`',
        ),
        (b'{"card":1,"at":"yesterday"}', 'field=`at` reason=`"yesterday" is not a "date-time"`'),
        (b'{"card":1,"kind":"gift"}', "field=`kind` reason="),
        (b"{}", 'schema=`shop:payment` reason=`"card" is a required property`'),
        (b'{"card":1} {"card":2}', "reason=`it is not JSON:"),
        (b'{"card":NaN}', "reason=`it is not JSON:"),
        (b'{"card":"\xff"}', "reason=`it is not JSON:"),
        (b"", "reason=`it is not JSON:"),
    ],
)
def test_error_names_schema_path_and_reason(payload: bytes, reason: str) -> None:
    with pytest.raises(mp.InvalidError) as refused:
        mp.JsonPayload(_SCHEMA).decode(payload)

    assert reason in str(refused.value)


def test_values_keep_the_types_of_json() -> None:
    """A format such as `date-time` validates the text and leaves it text."""
    payload = mp.JsonPayload(_SCHEMA)

    assert payload.decode(b'{"card":1,"at":"2026-11-23T17:00:00Z","more":[1.5,null,true]}') == {
        "card": 1,
        "at": "2026-11-23T17:00:00Z",
        "more": [1.5, None, True],
    }
    assert repr(payload) == "JsonPayload('shop:payment', column='value')"
    assert payload.fields() is None


def test_value_must_be_an_object() -> None:
    """A list has no fields, even if it matches the schema."""
    with pytest.raises(mp.InvalidError, match="it must be an object with fields, got list"):
        mp.JsonPayload({"type": "array"}).decode(b"[]")


def test_fields_are_known_for_a_closed_schema() -> None:
    closed = {"type": "object", "properties": {"a": {}, "b": {}}, "additionalProperties": False}

    assert mp.JsonPayload(closed).fields() == ["a", "b"]
    assert mp.JsonPayload({**closed, "patternProperties": {"^x": {}}}).fields() is None


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "nothing"}, "the JSON Schema is invalid"),
        ({"$ref": "#/$defs/gone"}, "the JSON Schema is invalid"),
        ({"$ref": "http://schemas.invalid/payment"}, "the JSON Schema is invalid"),
        ([1], "the JSON Schema is invalid"),
    ],
)
def test_invalid_schema_is_refused_when_declared(schema: Any, reason: str) -> None:
    """A remote reference is not fetched."""
    with pytest.raises(mp.InvalidError, match=reason):
        mp.JsonPayload(schema)


def test_missing_package_is_named_with_its_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jsonschema_rs", None)

    with pytest.raises(mp.InvalidError, match=r"pip install 'millpond\[json-schema\]'"):
        mp.JsonPayload({})
