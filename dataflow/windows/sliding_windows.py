"""Sliding windows: windows of one size that start at a fixed period and may overlap."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

from millpond.dataflow.windows.element import Element
from millpond.dataflow.windows.fixed_windows import positive_us
from millpond.dataflow.windows.window import Window
from millpond.dataflow.windows.window_fn import WindowFn
from millpond.executor.event_time.duration import Duration, duration_us
from millpond.statestore.errors import InvalidError

_WINDOWS_MAX = 10_000
_REMEMBERED = 16


@dataclass(frozen=True)
class SlidingWindows(WindowFn):
    """A window of ``size`` starts every ``period``.

    Args:
        size: the length of each window.
        period: the distance between the starts of consecutive windows; a period longer than the size
            leaves gaps, and elements in a gap are dropped.
        offset: shifts the window starts from multiples of the period since 1970 UTC.

    Example:
        >>> SlidingWindows("10us", "5us").assign(Element(value=1, at=7, key="k"))
        (Window(start=0, end=10), Window(start=5, end=15))

    Raises:
        InvalidError: size or period is not positive, or an element would be in more than 10,000 windows.
    """

    size: Duration
    period: Duration
    offset: Duration = 0
    _size_us: int = field(init=False, repr=False, compare=False)
    _period_us: int = field(init=False, repr=False, compare=False)
    _offset_us: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Validate size and period at construction."""
        object.__setattr__(self, "_size_us", positive_us("a window's size", self.size))
        object.__setattr__(self, "_period_us", positive_us("a window's period", self.period))
        object.__setattr__(self, "_offset_us", duration_us(self.offset) % self._period_us)
        if self._size_us > _WINDOWS_MAX * self._period_us:
            raise InvalidError(
                "an element would be in too many windows", windows=self._size_us // self._period_us
            )

    def assign(self, element: Element) -> tuple[Window, ...]:
        """All windows that contain the element's time, earliest first."""
        last = element.at - (element.at - self._offset_us) % self._period_us
        count = -((element.at - self._size_us - last) // self._period_us)
        return _windows(last, count, self._size_us, self._period_us)


@lru_cache(maxsize=_REMEMBERED)
def _windows(last: int, count: int, size_us: int, period_us: int) -> tuple[Window, ...]:
    """The ``count`` windows of which the last starts at ``last``.

    Cached: consecutive elements mostly fall into the same windows.
    """
    starts = range(last - (count - 1) * period_us, last + period_us, period_us)
    return tuple(Window(start, start + size_us) for start in starts)
