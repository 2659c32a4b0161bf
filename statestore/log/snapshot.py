"""The snapshot: a table at one version, in memory, kept current by applying commits.

The cost of `Snapshot.apply` depends on the commit, not on the size of the table. It verifies that the commit is complete
(its seal) and follows the commit before it (the digest chain).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from millpond.statestore.app_ids import SAVEPOINT_RELEASED, AppId
from millpond.statestore.arguments import check_count
from millpond.statestore.durations import whole_number
from millpond.statestore.errors import DataError, InvalidError, ObjectMissingError, check
from millpond.statestore.interval import Interval, superseded
from millpond.statestore.log.action import Action, Add, CommitInfo, Metadata, Other, Protocol, Remove, Txn
from millpond.statestore.log.checkpoint import Checkpoint, checkpoint_path
from millpond.statestore.log.commit_file import decode, digest_of
from millpond.statestore.log.features import Duty, Use, unmet_duties
from millpond.statestore.log.files import FileIndex, LiveFile
from millpond.statestore.log.log import (
    AHEAD_MAX,
    Log,
    LogInventory,
    commit_path,
    is_of_store,
    refuse_foreign_change,
)
from millpond.statestore.objects.ranges import ParallelObjects
from millpond.statestore.rows.row import Fence, unpack_fence
from millpond.statestore.system import collector_paused
from millpond.statestore.types import TableVersion

# The version of a table without any commit.
NO_TABLE: Final = TableVersion(-1)
# Field of a commit that restores an older version: the number of that version.
RESTORED_VERSION: Final = "restored_version"
_LOAD_TRIES: Final = 3


class Snapshot(FileIndex):
    """A table at one version: its live files, transactions and metadata. For one thread at a time.

    ``digest`` is "" when only a checkpoint records the version, and ``checkpoint`` is the one that was read. Input watermarks are by interval and source
    offsets by input, under their application ids, as far as the applied commits contain them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.version: TableVersion = NO_TABLE
        self.digest: str = ""
        self.checkpoint: TableVersion = NO_TABLE
        self.txns: dict[str, int] = {}
        self.watermarks: dict[str, int] = {}
        self.source_offsets: dict[str, str] = {}
        self.metadata: Metadata | None = None
        self.protocol: Protocol = Protocol()
        # The commit that changed one of the two last, as far as it is known.
        self.formed_by: CommitInfo | None = None
        self.formed_at: TableVersion = NO_TABLE
        self._duties: tuple[Duty, ...] | None = None

    @property
    def configuration(self) -> Mapping[str, str]:
        return self.metadata.configuration if self.metadata else {}

    def fence_of(self, interval: Interval) -> Fence | None:
        """Return the stored fence of an interval, or ``None`` if the interval has never been owned."""
        version = self.txns.get(interval.app_id)
        return None if version is None else unpack_fence(version)

    def live_intervals(self, computation: str | None = None) -> dict[Interval, Fence]:
        return live_intervals(self.txns, computation)

    @property
    def duties(self) -> tuple[Duty, ...]:
        """What the table asks and Millpond does not do."""
        if self._duties is None:
            self._duties = unmet_duties(self.protocol, self.metadata)
        return self._duties

    def refuse(self, use: Use, url: str, columns: Collection[str] | None = None, **details: object) -> None:
        """Raise `InvalidError` if a feature of the table forbids the use; see `unmet_duties`."""
        known = self.duties if columns is None else unmet_duties(self.protocol, self.metadata, columns)
        for duty in known:
            if duty.use <= use:
                raise self._refusal(duty, self.formed_at, self.formed_by, path=url, **details)

    def _refusal(self, duty: Duty, version: int, info: CommitInfo | None, **details: object) -> InvalidError:
        details |= {"feature": duty.feature, **({"by": duty.by} if duty.by else {})}
        what = f"cannot {duty.use.verb} the table, which has a feature that Millpond does not"
        if not is_of_store(self.configuration):
            mend = f"{duty.mend}, or " if duty.mend else ""
            return InvalidError(f"{what}: {mend}give the sink another path", **details)
        operation, engine = ("", "") if info is None else (info.operation, info.engine_info)
        return InvalidError(
            f"{what}: another engine has changed the store's table, and `millpond repair` changes it back; nothing is lost",
            version=version,
            operation=operation or "unknown",
            engine=engine or "unknown",
            **details,
        )

    @collector_paused()
    def apply(self, version: TableVersion, data: bytes, *, is_past: bool = False) -> tuple[Action, ...]:
        """Apply the next commit and return its actions; a refused commit changes nothing.

        A commit is refused (`DataError`) if it is damaged, does not follow the one before it, or is another engine's change of a
        store's data; and (`InvalidError`) if the table cannot be read with it, unless later commits may have changed that.
        """
        actions = decode(data, commit_path(version))
        # Refuse before anything is applied: a refused commit must leave a usable snapshot.
        self._check_chain(version, actions)
        refuse_foreign_change(version, actions, self.configuration)
        if not is_past:
            self._check_readable(version, actions)
        self.apply_actions(version, actions, digest_of(data))
        return actions

    @collector_paused()
    def apply_actions(self, version: TableVersion, actions: Iterable[Action], digest: str) -> None:
        """Apply a commit that the caller has verified, or has just written."""
        check(version == self.version + 1, "commits are applied in order", at=self.version, next=version)
        self._record(tuple(actions), version)
        self.version, self.digest = version, digest

    def _check_readable(self, version: TableVersion, actions: Iterable[Action]) -> None:
        for action in actions:
            if isinstance(action, Protocol):
                duty = next(iter(unmet_duties(action, None)), None)
                if duty is not None and duty.use is Use.READ:
                    raise self._refusal(duty, version, _info_of(actions), path=commit_path(version))

    def restart_from(self, checkpoint: Checkpoint, actions: Iterable[Action], commit: bytes | None) -> None:
        """Start from a checkpoint and its version's commit file, if that was not cleaned up."""
        check(self.version == NO_TABLE, "only a fresh snapshot starts from a checkpoint", at=self.version)
        self._record(tuple(actions), checkpoint.version)
        self.version, self.digest = checkpoint.version, "" if commit is None else digest_of(commit)
        self.checkpoint = checkpoint.version

    def record_offsets_of(self, version: TableVersion, commit: bytes) -> bool:
        """Take the source offsets of the commit behind a checkpoint; return False if another engine's has none."""
        try:
            actions = decode(commit, commit_path(version))
        except DataError:
            # The next commit is chained to this one's digest, so applying that one reports the damage.
            return True
        for action in actions:
            if isinstance(action, CommitInfo) and action.millpond is not None:
                self._record_offsets(action)
                return True
        return not is_of_store(self.configuration)

    def _check_chain(self, version: TableVersion, actions: tuple[Action, ...]) -> None:
        for action in actions:
            if isinstance(action, CommitInfo) and action.millpond is not None:
                previous = action.millpond.get("previous", "")
                # A digest is unknown after another engine's commit, or a checkpoint whose commit was cleaned up.
                if previous and self.digest and previous != self.digest:
                    raise DataError(
                        "the commit before this one is not the one that it was built on",
                        path=commit_path(version),
                        before=commit_path(version - 1),
                        expected=previous,
                        found=self.digest,
                    )

    def _record(self, actions: tuple[Action, ...], version: TableVersion) -> None:
        for action in actions:
            match action:
                case Add():
                    self._record_add(action, version)
                case Txn():
                    self.txns[action.app_id] = action.version
                case Remove():
                    self.remove(action.path)
                case CommitInfo():
                    self._record_watermarks(action)
                    self._record_offsets(action)
                case Metadata():
                    self.metadata = action
                    self._form(actions, version)
                case Protocol():
                    self.protocol = action
                    self._form(actions, version)
                case Other():
                    pass

    def _form(self, actions: tuple[Action, ...], version: TableVersion) -> None:
        self.formed_by, self.formed_at, self._duties = _info_of(actions), version, None

    def _record_add(self, add: Add, version: TableVersion) -> None:
        known = self.file(add.path)
        # A file that is added again, with other statistics or tags, keeps the version of its first add.
        self.put(LiveFile.from_add(add, version if known is None else known.added_version), add.stats)

    def _record_watermarks(self, info: CommitInfo) -> None:
        own = info.millpond or {}
        watermarks = own.get("watermarks")
        if RESTORED_VERSION in own:
            # The watermarks of the undone supersteps no longer hold: their records will be processed again.
            self.watermarks = {}
        if isinstance(watermarks, Mapping):
            self.watermarks.update({app_id: at for app_id, at in watermarks.items() if isinstance(at, int)})

    def _record_offsets(self, info: CommitInfo) -> None:
        offsets = (info.millpond or {}).get("source_offsets")
        if isinstance(offsets, Mapping):
            self.source_offsets = {app_id: str(text) for app_id, text in offsets.items()}


