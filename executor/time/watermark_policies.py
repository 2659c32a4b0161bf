"""Watermark policies: how the low watermark of outside data follows from its records (MillWheel §5.2).

A policy is the user's configuration: frozen, without state. Its *logic* runs: it observes the consumed
records and gives the stream's low watermark, which never falls. Logic is rebuilt from the journaled
watermark alone, so a restart can delay the watermark and never moves it back.

`policies` has the policies that need more than a bound; the runners know only the two protocols.

Further watermark policies (MillWheel §5.2, §7.2).

`Monotone` suits ordered sources, `ObservedPercentile` sources of unknown disorder, `MarkColumn` sources
that announce their own progress, `UserWatermark` those that a function of the user's judges best, and
`Perfect` bounded input.

Ingress time: the event time of a record is the time of its arrival (windowing patent, §"arrival time").

The injector stamps all records of a superstep with one time, no earlier than its own watermark. The
superstep commits the stamp: a task that runs again uses the same one, and a superstep that is lost gets a
new stamp before any consumer has seen the first. Between supersteps the watermark follows the wall clock,
with or without records, so it is exact: no record is ever late, and a window by ingress time is complete
when the clock has passed its end.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from millpond.executor.time.instants import Duration, Instant, duration_us, instant_us
from millpond.executor.time.observations import RecentDelays, TimesSeen, check_percentile
from millpond.statestore.errors import InvalidError
from millpond.statestore.types import TIME_MAX_US, TIME_MIN_US, EventTimeMicros, WallTimeMicros


class InjectorLogic(Protocol):
    """The running side of a `WatermarkPolicy`, one per injected stream; used by one thread at a time."""

    @property
    def watermark(self) -> EventTimeMicros:
        """The lower bound of the event times still to come, in microseconds; it never falls."""
        ...

    def observe(self, seen: TimesSeen) -> None:
        """Note the times of records that the current commit consumes.

        The engine publishes the resulting watermark only after that commit: earlier, it could pass a
        record that has not been processed.

        Args:
            seen: the times of the superstep's records.
        """
        ...

    def advance(self, at: EventTimeMicros) -> None:
        """Raise the watermark to ``at``, because the source promises no older record.

        An older record that arrives anyway is late. A time before the current watermark has no effect.
        """
        ...

    def finish(self) -> None:
        """Move the watermark to the end of time, because the input has ended: any further record is late."""
        ...


@runtime_checkable
class WatermarkPolicy(Protocol):
    """How an injected stream's low watermark follows from its records: configuration without state.

    Implement it for a policy of your own; `UserWatermark` is enough if a function can decide.
    """

    def start(self, saved: EventTimeMicros | None = None) -> InjectorLogic:
        """Create the running logic.

        Args:
            saved: the watermark that the store journaled last, in microseconds, from which the logic
                continues; ``None`` on the first run.
        """
        ...


@dataclass(frozen=True, slots=True)
class BoundedDisorder:
    """Records are at most ``bound`` out of order: the watermark stays ``bound`` behind the newest record.

    A record before the watermark is late.

    Args:
        bound: a duration that is not negative: microseconds, text such as ``"30s"``, or a
            `timedelta`. A longer bound makes fewer records late and delays every window and timer.

    Example:
        >>> logic = BoundedDisorder("10us").start()
        >>> logic.observe(TimesSeen(newest_at=EventTimeMicros(100), oldest_at=EventTimeMicros(95)))
        >>> logic.watermark
        90

    Raises:
        InvalidError: ``bound`` is not a duration, or is negative.
    """

    bound: Duration

    def __post_init__(self) -> None:
        """Refuse an invalid bound."""
        if self.bound_us < 0:
            raise InvalidError("the bound on disorder is negative", bound=self.bound)

    @property
    def bound_us(self) -> int:
        """The bound in microseconds."""
        return duration_us(self.bound)

    def start(self, saved: EventTimeMicros | None = None) -> InjectorLogic:
        """Create the running logic, which continues from the watermark ``saved`` if there is one."""
        return FollowingLogic(saved, self.bound_us)


@dataclass(frozen=True, slots=True)
class ManualWatermark:
    """The watermark moves only when the source or the user moves it, with ``run.advance_watermark``.

    It suits sources that know their own progress, and tests.
    """

    def start(self, saved: EventTimeMicros | None = None) -> InjectorLogic:
        """Create the running logic, which continues from the watermark ``saved`` if there is one."""
        return FollowingLogic(saved, None)


class FollowingLogic:
    """Follows the newest record at a fixed distance, and what `advance` is told.

    Args:
        saved: the watermark to continue from; ``None``: the beginning of time.
        bound_us: the distance in microseconds; ``None`` ignores records.
    """

    __slots__ = ("_bound_us", "_watermark")

    def __init__(self, saved: EventTimeMicros | None, bound_us: int | None) -> None:
        self._watermark = TIME_MIN_US if saved is None else saved
        self._bound_us = bound_us

    @property
    def watermark(self) -> EventTimeMicros:
        """The current watermark."""
        return self._watermark

    def observe(self, seen: TimesSeen) -> None:
        """Follow the newest record, unless this watermark ignores records."""
        if self._bound_us is not None:
            self.advance(EventTimeMicros(seen.newest_at - self._bound_us))

    def advance(self, at: EventTimeMicros) -> None:
        """Raise the watermark to ``at``; never lower it."""
        self._watermark = max(self._watermark, at)

    def finish(self) -> None:
        """Move to the end of time."""
        self._watermark = TIME_MAX_US


@dataclass(frozen=True, slots=True)
class Monotone:
    """Records arrive in order of event time: the watermark is the time of the newest record.

    A record older than one of an earlier superstep is late; order within a superstep does not matter.
    """

    def start(self, saved: EventTimeMicros | None = None) -> InjectorLogic:
        """Create the running logic, which continues from the watermark ``saved`` if there is one."""
        return FollowingLogic(saved, 0)


@dataclass(frozen=True, slots=True)
class Perfect:
    """The input is bounded: the watermark stays at the beginning of time until the input ends.

    No record is ever late. Event timers fire and windows close only at the end.
    """

    def start(self, saved: EventTimeMicros | None = None) -> InjectorLogic:
        """Create the running logic, which continues from the watermark ``saved`` if there is one."""
        return FollowingLogic(saved, None)


@dataclass(frozen=True, slots=True)
class ObservedPercentile:
    """The watermark's distance behind the newest record is a percentile of the observed delays.

    Delays are measured over the last 100,000 to 200,000 records, so the distance adapts to a source that
    changes. About ``100 - percentile`` percent of the records are late.

    Args:
        percentile: above 0 and at most 100; 100 waits as long as the largest observed delay.
        records_min: the number of records to measure before the watermark moves. After a restart the
            journaled watermark stays until that many have been measured again.

    Raises:
        InvalidError: an argument is out of range.

    Example:
        ``pipeline.inject("clicks", key="user", at="time", watermark=ObservedPercentile(99.9))``
    """

    percentile: float
    records_min: int = 1_000

    with_delays = True

    def __post_init__(self) -> None:
        """Refuse arguments that are out of range."""
        check_percentile(self.percentile)
        if self.records_min < 1:
            raise InvalidError("records_min must be at least 1", value=self.records_min)

    def start(self, saved: EventTimeMicros | None = None) -> InjectorLogic:
        """Create the running logic, which continues from the watermark ``saved`` if there is one."""
        return _PercentileLogic(saved, self)


@dataclass(frozen=True, slots=True)
class MarkColumn:
    """The watermark is the greatest time in a column that the source fills with marks of its progress.

    This gives Spark's file sources the watermark of MillWheel's figure 10: files arrive whole, in order
    of modification, so with ``_metadata.file_modification_time`` in the column (or the time at which the
    file was opened, if its name has it) no unfinished file is older than the mark. Where the stream has
    members, each has the marks of its own rows, and the watermark is the least of theirs.

    Args:
        column: the name of a column of times, or a function of the row; a row without a time does not
            move the watermark.

    Raises:
        InvalidError: ``column`` is neither a name nor a function.
    """

    column: str | Callable[[Any], Any]

    def __post_init__(self) -> None:
        """Refuse an argument that is neither a name nor a function."""
        if not self.column or not (isinstance(self.column, str) or callable(self.column)):
            raise InvalidError("marks come from a column or a function of the row", column=self.column)

    def start(self, saved: EventTimeMicros | None = None) -> InjectorLogic:
        """Create the running logic, which continues from the watermark ``saved`` if there is one."""
        return _MarkLogic(saved, None)


@dataclass(frozen=True, slots=True)
class UserWatermark:
    """The watermark is computed by a function of the user's.

    Args:
        function: takes the `TimesSeen` of a superstep's records (``newest_at``, ``oldest_at``) and
            returns the time to raise the watermark to, or ``None`` to leave it. It runs on the
            driver, once per superstep (on Spark once per task). It may keep state of its own, which is
            lost with the process; the watermark is not.

    Raises:
        InvalidError: ``function`` is not callable.

    Example:
        >>> policy = UserWatermark(lambda seen: seen.oldest_at)
    """

    function: Callable[[TimesSeen], Instant | None]

    def __post_init__(self) -> None:
        """Refuse an argument that is not callable."""
        if not callable(self.function):
            raise InvalidError("the watermark's function is not callable", type=type(self.function).__name__)

    def start(self, saved: EventTimeMicros | None = None) -> InjectorLogic:
        """Create the running logic, which continues from the watermark ``saved`` if there is one."""
        return _UserLogic(saved, self.function)


def wants_delays(policy: object) -> bool:
    """Whether a policy needs the delays of records, which cost a sort of their times to measure."""
    return bool(getattr(policy, "with_delays", False))


class _PercentileLogic(FollowingLogic):
    """Follows the newest record at a measured distance."""

    __slots__ = ("_delays", "_newest_at", "_policy")

    def __init__(self, saved: EventTimeMicros | None, policy: ObservedPercentile) -> None:
        super().__init__(saved, None)
        self._policy = policy
        self._delays = RecentDelays()
        self._newest_at: int | None = None

    def observe(self, seen: TimesSeen) -> None:
        if seen.delays is not None:
            self._delays.merge(seen.delays)
        self._newest_at = seen.newest_at if self._newest_at is None else max(self._newest_at, seen.newest_at)
        if len(self._delays) >= self._policy.records_min:
            self.advance(EventTimeMicros(self._newest_at - self._delays.at(self._policy.percentile)))


class _MarkLogic(FollowingLogic):
    """Follows the marks of the source."""

    __slots__ = ()

    def observe(self, seen: TimesSeen) -> None:
        if seen.mark_at is not None:
            self.advance(seen.mark_at)


class _UserLogic(FollowingLogic):
    """Follows the user's function."""

    __slots__ = ("_function",)

    def __init__(
        self, saved: EventTimeMicros | None, function: Callable[[TimesSeen], Instant | None]
    ) -> None:
        super().__init__(saved, None)
        self._function = function

    def observe(self, seen: TimesSeen) -> None:
        try:
            instant = self._function(seen)
        except Exception as cause:
            raise InvalidError(f"the watermark's function raised {type(cause).__name__}: {cause}") from cause
        if instant is not None:
            self.advance(instant_us(instant))


@dataclass(frozen=True, slots=True)
class IngressTime:
    """As ``at`` of `Pipeline.inject`: the event time of a record is the time of its arrival.

    It brings its own watermark, which follows the wall clock. If the clock is set back, event time stands
    still until the clock has caught up.

    Example:
        ``pipeline.inject("clicks", key="user", at=IngressTime())``
    """

    def start(self, saved: EventTimeMicros | None = None) -> InjectorLogic:
        """Create the running logic, which continues from the watermark ``saved`` if there is one."""
        return FollowingLogic(saved, 0)


def stamp_of(now: WallTimeMicros, watermark: EventTimeMicros) -> EventTimeMicros:
    """The event time of records that arrive now: never before the watermark, unless the input has ended."""
    return EventTimeMicros(now) if watermark == TIME_MAX_US else EventTimeMicros(max(now, watermark))
