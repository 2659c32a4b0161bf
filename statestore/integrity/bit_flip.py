"""Repair of a single flipped bit, where a seal over all bytes verifies the result.

A single flipped bit is the most common corruption by disks and memory. A commit's SHA-256 leaves no
doubt; a row file's CRC-32 has a different remainder for every single bit, and its page checksums
confirm the result.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Final

FLIP_BYTES_MAX: Final = 1 << 15
"""Larger files are not tried: each candidate bit costs a check of the whole file."""

_BLOCK_BYTES: Final = 64


def repair_bit_flip(data: bytes, is_whole: Callable[[bytes], bool]) -> bytes | None:
    """The first variant of ``data`` with one bit flipped that is whole; ``None`` if there is none.

    Args:
        data: damaged bytes.
        is_whole: whether given bytes are the original ones.

    Example:
        >>> repair_bit_flip(b"something else", lambda data: data == b"word")
        >>> repair_bit_flip(b"wnrd", lambda data: data == b"word")
        b'word'
    """
    if len(data) > FLIP_BYTES_MAX:
        return None
    trial = bytearray(data)
    for index in range(len(trial)):
        for bit in range(8):
            trial[index] ^= 1 << bit
            if is_whole(bytes(trial)):
                return bytes(trial)
            trial[index] ^= 1 << bit
    return None


def repair_bit_flip_by_digest(data: bytes, digest: str) -> bytes | None:
    """The same for bytes whose SHA-256 is known: what comes before a candidate bit is hashed once for its whole block.

    Args:
        data: damaged bytes.
        digest: the SHA-256 of the original ones, in hexadecimal.

    Example:
        >>> repair_bit_flip_by_digest(b"wnrd", hashlib.sha256(b"word").hexdigest())
        b'word'
    """
    if len(data) > FLIP_BYTES_MAX:
        return None
    trial = bytearray(data)
    for start in range(0, len(trial), _BLOCK_BYTES):
        before, rest = hashlib.sha256(trial[:start]), memoryview(trial)[start:]
        for index in range(min(_BLOCK_BYTES, len(rest))):
            for bit in range(8):
                rest[index] ^= 1 << bit
                whole = before.copy()
                whole.update(rest)
                if whole.hexdigest() == digest:
                    return bytes(trial)
                rest[index] ^= 1 << bit
    return None
