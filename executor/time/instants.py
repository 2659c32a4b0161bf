"""Instants: every form that users write, converted to microseconds.

Inside Millpond a time is an ``int`` of microseconds since 1970 UTC. Users write an aware `datetime` or
ISO 8601 text. Nothing is guessed: a time without a zone, or a number that looks like a
date in another unit, is refused unless the injector declares zone or unit (`TimeReading`). `INSTANT_TEXT`
defines the accepted text for both runners.

A zone with summer time has hours that come twice and hours that never come. As in Java's and Spark's functions, the
first of two is taken, and a time that never comes is as long after the change as it would have been without it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta, timezone, tzinfo
from typing import Any, Final, Literal, SupportsIndex, TypeAlias, get_args
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError, available_timezones

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from millpond.statestore.durations import INT64_MAX, MICROSECOND, whole_number
from millpond.statestore.errors import InvalidError, did_you_mean
from millpond.statestore.rows.row import one_array
from millpond.statestore.types import TIME_MAX_US, TIME_MIN_US, EventTimeMicros

TimeUnit: TypeAlias = Literal["s", "ms", "us", "ns"]
"""The unit of a time that is a whole number since 1970 UTC."""

DATES_S: Final = (946_684_800, 4_102_444_799)
"""The years 2000 to 2099 in seconds."""

DATES_IN: Final[Mapping[TimeUnit, tuple[int, int]]] = {
    "ms": (946_684_800_000, 4_102_444_799_999),
    "ns": (946_684_800_000_000_000, 4_102_444_799_999_999_999),
}
"""The same years in units that a number in microseconds shows to be mistaken; in seconds they are its first 68 minutes."""

_MISTAKEN: Final[Mapping[TimeUnit, str]] = {"s": "seconds", "ms": "milliseconds", "ns": "nanoseconds"}
UNIT_FACTORS: Final = {"s": (1_000_000, 1), "ms": (1_000, 1), "us": (1, 1), "ns": (1, 1_000)}
_OFFSET: Final = re.compile(r"[+-](0[0-9]|1[0-7]):[0-5][0-9]")


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeReading:
    """An injector's reading of times that lack a unit or a zone.

    Attributes:
        is_unit_given: the user has declared the unit; otherwise dates in milliseconds or nanoseconds are refused,
            and so are numbers with fractions.
        zone: the zone of times without one, as ``Z``, ``+02:00`` or ``Europe/Oslo``; ``None`` refuses them.
    """

    unit: TimeUnit = "us"
    is_unit_given: bool = True
    zone: str | None = None

    @classmethod
    def of(cls, unit: TimeUnit | None, zone: str | None, *, stream: str) -> TimeReading:
        """Return the reading that an injector declares with ``at_unit`` and ``at_zone``."""
        if unit is not None and unit not in get_args(TimeUnit):
            raise InvalidError("at_unit must be s, ms, us or ns", stream=stream, at_unit=unit)
        if zone is not None:
            zone = _zone(zone, stream)
        return cls(unit=unit or "us", is_unit_given=unit is not None, zone=zone)

    @property
    def factors(self) -> tuple[int, int]:
        """Multiplier and divisor that turn a number into microseconds, rounded down."""
        return UNIT_FACTORS[self.unit]

    @property
    def is_region(self) -> bool:
        """The zone is a place with a history of offsets."""
        return self.zone is not None and self.zone != "Z" and _OFFSET.fullmatch(self.zone) is None

    @property
    def zone_info(self) -> tzinfo | None:
        """The zone of times without one; ``None`` where such times are refused."""
        if self.zone is None or self.is_region:
            return None if self.zone is None else ZoneInfo(self.zone)
        return timezone(timedelta(microseconds=self.offset_us))

    @property
    def offset_us(self) -> int:
        """Offset from UTC, in microseconds, of a zone with one offset."""
        if self.zone is None or self.zone == "Z":
            return 0
        minutes = 60 * int(self.zone[1:3]) + int(self.zone[4:])
        return (-minutes if self.zone[0] == "-" else minutes) * 60_000_000

    def number_us(self, number: int | float) -> int:  # noqa: PYI041 - a float is converted in another way
        """Convert a number of the unit; a float is rounded to the microsecond."""
        factor, divisor = self.factors
        if isinstance(number, float):
            if not self.is_unit_given or not math.isfinite(number):
                raise InvalidError(float_mistake(number), value=number)
            return round(number * factor / divisor)
        unit = None if self.is_unit_given else date_unit(number)
        if unit is not None:
            raise InvalidError(unit_mistake(unit), value=number)
        return number * factor // divisor


def _zone(zone: object, stream: str) -> str:
    if zone in ("UTC", "Z"):
        return "Z"
    try:
        if isinstance(zone, str):
            _ = None if _OFFSET.fullmatch(zone) else ZoneInfo(zone)
            return zone
    except (ZoneInfoNotFoundError, ValueError, OSError):
        pass
    hint = did_you_mean(str(zone), available_timezones())
    raise InvalidError(
        f"at_zone must be UTC, an offset such as +02:00 or a zone such as Europe/Oslo{hint}",
        stream=stream,
        at_zone=zone,
    )


def date_unit(number: float) -> TimeUnit | None:
    """Return the unit in which a number is a date from 2000 to 2099; ``None`` also for microseconds.

    Example:
        >>> date_unit(1_767_225_600_000), date_unit(1_767_225_600_000_000)
        ('ms', None)
    """
    return next((unit for unit, (first, last) in DATES_IN.items() if first <= number <= last), None)


def unit_mistake(unit: TimeUnit) -> str:
    return f'the time is a date in {_MISTAKEN[unit]}: say at_unit="{unit}", or at_unit="us" if it means another year'


def float_mistake(number: float) -> str:
    unit = "s" if DATES_S[0] <= number <= DATES_S[1] else date_unit(number)
    if unit is None:
        return "the time is a number with fractions: say its unit with at_unit, or give whole microseconds"
    return f'the time is a date in {_MISTAKEN[unit]} with fractions: say at_unit="{unit}"'


PLAIN: Final = TimeReading()
"""Microseconds of any size; times without a zone are refused."""

DEFAULT_READING: Final = TimeReading(is_unit_given=False)
"""The reading of an injector that declares neither unit nor zone."""


Instant: TypeAlias = int | datetime
"""A point in time: microseconds since 1970 UTC, or a `datetime` with a time zone."""

_PARSED_TYPES: Final = frozenset({pa.string(), pa.large_string(), pa.string_view(), pa.null(), pa.uint64()})
FLOAT_US_MAX: Final = 2.0**62
_QUARTER_US: Final = 15 * 60_000_000
EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)

INSTANT_MIN_US: Final = EventTimeMicros((datetime(1, 1, 1, tzinfo=UTC) - EPOCH) // MICROSECOND)
"""The earliest event time of a record: the beginning of year 1."""

INSTANT_MAX_US: Final = EventTimeMicros(
    (datetime(9999, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC) - EPOCH) // MICROSECOND
)
"""The latest event time of a record: the end of year 9999, the last that SQL engines can show."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InstantText:
    """Regular expressions for the parts of ISO 8601 text, valid in Python and Java alike.

    A time is a ``date``, or a ``date`` and a ``minute`` separated by ``T`` or a space, then optionally
    ``second`` and ``zone``. ``T`` and ``Z`` may be small, as in RFC 3339. Forms that only some parsers accept are refused.
    """

    separator: str = "[Tt ]"
    date: str = r"[0-9]{4}-[0-9]{2}-[0-9]{2}"
    minute: str = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]"
    second: str = r":[0-5][0-9](?:\.[0-9]{1,9})?"
    zone: str = r" ?(?:[Zz]|UTC|[+-](?:0[0-9]|1[0-7])(?::?[0-5][0-9])?|[+-]18(?::?00)?)"


