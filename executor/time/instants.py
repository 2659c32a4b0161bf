"""Instants: every form that users write, converted to microseconds.

Inside Millpond a time is an ``int`` of microseconds since 1970 UTC. Users write an aware `datetime` or
ISO 8601 text. Nothing is guessed: a time without a zone, or a number that looks like a
date in milliseconds, is refused unless the injector declares zone or unit (`TimeReading`). `INSTANT_TEXT`
defines the accepted text for both runners.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta, timezone
from typing import Any, Final, Literal, SupportsIndex, TypeAlias, get_args

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from millpond.statestore.durations import INT64_MAX, MICROSECOND, whole_number
from millpond.statestore.errors import InvalidError
from millpond.statestore.types import TIME_MAX_US, TIME_MIN_US, EventTimeMicros

TimeUnit: TypeAlias = Literal["s", "ms", "us", "ns"]
"""The unit of a time that is a whole number since 1970 UTC."""

MILLISECONDS_MIN: Final = 946_684_800_000
"""The year 2000 in milliseconds; in microseconds it is 11 January 1970."""

MILLISECONDS_MAX: Final = 4_102_444_799_999
"""The end of the year 2099 in milliseconds; in microseconds it is 17 February 1970."""

_FACTORS: Final = {"s": (1_000_000, 1), "ms": (1_000, 1), "us": (1, 1), "ns": (1, 1_000)}
_OFFSET: Final = re.compile(r"[+-](0[0-9]|1[0-7]):[0-5][0-9]")


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeReading:
    """An injector's reading of times that lack a unit or a zone.

    Attributes:
        is_unit_given: the user has declared the unit; otherwise dates in milliseconds are refused.
        zone: the offset of times without a zone, as ``Z`` or ``+02:00``; ``None`` refuses them.
    """

    unit: TimeUnit = "us"
    is_unit_given: bool = True
    zone: str | None = None

    @classmethod
    def of(cls, unit: TimeUnit | None, zone: str | None, *, stream: str) -> TimeReading:
        """Return the reading that an injector declares with ``at_unit`` and ``at_zone``."""
        if unit is not None and unit not in get_args(TimeUnit):
            raise InvalidError("at_unit must be s, ms, us or ns", stream=stream, at_unit=unit)
        if zone in {"UTC", "Z"}:
            zone = "Z"
        elif zone is not None and (not isinstance(zone, str) or _OFFSET.fullmatch(zone) is None):
            raise InvalidError(
                "at_zone must be UTC or an offset such as +02:00: a place has one hour twice when summer ends, "
                "so add a zone to the times first",
                stream=stream,
                at_zone=zone,
            )
        return cls(unit=unit or "us", is_unit_given=unit is not None, zone=zone)

    @property
    def factors(self) -> tuple[int, int]:
        """Multiplier and divisor that turn a number into microseconds, rounded down."""
        return _FACTORS[self.unit]

    @property
    def offset_us(self) -> int | None:
        """Offset from UTC of times without a zone, in microseconds; ``None`` where such times are refused."""
        if self.zone is None or self.zone == "Z":
            return None if self.zone is None else 0
        minutes = 60 * int(self.zone[1:3]) + int(self.zone[4:])
        return (-minutes if self.zone[0] == "-" else minutes) * 60_000_000

    def number_us(self, number: int) -> int:
        if not self.is_unit_given and MILLISECONDS_MIN <= number <= MILLISECONDS_MAX:
            raise InvalidError(self.unit_mistake, value=number)
        factor, divisor = self.factors
        return number * factor // divisor

    @property
    def unit_mistake(self) -> str:
        return 'the time is a date in milliseconds: say at_unit="ms", or at_unit="us" if it means 1970'


PLAIN: Final = TimeReading()
"""Microseconds of any size; times without a zone are refused."""

DEFAULT_READING: Final = TimeReading(is_unit_given=False)
"""The reading of an injector that declares neither unit nor zone."""


Instant: TypeAlias = int | datetime
"""A point in time: microseconds since 1970 UTC, or a `datetime` with a time zone."""

_PARSED_TYPES: Final = frozenset({pa.string(), pa.large_string(), pa.string_view(), pa.null(), pa.uint64()})
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)

INSTANT_MIN_US: Final = EventTimeMicros((datetime(1, 1, 1, tzinfo=UTC) - _EPOCH) // MICROSECOND)
"""The earliest event time of a record: the beginning of year 1."""

INSTANT_MAX_US: Final = EventTimeMicros(
    (datetime(9999, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC) - _EPOCH) // MICROSECOND
)
"""The latest event time of a record: the end of year 9999, the last that SQL engines can show."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InstantText:
    """Regular expressions for the parts of ISO 8601 text, valid in Python and Java alike.

    A time is a ``date``, or a ``date`` and a ``minute`` separated by ``T`` or a space, then optionally
    ``second`` and ``zone``. Forms that only some parsers accept are refused.
    """

    date: str = r"[0-9]{4}-[0-9]{2}-[0-9]{2}"
    minute: str = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]"
    second: str = r":[0-5][0-9](?:\.[0-9]{1,9})?"
    zone: str = r" ?(?:Z|UTC|[+-](?:0[0-9]|1[0-7])(?::?[0-5][0-9])?|[+-]18(?::?00)?)"


