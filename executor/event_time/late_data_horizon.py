"""
Late data horizons: how far below its input a computation may produce (windowing patent, ``lateDataHorizon``).

What is produced before its input's time would be late for whoever has been told that time has
passed it. A declared horizon holds the output watermark back by as much, so that it is not;
without bound the watermark cannot be held, and what is shifted back is late, openly.
"""

from __future__ import annotations

from typing import Final, Literal, TypeAlias

from millpond.executor.event_time.duration import Duration, duration_us
from millpond.statestore.errors import InvalidError
from millpond.statestore.types import TIME_MAX_US, TIME_MIN_US, EventTimeMicros

__all__ = ["LateDataHorizon", "held_back", "horizon_us", "slack_us"]

LateDataHorizon: TypeAlias = Duration | Literal["unbounded"]
"""A duration that is not negative, or ``"unbounded"``: as far as it likes, and openly late."""

_UNBOUNDED: Final = "unbounded"


def horizon_us(horizon: LateDataHorizon) -> int:
    """
    By how many microseconds the output watermark is held back.

    Example:
        >>> horizon_us("1ms"), horizon_us("unbounded")
        (1000, 0)

    Raises:
        InvalidError: no duration, or a negative one.
    """
    found = 0 if horizon == _UNBOUNDED else duration_us(horizon)
    if found < 0:
        raise InvalidError("a late data horizon is not negative", late_data_horizon=horizon)
    return found


def slack_us(horizon: LateDataHorizon) -> int:
    """
    By how many microseconds a production may lie below its input.
    """
    return TIME_MAX_US if horizon == _UNBOUNDED else horizon_us(horizon)


def held_back(watermark: EventTimeMicros, horizon: int) -> EventTimeMicros:
    """
    A watermark less a horizon; before all time and after all time nothing is shifted.
    """
    if watermark in (TIME_MIN_US, TIME_MAX_US):
        return watermark
    return EventTimeMicros(max(TIME_MIN_US, watermark - horizon))
