"""The snapshot: a table at one version, in memory, kept current by applying commits.

The cost of `Snapshot.apply` depends on the commit, not on the size of the table. It
verifies that the commit is whole (its seal) and follows the commit before it (the digest
chain). `load` opens a table cold: it replays a log that is whole from its start, because
commits carry digests and checkpoints do not; otherwise it starts from the newest checkpoint.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Final

from millpond.statestore.errors import DataError, InvalidError, ObjectMissingError, check
from millpond.statestore.interval import Interval, superseded
from millpond.statestore.log.action import Action, Add, CommitInfo, Metadata, Other, Protocol, Remove, Txn
from millpond.statestore.log.checkpoint import checkpoint_path
from millpond.statestore.log.commit_file import decode, digest_of
from millpond.statestore.log.files import FileIndex, LiveFile
from millpond.statestore.log.log import Log, LogInventory, commit_path, refuse_foreign_change
from millpond.statestore.rows.row import Fence, unpack_fence
from millpond.statestore.system import collector_paused
from millpond.statestore.types import TableVersion

if TYPE_CHECKING:
    from millpond.statestore.log.checkpoint import Checkpoint

NO_TABLE: Final = TableVersion(-1)
"""The version of a table that has no commit yet."""

RESTORED_VERSION: Final = "restored_version"
"""What a commit says that brings an older version back: which one."""

_READER_VERSION_MAX: Final = 1
_LOAD_TRIES: Final = 3


class Snapshot:
    """A table at one version.

    It changes when commits are applied, and is for one thread at a time.

    Attributes:
        version: the newest applied commit; `NO_TABLE` at first.
        digest: SHA-256 of that commit's bytes; "" when only a checkpoint records it.
        txns: the Delta application transactions: fences, input positions, supersteps.
        watermarks: the last journaled input watermark of each interval, by application id,
            as far as the applied commits contain them.
        source_offsets: where each input's position lies in its source, by the input's application id; see
            `CommitRequest`.
        metadata: schema, partitioning and configuration.
        protocol: the protocol versions that the table requires.
    """

    def __init__(self) -> None:
        self.version: TableVersion = NO_TABLE
        self.digest: str = ""
        self.txns: dict[str, int] = {}
        self.watermarks: dict[str, int] = {}
        self.source_offsets: dict[str, str] = {}
        self.metadata: Metadata | None = None
        self.protocol: Protocol = Protocol()
        self._files = FileIndex()

    @property
    def configuration(self) -> Mapping[str, str]:
        """The table's configuration."""
        return self.metadata.configuration if self.metadata else {}

    @property
    def file_count(self) -> int:
        """How many files are live."""
        return len(self._files)

    @property
    def size_bytes(self) -> int:
        """Size of all live files together."""
        return self._files.size_bytes

    @property
    def files(self) -> tuple[LiveFile, ...]:
        """All live files in the order in which they were added."""
        return self._files.all()

    def file(self, path: str) -> LiveFile | None:
        """The live file at a path; ``None`` if there is none."""
        return self._files.get(path)

    def statistics_of(self, path: str) -> str | None:
        """The statistics of the live file at a path, as the log has them; ``None`` if there are none."""
        return self._files.statistics_of(path)

    @property
    def computations(self) -> tuple[str, ...]:
        """The computations that have live files, sorted."""
        return self._files.computations()

    def files_in(self, computation: str) -> tuple[LiveFile, ...]:
        """The live files of a computation in the order in which they were added."""
        return self._files.in_computation(computation)

    def files_of(self, interval: Interval) -> tuple[LiveFile, ...]:
        """The live files that can hold keys of the interval, in the order in which they were added.

        After a change of boundaries, or a rewrite by another engine, they may hold keys of
        other intervals too.
        """
        return self._files.in_interval(interval)

    def fence_of(self, interval: Interval) -> Fence | None:
        """The fence that the table stores for an interval; ``None`` if it has never been owned."""
        version = self.txns.get(interval.app_id)
        return None if version is None else unpack_fence(version)

    def live_intervals(self, computation: str | None = None) -> dict[Interval, Fence]:
        """The live intervals of a computation, or of all of them, in key order; see `live_intervals`."""
        return live_intervals(self.txns, computation)

    @collector_paused()
    def apply(self, version: TableVersion, data: bytes) -> tuple[Action, ...]:
        """Apply one commit; a refused commit changes nothing.

        Args:
            version: the commit's version, which must be the next version.
            data: the bytes of its commit file.

        Returns:
            The commit's actions.

        Raises:
            DataError: the file is damaged or does not follow the one before it, or another engine changed
                the data of a store's rows by it.
            InvalidError: it makes the table require a newer reader.
        """
        actions = decode(data, commit_path(version))
        self._check_chain(version, actions)
        refuse_foreign_change(version, actions, self.configuration)
        self.apply_actions(version, actions, digest_of(data))
        return actions

    @collector_paused()
    def apply_actions(self, version: TableVersion, actions: Iterable[Action], digest: str) -> None:
        """Apply a commit that the caller has verified, or has just written."""
        check(version == self.version + 1, "commits are applied in order", at=self.version, next=version)
        verified = tuple(actions)
        _check_readable(verified, commit_path(version))
        self._take(verified, version)
        self.version, self.digest = version, digest

    def restart_from(self, checkpoint: Checkpoint, actions: Iterable[Action], commit: bytes | None) -> None:
        """Start from the state in a checkpoint.

        Args:
            checkpoint: the checkpoint.
            actions: its actions.
            commit: its version's commit file; ``None`` when that was cleaned up.
        """
        check(self.version == NO_TABLE, "only a fresh snapshot starts from a checkpoint", at=self.version)
        verified = tuple(actions)
        _check_readable(verified, checkpoint.paths[0])
        self._take(verified, checkpoint.version)
        if commit is not None:
            self._take_offsets_of(commit, commit_path(checkpoint.version))
        self.version, self.digest = checkpoint.version, "" if commit is None else digest_of(commit)

    def _take_offsets_of(self, commit: bytes, path: str) -> None:
        try:
            actions = decode(commit, path)
        except DataError:
            # The commit after this one is chained to its digest, which says so.
            return
        for action in actions:
            if isinstance(action, CommitInfo):
                self._take_offsets(action)

    def _check_chain(self, version: TableVersion, actions: tuple[Action, ...]) -> None:
        for action in actions:
            if isinstance(action, CommitInfo) and action.millpond is not None:
                previous = action.millpond.get("previous", "")
                if previous and self.digest and previous != self.digest:
                    raise DataError(
                        "the commit before this one is not the one that it was built on",
                        path=commit_path(version),
                        before=commit_path(version - 1),
                        expected=previous,
                        found=self.digest,
                    )

    def _take(self, actions: tuple[Action, ...], version: TableVersion) -> None:
        for action in actions:
            match action:
                case Add():
                    self._take_add(action, version)
                case Txn():
                    self.txns[action.app_id] = action.version
                case Remove():
                    self._files.remove(action.path)
                case CommitInfo():
                    self._take_watermarks(action)
                    self._take_offsets(action)
                case Metadata():
                    self.metadata = action
                case Protocol():
                    self.protocol = action
                case Other():
                    pass

    def _take_add(self, add: Add, version: TableVersion) -> None:
        known = self._files.get(add.path)
        # A file that is added again, with other statistics or tags, keeps the version of its first add.
        self._files.put(LiveFile.from_add(add, version if known is None else known.added_version), add.stats)

    def _take_watermarks(self, info: CommitInfo) -> None:
        told = info.millpond or {}
        watermarks = told.get("watermarks")
        if RESTORED_VERSION in told:
            # What the undone supersteps had reached is no watermark any more, known or not.
            self.watermarks = {}
        if isinstance(watermarks, Mapping):
            self.watermarks.update({app_id: at for app_id, at in watermarks.items() if isinstance(at, int)})

    def _take_offsets(self, info: CommitInfo) -> None:
        offsets = (info.millpond or {}).get("source_offsets")
        if isinstance(offsets, Mapping):
            self.source_offsets = {app_id: str(text) for app_id, text in offsets.items()}


