"""Repair of one flipped bit."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from millpond.statestore.history.replayed_log import (
    FLIP_BYTES_MAX,
    repair_bit_flip,
)
from millpond.statestore.log.commit_file import digest_of


@given(st.binary(min_size=1, max_size=200), st.integers(0, 7), st.data())
def test_flipped_bit_is_restored(data, bit, draw):
    damaged = bytearray(data)
    damaged[draw.draw(st.integers(0, len(data) - 1))] ^= 1 << bit
    assert repair_bit_flip(bytes(damaged), lambda it: digest_of(it) == digest_of(data)) == data


def test_two_flipped_bits_are_not_repaired():
    """Neither is an object too large to try."""
    data = b"a commit"
    assert repair_bit_flip(b"b commiu", lambda it: it == data) is None
    assert repair_bit_flip(bytes(FLIP_BYTES_MAX + 1), lambda it: True) is None
    assert repair_bit_flip(b"b commiu", lambda it: digest_of(it) == digest_of(data)) is None