NO_ZONE: Final = 'the time has no time zone: add one, or say at_zone="UTC" where it is injected'
_NO_INSTANT: Final = "the time is not ISO 8601 text of the form 2024-05-01T12:00:00Z"
_MIDNIGHT: Final = "hours end with 23: write 24:00 as 00:00 of the next day"

INSTANT_TEXT: Final = InstantText()
"""The time text that both runners accept."""

_INSTANT: Final = re.compile(
    f"({INSTANT_TEXT.date})(?:{INSTANT_TEXT.separator}({INSTANT_TEXT.minute})({INSTANT_TEXT.second})?({INSTANT_TEXT.zone})?)?"
)


def instant_us(value: Instant) -> EventTimeMicros:
    """Convert a point in time within the years 1 to 9999 to microseconds since 1970 UTC."""
    if isinstance(value, bool):
        raise InvalidError("a time cannot be a bool", value=value)
    if isinstance(value, datetime):
        return _bounded_instant(datetime_us(value), value)
    return _bounded_instant(
        whole_number(value, "a time must be microseconds or a datetime with a zone"), value
    )


def datetime_us(value: datetime) -> int:
    if value.tzinfo is None or value.utcoffset() is None:
        raise InvalidError(NO_ZONE, value=value.isoformat())
    return (value - EPOCH) // MICROSECOND


