"""Session windows: a session ends when its key has been silent for a gap; sessions merge as elements fill the gap."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from millpond.dataflow.windows.element import Element
from millpond.dataflow.windows.fixed_windows import positive_us
from millpond.dataflow.windows.window import Window
from millpond.dataflow.windows.window_fn import Merge, WindowFn
from millpond.executor.event_time.duration import Duration


@dataclass(frozen=True)
class Sessions(WindowFn):
    """Windows of activity: each element opens a window of length ``gap``; overlapping windows merge.

    Args:
        gap: the length of silence that ends a session.

    Example:
        >>> list(Sessions("10us").merge([Window(0, 10), Window(5, 15), Window(15, 25)]))
        [Merge(sources=(Window(start=0, end=10), Window(start=5, end=15)), result=Window(start=0, end=15))]

    Raises:
        InvalidError: the gap is not positive.
    """

    is_merging: ClassVar[bool] = True
    merges_overlapping_only: ClassVar[bool] = True

    gap: Duration
    _gap_us: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Validate the gap at construction."""
        object.__setattr__(self, "_gap_us", positive_us("a session's gap", self.gap))

    def assign(self, element: Element) -> tuple[Window, ...]:
        """The session of this element alone: from its event time to ``gap`` later."""
        return (Window(element.at, element.at + self._gap_us),)

    def merge(self, windows: Sequence[Window]) -> Iterator[Merge]:
        """Merge every run of overlapping windows."""
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
