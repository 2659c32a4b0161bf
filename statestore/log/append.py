"""Appending to any Delta table exactly once.

It uses the same log writer as the store's own table, so an append has the same three
outcomes. Delta's application transactions make it exactly once: an append whose
transactions the table has already reached is skipped.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from millpond.statestore.errors import ConflictError, InvalidError
from millpond.statestore.log.action import Action, Add, JsonValue, Metadata, Protocol, Txn
from millpond.statestore.log.plan import CommitDraft, Committed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from millpond.statestore.log.snapshot import Snapshot
    from millpond.statestore.log.writer import LogWriter


def append(
    writer: LogWriter,
    adds: tuple[Add, ...],
    *,
    txns: Mapping[str, int] | None = None,
    metadata: Mapping[str, JsonValue] | None = None,
    rows: int = 0,
    guard: Callable[[Snapshot], None] | None = None,
) -> Committed | None:
    """Add files to a table, once.

    Args:
        writer: the table's writer.
        adds: files that are already in the table's folder.
        txns: application ids and the versions that this append advances them to.
        metadata: stored in ``commitInfo.millpond``.
        rows: how many rows the files hold, for the table's history.
        guard: raises if the version that the commit is built on forbids it.

    Returns:
        The commit; ``None`` when the table has reached all of ``txns``, so nothing was added.

    Raises:
        OutcomeUnknownError: it may or may not have landed; repeating the call decides.
        ConflictError: some of ``txns`` are reached and some are not, or the table changed its schema.
        InvalidError: a file's partition values do not fit the table.
    """
    plan = _AppendPlan(
        adds=adds, txns=dict(txns or {}), metadata=dict(metadata or {}), rows=rows, guard=guard
    )
    return writer.write(plan)


@dataclass(frozen=True, slots=True, kw_only=True)
class _AppendPlan:
    adds: tuple[Add, ...]
    txns: Mapping[str, int] = field(default_factory=dict)
    metadata: Mapping[str, JsonValue] = field(default_factory=dict)
    rows: int = 0
    guard: Callable[[Snapshot], None] | None = None

    def build(self, snapshot: Snapshot, now_ms: int) -> CommitDraft | None:
        if self.guard is not None:
            self.guard(snapshot)
        reached = [app_id for app_id, at in self.txns.items() if snapshot.txns.get(app_id, -1) >= at]
        if self.txns and len(reached) == len(self.txns):
            return None
        if reached:
            raise ConflictError("the table already holds a part of this append", app_ids=reached)
        _check_partitions(self.adds, snapshot)
        txns = [Txn(app_id=app_id, version=at, updated_ms=now_ms) for app_id, at in self.txns.items()]
        return CommitDraft(
            operation="WRITE",
            actions=(*txns, *self.adds),
            fields={**self.metadata, "kind": "append"},
            parameters={"mode": "Append"},
            rows=self.rows,
        )

    def admit(self, winner: tuple[Action, ...]) -> None:
        if any(isinstance(action, (Protocol, Metadata)) for action in winner):
            raise ConflictError("another writer changed the table's protocol or metadata")


def _check_partitions(adds: tuple[Add, ...], snapshot: Snapshot) -> None:
    columns = set(snapshot.metadata.partition_columns) if snapshot.metadata else set()
    for add in adds:
        if set(add.partition_values) != columns:
            raise InvalidError(
                "the file's partition values do not fit the table", path=add.path, columns=sorted(columns)
            )
