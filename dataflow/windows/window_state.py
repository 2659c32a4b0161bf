"""
What is kept for one window of one key: contents, panes so far, and its trigger's memory.

All of it is plain data, so it lives in the row's state and can be read there with SQL.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Self

from millpond.dataflow.windows.window import Window

__all__ = ["WindowState"]

_LEFT_OUT_WHEN_EMPTY: Final = (
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
    """
    One window.

    Attributes:
        window: its bounds.
        accumulator: the aggregate of its contents.
        has_contents: whether there is an accumulator.
        news: elements that came since the last pane.
        index: how many panes there have been.
        nonspeculative_index: how many of them were not early.
        has_ended: a trigger has fired at or after the window's end.
        output_at: time of the next pane, as far as its elements decide.
        is_held: elements that came in time wait for a pane, and may wait until the window expires;
            the watermark is held for it.
        trigger: the triggers' memory, by their place in the tree.
        timers: pending timers of the triggers; see `TriggerContext`.
        emitted: envelopes that the next pane takes back, when refining by retractions.
        is_closed: the trigger has finished: what still comes is dropped.
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
        """
        Keep nothing but the tombstone.
        """
        self.is_closed = True
        self.clear_contents()
        self.output_at = None
        self.trigger, self.timers, self.emitted = {}, {}, []

    def clear_contents(self) -> None:
        """
        Forget the elements.
        """
        self.accumulator, self.has_contents, self.news = None, False, 0
        self.is_held = False

    def to_json(self) -> dict[str, Any]:
        """
        The window as it lies in the row; what is empty is left out.
        """
        fields: dict[str, Any] = {"window": list(self.window)}
        if self.has_contents:
            fields["accumulator"] = self.accumulator
        for name in _LEFT_OUT_WHEN_EMPTY:
            if found := getattr(self, name):
                fields[name] = found
        if self.output_at is not None:
            fields["output_at"] = self.output_at
        return fields

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Self:
        """
        The window that `to_json` described.
        """
        start, end = fields["window"]
        rest = {name: value for name, value in fields.items() if name != "window"}
        return cls(window=Window(start, end), has_contents="accumulator" in fields, **rest)
