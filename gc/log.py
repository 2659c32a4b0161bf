"""
The log: checkpoints, and the commit files that a checkpoint stands for.

A checkpoint sums the log up, so that a cold open does not read it from version 0. Once the
horizon has passed a checkpoint, the commits before it are deleted; its own commit file stays,
and with it the digest that the next commit is chained to and the high-water mark is held
against. Oldest files go first, so a collection that is killed leaves a shorter log and no hole.

Before anything is deleted the boundary is published, and writers look at it after each put
(`millpond.statestore.log.boundary`, fact F4): whatever clocks say, no commit gets lost in a part of the
log that was deleted under its writer. It would be refused, though, and readers that are opening
the table would begin again; so commits of the last half minute stay whatever the retention, and a
running pipeline, which has seen the table by a clock that only goes forward, says what is younger.
"""

from __future__ import annotations

import re
from typing import Final

import orjson

from millpond.gc.collector import Collection
from millpond.gc.horizon import version_at
from millpond.gc.replayed_log import sum_log
from millpond.gc.survey import Survey
from millpond.gc.vacuum import delete_files
from millpond.statestore.errors import ObjectExistsError
from millpond.statestore.failpoint import reach
from millpond.statestore.log.boundary import publish_log_boundary
from millpond.statestore.log.checkpoint import checkpoint_path, write_part
from millpond.statestore.log.log import LOG_FOLDER, Log
from millpond.statestore.types import Clock, Objects, TableVersion

__all__ = ["KEPT_MS", "LogCollector", "write_checkpoint"]

_OF_VERSION: Final = re.compile(r"^_delta_log/(\d{20})\.(?:json|crc|checkpoint(?:\.\d+\.\d+)?\.parquet)$")

KEPT_MS: Final = 30_000
"""Commits of so long stay; writers trust what they saw for a third of it."""


class LogCollector:
    """
    Deletes commit files and checkpoints behind a checkpoint that the horizon has passed.

    Args:
        survey: the store as it was found.
        clock: tells how old commits are.
        seen: the newest version of `KEPT_MS` ago, as the caller saw it; ``None`` where he has
            not been there for so long and goes by the commits' own times.
    """

    kind = "log"

    def __init__(self, survey: Survey, clock: Clock, seen: TableVersion | None = None) -> None:
        self._survey = survey
        self._clock = clock
        self._seen = seen

    def collect(self, *, dry_run: bool = False) -> Collection:
        """
        Delete them, or name them.

        Raises:
            UnavailableError: the store is away; some may be gone.
        """
        limit = self._limit()
        matches = ((path, _OF_VERSION.match(path)) for path in sorted(self._survey.log_files))
        paths = tuple(path for path, match in matches if match and int(match[1]) < limit)
        if paths and not dry_run:
            # From here on a writer that stands below knows that nothing it puts there counts.
            publish_log_boundary(self._survey.objects, limit)
            delete_files(self._survey.objects, paths)
        return Collection(kind=self.kind, paths=paths)

    def _limit(self) -> TableVersion:
        """
        The version of the checkpoint that stands for everything before it.
        """
        settled = self._survey.settled
        if settled is None:
            return TableVersion(0)
        log = Log(self._survey.objects)
        young = version_at(log, self._survey.newest.version, self._clock.now_us() // 1_000 - KEPT_MS)
        known = [each.version for each in log.inventory().checkpoints]
        last = min(settled.version, young, young if self._seen is None else self._seen)
        return max((each for each in known if each <= last), default=TableVersion(0))


def write_checkpoint(objects: Objects, *, every: int) -> TableVersion | None:
    """
    Write a checkpoint of the newest version, if there is none of the last ``every`` versions.

    Returns:
        The version of the checkpoint that was written.

    Raises:
        DataError: the log is damaged.
        UnavailableError: the store is away.
    """
    log = Log(objects)
    inventory = log.inventory()
    last = max((checkpoint.version for checkpoint in inventory.checkpoints), default=TableVersion(0))
    if inventory.latest is None or inventory.latest - last < every:
        return None
    listed = [path for path in objects.list("") if not path.startswith(f"{LOG_FOLDER}/")]
    total = sum_log(log, inventory.latest)
    actions = tuple(total.actions(on_disk=listed))
    reach("checkpoint.summed")
    try:
        path = checkpoint_path(total.version)
        objects.put_if_absent(path, write_part(actions, path))
    except ObjectExistsError:
        # Somebody else has written it, and it says the same.
        return None
    reach("checkpoint.written")
    pointer = {"version": total.version, "size": len(actions)}
    objects.put(f"{LOG_FOLDER}/_last_checkpoint", orjson.dumps(pointer))
    reach("checkpoint.named")
    return total.version
