"""The log walker: single commits, and the table that commits add up to, at a version or as an undoable history.

`replay_log` also applies each commit to a snapshot, which verifies seals and the digest chain (Delta's protocol: action
reconciliation). `read_histories` gives the readable parts of a damaged log: each start up to the first gap.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain
from typing import Final

from millpond.statestore.errors import DataError
from millpond.statestore.log.action import Action, Add, CommitInfo, Metadata, Protocol, Remove, Txn
from millpond.statestore.log.checkpoint import Checkpoint
from millpond.statestore.log.commit_file import decode, digest_of, seal_holds
from millpond.statestore.log.features import Duty, unmet_duties
from millpond.statestore.log.high_water import Mark
from millpond.statestore.log.log import AHEAD_MAX, Log, LogInventory, commit_path, foreign_change, is_of_store
from millpond.statestore.log.snapshot import NO_TABLE, Snapshot, Start, find_start, forgotten_txns
from millpond.statestore.types import TableVersion, WallTimeMicros


@dataclass(frozen=True, kw_only=True)
class LoggedCommit:
    version: TableVersion
    data: bytes
    actions: tuple[Action, ...]

    @staticmethod
    def of(version: TableVersion, data: bytes) -> LoggedCommit:
        return LoggedCommit(version=version, data=data, actions=decode(data, commit_path(version)))

    @property
    def digest(self) -> str:
        return digest_of(self.data)

    @property
    def is_sealed(self) -> bool:
        """True for Millpond's commits, whose seal `of` has checked; commits of other engines have none."""
        return self.info is not None and self.info.millpond is not None

    @property
    def previous(self) -> str:
        return str(self.metadata.get("previous") or "")

    @cached_property
    def info(self) -> CommitInfo | None:
        return next((action for action in self.actions if isinstance(action, CommitInfo)), None)

    @cached_property
    def txns(self) -> dict[str, int]:
        return {action.app_id: action.version for action in self.actions if isinstance(action, Txn)}

    @property
    def metadata(self) -> Mapping[str, object]:
        """``commitInfo.millpond``; empty for commits of other engines."""
        return {} if self.info is None else self.info.millpond or {}

    @property
    def kind(self) -> str:
        return str(self.metadata.get("kind", ""))

    @property
    def wall_us(self) -> WallTimeMicros:
        return WallTimeMicros(0 if self.info is None else self.info.timestamp_ms * 1_000)


def read_commit(log: Log, version: TableVersion) -> LoggedCommit | None:
    """Read a commit; ``None`` if there is none, `DataError` if it is damaged."""
    data = log.read(version)
    return None if data is None else LoggedCommit.of(version, data)


def newest_commits(
    log: Log, newest: TableVersion, limit: int | None = None, *, naming: bytes = b""
) -> Iterator[LoggedCommit]:
    """Yield the remaining commits, newest first; with ``naming`` only those whose bytes contain it."""
    oldest = 0 if limit is None else max(newest - limit + 1, 0)
    numbers = range(newest, oldest - 1, -1)
    for begin in range(0, len(numbers), AHEAD_MAX):
        ahead = log.ahead(numbers[begin : begin + AHEAD_MAX])
        for version in map(TableVersion, numbers[begin : begin + AHEAD_MAX]):
            data = ahead.read(version)
            if data is None:
                return
            # Decoding takes most of the time, and few commits name, for example, a topology.
            if naming in data:
                yield LoggedCommit.of(version, data)


def readable_commits(log: Log, versions: Iterable[TableVersion]) -> Iterator[LoggedCommit]:
    for version in versions:
        try:
            commit = read_commit(log, version)
        except DataError:
            continue
        if commit is not None:
            yield commit


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """The effects of one commit, with the data needed to undo it."""

    version: TableVersion
    kind: str  # "" for commits of other engines
    added: tuple[Add, ...]
    removed: tuple[Add, ...]  # also former entries of files that the commit added again
    txns_before: tuple[tuple[str, int | None], ...]  # ``None``: the commit added the transaction


class LoggedTable:
    """The table that commits add up to: live files and removed ones by path, and transactions by application id.

    Removed files go back as far as the log and its checkpoints record them.
    """

    def __init__(self) -> None:
        self.adds: dict[str, Add] = {}
        self.removes: dict[str, Remove] = {}
        self.txns: dict[str, Txn] = {}
        self.metadata: Metadata | None = None
        self.protocol: Protocol = Protocol()
        # The last two that ask nothing that Millpond does not do.
        self.own_form: tuple[Protocol, Metadata] | None = None

    @property
    def duties(self) -> tuple[Duty, ...]:
        return unmet_duties(self.protocol, self.metadata)

    def apply(self, version: TableVersion, actions: Iterable[Action]) -> Change:
        added, removed, before, kind = list[Add](), list[Add](), list[tuple[str, int | None]](), ""
        is_formed = False
        for action in actions:
            match action:
                case Add():
                    replaced = self.adds.get(action.path)
                    removed += [] if replaced is None else [replaced]
                    self.adds[action.path] = action
                    self.removes.pop(action.path, None)
                    added.append(action)
                case Remove():
                    gone = self.adds.pop(action.path, None)
                    removed += [] if gone is None else [gone]
                    self.removes[action.path] = action
                case Txn():
                    last = self.txns.get(action.app_id)
                    before.append((action.app_id, None if last is None else last.version))
                    self.txns[action.app_id] = action
                case CommitInfo():
                    kind = str((action.millpond or {}).get("kind", ""))
                case Metadata():
                    self.metadata, is_formed = action, True
                case Protocol():
                    self.protocol, is_formed = action, True
                case _:
                    pass
        if is_formed and self.metadata is not None and not self.duties:
            self.own_form = self.protocol, self.metadata
        return Change(
            version=version, kind=kind, added=tuple(added), removed=tuple(removed), txns_before=tuple(before)
        )


