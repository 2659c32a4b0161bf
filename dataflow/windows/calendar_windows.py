"""
Calendar windows: days, weeks and months as people count them, in their time zone.

A day of a zone with summer time has 23, 24 or 25 hours; a month has as many days as it has.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from typing import Final, Literal, Self, TypeAlias
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from millpond.dataflow.windows.element import Element
from millpond.dataflow.windows.window import Window
from millpond.dataflow.windows.window_fn import WindowFn
from millpond.statestore.errors import InvalidError

__all__ = ["CalendarUnit", "CalendarWindows"]

CalendarUnit: TypeAlias = Literal["days", "weeks", "months", "years"]
"""What calendar windows are counted in; weeks begin on Monday."""

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MONDAY: Final = date(1970, 1, 5)
_MICROSECOND: Final = timedelta(microseconds=1)


@dataclass(frozen=True)
class CalendarWindows(WindowFn):
    """
    Windows of ``count`` calendar units.

    Args:
        unit: days, weeks, months or years.
        count: how many of them a window has; counted from 1970.
        zone: the time zone whose midnights are meant.

    Example:
        >>> CalendarWindows("days").assign(Element(value=1, at=5, key="k"))
        (Window(start=0, end=86400000000),)

    Raises:
        InvalidError: an unknown unit or zone, or a count below 1.
    """

    unit: CalendarUnit
    count: int = 1
    zone: str = "UTC"
    _zone: ZoneInfo = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """
        Refuse what no calendar has while the caller is still near.
        """
        if self.unit not in ("days", "weeks", "months", "years"):
            raise InvalidError("calendar windows are of days, weeks, months or years", unit=self.unit)
        if self.count < 1:
            raise InvalidError("a calendar window has at least one unit", count=self.count)
        try:
            object.__setattr__(self, "_zone", ZoneInfo(self.zone))
        except (ZoneInfoNotFoundError, ValueError) as cause:
            raise InvalidError("no such time zone", zone=self.zone) from cause

    @classmethod
    def days(cls, count: int = 1, zone: str = "UTC") -> Self:
        """
        Windows of so many days, counted from 1970-01-01.
        """
        return cls("days", count, zone)

    @classmethod
    def weeks(cls, count: int = 1, zone: str = "UTC") -> Self:
        """
        Windows of so many weeks, which begin on Monday.
        """
        return cls("weeks", count, zone)

    @classmethod
    def months(cls, count: int = 1, zone: str = "UTC") -> Self:
        """
        Windows of so many months.
        """
        return cls("months", count, zone)

    @classmethod
    def years(cls, count: int = 1, zone: str = "UTC") -> Self:
        """
        Windows of so many years.
        """
        return cls("years", count, zone)

    def assign(self, element: Element) -> tuple[Window, ...]:
        """
        The window that the element's local date falls into.
        """
        local = (_EPOCH + timedelta(microseconds=element.at)).astimezone(self._zone).date()
        number = self._number(local) // self.count
        return (Window(self._start(number * self.count), self._start((number + 1) * self.count)),)

    def _number(self, day: date) -> int:
        match self.unit:
            case "days":
                return (day - date(1970, 1, 1)).days
            case "weeks":
                return (day - _MONDAY).days // 7
            case "months":
                return (day.year - 1970) * 12 + day.month - 1
            case "years":
                return day.year - 1970

    def _start(self, number: int) -> int:
        day = date(1970, 1, 1)
        match self.unit:
            case "days":
                day = date(1970, 1, 1) + timedelta(days=number)
            case "weeks":
                day = _MONDAY + timedelta(weeks=number)
            case "months":
                day = date(1970 + number // 12, number % 12 + 1, 1)
            case "years":
                day = date(1970 + number, 1, 1)
        midnight = datetime(day.year, day.month, day.day, tzinfo=self._zone)
        return (midnight - _EPOCH) // _MICROSECOND
