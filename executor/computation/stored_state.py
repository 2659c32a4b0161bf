"""States as rows and soft state have them: encoded, and with their version where earlier code wrote them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

Encoded: TypeAlias = str | bytes
"""State as the row stores it: text or bytes, depending on the codec."""


@dataclass(frozen=True, slots=True)
class FormerState:
    """A state that code of another ``state_version`` wrote.

    Attributes:
        encoded: the state, as the codec of that version encodes it.
        version: that version.
        upgraded: what today's code makes of it, in today's codec; ``None`` until code has asked for it.
    """

    encoded: Encoded
    version: int
    upgraded: Encoded | None = field(default=None, compare=False)

    def __len__(self) -> int:
        """What it occupies in soft state, as of text."""
        return len(self.encoded) + len(self.upgraded or "")


StoredState: TypeAlias = Encoded | FormerState
"""A state of the current version, or an earlier one."""
