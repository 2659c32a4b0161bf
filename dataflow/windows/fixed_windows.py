"""Fixed windows: event time cut into equal intervals, aligned across keys or with a phase per key."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from millpond.dataflow.windows.element import Element
from millpond.dataflow.windows.window import GLOBAL_WINDOW, Window
from millpond.dataflow.windows.window_fn import WindowFn
from millpond.executor.event_time.duration import Duration, duration_us
from millpond.statestore.errors import InvalidError


def positive_us(name: str, duration: Duration) -> int:
    """A positive duration in microseconds.

    Args:
        name: what the duration is, for the error message.
        duration: the duration.

    Raises:
        InvalidError: it is not a duration, or not positive.
    """
    micros = duration_us(duration)
    if micros <= 0:
        raise InvalidError(f"{name} must be positive", value=duration)
    return micros


@dataclass(frozen=True)
class GlobalWindows(WindowFn):
    """One window for all of event time; it ends when all input has ended."""

    def assign(self, element: Element) -> tuple[Window, ...]:  # noqa: ARG002 - the same for all
        """`GLOBAL_WINDOW`, for every element."""
        return (GLOBAL_WINDOW,)


@dataclass(frozen=True)
class FixedWindows(WindowFn):
    """Consecutive windows of one size (tumbling windows).

    Args:
        size: the length of each window.
        offset: shifts the window starts from multiples of the size since 1970 UTC.

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
        """Validate the size at construction."""
        object.__setattr__(self, "_size_us", positive_us("a window's size", self.size))
        object.__setattr__(self, "_offset_us", duration_us(self.offset) % self._size_us)

    def assign(self, element: Element) -> tuple[Window, ...]:
        """The window that contains the element's time."""
        start = element.at - (element.at - self._offset_us) % self._size_us
        return (Window(start, start + self._size_us),)


@dataclass(frozen=True)
class UnalignedFixedWindows(WindowFn):
    """Fixed windows with a different phase for each key, so that not all windows end at once.

    A key's phase is a hash of the key, the same in every process (the windowing patent's unaligned
    windows).

    Args:
        size: the length of each window.

    Raises:
        InvalidError: the size is not positive.
    """

    size: Duration
    _size_us: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Validate the size at construction."""
        object.__setattr__(self, "_size_us", positive_us("a window's size", self.size))

    def phase_us(self, key: str) -> int:
        """The offset of a key's windows, in microseconds: ``0 <= phase < size``."""
        digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") % self._size_us

    def assign(self, element: Element) -> tuple[Window, ...]:
        """The window of the element's key that contains the element's time."""
        start = element.at - (element.at - self.phase_us(element.key)) % self._size_us
        return (Window(start, start + self._size_us),)
