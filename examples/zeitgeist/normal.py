"""The normal values: a mean and a variance that follow the days, with a weight of a tenth for yesterday.

Pure arithmetic, robust in two ways. A day far from the mean teaches no more than one three
deviations away; otherwise the blizzard would make cancellations normal. And the variance has a floor that grows
with the mean, as for any count; otherwise the first cancellation after a quiet month would be a sensation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

_YESTERDAY: Final = 0.1
_SURPRISE_MAX: Final = 3.0
_TRUSTING_DAYS: Final = 5
_SPIKE: Final = 6.0
_DIP: Final = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """Prior knowledge of a measure.

    Attributes:
        grain: the typical contribution of one event; the variance is at least ``grain * (mean + base)``.
        base: keeps that floor above zero where the mean is zero.
        step: its running total is reported at multiples of this; ``None`` for a measure that cannot spike.
        is_wild: whether a day may be far from all others; a yes-or-no measure cannot be, so it is learned in full.
    """

    grain: float
    base: float
    step: int | None = None
    is_wild: bool = True


MEASURES: Final[Mapping[str, Measure]] = {
    "departed": Measure(grain=1, base=1),
    "cancelled": Measure(grain=1, base=1, step=3),
    "delay": Measure(grain=20, base=60, step=300),
    "silent": Measure(grain=0.02, base=1, is_wild=False),
}
"""
Flights that left, flights that were cancelled, minutes of delay, and 1 where nothing was heard; all per hour.

The mean of the last is the share of days on which the hour is silent: all of them at night, and every seventh where
Saturday evenings are. Its floor makes a first silence a surprise of seven deviations.
"""

SPIKING: Final[Mapping[str, int]] = {
    name: measure.step for name, measure in MEASURES.items() if measure.step is not None
}
"""The measures that can spike, with their steps: totals that only ever grow."""


@dataclass(frozen=True, slots=True)
class Expectation:
    """What an hour should bring, rounded for people to read."""

    mean: float
    deviation: float

    def spike_limit(self, sensitivity: float = 1) -> float:
        """A total above this is a spike; an alarm of twice the sensitivity has its limit half as far from the mean."""
        return self.mean + _SPIKE / sensitivity * self.deviation

    def dip_limit(self, sensitivity: float = 1) -> float:
        """A total below this is a dip; where it is negative there are none."""
        return self.mean - _DIP / sensitivity * self.deviation

    def strength(self, value: float) -> float:
        """Return the distance of the value from the mean, in deviations."""
        return round(abs(value - self.mean) / self.deviation, 2)


def learned(normal: Mapping[str, float] | None, days: int, value: int, measure: Measure) -> dict[str, float]:
    """Return the mean and variance after one more day; ``days`` is the number of days in ``normal``."""
    if normal is None:
        return {"mean": float(value), "variance": 0.0}
    mean, variance = normal["mean"], normal["variance"]
    weight = max(_YESTERDAY, 1 / (days + 1))
    surprise = value - mean
    if days >= _TRUSTING_DAYS and measure.is_wild:
        bound = _SURPRISE_MAX * _deviation(mean, variance, measure)
        surprise = max(-bound, min(bound, surprise))
    return {
        "mean": mean + weight * surprise,
        "variance": (1 - weight) * (variance + weight * surprise * surprise),
    }


def expectation(normal: Mapping[str, float], measure: Measure) -> Expectation:
    """The expectation for the next day."""
    mean, variance = normal["mean"], normal["variance"]
    return Expectation(round(mean, 3), round(_deviation(mean, variance, measure), 3))


def first_step_above(limit: float, step: int) -> int:
    """The smallest multiple of ``step`` that is greater than ``limit``."""
    return (math.floor(limit / step) + 1) * step


def _deviation(mean: float, variance: float, measure: Measure) -> float:
    return math.sqrt(max(variance, measure.grain * (mean + measure.base)))
