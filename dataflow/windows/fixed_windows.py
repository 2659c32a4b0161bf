"""
Fixed windows: time cut into equal pieces, for all keys alike or with a phase of its own for each.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from millpond.dataflow.windows.element import Element
from millpond.dataflow.windows.window import GLOBAL_WINDOW, Window
from millpond.dataflow.windows.window_fn import WindowFn
from millpond.executor.event_time.duration import Duration, duration_us
from millpond.statestore.errors import InvalidError

__all__ = ["FixedWindows", "GlobalWindows", "UnalignedFixedWindows", "positive_us"]


def positive_us(name: str, duration: Duration) -> int:
    """
    A duration in microseconds that is longer than nothing.

    Raises:
        InvalidError: it is no duration, or not positive.
    """
    micros = duration_us(duration)
    if micros <= 0:
        raise InvalidError(f"{name} must be positive", value=duration)
    return micros


@dataclass(frozen=True)
class GlobalWindows(WindowFn):
    """
    Everything is in one window that ends with the input.
    """

    def assign(self, element: Element) -> tuple[Window, ...]:  # noqa: ARG002 - wherever it is
        """
        The global window.
        """
        return (GLOBAL_WINDOW,)


@dataclass(frozen=True)
class FixedWindows(WindowFn):
    """
    Windows of one size, one after the other.

    Args:
        size: how long each is.
        offset: where one begins, counted from 1970 UTC.

    Example:
        >>> FixedWindows("10us").assign(Element(value=1, at=25, key="k"))
        (Window(start=20, end=30),)

    Raises:
        InvalidError: the size is not positive.
    """

    size: Duration
    offset: Duration = 0
    _size_us: int = field(init=False, repr=False, compare=False)
    _offset_us: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """
        Refuse a size that cannot work while the caller is still near.
        """
        object.__setattr__(self, "_size_us", positive_us("a window's size", self.size))
        object.__setattr__(self, "_offset_us", duration_us(self.offset) % self._size_us)

    def assign(self, element: Element) -> tuple[Window, ...]:
        """
        The window that the element's time falls into.
        """
        start = element.at - (element.at - self._offset_us) % self._size_us
        return (Window(start, start + self._size_us),)


@dataclass(frozen=True)
class UnalignedFixedWindows(WindowFn):
    """
    Fixed windows whose bounds differ from key to key, so that not all of them end at once.

    Where a key's windows begin follows from the key alone, so it is the same on every machine.

    Args:
        size: how long each is.

    Raises:
        InvalidError: the size is not positive.
    """

    size: Duration
    _size_us: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """
        Refuse a size that cannot work while the caller is still near.
        """
        object.__setattr__(self, "_size_us", positive_us("a window's size", self.size))

    def phase_us(self, key: str) -> int:
        """
        Where a key's windows begin, within a size.
        """
        digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") % self._size_us

    def assign(self, element: Element) -> tuple[Window, ...]:
        """
        The window of the element's key that its time falls into.
        """
        start = element.at - (element.at - self.phase_us(element.key)) % self._size_us
        return (Window(start, start + self._size_us),)
