"""What the commit of a load says, next to its rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadBeginning:
    """What a pipeline finds next to the rows, in the same commit: from where its inputs go on.

    Attributes:
        positions: by application id.
        words: application ids of recorded words, which get the version as their number.
        source_offsets: where the inputs' positions lie in their sources; see `CommitRequest`.
    """

    positions: Mapping[str, int] = field(default_factory=dict)
    words: tuple[str, ...] = ()
    source_offsets: Mapping[str, str] = field(default_factory=dict)
