from __future__ import annotations

from typing import Any

import pytest

import millpond as mp
from millpond.statestore.errors import InvalidError
from tests.payloads import PAYMENT_AVRO, avro_bytes

_LINE = {
    "type": "record",
    "name": "Line",
    "fields": [{"name": "sku", "type": "string"}, {"name": "n", "type": "int"}],
}


def _of(*fields: tuple[str, Any]) -> dict[str, Any]:
    return {"type": "record", "name": "R", "fields": [{"name": name, "type": kind} for name, kind in fields]}


_NESTED = _of(
    ("lines", {"type": "array", "items": _LINE}),
    ("by_name", {"type": "map", "values": "Line"}),
    ("maybe", ["null", "Line", "string"]),
    ("kind", {"type": "enum", "name": "Kind", "symbols": ["A", "B"]}),
)
_VALUE = {
    "lines": [{"sku": "tea", "n": 1}, {"sku": "cup", "n": 2}],
    "by_name": {"first": {"sku": "pot", "n": 3}},
    "maybe": {"sku": "jar", "n": 4},
    "kind": "B",
}
_WHOLE = avro_bytes(_NESTED, _VALUE)


@pytest.mark.parametrize(
    ("payload", "field", "reason"),
    [
        (_WHOLE[: _WHOLE.index(b"cup")], "lines[1].sku", "the payload ends within it"),
        (_WHOLE[: _WHOLE.index(b"cup") + 3], "lines[1].n", "the payload ends within it"),
        (_WHOLE[: _WHOLE.index(b"pot") + 1], "by_name.first.sku", "the payload ends within it"),
        (_WHOLE[: _WHOLE.index(b"first") + 1], "by_name", "the payload ends within it"),
        (_WHOLE[: _WHOLE.index(b"jar") + 1], "maybe.sku", "the payload ends within it"),
        (_WHOLE[:-1], "kind", "the payload ends within it"),
        (_WHOLE[:-1] + b"\x08", "kind", "IndexError"),
        (
            _WHOLE.replace(b"\x02\x06jar", b"\x0a\x06jar"),
            "maybe",
            "IndexError: it says branch 5 of a union of 3",
        ),
        (_WHOLE.replace(b"cup", b"c\xffp"), "lines[1].sku", "UnicodeDecodeError"),
        (b"\x01\x04\x00", "lines[0].n", "the payload ends within it"),
        (b"", "lines", "the payload ends within it"),
        (_WHOLE + b"zz", None, "2 bytes are left after the last field"),
    ],
)
def test_error_names_the_innermost_unreadable_part(payload: bytes, field: str | None, reason: str) -> None:
    """The path leads through lists, maps and unions."""
    with pytest.raises(mp.InvalidError) as refused:
        mp.AvroPayload(_NESTED).decode(payload)

    assert refused.value.details.get("field") == field
    assert str(refused.value.details["reason"]).startswith(reason)
    assert refused.value.details["schema"] == "R"


_CHAIN: dict[str, Any] = {
    "type": "record",
    "name": "Link",
    "fields": [{"name": "next", "type": ["null", "Link"]}, {"name": "pad", "type": "bytes"}],
}


@pytest.mark.parametrize("depth", [1_000, 20_000, 1_000_000])
def test_payload_that_is_nested_deeply_is_refused(depth: int) -> None:
    """Compiled code would overflow the stack, which ends the process."""
    for payload in (b"\x02" * depth, b"\x02" * depth + b"\x00" * (depth + 1)):
        with pytest.raises(InvalidError, match="nested too deeply"):
            mp.AvroPayload(_CHAIN).decode(payload + b"\0" * 100)


def test_large_payload_of_a_recursive_type_is_read() -> None:
    value: Any = {"next": None, "pad": b"x" * 5_000}
    payload = b"\x02" * 50 + b"\x00" + b"\x90\x4e" + b"x" * 5_000 + b"\x00" * 50
    for _ in range(50):
        value = {"next": value, "pad": b""}

    assert mp.AvroPayload(_CHAIN).decode(payload) == value


def test_blocks_with_a_size_in_bytes_are_read() -> None:
    """An error behind such a block must still name its field."""
    schema = _of(("numbers", {"type": "array", "items": "int"}), ("last", "string"))
    encoded = b"\x03\x04\x02\x04\x00\x02x"

    assert mp.AvroPayload(schema).decode(encoded) == {"numbers": [1, 2], "last": "x"}
    with pytest.raises(mp.InvalidError, match="field=`last`"):
        mp.AvroPayload(schema).decode(encoded[:-1])


@pytest.mark.parametrize(
    ("reader", "field", "reason"),
    [
        (_of(("lines", {"type": "array", "items": _LINE}), ("new", "string")), "new", "No default value"),
        (_of(("kind", "long")), "kind", "Schema mismatch"),
        (_of(("lines", {"type": "array", "items": "string"})), "lines", "Schema mismatch"),
    ],
)
def test_unresolvable_schemas_name_the_readers_field(reader: Any, field: str, reason: str) -> None:
    with pytest.raises(mp.InvalidError) as refused:
        mp.AvroPayload(reader, writer=_NESTED).decode(_WHOLE)

    assert refused.value.details["field"] == field
    assert str(refused.value.details["reason"]).startswith(f"the schemas do not go together: {reason}")


@pytest.mark.parametrize(
    ("written", "wanted", "value", "read"),
    [
        ("int", "long", 5, 5),
        ("int", "double", 5, 5.0),
        ("long", "float", 5, 5.0),
        ("string", "bytes", "é", "é".encode()),
        ("bytes", "string", b"a", "a"),
        ("int", ["null", "long"], 5, 5),
        (["null", "int"], "int", 5, 5),
        (
            {"type": "enum", "name": "E", "symbols": ["A", "B"]},
            {"type": "enum", "name": "E", "symbols": ["A"], "default": "A"},
            "B",
            "A",
        ),
    ],
)
def test_field_of_a_wider_type_reads_a_narrower_one(written: Any, wanted: Any, value: Any, read: Any) -> None:
    payload = mp.AvroPayload(_of(("f", wanted)), writer=_of(("f", written)))

    assert payload.decode(avro_bytes(_of(("f", written)), {"f": value})) == {"f": read}


def test_renamed_field_is_found_by_its_alias() -> None:
    reader = {"type": "record", "name": "R", "fields": [{"name": "new", "type": "int", "aliases": ["old"]}]}

    assert mp.AvroPayload(reader, writer=_of(("old", "int"))).decode(b"\x0a") == {"new": 5}


def test_error_names_a_schema_without_its_namespace() -> None:
    """The schema's file has the name without the namespace."""
    with pytest.raises(mp.InvalidError, match="schema=`Payment`"):
        mp.AvroPayload(PAYMENT_AVRO).decode(b"")
