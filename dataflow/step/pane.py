"""
Panes: what a window shows when its trigger fires, and the envelope in which it travels.

A windowed step produces its results in an envelope, a JSON object of four fields: ``value``,
``window`` (its bounds in microseconds), ``at`` (the pane's event time) and ``pane``. A windowed
step that consumes envelopes looks inside: it takes the value, its event time, and whether it
is a retraction. Any other consumer finds the fields by their names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Final, Self

from millpond.dataflow.windows.window import Window

__all__ = ["Pane", "Timing", "WindowedValue"]


class Timing(StrEnum):
    """
    Where a pane stands to its window's end: before it, at it, after it.
    """

    EARLY = "early"
    ON_TIME = "on_time"
    LATE = "late"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pane:
    """
    Which showing of a window this is.

    Attributes:
        index: 0, 1, 2 … over all panes of the window.
        nonspeculative_index: the same without the early ones, which have -1.
        timing: early, on time or late.
        is_last: no pane of the window can follow.
        is_retraction: takes back the pane with these indices; the other fields tell when and why.
        watermark_percentile: share of the window's input that is believed to be in, from 0 to
            100: the greatest percentile asked for whose watermark has passed the window's end.
            ``None`` when late.
        produced_at: wall time of production, in microseconds.
        trigger: the innermost triggers that fired.
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
        """
        Whether no pane of the window came before.
        """
        return self.index == 0

    def to_json(self) -> dict[str, Any]:
        """
        The pane as it travels.
        """
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
        """
        The pane that `to_json` described.
        """
        known = {name: value for name, value in fields.items() if name != "is_first"}
        return cls(**{**known, "timing": Timing(fields["timing"])})


_FIELDS: Final = frozenset({"value", "window", "at", "pane"})
_FIELD_COUNT: Final = len(_FIELDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowedValue:
    """
    A value with the window and the pane that it comes from.
    """

    value: Any
    window: Window
    at: int
    pane: Pane

    @staticmethod
    def is_envelope(value: object) -> bool:
        """
        Whether a record's value is an envelope.
        """
        # This is asked of each record: most values have another number of fields.
        return isinstance(value, dict) and len(value) == _FIELD_COUNT and value.keys() == _FIELDS

    def retraction(self, successor: Pane) -> WindowedValue:
        """
        The anti-datum of this value: its pane, shown again when and because its successor is.
        """
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
        """
        The envelope.
        """
        return {
            "value": self.value,
            "window": list(self.window),
            "at": self.at,
            "pane": self.pane.to_json(),
        }

    @classmethod
    def from_json(cls, envelope: Mapping[str, Any]) -> Self:
        """
        What is in an envelope.
        """
        start, end = envelope["window"]
        return cls(
            value=envelope["value"],
            window=Window(start, end),
            at=envelope["at"],
            pane=Pane.from_json(envelope["pane"]),
        )
