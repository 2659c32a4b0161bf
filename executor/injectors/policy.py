"""
Injectors: outside data comes in, and with it a low watermark (MillWheel §5.2).

A policy is what the user writes down, frozen and without state; its *logic* is what runs:
told what has been consumed, it says how far event time has come, and never goes back. Logic
is rebuilt from the journaled watermark alone, so a restart loses nothing but patience.

`injector_policies` has the policies that need more than a bound; the runners know only the
two protocols.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from millpond.executor.event_time.duration import Duration, duration_us
from millpond.executor.injectors.observation import TimesSeen
from millpond.statestore.errors import InvalidError
from millpond.statestore.types import TIME_MAX_US, TIME_MIN_US, EventTimeMicros

__all__ = ["BoundedDisorder", "FollowingLogic", "InjectorLogic", "ManualWatermark", "WatermarkPolicy"]


class InjectorLogic(Protocol):
    """
    The running side of a watermark policy, one per injected stream.
    """

    @property
    def watermark(self) -> EventTimeMicros:
        """
        Lower bound on the times of records still to come; never falls.
        """
        ...

    def observe(self, seen: TimesSeen) -> None:
        """
        Tell of records that are consumed with the commit at hand.

        What the watermark becomes counts only once they are committed: before, it could pass
        a record that nobody has processed.
        """
        ...

    def advance(self, at: EventTimeMicros) -> None:
        """
        Let the source itself promise that nothing older than ``at`` will come.

        What comes nevertheless is late.
        """
        ...

    def finish(self) -> None:
        """
        Tell that the input has ended: every record that still comes is late.
        """
        ...


@runtime_checkable
class WatermarkPolicy(Protocol):
    """
    How an injected stream's low watermark follows from its records: configuration without state.
    """

    def start(self, saved: EventTimeMicros | None = None) -> InjectorLogic:
        """
        Make the running side; it goes on from a journaled watermark, if there is one.
        """
        ...


@dataclass(frozen=True, slots=True)
class BoundedDisorder:
    """
    No record is more than ``bound`` older than the newest one before it; what is older is late.

    Args:
        bound: microseconds, text such as ``"30s"``, or a `timedelta`; not negative. A longer
            bound makes fewer records late, and every window and timer wait longer.

    Example:
        >>> logic = BoundedDisorder("10us").start()
        >>> logic.observe(TimesSeen(newest_at=EventTimeMicros(100), oldest_at=EventTimeMicros(95)))
        >>> logic.watermark
        90

    Raises:
        InvalidError: the bound is no duration or negative.
    """

    bound: Duration

    def __post_init__(self) -> None:
        """
        Refuse a bound that cannot work while the caller is still near.
        """
        if self.bound_us < 0:
            raise InvalidError("the bound on disorder is negative", bound=self.bound)

    @property
    def bound_us(self) -> int:
        """
        The bound in microseconds.
        """
        return duration_us(self.bound)

    def start(self, saved: EventTimeMicros | None = None) -> InjectorLogic:
        """
        Make the running side; it goes on from a journaled watermark, if there is one.
        """
        return FollowingLogic(saved, self.bound_us)


@dataclass(frozen=True, slots=True)
class ManualWatermark:
    """
    The watermark stands still until the source moves it: for sources that know, and for scripts.
    """

    def start(self, saved: EventTimeMicros | None = None) -> InjectorLogic:
        """
        Make the running side; it goes on from a journaled watermark, if there is one.
        """
        return FollowingLogic(saved, None)


class FollowingLogic:
    """
    Follows the newest record at a fixed distance (``None``: not at all), and promises of the source.
    """

    __slots__ = ("_bound_us", "_watermark")

    def __init__(self, saved: EventTimeMicros | None, bound_us: int | None) -> None:
        self._watermark = TIME_MIN_US if saved is None else saved
        self._bound_us = bound_us

    @property
    def watermark(self) -> EventTimeMicros:
        """
        How far event time has come.
        """
        return self._watermark

    def observe(self, seen: TimesSeen) -> None:
        """
        Move on with the newest record, unless this watermark does not follow records.
        """
        if self._bound_us is not None:
            self.advance(EventTimeMicros(seen.newest_at - self._bound_us))

    def advance(self, at: EventTimeMicros) -> None:
        """
        Move up to ``at``; never back.
        """
        self._watermark = max(self._watermark, at)

    def finish(self) -> None:
        """
        Move after all time.
        """
        self._watermark = TIME_MAX_US
