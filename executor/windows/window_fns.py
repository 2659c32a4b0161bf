"""The library of window functions: fixed, sliding, session, calendar and global windows."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import date, datetime, timedelta
from functools import lru_cache
from typing import ClassVar, Final, Literal, Self, TypeAlias
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError, available_timezones

from millpond.executor.pipeline.checks import positive_us
from millpond.executor.time.instants import EPOCH
from millpond.executor.windows.window import GLOBAL_WINDOW, Element, Merge, Window, WindowFn
from millpond.statestore.arguments import check_count
from millpond.statestore.durations import Duration, duration_us
from millpond.statestore.errors import InvalidError, did_you_mean


@dataclass(frozen=True)
class GlobalWindows(WindowFn):
    """One window for all of event time; it ends when all input has ended."""

    def assign(self, element: Element) -> tuple[Window, ...]:  # noqa: ARG002 - the same for all
        return (GLOBAL_WINDOW,)


@dataclass(frozen=True)
class FixedWindows(WindowFn):
    """Consecutive windows of one size (tumbling windows); ``offset`` shifts them from multiples of it since 1970 UTC.

    Example:
        >>> FixedWindows("10us").assign(Element(value=1, at=25, key="k"))
        (Window(start=20, end=30),)
    """

    size: Duration
    offset: Duration = 0
    _size_us: int = field(init=False, repr=False, compare=False)
    _offset_us: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_size_us", positive_us("a window's size", self.size))
        object.__setattr__(self, "_offset_us", duration_us(self.offset) % self._size_us)

    def assign(self, element: Element) -> tuple[Window, ...]:
        start = element.at - (element.at - self._offset_us) % self._size_us
        return (Window(start, start + self._size_us),)


@dataclass(frozen=True)
class UnalignedFixedWindows(WindowFn):
    """Fixed windows with a different phase for each key, so that not all windows end at once.

    A key's phase is a hash of the key, the same in every process (the windowing patent's unaligned windows).
    """

    size: Duration
    _size_us: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_size_us", positive_us("a window's size", self.size))

    def phase_us(self, key: str) -> int:
        """Return the offset of a key's windows, in microseconds: ``0 <= phase < size``."""
        digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") % self._size_us

    def assign(self, element: Element) -> tuple[Window, ...]:
        start = element.at - (element.at - self.phase_us(element.key)) % self._size_us
        return (Window(start, start + self._size_us),)


_WINDOWS_MAX: Final = 10_000


