"""The engine timers of windows."""

from __future__ import annotations

import pytest

from millpond.executor.time.instants import INSTANT_MAX_US
from millpond.executor.windows.key_windows import Wanted, WindowStates, add_wanted, parse_tag
from millpond.executor.windows.strategy import WindowingStrategy
from millpond.executor.windows.trigger import TriggerTimer
from millpond.executor.windows.window import GLOBAL_WINDOW, Window, WindowState
from millpond.executor.windows.window_fns import FixedWindows
from millpond.statestore.rows.row import TimeDomain
from millpond.statestore.types import TIME_MAX_US

_STRATEGY = WindowingStrategy(window_fn=FixedWindows("10us"), allowed_lateness="5us")
_EVENT, _WALL = TimeDomain.EVENT, TimeDomain.WALL


def _wanted(state: WindowState, watermark: int = 0) -> dict[str, Wanted]:
    wanted: dict[str, Wanted] = {}
    add_wanted(wanted, _STRATEGY, state, watermark)
    return wanted


def test_window_expires_after_its_allowed_lateness() -> None:
    """The expiry timer holds no watermark."""
    assert _wanted(WindowState(window=Window(0, 10))) == {"~0/10": Wanted(16, _EVENT, 16)}


def test_global_window_expires_when_the_input_ends() -> None:
    """Its pane still has a time that records can carry."""
    (timer,) = _wanted(WindowState(window=GLOBAL_WINDOW)).values()

    assert timer == Wanted(TIME_MAX_US, _EVENT, INSTANT_MAX_US)


@pytest.mark.parametrize(
    ("text", "at", "watermark", "output_at"),
    [
        ("||event", 10, 0, 9),
        ("||event", 4, 0, 9),
        ("||event", 12, 0, 16),
        ("||wall", 999, 0, 9),
        ("||wall", 999, 10, 16),
    ],
)
def test_only_early_and_on_time_panes_hold_the_watermark(
    text: str, at: int, watermark: int, output_at: int
) -> None:
    state = WindowState(window=Window(0, 10), timers={text: at})

    assert _wanted(state, watermark)[f"0/10|{text}"].output_at == output_at


def test_oldest_output_at_includes_windows_that_are_not_opened() -> None:
    owing = [WindowState(window=Window(at, at + 10), output_at=at + 3).to_json() for at in (0, 10)]
    windows = WindowStates({"windows": owing})

    assert windows.oldest_output_at() == 3
    windows.at(Window(20, 30)).output_at = 1
    assert windows.oldest_output_at() == 1
    windows.pop(Window(0, 10))
    windows.pop(Window(20, 30))
    assert windows.oldest_output_at() == 13


@pytest.mark.parametrize(
    ("tag", "expected"),
    [
        ("~-20/-10", (Window(-20, -10), None)),
        ("-20/-10|0/r/|quiet|wall", (Window(-20, -10), TriggerTimer("0/r/", "quiet", _WALL))),
    ],
)
def test_tag_names_the_window_and_the_triggers_timer(tag: str, expected: object) -> None:
    """The expiry has no trigger timer."""
    assert parse_tag(tag) == expected


def test_expiry_fires_after_triggers_at_the_same_time() -> None:
    """The engine fires timers of equal times in the order of their tags."""
    assert max("~0/10", "0/10|||event", "-5/10|||event") == "~0/10"
