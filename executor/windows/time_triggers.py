"""Triggers on the passing of time: delays, periods, and watermarks that pass the window's end.

Delays and periods wait for an element first, so a window without elements emits no further pane.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from typing import Final, Literal, TypeAlias

from millpond.executor.pipeline.checks import positive_us
from millpond.executor.time.clocks import EXACT
from millpond.executor.time.instants import Instant, instant_us
from millpond.executor.time.observations import check_declared_percentile
from millpond.executor.windows.composite_triggers import NotifyingActive, Repeatedly, check_triggers
from millpond.executor.windows.trigger import Trigger, TriggerContext
from millpond.executor.windows.window import Element
from millpond.statestore.durations import Duration, duration_us
from millpond.statestore.errors import InvalidError
from millpond.statestore.rows.row import TimeDomain
from millpond.statestore.types import TIME_MIN_US

Domain: TypeAlias = TimeDomain | Literal["event", "wall"]
"""A clock: event time (the watermark), or wall time (processing time)."""

_DUE: Final = "due"


def next_stroke(now: int, reference: int, period: int) -> int:
    """Return the first time after ``now`` that is whole periods away from ``reference``; all in one unit."""
    return now - (now - reference) % period + period


# Names of the two clocks in the patent and in other systems.
_ALIASES: Final = {
    "event_time": TimeDomain.EVENT,
    "processing_time": TimeDomain.WALL,
    "stream_time": TimeDomain.EVENT,
    "wall_time": TimeDomain.WALL,
}


def domain_of(domain: Domain) -> TimeDomain:
    name = str(domain).lower()
    try:
        return _ALIASES.get(name) or TimeDomain(name)
    except ValueError as cause:
        raise InvalidError("a trigger's time domain must be event or wall", domain=domain) from cause


class _AtTime(Trigger):
    """A trigger that fires once, at a time set by the first element; a merged window keeps the earliest time."""

    _time_domain: TimeDomain

    def _due(self, context: TriggerContext, element: Element) -> int:
        raise NotImplementedError

    def on_element(self, context: TriggerContext, element: Element) -> None:
        if context.get(_DUE) is None:
            self._wait_until(context, self._due(context, element))

    def on_merge(self, context: TriggerContext) -> None:
        times = [due for source in context.sources if (due := source.get(_DUE)) is not None]
        if times:
            self._wait_until(context, min(times))

    def _wait_until(self, context: TriggerContext, due: int) -> None:
        context.set(_DUE, due)
        context.set_timer(due, self._time_domain)

    def should_fire(self, context: TriggerContext) -> bool:
        due = context.get(_DUE)
        return due is not None and bool(context.now(self._time_domain) >= due)

    def on_fire(self, context: TriggerContext) -> bool:
        context.delete_timer(self._time_domain)
        return True


@dataclass(frozen=True)
class AfterDelay(_AtTime):
    """A trigger that fires once, ``delay`` after the window's first element was seen.

    Stream time (``"event"``) is the low watermark, as in the Dataflow patent, so a late element waits
    as long as any other. Where no watermark is known yet, stream time is the element's time. With ``align_to``
    the time is rounded up to a multiple of this duration, so that many windows fire together.
    """

    delay: Duration
    domain: Domain = TimeDomain.WALL
    align_to: Duration | None = None
    _delay_us: int = field(init=False, repr=False, compare=False)
    _align_us: int | None = field(init=False, repr=False, compare=False)
    _time_domain: TimeDomain = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_delay_us", duration_us(self.delay))
        if self._delay_us < 0:
            raise InvalidError("a delay must not be negative", delay=self.delay)
        align_us = None if self.align_to is None else positive_us("an alignment", self.align_to)
        object.__setattr__(self, "_align_us", align_us)
        object.__setattr__(self, "_time_domain", domain_of(self.domain))

    def _due(self, context: TriggerContext, element: Element) -> int:
        now = context.now(self._time_domain)
        due = (element.at if now == TIME_MIN_US else now) + self._delay_us
        return due if self._align_us is None else -(-due // self._align_us) * self._align_us


@dataclass(frozen=True)
class AfterProcessingTime(AfterDelay):
    """`AfterDelay` on the wall clock: fires once, ``delay`` after the first element that it sees."""

    delay: Duration = 0

    def __post_init__(self) -> None:
        AfterDelay.__post_init__(self)
        if self._time_domain is not TimeDomain.WALL:
            raise InvalidError("processing time is wall time", domain=self.domain)


@dataclass(frozen=True)
class AtPeriod(_AtTime):
    """A trigger that fires once, at the next tick of a periodic clock that has a tick at ``reference``.

    Inside `Repeatedly`, each tick emits the elements that have arrived since the last tick. The reference is in
    microseconds since 1970 UTC, or a ``datetime`` with a zone.
    """

    reference: Instant
    period: Duration
    domain: Domain = TimeDomain.WALL
    _reference_us: int = field(init=False, repr=False, compare=False)
    _period_us: int = field(init=False, repr=False, compare=False)
    _time_domain: TimeDomain = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        reference: int | datetime = self.reference
        object.__setattr__(self, "_reference_us", instant_us(reference))
        object.__setattr__(self, "_period_us", positive_us("a period", self.period))
        object.__setattr__(self, "_time_domain", domain_of(self.domain))

    def _due(self, context: TriggerContext, element: Element) -> int:
        if self._time_domain is TimeDomain.WALL:
            now = context.wall_time
        else:
            now = max(element.at, context.watermark)
        return next_stroke(now, self._reference_us, self._period_us)


_EARLY: Final = "early"
_LATE: Final = "late"
_IS_LATE: Final = "is_late"


def _has_ended(context: TriggerContext, percentile: float = EXACT) -> bool:
    return context.watermark_at(percentile) >= context.window.end


def _await_end(context: TriggerContext, percentile: float = EXACT) -> None:
    if not _has_ended(context, percentile):
        context.set_timer(context.window.end, percentile=percentile)


class _AtEnd(Trigger):
    """A trigger that fires when a watermark has passed the window's end."""

    @property
    def _mark(self) -> float:
        return EXACT

    def on_arm(self, context: TriggerContext) -> None:
        _await_end(context, self._mark)

    def on_element(self, context: TriggerContext, element: Element) -> None:  # noqa: ARG002 - any element
        _await_end(context, self._mark)

    def on_elements(self, context: TriggerContext, elements: Sequence[Element]) -> None:  # noqa: ARG002 - any elements
        _await_end(context, self._mark)

    def on_merge(self, context: TriggerContext) -> None:
        _await_end(context, self._mark)

    def should_fire(self, context: TriggerContext) -> bool:
        return _has_ended(context, self._mark)


