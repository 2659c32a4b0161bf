"""
The trace of a simulated run: what happened, in order, and one hash over all of it.
"""

from __future__ import annotations

import hashlib
from collections import deque
from typing import Final

__all__ = ["Trace"]

_KEPT: Final = 400


class Trace:
    """
    Hashes every event and remembers the last ones.

    Args:
        kept: how many events are remembered, for the report of a failure.
    """

    def __init__(self, kept: int = _KEPT) -> None:
        self._hash = hashlib.sha256()
        self.last: deque[str] = deque(maxlen=kept)
        self.events: int = 0

    def add(self, at_us: int, who: str, what: str) -> None:
        """
        Something happened.

        Args:
            at_us: the world's time.
            who: the process or actor.
            what: what it did, and how that ended.
        """
        line = f"{at_us} {who} {what}"
        self.events += 1
        self.last.append(line)
        self._hash.update(line.encode())
        self._hash.update(b"\n")

    def note(self, data: bytes) -> None:
        """
        Let bytes that were written count too.
        """
        self._hash.update(data)

    @property
    def digest(self) -> str:
        """
        The hash over everything so far, 16 hexadecimal digits.
        """
        return self._hash.hexdigest()[:16]
