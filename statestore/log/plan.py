"""Plans: the content of a commit, separate from the protocol that makes it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping

    from millpond.statestore.log.action import Action, JsonValue
    from millpond.statestore.log.snapshot import Snapshot
    from millpond.statestore.types import TableVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """A commit that is part of the table: the version that it made, and its file's SHA-256."""

    version: TableVersion
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitDraft:
    """The commit that a plan makes on a given snapshot.

    Args:
        operation: name of the operation, for the table's history.
        actions: all actions except the ``commitInfo``.
        fields: Millpond's own part of the ``commitInfo``.
        parameters: parameters of the operation, for the table's history.
        rows: how many rows the added files hold, for the table's history.
    """

    operation: str
    actions: tuple[Action, ...]
    fields: Mapping[str, JsonValue] = field(default_factory=dict)
    parameters: Mapping[str, str] = field(default_factory=dict)
    rows: int = 0


class Plan(Protocol):
    """The content of a commit, independent of the table version that it will make.

    Equal plans ask for the same commit.
    """

    def build(self, snapshot: Snapshot, now_ms: int) -> CommitDraft | None:
        """The commit on this snapshot; ``None`` when the table already holds it.

        Raises:
            MillpondError: the snapshot forbids it.
        """
        ...

    def admit(self, winner: tuple[Action, ...]) -> None:
        """Check whether the plan is still valid after another writer's commit.

        Raises:
            MillpondError: that commit rules this one out.
        """
        ...
