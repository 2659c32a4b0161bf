"""
Timestamp combiners: the event time of a pane, from the times of what is in it.
"""

from __future__ import annotations

from enum import StrEnum

from millpond.dataflow.windows.window import Window
from millpond.dataflow.windows.window_fn import WindowFn

__all__ = ["TimestampCombiner", "combined", "element_output_at"]


class TimestampCombiner(StrEnum):
    """
    How the time of a pane follows from its elements that were not behind the watermark on arrival.
    """

    END_OF_WINDOW = "OUTPUT_AT_EOW"
    EARLIEST = "OUTPUT_AT_EARLIEST"
    LATEST = "OUTPUT_AT_LATEST"
    EARLIEST_TRANSFORMED = "OUTPUT_AT_EARLIEST_TRANSFORMED"


def element_output_at(
    combiner: TimestampCombiner, window_fn: WindowFn, window: Window, at: int
) -> int | None:
    """
    What an element counts as for its pane's time; ``None`` where elements do not matter.
    """
    if combiner is TimestampCombiner.END_OF_WINDOW:
        return None
    return window_fn.output_at(window, at) if combiner is TimestampCombiner.EARLIEST_TRANSFORMED else at


def combined(combiner: TimestampCombiner, first: int | None, second: int | None) -> int | None:
    """
    One time from two.

    Example:
        >>> combined(TimestampCombiner.LATEST, 3, 5), combined(TimestampCombiner.EARLIEST, 3, None)
        (5, 3)
    """
    if first is None or second is None:
        return second if first is None else first
    return max(first, second) if combiner is TimestampCombiner.LATEST else min(first, second)
