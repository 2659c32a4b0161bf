"""The replayed log: all actions that a checkpoint of one version must contain.

A `Snapshot` keeps only what the engine needs; a checkpoint repeats the actions themselves, with
their statistics and times, and remembers removed files as long as they are on disk. Each
commit is also applied to a snapshot, which verifies seals and the digest chain. The format is
Delta's (its protocol's section on action reconciliation).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from millpond.statestore.check import check
from millpond.statestore.errors import DataError
from millpond.statestore.log.action import Action, Add, Metadata, Protocol, Remove, Txn
from millpond.statestore.log.checkpoint import Checkpoint
from millpond.statestore.log.log import Log
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
