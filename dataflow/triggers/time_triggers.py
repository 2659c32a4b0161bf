"""
Triggers on time that passes: so long after the first element, or at the next stroke of the clock.

All of them wait for an element first, so a window to which nothing comes is not shown again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Final, Literal, TypeAlias

from millpond.dataflow.triggers.trigger import Trigger
from millpond.dataflow.triggers.trigger_context import TriggerContext
from millpond.dataflow.windows.element import Element
from millpond.dataflow.windows.fixed_windows import positive_us
from millpond.executor.event_time.duration import Duration, Instant, duration_us, instant_us
from millpond.statestore.errors import InvalidError
from millpond.statestore.rows.row import TimeDomain

__all__ = ["AfterDelay", "AfterProcessingTime", "AtPeriod", "Domain", "next_stroke"]

Domain: TypeAlias = TimeDomain | Literal["event", "wall"]
"""Which clock is meant: that of the records, or the one on the wall."""

_DUE: Final = "due"


def next_stroke(now: int, reference: int, period: int) -> int:
    """
    The first time after ``now`` that is whole periods away from ``reference``.

    Example:
        >>> next_stroke(now=20, reference=5, period=10), next_stroke(now=25, reference=5, period=10)
        (25, 35)
    """
    return now - (now - reference) % period + period


_ALIASES: Final = {
    "event_time": TimeDomain.EVENT,
    "processing_time": TimeDomain.WALL,
    "stream_time": TimeDomain.EVENT,
    "wall_time": TimeDomain.WALL,
}
"""What the patent and other systems call the two clocks."""


def _domain(domain: Domain) -> TimeDomain:
    name = str(domain).lower()
    try:
        return _ALIASES.get(name) or TimeDomain(name)
    except ValueError as cause:
        raise InvalidError("a trigger's time domain is event or wall", domain=domain) from cause


class _AtTime(Trigger):
    """
    Fires once, at a time that follows from the first element; merged windows keep the earliest time.
    """

    @property
    def _clock(self) -> TimeDomain:
        raise NotImplementedError

    def _due(self, context: TriggerContext, element: Element) -> int:
        raise NotImplementedError

    def on_element(self, context: TriggerContext, element: Element) -> None:
        """
        The first one sets the time.
        """
        if context.get(_DUE) is None:
            self._wait_until(context, self._due(context, element))

    def on_merge(self, context: TriggerContext) -> None:
        """
        The earliest of the merged windows' times counts.
        """
        times = [due for source in context.sources if (due := source.get(_DUE)) is not None]
        if times:
            self._wait_until(context, min(times))

    def _wait_until(self, context: TriggerContext, due: int) -> None:
        context.set(_DUE, due)
        context.set_timer(due, self._clock)

    def should_fire(self, context: TriggerContext) -> bool:
        """
        Whether the time has come.
        """
        due = context.get(_DUE)
        return due is not None and bool(context.now(self._clock) >= due)

    def on_fire(self, context: TriggerContext) -> bool:
        """
        Once is enough.
        """
        context.delete_timer(self._clock)
        return True


@dataclass(frozen=True)
class AfterDelay(_AtTime):
    """
    Fires once, ``delay`` after the window's first element was seen (wall) or happened (event).

    Args:
        delay: how long to wait.
        domain: on which clock.
        align_to: round the time up to whole multiples of this, so that many windows show together.

    Raises:
        InvalidError: a negative delay, or an unknown clock.
    """

    delay: Duration
    domain: Domain = TimeDomain.WALL
    align_to: Duration | None = None
    _delay_us: int = field(init=False, repr=False, compare=False)
    _align_us: int | None = field(init=False, repr=False, compare=False)
    _time_domain: TimeDomain = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """
        Refuse a delay that cannot work while the caller is still near.
        """
        object.__setattr__(self, "_delay_us", duration_us(self.delay))
        if self._delay_us < 0:
            raise InvalidError("a delay is not negative", delay=self.delay)
        align_us = None if self.align_to is None else positive_us("an alignment", self.align_to)
        object.__setattr__(self, "_align_us", align_us)
        object.__setattr__(self, "_time_domain", _domain(self.domain))

    @property
    def _clock(self) -> TimeDomain:
        return self._time_domain

    def _due(self, context: TriggerContext, element: Element) -> int:
        now = element.at if self._time_domain is TimeDomain.EVENT else context.wall_time
        due = now + self._delay_us
        return due if self._align_us is None else -(-due // self._align_us) * self._align_us


@dataclass(frozen=True)
class AfterProcessingTime(AfterDelay):
    """
    Fires once, ``delay`` of processing time after the first element since it began to listen.

    Args:
        delay: how long to wait.
        domain: always the clock on the wall.
        align_to: round the time up to whole multiples of this.

    Raises:
        InvalidError: a negative delay.
    """

    delay: Duration = 0

    def __post_init__(self) -> None:
        """
        Refuse a delay that cannot work while the caller is still near.
        """
        AfterDelay.__post_init__(self)
        if self._time_domain is not TimeDomain.WALL:
            raise InvalidError("processing time is the clock on the wall", domain=self.domain)


@dataclass(frozen=True)
class AtPeriod(_AtTime):
    """
    Fires once, at the next stroke of a clock that strikes every ``period``.

    Repeated, it shows at every stroke what has come since the last one.

    Args:
        reference: a time at which the clock strikes: microseconds, or a `datetime` with a zone.
        period: how far apart the strokes are.
        domain: which clock.

    Raises:
        InvalidError: the period is not positive, or the reference no time.
    """

    reference: Instant
    period: Duration
    domain: Domain = TimeDomain.WALL
    _reference_us: int = field(init=False, repr=False, compare=False)
    _period_us: int = field(init=False, repr=False, compare=False)
    _time_domain: TimeDomain = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """
        Refuse a period that cannot work while the caller is still near.
        """
        reference: int | datetime = self.reference
        object.__setattr__(self, "_reference_us", instant_us(reference))
        object.__setattr__(self, "_period_us", positive_us("a period", self.period))
        object.__setattr__(self, "_time_domain", _domain(self.domain))

    @property
    def _clock(self) -> TimeDomain:
        return self._time_domain

    def _due(self, context: TriggerContext, element: Element) -> int:
        if self._time_domain is TimeDomain.WALL:
            now = context.wall_time
        else:
            now = max(element.at, context.watermark)
        return next_stroke(now, self._reference_us, self._period_us)
