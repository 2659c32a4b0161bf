"""Values of generated schemas, encoded by the libraries' own writers."""

from __future__ import annotations

import datetime as dt
import pickle
from decimal import Decimal
from typing import Any, Final

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

import millpond as mp
from tests.payloads import (
    avro_bytes,
    confluent,
    descriptor_set,
    message_bytes,
    single_object,
)

_TEXT: Final = st.text(st.characters(codec="utf-8"), max_size=8)
_LONG: Final = st.integers(-(2**63), 2**63 - 1)
_INT: Final = st.integers(-(2**31), 2**31 - 1)
_FLOAT: Final = st.floats(allow_nan=False)
_TIMES: Final = st.datetimes(timezones=st.just(dt.UTC))

_SIMPLE: Final[list[tuple[Any, st.SearchStrategy[Any]]]] = [
    ("null", st.none()),
    ("boolean", st.booleans()),
    ("int", _INT),
    ("long", _LONG),
    ("float", st.floats(width=32, allow_nan=False)),
    ("double", _FLOAT),
    ("bytes", st.binary(max_size=6)),
    ("string", _TEXT),
    ({"type": "string", "logicalType": "uuid"}, st.uuids().map(str)),
    ({"type": "int", "logicalType": "date"}, st.dates()),
    ({"type": "long", "logicalType": "timestamp-micros"}, _TIMES),
    (
        {"type": "long", "logicalType": "timestamp-millis"},
        _TIMES.map(lambda at: at.replace(microsecond=at.microsecond // 1_000 * 1_000)),
    ),
    ({"type": "long", "logicalType": "local-timestamp-micros"}, st.datetimes()),
    ({"type": "long", "logicalType": "time-micros"}, st.times()),
    (
        {"type": "bytes", "logicalType": "decimal", "precision": 12, "scale": 2},
        st.integers(-(10**12) + 1, 10**12 - 1).map(lambda cents: Decimal(cents).scaleb(-2)),
    ),
]


class _Names:
    """Names unique within the schema."""

    def __init__(self) -> None:
        self._count = 0

    def next(self, kind: str) -> str:
        self._count += 1
        return f"{kind}{self._count}"


@st.composite
def _avro(draw: st.DrawFn, names: _Names, depth: int) -> tuple[Any, Any]:
    """Return a type, and a value of the type."""
    kind = draw(st.integers(0, 9 if depth else 5))
    if kind < 5:
        schema, values = draw(st.sampled_from(_SIMPLE))
        return schema, draw(values)
    if kind == 5:
        symbols = draw(st.lists(st.sampled_from("ABCDE"), min_size=1, unique=True))
        return {"type": "enum", "name": names.next("E"), "symbols": symbols}, draw(st.sampled_from(symbols))
    inner, value = draw(_avro(names, depth - 1))
    if kind == 6:
        return {"type": "array", "items": inner}, draw(st.lists(st.just(value), max_size=3))
    if kind == 7:
        return {"type": "map", "values": inner}, draw(st.dictionaries(_TEXT, st.just(value), max_size=3))
    if kind == 8 and inner != "null" and not isinstance(inner, list):
        return ["null", inner], draw(st.sampled_from([None, value]))
    return draw(_record(names, depth - 1))


@st.composite
def _record(draw: st.DrawFn, names: _Names, depth: int) -> tuple[dict[str, Any], dict[str, Any]]:
    parts = {f"f{place}": draw(_avro(names, depth)) for place in range(draw(st.integers(1, 4)))}
    fields = [{"name": name, "type": schema} for name, (schema, _) in parts.items()]
    value = {name: part for name, (_, part) in parts.items()}
    return {"type": "record", "name": names.next("R"), "fields": fields}, value


@st.composite
def _records(draw: st.DrawFn) -> tuple[dict[str, Any], dict[str, Any]]:
    return draw(_record(_Names(), 3))


@given(written=_records())
def test_avro_payload_is_decoded(written: tuple[dict[str, Any], dict[str, Any]]) -> None:
    """The schema is known from the payload, a single object, a number or a declaration."""
    schema, value = written
    plain = mp.AvroPayload(schema)
    looked_up = mp.AvroPayload(schema, framing="confluent", schemas={5: schema})
    encoded = avro_bytes(schema, value)

    assert plain.decode(encoded) == value
    assert pickle.loads(pickle.dumps(plain)).decode(encoded) == value
    assert looked_up.decode(confluent(5, encoded)) == value
    assert mp.AvroPayload(schema, framing="single_object").decode(single_object(schema, value)) == value


@given(written=_records(), data=st.data())
def test_incomplete_avro_payload_is_refused(
    written: tuple[dict[str, Any], dict[str, Any]], data: st.DataObject
) -> None:
    """A payload with bytes behind its last field is refused too, with the schema's name."""
    schema, value = written
    encoded = avro_bytes(schema, value)
    payload = mp.AvroPayload(schema)
    cut = data.draw(st.integers(0, max(0, len(encoded) - 1)))

    for wrong in (encoded[:cut], encoded + b"\x00"):
        if wrong != encoded:
            with pytest.raises(mp.InvalidError, match=rf"does not fit its schema schema=`{schema['name']}`"):
                payload.decode(wrong)


@given(written=_records(), data=st.data())
def test_readers_schema_selects_the_fields(
    written: tuple[dict[str, Any], dict[str, Any]], data: st.DataObject
) -> None:
    """New fields have defaults."""
    schema, value = written
    kept = data.draw(st.sets(st.sampled_from([field["name"] for field in schema["fields"]])))
    fields = [field for field in schema["fields"] if field["name"] in kept]
    new = [
        {"name": "raw", "type": "bytes", "default": "\u00ff"},
        {"name": "day", "type": {"type": "int", "logicalType": "date"}, "default": 1},
        {"name": "note", "type": ["null", "string"], "default": None},
    ]
    reader = mp.AvroPayload({**schema, "fields": [*new, *fields]}, writer=schema)

    assert reader.decode(avro_bytes(schema, value)) == {
        "raw": b"\xff",
        "day": dt.date(1970, 1, 2),
        "note": None,
        **{name: part for name, part in value.items() if name in kept},
    }


@given(payload=st.binary(max_size=40), written=_records())
def test_any_bytes_are_decoded_or_refused(
    payload: bytes, written: tuple[dict[str, Any], dict[str, Any]]
) -> None:
    kinds = [mp.AvroPayload(written[0]), mp.ProtobufPayload(_DESCRIPTORS, "all.Kinds"), mp.JsonPayload({})]
    for kind in kinds:
        try:
            value = kind.decode(payload)
        except mp.InvalidError:
            continue
        assert isinstance(value, dict)


_PROTO_KINDS: Final[dict[str, tuple[st.SearchStrategy[Any], Any]]] = {
    "TYPE_INT32": (_INT, 0),
    "TYPE_INT64": (_LONG, 0),
    "TYPE_UINT64": (st.integers(0, 2**64 - 1), 0),
    "TYPE_SINT32": (_INT, 0),
    "TYPE_FIXED64": (st.integers(0, 2**64 - 1), 0),
    "TYPE_SFIXED32": (_INT, 0),
    "TYPE_BOOL": (st.booleans(), False),
    "TYPE_DOUBLE": (_FLOAT, 0.0),
    "TYPE_FLOAT": (st.floats(width=32, allow_nan=False), 0.0),
    "TYPE_STRING": (_TEXT, ""),
    "TYPE_BYTES": (st.binary(max_size=6), b""),
}


def _all_kinds() -> str:
    fields = []
    for place, kind in enumerate(_PROTO_KINDS, start=1):
        for name, number, label in (("one", place, "OPTIONAL"), ("many", place + 20, "REPEATED")):
            fields.append(
                f'field {{ name: "{name}_{kind}" number: {number} type: {kind} label: LABEL_{label} }}'
            )
        fields.append(
            f'field {{ name: "maybe_{kind}" number: {place + 40} type: {kind} label: LABEL_OPTIONAL '
            f"proto3_optional: true oneof_index: {place - 1} }}"
        )
    optional = "".join(f'oneof_decl {{ name: "_maybe_{kind}" }}' for kind in _PROTO_KINDS)
    within = (
        'field { name: "within" number: 99 type: TYPE_MESSAGE type_name: ".all.Kinds" label: LABEL_OPTIONAL }'
    )
    return (
        'name: "all.proto" package: "all" syntax: "proto3" '
        f'message_type {{ name: "Kinds" {" ".join(fields)} {within} {optional} }}'
    )


_DESCRIPTORS: Final = descriptor_set(_all_kinds())


@st.composite
def _messages(draw: st.DrawFn, depth: int = 1) -> dict[str, Any]:
    """Return the set fields of a message."""
    value: dict[str, Any] = {}
    for kind, (values, _) in _PROTO_KINDS.items():
        for name, strategy in (("one", values), ("many", st.lists(values, max_size=3)), ("maybe", values)):
            if draw(st.booleans()):
                value[f"{name}_{kind}"] = draw(strategy)
    if depth and draw(st.booleans()):
        value["within"] = draw(_messages(depth=0))
    return value


def _expected(fields: dict[str, Any]) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for kind, (_, default) in _PROTO_KINDS.items():
        for name, unset in (("one", default), ("many", []), ("maybe", None)):
            value[f"{name}_{kind}"] = fields.get(f"{name}_{kind}", unset)
    value["within"] = _expected(fields["within"]) if "within" in fields else None
    return value


@given(fields=_messages())
def test_protobuf_payload_is_decoded(fields: dict[str, Any]) -> None:
    """Unset fields have their default, or None."""
    payload = mp.ProtobufPayload(_DESCRIPTORS, "all.Kinds")
    encoded = message_bytes(_DESCRIPTORS, "all.Kinds", fields)

    assert payload.decode(encoded) == _expected(fields)
    assert pickle.loads(pickle.dumps(payload)).decode(encoded) == _expected(fields)


_JSON: Final = st.recursive(
    st.none() | st.booleans() | _LONG | st.floats(allow_nan=False, allow_infinity=False) | _TEXT,
    lambda parts: st.lists(parts, max_size=3) | st.dictionaries(_TEXT, parts, max_size=3),
    max_leaves=8,
)


@given(value=st.dictionaries(_TEXT, _JSON, max_size=4))
def test_json_payload_is_decoded(value: dict[str, Any]) -> None:
    assert mp.JsonPayload({"type": "object"}).decode(orjson.dumps(value)) == value
