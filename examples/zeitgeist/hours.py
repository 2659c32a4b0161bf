"""Hours of event time and their names.

A window is one hour of UTC, named by its beginning as ISO text (``2013-02-08T21:00Z``), so that it
can be read in SQL. What is normal at an airport follows the clock on its wall, so models are kept per
hour of New York time, through the changes of the clocks in March and November.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Final
from zoneinfo import ZoneInfo

HOUR_US: Final = 3_600_000_000
NEW_YORK: Final = ZoneInfo("America/New_York")
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


def hour_of(at: int) -> str:
    """Name of the hour in which a time (microseconds since 1970 UTC) lies."""
    return _name(at // HOUR_US)


def start_of(hour: str) -> int:
    """First microsecond of the hour."""
    return (datetime.fromisoformat(hour) - _EPOCH) // timedelta(microseconds=1)


def end_of(hour: str) -> int:
    """First microsecond after the hour."""
    return start_of(hour) + HOUR_US


def local_time(hour: str) -> datetime:
    """What the clock in New York showed when the hour began."""
    return datetime.fromisoformat(hour).astimezone(NEW_YORK)


def local_hour(hour: str) -> int:
    """Hour of the day in New York, 0 to 23."""
    return local_time(hour).hour


def next_hour(hour: str) -> str:
    """The hour that follows."""
    return hour_of(end_of(hour))


def next_day(hour: str) -> str:
    """The hour with the same New York time one day later: 23, 24 or 25 hours later."""
    tomorrow = local_time(hour) + timedelta(days=1)
    return _name((tomorrow - _EPOCH) // timedelta(hours=1))


@lru_cache(maxsize=4_096)
def _name(hours_since_1970: int) -> str:
    return f"{_EPOCH + timedelta(hours=hours_since_1970):%Y-%m-%dT%H:%MZ}"
