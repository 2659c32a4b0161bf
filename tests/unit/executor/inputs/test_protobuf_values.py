from __future__ import annotations

import datetime as dt
from typing import Any, Final

import pytest

import millpond as mp
from millpond.executor.inputs.protobuf_messages import message_type, reader_of
from tests.payloads import descriptor_set, message_bytes

_SPECIAL: Final = descriptor_set(
    """
name: "s.proto" package: "s" syntax: "proto3"
dependency: "google/protobuf/timestamp.proto" dependency: "google/protobuf/duration.proto"
dependency: "google/protobuf/wrappers.proto" dependency: "google/protobuf/struct.proto"
message_type {
  name: "M"
  field { name: "at" number: 1 type: TYPE_MESSAGE type_name: ".google.protobuf.Timestamp" label: LABEL_OPTIONAL }
  field { name: "took" number: 2 type: TYPE_MESSAGE type_name: ".google.protobuf.Duration" label: LABEL_OPTIONAL }
  field { name: "count" number: 3 type: TYPE_MESSAGE type_name: ".google.protobuf.Int64Value" label: LABEL_OPTIONAL }
  field { name: "more" number: 4 type: TYPE_MESSAGE type_name: ".google.protobuf.Struct" label: LABEL_OPTIONAL }
  field { name: "times" number: 5 type: TYPE_MESSAGE type_name: ".google.protobuf.Timestamp" label: LABEL_REPEATED }
  field { name: "by_name" number: 6 type: TYPE_MESSAGE type_name: ".s.M.ByNameEntry" label: LABEL_REPEATED }
  field { name: "kind" number: 7 type: TYPE_ENUM type_name: ".s.Kind" label: LABEL_OPTIONAL }
  field { name: "kinds" number: 8 type: TYPE_ENUM type_name: ".s.Kind" label: LABEL_REPEATED }
  field { name: "text" number: 9 type: TYPE_STRING label: LABEL_OPTIONAL oneof_index: 0 }
  field { name: "number" number: 10 type: TYPE_INT32 label: LABEL_OPTIONAL oneof_index: 0 }
  field { name: "next" number: 11 type: TYPE_MESSAGE type_name: ".s.M" label: LABEL_OPTIONAL }
  oneof_decl { name: "either" }
  nested_type {
    name: "ByNameEntry" options { map_entry: true }
    field { name: "key" number: 1 type: TYPE_STRING label: LABEL_OPTIONAL }
    field { name: "value" number: 2 type: TYPE_MESSAGE type_name: ".google.protobuf.Timestamp" label: LABEL_OPTIONAL }
  }
}
enum_type { name: "Kind" value { name: "BUY" number: 0 } value { name: "REFUND" number: 1 } }
"""
)
_PROTO_2: Final = descriptor_set(
    """
name: "two.proto" package: "two" syntax: "proto2"
message_type {
  name: "M"
  field { name: "needed" number: 1 type: TYPE_INT32 label: LABEL_REQUIRED }
  field { name: "given" number: 2 type: TYPE_STRING label: LABEL_OPTIONAL default_value: "x" }
  field { name: "maybe" number: 3 type: TYPE_STRING label: LABEL_OPTIONAL }
  field { name: "part" number: 4 type: TYPE_MESSAGE type_name: ".two.M" label: LABEL_OPTIONAL }
}
"""
)
_AT: Final = dt.datetime(2026, 11, 23, 17, 0, 0, 123456, tzinfo=dt.UTC)
_UNSET: Final[dict[str, Any]] = {
    "at": None,
    "took": None,
    "count": None,
    "more": None,
    "times": [],
    "by_name": {},
    "kind": "BUY",
    "kinds": [],
    "text": None,
    "number": None,
    "next": None,
}


def _read(payload: bytes, name: str = "s.M") -> dict[str, Any]:
    return reader_of(message_type(_SPECIAL if name == "s.M" else _PROTO_2, name))(payload)


@pytest.mark.parametrize(
    ("fields", "value"),
    [
        ({}, {}),
        ({"at": _AT}, {"at": _AT}),
        (
            {"took": dt.timedelta(seconds=-1, microseconds=-5)},
            {"took": dt.timedelta(seconds=-1, microseconds=-5)},
        ),
        ({"count": {}}, {"count": 0}),
        ({"count": {"value": -5}}, {"count": -5}),
        (
            {"times": [_AT, {"nanos": 1_999}]},
            {"times": [_AT, dt.datetime(1970, 1, 1, 0, 0, 0, 1, tzinfo=dt.UTC)]},
        ),
        ({"by_name": {"a": {"seconds": 0}}}, {"by_name": {"a": dt.datetime(1970, 1, 1, tzinfo=dt.UTC)}}),
        ({"kind": 1, "kinds": [0, 1, 9]}, {"kind": "REFUND", "kinds": ["BUY", "REFUND", 9]}),
        ({"text": ""}, {"text": ""}),
        ({"number": 0}, {"number": 0}),
        ({"next": {"next": {}}}, {"next": {**_UNSET, "next": _UNSET}}),
    ],
    ids=str,
)
def test_well_known_types_become_python_values(fields: dict[str, Any], value: dict[str, Any]) -> None:
    assert _read(message_bytes(_SPECIAL, "s.M", fields)) == {**_UNSET, **value}


def test_struct_becomes_a_plain_dict() -> None:
    value = {"a": 1.5, "b": [None, True, {"c": "d"}], "e": {}}

    assert _read(message_bytes(_SPECIAL, "s.M", {"more": value}))["more"] == value


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"at": {"seconds": 10**15}}, "at"),
        ({"took": {"seconds": 10**18}}, "took"),
        ({"times": [_AT, {"seconds": -(10**15)}]}, "times[1]"),
        ({"next": {"by_name": {"a": {"seconds": 10**15}}}}, "next.by_name[a]"),
    ],
)
def test_time_outside_of_the_calendar_is_refused_with_its_path(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(mp.InvalidError) as refused:
        _read(message_bytes(_SPECIAL, "s.M", fields))

    assert refused.value.details["field"] == field


def test_missing_required_fields_are_named() -> None:
    """Only proto2 has required fields and defaults."""
    assert _read(b"\x08\x05", "two.M") == {"needed": 5, "given": "x", "maybe": None, "part": None}
    with pytest.raises(
        mp.InvalidError, match=r"field=`needed, part.needed` reason=`required fields are missing`"
    ):
        _read(b"\x22\x00", "two.M")


def test_unknown_fields_are_skipped() -> None:
    """A known field of another wire type is an error."""
    assert _read(b"\xa0\x06\x01") == _UNSET
    with pytest.raises(
        mp.InvalidError, match=r"field=`next\.text` reason=`it was written as another type: wire type 0"
    ):
        _read(b"\x5a\x02\x48\x01")