class ReplayedLog(LoggedTable):
    """The table at a version, verified commit by commit; ``snapshot`` is the engine's view of the same version."""

    def __init__(self) -> None:
        super().__init__()
        self.snapshot: Snapshot = Snapshot()

    @property
    def version(self) -> TableVersion:
        return self.snapshot.version

    def begin(self, start: Start) -> None:
        self.snapshot = start.snapshot()
        self.apply(self.version, start.actions)
        self.follow(start.log, start.target)

    def advance(self, version: TableVersion, actions: tuple[Action, ...]) -> None:
        """Apply the next commit, which the caller has verified."""
        self.snapshot.apply_actions(version, actions, "")
        self.apply(version, actions)

    def follow(self, log: Log, until: TableVersion) -> None:
        for version, data in log.commits(range(self.version + 1, until + 1)):
            self.apply(version, self.snapshot.apply(version, data, is_past=True))

    def actions(self, *, on_disk: Iterable[str]) -> Iterator[Action]:
        """Yield the actions of a checkpoint of this version; removed files are remembered while they are on disk."""
        if self.metadata is None:
            raise DataError("the log has no metadata", version=self.version)
        exists, forgotten = frozenset(on_disk), forgotten_txns(self.snapshot.txns)
        yield self.protocol
        yield self.metadata
        yield from (txn for app_id, txn in self.txns.items() if app_id not in forgotten)
        yield from self.adds.values()
        yield from (remove for path, remove in self.removes.items() if path in exists)


def replay_log(log: Log, until: TableVersion) -> ReplayedLog:
    """Replay a log up to a version, from the newest readable checkpoint at or before it, or raise `DataError`."""
    try:
        start = find_start(log, until)
    except DataError:
        # No checkpoint is readable: only the whole log gives that version.
        start = Start(log, until)
    replayed = ReplayedLog()
    replayed.begin(start)
    return replayed


@dataclass(slots=True, kw_only=True)
class TableState:
    version: TableVersion
    live: dict[str, Add]
    txns: dict[str, int]

    def undo(self, change: Change) -> None:
        for add in change.added:
            self.live.pop(add.path, None)
        for add in change.removed:
            self.live[add.path] = add
        for app_id, before in change.txns_before:
            if before is None:
                self.txns.pop(app_id, None)
            else:
                self.txns[app_id] = before
        self.version = TableVersion(change.version - 1)


class TableHistory(LoggedTable):
    """The table from ``start``, a checkpoint or version 0, to ``newest``, where the log ends or becomes unreadable."""

    def __init__(self, start: TableVersion, newest: TableVersion) -> None:
        super().__init__()
        self.start = start
        self.newest: TableVersion = newest
        self.is_start_chained = True  # the start's own commit file is whole
        self.changes: list[Change] = []  # the commits after the start, oldest first
        self.digest: str = ""  # of the newest commit; "" when unknown
        self.healed: dict[TableVersion, bytes] = {}  # original bytes of commits with one flipped bit

    @property
    def state(self) -> TableState:
        txns = {app_id: txn.version for app_id, txn in self.txns.items()}
        return TableState(version=self.newest, live=dict(self.adds), txns=txns)

    def states(self) -> Iterator[tuple[TableState, tuple[str, ...]]]:
        """Yield the states, newest first, each with the files that it has and the next newer state lacks.

        The yielded state is changed in place: copy what you need before you advance the iterator.
        """
        state = self.state
        yield state, tuple(state.live)
        for change in reversed(self.changes):
            state.undo(change)
            yield state, tuple(add.path for add in change.removed)

    def maker_of(self, path: str) -> Change | None:
        """Return the commit that added a file; ``None`` if the file is older than the start."""
        return next(
            (change for change in self.changes if any(add.path == path for add in change.added)), None
        )


def read_histories(log: Log, mark: Mark | None) -> tuple[TableHistory, ...]:
    """Return all histories in the log, sorted by their newest version, newest first.

    A commit at the version of the high-water mark with another digest is rejected.
    """
    inventory = log.inventory()
    started = [_from_checkpoint(log, inventory, checkpoint) for checkpoint in inventory.checkpoints]
    histories = [history for history in started if history is not None]
    if inventory.versions[:1] == (0,):
        histories.append(TableHistory(TableVersion(0), NO_TABLE))
    for history in histories:
        _advance(history, log, mark)
    readable = [history for history in histories if history.metadata is not None]
    return tuple(sorted(readable, key=lambda history: (-history.newest, history.start)))


