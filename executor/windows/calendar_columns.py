"""Calendar windows that only wait for their end, of all keys of a bundle at once, as columns.

A bundle's times lie in few windows. Each is asked of `CalendarWindows` once, and the others are found between its bounds.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from millpond.executor.windows.waiting_columns import Spans, WaitingColumns, WindowArrays
from millpond.executor.windows.window import Element
from millpond.executor.windows.window_fns import CalendarWindows

_Index = npt.NDArray[np.int64]

# More known windows are forgotten; daily ones are fewer in a lifetime.
_KNOWN_MAX: Final = 32_768


class CalendarColumns(WaitingColumns):
    """The rows of keys of one interval whose calendar windows only wait."""

    _window_fn: CalendarWindows

    def _measure(self, window_fn: Any) -> None:
        self._window_fn = window_fn
        self._forget()

    def _forget(self) -> None:
        self._starts, self._stops = np.empty(0, np.int64), np.empty(0, np.int64)

    def _is_own(self, start: int, end: int) -> bool:
        try:
            return self._window_fn.assign(Element(None, start, "")) == ((start, end),)
        except (ValueError, OverflowError):
            return False

    def _assigned(self, owner: _Index, times: _Index) -> tuple[_Index, _Index, _Index] | None:
        if len(self._starts) > _KNOWN_MAX:
            self._forget()
        place = self._known(times)
        unknown = times[place < 0]
        if len(unknown):
            if not self._learn(np.unique(unknown)):
                return None
            place = self._known(times)
        return owner, self._starts[place], np.arange(len(times))

    def _ends(self, starts: _Index) -> _Index:
        found: _Index = self._stops[np.searchsorted(self._starts, starts)]
        return found

    def _known(self, times: _Index) -> _Index:
        """Return the places of the windows of times, -1 of unknown ones."""
        place = np.searchsorted(self._starts, times, side="right") - 1
        if len(self._starts):
            place[times >= self._stops[place]] = -1
        found: _Index = place
        return found

    def _learn(self, times: _Index) -> bool:
        """Add the windows of times, which ascend; return False if a turn must find them."""
        windows = []
        while len(times):
            at = int(times[0])
            try:
                (window,) = self._window_fn.assign(Element(None, at, ""))
                # Then times after its start belong to the window before.
                is_broken = self._window_fn.comes_twice(window.start)
            except (ValueError, OverflowError):
                # It raises again in a turn, which makes a dead letter of it.
                return False
            if is_broken or not window.start <= at < window.end:
                return False
            windows.append(window)
            times = times[np.searchsorted(times, window.end) :]
        bounds = np.array([*zip(self._starts, self._stops, strict=True), *windows], np.int64)
        self._starts, self._stops = bounds[np.argsort(bounds[:, 0])].T.copy()
        return True

    def _spans(self, windows: WindowArrays) -> Spans:
        distinct, first, which = np.unique(windows.start, return_index=True, return_inverse=True)
        return Spans.between(which, distinct, windows.end[first])
