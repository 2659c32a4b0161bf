"""
Plans: what is to be committed, told apart from how a commit is made.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping

    from millpond.statestore.log.action import Action, JsonValue
    from millpond.statestore.log.snapshot import Snapshot
    from millpond.statestore.types import TableVersion

__all__ = ["CommitDraft", "Committed", "Plan"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """
    A commit that is part of the table: the version that it made, and its digest.
    """

    version: TableVersion
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitDraft:
    """
    What a plan wants to commit on a given snapshot.

    Args:
        operation: for the table's history.
        actions: everything but the ``commitInfo``.
        fields: Millpond's own part of the ``commitInfo``.
        parameters: for the table's history.
        rows: how many rows the added files hold, for the table's history.
    """

    operation: str
    actions: tuple[Action, ...]
    fields: Mapping[str, JsonValue] = field(default_factory=dict)
    parameters: Mapping[str, str] = field(default_factory=dict)
    rows: int = 0


class Plan(Protocol):
    """
    What is to be committed, whatever the table's version turns out to be.

    Two plans that are equal ask for the same commit.
    """

    def build(self, snapshot: Snapshot, now_ms: int) -> CommitDraft | None:
        """
        The commit on this very snapshot; ``None`` when the table holds it already.

        Raises:
            MillpondError: the snapshot forbids it.
        """
        ...

    def admit(self, winner: tuple[Action, ...]) -> None:
        """
        Look at a commit that came first.

        Raises:
            MillpondError: after that commit this one must not be made.
        """
        ...
