"""The log: one commit file per table version, each put once and never changed.

One operation of the object store, put-if-absent, decides which writer commits a version. The next version is read by
name, so only a cold open lists the folder, from the newest checkpoint on.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import orjson

from millpond.statestore.errors import DataError, ObjectMissingError
from millpond.statestore.log.action import Action, Add, CommitInfo, Metadata, Remove, Txn
from millpond.statestore.log.checkpoint import VERSION_MAX, Checkpoint, checkpoints_among, read_part
from millpond.statestore.log.commit_file import decode, digest_of
from millpond.statestore.objects.ranges import ParallelObjects, read_ahead
from millpond.statestore.rows.row_format import has_parquet_seal
from millpond.statestore.types import Objects, TableVersion

LOG_FOLDER: Final = "_delta_log"
_POINTER: Final = f"{LOG_FOLDER}/_last_checkpoint"
# Commits that are in memory at once.
AHEAD_MAX: Final = 64
_COMMIT: Final = re.compile(r"^_delta_log/(\d{20})\.json$")


def commit_path(version: int) -> str:
    return f"{LOG_FOLDER}/{version:020d}.json"


@dataclass(frozen=True, slots=True)
class LogInventory:
    """A listing of the log: versions with a commit file, and complete checkpoints, both rising."""

    versions: tuple[TableVersion, ...]
    checkpoints: tuple[Checkpoint, ...]

    @property
    def latest(self) -> TableVersion | None:
        known = [*self.versions[-1:], *(checkpoint.version for checkpoint in self.checkpoints[-1:])]
        return max(known, default=None)

    def reaches(self, after: int, until: int) -> bool:
        """Return True if the listing has every commit after one version until another."""
        return bisect_right(self.versions, until) - bisect_right(self.versions, after) == until - after


class Log:
    """The commit files of one Delta table, in an object store whose root is the table's root."""

    def __init__(self, objects: Objects) -> None:
        self.objects: Objects = objects

    def read(self, version: TableVersion) -> bytes | None:
        try:
            return self.objects.get(commit_path(version))
        except ObjectMissingError:
            return None

    def require(self, version: TableVersion) -> bytes:
        """Read a commit file, or raise `ObjectMissingError` (a `DataError`)."""
        data = self.read(version)
        if data is None:
            raise ObjectMissingError(
                "a commit file is missing", path=commit_path(version), store=self.objects.url
            )
        return data

    def put(self, version: TableVersion, data: bytes) -> None:
        """Commit a version that has none; its `ObjectExistsError` may come from an earlier attempt of this caller."""
        self.objects.put_if_absent(commit_path(version), data)

    def sync(self, version: TableVersion) -> None:
        # The process that wrote the version may have died before its own sync: a power cut could still revert it.
        self.objects.sync((commit_path(version),))

    def commits(self, versions: range) -> Iterator[tuple[TableVersion, bytes]]:
        """Read commit files in order, some at once; raise `ObjectMissingError` for the first missing one."""
        for begin in range(0, len(versions), AHEAD_MAX):
            some = versions[begin : begin + AHEAD_MAX]
            ahead = self.ahead(some)
            for version in map(TableVersion, some):
                yield version, ahead.require(version)

    def ahead(self, versions: Iterable[int], checkpoint: Checkpoint | None = None) -> Log:
        """Return this log with these commits, and the checkpoint, in memory, where that is faster."""
        paths = [*(() if checkpoint is None else checkpoint.paths), *map(commit_path, versions)]
        return Log(read_ahead(self.objects, paths))

    def latest_version(self) -> TableVersion | None:
        since = self.named_checkpoint()
        recent = self.inventory(since).latest
        return self.inventory().latest if recent is None and since else recent

    def inventory(self, since: int = 0) -> LogInventory:
        """List the log from a version on."""
        paths = self.objects.list(LOG_FOLDER, f"{LOG_FOLDER}/{since:020d}" if since else None)
        versions = sorted(
            TableVersion(version)
            for path in paths
            if (match := _COMMIT.search(path)) and (version := int(match[1])) <= VERSION_MAX
        )
        return LogInventory(tuple(versions), checkpoints_among(paths))

    def read_checkpoint(self, checkpoint: Checkpoint) -> Iterator[Action]:
        commit = self._digest_at(checkpoint.version)
        for path in checkpoint.paths:
            yield from read_part(self.objects.get(path), path, commit)

    def _digest_at(self, version: TableVersion) -> str:
        # Damage to the commit does not make its checkpoint wrong: the next commit's link reports it.
        with suppress(DataError):
            data = self.require(version)
            decode(data, commit_path(version))
            return digest_of(data)
        return ""

    def name_checkpoint(self, version: TableVersion, size: int) -> None:
        pointer = orjson.dumps({"version": version, "size": size})
        self.objects.put(_POINTER, pointer)

    def named_checkpoint(self) -> TableVersion:
        """Return the version that `name_checkpoint` has named, which may be wrong; 0 for none.

        It only shortens a listing, so it is not read where a listing is one call however long.
        """
        if not isinstance(self.objects, ParallelObjects):
            return TableVersion(0)
        try:
            version = orjson.loads(self.objects.get(_POINTER))["version"]
        except (DataError, ValueError, KeyError, TypeError):
            return TableVersion(0)
        return TableVersion(version if type(version) is int and 0 < version <= VERSION_MAX else 0)

    def is_own_checkpoint(self, checkpoint: Checkpoint) -> bool:
        """Return True for a checkpoint that Millpond wrote; those of other engines have no seal."""
        return all(has_parquet_seal(memoryview(self.objects.get(path))) for path in checkpoint.paths)


