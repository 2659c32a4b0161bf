"""Log cleanup: write checkpoints, and delete the commit files that a checkpoint replaces.

A checkpoint sums up the log, so that a cold open does not read it from version 0. Once the
horizon has passed a checkpoint, the commits before it are deleted; the checkpoint's own commit file stays,
and with it the digest that the next commit is chained to and that the high-water mark is compared
with. Oldest files go first, so a collection that is killed leaves a shorter log without a hole. Of a savepoint's
version the commit file and a checkpoint stay.

The boundary is published before anything is deleted, and writers check it after each put
(`millpond.statestore.log.writer`): no commit gets lost in a deleted part of the log,
whatever clocks say. Such a commit would be refused, though, and readers that are opening
the table would start over; so commits of the last half minute stay whatever the retention. A
running pipeline observes the table with a monotonic clock and passes the version that it saw then.
"""

from __future__ import annotations

import re
from typing import Final

from millpond.gc.collector import Collection, Survey
from millpond.gc.horizon import version_at
from millpond.gc.orphan import delete_files
from millpond.statestore.errors import ObjectMissingError
from millpond.statestore.history.replayed_log import replay_log
from millpond.statestore.history.savepoint import write_checkpoint_of
from millpond.statestore.log.log import Log
from millpond.statestore.log.writer import publish_log_boundary
from millpond.statestore.types import Clock, Objects, TableVersion

_OF_VERSION: Final = re.compile(r"^_delta_log/(\d{20})\.(?:json|crc|checkpoint(?:\.\d+\.\d+)?\.parquet)$")

KEPT_MS: Final = 30_000
"""Commits younger than this stay; writers trust a version that they saw for a third of it."""


class LogCollector:
    """Deletes commit files and checkpoints behind a checkpoint that the horizon has passed.

    Args:
        survey: the survey of the store.
        clock: tells how old commits are.
        seen: the newest version as the caller saw it `KEPT_MS` ago; ``None`` if the caller has not
            run for that long and relies on the commits' own times.
    """

    kind = "log"

    def __init__(self, survey: Survey, clock: Clock, seen: TableVersion | None = None) -> None:
        self._survey = survey
        self._clock = clock
        self._seen = seen

    def collect(self, *, dry_run: bool = False) -> Collection:
        """Delete the files, or only list them on a dry run.

        Raises:
            UnavailableError: the store is unavailable; some files may be deleted.
        """
        limit = self._limit()
        kept = {int(savepoint.version) for savepoint in self._survey.savepoints}
        matches = ((path, _OF_VERSION.match(path)) for path in sorted(self._survey.log_files))
        numbered = ((path, int(match[1])) for path, match in matches if match)
        paths = tuple(path for path, number in numbered if number < limit and number not in kept)
        if paths and not dry_run:
            self._write_checkpoints_of_savepoints(limit)
            # From here on a writer below the boundary learns that its puts there do not count.
            publish_log_boundary(self._survey.objects, limit)
            delete_files(self._survey.objects, paths)
        return Collection(kind=self.kind, paths=paths)

    def _write_checkpoints_of_savepoints(self, limit: TableVersion) -> None:
        """Write those that are missing: without the commits before it a savepoint's version is read from its own."""
        log = Log(self._survey.objects)
        there = {checkpoint.version for checkpoint in log.inventory().checkpoints}
        for version in sorted({savepoint.version for savepoint in self._survey.savepoints} - there):
            if version < limit:
                try:
                    write_checkpoint_of(log.objects, replay_log(log, version), names_newest=False)
                except ObjectMissingError:
                    # The log does not reach back that far: that version is unreadable.
                    continue

    def _limit(self) -> TableVersion:
        """The version of the checkpoint before which everything may be deleted."""
        settled = self._survey.settled
        if settled is None:
            return TableVersion(0)
        log = Log(self._survey.objects)
        young = version_at(log, self._survey.newest.version, self._clock.now_us() // 1_000 - KEPT_MS)
        versions = [checkpoint.version for checkpoint in log.inventory().checkpoints]
        last = min(settled.version, young, young if self._seen is None else self._seen)
        return max((version for version in versions if version <= last), default=TableVersion(0))


def write_checkpoint(objects: Objects, *, every: int) -> TableVersion | None:
    """Write a checkpoint of the newest version, unless the last ``every`` versions have one.

    Returns:
        The version of the new checkpoint; ``None`` when none was written.

    Raises:
        DataError: the log is damaged.
        UnavailableError: the store is unavailable.
    """
    log = Log(objects)
    inventory = log.inventory()
    last = max((checkpoint.version for checkpoint in inventory.checkpoints), default=TableVersion(0))
    if inventory.latest is None or inventory.latest - last < every:
        return None
    replayed = replay_log(log, inventory.latest)
    return replayed.version if write_checkpoint_of(objects, replayed, names_newest=True) else None
