"""The interface of collectors: each finds one kind of garbage and deletes it behind the horizon."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Collection:
    """What a collector deleted, or would delete on a dry run.

    Attributes:
        kind: the kind of garbage.
        paths: the deleted files, relative to the table's root.
        made: the files that replaced them, or that made the deletion possible.
        freed_bytes: space freed, now or once the removed files are vacuumed; 0 where unknown.
        skipped: reasons why garbage was left, one sentence each.
    """

    kind: str
    paths: tuple[str, ...] = ()
    made: tuple[str, ...] = ()
    freed_bytes: int = 0
    skipped: tuple[str, ...] = ()


class Collector(Protocol):
    """Collects one kind of garbage."""

    @property
    def kind(self) -> str:
        """Name of the kind of garbage, as reports print it."""
        ...

    def collect(self, *, dry_run: bool = False) -> Collection:
        """Delete the garbage; with ``dry_run`` only report it.

        Collecting twice is harmless, and a collection that is killed midway leaves garbage but no damage.

        Raises:
            UnavailableError: the store or the catalog is unavailable.
            DataError: data that the collector must read is damaged; nothing was deleted.
        """
        ...
