"""
Repair of a single flipped bit, where a seal over all bytes verifies the result.

A single flipped bit is the most common corruption by disks and memory. A commit's SHA-256 leaves no
doubt; a row file's CRC-32 has a different remainder for every single bit, and its page checksums
confirm the result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

__all__ = ["FLIP_BYTES_MAX", "repair_bit_flip"]

FLIP_BYTES_MAX: Final = 1 << 15
"""Larger files are not tried: each candidate bit costs a check of the whole file."""


def repair_bit_flip(data: bytes, is_whole: Callable[[bytes], bool]) -> bytes | None:
    """
    The first variant of ``data`` with one bit flipped that is whole; ``None`` if there is none.

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
