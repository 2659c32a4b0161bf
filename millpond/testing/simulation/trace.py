"""The trace of a simulated run: its events in order, and one hash over all of them."""

from __future__ import annotations

import hashlib
from collections import deque
from typing import Final

_KEPT: Final = 400


class Trace:
    """Hashes every event and keeps the last ones.

    Args:
        kept: number of events to keep, for the report of a failure.
    """

    def __init__(self, kept: int = _KEPT) -> None:
        self._hash = hashlib.sha256()
        self.last: deque[str] = deque(maxlen=kept)
        self.events: int = 0

    def add(self, at_us: int, who: str, what: str) -> None:
        """Add an event.

        Args:
            at_us: the world's time, in microseconds.
            who: the process or actor.
            what: its action, and the result.
        """
        line = f"{at_us} {who} {what}"
        self.events += 1
        self.last.append(line)
        self._hash.update(line.encode())
        self._hash.update(b"\n")

    def note(self, data: bytes) -> None:
        """Hash bytes that were written."""
        self._hash.update(data)

    @property
    def digest(self) -> str:
        """The hash over everything so far, 16 hexadecimal digits."""
        return self._hash.hexdigest()[:16]
