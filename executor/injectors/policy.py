"""Watermark policies: how the low watermark of outside data follows from its records (MillWheel §5.2).

A policy is the user's configuration: frozen, without state. Its *logic* runs: it observes the consumed
records and gives the stream's low watermark, which never falls. Logic is rebuilt from the journaled
watermark alone, so a restart can delay the watermark and never moves it back.

`policies` has the policies that need more than a bound; the runners know only the two protocols.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from millpond.executor.event_time.duration import Duration, duration_us
from millpond.executor.injectors.observation import TimesSeen
from millpond.statestore.errors import InvalidError
from millpond.statestore.types import TIME_MAX_US, TIME_MIN_US, EventTimeMicros


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
