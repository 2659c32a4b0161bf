"""
The windows of a key as one hook has them: opened when they are looked at, and left as they were otherwise.

A key may have thousands of windows, and a timer is about one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, KeysView, Mapping
from typing import Any

from millpond.dataflow.windows.window import Window
from millpond.dataflow.windows.window_state import WindowState

__all__ = ["OnOpen", "WindowStates"]

OnOpen = Callable[[WindowState], None]
"""Told of each window of the row that is opened, before anything has happened to it."""


class WindowStates:
    """
    Windows by their bounds.

    Args:
        rows: what `to_json` gave last time.
        on_open: is told of each that is opened.
    """

    __slots__ = ("_on_open", "_open", "_there")

    def __init__(self, rows: Iterable[Mapping[str, Any]], on_open: OnOpen | None = None) -> None:
        self._there: dict[Window, Mapping[str, Any]] = {Window(*row["window"]): row for row in rows}
        self._open: dict[Window, WindowState] = {}
        self._on_open = on_open

    def __contains__(self, window: object) -> bool:
        return window in self._there

    def __len__(self) -> int:
        return len(self._there)

    def keys(self) -> KeysView[Window]:
        """
        The bounds of all windows.
        """
        return self._there.keys()

    def get(self, window: Window) -> WindowState | None:
        """
        Open a window, if there is one with these bounds.
        """
        found = self._open.get(window)
        if found is None and (row := self._there.get(window)) is not None:
            found = self._open[window] = WindowState.from_json(row)
            if self._on_open is not None:
                self._on_open(found)
        return found

    def at(self, window: Window) -> WindowState:
        """
        Open a window, a new one if there is none with these bounds.
        """
        return self.get(window) or self.add(window)

    def add(self, window: Window) -> WindowState:
        """
        Begin a window anew.
        """
        made = self._open[window] = WindowState(window=window)
        self._there[window] = {}
        return made

    def pop(self, window: Window) -> WindowState | None:
        """
        Take a window out, if it is there.
        """
        found = self.get(window)
        if found is not None:
            del self._open[window], self._there[window]
        return found

    def opened(self) -> Iterable[WindowState]:
        """
        The windows that have been opened and are still there.
        """
        return self._open.values()

    def oldest_output_at(self) -> int | None:
        """
        The time of the oldest pane that is owed, if any window says so.
        """
        oldest: int | None = None
        for window, row in self._there.items():
            state = self._open.get(window)
            at = row.get("output_at") if state is None else state.output_at
            if at is not None and (oldest is None or at < oldest):
                oldest = at
        return oldest

    def to_json(self) -> list[Mapping[str, Any]]:
        """
        All windows as they are to lie in the row, by their bounds.
        """
        states = self._open
        return [
            states[window].to_json() if window in states else self._there[window]
            for window in sorted(self._there)
        ]
