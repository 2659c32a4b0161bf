"""Windows: half-open intervals of event time into which elements are grouped (Dataflow model; Streaming 102).

A window is only its bounds. A `WindowFn` decides which elements belong to it, a `Trigger` when
its contents are emitted.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from millpond.executor.event_time.duration import INSTANT_MAX_US
from millpond.statestore.types import TIME_MAX_US, TIME_MIN_US


class Window(NamedTuple):
    """The event times ``start <= at < end``, in microseconds since 1970 UTC."""

    start: int
    end: int

    @property
    def last_at(self) -> int:
        """The last instant of the window that a record can carry."""
        return min(self.end - 1, INSTANT_MAX_US)

    def overlaps(self, other: Window) -> bool:
        """Whether the windows share an instant; adjacent windows do not.

        Example:
            >>> Window(0, 10).overlaps(Window(10, 20))
            False
        """
        return self.start < other.end and other.start < self.end

    def span(self, other: Window) -> Window:
        """The smallest window that contains both."""
        return Window(min(self.start, other.start), max(self.end, other.end))

    @property
    def is_global(self) -> bool:
        """Whether this is `GLOBAL_WINDOW`."""
        return self == GLOBAL_WINDOW


GLOBAL_WINDOW: Final = Window(TIME_MIN_US, TIME_MAX_US)
"""All of event time; it ends when all input has ended."""
