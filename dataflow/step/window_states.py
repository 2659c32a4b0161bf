"""The windows of one key during its turn, decoded on first access and stored once.

A key may have thousands of windows while a timer concerns only one. So the row is read once a turn, a
hook opens the windows that it touches, and those that no hook opens are written back as they were read.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, KeysView, Mapping
from heapq import heapify, heappop, heappush
from typing import Any, Final

from millpond.dataflow.windows.window import Window
from millpond.dataflow.windows.window_state import WindowState

OnOpen = Callable[[WindowState], None]
"""Called with each known window when a hook first touches it, before it changes."""

_WINDOWS: Final = "windows"


class WindowStates:
    """The windows of a key, by their bounds.

    Args:
        state: the stored state, as `to_json` gave it; ``None`` for a new key.
        on_open: see `begin_hook`.
    """

    __slots__ = ("_on_open", "_open", "_order", "_owed", "_owed_at", "_rows", "_touched")

    def __init__(self, state: Mapping[str, Any] | None = None, on_open: OnOpen | None = None) -> None:
        rows = () if state is None else state[_WINDOWS]
        self._rows: dict[Window, Mapping[str, Any]] = {Window(*row["window"]): row for row in rows}
        self._open: dict[Window, WindowState] = {}
        self._touched: set[Window] = set()
        self._order: list[Window] | None = None
        self._on_open = on_open
        self._owed_at: dict[Window, int] = {
            window: row["output_at"] for window, row in self._rows.items() if "output_at" in row
        }
        self._owed = [(at, window) for window, at in self._owed_at.items()]
        heapify(self._owed)

    def begin_hook(self, on_open: OnOpen | None) -> None:
        """Begin another hook: no window has been touched.

        Args:
            on_open: called with each known window when the hook first touches it.
        """
        self._note_owed()
        self._touched.clear()
        self._on_open = on_open

    def __contains__(self, window: object) -> bool:
        return window in self._rows

    def __len__(self) -> int:
        return len(self._rows)

    def keys(self) -> KeysView[Window]:
        """The bounds of all windows."""
        return self._rows.keys()

    def get(self, window: Window) -> WindowState | None:
        """The window with these bounds, opened; ``None`` if there is none."""
        state = self._open.get(window)
        if state is None:
            row = self._rows.get(window)
            if row is None:
                return None
            state = self._open[window] = WindowState.from_json(row)
        if window not in self._touched:
            self._touched.add(window)
            if self._on_open is not None:
                self._on_open(state)
        return state

    def at(self, window: Window) -> WindowState:
        """The window with these bounds, opened or new."""
        return self.get(window) or self.add(window)

    def add(self, window: Window) -> WindowState:
        """Start an empty window, replacing any state of the same bounds."""
        state = self._open[window] = WindowState(window=window)
        if self._order is not None and window not in self._rows:
            insort(self._order, window)
        self._rows[window] = {}
        self._touched.add(window)
        return state

    def pop(self, window: Window) -> WindowState | None:
        """Remove and return the window with these bounds; ``None`` if there is none."""
        state = self.get(window)
        if state is not None:
            del self._open[window], self._rows[window]
            if self._order is not None:
                del self._order[bisect_left(self._order, window)]
        return state

    def overlapping(self, window: Window) -> list[Window]:
        """The windows that overlap ``window``, of a key none of whose windows overlap each other."""
        order = self._order
        if order is None:
            order = self._order = sorted(self._rows)
        first = bisect_left(order, window)
        if first and order[first - 1].overlaps(window):
            first -= 1
        last = first
        while last < len(order) and order[last].start < window.end:
            last += 1
        return order[first:last]

    def touched(self) -> list[WindowState]:
        """The windows that the hook has touched and not removed."""
        states = self._open
        return [states[window] for window in self._touched if window in states]

    def oldest_output_at(self) -> int | None:
        """The least event time of any pane still to be emitted; ``None`` if no window determines one."""
        self._note_owed()
        owed, owed_at = self._owed, self._owed_at
        while owed and owed_at.get(owed[0][1]) != owed[0][0]:
            heappop(owed)
        return owed[0][0] if owed else None

    def _note_owed(self) -> None:
        """Note the times that the hook has changed; entries of the heap that no longer hold stay until they are met."""
        for window in self._touched:
            state = self._open.get(window)
            at = None if state is None else state.output_at
            if at == self._owed_at.get(window):
                continue
            if at is None:
                del self._owed_at[window]
            else:
                self._owed_at[window] = at
                heappush(self._owed, (at, window))

    def to_json(self) -> dict[str, Any] | None:
        """The state to store, its windows ordered by their bounds; ``None`` if no window is left."""
        states = self._open
        windows = [
            states[window].to_json() if window in states else self._rows[window]
            for window in sorted(self._rows)
        ]
        return {_WINDOWS: windows} if windows else None
