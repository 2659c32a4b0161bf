"""Replacing files of any Delta table exactly once, in one commit.

Like `millpond.statestore.log.append`, it uses application transactions to skip a replacement that the table
already has. Because the new files were made from the old ones, the commit is made on the very version
that was read, or not at all.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from millpond.statestore.errors import ConflictError
from millpond.statestore.log.action import Action, Add, JsonValue, Remove, Txn
from millpond.statestore.log.plan import CommitDraft, Committed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from millpond.statestore.log.live_file import LiveFile
    from millpond.statestore.log.snapshot import Snapshot
    from millpond.statestore.log.writer import LogWriter
    from millpond.statestore.types import TableVersion


def replace_files(
    writer: LogWriter,
    removed: Sequence[LiveFile],
    added: Sequence[Add],
    *,
    read_at: TableVersion,
    txns: Mapping[str, int],
    metadata: Mapping[str, JsonValue] | None = None,
    rows: int = 0,
    guard: Callable[[Snapshot], None] | None = None,
) -> Committed | None:
    """Replace files of an unpartitioned table, once.

    Args:
        writer: the table's writer.
        removed: live files whose rows the new files replace.
        added: files that are already in the table's folder.
        read_at: the version from which ``added`` was made.
        txns: application ids and the versions that this commit advances them to.
        metadata: stored in ``commitInfo.millpond``.
        rows: how many rows the new files hold, for the table's history.
        guard: raises if the version that the commit is built on forbids it.

    Returns:
        The commit; ``None`` when the table has reached all of ``txns``, so nothing was changed.

    Raises:
        ConflictError: the table is at another version than ``read_at``: read again; nothing was written.
        OutcomeUnknownError: it may or may not have landed; the next call decides.
        UnavailableError: the store is unavailable; nothing was written.
    """
    plan = _ReplacePlan(
        removed=tuple(removed),
        added=tuple(added),
        read_at=read_at,
        txns=dict(txns),
        metadata=dict(metadata or {}),
        rows=rows,
        guard=guard,
    )
    return writer.write(plan)


@dataclass(frozen=True, slots=True, kw_only=True)
class _ReplacePlan:
    removed: tuple[LiveFile, ...]
    added: tuple[Add, ...]
    read_at: TableVersion
    txns: Mapping[str, int]
    metadata: Mapping[str, JsonValue] = field(default_factory=dict)
    rows: int = 0
    guard: Callable[[Snapshot], None] | None = None

    def build(self, snapshot: Snapshot, now_ms: int) -> CommitDraft | None:
        if self.guard is not None:
            self.guard(snapshot)
        if all(snapshot.txns.get(app_id, -1) >= at for app_id, at in self.txns.items()):
            return None
        if snapshot.version != self.read_at:
            raise ConflictError(
                "the table has changed since it was read", read_at=self.read_at, version=snapshot.version
            )
        txns = [Txn(app_id=app_id, version=at, updated_ms=now_ms) for app_id, at in self.txns.items()]
        removes = [
            Remove(path=file.path, deletion_time_ms=now_ms, partition_values={}, size_bytes=file.size_bytes)
            for file in self.removed
        ]
        return CommitDraft(
            operation="MERGE",
            actions=(*txns, *removes, *self.added),
            fields={**self.metadata, "kind": "replace"},
            rows=self.rows,
        )

    def admit(self, winner: tuple[Action, ...]) -> None:
        """Accept every commit here: `build` refuses any version except the one that was read."""
