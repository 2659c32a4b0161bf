"""
One flipped bit: found and turned back, where a seal over all bytes tells when it is right.

Disks and memory flip single bits far more often than anything else. A commit's SHA-256 leaves no doubt;
a row file's CRC-32 has a different remainder for every single bit, and its page checksums agree
or not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

__all__ = ["FLIP_BYTES_MAX", "repair_bit_flip"]

FLIP_BYTES_MAX: Final = 1 << 15
"""Larger files are not tried: each bit costs a look at all of them."""


def repair_bit_flip(data: bytes, is_whole: Callable[[bytes], bool]) -> bytes | None:
    """
    The only bytes that differ from ``data`` in one bit and are whole; ``None`` if there are none.

    Args:
        data: damaged bytes.
        is_whole: whether bytes are what was written.

    Example:
        >>> repair_bit_flip(b"something else", lambda data: data == b"word")
        >>> repair_bit_flip(b"wnrd", lambda data: data == b"word")
        b'word'
    """
    if len(data) > FLIP_BYTES_MAX:
        return None
    trial = bytearray(data)
    for place in range(len(trial)):
        for bit in range(8):
            trial[place] ^= 1 << bit
            if is_whole(bytes(trial)):
                return bytes(trial)
            trial[place] ^= 1 << bit
    return None
