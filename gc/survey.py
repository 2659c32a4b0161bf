"""The survey that every collector works on: the listed files, the state of the log, and the published horizon.

A round makes one survey, in a safe order. The files are listed before the log is read, so the log names every listed
file that is committed meanwhile. The horizon is published before any collector deletes, and savepoints are read after
that. The horizon is the oldest version that stays readable: retention and the pins of readers hold it back, while
savepoints do not, because collectors spare the files of their versions. A writer needs no pin: it works on the newest
version, and checks the boundary of a log cleanup (`millpond.statestore.log.writer`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from millpond.statestore.catalog.catalog import READER_LIFETIME_MS, Catalog, HorizonKind, collected_below
from millpond.statestore.errors import ConflictError, ObjectMissingError
from millpond.statestore.history.replayed_log import ReplayedLog, replay_log
from millpond.statestore.history.savepoint import (
    Savepoint,
    open_savepoints,
    publish_collected_horizon,
    write_checkpoint_of,
)
from millpond.statestore.log.action import CommitInfo
from millpond.statestore.log.commit_file import decode
from millpond.statestore.log.log import LOG_FOLDER, Log, commit_path
from millpond.statestore.log.snapshot import Snapshot
from millpond.statestore.types import Clock, Objects, TableVersion

_COLLECTOR: Final = "gc"
_TRIES: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Collection:
    """The result of a collector, or its plan on a dry run."""

    kind: str
    paths: tuple[str, ...] = ()
    made: tuple[str, ...] = ()  # what replaced the deleted files, or made the deletion possible
    freed_bytes: int = 0  # now, or once the removed files are vacuumed; 0 where unknown
    skipped: tuple[str, ...] = ()  # reasons why garbage was left, one sentence each


@dataclass(frozen=True, slots=True, kw_only=True)
class Horizon:
    """The oldest version that stays readable, and for reports the reason, such as "retention" or "a reader"."""

    version: TableVersion
    held_by: str


@dataclass(frozen=True, slots=True)
class Horizons:
    """Finds and publishes the horizon of one store; ``_catalog`` is ``None`` for a store without one."""

    _log: Log
    _catalog: Catalog | None
    _clock: Clock
    _retention_ms: int

    def find(self, snapshot: Snapshot) -> Horizon:
        """Return the horizon for the newest snapshot; publish nothing."""
        before_ms = self._clock.now_us() // 1_000 - self._retention_ms
        horizon = Horizon(version=version_at(self._log, snapshot.version, before_ms), held_by="retention")
        if self._catalog is None:
            return horizon
        needed = self._catalog.oldest_needed()
        if needed is not None and needed < horizon.version:
            horizon = Horizon(version=needed, held_by="a reader")
        trust_ms = min(READER_LIFETIME_MS, self._retention_ms)
        is_young = self._clock.now_us() - self._catalog.created_us < trust_ms * 1_000
        if is_young and horizon.version > 0:
            # A new or rebuilt catalog may not list all readers yet.
            horizon = Horizon(version=TableVersion(0), held_by="the catalog's youth")
        return horizon

    def publish(self, snapshot: Snapshot) -> Horizon:
        """Find the horizon and publish it, before anything is deleted; `ConflictError` if readers kept pinning versions first."""
        horizon = self._publish_to_readers(snapshot)
        # Also in the store: a process that makes a savepoint of an older version commits first and looks here
        # after, and collectors read savepoints after this. So one of the two sees the other.
        publish_collected_horizon(self._log.objects, horizon.version)
        return horizon

    def _publish_to_readers(self, snapshot: Snapshot) -> Horizon:
        horizon = self.find(snapshot)
        if self._catalog is None:
            return horizon
        for _ in range(_TRIES):
            try:
                # The catalog refuses a horizon above a pin, and a pin below the horizon. So whichever comes first, no
                # file is deleted that a reader needs.
                self._catalog.publish_horizon(_COLLECTOR, horizon.version, HorizonKind.COLLECTOR)
            except ConflictError:
                # A reader came in between, or an earlier horizon is above this one: it never falls.
                horizon, published = self.find(snapshot), collected_below(self._catalog.horizons())
                if published > horizon.version:
                    horizon = Horizon(version=published, held_by="an earlier collection")
            else:
                return horizon
        raise ConflictError("readers keep coming first", horizon=horizon.version)


def version_at(log: Log, newest: TableVersion, before_ms: int) -> TableVersion:
    """Return the newest version as of ``before_ms``; the oldest remaining version if all are younger.

    Commits are bisected, since their times rise (as far as clocks do). A commit without a time counts as new.
    """

    def committed_ms(number: int) -> int:
        data = log.read(TableVersion(number))
        if data is None:
            # The file was cleaned up, so the version is old.
            return before_ms
        actions = decode(data, commit_path(TableVersion(number)))
        infos = (action for action in actions if isinstance(action, CommitInfo))
        return next((info.timestamp_ms for info in infos if info.timestamp_ms), 1 << 62)

    return TableVersion(bisect_right(range(1, newest + 1), before_ms, key=committed_ms))


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """The input of every collector: the listed files, the state of the log, and the horizon.

    The settled part of the log ends at the last checkpoint at or before the horizon (``None`` without one). ``pinned`` are the
    files of open savepoints. ``rests_on`` are the newest commit and the checkpoints, which justify every deletion.
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


def survey(objects: Objects, horizons: Horizons, *, dry_run: bool, at_once: bool = False) -> Survey:
    log = Log(objects)
    listed = objects.list("")
    latest = log.latest_version()
    if latest is None:
        raise ObjectMissingError("there is no table", store=objects.url)
    newest = replay_log(log, latest)
    horizon = (horizons.find if dry_run else horizons.publish)(newest.snapshot)
    # Savepoints that were committed while the horizon was being published count too.
    newest.follow(log, log.latest_version() or latest)
    savepoints = open_savepoints(newest.snapshot.txns)
    if at_once and not dry_run and horizon.version > 0:
        write_checkpoint_at(log, horizon.version)
    checkpoints = log.inventory().checkpoints
    before = [checkpoint.version for checkpoint in checkpoints if checkpoint.version <= horizon.version]
    # A dry run counts on the checkpoint that a real round would write first.
    settled = horizon.version if dry_run else max(before, default=None)
    return Survey(
        objects=objects,
        data_files=frozenset(path for path in listed if not path.startswith(f"{LOG_FOLDER}/")),
        log_files=tuple(path for path in listed if path.startswith(f"{LOG_FOLDER}/")),
        newest=newest,
        settled=None if settled is None else replay_log(log, settled),
        horizon=horizon,
        savepoints=savepoints,
        pinned=_files_of(log, savepoints, newest.version),
        rests_on=(commit_path(newest.version), *(path for known in checkpoints for path in known.paths)),
    )


def write_checkpoint_at(log: Log, version: TableVersion) -> bool:
    """Write the checkpoint of an older version unless there is one; return False if the log does not reach back that far."""
    if any(checkpoint.version == version for checkpoint in log.inventory().checkpoints):
        return True
    try:
        write_checkpoint_of(log.objects, replay_log(log, version), names_newest=False)
    except ObjectMissingError:
        return False
    return True


def _files_of(log: Log, savepoints: Iterable[Savepoint], newest: TableVersion) -> frozenset[str]:
    files: set[str] = set()
    for version in sorted({savepoint.version for savepoint in savepoints if savepoint.version < newest}):
        try:
            files.update(replay_log(log, version).adds)
        except ObjectMissingError:
            # The log does not reach back that far: that version is unreadable.
            continue
    return frozenset(files)
