"""Vacuum: delete data files that the table has removed and that no readable version needs.

A file is deleted when its removal is settled: it was removed at or before the horizon, and no commit
has added it again since. So no version at or after the horizon contains it. Files of savepoints stay.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Final

from millpond.gc.collector import Collection
from millpond.gc.survey import Survey
from millpond.statestore.failpoint import reach
from millpond.statestore.types import Objects

_DELETED_AT_ONCE: Final = 1_000


class VacuumCollector:
    """Deletes removed data files behind the horizon.

    Args:
        survey: the survey of the store.
    """

    kind = "vacuum"

    def __init__(self, survey: Survey) -> None:
        self._survey = survey

    def collect(self, *, dry_run: bool = False) -> Collection:
        """Delete the files, or only list them on a dry run.

        Raises:
            UnavailableError: the store is unavailable; some files may be deleted.
        """
        sizes = self._garbage()
        if not dry_run:
            delete_files(self._survey.objects, sizes)
        return Collection(kind=self.kind, paths=tuple(sizes), freed_bytes=sum(sizes.values()))

    def _garbage(self) -> dict[str, int]:
        survey = self._survey
        if survey.settled is None:
            return {}
        newest = survey.newest
        return {
            path: remove.size_bytes or 0
            for path, remove in sorted(survey.settled.removes.items())
            if path in survey.data_files
            and path not in survey.pinned
            and path not in newest.adds
            # If a file was removed, added and removed again, the later removal counts.
            and newest.removes.get(path, remove).deletion_time_ms == remove.deletion_time_ms
        }


def delete_files(objects: Objects, paths: Iterable[str]) -> None:
    """Delete files in bounded batches.

    Raises:
        UnavailableError: the store is unavailable; some files may be deleted.
    """
    rest = iter(paths)
    while batch := list(islice(rest, _DELETED_AT_ONCE)):
        reach("garbage.before_delete")
        objects.delete(batch)
        reach("garbage.deleted")
