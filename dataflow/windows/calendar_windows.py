"""Calendar windows: local days, weeks, months and years of a time zone.

In a zone with daylight saving time a day has 23, 24 or 25 hours.
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

CalendarUnit: TypeAlias = Literal["days", "weeks", "months", "years"]
"""The unit of a calendar window; weeks start on Monday."""

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MONDAY: Final = date(1970, 1, 5)
_MICROSECOND: Final = timedelta(microseconds=1)


@dataclass(frozen=True)
class CalendarWindows(WindowFn):
    """Windows of ``count`` calendar units each.

    Args:
        unit: ``"days"``, ``"weeks"``, ``"months"`` or ``"years"``.
        count: units per window, counted from 1970 (weeks from Monday 1970-01-05).
        zone: IANA name of the time zone at whose midnights windows start.

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
        """Validate the arguments at construction."""
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
        """Windows of ``count`` days, counted from 1970-01-01."""
        return cls("days", count, zone)

    @classmethod
    def weeks(cls, count: int = 1, zone: str = "UTC") -> Self:
        """Windows of ``count`` weeks, which start on Monday."""
        return cls("weeks", count, zone)

    @classmethod
    def months(cls, count: int = 1, zone: str = "UTC") -> Self:
        """Windows of ``count`` months, counted from January 1970."""
        return cls("months", count, zone)

    @classmethod
    def years(cls, count: int = 1, zone: str = "UTC") -> Self:
        """Windows of ``count`` years, counted from 1970."""
        return cls("years", count, zone)

    def assign(self, element: Element) -> tuple[Window, ...]:
        """The window that contains the element's local date."""
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
