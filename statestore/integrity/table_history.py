"""
A table's history, as far as its log can be read: every state between a start and a first gap.

For repair. `Snapshot` answers what a table is now and refuses what it cannot know; a history keeps
what can be known, and walks it back version by version.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from millpond.statestore.errors import DataError
from millpond.statestore.integrity.bit_flip import repair_bit_flip
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
from millpond.statestore.log.log import Log, commit_path
from millpond.statestore.log.snapshot import NO_TABLE, Snapshot
from millpond.statestore.types import TableVersion

__all__ = ["Change", "TableHistory", "TableState", "read_histories"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """
    What one commit did, and what it takes to undo it.

    Attributes:
        version: the version that it made.
        kind: what it was for, as Millpond's commits say; "" for those of others.
        added: files that it added.
        removed: files that it removed.
        txns_before: the transactions that it moved, as they stood before; ``None`` where there was none.
    """

    version: TableVersion
    kind: str
    added: tuple[Add, ...]
    removed: tuple[Add, ...]
    txns_before: tuple[tuple[str, int | None], ...]


@dataclass(slots=True, kw_only=True)
class TableState:
    """
    What a table is at a version.

    Attributes:
        version: the version.
        live: its files by path.
        txns: its transactions by application id.
    """

    version: TableVersion
    live: dict[str, Add]
    txns: dict[str, int]


@dataclass(slots=True, kw_only=True)
class TableHistory:
    """
    The states from ``start`` to ``newest``.

    Attributes:
        start: the first version that is known: that of a checkpoint, or 0.
        is_start_chained: whether the start's own commit file is whole.
        newest: the last one before the log ends or cannot be read any further.
        state: what the table is at ``newest``.
        changes: what the commits after the start did, oldest first.
        metadata: of the table.
        protocol: of the table.
        digest: of the newest commit; "" when unknown.
        healed: commits in which one bit was flipped, as they were written, by version.
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
        """
        The states, newest first, each with the files that came back by going there; one state is
        changed in place, so take what you need before you ask for the next.
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
        """
        The commit that added a file; ``None`` if it came before the start.
        """
        return next(
            (change for change in self.changes if any(add.path == path for add in change.added)), None
        )

    def take(self, version: TableVersion, actions: tuple[Action, ...], digest: str) -> None:
        """
        Go on by one commit.
        """
        added, removed, before, kind = [], [], list[tuple[str, int | None]](), ""
        for action in actions:
            match action:
                case Add():
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
    """
    Every history that the log still tells, the one that reaches furthest first.

    Args:
        log: the table's log.
        mark: the high-water mark; a commit at its version with other bytes is not believed.

    Raises:
        UnavailableError: the store is away.
    """
    inventory = log.inventory()
    found = []
    for checkpoint in inventory.checkpoints:
        begun = _from_checkpoint(log, checkpoint)
        if begun is not None:
            found.append(begun)
    if inventory.versions[:1] == (0,):
        none = TableState(version=NO_TABLE, live={}, txns={})
        found.append(TableHistory(start=TableVersion(0), newest=NO_TABLE, state=none))
    for history in found:
        _follow(history, log, mark)
    told = [history for history in found if history.metadata is not None]
    return tuple(sorted(told, key=lambda history: (-history.newest, history.start)))


def _from_checkpoint(log: Log, checkpoint: Checkpoint) -> TableHistory | None:
    try:
        actions = tuple(log.read_checkpoint(checkpoint))
    except DataError:
        return None
    none = TableState(version=checkpoint.version, live={}, txns={})
    begun = TableHistory(start=checkpoint.version, newest=checkpoint.version, state=none)
    begun.take(checkpoint.version, actions, "")
    begun.changes.clear()
    data = log.read(checkpoint.version)
    try:
        decode(data or b"", commit_path(checkpoint.version))
    except DataError:
        begun.is_start_chained = False
    else:
        begun.digest = digest_of(data) if data else ""
    return begun


def _follow(history: TableHistory, log: Log, mark: Mark | None) -> None:
    chain = Snapshot()
    chain.version, chain.digest = history.newest, history.digest
    version = TableVersion(history.newest + 1)
    found = log.read(version)
    while found is not None:
        following = log.read(TableVersion(version + 1))
        marked = mark.digest if mark is not None and mark.version == version else ""
        data = _whole(found, marked or _previous_in(following))
        if data is None:
            return
        try:
            actions = chain.apply(version, data)
        except DataError:
            return
        if data != found:
            history.healed[version] = data
        history.take(version, actions, digest_of(data))
        version, found = TableVersion(version + 1), following


def _whole(data: bytes, digest: str) -> bytes | None:
    """
    The commit as it was written, given its digest if that is known from elsewhere; ``None`` if it is lost.
    """
    if digest:
        return (
            data if digest_of(data) == digest else repair_bit_flip(data, lambda it: digest_of(it) == digest)
        )
    try:
        decode(data)
    except DataError:
        return repair_bit_flip(data, _is_sealed_commit)
    return data


def _previous_in(data: bytes | None) -> str:
    """
    The digest that a commit gives of the one before it; "" where none can be believed.
    """
    info = None if data is None else _sealed_info(data)
    return "" if info is None else str(info.get("previous") or "")


def _is_sealed_commit(data: bytes) -> bool:
    # Without the seal nobody could tell: one more flip may make a commit look like another engine's.
    return _sealed_info(data) is not None


def _sealed_info(data: bytes) -> Mapping[str, JsonValue] | None:
    try:
        actions = decode(data)
    except DataError:
        return None
    infos = (action.millpond for action in actions if isinstance(action, CommitInfo))
    return next((info for info in infos if info is not None), None)
