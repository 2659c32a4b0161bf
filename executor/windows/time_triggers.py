"""Triggers on passing time: a delay after the first element, or the next tick of a periodic clock.

All of them wait for an element first, so a window that gets no elements emits no further pane.

Watermark triggers: a window emits its contents when its input is believed to be complete.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from typing import Final, Literal, TypeAlias

from millpond.executor.time.clocks import EXACT
from millpond.executor.time.instants import Duration, Instant, duration_us, instant_us
from millpond.executor.time.observations import check_percentile
from millpond.executor.windows.composite_triggers import Repeatedly
from millpond.executor.windows.trigger import Trigger
from millpond.executor.windows.trigger_context import TriggerContext, TriggerTimer
from millpond.executor.windows.window import Element
from millpond.executor.windows.window_fns import positive_us
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


_EARLY: Final = "early"
_LATE: Final = "late"
_IS_LATE: Final = "is_late"


def _await_end(context: TriggerContext, percentile: float = EXACT) -> None:
    if context.watermark_at(percentile) < context.window.end:
        context.set_timer(context.window.end, percentile=percentile)


def _has_ended(context: TriggerContext, percentile: float = EXACT) -> bool:
    return context.watermark_at(percentile) >= context.window.end


class _AtEnd(Trigger):
    """Fires when a watermark has passed the window's end."""

    @property
    def _mark(self) -> float:
        """The percentile of the watermark to wait for."""
        raise NotImplementedError

    def on_arm(self, context: TriggerContext) -> None:
        """Set a timer at the window's end."""
        _await_end(context, self._mark)

    def on_element(self, context: TriggerContext, element: Element) -> None:  # noqa: ARG002 - any element
        """Set a timer at the window's end."""
        _await_end(context, self._mark)

    def on_elements(self, context: TriggerContext, elements: Sequence[Element]) -> None:  # noqa: ARG002 - any elements
        """Set a timer at the window's end."""
        _await_end(context, self._mark)

    def on_merge(self, context: TriggerContext) -> None:
        """Set a timer at the merged window's end."""
        _await_end(context, self._mark)

    def should_fire(self, context: TriggerContext) -> bool:
        """Whether the watermark has passed the window's end."""
        return _has_ended(context, self._mark)


@dataclass(frozen=True)
class Default(_AtEnd):
    """Fires when the watermark passes the window's end, then again for each late element."""

    @property
    def _mark(self) -> float:
        return EXACT

    @property
    def waits_for_end(self) -> bool:
        """Nothing but the watermark makes it fire."""
        return type(self) is Default

    def on_fire(self, context: TriggerContext) -> bool:
        """Never finished: late elements may follow."""
        context.delete_timer()
        return False


@dataclass(frozen=True)
class WatermarkPercentile(_AtEnd):
    """Fires once, when a percentile watermark passes the window's end.

    A percentile watermark is the event time up to which a share of the input is estimated to have
    arrived. Below 100 the pane is early, and elements that arrive after it are not late: put several
    in an `AfterEach` to emit at increasing levels of completeness.

    Args:
        percentile: above 0 and at most 100, which is the low watermark itself.

    Raises:
        InvalidError: a percentile out of bounds.

    Example:
        >>> AfterEach(WatermarkPercentile(90), Default())
        AfterEach(WatermarkPercentile(percentile=90), Default())
    """

    percentile: float = 100

    def __post_init__(self) -> None:
        """Validate the percentile at construction."""
        check_percentile(self.percentile)

    @property
    def _mark(self) -> float:
        return float(self.percentile)

    @property
    def waits_for_end(self) -> bool:
        """Nothing but its watermark makes it fire."""
        return type(self) is WatermarkPercentile

    @property
    def percentiles(self) -> frozenset[float]:
        """The percentile it waits for, unless that is 100."""
        return frozenset({self._mark} - {EXACT})

    def on_fire(self, context: TriggerContext) -> bool:
        """Finished after one firing."""
        context.delete_timer(percentile=self._mark)
        return True