@dataclass(frozen=True)
class Default(_AtEnd):
    """A trigger that fires when the watermark passes the window's end, then again for each late element."""

    @property
    def waits_for_end(self) -> bool:
        return type(self) is Default

    def on_fire(self, context: TriggerContext) -> bool:
        context.delete_timer()
        return False


@dataclass(frozen=True)
class WatermarkPercentile(_AtEnd):
    """A trigger that fires once, when a percentile watermark passes the window's end.

    A percentile watermark (above 0 and at most 100, the low watermark) is the event time up to which a share of the
    input is estimated to have arrived. Below 100 the pane is early, and elements that arrive after it are not late:
    put several in an `AfterEach` to emit at increasing levels of completeness.

    Example:
        >>> AfterEach(WatermarkPercentile(90), Default())
        AfterEach(WatermarkPercentile(percentile=90), Default())
    """

    percentile: float = 100

    def __post_init__(self) -> None:
        check_declared_percentile(self.percentile)

    @property
    def _mark(self) -> float:
        return float(self.percentile)

    @property
    def waits_for_end(self) -> bool:
        return type(self) is WatermarkPercentile

    @property
    def percentiles(self) -> frozenset[float]:
        return frozenset({self._mark} - {EXACT})

    def on_fire(self, context: TriggerContext) -> bool:
        context.delete_timer(percentile=self._mark)
        return True


@dataclass(frozen=True)
class AfterWatermark(NotifyingActive):
    """A trigger that fires when the watermark passes the window's end, optionally also before (early) and after (late).

    The early and late triggers restart after each of their firings. Without ``late`` the trigger
    finishes with the on-time pane, and later elements are dropped.

    Example:
        >>> trigger = AfterWatermark(early=AfterProcessingTime("1m"), late=AfterCount(1))
    """

    early: Trigger | None = None
    late: Trigger | None = None

    def __post_init__(self) -> None:
        check_triggers(self, *(trigger for trigger in (self.early, self.late) if trigger is not None))

    @cached_property
    def children(self) -> Mapping[str, Trigger]:
        given = {_EARLY: self.early, _LATE: self.late}
        return {name: Repeatedly(trigger) for name, trigger in given.items() if trigger is not None}

    @property
    def waits_for_end(self) -> bool:
        return type(self) is AfterWatermark and self.early is None

    def active(self, context: TriggerContext) -> str:
        return _LATE if context.get(_IS_LATE) else _EARLY

    def on_arm(self, context: TriggerContext) -> None:
        _await_end(context)
        if early := self.children.get(_EARLY):
            early.on_arm(context.child(_EARLY))

    def on_element(self, context: TriggerContext, element: Element) -> None:
        self._await_end_if_early(context)
        NotifyingActive.on_element(self, context, element)

    def on_elements(self, context: TriggerContext, elements: Sequence[Element]) -> None:
        self._await_end_if_early(context)
        NotifyingActive.on_elements(self, context, elements)

    def _await_end_if_early(self, context: TriggerContext) -> None:
        if not context.get(_IS_LATE):
            _await_end(context)

    def on_merge(self, context: TriggerContext) -> None:
        # Unless all sources are late, an on-time pane is still due at the merged window's end.
        if all(source.get(_IS_LATE) for source in context.sources):
            context.set(_IS_LATE, value=True)
        self._await_end_if_early(context)
        name = self.active(context)
        if child := self.children.get(name):
            child.on_merge(context.child(name))

    def should_fire(self, context: TriggerContext) -> bool:
        if context.get(_IS_LATE):
            late = self.children.get(_LATE)
            return late is None or late.should_fire(context.child(_LATE))
        early = self.children.get(_EARLY)
        return _has_ended(context) or (early is not None and early.should_fire(context.child(_EARLY)))

    def on_fire(self, context: TriggerContext) -> bool:
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
        # The early and late triggers have labels, too.
        return "AfterWatermark"
