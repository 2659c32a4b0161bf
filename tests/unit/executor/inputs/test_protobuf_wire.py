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
def test_the_first_broken_field_is_found(payload: bytes, found: tuple[str, str]) -> None:
    """A message is walked to the first part that cannot be read, within other messages too."""
    assert first_failure(payload, message_type(_SET, "shop.Payment")) == found


def test_a_whole_message_has_none() -> None:
    """A message that can be read has no broken field."""
    whole = message_bytes(_SET, "shop.Payment", {"card": "é", "lines": [{"sku": "tea", "pieces": -1}]})

    assert first_failure(whole, message_type(_SET, "shop.Payment")) == ("", "")
