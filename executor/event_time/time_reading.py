"""How an injector reads times that do not say everything themselves: numbers without a unit, times without a zone.

Nothing is guessed. A number is in microseconds unless the injector says otherwise, and one that would be a date of
this century in milliseconds is refused. A time that names no zone is refused, be it text, a `datetime` or a column
of timestamps, unless the injector names the zone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, get_args

from millpond.statestore.errors import InvalidError

TimeUnit: TypeAlias = Literal["s", "ms", "us", "ns"]
"""The unit of a time that is a whole number since 1970 UTC."""

MILLISECONDS_MIN: Final = 946_684_800_000
"""The year 2000 in milliseconds; in microseconds it is 11 January 1970."""

MILLISECONDS_MAX: Final = 4_102_444_799_999
"""The end of the year 2099 in milliseconds; in microseconds it is 17 February 1970."""

_PER_US: Final[Mapping[str, tuple[int, int]]] = {
    "s": (1_000_000, 1),
    "ms": (1_000, 1),
    "us": (1, 1),
    "ns": (1, 1_000),
}
_OFFSET: Final = re.compile(r"([+-])(0[0-9]|1[0-7]):([0-5][0-9])")


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeReading:
    """How times are read that do not say their unit or zone.

    Attributes:
        unit: the unit of whole numbers.
        is_unit_given: whether the user has said so; otherwise dates in milliseconds are refused.
        zone: the offset of times without a zone, as ``Z`` or ``+02:00``; ``None`` refuses them.
    """

    unit: TimeUnit = "us"
    is_unit_given: bool = True
    zone: str | None = None

    @classmethod
    def of(cls, unit: TimeUnit | None, zone: str | None, *, stream: str) -> TimeReading:
        """The reading that an injector declares.

        Args:
            unit: its ``at_unit``.
            zone: its ``at_zone``.
            stream: its stream, for errors.

        Raises:
            InvalidError: there is no such unit, or the zone is neither ``UTC`` nor an offset.
        """
        if unit is not None and unit not in get_args(TimeUnit):
            raise InvalidError("at_unit is s, ms, us or ns", stream=stream, at_unit=unit)
        if zone is None or zone in {"UTC", "Z"}:
            return cls(unit=unit or "us", is_unit_given=unit is not None, zone=None if zone is None else "Z")
        if not isinstance(zone, str) or _OFFSET.fullmatch(zone) is None:
            raise InvalidError(
                "at_zone is UTC or an offset such as +02:00: a place has an hour twice when summer ends, "
                "so give the times a zone before",
                stream=stream,
                at_zone=zone,
            )
        return cls(unit=unit or "us", is_unit_given=unit is not None, zone=zone)

    @property
    def factors(self) -> tuple[int, int]:
        """By what a number is multiplied, then divided and rounded down, to be microseconds."""
        return _PER_US[self.unit]

    @property
    def offset_us(self) -> int | None:
        """How far times without a zone are ahead of UTC, in microseconds; ``None`` where they are refused."""
        if self.zone is None or self.zone == "Z":
            return None if self.zone is None else 0
        parts = _OFFSET.fullmatch(self.zone)
        if parts is None:
            raise InvalidError("not an offset", zone=self.zone)
        minutes = 60 * int(parts[2]) + int(parts[3])
        return (-minutes if parts[1] == "-" else minutes) * 60_000_000

    def number_us(self, number: int) -> int:
        """A whole number as microseconds.

        Raises:
            InvalidError: no unit was given, and the number plainly is a date in milliseconds.
        """
        if not self.is_unit_given and MILLISECONDS_MIN <= number <= MILLISECONDS_MAX:
            raise InvalidError(self.unit_mistake, value=number)
        factor, divisor = self.factors
        return number * factor // divisor

    @property
    def unit_mistake(self) -> str:
        """Why a date in milliseconds is refused."""
        return 'the time is a date in milliseconds: say at_unit="ms", or at_unit="us" if it means 1970'


PLAIN: Final = TimeReading()
"""Microseconds, whatever their size, and no time without a zone."""

DEFAULT_READING: Final = TimeReading(is_unit_given=False)
"""What an injector does unless it says otherwise."""
