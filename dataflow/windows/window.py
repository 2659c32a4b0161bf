"""
Windows: half-open spans of event time that elements are grouped in (Dataflow model; Streaming 102).

A window is nothing but its bounds. Which elements belong to it says a `WindowFn`, and when
its contents are shown says a `Trigger`.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from millpond.executor.event_time.duration import INSTANT_MAX_US
from millpond.statestore.types import TIME_MAX_US, TIME_MIN_US

__all__ = ["GLOBAL_WINDOW", "Window"]


class Window(NamedTuple):
    """
    The times from ``start`` up to, but without, ``end``, in microseconds since 1970 UTC.
    """

    start: int
    end: int

    @property
    def last_at(self) -> int:
        """
        The last instant inside the window that a record may carry.
        """
        return min(self.end - 1, INSTANT_MAX_US)

    def overlaps(self, other: Window) -> bool:
        """
        Whether the two share an instant; touching is not enough.

        Example:
            >>> Window(0, 10).overlaps(Window(10, 20))
            False
        """
        return self.start < other.end and other.start < self.end

    def span(self, other: Window) -> Window:
        """
        The least window that holds both.
        """
        return Window(min(self.start, other.start), max(self.end, other.end))

    @property
    def is_global(self) -> bool:
        """
        Whether this is the one window that holds all of time.
        """
        return self == GLOBAL_WINDOW


GLOBAL_WINDOW: Final = Window(TIME_MIN_US, TIME_MAX_US)
"""All of time; it ends when all input has ended."""
