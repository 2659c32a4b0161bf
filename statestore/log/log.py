"""The log: one commit file per table version, each put once and never changed.

A single operation of the object store, put-if-absent (`Log.put`), decides which writer
commits a version. The next version is read by name, so that following the log costs only
its new commits; the folder is listed only when a table is opened cold.

Commits of other engines on a store's rows: what moves data is refused, what only tidies up is welcome.

State, record ids, timers and input positions of a store change together. Another engine's RESTORE, DELETE,
UPDATE, MERGE or WRITE changes the rows and leaves the positions, so that what was consumed never comes
again, or counts twice. Delta says which commits those are: their file actions carry ``dataChange``, and
RESTORE is one by its name. Compactions (``dataChange`` is false), vacuums and checkpoints change nothing
that a reader sees. A store's tables are known by their configuration, so the tables of sinks, to which
others may write, are left alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import orjson

from millpond.statestore.errors import DataError, ObjectMissingError
from millpond.statestore.log.action import Action, Add, CommitInfo, Metadata, Remove, Txn
from millpond.statestore.log.checkpoint import Checkpoint, checkpoints_among, is_sealed, read_part
from millpond.statestore.types import Objects, TableVersion

if TYPE_CHECKING:
    from collections.abc import Iterator


LOG_FOLDER: Final = "_delta_log"
_COMMIT: Final = re.compile(r"^_delta_log/(\d{20})\.json$")


def commit_path(version: int) -> str:
    """The path of a version's commit file, relative to the table's root.

    Example:
        >>> commit_path(7)
        '_delta_log/00000000000000000007.json'
    """
    return f"{LOG_FOLDER}/{version:020d}.json"


@dataclass(frozen=True, slots=True)
class LogInventory:
    """The result of listing the log: versions with a commit file and complete checkpoints, both rising."""

    versions: tuple[TableVersion, ...]
    checkpoints: tuple[Checkpoint, ...]

    @property
    def latest(self) -> TableVersion | None:
        """The newest version in the listing; ``None`` when there is no table."""
        known = [*self.versions[-1:], *(checkpoint.version for checkpoint in self.checkpoints[-1:])]
        return max(known, default=None)


class Log:
    """The commit files of one Delta table.

    Args:
        objects: the store whose root is the table's root.
    """

    def __init__(self, objects: Objects) -> None:
        self._objects = objects

    @property
    def objects(self) -> Objects:
        """The store whose root is the table's root."""
        return self._objects

    def read(self, version: TableVersion) -> bytes | None:
        """The bytes of a version's commit file; ``None`` when there is none."""
        try:
            return self._objects.get(commit_path(version))
        except ObjectMissingError:
            return None

    def put(self, version: TableVersion, data: bytes) -> None:
        """Make ``data`` the commit of that version, unless the version has a commit.

        Raises:
            ObjectExistsError: the version is taken, perhaps by an earlier attempt of the caller's own.
            UnavailableError: the commit may or may not have landed.
        """
        self._objects.put_if_absent(commit_path(version), data)

    def sync(self, version: TableVersion) -> None:
        """Let a version that was read survive a power cut; the process that wrote it may not have come to that."""
        self._objects.sync((commit_path(version),))

    def latest_version(self) -> TableVersion | None:
        """The newest version, by a listing; ``None`` when there is no table."""
        return self.inventory().latest

    def inventory(self) -> LogInventory:
        """List the versions and checkpoints of the log."""
        paths = self._objects.list(LOG_FOLDER)
        return LogInventory(_versions_among(paths), checkpoints_among(paths))

    def read_checkpoint(self, checkpoint: Checkpoint) -> Iterator[Action]:
        """The actions of a checkpoint.

        Raises:
            DataError: a part is missing or cannot be read.
        """
        for path in checkpoint.paths:
            yield from read_part(self._objects.get(path), path)

    def name_checkpoint(self, version: TableVersion, size: int) -> None:
        """Tell Delta readers with which checkpoint to begin: the newest.

        Args:
            version: its version.
            size: how many actions it has.

        Raises:
            UnavailableError: the store is unavailable.
        """
        pointer = orjson.dumps({"version": version, "size": size})
        self._objects.put(f"{LOG_FOLDER}/_last_checkpoint", pointer)

    def is_own_checkpoint(self, checkpoint: Checkpoint) -> bool:
        """Whether Millpond wrote it, not another engine.

        Raises:
            ObjectMissingError: a part is missing (a `DataError`).
        """
        return all(is_sealed(self._objects.get(path)) for path in checkpoint.paths)

    def require(self, version: TableVersion) -> bytes:
        """The bytes of a commit file that must exist.

        Raises:
            ObjectMissingError: it is missing (a `DataError`).
        """
        data = self.read(version)
        if data is None:
            raise ObjectMissingError(
                "a commit file is missing", path=commit_path(version), store=self._objects.url
            )
        return data


def _versions_among(paths: Iterable[str]) -> tuple[TableVersion, ...]:
    matches = (_COMMIT.search(path) for path in paths)
    return tuple(sorted(TableVersion(int(match[1])) for match in matches if match))


_OWN_CONFIGURATION: Final = "millpond."
_OWN_TXN: Final = "millpond/"
_RESTORE: Final = "RESTORE"
_WAY_OUT: Final = (
    "another engine changed the store's rows, and input positions did not change with them: `millpond repair` "
    "takes the store back to the version before"
)


def foreign_change(actions: Iterable[Action], configuration: Mapping[str, str]) -> CommitInfo | None:
    """What another engine's commit says of itself if it changes what a store's rows mean; ``None`` otherwise.

    Args:
        actions: the commit's.
        configuration: the table's, before the commit; that of a table that is no store accepts everything.
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


def refuse_foreign_change(
    version: int, actions: Iterable[Action], configuration: Mapping[str, str], *, store: str = ""
) -> None:
    """Refuse another engine's commit that changes what a store's rows mean; see `foreign_change`.

    Raises:
        DataError: it is one; the error names version, operation and engine.
    """
    info = foreign_change(actions, configuration)
    if info is not None:
        raise DataError(
            _WAY_OUT,
            version=version,
            operation=info.operation or "unknown",
            engine=info.engine_info or "unknown",
            path=commit_path(version),
            **({"store": store} if store else {}),
        )


def _changes(action: Action, operation: str, own: Mapping[str, str]) -> bool:
    match action:
        case Add() | Remove():
            # A restore is one, whatever it says of its files.
            return action.data_change or operation == _RESTORE
        case Txn():
            return action.app_id.startswith(_OWN_TXN)
        case Metadata():
            return any(action.configuration.get(name) != value for name, value in own.items())
        case _:
            return False
