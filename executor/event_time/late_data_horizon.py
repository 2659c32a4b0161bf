"""Late data horizons: how far before its input a computation may produce (windowing patent, ``lateDataHorizon``).

A production before its input's time may be late for consumers whose watermark has passed that time. A
declared horizon holds the output watermark back by as much, so that it is not late. An unbounded horizon
cannot hold the watermark back, and such productions may be late.
"""

from __future__ import annotations

from typing import Final, Literal, TypeAlias

from millpond.executor.event_time.duration import Duration, duration_us
from millpond.statestore.errors import InvalidError
from millpond.statestore.types import TIME_MAX_US, TIME_MIN_US, EventTimeMicros

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
