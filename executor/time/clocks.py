"""The clocks that timers wait for, and their names in a row.

Event time has one clock for each percentile watermark that a computation declares; 100 is the low watermark
itself (MillWheel §7.2). A *hold* waits for no clock: it is stored like a timer because it must survive the
process like one, and only its output time matters (§5.2). A timer that does not hold the output watermark
has ``/free`` after its clock's name.

Late data horizons: how far before its input a computation may produce (windowing patent, ``lateDataHorizon``).

A production before its input's time may be late for consumers whose watermark has passed that time. A
declared horizon holds the output watermark back by as much, so that it is not late. An unbounded horizon
cannot hold the watermark back, and such productions may be late.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final, Literal, TypeAlias

from millpond.executor.time.instants import Duration, duration_us
from millpond.executor.time.observations import check_percentile
from millpond.statestore.errors import DataError, InvalidError
from millpond.statestore.rows.row import TimeDomain
from millpond.statestore.types import TIME_MAX_US, TIME_MIN_US, EventTimeMicros

EXACT: Final = 100.0
"""The percentile of the low watermark itself."""

PercentileTimes = Mapping[float, EventTimeMicros]
"""Event times by percentile below 100."""

FREE: Final = "/free"
"""What a row adds to the name of a timer's clock if the timer does not hold the output watermark."""

_PERCENTILE: Final = "event@"


@lru_cache(maxsize=1_024)
def clock_name(domain: TimeDomain, percentile: float) -> str:
    """The name of a clock in a row's ``domain``.

    Example:
        >>> clock_name(TimeDomain.EVENT, 99.5), clock_name(TimeDomain.WALL, 100.0)
        ('event@99.5', 'wall')
    """
    # 90 and 90.0 are the same clock, so they share a name, whichever comes first.
    return domain.value if percentile == EXACT else f"{_PERCENTILE}{float(percentile)!r}"


@lru_cache(maxsize=1_024)
def parse_clock(name: str) -> tuple[TimeDomain, float]:
    """The clock that a row names.

    Raises:
        DataError: no version of Millpond writes this name.
    """
    try:
        if name.startswith(_PERCENTILE):
            return TimeDomain.EVENT, check_percentile(float(name.removeprefix(_PERCENTILE)))
        return TimeDomain(name), EXACT
    except (ValueError, InvalidError) as cause:
        raise DataError("a timer waits for an unknown clock", domain=name) from cause


@lru_cache(maxsize=1_024)
def timer_clock_name(domain: TimeDomain, percentile: float, *, holds: bool) -> str:
    """What a row has as a timer's ``domain``: the clock that it waits for, and whether it holds the watermark.

    Example:
        >>> timer_clock_name(TimeDomain.WALL, 100.0, holds=False)
        'wall/free'
    """
    name = clock_name(domain, percentile)
    return name if holds else name + FREE


@lru_cache(maxsize=1_024)
def parse_timer_clock(name: str) -> tuple[TimeDomain, float, bool]:
    """The clock that a row's timer waits for, and whether the timer holds the output watermark.

    Raises:
        DataError: no version of Millpond writes this name.
    """
    return (*parse_clock(name.removesuffix(FREE)), not name.endswith(FREE))


def declared_percentiles(declared: object, computation: str) -> tuple[float, ...]:
    """The percentiles below 100 that a computation declares, without duplicates, greatest first.

    Raises:
        InvalidError: ``declared`` is not a collection of percentiles.
    """
    if not isinstance(declared, tuple | list | frozenset | set):
        raise InvalidError("percentiles is a tuple of numbers", computation=computation, found=declared)
    return tuple(sorted({check_percentile(percentile) for percentile in declared} - {EXACT}, reverse=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Clocks:
    """The times of all clocks during a bundle, in microseconds.

    Attributes:
        watermark: the input low watermark.
        wall_time: the wall time.
        percentile_watermarks: the percentile watermarks that the pipeline tracks.
    """

    watermark: int
    wall_time: int
    percentile_watermarks: PercentileTimes = field(default_factory=dict)

    def of(self, domain: TimeDomain, percentile: float) -> int:
        """The time of a timer's clock; a percentile that is no longer tracked falls back to the low watermark."""
        if domain is TimeDomain.EVENT:
            return (
                self.watermark
                if percentile == EXACT
                else self.percentile_watermarks.get(percentile, self.watermark)
            )
        if domain is TimeDomain.RECORD:
            return self.watermark
        return self.wall_time if domain is TimeDomain.WALL else TIME_MIN_US


LateDataHorizon: TypeAlias = Duration | Literal["unbounded"]
"""A duration that is not negative, or ``"unbounded"``: no limit, and productions may be late."""

_UNBOUNDED: Final = "unbounded"


def horizon_us(horizon: LateDataHorizon) -> int:
    """The lag of the output watermark in microseconds.

    Example:
        >>> horizon_us("1ms"), horizon_us("unbounded")
        (1000, 0)

    Raises:
        InvalidError: not a duration, or negative.
    """
    lag = 0 if horizon == _UNBOUNDED else duration_us(horizon)
    if lag < 0:
        raise InvalidError("a late data horizon is not negative", late_data_horizon=horizon)
    return lag


def slack_us(horizon: LateDataHorizon) -> int:
    """How far a production may lie before its input, in microseconds."""
    return TIME_MAX_US if horizon == _UNBOUNDED else horizon_us(horizon)


def held_back(watermark: EventTimeMicros, horizon: int) -> EventTimeMicros:
    """A watermark less a horizon; the beginning and the end of time stay as they are."""
    if watermark in (TIME_MIN_US, TIME_MAX_US):
        return watermark
    return EventTimeMicros(max(TIME_MIN_US, watermark - horizon))
