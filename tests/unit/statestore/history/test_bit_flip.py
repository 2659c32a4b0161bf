"""Repair of one flipped bit."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millpond.statestore.history import replayed_log
from millpond.statestore.history.replayed_log import FLIP_BYTES_MAX, repair_bit_flip
from millpond.statestore.log.action import CommitInfo
from millpond.statestore.log.commit_file import decode, digest_of, encode
from millpond.statestore.types import TableVersion


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


@pytest.mark.parametrize("damage", [b"WROTE", b"WRIUE"])
def test_commit_is_parsed_once_unless_seal_holds(monkeypatch, damage):
    """Parsing each of a commit's trials takes a minute."""
    parsed = []
    monkeypatch.setattr(
        replayed_log, "decode", lambda data, path: (parsed.append(data), decode(data, path))[1]
    )
    whole = encode([CommitInfo(operation="WRITE", timestamp_ms=1, millpond={"writer": "w"})])
    damaged = whole.replace(b"WRITE", damage)
    originals = [whole] if damage == b"WRIUE" else []

    for _ in range(2):
        assert replayed_log._original(TableVersion(7), damaged, "") == next(iter(originals), None)
    assert parsed == [damaged, *originals, damaged]