def live_intervals(txns: Mapping[str, int], computation: str | None = None) -> dict[Interval, Fence]:
    """The intervals that no split or merge has replaced, each with its fence, by computation and key.

    A ``txn`` never leaves the table, so those of replaced intervals are among them too.

    Args:
        txns: the application transactions of a table.
        computation: whose intervals; ``None`` for those of all.
    """
    named = ((Interval.from_app_id(app_id), version) for app_id, version in txns.items())
    fences = {
        interval: unpack_fence(version)
        for interval, version in named
        if interval is not None and computation in (None, interval.computation)
    }
    gone = superseded({interval: fence.sequencer for interval, fence in fences.items()})
    ordered = sorted(fences.keys() - gone.keys(), key=lambda interval: (interval.computation, interval.low))
    return {interval: fences[interval] for interval in ordered}


def load(log: Log, version: TableVersion | None = None) -> Snapshot:
    """Open a table cold, at its newest or an older version.

    Raises:
        ObjectMissingError: there is no table, or no such version.
        DataError: a commit file is missing, damaged or out of the chain.
        InvalidError: the table requires a newer reader.
    """
    for _ in range(_LOAD_TRIES - 1):
        try:
            return _load_once(log, version)
        except ObjectMissingError:
            # A cleanup may have removed old commits between the listing and the reading.
            continue
    return _load_once(log, version)


