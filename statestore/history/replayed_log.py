"""Replays of the log: the state that commits add up to, with the actions that a checkpoint repeats."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from millpond.statestore.check import check
from millpond.statestore.errors import DataError
from millpond.statestore.history.verification import repair_bit_flip, repair_bit_flip_by_digest
from millpond.statestore.log.action import (
    Action,
    Add,
    CommitInfo,
    JsonValue,
    Metadata,
    Protocol,
    Remove,
    Txn,
)
from millpond.statestore.log.checkpoint import Checkpoint
from millpond.statestore.log.commit_file import decode, digest_of
from millpond.statestore.log.high_water import Mark
from millpond.statestore.log.log import Log, LogInventory, commit_path, foreign_change
from millpond.statestore.log.snapshot import NO_TABLE, Snapshot
from millpond.statestore.types import TableVersion


class ReplayedLog:
    """The state of a table at a version, with the actions that made it.

    Attributes:
        snapshot: the same state as the engine sees it.
        metadata: the table's metadata; ``None`` before a commit has set it.
        protocol: the table's protocol.
        adds: live files by path.
        removes: removed files by path, as far back as the log and its checkpoints record them.
    """

    def __init__(self) -> None:
        self.snapshot: Snapshot = Snapshot()
        self.adds: dict[str, Add] = {}
        self.removes: dict[str, Remove] = {}
        self._txns: dict[str, Txn] = {}
        self.metadata: Metadata | None = None
        self.protocol: Protocol = Protocol()

    @property
    def version(self) -> TableVersion:
        """The newest commit that has been replayed."""
        return self.snapshot.version

    def start(self, log: Log, checkpoint: Checkpoint) -> None:
        """Start from a checkpoint.

        Raises:
            DataError: the checkpoint cannot be read.
        """
        actions = tuple(log.read_checkpoint(checkpoint))
        self.snapshot.restart_from(checkpoint, actions, log.read(checkpoint.version))
        self._take(actions)

    def follow(self, log: Log, until: TableVersion) -> None:
        """Replay commits up to the version ``until``.

        Raises:
            DataError: a commit file is missing, damaged or out of the chain.
        """
        for version in range(self.version + 1, until + 1):
            following = TableVersion(version)
            self._take(self.snapshot.apply(following, log.require(following)))

    def actions(self, *, on_disk: Iterable[str]) -> Iterator[Action]:
        """The actions of a checkpoint of this version.

        Args:
            on_disk: the data files that exist; removed files are remembered as long as they do.
        """
        check(self.metadata is not None, "a table has metadata", version=self.version)
        exists = frozenset(on_disk)
        yield self.protocol
        if self.metadata is not None:
            yield self.metadata
        yield from self._txns.values()
        yield from self.adds.values()
        yield from (remove for path, remove in self.removes.items() if path in exists)

    def _take(self, actions: Iterable[Action]) -> None:
        for action in actions:
            match action:
                case Add():
                    self.adds[action.path] = action
                    self.removes.pop(action.path, None)
                case Remove():
                    self.removes[action.path] = action
                    self.adds.pop(action.path, None)
                case Txn():
                    self._txns[action.app_id] = action
                case Metadata():
                    self.metadata = action
                case Protocol():
                    self.protocol = action
                case _:
                    pass


def replay_log(log: Log, until: TableVersion) -> ReplayedLog:
    """Replay a log up to a version, from the newest readable checkpoint at or before it.

    Raises:
        DataError: a commit file is missing, damaged or out of the chain.
    """
    for checkpoint in reversed(log.inventory().checkpoints):
        if checkpoint.version <= until:
            replayed = ReplayedLog()
            try:
                replayed.start(log, checkpoint)
            except DataError:
                # An older checkpoint and the commits after it give the same state, if they exist.
                continue
            replayed.follow(log, until)
            return replayed
    replayed = ReplayedLog()
    check(replayed.version == NO_TABLE, "a replay begins before the first commit")
    replayed.follow(log, until)
    return replayed


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """The effects of one commit, with the data needed to undo it.

    Attributes:
        version: the version that it made.
        kind: its purpose, as Millpond's commits record it; "" for commits of other engines.
        added: files that it added.
        removed: files that it removed, and what was said of files that it added again.
        txns_before: previous versions of the transactions that it moved; ``None`` for new transactions.
    """

    version: TableVersion
    kind: str
    added: tuple[Add, ...]
    removed: tuple[Add, ...]
    txns_before: tuple[tuple[str, int | None], ...]


@dataclass(slots=True, kw_only=True)
class TableState:
    """The state of a table at a version.

    Attributes:
        version: the version.
        live: live files by path.
        txns: transactions by application id.
    """

    version: TableVersion
    live: dict[str, Add]
    txns: dict[str, int]


@dataclass(slots=True, kw_only=True)
class TableHistory:
    """The states from ``start`` to ``newest``.

    Attributes:
        start: the first known version: that of a checkpoint, or 0.
        is_start_chained: whether the start's own commit file is whole.
        newest: the last version before the log ends or becomes unreadable.
        state: the state of the table at ``newest``.
        changes: the changes of the commits after the start, oldest first.
        metadata: the table's metadata; ``None`` until a commit sets it.
        protocol: the table's protocol.
        digest: digest of the newest commit; "" when unknown.
        healed: original bytes of commits with one flipped bit, by version.
    """

    start: TableVersion
    is_start_chained: bool = True
    newest: TableVersion
    state: TableState
    changes: list[Change] = field(default_factory=list)
    metadata: Metadata | None = None
    protocol: Protocol = field(default_factory=Protocol)
    digest: str = ""
    healed: dict[TableVersion, bytes] = field(default_factory=dict)

    def states(self) -> Iterator[tuple[TableState, tuple[str, ...]]]:
        """The states, newest first, each with the files that it has and the next newer state lacks.

        The yielded state is changed in place: copy what you need before you advance the iterator.
        """
        state = TableState(version=self.state.version, live=dict(self.state.live), txns=dict(self.state.txns))
        yield state, tuple(state.live)
        for change in reversed(self.changes):
            for add in change.added:
                state.live.pop(add.path, None)
            for add in change.removed:
                state.live[add.path] = add
            for app_id, before in change.txns_before:
                if before is None:
                    state.txns.pop(app_id, None)
                else:
                    state.txns[app_id] = before
            state.version = TableVersion(change.version - 1)
            yield state, tuple(add.path for add in change.removed)

    def maker_of(self, path: str) -> Change | None:
        """The commit that added a file; ``None`` if the file is older than the start."""
        return next(
            (change for change in self.changes if any(add.path == path for add in change.added)), None
        )

    def take(self, version: TableVersion, actions: tuple[Action, ...], digest: str) -> None:
        """Apply the next commit."""
        added, removed, before, kind = [], [], list[tuple[str, int | None]](), ""
        for action in actions:
            match action:
                case Add():
                    replaced = self.state.live.get(action.path)
                    removed += [] if replaced is None else [replaced]
                    self.state.live[action.path] = action
                    added.append(action)
                case Remove():
                    gone = self.state.live.pop(action.path, None)
                    removed += [] if gone is None else [gone]
                case Txn():
                    before.append((action.app_id, self.state.txns.get(action.app_id)))
                    self.state.txns[action.app_id] = action.version
                case CommitInfo():
                    kind = str((action.millpond or {}).get("kind", ""))
                case Metadata():
                    self.metadata = action
                case Protocol():
                    self.protocol = action
                case _:
                    pass
        change = Change(
            version=version, kind=kind, added=tuple(added), removed=tuple(removed), txns_before=tuple(before)
        )
        self.changes.append(change)
        self.newest = self.state.version = version
        self.digest = digest


def read_histories(log: Log, mark: Mark | None) -> tuple[TableHistory, ...]:
    """All histories that the log still contains, the one that reaches furthest first.

    Args:
        log: the table's log.
        mark: the high-water mark; a commit at its version with other bytes is rejected.

    Raises:
        UnavailableError: the store is unavailable.
    """
    inventory = log.inventory()
    histories = []
    for checkpoint in inventory.checkpoints:
        from_checkpoint = _from_checkpoint(log, checkpoint)
        if from_checkpoint is not None and not _rests_on_foreign_change(log, inventory, from_checkpoint):
            histories.append(from_checkpoint)
    if inventory.versions[:1] == (0,):
        empty = TableState(version=NO_TABLE, live={}, txns={})
        histories.append(TableHistory(start=TableVersion(0), newest=NO_TABLE, state=empty))
    for history in histories:
        _follow(history, log, mark)
    readable = [history for history in histories if history.metadata is not None]
    return tuple(sorted(readable, key=lambda history: (-history.newest, history.start)))


def _from_checkpoint(log: Log, checkpoint: Checkpoint) -> TableHistory | None:
    try:
        actions = tuple(log.read_checkpoint(checkpoint))
    except DataError:
        return None
    empty = TableState(version=checkpoint.version, live={}, txns={})
    history = TableHistory(start=checkpoint.version, newest=checkpoint.version, state=empty)
    history.take(checkpoint.version, actions, "")
    history.changes.clear()
    data = log.read(checkpoint.version)
    try:
        decode(data or b"", commit_path(checkpoint.version))
    except DataError:
        history.is_start_chained = False
    else:
        history.digest = digest_of(data) if data else ""
    return history


def _rests_on_foreign_change(log: Log, inventory: LogInventory, history: TableHistory) -> bool:
    """Whether a checkpoint sums up a commit by which another engine changed the data."""
    configuration = {} if history.metadata is None else history.metadata.configuration
    for version in inventory.versions:
        if version > history.start:
            break
        try:
            actions = decode(log.read(version) or b"", commit_path(version))
        except DataError:
            continue
        if foreign_change(actions, configuration) is not None:
            return True
    return False


def _follow(history: TableHistory, log: Log, mark: Mark | None) -> None:
    chain = Snapshot()
    chain.version, chain.digest, chain.metadata = history.newest, history.digest, history.metadata
    version = TableVersion(history.newest + 1)
    stored = log.read(version)
    while stored is not None:
        following = log.read(TableVersion(version + 1))
        marked = mark.digest if mark is not None and mark.version == version else ""
        data = _original(stored, marked or _previous_in(following))
        if data is None:
            return
        try:
            actions = chain.apply(version, data)
        except DataError:
            return
        if data != stored:
            history.healed[version] = data
        history.take(version, actions, digest_of(data))
        version, stored = TableVersion(version + 1), following


def _original(data: bytes, digest: str) -> bytes | None:
    """The commit as it was written, given its digest if another source has it; ``None`` if it is lost."""
    if digest:
        if digest_of(data) == digest:
            return data
        return repair_bit_flip_by_digest(data, digest)
    try:
        decode(data)
    except DataError:
        return repair_bit_flip(data, _is_sealed_commit)
    return data


def _previous_in(data: bytes | None) -> str:
    """The digest that a commit records of the commit before it; "" where the commit is not trustworthy."""
    info = None if data is None else _sealed_info(data)
    return "" if info is None else str(info.get("previous") or "")


def _is_sealed_commit(data: bytes) -> bool:
    # Without a seal there is no proof: one more flip may make a commit look like another engine's.
    return _sealed_info(data) is not None


def _sealed_info(data: bytes) -> Mapping[str, JsonValue] | None:
    try:
        actions = decode(data)
    except DataError:
        return None
    infos = (action.millpond for action in actions if isinstance(action, CommitInfo))
    return next((info for info in infos if info is not None), None)
