"""
The windows of one key during one hook, decoded on first access.

A key may have thousands of windows while a timer concerns only one, so windows that the hook does
not open are written back as they were read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, KeysView, Mapping
from typing import Any

from millpond.dataflow.windows.window import Window
from millpond.dataflow.windows.window_state import WindowState

__all__ = ["OnOpen", "WindowStates"]

OnOpen = Callable[[WindowState], None]
"""Called with each stored window when it is first opened, before it changes."""


class WindowStates:
    """
    The windows of a key, by their bounds.

    Args:
        rows: the stored windows, as `to_json` wrote them.
        on_open: called with each stored window when it is first opened.
    """

    __slots__ = ("_on_open", "_open", "_rows")

    def __init__(self, rows: Iterable[Mapping[str, Any]], on_open: OnOpen | None = None) -> None:
        self._rows: dict[Window, Mapping[str, Any]] = {Window(*row["window"]): row for row in rows}
        self._open: dict[Window, WindowState] = {}
        self._on_open = on_open

    def __contains__(self, window: object) -> bool:
        return window in self._rows

    def __len__(self) -> int:
        return len(self._rows)

    def keys(self) -> KeysView[Window]:
        """
        The bounds of all windows.
        """
        return self._rows.keys()

    def get(self, window: Window) -> WindowState | None:
        """
        The window with these bounds, opened; ``None`` if there is none.
        """
        state = self._open.get(window)
        if state is None and (row := self._rows.get(window)) is not None:
            state = self._open[window] = WindowState.from_json(row)
            if self._on_open is not None:
                self._on_open(state)
        return state

    def at(self, window: Window) -> WindowState:
        """
        The window with these bounds, opened or new.
        """
        return self.get(window) or self.add(window)

    def add(self, window: Window) -> WindowState:
        """
        Start an empty window, replacing any state of the same bounds.
        """
        state = self._open[window] = WindowState(window=window)
        self._rows[window] = {}
        return state

    def pop(self, window: Window) -> WindowState | None:
        """
        Remove and return the window with these bounds; ``None`` if there is none.
        """
        state = self.get(window)
        if state is not None:
            del self._open[window], self._rows[window]
        return state

    def opened(self) -> Iterable[WindowState]:
        """
        The windows that have been opened and not removed.
        """
        return self._open.values()

    def oldest_output_at(self) -> int | None:
        """
        The least event time of any pane still to be emitted; ``None`` if no window determines one.
        """
        oldest: int | None = None
        for window, row in self._rows.items():
            state = self._open.get(window)
            at = row.get("output_at") if state is None else state.output_at
            if at is not None and (oldest is None or at < oldest):
                oldest = at
        return oldest

    def to_json(self) -> list[Mapping[str, Any]]:
        """
        All windows as the row is to store them, ordered by their bounds.
        """
        states = self._open
        return [
            states[window].to_json() if window in states else self._rows[window]
            for window in sorted(self._rows)
        ]
