"""Times that user code passes to the engine, converted to microseconds.

A time is an integer of microseconds since 1970 UTC or a ``datetime`` with an offset. A naive ``datetime`` is
refused, because the instant that it means is ambiguous. Unlike `duration.instant_us`, which bounds the times
of records to the years that SQL engines can show, these may use all 64 bits: a timer may lie after all time.
"""

from __future__ import annotations

from datetime import datetime
from typing import SupportsIndex, TypeAlias

from millpond.executor.event_time.duration import Instant, datetime_us
from millpond.statestore.errors import InvalidError
from millpond.statestore.types import TIME_MAX_US, TIME_MIN_US

Moment: TypeAlias = Instant
"""A point in time that user code passes: microseconds since 1970 UTC, or a ``datetime`` with an offset."""


def to_micros(moment: Moment | SupportsIndex) -> int:
    """The moment in microseconds since 1970 UTC.

    Example:
        >>> to_micros(datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC))
        1000000

    Raises:
        InvalidError: not a time, a ``datetime`` without an offset, or outside 64 bits.
    """
    if type(moment) is int:
        micros = moment
    elif isinstance(moment, datetime):
        micros = datetime_us(moment)
    else:
        micros = _of_number(moment)
    if TIME_MIN_US <= micros <= TIME_MAX_US:
        return micros
    raise InvalidError("a time must fit in 64 bits of microseconds", at=micros)


def _of_number(moment: object) -> int:
    if isinstance(moment, bool) or not isinstance(moment, SupportsIndex):
        raise InvalidError(
            "a time is an int of microseconds or a datetime", at=moment, type=type(moment).__name__
        )
    return moment.__index__()