def _bounded_instant(instant: int, value: object) -> EventTimeMicros:
    if not INSTANT_MIN_US <= instant <= INSTANT_MAX_US:
        raise InvalidError("the time lies outside the years 1 to 9999", value=value)
    return EventTimeMicros(instant)


def parse_instant_us(value: Any, reading: TimeReading = PLAIN) -> EventTimeMicros:
    """Convert the time of an outside record: everything `instant_us` accepts, and ISO 8601 text."""
    if value is None:
        raise InvalidError("the time is null")
    if isinstance(value, str):
        return _parse_text_us(value, reading)
    if isinstance(value, datetime):
        zone = reading.zone_info
        if zone is not None and value.utcoffset() is None:
            value = value.replace(tzinfo=zone)
        return instant_us(value)
    if isinstance(value, bool):
        return instant_us(value)
    if isinstance(value, float | np.floating):
        return _bounded_instant(reading.number_us(float(value)), value)
    number = whole_number(value, "a time must be a whole number, a datetime with a zone or ISO 8601 text")
    return _bounded_instant(reading.number_us(number), value)


def _parse_text_us(text: str, reading: TimeReading) -> EventTimeMicros:
    parts = _INSTANT.fullmatch(text.strip(" "))
    if parts is None:
        hint = f"; {_MIDNIGHT}" if text.strip(" ")[10:16].upper() in ("T24:00", " 24:00") else ""
        raise InvalidError(f"{_NO_INSTANT}{hint}", value=text)
    date, minute, second, zone = parts.groups()
    if zone is None and reading.zone is None:
        raise InvalidError(NO_ZONE, value=text)
    offset = (zone or "").strip().upper().replace("UTC", "Z")
    try:
        parsed = datetime.fromisoformat(f"{date}T{minute or '00:00'}{second or ':00'}{offset}")
        if zone is None:
            parsed = parsed.replace(tzinfo=reading.zone_info)
    except ValueError as cause:
        raise InvalidError(_NO_INSTANT, value=text) from cause
    return instant_us(parsed)


@dataclass(frozen=True, slots=True, kw_only=True)
class InstantColumn:
    """The times of a column in microseconds, undefined in the rows that ``errors`` names."""

    at: npt.NDArray[np.int64]
    errors: Mapping[int, str] = field(default_factory=dict)


def instant_column_us(
    column: pa.Array | pa.ChunkedArray, name: str, reading: TimeReading = PLAIN
) -> InstantColumn:
    """Convert an Arrow column of integers, timestamps or ISO text; ``name`` is for errors."""
    array = one_array(column)
    if pa.types.is_timestamp(array.type):
        at = _scaled(array.cast(pa.int64()), *UNIT_FACTORS[array.type.unit])
        if array.type.tz is None:
            if reading.zone is None:
                raise InvalidError(NO_ZONE, column=name, type=array.type)
            at = _of_region(at, reading.zone) if reading.is_region else at - reading.offset_us
        return _checked_column(array, at)
    if pa.types.is_integer(array.type) and not pa.types.is_uint64(array.type):
        mistakes = {} if reading.is_unit_given else _mistaken_units(_integer_values(array))
        return _checked_column(array, _scaled(array, *reading.factors), mistakes)
    if pa.types.is_floating(array.type):
        return _float_column(array, name, reading)
    if array.type in _PARSED_TYPES:
        return _parsed_column(array, reading)
    raise InvalidError(
        "the time column is no time: cast it to a timestamp, to whole microseconds or to ISO 8601 text",
        column=name,
        type=array.type,
    )


def _mistaken_units(numbers: npt.NDArray[np.int64]) -> dict[int, str]:
    return {
        row: str(InvalidError(unit_mistake(unit), value=int(numbers[row])))
        for unit, (first, last) in DATES_IN.items()
        for row in np.flatnonzero((numbers >= first) & (numbers <= last)).tolist()
    }


