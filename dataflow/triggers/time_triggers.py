"""Triggers on passing time: a delay after the first element, or the next tick of a periodic clock.

All of them wait for an element first, so a window that gets no elements emits no further pane.
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
from millpond.statestore.types import TIME_MIN_US

Domain: TypeAlias = TimeDomain | Literal["event", "wall"]
"""A clock: event time (the watermark), or wall time (processing time)."""

_DUE: Final = "due"


def next_stroke(now: int, reference: int, period: int) -> int:
    """The first time after ``now`` that is a whole number of periods away from ``reference``; all in one unit.

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
"""Names of the two clocks in the patent and in other systems."""


def _domain(domain: Domain) -> TimeDomain:
    name = str(domain).lower()
    try:
        return _ALIASES.get(name) or TimeDomain(name)
    except ValueError as cause:
        raise InvalidError("a trigger's time domain must be event or wall", domain=domain) from cause


class _AtTime(Trigger):
    """Fires once, at a time that the first element determines; a merged window keeps the earliest time."""

    @property
    def _clock(self) -> TimeDomain:
        raise NotImplementedError

    def _due(self, context: TriggerContext, element: Element) -> int:
        raise NotImplementedError

    def on_element(self, context: TriggerContext, element: Element) -> None:
        """Set the timer, if this is the first element."""
        if context.get(_DUE) is None:
            self._wait_until(context, self._due(context, element))

    def on_merge(self, context: TriggerContext) -> None:
        """Keep the earliest time of the merged windows."""
        times = [due for source in context.sources if (due := source.get(_DUE)) is not None]
        if times:
            self._wait_until(context, min(times))

    def _wait_until(self, context: TriggerContext, due: int) -> None:
        context.set(_DUE, due)
        context.set_timer(due, self._clock)

    def should_fire(self, context: TriggerContext) -> bool:
        """Whether the clock has reached the time."""
        due = context.get(_DUE)
        return due is not None and bool(context.now(self._clock) >= due)

    def on_fire(self, context: TriggerContext) -> bool:
        """Finished after one firing."""
        context.delete_timer(self._clock)
        return True


@dataclass(frozen=True)
class AfterDelay(_AtTime):
    """Fires once, ``delay`` after the window's first element was seen, on the wall clock or in stream time.

    Stream time (``"event"``) is the low watermark, as in the Dataflow patent: a late element is waited for
    as long as any other. Where no watermark is known yet, it is the element's own time.

    Args:
        delay: how long to wait.
        domain: on which clock.
        align_to: round the time up to a multiple of this duration, so that many windows fire together.

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
        """Validate the arguments at construction."""
        object.__setattr__(self, "_delay_us", duration_us(self.delay))
        if self._delay_us < 0:
            raise InvalidError("a delay must not be negative", delay=self.delay)
        align_us = None if self.align_to is None else positive_us("an alignment", self.align_to)
        object.__setattr__(self, "_align_us", align_us)
        object.__setattr__(self, "_time_domain", _domain(self.domain))

    @property
    def _clock(self) -> TimeDomain:
        return self._time_domain

    def _due(self, context: TriggerContext, element: Element) -> int:
        now = context.now(self._time_domain)
        due = (element.at if now == TIME_MIN_US else now) + self._delay_us
        return due if self._align_us is None else -(-due // self._align_us) * self._align_us


@dataclass(frozen=True)
class AfterProcessingTime(AfterDelay):
    """Fires once, ``delay`` of processing time after the first element that it sees.

    Args:
        delay: how long to wait.
        domain: always the wall clock.
        align_to: round the time up to a multiple of this duration.

    Raises:
        InvalidError: a negative delay, or a domain other than the wall clock.
    """

    delay: Duration = 0

    def __post_init__(self) -> None:
        """Validate the arguments at construction."""
        AfterDelay.__post_init__(self)
        if self._time_domain is not TimeDomain.WALL:
            raise InvalidError("processing time is wall time", domain=self.domain)


@dataclass(frozen=True)
class AtPeriod(_AtTime):
    """Fires once, at the next tick of a periodic clock.

    Inside `Repeatedly`, it emits at every tick the elements that have arrived since the last one.

    Args:
        reference: one tick of the clock: microseconds since 1970 UTC, or a ``datetime`` with a zone.
        period: the time between ticks.
        domain: on which clock.

    Raises:
        InvalidError: the period is not positive, or the reference is not a time.
    """

    reference: Instant
    period: Duration
    domain: Domain = TimeDomain.WALL
    _reference_us: int = field(init=False, repr=False, compare=False)
    _period_us: int = field(init=False, repr=False, compare=False)
    _time_domain: TimeDomain = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Validate the arguments at construction."""
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
