"""Windows: half-open intervals of event time into which elements are grouped (Dataflow model; Streaming 102).

A window is only its bounds. A `WindowFn` decides which elements belong to it, a `Trigger` when
its contents are emitted.

Window functions: which windows an element belongs to, and which windows merge.

A window function is stateless, picklable configuration: a pure function of the element and of
the windows it is given. It is deterministic in the sense of the windowing patent if every window
that it could merge with another is known by the time either is emitted. The library's functions
are: they depend only on bounds, and a merged window never ends before its sources.

Elements: the part of a record that window functions, triggers and combiners see.

Timestamp combiners: the event time of a pane, computed from its window and its elements.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar, Final, NamedTuple

from millpond.executor.time.instants import INSTANT_MAX_US
from millpond.statestore.errors import InvalidError
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


class Element(NamedTuple):
    """One value to be windowed.

    Attributes:
        value: the value; for a record from an earlier windowed step, the one inside the envelope.
        at: its event time, in microseconds since 1970 UTC.
        key: the key it is grouped by.
        is_retraction: whether it retracts an earlier value, which combiners then uncombine.
    """

    value: Any
    at: int
    key: str
    is_retraction: bool = False


@dataclass(frozen=True, slots=True)
class Merge:
    """Windows that merge into one.

    Attributes:
        sources: the windows to merge; the result may be among them.
        result: the window they merge into; it must contain every source.
    """

    sources: tuple[Window, ...]
    result: Window


class WindowFn:
    """Base class of window functions; override `assign`, and `merge` if the windows merge.

    Example:
        >>> class Evens(WindowFn):
        ...     def assign(self, element):
        ...         start = element.at - element.at % 2
        ...         return (Window(start, start + 2),)
        >>> Evens().assign(Element(value="x", at=5, key="k"))
        (Window(start=4, end=6),)
    """

    is_merging: ClassVar[bool] = False
    """Whether `merge` is called when a key gets new windows."""

    merges_overlapping_only: ClassVar[bool] = False
    """
    Whether all windows that overlap merge, and no others: then `merge` is given only the new windows and those that
    overlap them, which costs less for a key of many windows.
    """

    def assign(self, element: Element) -> Sequence[Window]:
        """The windows that an element belongs to; an empty sequence drops the element.

        Must be overridden.
        """
        raise NotImplementedError

    def merge(self, windows: Sequence[Window]) -> Iterable[Merge]:  # noqa: ARG002 - for subclasses
        """The merges to apply to a key's windows; each window may be a source of at most one merge.

        Called after `assign` has introduced new windows, if `is_merging` is set.
        """
        return ()

    def output_at(self, window: Window, at: int) -> int:  # noqa: ARG002 - for subclasses
        """The time that an element at ``at`` contributes to its pane under ``EARLIEST_TRANSFORMED``."""
        return at


def check_window(window: object) -> Window:
    """Return ``window``, which a window function assigned, if it is valid.

    Raises:
        InvalidError: it is not a `Window`, or it is empty.
    """
    if type(window) is Window and window.start < window.end:
        return window
    raise InvalidError("a window function must assign elements to non-empty windows", window=window)


def check_merges(windows: Sequence[Window], merges: Iterable[Merge]) -> tuple[Merge, ...]:
    """Return the merges if they can be applied to ``windows``.

    Raises:
        InvalidError: a merge has a source that is unknown or in another merge, a result that does
            not contain its sources, or a result that is also an unmerged window.
    """
    checked, unmerged = tuple(merges), set(windows)
    for merge in checked:
        for source in merge.sources:
            if source not in unmerged:
                raise InvalidError("a merged window is unknown or merged twice", window=source)
            unmerged.remove(source)
            if not (merge.result.start <= source.start and source.end <= merge.result.end):
                raise InvalidError(
                    "a merged window must contain its sources", window=merge.result, source=source
                )
    for merge in checked:
        if merge.result in unmerged:
            raise InvalidError(
                "windows merge into an existing window that is not among the sources", window=merge.result
            )
    return checked


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
