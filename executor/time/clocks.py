"""The clocks that timers wait for, their names in rows, and late data horizons.

Event time has one clock per declared percentile watermark; percentile 100 is the low watermark (MillWheel
§7.2). A *hold* waits for no clock: it is stored as a timer to survive the process, and only its output time
counts (§5.2).

A late data horizon is how far before its input a computation may produce (windowing patent,
``lateDataHorizon``). It holds the output watermark back by as much, so these productions are on time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final, Literal, TypeAlias

from millpond.executor.time.observations import check_declared_percentile, check_percentile
from millpond.statestore.durations import Duration, duration_us
from millpond.statestore.errors import DataError, InvalidError
from millpond.statestore.rows.row import TimeDomain
from millpond.statestore.types import TIME_MAX_US, TIME_MIN_US, EventTimeMicros

EXACT: Final = 100.0
"""The percentile of the low watermark itself."""

PercentileTimes = Mapping[float, EventTimeMicros]
"""Event times by percentile below 100."""

FREE: Final = "/free"
"""Suffix of a clock's name in a row: the timer does not hold the output watermark."""

_PERCENTILE: Final = "event@"


@lru_cache(maxsize=1_024)
def clock_name(domain: TimeDomain, percentile: float) -> str:
    """Return the name of a clock in a row's ``domain``, for example ``wall`` or ``event@99.5``."""
    # 90 and 90.0 are the same clock, so they share a name, whichever comes first.
    return domain.value if percentile == EXACT else f"{_PERCENTILE}{float(percentile)!r}"


@lru_cache(maxsize=1_024)
def parse_clock(name: str) -> tuple[TimeDomain, float]:
    try:
        if name.startswith(_PERCENTILE):
            return TimeDomain.EVENT, check_percentile(float(name.removeprefix(_PERCENTILE)))
        return TimeDomain(name), EXACT
    except (ValueError, InvalidError) as cause:
        raise DataError("a timer waits for an unknown clock", domain=name) from cause


@lru_cache(maxsize=1_024)
def timer_clock_name(domain: TimeDomain, percentile: float, *, holds: bool) -> str:
    """Return a timer's ``domain`` in a row: its clock, with `FREE` appended unless the timer holds the watermark."""
    name = clock_name(domain, percentile)
    return name if holds else name + FREE


@lru_cache(maxsize=1_024)
def parse_timer_clock(name: str) -> tuple[TimeDomain, float, bool]:
    return (*parse_clock(name.removesuffix(FREE)), not name.endswith(FREE))


def declared_percentiles(declared: object, computation: str) -> tuple[float, ...]:
    """Return the percentiles below 100 that a computation declares, without duplicates, greatest first."""
    if not isinstance(declared, tuple | list | frozenset | set):
        raise InvalidError("percentiles must be a tuple of numbers", computation=computation, found=declared)
    return tuple(
        sorted({check_declared_percentile(percentile) for percentile in declared} - {EXACT}, reverse=True)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Clocks:
    """The times of all clocks during a bundle, in microseconds."""

    watermark: int
    wall_time: int
    percentile_watermarks: PercentileTimes = field(default_factory=dict)

    def of(self, domain: TimeDomain, percentile: float) -> int:
        """Return a clock's time; a percentile that is no longer tracked falls back to the low watermark."""
        if domain is TimeDomain.EVENT:
            exact = self.watermark
            return exact if percentile == EXACT else self.percentile_watermarks.get(percentile, exact)
        if domain is TimeDomain.RECORD:
            return self.watermark
        return self.wall_time if domain is TimeDomain.WALL else TIME_MIN_US


LateDataHorizon: TypeAlias = Duration | Literal["unbounded"]
"""A non-negative duration, or ``"unbounded"``: no limit, but productions before their input may be late."""

_UNBOUNDED: Final = "unbounded"


def horizon_us(horizon: LateDataHorizon) -> int:
    lag = 0 if horizon == _UNBOUNDED else duration_us(horizon)
    if lag < 0:
        raise InvalidError("late_data_horizon must not be negative", late_data_horizon=horizon)
    return lag


def slack_us(horizon: LateDataHorizon) -> int:
    """Return how far a production may lie before its input, in microseconds."""
    return TIME_MAX_US if horizon == _UNBOUNDED else horizon_us(horizon)


def held_back(watermark: EventTimeMicros, horizon: int) -> EventTimeMicros:
    if watermark in (TIME_MIN_US, TIME_MAX_US):
        return watermark
    return EventTimeMicros(max(TIME_MIN_US, watermark - horizon))
