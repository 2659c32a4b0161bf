"""
Times as users write them, and as rows keep them.

A time is an integer of microseconds since 1970 UTC, or a ``datetime`` that knows its
offset; a naive ``datetime`` is refused, since nobody can say which instant it means.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Final, SupportsIndex, TypeAlias

from millpond.statestore.errors import InvalidError
from millpond.statestore.types import TIME_MAX_US, TIME_MIN_US

__all__ = ["Moment", "to_micros"]

Moment: TypeAlias = int | datetime
"""A point in time as user code may give it."""

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)


def to_micros(moment: Moment | SupportsIndex) -> int:
    """
    The moment in microseconds since 1970 UTC.

    Example:
        >>> to_micros(datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC))
        1000000

    Raises:
        InvalidError: it is no time, a ``datetime`` without an offset, or beyond 64 bits.
    """
    if type(moment) is int:
        micros = moment
    elif isinstance(moment, datetime):
        micros = _of_datetime(moment)
    else:
        micros = _of_number(moment)
    if TIME_MIN_US <= micros <= TIME_MAX_US:
        return micros
    raise InvalidError("a time must fit in 64 bits of microseconds", at=micros)


def _of_datetime(moment: datetime) -> int:
    if moment.tzinfo is None or moment.utcoffset() is None:
        raise InvalidError("a datetime must know its offset, as datetime.now(UTC) does", at=moment)
    return (moment - _EPOCH) // _MICROSECOND


def _of_number(moment: object) -> int:
    if isinstance(moment, bool) or not isinstance(moment, SupportsIndex):
        raise InvalidError(
            "a time is an int of microseconds or a datetime", at=moment, type=type(moment).__name__
        )
    return moment.__index__()