def _info_of(actions: Iterable[Action]) -> CommitInfo | None:
    return next((action for action in actions if isinstance(action, CommitInfo)), None)


def live_intervals(txns: Mapping[str, int], computation: str | None = None) -> dict[Interval, Fence]:
    """Return the intervals that no split or merge has replaced, with their fences, by computation and key.

    ``txns`` names replaced intervals too, until a checkpoint forgets them.
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


def forgotten_txns(txns: Mapping[str, int]) -> frozenset[str]:
    """Return the transactions that a checkpoint leaves out: fences of replaced intervals, and released savepoints.

    Each cut and each savepoint adds some, so that a store would open ever more slowly. A commit under a replaced fence is
    refused without it: no fence follows a missing one, and the keys belong to live intervals.
    """
    live = {interval.app_id for interval in live_intervals(txns)}
    return frozenset(
        app_id
        for app_id, version in txns.items()
        if (app_id.startswith(AppId.INTERVAL) and app_id not in live)
        or (app_id.startswith(AppId.SAVEPOINT) and version == SAVEPOINT_RELEASED)
    )


def load(
    log: Log, version: TableVersion | None = None, *, near: int = 0, use: Use | None = Use.READ
) -> Snapshot:
    """Open a table cold, at its newest or an older version; `ObjectMissingError` if there is none.

    `InvalidError` if ``version`` is no whole number from 0.

    ``near`` is a version that the table is thought to have reached lately; it only shortens the way. A table whose features
    forbid the ``use`` is refused (`InvalidError`).
    """
    if version is not None:
        version = table_version(version)
    for _ in range(_LOAD_TRIES - 1):
        try:
            snapshot = _load_once(log, version, near)
            break
        except ObjectMissingError:
            # A cleanup may have removed old commits between the listing and the reading.
            continue
    else:
        snapshot = _load_once(log, version)
    if use is not None:
        snapshot.refuse(use, log.objects.url)
    return snapshot


def table_version(given: Any) -> TableVersion:
    """Return a version that a user gave, or raise `InvalidError` if it is no whole number from 0."""
    number = whole_number(given, "version must be a whole number")
    check_count("version", number, least=0)
    return TableVersion(number)


def load_existing(log: Log, *, near: int = 0, use: Use | None = Use.READ) -> Snapshot | None:
    """Open a table cold, at its newest version; ``None`` if there is none. See `load`."""
    try:
        return load(log, near=near, use=use)
    except ObjectMissingError:
        if log.latest_version() is not None:
            raise
    return None


def catch_up(log: Log, snapshot: Snapshot) -> Snapshot:
    inventory = log.inventory(snapshot.version)
    latest = inventory.latest
    if latest is None or not inventory.reaches(snapshot.version - 1, latest):
        # The log was cut or cleaned up meanwhile, so the snapshot may describe a past that no longer exists.
        return load(log)
    try:
        for version, data in log.commits(range(snapshot.version + 1, latest + 1)):
            snapshot.apply(version, data, is_past=True)
    except ObjectMissingError:
        # A cleanup came between the listing and the reading.
        return load(log)
    snapshot.refuse(Use.READ, log.objects.url)
    return snapshot


def _load_once(log: Log, version: TableVersion | None, near: int = 0) -> Snapshot:
    start = find_start(log, version, near)
    snapshot = start.snapshot()
    for following, data in start.log.commits(range(snapshot.version + 1, start.target + 1)):
        snapshot.apply(following, data, is_past=True)
    return snapshot


@dataclass(frozen=True, slots=True)
class Start:
    """Where reading a version begins: at a checkpoint with these actions, or before version 0.

    ``log`` has the next commits in memory, where the object store reads many objects at once.
    """

    log: Log
    target: TableVersion
    checkpoint: Checkpoint | None = None
    actions: tuple[Action, ...] = ()

    def snapshot(self) -> Snapshot:
        """Return the table where reading begins."""
        begun = Snapshot()
        if self.checkpoint is None:
            return begun
        version = self.checkpoint.version
        commit = self.log.read(version)
        begun.restart_from(self.checkpoint, self.actions, commit)
        # Only commit files have source offsets: every one of Millpond's repeats them, other engines' have none.
        while commit is not None and not begun.record_offsets_of(version, commit):
            version = TableVersion(version - 1)
            commit = self.log.read(version) if version >= 0 else None
        return begun


def find_start(log: Log, version: TableVersion | None = None, near: int = 0) -> Start:
    """Find where to begin reading the table at its newest or an older version; `ObjectMissingError` if there is none."""
    for since in _recent_versions(log, near):
        # No hint is believed: if no sound checkpoint is there, all of the log is listed.
        if since > 0 and (version is None or since <= version):
            found = _nearest_start(log, log.inventory(since), version)
            if found is not None:
                return found
    inventory = log.inventory()
    return _nearest_start(log, inventory, version) or _farther_start(log, inventory, version)


def _recent_versions(log: Log, near: int) -> Iterator[int]:
    """Yield versions from which a listing may find a checkpoint, the cheaper hint first."""
    if near and isinstance(log.objects, ParallelObjects):
        yield near - AHEAD_MAX
        # All of a young log is listed as quickly.
        if near <= AHEAD_MAX:
            return
    yield log.named_checkpoint()


def _nearest_start(log: Log, inventory: LogInventory, version: TableVersion | None) -> Start | None:
    """Find the newest checkpoint that commits follow without a gap, or version 0.

    A store's checkpoint must be Millpond's, which has read every commit that it sums up. Those of other engines may sum up
    a change of data, and their commits have to be read anyway.
    """
    latest = NO_TABLE if inventory.latest is None else inventory.latest
    target = latest if version is None else version
    if not NO_TABLE < target <= latest:
        return None
    for checkpoint in reversed(inventory.checkpoints):
        if checkpoint.version <= target and inventory.reaches(checkpoint.version, target):
            found = _start_from(log, checkpoint, target)
            if found is not None and (found.log.is_own_checkpoint(checkpoint) or not _is_store(found)):
                return found
    return Start(log, target) if inventory.reaches(NO_TABLE, target) else None


def _start_from(log: Log, checkpoint: Checkpoint, target: TableVersion) -> Start | None:
    last = min(target, checkpoint.version + AHEAD_MAX)
    ahead = log.ahead(range(checkpoint.version, last + 1), checkpoint)
    try:
        return Start(ahead, target, checkpoint, tuple(ahead.read_checkpoint(checkpoint)))
    except DataError:
        # An older checkpoint and the commits after it give the same state, if they exist.
        return None


def _is_store(start: Start) -> bool:
    return any(is_of_store(action.configuration) for action in start.actions if isinstance(action, Metadata))


def _farther_start(log: Log, inventory: LogInventory, version: TableVersion | None) -> Start:
    """Find a start in a log whose older commits were cleaned up, or raise what is wrong with it."""
    latest = inventory.latest
    if latest is None or (version is not None and version > latest):
        raise ObjectMissingError(
            "there is no such table version (see `millpond history`)",
            store=log.objects.url,
            version=version,
            newest=latest,
        )
    target = latest if version is None else version
    known = [checkpoint for checkpoint in inventory.checkpoints if checkpoint.version <= target]
    for checkpoint in reversed(known):
        found = _start_from(log, checkpoint, target)
        if found is not None:
            _look_behind(found, inventory, checkpoint)
            return found
    if known:
        # Read the newest one once more, for its error.
        return Start(log, target, known[-1], tuple(log.read_checkpoint(known[-1])))
    first = inventory.versions[0] if inventory.versions else 0
    if 0 < first <= target:
        raise ObjectMissingError(
            "the log begins at a version that has no checkpoint",
            path=checkpoint_path(first),
            store=log.objects.url,
        )
    return Start(log, target)


def _look_behind(start: Start, inventory: LogInventory, checkpoint: Checkpoint) -> None:
    """Refuse a store's checkpoint that sums up another engine's change of data."""
    log = start.log
    if log.is_own_checkpoint(checkpoint):
        return
    # Millpond has read every commit before writing a checkpoint; other engines have not, so the commits behind
    # theirs that still exist are read here, back to a checkpoint of Millpond's.
    own = next(
        (
            older.version
            for older in reversed(inventory.checkpoints)
            if older.version < checkpoint.version and log.is_own_checkpoint(older)
        ),
        NO_TABLE,
    )
    metadata = [action.configuration for action in start.actions if isinstance(action, Metadata)]
    for version in inventory.versions:
        if own < version <= checkpoint.version and metadata:
            actions = decode(log.require(version), commit_path(version))
            refuse_foreign_change(version, actions, metadata[-1])
