"""Turns of a key without hooks: a step of the library may work out what its hooks would do."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from millpond.executor.computation.records import RecordColumns
from millpond.executor.computation.state import StoredState
from millpond.executor.computation.timers import Timers
from millpond.executor.time.clocks import Clocks


@dataclass(slots=True)
class QuickTurn:
    """The effects of a key's turn.

    Attributes:
        state: the key's state afterwards, encoded.
        timers: all pending timers in firing order; ``None`` if none has changed.
        fired: the number of timers that have fired.
        productions: stream, value as text, and event time of each.
    """

    state: StoredState | None
    timers: Timers | None = None
    fired: int = 0
    productions: list[tuple[str, str, int]] = field(default_factory=list)


class QuickTurns(Protocol):
    """The turns of a bundle's keys."""

    def turn(
        self, key: str, stored: StoredState | None, timers: Timers, start: int, stop: int
    ) -> QuickTurn | None:
        """Return the effects of a turn, the same as its hooks'; ``None``, without any effect, if only they know them."""


@runtime_checkable
class MakesQuickTurns(Protocol):
    """A computation whose turns mostly need no hooks."""

    def quick_turns(self, clocks: Clocks, columns: RecordColumns) -> QuickTurns | None:
        """Return the turns of a bundle; ``None`` if all of them need hooks."""
