"""Timestamp combiners: the event time of a pane, computed from its window and its elements."""

from __future__ import annotations

from enum import StrEnum

from millpond.dataflow.windows.window import Window
from millpond.dataflow.windows.window_fn import WindowFn


class TimestampCombiner(StrEnum):
    """How a pane's event time follows from its elements; elements behind the watermark on arrival do not count.

    ``END_OF_WINDOW`` is the last instant of the window; ``EARLIEST`` and ``LATEST`` are the least and
    greatest element times; ``EARLIEST_TRANSFORMED`` is the least of the times that
    `WindowFn.output_at` maps the elements to.
    """

    END_OF_WINDOW = "OUTPUT_AT_EOW"
    EARLIEST = "OUTPUT_AT_EARLIEST"
    LATEST = "OUTPUT_AT_LATEST"
    EARLIEST_TRANSFORMED = "OUTPUT_AT_EARLIEST_TRANSFORMED"


def element_output_at(
    combiner: TimestampCombiner, window_fn: WindowFn, window: Window, at: int
) -> int | None:
    """The time that an element contributes to its pane's time; ``None`` if element times do not matter."""
    if combiner is TimestampCombiner.END_OF_WINDOW:
        return None
    return window_fn.output_at(window, at) if combiner is TimestampCombiner.EARLIEST_TRANSFORMED else at


def combined(combiner: TimestampCombiner, first: int | None, second: int | None) -> int | None:
    """Combine two optional times; ``None`` is neutral.

    Example:
        >>> combined(TimestampCombiner.LATEST, 3, 5), combined(TimestampCombiner.EARLIEST, 3, None)
        (5, 3)
    """
    if first is None or second is None:
        return second if first is None else first
    return max(first, second) if combiner is TimestampCombiner.LATEST else min(first, second)