@dataclass(frozen=True)
class SlidingWindows(WindowFn):
    """Windows of one size that start at a fixed period and may overlap; an element may be in 10,000 of them.

    A period longer than the size leaves gaps, and elements in a gap are dropped. ``offset`` shifts the starts from
    multiples of the period since 1970 UTC.

    Example:
        >>> SlidingWindows("10us", "5us").assign(Element(value=1, at=7, key="k"))
        (Window(start=0, end=10), Window(start=5, end=15))
    """

    size: Duration
    period: Duration
    offset: Duration = 0
    _size_us: int = field(init=False, repr=False, compare=False)
    _period_us: int = field(init=False, repr=False, compare=False)
    _offset_us: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_size_us", positive_us("a window's size", self.size))
        object.__setattr__(self, "_period_us", positive_us("a window's period", self.period))
        object.__setattr__(self, "_offset_us", duration_us(self.offset) % self._period_us)
        if self._size_us > _WINDOWS_MAX * self._period_us:
            raise InvalidError(
                "an element would be in too many windows", windows=self._size_us // self._period_us
            )

    def assign(self, element: Element) -> tuple[Window, ...]:
        last = element.at - (element.at - self._offset_us) % self._period_us
        count = -((element.at - self._size_us - last) // self._period_us)
        return _windows(last, count, self._size_us, self._period_us)


# Cached, because consecutive elements mostly fall into the same windows.
@lru_cache(maxsize=16)
def _windows(last: int, count: int, size_us: int, period_us: int) -> tuple[Window, ...]:
    starts = range(last - (count - 1) * period_us, last + period_us, period_us)
    return tuple(Window(start, start + size_us) for start in starts)


@dataclass(frozen=True)
class Sessions(WindowFn):
    """Windows of activity: each element opens a window of length ``gap``; overlapping windows merge.

    Example:
        >>> list(Sessions("10us").merge([Window(0, 10), Window(5, 15), Window(15, 25)]))
        [Merge(sources=(Window(start=0, end=10), Window(start=5, end=15)), result=Window(start=0, end=15))]
    """

    is_merging: ClassVar[bool] = True
    merges_overlapping_only: ClassVar[bool] = True

    gap: Duration
    _gap_us: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_gap_us", positive_us("a session's gap", self.gap))

    def assign(self, element: Element) -> tuple[Window, ...]:
        return (Window(element.at, element.at + self._gap_us),)

    def merge(self, windows: Sequence[Window]) -> Iterator[Merge]:
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


CalendarUnit: TypeAlias = Literal["days", "weeks", "months", "years"]
"""The unit of a calendar window; weeks start on Monday."""

# The first window's first day, and the days of a unit.
_DAYS: Final = {"days": (date(1970, 1, 1), 1), "weeks": (date(1970, 1, 5), 7)}
_MONTHS: Final = {"months": 1, "years": 12}
_MICROSECOND: Final = timedelta(microseconds=1)
_DAY_US: Final = 86_400_000_000


@dataclass(frozen=True)
class CalendarWindows(WindowFn):
    """Windows of ``count`` calendar units each; where clocks change, a local day has 23, 24 or 25 hours.

    Units are counted from 1970, weeks from Monday 1970-01-05. ``zone`` is the IANA name of the time zone at whose
    midnights windows start.

    Example:
        >>> CalendarWindows("days").assign(Element(value=1, at=5, key="k"))
        (Window(start=0, end=86400000000),)
    """

    unit: CalendarUnit
    count: int = 1
    zone: str = "UTC"
    _zone: ZoneInfo = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.unit not in (*_DAYS, *_MONTHS):
            raise InvalidError("calendar windows are of days, weeks, months or years", unit=self.unit)
        check_count("the count of units of a calendar window", self.count)
        try:
            object.__setattr__(self, "_zone", ZoneInfo(self.zone))
        except (ZoneInfoNotFoundError, ValueError, TypeError, OSError) as cause:
            hint = did_you_mean(self.zone, available_timezones())
            raise InvalidError(f"no such time zone{hint}", zone=self.zone) from cause

    @classmethod
    def days(cls, count: int = 1, zone: str = "UTC") -> Self:
        """Return windows of ``count`` days, counted from 1970-01-01."""
        return cls("days", count, zone)

    @classmethod
    def weeks(cls, count: int = 1, zone: str = "UTC") -> Self:
        """Return windows of ``count`` weeks, which start on Monday."""
        return cls("weeks", count, zone)

    @classmethod
    def months(cls, count: int = 1, zone: str = "UTC") -> Self:
        """Return windows of ``count`` months, counted from January 1970."""
        return cls("months", count, zone)

    @classmethod
    def years(cls, count: int = 1, zone: str = "UTC") -> Self:
        """Return windows of ``count`` years, counted from 1970."""
        return cls("years", count, zone)

    def assign(self, element: Element) -> tuple[Window, ...]:
        day = (EPOCH + timedelta(microseconds=element.at)).astimezone(self._zone).date()
        if self.unit in _MONTHS:
            number = ((day.year - 1970) * 12 + day.month - 1) // _MONTHS[self.unit]
        else:
            first, length = _DAYS[self.unit]
            number = (day - first).days // length
        number -= number % self.count
        return (Window(self._start(number), self._start(number + self.count)),)

    def comes_twice(self, midnight: int) -> bool:
        """Return True if clocks go back across the start of a window, so that the date before it comes once more."""
        first, last = midnight, midnight + _DAY_US
        back_us = (self._offset_at(first) - self._offset_at(last)) // _MICROSECOND
        if back_us <= 0:
            return False
        while last - first > 1:
            middle = (first + last) // 2
            if self._offset_at(middle) == self._offset_at(first):
                first = middle
            else:
                last = middle
        return last - midnight < back_us

    def _offset_at(self, at: int) -> timedelta:
        offset = (EPOCH + timedelta(microseconds=at)).astimezone(self._zone).utcoffset()
        return offset or timedelta()

    def _start(self, number: int) -> int:
        if self.unit in _MONTHS:
            months = number * _MONTHS[self.unit]
            day = date(1970 + months // 12, months % 12 + 1, 1)
        else:
            first, length = _DAYS[self.unit]
            day = first + timedelta(days=number * length)
        midnight = datetime(day.year, day.month, day.day, tzinfo=self._zone)
        return (midnight - EPOCH) // _MICROSECOND
