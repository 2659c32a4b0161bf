"""
Window functions: which windows an element belongs to, and which windows become one.

A window function is configuration: picklable, without state, a pure function of the element
and of the windows at hand. It is deterministic in the sense of the windowing patent when
every window that it might merge with another one is known by the time either is emitted.
The functions of this library are: theirs depends on nothing but bounds, and a merged window's
end is never before the ends of those it was made of.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from millpond.dataflow.windows.element import Element
from millpond.dataflow.windows.window import Window
from millpond.statestore.errors import InvalidError

__all__ = ["Merge", "WindowFn", "check_merges", "check_window"]


@dataclass(frozen=True, slots=True)
class Merge:
    """
    Windows that become one.

    Attributes:
        sources: the windows that merge; the result may be among them.
        result: the window that they become.
    """

    sources: tuple[Window, ...]
    result: Window


class WindowFn:
    """
    Base class of window functions; a user's own overrides `assign`, and `merge` if windows merge.
    """

    is_merging: ClassVar[bool] = False
    """Whether `merge` is to be asked when new windows come."""

    def assign(self, element: Element) -> Sequence[Window]:
        """
        The windows that an element belongs to; none drops it.
        """
        raise NotImplementedError

    def merge(self, windows: Sequence[Window]) -> Iterable[Merge]:  # noqa: ARG002 - a hook
        """
        Which of a key's windows become one; a window may be in one merge at most.
        """
        return ()

    def output_at(self, window: Window, at: int) -> int:  # noqa: ARG002 - a hook
        """
        The time that an element at ``at`` stands for in its window, for ``EARLIEST_TRANSFORMED``.
        """
        return at


def check_window(window: object) -> Window:
    """
    The window that an element was assigned to, if it is one.

    Raises:
        InvalidError: it is no `Window`, or ends before it has begun.
    """
    if type(window) is Window and window.start < window.end:
        return window
    raise InvalidError("an element is assigned to what is no window", window=window)


def check_merges(windows: Sequence[Window], merges: Iterable[Merge]) -> tuple[Merge, ...]:
    """
    The merges, if they can be carried out.

    Raises:
        InvalidError: a merge names a window that is not there or in another merge, results in
            a window that stays as well, or does not hold what it is made of.
    """
    found, left = tuple(merges), set(windows)
    for merge in found:
        for source in merge.sources:
            if source not in left:
                raise InvalidError("a merged window is unknown or merged twice", window=source)
            left.remove(source)
            if not (merge.result.start <= source.start and source.end <= merge.result.end):
                raise InvalidError(
                    "a merged window must hold those it is made of", window=merge.result, source=source
                )
    for merge in found:
        if merge.result in left:
            raise InvalidError("windows merge into one that is there but not merged", window=merge.result)
    return found
