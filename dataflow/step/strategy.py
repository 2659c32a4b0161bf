"""
The windowing strategy: everything that is said about windows, triggers and refinement at one step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal, TypeAlias

from millpond.dataflow.triggers.trigger import Trigger
from millpond.dataflow.triggers.trigger_context import Contents
from millpond.dataflow.triggers.watermark_triggers import Default
from millpond.dataflow.windows.fixed_windows import GlobalWindows
from millpond.dataflow.windows.timestamp_combiner import TimestampCombiner
from millpond.dataflow.windows.window import Window
from millpond.dataflow.windows.window_fn import WindowFn
from millpond.executor.event_time.duration import Duration, duration_us
from millpond.statestore.errors import InvalidError
from millpond.statestore.types import TIME_MAX_US

__all__ = ["Accumulation", "Closing", "WindowingStrategy"]


class Accumulation(StrEnum):
    """
    How the panes of a window relate to each other.

    ``CLEAR_BY_DEFAULT`` and ``ACCUMULATE_BY_DEFAULT`` do what the trigger asks for, if it asks.
    """

    DISCARDING = "discarding"
    ACCUMULATING = "accumulating"
    RETRACTING = "retracting"
    CLEAR_BY_DEFAULT = "clear_by_default"
    ACCUMULATE_BY_DEFAULT = "accumulate_by_default"

    def clears(self, asked: Contents) -> bool:
        """
        Whether contents go when a pane has been shown, given what the trigger asked for.
        """
        match self:
            case Accumulation.DISCARDING:
                return True
            case Accumulation.ACCUMULATING | Accumulation.RETRACTING:
                return False
            case Accumulation.CLEAR_BY_DEFAULT:
                return asked is not Contents.KEEP
            case Accumulation.ACCUMULATE_BY_DEFAULT:
                return asked is Contents.CLEAR


Closing: TypeAlias = Literal["never", "if_non_empty", "always"]
"""What comes when a window expires: nothing, a last pane if elements wait for one, or always one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowingStrategy:
    """
    Where in event time elements are grouped, when the groups are shown, and how panes relate.

    Args:
        window_fn: where.
        trigger: when.
        accumulation: how.
        allowed_lateness: how long after its end a window takes late elements.
        timestamp_combiner: the time of panes.
        closing: what comes when a window expires with elements that no trigger has shown.
        emit_empty_on_time: whether the on-time pane comes even without news.

    Raises:
        InvalidError: an argument that cannot be, or a trigger that cannot follow merging windows.
    """

    window_fn: WindowFn = field(default_factory=GlobalWindows)
    trigger: Trigger = field(default_factory=Default)
    accumulation: Accumulation = Accumulation.DISCARDING
    allowed_lateness: Duration = 0
    timestamp_combiner: TimestampCombiner = TimestampCombiner.END_OF_WINDOW
    closing: Closing = "if_non_empty"
    emit_empty_on_time: bool = True
    allowed_lateness_us: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """
        Refuse what cannot work while the caller is still near.
        """
        for name, kind in (("window_fn", WindowFn), ("trigger", Trigger)):
            if not isinstance(getattr(self, name), kind):
                raise InvalidError(f"{name} is not of the right kind", value=getattr(self, name))
        if self.closing not in ("never", "if_non_empty", "always"):
            raise InvalidError("closing is never, if_non_empty or always", closing=self.closing)
        object.__setattr__(self, "accumulation", _member(Accumulation, self.accumulation))
        combiner = _member(TimestampCombiner, self.timestamp_combiner)
        object.__setattr__(self, "timestamp_combiner", combiner)
        object.__setattr__(self, "allowed_lateness_us", duration_us(self.allowed_lateness))
        if self.allowed_lateness_us < 0:
            raise InvalidError("the allowed lateness is not negative", value=self.allowed_lateness)
        if self.window_fn.is_merging and not self.trigger.can_merge:
            raise InvalidError("windows merge, but a trigger was not told how to", trigger=self.trigger)

    def expires_at(self, window: Window) -> int:
        """
        The first time of the watermark at which the window takes no elements any more.
        """
        return min(window.end + self.allowed_lateness_us + 1, TIME_MAX_US)


def _member(kind: type[StrEnum], value: object) -> StrEnum:
    try:
        return kind(value)  # type: ignore[arg-type]  # whatever the user gave
    except ValueError as cause:
        raise InvalidError("no such choice", value=value, choices=[str(one) for one in kind]) from cause
