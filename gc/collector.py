"""
What every collector has in common: one kind of garbage, found and taken away behind a horizon.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

__all__ = ["Collection", "Collector"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Collection:
    """
    What a collector took away, or would take away on a dry run.

    Attributes:
        kind: the kind of garbage.
        paths: the files that went.
        made: the files that came in their place, or that made it possible.
        freed_bytes: what that frees, now or once the removed files are vacuumed; 0 where unknown.
        skipped: why something was left, a sentence each.
    """

    kind: str
    paths: tuple[str, ...] = ()
    made: tuple[str, ...] = ()
    freed_bytes: int = 0
    skipped: tuple[str, ...] = ()


class Collector(Protocol):
    """
    Takes one kind of garbage away.
    """

    @property
    def kind(self) -> str:
        """
        The word for its garbage.
        """
        ...

    def collect(self, *, dry_run: bool = False) -> Collection:
        """
        Take the garbage away; with ``dry_run`` only say what would go.

        Collecting twice is harmless, and being killed midway leaves garbage and no damage.

        Raises:
            UnavailableError: the store or the catalog is away.
            DataError: what would have to be read is damaged; nothing was taken away.
        """
        ...
