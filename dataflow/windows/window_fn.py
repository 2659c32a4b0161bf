"""Window functions: which windows an element belongs to, and which windows merge.

A window function is stateless, picklable configuration: a pure function of the element and of
the windows it is given. It is deterministic in the sense of the windowing patent if every window
that it could merge with another is known by the time either is emitted. The library's functions
are: they depend only on bounds, and a merged window never ends before its sources.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from millpond.dataflow.windows.element import Element
from millpond.dataflow.windows.window import Window
from millpond.statestore.errors import InvalidError


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