_OWN_CONFIGURATION: Final = "millpond."
_OWN_TXN: Final = "millpond/"
_RESTORE: Final = "RESTORE"
_WAY_OUT: Final = (
    "another engine changed the store's rows, and input positions did not change with them: `millpond repair` "
    "takes the store back to the version before"
)


def is_of_store(configuration: Mapping[str, str]) -> bool:
    """Return True for the configuration of a store's table."""
    return any(name.startswith(_OWN_CONFIGURATION) for name in configuration)


def foreign_change(actions: Iterable[Action], configuration: Mapping[str, str]) -> CommitInfo | None:
    """Return the provenance of another engine's commit if it changes the meaning of a store's rows, else ``None``.

    ``configuration`` is the table's before the commit; a table that is not a store accepts every commit.
    """
    own = {name: value for name, value in configuration.items() if name.startswith(_OWN_CONFIGURATION)}
    if not own:
        return None
    commit = tuple(actions)
    info = next((action for action in commit if isinstance(action, CommitInfo)), None)
    if info is not None and info.millpond is not None:
        return None
    operation = "" if info is None else info.operation
    if any(_changes(action, operation, own) for action in commit):
        return info or CommitInfo(operation="", timestamp_ms=0, engine_info="")
    return None


def refuse_foreign_change(version: int, actions: Iterable[Action], configuration: Mapping[str, str]) -> None:
    """Raise `DataError` for another engine's commit that changes what the rows mean, such as RESTORE, DELETE or MERGE.

    Such a commit leaves the input positions, so records would be lost or counted twice. Compactions, vacuums and checkpoints of
    other engines are accepted, and so is every commit on a sink's table, which has no Millpond configuration.
    """
    info = foreign_change(actions, configuration)
    if info is not None:
        raise DataError(
            _WAY_OUT,
            version=version,
            operation=info.operation or "unknown",
            engine=info.engine_info or "unknown",
            path=commit_path(version),
        )


def _changes(action: Action, operation: str, own: Mapping[str, str]) -> bool:
    match action:
        case Add() | Remove():
            # A RESTORE moves data even where its actions claim dataChange=false.
            has_lost_rows = isinstance(action, Add) and action.has_deletion_vector
            return action.data_change or has_lost_rows or operation == _RESTORE
        case Txn():
            return action.app_id.startswith(_OWN_TXN)
        case Metadata():
            return any(action.configuration.get(name) != value for name, value in own.items())
        case _:
            return False
