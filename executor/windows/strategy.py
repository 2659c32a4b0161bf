"""The windowing, triggering and accumulation settings of one step."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal, TypeAlias

from millpond.executor.windows.time_triggers import Default
from millpond.executor.windows.trigger import Contents, Trigger
from millpond.executor.windows.window import TimestampCombiner, Window, WindowFn
from millpond.executor.windows.window_fns import GlobalWindows
from millpond.statestore.durations import Duration, duration_us
from millpond.statestore.errors import InvalidError, did_you_mean
from millpond.statestore.types import TIME_MAX_US


class Accumulation(StrEnum):
    """The relation of a window's panes to each other (the Dataflow paper's refinement modes).

    ``DISCARDING``: a pane holds the elements since the previous pane. ``ACCUMULATING``: a pane holds
    all elements so far. ``RETRACTING``: accumulating and incremental, so a pane follows a retraction of the previous
    pane. ``CLEAR_BY_DEFAULT`` and ``ACCUMULATE_BY_DEFAULT`` follow the trigger's request, if any
    (see `TriggerContext.ask`), and otherwise discard or accumulate.
    """

    DISCARDING = "discarding"
    ACCUMULATING = "accumulating"
    RETRACTING = "retracting"
    CLEAR_BY_DEFAULT = "clear_by_default"
    ACCUMULATE_BY_DEFAULT = "accumulate_by_default"

    @property
    def may_clear(self) -> bool:
        """True if a pane may clear the contents."""
        return self not in (Accumulation.ACCUMULATING, Accumulation.RETRACTING)

    def clears(self, asked: Contents) -> bool:
        """Return True if contents are cleared after a pane, given the trigger's request."""
        if self is Accumulation.CLEAR_BY_DEFAULT:
            return asked is not Contents.KEEP
        if self is Accumulation.ACCUMULATE_BY_DEFAULT:
            return asked is Contents.CLEAR
        return self is Accumulation.DISCARDING


Closing: TypeAlias = Literal["never", "if_non_empty", "always"]
"""Condition for an expiring window's last pane: never, if it holds elements that no pane has shown, or always."""

Asked: TypeAlias = Literal["element", "bundle"]
"""When a window's trigger is asked: after each element, or once per bundle of elements."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowingStrategy:
    """Windowing, triggering and accumulation of a step; the fields are the arguments of `DataflowStream.window`.

    Example:
        >>> strategy = WindowingStrategy(window_fn=FixedWindows("1h"), trigger=AfterWatermark(late=AfterCount(1)))
        >>> strategy.accumulation
        <Accumulation.DISCARDING: 'discarding'>
    """

    window_fn: WindowFn = field(default_factory=GlobalWindows)
    trigger: Trigger = field(default_factory=Default)
    accumulation: Accumulation = Accumulation.DISCARDING
    incremental: bool = False
    allowed_lateness: Duration = 0
    timestamp_combiner: TimestampCombiner = TimestampCombiner.END_OF_WINDOW
    closing: Closing = "if_non_empty"
    emit_empty_on_time: bool = True
    asked: Asked = "element"
    allowed_lateness_us: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name, kind in (("window_fn", WindowFn), ("trigger", Trigger)):
            if not isinstance(getattr(self, name), kind):
                example = "FixedWindows('1h')" if kind is WindowFn else "AfterWatermark()"
                raise InvalidError(
                    f"{name} must be a {kind.__name__}, such as {example}", value=getattr(self, name)
                )
        if self.closing not in ("never", "if_non_empty", "always"):
            raise InvalidError("closing must be never, if_non_empty or always", closing=self.closing)
        if self.asked not in ("element", "bundle"):
            raise InvalidError("a trigger is asked after each element or once a bundle", asked=self.asked)
        object.__setattr__(self, "accumulation", _member(Accumulation, self.accumulation))
        combiner = _member(TimestampCombiner, self.timestamp_combiner)
        object.__setattr__(self, "timestamp_combiner", combiner)
        object.__setattr__(self, "allowed_lateness_us", duration_us(self.allowed_lateness))
        if self.allowed_lateness_us < 0:
            raise InvalidError(
                "the allowed lateness must not be negative: 0 drops every late record",
                value=self.allowed_lateness,
            )
        if self.window_fn.is_merging and not self.trigger.can_merge:
            raise InvalidError(
                "windows merge, but the trigger has no merge function: give it one, or take windows that do not merge",
                trigger=self.trigger,
            )

    @property
    def is_incremental(self) -> bool:
        """True if each pane is preceded by retractions of the previous pane."""
        return self.incremental or self.accumulation is Accumulation.RETRACTING

    def expires_at(self, window: Window) -> int:
        """Return the watermark, in microseconds, from which the window accepts no more elements."""
        return min(window.end + self.allowed_lateness_us + 1, TIME_MAX_US)


def _member(kind: type[StrEnum], value: object) -> StrEnum:
    try:
        return kind(value)  # type: ignore[arg-type]  # unchecked user input
    except ValueError as cause:
        choices = [str(choice) for choice in kind]
        raise InvalidError(
            f"no such choice{did_you_mean(value, choices)}", value=value, choices=choices
        ) from cause