def catch_up(log: Log, snapshot: Snapshot) -> Snapshot:
    """The table at its newest version, as `load` gives it, from a snapshot that this process has just loaded.

    Commits that the snapshot holds are not read again. The log is listed again: one that no longer holds the
    snapshot's version and every version after it was cut or cleaned up meanwhile, and is loaded from the start.

    Raises:
        ObjectMissingError: there is no table any more.
        DataError: a commit file is missing, damaged or out of the chain.
        InvalidError: the table requires a newer reader.
    """
    inventory = log.inventory()
    there = inventory.versions[bisect_left(inventory.versions, snapshot.version) :]
    latest = NO_TABLE if inventory.latest is None else inventory.latest
    if not there or there != tuple(range(snapshot.version, latest + 1)):
        return load(log)
    try:
        for version in there[1:]:
            snapshot.apply(version, log.require(version))
    except ObjectMissingError:
        # A cleanup came between the listing and the reading.
        return load(log)
    return snapshot


def _load_once(log: Log, version: TableVersion | None) -> Snapshot:
    inventory = log.inventory()
    latest = inventory.latest
    if latest is None or (version is not None and version > latest):
        raise ObjectMissingError("there is no such table version", store=log.objects.url, version=version)
    target = latest if version is None else version
    snapshot = _start(log, inventory, target)
    for following in range(snapshot.version + 1, target + 1):
        snapshot.apply(TableVersion(following), log.require(TableVersion(following)))
    return snapshot


def _start(log: Log, inventory: LogInventory, target: TableVersion) -> Snapshot:
    if bisect_right(inventory.versions, target) == target + 1:
        return Snapshot()
    failure: DataError | None = None
    for checkpoint in reversed(inventory.checkpoints):
        if checkpoint.version <= target:
            try:
                snapshot = _from_checkpoint(log, checkpoint)
            except DataError as error:
                # An older checkpoint and the commits after it give the same state, if they exist.
                failure = failure or error
                continue
            _look_behind(log, inventory, checkpoint, snapshot)
            return snapshot
    if failure is not None:
        raise failure
    first = inventory.versions[0] if inventory.versions else 0
    if 0 < first <= target:
        raise ObjectMissingError(
            "the log begins at a version that has no checkpoint",
            path=checkpoint_path(first),
            store=log.objects.url,
        )
    return Snapshot()


def _from_checkpoint(log: Log, checkpoint: Checkpoint) -> Snapshot:
    commit = log.read(checkpoint.version)
    snapshot = Snapshot()
    snapshot.restart_from(checkpoint, log.read_checkpoint(checkpoint), commit)
    return snapshot


def _look_behind(log: Log, inventory: LogInventory, checkpoint: Checkpoint, snapshot: Snapshot) -> None:
    """Refuse a store's checkpoint that sums up another engine's change of data.

    A checkpoint of our own is written by a process that has read all commits before it. That of another
    engine is not, so the commits behind it that are still there are read, back to a checkpoint of our own.
    """
    if log.is_own_checkpoint(checkpoint):
        return
    own = (older.version for older in inventory.checkpoints if older.version < checkpoint.version)
    start = next(
        (version for version in sorted(own, reverse=True) if _is_own(log, inventory, version)), NO_TABLE
    )
    for version in inventory.versions:
        if start < version <= checkpoint.version:
            actions = decode(log.require(version), commit_path(version))
            refuse_foreign_change(version, actions, snapshot.configuration)


def _is_own(log: Log, inventory: LogInventory, version: TableVersion) -> bool:
    return any(log.is_own_checkpoint(known) for known in inventory.checkpoints if known.version == version)


def _check_readable(actions: Iterable[Action], path: str) -> None:
    for action in actions:
        if isinstance(action, Protocol) and action.min_reader_version > _READER_VERSION_MAX:
            raise InvalidError(
                "the table requires a newer Delta reader than Millpond",
                path=path,
                min_reader_version=action.min_reader_version,
            )
