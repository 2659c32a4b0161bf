"""Panes: the output of a window when its trigger fires, and the envelope that carries a pane.

A windowed step produces each result in an envelope, a JSON object with four fields: ``value``,
``window`` (its bounds in microseconds), ``at`` (the pane's event time) and ``pane``. A windowed
step that consumes envelopes takes the value, its event time, and whether it is a retraction.
Any other consumer sees the object and its fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Self

from millpond.executor.windows.window import Window
from millpond.statestore.rows.row import is_envelope


class OtherPaneError(Exception):
    """A pane is a retraction, or belongs to a window that ended before the time of its record."""


def element_value(value: Any, at: int) -> Any:
    """Return the value of an element whose record has this time: a pane's own value, or raise `OtherPaneError`."""
    if not is_envelope(value):
        return value
    if value["pane"]["is_retraction"] or value["at"] != at:
        raise OtherPaneError
    return value["value"]


class Timing(StrEnum):
    """When a pane fires relative to its window's end: before, at or after it."""

    EARLY = "early"
    ON_TIME = "on_time"
    LATE = "late"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pane:
    """One firing of a window (Beam's ``PaneInfo``).

    Attributes:
        index: 0, 1, 2 … over all panes of the window.
        nonspeculative_index: 0, 1, 2 … over the panes that are not early; -1 for early panes.
        is_retraction: it retracts the pane with these indices; timing, percentile, production time and trigger
            are then taken from the pane that replaces it.
        watermark_percentile: the estimated share of the window's input that has arrived, from 0 to
            100: the greatest requested percentile whose watermark has passed the window's end.
            ``None`` for late panes.
        produced_at: wall time of production, in microseconds since 1970 UTC.
        trigger: labels of the innermost triggers that fired.
    """

    index: int
    nonspeculative_index: int
    timing: Timing
    is_last: bool
    is_retraction: bool = False
    watermark_percentile: float | None = None
    produced_at: int = 0
    trigger: str = ""

    @property
    def is_first(self) -> bool:
        """True for the first pane of the window."""
        return self.index == 0

    def to_json(self) -> dict[str, Any]:
        """Return the pane as the envelope carries it."""
        return {
            "index": self.index,
            "nonspeculative_index": self.nonspeculative_index,
            "timing": str(self.timing),
            "is_first": self.is_first,
            "is_last": self.is_last,
            "is_retraction": self.is_retraction,
            "watermark_percentile": self.watermark_percentile,
            "produced_at": self.produced_at,
            "trigger": self.trigger,
        }

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Self:
        """Return the pane of an envelope."""
        known = {name: value for name, value in fields.items() if name != "is_first"}
        return cls(**{**known, "timing": Timing(fields["timing"])})


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowedValue:
    """A value with its window and pane; ``at`` is the pane's event time, in microseconds since 1970 UTC."""

    value: Any
    window: Window
    at: int
    pane: Pane

    @staticmethod
    def is_envelope(value: object) -> bool:
        """Return True if a record's value is an envelope; a row from outside is none, even with the same fields."""
        return is_envelope(value)

    def retraction(self, successor: Pane) -> WindowedValue:
        """Return the retraction of this value: its pane's indices, with the timing and the cause of ``successor``."""
        pane = replace(
            self.pane,
            is_retraction=True,
            is_last=False,
            timing=successor.timing,
            watermark_percentile=successor.watermark_percentile,
            produced_at=successor.produced_at,
            trigger=successor.trigger,
        )
        return replace(self, pane=pane)

    def to_json(self) -> dict[str, Any]:
        """Return the envelope, a JSON object."""
        return {
            "value": self.value,
            "window": list(self.window),
            "at": self.at,
            "pane": self.pane.to_json(),
        }

    @classmethod
    def from_json(cls, envelope: Mapping[str, Any]) -> Self:
        """Return the windowed value in an envelope."""
        start, end = envelope["window"]
        return cls(
            value=envelope["value"],
            window=Window(start, end),
            at=envelope["at"],
            pane=Pane.from_json(envelope["pane"]),
        )