def _float_column(array: pa.Array, name: str, reading: TimeReading) -> InstantColumn:
    values = pc.fill_null(array.cast(pa.float64()), 0).to_numpy(zero_copy_only=False)
    if not reading.is_unit_given:
        number = next((value for value in array.to_pylist() if value is not None), 0.0)
        raise InvalidError(float_mistake(number), column=name, type=array.type, value=number)
    factor, divisor = reading.factors
    # What is no number and what is too large lies outside of all years.
    bounded = np.clip(np.nan_to_num(values, nan=np.inf), -1e100, 1e100)
    scaled = np.rint(np.clip(bounded * factor / divisor, -FLOAT_US_MAX, FLOAT_US_MAX))
    return _checked_column(array, scaled.astype(np.int64))


def _of_region(local_us: npt.NDArray[np.int64], zone: str) -> npt.NDArray[np.int64]:
    """Return the instants of local times, with one look at the zone for most quarters of an hour."""
    info = ZoneInfo(zone)
    quarters, places = np.unique(local_us // _QUARTER_US, return_inverse=True)
    firsts = [_offset_us(info, quarter * _QUARTER_US) for quarter in quarters.tolist()]
    lasts = [_offset_us(info, (quarter + 1) * _QUARTER_US - 1) for quarter in quarters.tolist()]
    at = local_us - np.array(firsts, np.int64)[places]
    # Long ago offsets changed at any second.
    for row in np.flatnonzero((np.array(firsts) != np.array(lasts))[places]).tolist():
        at[row] = local_us[row] - _offset_us(info, int(local_us[row]))
    return at


def _offset_us(zone: ZoneInfo, local_us: int) -> int:
    if not INSTANT_MIN_US <= local_us <= INSTANT_MAX_US:
        # Outside of these years a time is refused with any offset.
        return 0
    local = datetime(1970, 1, 1, tzinfo=zone) + timedelta(microseconds=local_us)
    return (local.utcoffset() or timedelta()) // MICROSECOND


def _scaled(array: pa.Array, multiplier: int, divisor: int) -> npt.NDArray[np.int64]:
    ticks = _integer_values(array)
    # Room for an offset of a day: what is out of range stays so.
    bound = (INT64_MAX - 86_400_000_000) // multiplier
    return np.clip(ticks, -bound, bound) * multiplier // divisor


def _integer_values(array: pa.Array) -> npt.NDArray[np.int64]:
    wide = pc.cast(array, pa.int64(), safe=False)
    values: npt.NDArray[np.int64] = pc.fill_null(wide, 0).to_numpy(zero_copy_only=False)
    return values


def _checked_column(
    array: pa.Array, at: npt.NDArray[np.int64], mistakes: Mapping[int, str] | None = None
) -> InstantColumn:
    null = array.is_null().to_numpy(zero_copy_only=False)
    outside = ((at < INSTANT_MIN_US) | (at > INSTANT_MAX_US)) & ~null
    errors = {int(row): "the time is null" for row in np.flatnonzero(null)}
    errors |= {int(row): "the time lies outside the years 1 to 9999" for row in np.flatnonzero(outside)}
    return InstantColumn(at=at, errors=errors | dict(mistakes or {}))


def _parsed_column(array: pa.Array, reading: TimeReading) -> InstantColumn:
    at = np.zeros(len(array), dtype=np.int64)
    errors: dict[int, str] = {}
    for row, cell in enumerate(array):
        try:
            at[row] = parse_instant_us(cell.as_py(), reading)
        except InvalidError as error:
            errors[row] = str(error)
        except UnicodeDecodeError:
            errors[row] = "the time is no UTF-8"
    return InstantColumn(at=at, errors=errors)


Moment: TypeAlias = Instant
"""A point in time from user code: microseconds since 1970 UTC, or a ``datetime`` with an offset."""


def to_micros(moment: Moment | SupportsIndex) -> int:
    """Convert a moment to microseconds of any 64 bits, unlike `instant_us`: a timer may lie after all time."""
    if type(moment) is int:
        micros = moment
    elif isinstance(moment, datetime):
        micros = datetime_us(moment)
    elif isinstance(moment, bool) or not isinstance(moment, SupportsIndex):
        raise InvalidError(
            "a time must be an int of microseconds or a datetime", at=moment, type=type(moment).__name__
        )
    else:
        micros = moment.__index__()
    if TIME_MIN_US <= micros <= TIME_MAX_US:
        return micros
    raise InvalidError("a time must fit in 64 bits of microseconds", at=micros)
