"""The engine timers that a key's windows need: trigger timers, expiry timers and holds.

Triggers keep their timers in the window's state; only changes are passed to the engine. A hold
keeps the output watermark at the event time of a pane still to come (MillWheel §5.2).
"""

from __future__ import annotations

from typing import Final, NamedTuple

from millpond.dataflow.step.strategy import WindowingStrategy
from millpond.dataflow.triggers.trigger_context import TriggerTimer, parse_timer
from millpond.dataflow.windows.window import Window
from millpond.dataflow.windows.window_state import WindowState
from millpond.executor.computation.context import Context
from millpond.executor.computation.timer import Timer
from millpond.executor.event_time.clocks import EXACT, Clocks
from millpond.executor.event_time.duration import INSTANT_MAX_US
from millpond.statestore.rows.row import TimeDomain
from millpond.statestore.types import TIME_MAX_US, EventTimeMicros

# "~" sorts after digits: among timers due at the same time, expiry fires last.
_EXPIRY: Final = "~"
_HOLD: Final = "panes"


class Wanted(NamedTuple):
    """A timer that a window needs.

    Attributes:
        at: when it fires, in microseconds.
        domain: the clock it waits for.
        output_at: event time of the pane it will emit; the output watermark is held there.
        percentile: in the event-time domain, the watermark it waits for.
    """

    at: int
    domain: TimeDomain
    output_at: int
    percentile: float = EXACT


def add_wanted(
    wanted: dict[str, Wanted], strategy: WindowingStrategy, state: WindowState, watermark: int
) -> None:
    """Add the timers that a window needs to ``wanted``, by tag."""
    window = state.window
    expires_at = strategy.expires_at(window)
    # The end of the global window is beyond any time that a record can carry.
    late_at = min(expires_at, INSTANT_MAX_US)
    closing_at = _pane_at(state) if state.is_held else late_at
    wanted[f"{_EXPIRY}{window.start}/{window.end}"] = Wanted(expires_at, TimeDomain.EVENT, closing_at)
    for text, at in state.timers.items():
        wanted[tag_of(window, text)] = _trigger_timer(state, at, parse_timer(text), late_at, watermark)


def _trigger_timer(state: WindowState, at: int, timer: TriggerTimer, late_at: int, watermark: int) -> Wanted:
    due, window = min(at, TIME_MAX_US), state.window
    is_for_late = due > window.end if timer.domain is TimeDomain.EVENT else watermark >= window.end
    # A pane after the end is late anyway; holding the watermark for it would stall all consumers.
    output_at = late_at if is_for_late else _pane_at(state)
    return Wanted(due, timer.domain, output_at, timer.percentile)


def _pane_at(state: WindowState) -> int:
    last_at = state.window.last_at
    return last_at if state.output_at is None else min(state.output_at, last_at)


def set_timers(context: Context, before: dict[str, Wanted], after: dict[str, Wanted], oldest_at: int) -> None:
    """Update the engine's timers to match the windows that the hook opened.

    Args:
        context: the hook's context.
        before: the timers they needed when the hook began, without the timer that fired.
        after: the timers they need now.
        oldest_at: the least event time at which the hook may produce; no hold lies below it.
    """
    for tag, wanted in before.items():
        if tag not in after:
            context.delete_timer(tag, wanted.domain)
    for tag, wanted in after.items():
        if before.get(tag) != wanted:
            output_at = max(wanted.output_at, oldest_at)
            context.set_timer(wanted.at, tag, wanted.domain, output_at, wanted.percentile)


def set_hold(context: Context, before: int | None, after: int | None, oldest_at: int) -> None:
    """Hold the output watermark at the event time of the oldest pane still to be emitted.

    Args:
        context: the hook's context.
        before: that time when the hook began.
        after: that time now; ``None`` if no pane is pending.
        oldest_at: the least event time at which the hook may produce; the hold does not lie below it.
    """
    if after is None:
        if before is not None:
            context.state.release(_HOLD)
    elif after != before:
        context.state.hold(max(after, oldest_at), _HOLD)


def as_of(timer: Timer, clocks: Clocks) -> Clocks:
    """The clocks as they stood at the moment an event timer waited for.

    Panes must follow from event time, not from the steps in which watermarks happen to advance. So
    a watermark counts as no further than the timer's time, and one of a higher percentile than the
    timer's counts as still before it.

    Example:
        >>> clocks = as_of(
        ...     Timer("", TimeDomain.EVENT, at=10, output_at=10, percentile=90.0),
        ...     Clocks(watermark=25, wall_time=0, percentile_watermarks={90.0: 30, 50.0: 40}),
        ... )
        >>> clocks.watermark, clocks.percentile_watermarks
        (9, {90.0: 10, 50.0: 10})
    """

    def bounded(percentile: float, watermark: int) -> EventTimeMicros:
        return EventTimeMicros(min(watermark, timer.at - 1 if percentile > timer.percentile else timer.at))

    percentile_watermarks = {
        percentile: bounded(percentile, watermark)
        for percentile, watermark in clocks.percentile_watermarks.items()
    }
    return Clocks(
        watermark=bounded(EXACT, clocks.watermark),
        wall_time=clocks.wall_time,
        percentile_watermarks=percentile_watermarks,
    )


def tag_of(window: Window, text: str) -> str:
    """The engine's tag of a trigger's timer; `parse_tag` is the inverse."""
    return f"{window.start}/{window.end}|{text}"


def parse_tag(tag: str) -> tuple[Window, TriggerTimer | None]:
    """The window that a timer tag names, and the trigger timer; ``None`` for the window's expiry."""
    name, _, text = tag.removeprefix(_EXPIRY).partition("|")
    start, _, end = name.partition("/")
    return Window(int(start), int(end)), parse_timer(text) if text else None