def newest_histories(log: Log) -> Iterator[TableHistory]:
    """Yield histories up to the newest version, each from twice as many checkpoints back as the one before.

    What lies a few commits back is found without reading the whole log.
    """
    inventory = log.inventory()
    count = len(inventory.checkpoints)
    back = 1
    while back <= count:
        history = _from_checkpoint(log, inventory, inventory.checkpoints[count - back])
        back = count + 1 if back == count else min(2 * back, count)
        if history is not None:
            yield from _reaching(history, log, inventory)
    if inventory.versions[:1] == (0,):
        yield from _reaching(TableHistory(TableVersion(0), NO_TABLE), log, inventory)


def _reaching(history: TableHistory, log: Log, inventory: LogInventory) -> Iterator[TableHistory]:
    _advance(history, log, None)
    if history.metadata is not None and history.newest >= (inventory.latest or 0):
        yield history


def _from_checkpoint(log: Log, inventory: LogInventory, checkpoint: Checkpoint) -> TableHistory | None:
    try:
        actions = tuple(log.read_checkpoint(checkpoint))
    except DataError:
        return None
    history = TableHistory(checkpoint.version, checkpoint.version)
    history.apply(checkpoint.version, actions)
    configuration = {} if history.metadata is None else history.metadata.configuration
    # No commit is foreign to a table that is not a store, so none of them is read.
    is_store = is_of_store(configuration)
    before = (version for version in inventory.versions if is_store and version < checkpoint.version)
    own = next(readable_commits(log, [checkpoint.version]), None)
    commits = chain(readable_commits(log, before), [] if own is None else [own])
    has_lost_rows = is_store and any(add.has_deletion_vector for add in history.adds.values())
    if has_lost_rows or any(foreign_change(commit.actions, configuration) for commit in commits):
        # The checkpoint includes another engine's change of the data.
        return None
    history.is_start_chained = own is not None
    history.digest = "" if own is None else own.digest
    return history


def _advance(history: TableHistory, log: Log, mark: Mark | None) -> None:
    chain = Snapshot()
    chain.version, chain.digest, chain.metadata = history.newest, history.digest, history.metadata
    version = TableVersion(history.newest + 1)
    stored = log.read(version)
    while stored is not None:
        following = log.read(TableVersion(version + 1))
        digest = mark.digest if mark is not None and mark.version == version else ""
        if not digest and following is not None:
            # A commit records the digest of the one before it, unless it is damaged itself.
            commit = _decoded(TableVersion(version + 1), following)
            digest = "" if commit is None else commit.previous
        data = _original(version, stored, digest)
        if data is None:
            return
        try:
            actions = chain.apply(version, data, is_past=True)
        except DataError:
            return
        if data != stored:
            history.healed[version] = data
        history.changes.append(history.apply(version, actions))
        history.newest, history.digest = version, digest_of(data)
        version, stored = TableVersion(version + 1), following


def _original(version: TableVersion, data: bytes, digest: str) -> bytes | None:
    """Return the original bytes of a commit, given its digest if another source has it; ``None`` if they are lost."""
    if digest_of(data) == digest or (not digest and _decoded(version, data) is not None):
        return data
    return _repaired(version, data, digest) if len(data) <= FLIP_BYTES_MAX else None


# A command reads the log several times, and each search takes seconds.
@lru_cache(maxsize=16)
def _repaired(version: TableVersion, data: bytes, digest: str) -> bytes | None:
    def is_original(trial: bytes) -> bool:
        if digest:
            return digest_of(trial) == digest
        # Without a seal there is no proof: one more flip may make a commit look like another engine's.
        return seal_holds(trial) and _decoded(version, trial) is not None

    return repair_bit_flip(data, is_original)


def _decoded(version: TableVersion, data: bytes) -> LoggedCommit | None:
    try:
        return LoggedCommit.of(version, data)
    except DataError:
        return None


# A single flipped bit is the most common corruption by disks and memory. A commit's SHA-256 leaves no doubt; a row
# file's CRC-32 has a different remainder for every single bit, and its page checksums confirm the result.

# Larger files are not tried: each candidate bit costs a check of the whole file.
FLIP_BYTES_MAX: Final = 1 << 15


def repair_bit_flip(data: bytes, is_whole: Callable[[bytes], bool]) -> bytes | None:
    """Flip each bit until ``is_whole`` accepts the data; return ``None`` if it never does.

    Example:
        >>> repair_bit_flip(b"something else", lambda data: data == b"word")
        >>> repair_bit_flip(b"wnrd", lambda data: data == b"word")
        b'word'
    """
    if len(data) > FLIP_BYTES_MAX:
        return None
    trial = bytearray(data)
    for index in range(len(trial)):
        for bit in range(8):
            trial[index] ^= 1 << bit
            if is_whole(bytes(trial)):
                return bytes(trial)
            trial[index] ^= 1 << bit
    return None
