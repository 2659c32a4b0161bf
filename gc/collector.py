"""The interface of collectors: each finds one kind of garbage and deletes it behind the horizon.

The survey: the files on disk, the state of the log, and how far collectors may go.

It is made once per round of collectors, in a safe order: the files are listed
before the log is read, so the log names every listed file that is committed meanwhile; the
horizon is published before any collector deletes; and savepoints are looked for after that
(`millpond.statestore.history.savepoint`). The settled part of the log ends at the newest
checkpoint at or before the horizon, so a round never reads more of the log than lies between
checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from millpond.gc.horizon import Horizon, Horizons
from millpond.statestore.errors import ObjectMissingError
from millpond.statestore.history.replayed_log import ReplayedLog, replay_log
from millpond.statestore.history.savepoint import Savepoint, open_savepoints
from millpond.statestore.log.log import LOG_FOLDER, Log, commit_path
from millpond.statestore.types import Objects, TableVersion


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """The input of every collector.

    Attributes:
        objects: the table's root.
        data_files: the listed data files.
        log_files: the listed files of the log.
        newest: the log replayed to its end.
        settled: the log replayed to the last checkpoint at or before the horizon; ``None`` when there is none.
        horizon: the oldest version that stays readable.
        savepoints: the open ones.
        pinned: the files of their versions.
        rests_on: the newest commit and the checkpoints; what they do not need may be deleted.
    """

    objects: Objects
    data_files: frozenset[str]
    log_files: tuple[str, ...]
    newest: ReplayedLog
    settled: ReplayedLog | None
    horizon: Horizon
    savepoints: tuple[Savepoint, ...]
    pinned: frozenset[str]
    rests_on: tuple[str, ...]


def survey(objects: Objects, horizons: Horizons, *, dry_run: bool) -> Survey:
    """Survey a store and, unless it is a dry run, publish the horizon.

    Raises:
        DataError: the log is damaged.
        UnavailableError: the store or the catalog is unavailable.
        ConflictError: readers kept pinning versions first.
    """
    log = Log(objects)
    listed = objects.list("")
    latest = log.latest_version()
    if latest is None:
        raise ObjectMissingError("there is no table", store=objects.url)
    newest = replay_log(log, latest)
    horizon = (horizons.find if dry_run else horizons.publish)(newest.snapshot)
    newest.follow(log, log.latest_version() or latest)
    savepoints = open_savepoints(newest.snapshot.txns)
    settled = _settled_version(log, horizon.version, dry_run=dry_run)
    return Survey(
        objects=objects,
        data_files=frozenset(path for path in listed if not path.startswith(f"{LOG_FOLDER}/")),
        log_files=tuple(path for path in listed if path.startswith(f"{LOG_FOLDER}/")),
        newest=newest,
        settled=None if settled is None else replay_log(log, settled),
        horizon=horizon,
        savepoints=savepoints,
        pinned=_files_of(log, savepoints, newest.version),
        rests_on=(
            commit_path(newest.version),
            *(path for checkpoint in log.inventory().checkpoints for path in checkpoint.paths),
        ),
    )


def _files_of(log: Log, savepoints: Iterable[Savepoint], newest: TableVersion) -> frozenset[str]:
    files: set[str] = set()
    for version in sorted({savepoint.version for savepoint in savepoints if savepoint.version < newest}):
        try:
            files.update(replay_log(log, version).adds)
        except ObjectMissingError:
            # The log does not reach back that far: that version is unreadable.
            continue
    return frozenset(files)


def _settled_version(log: Log, horizon: TableVersion, *, dry_run: bool) -> TableVersion | None:
    if dry_run:
        # A real round would write a checkpoint first.
        return horizon
    versions = [checkpoint.version for checkpoint in log.inventory().checkpoints]
    return max((version for version in versions if version <= horizon), default=None)
