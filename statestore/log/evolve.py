"""Changing the columns of a Delta table whose files need not be rewritten for it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from millpond.statestore.errors import ConflictError
from millpond.statestore.log.action import Action, Add, Metadata, Protocol
from millpond.statestore.log.plan import CommitDraft

if TYPE_CHECKING:
    from millpond.statestore.log.snapshot import Snapshot
    from millpond.statestore.log.writer import LogWriter


def change_schema(writer: LogWriter, schema_string: str) -> None:
    """Give a table other columns, if it still has those that the writer knows.

    The caller sees to it that the files of the table, if any, can be read with the new columns.

    Args:
        writer: the table's writer.
        schema_string: the new columns, as Delta writes them.

    Raises:
        ConflictError: another writer changed the columns, or added a file; nothing was written.
        OutcomeUnknownError: it may or may not have landed; repeating the call decides.
        UnavailableError: the table is away; nothing was written.
    """
    metadata = writer.snapshot.metadata
    if metadata is None:
        raise ConflictError("the table has no metadata")
    writer.write(_SchemaPlan(before=metadata, after=replace(metadata, schema_string=schema_string)))


@dataclass(frozen=True, slots=True, kw_only=True)
class _SchemaPlan:
    before: Metadata
    after: Metadata

    def build(self, snapshot: Snapshot, now_ms: int) -> CommitDraft | None:
        del now_ms
        if snapshot.metadata == self.after:
            return None
        if snapshot.metadata != self.before:
            raise ConflictError("another writer changed the table's metadata")
        return CommitDraft(operation="CHANGE COLUMNS", actions=(self.after,), fields={"kind": "columns"})

    def admit(self, winner: tuple[Action, ...]) -> None:
        if any(isinstance(action, (Protocol, Metadata, Add)) for action in winner):
            raise ConflictError("another writer changed the table first")
