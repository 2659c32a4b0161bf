from __future__ import annotations

import datetime as dt
import sys
from pathlib import Path
from typing import Any

import pytest

import millpond as mp
from tests.payloads import confluent, descriptor_set, message_bytes, payment_descriptors

_SET = payment_descriptors()
_AT = dt.datetime(2026, 11, 23, 17, 0, 0, 123456, tzinfo=dt.UTC)
_PAYMENT = {
    "card": "a",
    "account": 7,
    "paid_at": _AT,
    "kind": "REFUND",
    "lines": [{"sku": "tea", "pieces": 2}],
}


def test_descriptor_set_may_be_a_file_or_bytes(tmp_path: Path) -> None:
    """The file is read once, when declared."""
    file = tmp_path / "shop.desc"
    file.write_bytes(_SET)
    declared = mp.ProtobufPayload(file, "shop.Payment")
    file.unlink()

    assert declared == mp.ProtobufPayload(_SET, "shop.Payment")
    assert declared.decode(message_bytes(_SET, "shop.Payment", _PAYMENT)) == _PAYMENT
    assert declared.fields() == ["card", "account", "paid_at", "kind", "lines"]
    assert repr(declared) == "ProtobufPayload('shop.Payment', column='value', framing='plain')"


@pytest.mark.parametrize("place", [b"\x00", b"\x02\x00", b"\x04\x02\x02", b"\x02\x80\x01"])
def test_message_indexes_are_skipped(place: bytes) -> None:
    """Confluent's format puts the indexes of the message and its parents after the schema's number."""
    framed = mp.ProtobufPayload(_SET, "shop.Payment", framing="confluent")

    assert framed.decode(confluent(9, place + message_bytes(_SET, "shop.Payment", _PAYMENT))) == _PAYMENT


@pytest.mark.parametrize("rest", [b"", b"\x04\x02", b"\x80" * 12])
def test_truncated_message_indexes_are_refused(rest: bytes) -> None:
    framed = mp.ProtobufPayload(_SET, "shop.Payment", framing="confluent")

    with pytest.raises(
        mp.InvalidError, match=r"schema=`shop\.Payment` reason=`the payload ends before the message"
    ):
        framed.decode(confluent(9, rest))
    with pytest.raises(mp.InvalidError, match="not in Confluent's wire format"):
        framed.decode(b"\x0a\x01a")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((_SET, "Payment"), "no such message: .* type=`Payment` types=`.*'shop.Payment'"),
        ((b"\xff", "shop.Payment"), "descriptor_set must be a descriptor set"),
        (("gone.desc", "shop.Payment"), "the descriptor set cannot be read path=`gone.desc`"),
    ],
)
def test_invalid_descriptor_set_or_type_is_refused(arguments: Any, message: str) -> None:
    with pytest.raises(mp.InvalidError, match=message):
        mp.ProtobufPayload(*arguments)
    with pytest.raises(mp.InvalidError, match="unknown framing of Protobuf"):
        mp.ProtobufPayload(_SET, "shop.Payment", framing="single_object")  # type: ignore[arg-type]


def test_descriptor_set_must_contain_its_imports() -> None:
    """The files may be in any order."""
    part = 'name: "a.proto" package: "a" syntax: "proto3" message_type { name: "A" }'
    whole = (
        'name: "b.proto" package: "b" syntax: "proto3" dependency: "a.proto" '
        'message_type { name: "B" field { name: "a" number: 1 type: TYPE_MESSAGE type_name: ".a.A" label: LABEL_OPTIONAL } }'
    )

    assert mp.ProtobufPayload(descriptor_set(whole, part), "b.B").decode(b"\x0a\x00") == {"a": {}}
    with pytest.raises(mp.InvalidError, match="the descriptor set is not complete"):
        mp.ProtobufPayload(descriptor_set(whole), "b.B")


def test_missing_package_is_named_with_its_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "millpond.executor.inputs.protobuf_messages", raising=False)
    monkeypatch.setitem(sys.modules, "google.protobuf", None)

    with pytest.raises(mp.InvalidError, match=r"pip install 'millpond\[protobuf\]'"):
        mp.ProtobufPayload(_SET, "shop.Payment")
