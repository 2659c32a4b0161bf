"""A bundle's productions, column by column, in order of emission (MillWheel §6.1.2)."""

from __future__ import annotations

from typing import Any, Final

from millpond.statestore.rows.codec import JsonCodec, PlainObject
from millpond.statestore.rows.envelope import PLAIN_MARK

_encode: Final = JsonCodec().encode


class Productions:
    """The columns of produced records; values are encoded immediately, so later changes do not affect them."""

    __slots__ = ("at", "blobs", "keys", "streams", "texts")

    def __init__(self) -> None:
        self.streams: list[str] = []
        self.keys: list[str] = []
        self.texts: list[str | None] = []
        self.blobs: list[bytes | None] = []
        self.at: list[int] = []

    def __len__(self) -> int:
        return len(self.at)

    def append(self, stream: str, key: str, value: Any, at: int) -> None:
        """Add a production; ``bytes`` stay bytes, any other value becomes JSON.

        Raises:
            InvalidError: JSON cannot represent the value.
        """
        is_bytes = isinstance(value, bytes)
        text = None if is_bytes else _encode(value)
        if type(value) is PlainObject:
            text = f"{PLAIN_MARK}{text}"
        self.streams.append(stream)
        self.keys.append(key)
        self.texts.append(text)
        self.blobs.append(value if is_bytes else None)
        self.at.append(at)

    def truncate(self, count: int) -> None:
        """Remove all but the first ``count`` productions."""
        for column in (self.streams, self.keys, self.texts, self.blobs, self.at):
            del column[count:]
