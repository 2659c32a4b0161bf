"""The engine timers that windows need."""

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

_STRATEGY = WindowingStrategy(window_fn=FixedWindows(10), allowed_lateness=5)
_EVENT, _WALL = TimeDomain.EVENT, TimeDomain.WALL


def _wanted(state: WindowState, watermark: int = 0) -> dict[str, Wanted]:
    wanted: dict[str, Wanted] = {}
    add_wanted(wanted, _STRATEGY, state, watermark)
    return wanted


def test_a_window_expires_after_its_lateness() -> None:
    """The expiry timer fires a microsecond after the end plus the allowed lateness, and holds nothing."""
    assert _wanted(WindowState(window=Window(0, 10))) == {"~0/10": Wanted(16, _EVENT, 16)}


def test_the_global_window_expires_with_the_input() -> None:
    """The global window lasts until all input has ended, and its pane has a time that records can carry."""
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
def test_only_what_is_on_time_holds_the_watermark(text: str, at: int, watermark: int, output_at: int) -> None:
    """A timer for an early or on-time pane holds the watermark at the pane's time, one for a late pane does not."""
    state = WindowState(window=Window(0, 10), timers={text: at})

    assert _wanted(state, watermark)[f"0/10|{text}"].output_at == output_at


def test_a_pane_with_a_time_of_its_own_is_held() -> None:
    """The watermark is held at the oldest pane with an element's time, whether its window is opened or not."""
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
def test_tags_say_whose_timer_it_is(tag: str, expected: object) -> None:
    """A tag names the window, and the trigger's timer, or none for the expiry."""
    assert parse_tag(tag) == expected


def test_expiry_comes_last() -> None:
    """Among timers due at the same time, the expiry's tag sorts after those of triggers."""
    assert max("~0/10", "0/10|||event", "-5/10|||event") == "~0/10"
