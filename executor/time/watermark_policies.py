"""Watermark policies: how the low watermark of outside data follows from its records (MillWheel §5.2, §7.2).

A policy is the user's frozen configuration. Its *logic* runs: it observes the committed records and gives the
stream's low watermark, which never falls. Logic restarts from the journaled watermark alone, so a restart can
delay the watermark but never moves it back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from millpond.executor.time.instants import Instant, instant_us
from millpond.executor.time.observations import RecentDelays, TimesSeen, check_declared_percentile
from millpond.statestore.arguments import check_count
from millpond.statestore.durations import Duration, duration_us
from millpond.statestore.errors import InvalidError
from millpond.statestore.types import TIME_MAX_US, TIME_MIN_US, EventTimeMicros, WallTimeMicros


class InjectorLogic(Protocol):
    """The running side of a `WatermarkPolicy`: one object per injected stream, used by one thread at a time."""

    @property
    def watermark(self) -> EventTimeMicros:
        """The lower bound of the event times still to come, in microseconds; it never falls."""

    def observe(self, seen: TimesSeen) -> None:
        """Observe the times of the records that the current commit consumes.

        The engine publishes the resulting watermark only after that commit. Earlier, the watermark could pass
        a record that is not processed yet.

        Args:
            seen: the times of the superstep's records.
        """

    def advance(self, at: EventTimeMicros) -> None:
        """Raise the watermark to ``at``, because the source promises no older record.

        An older record that arrives anyway is late. A time before the current watermark has no effect.
        """

    def finish(self) -> None:
        """Move the watermark to the end of time, because the input has ended: any further record is late."""


@runtime_checkable
class WatermarkPolicy(Protocol):
    """The protocol of watermark policies: configuration that creates the running logic of one stream.

    Implement it for a policy that needs its own state. `UserWatermark` is enough if a function can decide.
    """

    def start(self, saved: EventTimeMicros | None = None) -> InjectorLogic:
        """Create the running logic.

        Args:
            saved: the last journaled watermark in microseconds, from which the logic continues; ``None`` on
                the first run.
        """


@dataclass(frozen=True, slots=True)
class BoundedDisorder:
    """A watermark that stays ``bound`` behind the newest record, for sources whose disorder is known.

    A record before the watermark is late.

    Args:
        bound: a non-negative duration, such as ``"30s"`` or a `timedelta`. A longer bound makes fewer records late
            and delays every window and timer.

    Raises:
        InvalidError: ``bound`` is not a duration, or is negative.

    Example:
        >>> logic = BoundedDisorder("10us").start()
        >>> logic.observe(TimesSeen(newest_at=EventTimeMicros(100), oldest_at=EventTimeMicros(95)))
        >>> logic.watermark
        90
    """

    bound: Duration

    def __post_init__(self) -> None:
        if self.bound_us < 0:
            raise InvalidError("the bound on disorder must not be negative", bound=self.bound)

    @property
    def bound_us(self) -> int:
        """The bound in microseconds."""
        return duration_us(self.bound)

    def start(self, saved: EventTimeMicros | None = None) -> InjectorLogic:
        """Create the running logic, which continues from the watermark ``saved`` if there is one."""
        return FollowingLogic(saved, self.bound_us)


@dataclass(frozen=True, slots=True)
class ManualWatermark:
    """A watermark that moves only with ``run.advance_watermark``, for sources that know their own progress."""

    def start(self, saved: EventTimeMicros | None = None) -> InjectorLogic:
        """Create the running logic, which continues from the watermark ``saved`` if there is one."""
        return FollowingLogic(saved, None)


class FollowingLogic:
    """Logic that stays ``bound_us`` behind the newest record and obeys `advance`; ``None`` ignores records."""

    __slots__ = ("_bound_us", "watermark")

    def __init__(self, saved: EventTimeMicros | None, bound_us: int | None) -> None:
        self.watermark: EventTimeMicros = TIME_MIN_US if saved is None else saved
        self._bound_us = bound_us

    def observe(self, seen: TimesSeen) -> None:
        if self._bound_us is not None:
            self.advance(EventTimeMicros(seen.newest_at - self._bound_us))

    def advance(self, at: EventTimeMicros) -> None:
        self.watermark = max(self.watermark, at)

    def finish(self) -> None:
        self.watermark = TIME_MAX_US


@dataclass(frozen=True, slots=True)
class Monotone:
    """A watermark at the newest record, for sources that deliver in order of event time.

    A record older than one of an earlier superstep is late; order within a superstep does not matter.
    """

    def start(self, saved: EventTimeMicros | None = None) -> InjectorLogic:
        """Create the running logic, which continues from the watermark ``saved`` if there is one."""
        return FollowingLogic(saved, 0)


@dataclass(frozen=True, slots=True)
class Perfect:
    """A watermark that stays at the beginning of time until the input ends, for bounded input.

    No record is ever late. Event timers fire and windows close only at the end.
    """

    def start(self, saved: EventTimeMicros | None = None) -> InjectorLogic:
        """Create the running logic, which continues from the watermark ``saved`` if there is one."""
        return FollowingLogic(saved, None)


@dataclass(frozen=True, slots=True)
class ObservedPercentile:
    """A watermark behind the newest record by a percentile of the delays, for sources of unknown disorder.

    Delays are measured over the last 100,000 to 200,000 records, so the distance adapts to a changing source.
    About ``100 - percentile`` percent of the records are late.

    Args:
        percentile: above 0 and at most 100; 100 waits as long as the largest observed delay.
        records_min: the number of records to measure before the watermark moves. After a restart the
            journaled watermark stays until that many records are measured again.

    Raises:
        InvalidError: an argument is out of range.

    Example:
        ``pipeline.inject("clicks", key="user", at="time", watermark=ObservedPercentile(99.9))``
    """

    percentile: float
    records_min: int = 1_000

    with_delays = True  # measured only on request: see `wants_delays`

    def __post_init__(self) -> None:
        check_declared_percentile(self.percentile)
        check_count("records_min", self.records_min)

    def start(self, saved: EventTimeMicros | None = None) -> InjectorLogic:
        """Create the running logic, which continues from the watermark ``saved`` if there is one."""
        return _PercentileLogic(saved, self)


@dataclass(frozen=True, slots=True)
class MarkColumn:
    """A watermark at the greatest time in a column that the source fills with marks of its own progress.

    Spark's file sources get the watermark of MillWheel's figure 10 this way. Files arrive whole, in order of
    modification, so with ``_metadata.file_modification_time`` (or the opening time in the file's name) as the
    mark, no unfinished file is older than the mark. In a stream with members, each member has the marks of
    its own rows, and the watermark is the least of theirs.

    Args:
        column: the name of a column of times, or a function of the row. A row without a time does not move
            the watermark.

    Raises:
        InvalidError: ``column`` is neither a name nor a function.
    """

    column: str | Callable[[Any], Any]

    def __post_init__(self) -> None:
        if not self.column or not (isinstance(self.column, str) or callable(self.column)):
            raise InvalidError(
                "marks must come from a column's name or a function of the row", column=self.column
            )

    def start(self, saved: EventTimeMicros | None = None) -> InjectorLogic:
        """Create the running logic, which continues from the watermark ``saved`` if there is one."""
        return _MarkLogic(saved, None)


@dataclass(frozen=True, slots=True)
class UserWatermark:
    """A watermark that a function computes from the times of each superstep's records.

    Args:
        function: takes the `TimesSeen` of a superstep's records (``newest_at``, ``oldest_at``) and returns
            the time to raise the watermark to, or ``None`` to leave the watermark. The function runs on the
            driver, once per superstep (on Spark once per task). Its own state is lost with the process; the
            watermark is not.

    Raises:
        InvalidError: ``function`` is not callable.

    Example:
        >>> policy = UserWatermark(lambda seen: seen.oldest_at)
    """

    function: Callable[[TimesSeen], Instant | None]

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise InvalidError("the watermark's function must be callable", type=type(self.function).__name__)

    def start(self, saved: EventTimeMicros | None = None) -> InjectorLogic:
        """Create the running logic, which continues from the watermark ``saved`` if there is one."""
        return _UserLogic(saved, self.function)


def wants_delays(policy: object) -> bool:
    """Return True if the policy needs record delays, which cost a sort of their times to measure."""
    return bool(getattr(policy, "with_delays", False))


class _PercentileLogic(FollowingLogic):
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
    __slots__ = ()

    def observe(self, seen: TimesSeen) -> None:
        if seen.mark_at is not None:
            self.advance(seen.mark_at)


class _UserLogic(FollowingLogic):
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
    """Event time is arrival time: pass it as ``at`` of `Pipeline.inject` (windowing patent, "arrival time").

    The stream's watermark follows the wall clock, with or without records, so no record is ever late. A
    window by arrival time is complete when the clock has passed its end. If the clock is set back, event time
    stands still until the clock has caught up.

    Example:
        ``pipeline.inject("clicks", key="user", at=IngressTime())``
    """

    def start(self, saved: EventTimeMicros | None = None) -> InjectorLogic:
        """Create the running logic, which continues from the watermark ``saved`` if there is one."""
        return FollowingLogic(saved, 0)


def stamp_of(now: WallTimeMicros, watermark: EventTimeMicros) -> EventTimeMicros:
    """Return the event time of records that arrive now, never before the watermark of an open input.

    The superstep commits the stamp, so a retried task uses the same one.
    """
    return EventTimeMicros(now) if watermark == TIME_MAX_US else EventTimeMicros(max(now, watermark))