NO_ZONE: Final = 'the time has no time zone: add one, or say at_zone="UTC" where it is injected'
_NO_INSTANT: Final = "the time is not ISO 8601 text, as in 2024-05-01T12:00:00Z"

INSTANT_TEXT: Final = InstantText()
"""The time text that both runners accept."""

_INSTANT: Final = re.compile(
    f"({INSTANT_TEXT.date})(?:[T ]({INSTANT_TEXT.minute})({INSTANT_TEXT.second})?({INSTANT_TEXT.zone})?)?"
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
    return (value - _EPOCH) // MICROSECOND


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
        offset_us = reading.offset_us
        if offset_us is not None and value.utcoffset() is None:
            value = value.replace(tzinfo=timezone(timedelta(microseconds=offset_us)))
        return instant_us(value)
    if isinstance(value, bool):
        return instant_us(value)
    number = whole_number(value, "a time must be a whole number, a datetime with a zone or ISO 8601 text")
    return _bounded_instant(reading.number_us(number), value)


def _parse_text_us(text: str, reading: TimeReading) -> EventTimeMicros:
    parts = _INSTANT.fullmatch(text.strip(" "))
    if parts is None:
        raise InvalidError(_NO_INSTANT, value=text)
    date, minute, second, zone = parts.groups()
    named = (zone or reading.zone or "").strip()
    if not named:
        raise InvalidError(NO_ZONE, value=text)
    offset = "+00:00" if named in {"Z", "UTC"} else named
    try:
        parsed = datetime.fromisoformat(f"{date}T{minute or '00:00'}{second or ':00'}{offset}")
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
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if pa.types.is_timestamp(array.type):
        is_local = array.type.tz is None
        if is_local and reading.offset_us is None:
            raise InvalidError(NO_ZONE, column=name, type=array.type)
        ahead_us = (reading.offset_us or 0) if is_local else 0
        return _checked_column(array, _scaled(array.cast(pa.int64()), *_FACTORS[array.type.unit]) - ahead_us)
    if pa.types.is_integer(array.type) and not pa.types.is_uint64(array.type):
        mistakes: dict[int, str] = {}
        if not reading.is_unit_given:
            numbers = _integer_values(array)
            for row in np.flatnonzero((numbers >= MILLISECONDS_MIN) & (numbers <= MILLISECONDS_MAX)).tolist():
                mistakes[row] = str(InvalidError(reading.unit_mistake, value=int(numbers[row])))
        return _checked_column(array, _scaled(array, *reading.factors), mistakes)
    if array.type in _PARSED_TYPES:
        return _parsed_column(array, reading)
    raise InvalidError(
        "the time column is no time: cast it to a timestamp, to whole microseconds or to ISO 8601 text",
        column=name,
        type=array.type,
    )


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
    errors = dict(mistakes or {})
    errors |= {int(row): "the time is null" for row in np.flatnonzero(null)}
    errors |= {int(row): "the time lies outside the years 1 to 9999" for row in np.flatnonzero(outside)}
    return InstantColumn(at=at, errors=errors)


def _parsed_column(array: pa.Array, reading: TimeReading) -> InstantColumn:
    at = np.zeros(len(array), dtype=np.int64)
    errors: dict[int, str] = {}
    for row, text in enumerate(array.to_pylist()):
        try:
            at[row] = parse_instant_us(text, reading)
        except InvalidError as error:
            errors[row] = str(error)
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