@dataclass(frozen=True)
class AfterWatermark(Trigger):
    """Fires when the watermark passes the window's end, optionally also before (early) and after (late).

    The early and late triggers restart after each of their firings. Without ``late`` the trigger
    finishes with the on-time pane, and later elements are dropped.

    Args:
        early: when to emit panes before the window's end.
        late: when to emit panes with late elements.

    Example:
        >>> trigger = AfterWatermark(early=AfterProcessingTime("1m"), late=AfterCount(1))
    """

    early: Trigger | None = None
    late: Trigger | None = None

    @cached_property
    def children(self) -> Mapping[str, Trigger]:
        """The early and late triggers that were given, each repeated."""
        given = {_EARLY: self.early, _LATE: self.late}
        return {name: Repeatedly(trigger) for name, trigger in given.items() if trigger is not None}

    @property
    def waits_for_end(self) -> bool:
        """Without an early trigger nothing makes it fire before the watermark."""
        return type(self) is AfterWatermark and self.early is None

    def on_arm(self, context: TriggerContext) -> None:
        """Set a timer at the window's end, and arm the early trigger."""
        _await_end(context)
        if early := self.children.get(_EARLY):
            early.on_arm(context.child(_EARLY))

    def on_element(self, context: TriggerContext, element: Element) -> None:
        """Notify the active trigger, early or late."""
        name = self._active(context)
        if child := self.children.get(name):
            child.on_element(context.child(name), element)

    def on_elements(self, context: TriggerContext, elements: Sequence[Element]) -> None:
        """Notify the active trigger, early or late."""
        name = self._active(context)
        if child := self.children.get(name):
            child.on_elements(context.child(name), elements)

    def on_signal(self, context: TriggerContext, name: str) -> None:
        """Notify the active trigger, early or late."""
        active = _LATE if context.get(_IS_LATE) else _EARLY
        if child := self.children.get(active):
            child.on_signal(context.child(active), name)

    def _active(self, context: TriggerContext) -> str:
        if context.get(_IS_LATE):
            return _LATE
        _await_end(context)
        return _EARLY

    def on_merge(self, context: TriggerContext) -> None:
        """Merge the active triggers; the merged window is late if all its sources were.

        An on-time pane is still due for the others, at the merged window's end.
        """
        if all(source.get(_IS_LATE) for source in context.sources):
            context.set(_IS_LATE, value=True)
            name = _LATE
        else:
            name = _EARLY
            _await_end(context)
        if child := self.children.get(name):
            child.on_merge(context.child(name))

    def on_child_timer(self, context: TriggerContext, timer: TriggerTimer) -> None:
        """Deliver timers of the active trigger only: early timers mean nothing after the end."""
        active = _LATE if context.get(_IS_LATE) else _EARLY
        if timer.path == context.path or timer.path.startswith(f"{context.path}{active}/"):
            Trigger.on_child_timer(self, context, timer)

    def should_fire(self, context: TriggerContext) -> bool:
        """Whether the watermark has passed the end or, else, the active trigger would fire."""
        if context.get(_IS_LATE):
            late = self.children.get(_LATE)
            return late is None or late.should_fire(context.child(_LATE))
        early = self.children.get(_EARLY)
        return _has_ended(context) or (early is not None and early.should_fire(context.child(_EARLY)))

    def on_fire(self, context: TriggerContext) -> bool:
        """Fire the active trigger or, at the end, switch to late; finished there without a late trigger."""
        children = self.children
        if context.get(_IS_LATE):
            return _LATE not in children or children[_LATE].fire(context.child(_LATE))
        if not _has_ended(context):
            children[_EARLY].fire(context.child(_EARLY))
            return False
        if _EARLY in children:
            children[_EARLY].reset(context.child(_EARLY))
        context.delete_timer()
        context.set(_IS_LATE, value=True)
        return self.late is None

    @property
    def label(self) -> str:
        """``AfterWatermark``; the early and late triggers have labels of their own."""
        return "AfterWatermark"
