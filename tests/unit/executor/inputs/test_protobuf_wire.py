from __future__ import annotations

import pytest

from millpond.executor.inputs.protobuf_messages import first_failure, message_type
from tests.payloads import message_bytes, payment_descriptors

_SET = payment_descriptors()


@pytest.mark.parametrize(
    ("payload", "found"),
    [
        (b"\x0a\x05ab", ("card", "the payload ends within it")),
        (b"\x0a", ("card", "the payload ends within it")),
        (b"\x10\x80", ("account", "the payload ends within it")),
        (b"\x80", ("", "the payload ends within a field's tag")),
        (b"\x2a\x04\x0a\x09ab", ("lines.sku", "the payload ends within it")),
        (b"\x2a\x03\x0a\x01\xff", ("lines.sku", "it is not UTF-8: invalid start byte")),
        (b"\x0f", ("card", "there is no wire type 7")),
        (b"\xa1\x06\x00", ("100", "the payload ends within it")),
        (b"\xa5\x06\x00", ("100", "the payload ends within it")),
        (b"\x0b\x0c", ("", "")),
        (b"\x0a\x01a\x10\x05", ("", "")),
        (b"", ("", "")),
    ],
)
def test_first_failure_names_the_first_unreadable_field(payload: bytes, found: tuple[str, str]) -> None:
    assert first_failure(payload, message_type(_SET, "shop.Payment")) == found


def test_first_failure_of_a_readable_message_is_empty() -> None:
    whole = message_bytes(_SET, "shop.Payment", {"card": "é", "lines": [{"sku": "tea", "pieces": -1}]})

    assert first_failure(whole, message_type(_SET, "shop.Payment")) == ("", "")


def test_first_failure_gives_up_after_very_many_fields() -> None:
    found_late, not_found = (b"\x10\x05" * fields + b"\x0a" for fields in (9_999, 10_000))

    assert first_failure(found_late, message_type(_SET, "shop.Payment")) == (
        "card",
        "the payload ends within it",
    )
    assert first_failure(not_found, message_type(_SET, "shop.Payment")) == ("", "")
