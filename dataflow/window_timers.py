"""
The engine's timers that a key's windows need: those of their triggers, their expiry, and holds.

Triggers keep their timers in the window's state; the engine is told only of what has changed.
A hold keeps the output watermark at the time of a pane that is still to come (MillWheel §5.2).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

from millpond.dataflow.strategy import WindowingStrategy
from millpond.dataflow.trigger_context import TriggerTimer, parse_timer
from millpond.dataflow.window import Window
from millpond.dataflow.window_state import WindowState
from millpond.executor.clocks import EXACT
from millpond.executor.context import Context
from millpond.executor.duration import INSTANT_MAX_US
from millpond.statestore.row import TimeDomain
from millpond.statestore.types import TIME_MAX_US

__all__ = ["Wanted", "parse_tag", "set_timers", "wanted_timers"]

# "~" sorts after digits: of timers that are due at the same time, expiry comes last.
_EXPIRY: Final = "~"
_HOLD: Final = "panes"


class Wanted(NamedTuple):
    """
    A timer that a window needs.

    Attributes:
        at: when it fires; what a hold holds.
        domain: on which clock.
        output_at: the time of what it will show; the watermark is held there.
        percentile: in event time, which watermark it waits for.
    """

    at: int
    domain: TimeDomain
    output_at: int
    percentile: float = EXACT


def wanted_timers(
    strategy: WindowingStrategy, windows: Iterable[WindowState], watermark: int
) -> dict[str, Wanted]:
    """
    All timers that the windows need, by tag, and the hold of the oldest pane that they owe.
    """
    wanted: dict[str, Wanted] = {}
    owed: list[int] = []
    for state in windows:
        window = state.window
        name = f"{window.start}/{window.end}"
        expires_at = strategy.expires_at(window)
        # The end of the global window is no time that a record could carry.
        late_at = min(expires_at, INSTANT_MAX_US)
        closing_at = _pane_at(state) if state.is_held else late_at
        wanted[f"{_EXPIRY}{name}"] = Wanted(expires_at, TimeDomain.EVENT, closing_at)
        for text, at in state.timers.items():
            wanted[f"{name}|{text}"] = _trigger_timer(state, at, parse_timer(text), late_at, watermark)
        if state.output_at is not None:
            owed.append(state.output_at)
    if owed:
        oldest_at = min(owed)
        wanted[_HOLD] = Wanted(oldest_at, TimeDomain.HOLD, oldest_at)
    return wanted


def _trigger_timer(state: WindowState, at: int, timer: TriggerTimer, late_at: int, watermark: int) -> Wanted:
    due, window = min(at, TIME_MAX_US), state.window
    is_for_late = due > window.end if timer.domain is TimeDomain.EVENT else watermark >= window.end
    # What comes after the end is late anyway; to hold the watermark for it would stop everybody.
    output_at = late_at if is_for_late else _pane_at(state)
    return Wanted(due, timer.domain, output_at, timer.percentile)


def _pane_at(state: WindowState) -> int:
    last_at = state.window.last_at
    return last_at if state.output_at is None else min(state.output_at, last_at)


def set_timers(context: Context, before: dict[str, Wanted], after: dict[str, Wanted]) -> None:
    """
    Have the engine's timers follow the windows.

    Args:
        context: the hook's context.
        before: what the windows needed when the hook began, without the timer that has fired.
        after: what they need now. Nothing is promised below what the hook may produce at.
    """
    oldest_at = context.oldest_at
    for tag, wanted in before.items():
        if tag not in after:
            if wanted.domain is TimeDomain.HOLD:
                context.state.release(tag)
            else:
                context.delete_timer(tag, wanted.domain)
    for tag, wanted in after.items():
        if before.get(tag) == wanted:
            continue
        output_at = max(wanted.output_at, oldest_at)
        if wanted.domain is TimeDomain.HOLD:
            context.state.hold(output_at, tag)
        else:
            context.set_timer(wanted.at, tag, wanted.domain, output_at, wanted.percentile)


def parse_tag(tag: str) -> tuple[Window, TriggerTimer | None]:
    """
    Whose timer has fired: a window's trigger's, or a window's expiry (``None``).
    """
    name, _, text = tag.removeprefix(_EXPIRY).partition("|")
    start, _, end = name.partition("/")
    return Window(int(start), int(end)), parse_timer(text) if text else None
