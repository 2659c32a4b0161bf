"""Savepoints: named table versions that stay readable until they are dropped.

A savepoint is a transaction in the log, so every process sees it and it survives the loss of the catalog. It keeps
exactly the files of its version, and a checkpoint to read them from; other versions are collected as usual. So an old
savepoint costs, once, the files that were replaced since.

A collector publishes its horizon before it deletes, and then looks for savepoints. A process that makes a savepoint of
an older version commits it first, and then looks at the horizon. In either order one sees the other, without clocks:
the collector keeps the version, or the savepoint is dropped again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final
from urllib.parse import unquote

from millpond.statestore.app_ids import SAVEPOINT_RELEASED, AppId
from millpond.statestore.errors import (
    ConflictError,
    DataError,
    InvalidError,
    ObjectExistsError,
    ObjectMissingError,
    did_you_mean,
)
from millpond.statestore.failpoint import reach
from millpond.statestore.history.replayed_log import ReplayedLog, replay_log
from millpond.statestore.log.checkpoint import checkpoint_path, write_part
from millpond.statestore.log.committer import Committer
from millpond.statestore.log.log import LOG_FOLDER, Log
from millpond.statestore.log.rules import CommitRequest
from millpond.statestore.log.snapshot import Snapshot, load, table_version
from millpond.statestore.log.writer import log_boundary
from millpond.statestore.objects.ranges import publish_version, published_version
from millpond.statestore.types import Objects, TableVersion

HORIZON_FOLDER: Final = "_millpond/collected_horizon"
_SAYS: Final = b"Versions below this one may have lost files, unless a savepoint keeps them.\n"
_COLLECTED: Final = "that version has been collected: it was older than the retention"
_NAME_CHARACTERS_MAX = 200
_TRIES = 8  # newest versions, before collectors count as faster


def collected_horizon(objects: Objects) -> TableVersion:
    """Return the version below which files may have been deleted."""
    return published_version(objects, HORIZON_FOLDER)


def publish_collected_horizon(objects: Objects, version: TableVersion) -> None:
    """Announce that versions below this one may lose files; call it before the first deletion."""
    publish_version(objects, HORIZON_FOLDER, version, _SAYS)


def load_version(log: Log, version: int) -> Snapshot:
    """Load an older version of a store, and refuse one that cannot be read any more.

    Raises:
        InvalidError: that is no version.
        ObjectMissingError: there is no such version, or the log does not reach back to it.
        ConflictError: files of the version have been collected.
    """
    number = table_version(version)
    try:
        snapshot = load(log, number)
    except ObjectMissingError as error:
        # A file that is missing at or behind the boundary is damage, which the error names.
        if number >= log_boundary(log.objects):
            raise
        raise ObjectMissingError(_COLLECTED, store=log.objects.url, version=version) from error
    refuse_collected(log.objects, number, (file.path for file in snapshot.files))
    return snapshot


def refuse_collected(objects: Objects, version: TableVersion, paths: Iterable[str]) -> None:
    """Raise `ConflictError` if a version has lost one of its files; others may follow at any moment."""
    oldest = collected_horizon(objects)
    if version < oldest and not set(objects.list("")).issuperset(paths):
        raise ConflictError(_COLLECTED, version=version, oldest_kept=oldest)


@dataclass(frozen=True, slots=True)
class Savepoint:
    """A name, and the table version that stays readable under it."""

    name: str
    version: TableVersion


def open_savepoints(txns: Mapping[str, int]) -> tuple[Savepoint, ...]:
    opened = [
        Savepoint(unquote(app_id.removeprefix(AppId.SAVEPOINT)), TableVersion(at))
        for app_id, at in txns.items()
        if app_id.startswith(AppId.SAVEPOINT) and at != SAVEPOINT_RELEASED
    ]
    return tuple(sorted(opened, key=lambda savepoint: (savepoint.version, savepoint.name)))


def make_savepoint(
    committer: Committer, log: Log, name: str, version: TableVersion | None = None
) -> Savepoint:
    """Keep a version readable under a name; repeating the call changes nothing. See `Store.savepoint`."""
    if not name or len(name) > _NAME_CHARACTERS_MAX or name.isdecimal():
        raise InvalidError(
            "a savepoint's name must have 1 to 200 characters, not all of them digits", name=name
        )
    # A collector may take the newest version once a newer one exists; then try that one.
    for _ in range(_TRIES if version is None else 1):
        made = _make(committer, log, name, version)
        if made is not None:
            return made
    oldest = collected_horizon(log.objects)
    if version is None:
        raise ConflictError(
            "the newest version is collected before it can be kept: try again", oldest_kept=oldest
        )
    raise ConflictError(_COLLECTED, version=version, oldest_kept=oldest)


def _make(committer: Committer, log: Log, name: str, version: TableVersion | None) -> Savepoint | None:
    snapshot = committer.refresh()
    kept = snapshot.version if version is None else table_version(version)
    if kept > snapshot.version:
        raise InvalidError(
            "there is no such table version (see `millpond history`)", version=kept, newest=snapshot.version
        )
    before = open_savepoints(snapshot.txns)
    known = next((savepoint for savepoint in before if savepoint.name == name), None)
    if known is not None and (version is None or known.version == version):
        if _is_whole(log, known):
            return known
        # Its maker was killed between commit and look: the savepoint keeps files that are gone, so drop it.
        drop_savepoint(committer, name)
        return None
    if known is not None:
        raise InvalidError(
            "another savepoint has that name: drop it first, or take another name",
            savepoint=name,
            version=known.version,
        )
    if kept < collected_horizon(log.objects) and not _is_kept(before, kept, name):
        return None
    # Checkpoint first: otherwise a kill in between leaves a savepoint that nobody can read.
    if not _write_checkpoint(log, kept):
        return None
    committer.commit(CommitRequest(kind="savepoint", positions={AppId.SAVEPOINT.of(name): int(kept)}))
    # Look at the horizon only after the commit: a collector that published later has seen the savepoint.
    # Another savepoint of that version keeps its files too, if it was there when this one was committed.
    others = open_savepoints(committer.snapshot.txns)
    if kept < collected_horizon(log.objects) and not _is_kept(others, kept, name):
        drop_savepoint(committer, name)
        return None
    return Savepoint(name, kept)


def drop_savepoint(committer: Committer, name: str) -> None:
    known = {savepoint.name for savepoint in open_savepoints(committer.refresh().txns)}
    if name not in known:
        raise InvalidError(
            f"there is no savepoint of that name{did_you_mean(name, known)}",
            savepoint=name,
            known=sorted(known),
        )
    positions = {AppId.SAVEPOINT.of(name): SAVEPOINT_RELEASED}
    committer.commit(CommitRequest(kind="savepoint", positions=positions))


def write_checkpoint_of(
    objects: Objects, replayed: ReplayedLog, *, names_newest: bool, on_disk: Iterable[str] | None = None
) -> bool:
    """Write the checkpoint of a version; return False if there is one.

    ``names_newest`` makes readers begin with the checkpoint, so only the newest may be named. ``on_disk`` are the removed files
    to remember, by default those that the store lists.
    """
    if on_disk is None:
        on_disk = [path for path in objects.list("") if not path.startswith(f"{LOG_FOLDER}/")]
    actions = tuple(replayed.actions(on_disk=on_disk))
    path = checkpoint_path(replayed.version)
    reach("checkpoint.summed")
    try:
        objects.put_if_absent(path, write_part(actions, path, replayed.snapshot.digest))
    except ObjectExistsError:
        # Another process has written an equivalent checkpoint.
        return False
    reach("checkpoint.written")
    if names_newest:
        Log(objects).name_checkpoint(replayed.version, len(actions))
        reach("checkpoint.named")
    return True


def _is_kept(savepoints: Iterable[Savepoint], version: TableVersion, name: str) -> bool:
    return any(savepoint.version == version and savepoint.name != name for savepoint in savepoints)


def _is_whole(log: Log, known: Savepoint) -> bool:
    if known.version >= collected_horizon(log.objects):
        return True
    try:
        files = replay_log(log, known.version).adds.keys()
    except ObjectMissingError:
        return False
    return files <= set(log.objects.list(""))


def _write_checkpoint(log: Log, version: TableVersion) -> bool:
    """Write the checkpoint of a version if there is none; return False if the version was collected."""
    if any(known.version == version for known in log.inventory().checkpoints):
        return True
    try:
        replayed = replay_log(log, version)
    except DataError:
        if version < collected_horizon(log.objects):
            return False
        raise
    write_checkpoint_of(log.objects, replayed, names_newest=False)
    return True
