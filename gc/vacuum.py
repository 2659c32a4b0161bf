"""
Vacuum: data files that the table has removed, and that no readable version needs any more.

A file goes when its removal is settled: it was removed at or before the horizon, and nothing
has brought it back since. Versions at and after the horizon never looked at it.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Final

from millpond.gc.collector import Collection
from millpond.gc.survey import Survey
from millpond.statestore.failpoint import reach
from millpond.statestore.types import Objects

__all__ = ["VacuumCollector", "delete_files"]

_DELETED_AT_ONCE: Final = 1_000


class VacuumCollector:
    """
    Deletes removed data files behind the horizon.

    Args:
        survey: the store as it was found.
    """

    kind = "vacuum"

    def __init__(self, survey: Survey) -> None:
        self._survey = survey

    def collect(self, *, dry_run: bool = False) -> Collection:
        """
        Delete them, or name them.

        Raises:
            UnavailableError: the store is away; some may be gone.
        """
        sizes = self._garbage()
        if not dry_run:
            delete_files(self._survey.objects, sizes)
        return Collection(kind=self.kind, paths=tuple(sizes), freed_bytes=sum(sizes.values()))

    def _garbage(self) -> dict[str, int]:
        seen = self._survey
        if seen.settled is None:
            return {}
        newest = seen.newest
        return {
            path: remove.size_bytes or 0
            for path, remove in sorted(seen.settled.removes.items())
            if path in seen.data_files
            and path not in newest.adds
            # Removed, brought back and removed again: then it is the later removal that counts.
            and newest.removes.get(path, remove).deletion_time_ms == remove.deletion_time_ms
        }


def delete_files(objects: Objects, paths: Iterable[str]) -> None:
    """
    Delete files, a bounded number at once.
    """
    rest = iter(paths)
    while batch := list(islice(rest, _DELETED_AT_ONCE)):
        reach("garbage.before_delete")
        objects.delete(batch)
        reach("garbage.deleted")
