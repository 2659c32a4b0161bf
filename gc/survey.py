"""
The survey: what there is on disk, what the log says about it, and how far collectors may go.

It is made once for a round of collectors, in the order that makes it safe: the files are listed
before the log is read, so a file that is committed meanwhile is known to the log; and the
horizon is published before anybody deletes. What is settled is told by the newest checkpoint
at or before the horizon, so that a round never reads more of the log than lies between
checkpoints.
"""

from __future__ import annotations

from dataclasses import dataclass

from millpond.gc.horizon import Horizon, Horizons
from millpond.gc.replayed_log import ReplayedLog, sum_log
from millpond.statestore.errors import ObjectMissingError
from millpond.statestore.log.log import LOG_FOLDER, Log
from millpond.statestore.types import Objects, TableVersion

__all__ = ["Survey", "survey"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """
    What collectors go by.

    Attributes:
        objects: the table's root.
        data_files: the data files that were there.
        log_files: the files of the log that were there.
        newest: the sum of the whole log.
        settled: its sum up to the horizon, or a little less; ``None`` when nothing is settled.
        horizon: the oldest version that stays readable.
    """

    objects: Objects
    data_files: frozenset[str]
    log_files: tuple[str, ...]
    newest: ReplayedLog
    settled: ReplayedLog | None
    horizon: Horizon


def survey(objects: Objects, horizons: Horizons, *, dry_run: bool) -> Survey:
    """
    Look at a store; unless it is a dry run, publish the horizon.

    Raises:
        DataError: the log is damaged.
        UnavailableError: the store or the catalog is away.
        ConflictError: readers kept coming first.
    """
    log = Log(objects)
    listed = objects.list("")
    latest = log.latest_version()
    if latest is None:
        raise ObjectMissingError("there is no table", store=objects.url)
    newest = sum_log(log, latest)
    horizon = (horizons.find if dry_run else horizons.publish)(newest.snapshot)
    settled = _settled_version(log, horizon.version, dry_run=dry_run)
    return Survey(
        objects=objects,
        data_files=frozenset(path for path in listed if not path.startswith(f"{LOG_FOLDER}/")),
        log_files=tuple(path for path in listed if path.startswith(f"{LOG_FOLDER}/")),
        newest=newest,
        settled=None if settled is None else sum_log(log, settled),
        horizon=horizon,
    )


def _settled_version(log: Log, horizon: TableVersion, *, dry_run: bool) -> TableVersion | None:
    if dry_run:
        # The round itself would write a checkpoint first.
        return horizon
    known = [checkpoint.version for checkpoint in log.inventory().checkpoints]
    return max((version for version in known if version <= horizon), default=None)
