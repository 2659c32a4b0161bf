"""The persistent state of one window of one key: contents, panes so far, and trigger state.

All of it is plain JSON data in the row's state, so SQL can read it there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Self

from millpond.executor.windows.window import Window

_OMITTED_WHEN_EMPTY: Final = (
    "news",
    "index",
    "nonspeculative_index",
    "has_ended",
    "is_held",
    "trigger",
    "timers",
    "emitted",
    "is_closed",
)


@dataclass(slots=True, kw_only=True)
class WindowState:
    """The state of one window.

    Attributes:
        window: its bounds.
        accumulator: the accumulator of its contents.
        has_contents: whether there is an accumulator.
        news: number of elements since the last pane.
        index: number of panes so far.
        nonspeculative_index: number of panes so far that were not early.
        has_ended: whether a trigger has fired at or after the window's end.
        output_at: the next pane's event time as far as elements determine it, in microseconds.
        is_held: whether elements that arrived in time wait for a pane, perhaps until the window
            expires; the output watermark is held for that pane.
        trigger: trigger state, by the trigger's path in the tree.
        timers: pending trigger timers; see `TriggerContext`.
        emitted: envelopes that the next pane retracts, in retracting mode.
        is_closed: whether the trigger has finished; later elements are dropped.
    """

    window: Window
    accumulator: Any = None
    has_contents: bool = False
    news: int = 0
    index: int = 0
    nonspeculative_index: int = 0
    has_ended: bool = False
    output_at: int | None = None
    is_held: bool = False
    trigger: dict[str, dict[str, Any]] = field(default_factory=dict)
    timers: dict[str, int] = field(default_factory=dict)
    emitted: list[dict[str, Any]] = field(default_factory=list)
    is_closed: bool = False

    def close(self) -> None:
        """Reduce the state to a tombstone, which makes later elements countable as dropped."""
        self.is_closed = True
        self.clear_contents()
        self.output_at = None
        self.trigger, self.timers, self.emitted = {}, {}, []

    def clear_contents(self) -> None:
        """Drop the accumulator and the count of elements since the last pane."""
        self.accumulator, self.has_contents, self.news = None, False, 0
        self.is_held = False

    def to_json(self) -> dict[str, Any]:
        """The window as the row stores it; empty fields are omitted."""
        fields: dict[str, Any] = {"window": list(self.window)}
        if self.has_contents:
            fields["accumulator"] = self.accumulator
        for name in _OMITTED_WHEN_EMPTY:
            if value := getattr(self, name):
                fields[name] = value
        if self.output_at is not None:
            fields["output_at"] = self.output_at
        return fields

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Self:
        """The inverse of `to_json`."""
        start, end = fields["window"]
        rest = {name: value for name, value in fields.items() if name != "window"}
        return cls(window=Window(start, end), has_contents="accumulator" in fields, **rest)
