"""
Sessions: windows that end when a key has been silent for a while; they merge as elements fill the gaps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from millpond.dataflow.windows.element import Element
from millpond.dataflow.windows.fixed_windows import positive_us
from millpond.dataflow.windows.window import Window
from millpond.dataflow.windows.window_fn import Merge, WindowFn
from millpond.executor.event_time.duration import Duration

__all__ = ["Sessions"]


@dataclass(frozen=True)
class Sessions(WindowFn):
    """
    An element opens a window of ``gap``; windows that overlap are one session.

    Args:
        gap: how long the silence is that ends a session.

    Example:
        >>> list(Sessions("10us").merge([Window(0, 10), Window(5, 15), Window(15, 25)]))
        [Merge(sources=(Window(start=0, end=10), Window(start=5, end=15)), result=Window(start=0, end=15))]

    Raises:
        InvalidError: the gap is not positive.
    """

    is_merging: ClassVar[bool] = True

    gap: Duration
    _gap_us: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """
        Refuse a gap that cannot work while the caller is still near.
        """
        object.__setattr__(self, "_gap_us", positive_us("a session's gap", self.gap))

    def assign(self, element: Element) -> tuple[Window, ...]:
        """
        The session that the element would be alone.
        """
        return (Window(element.at, element.at + self._gap_us),)

    def merge(self, windows: Sequence[Window]) -> Iterator[Merge]:
        """
        Every run of overlapping windows becomes one.
        """
        run: list[Window] = []
        joined: Window | None = None
        for window in sorted(windows):
            if joined is not None and window.overlaps(joined):
                run.append(window)
                joined = joined.span(window)
                continue
            if joined is not None and len(run) > 1:
                yield Merge(tuple(run), joined)
            run, joined = [window], window
        if joined is not None and len(run) > 1:
            yield Merge(tuple(run), joined)
