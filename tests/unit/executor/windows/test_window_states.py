"""The windows of a key during its turn."""

from __future__ import annotations

from typing import Any

from millpond.executor.windows.key_windows import WindowStates
from millpond.executor.windows.window import Window, WindowState

_ROWS: list[dict[str, Any]] = [{"window": [0, 10], "news": 1}, {"window": [10, 20], "news": 2}]


def test_windows_are_decoded_on_first_access_only() -> None:
    """The others are written back unchanged."""
    told: list[WindowState] = []
    windows = WindowStates({"windows": _ROWS})
    windows.begin_hook(told.append)
    state = windows.get(Window(10, 20))

    assert state is not None
    assert windows.get(Window(10, 20)) is state
    assert (told, windows.touched()) == ([state], [state])
    stored = windows.to_json()
    assert stored == {"windows": _ROWS}
    assert stored["windows"][0] is _ROWS[0]


def test_windows_can_be_added_and_popped() -> None:
    """A new window does not call ``on_open``."""
    told: list[WindowState] = []
    windows = WindowStates({"windows": _ROWS})
    windows.begin_hook(told.append)
    windows.at(Window(-5, 5)).news = 7
    taken = windows.pop(Window(0, 10))

    assert taken is not None
    assert taken.news == 1
    assert told == [taken]
    assert (windows.get(Window(0, 10)), windows.pop(Window(3, 4))) == (None, None)
    assert windows.to_json() == {"windows": [{"window": [-5, 5], "news": 7}, _ROWS[1]]}
    assert windows.keys() == {Window(-5, 5), Window(10, 20)}


def test_each_hook_sees_only_the_windows_it_touches() -> None:
    """A decoded window stays decoded for the whole turn."""
    told: list[WindowState] = []
    windows = WindowStates({"windows": _ROWS})
    first = windows.at(Window(0, 10))
    windows.begin_hook(told.append)

    assert windows.touched() == []
    assert windows.at(Window(0, 10)) is first
    assert told == windows.touched() == [first]
