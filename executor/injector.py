"""
Injectors: outside data comes in, and with it a low watermark (MillWheel §5.2).

A policy is what the user writes down, frozen and without state; its *logic* is what runs:
told what has been consumed, it says how far event time has come, and never goes back. Logic
is rebuilt from the journaled watermark alone, so a restart loses nothing but patience.

Where the others go: observed percentiles, files (the oldest unfinished one, figure 10), the
user's own function, and partitions with an expected set are each one more policy beside
`BoundedDisorder` with its own logic; the runners know only the two protocols.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from millpond.executor.duration import Duration, duration_us
from millpond.statestore.errors import InvalidError
from millpond.statestore.types import TIME_MAX_US, TIME_MIN_US, EventTimeMicros

__all__ = ["BoundedDisorder", "InjectorLogic", "ManualWatermark", "WatermarkPolicy"]


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

    def observe(self, newest_at: EventTimeMicros) -> None:
        """
        Tell that records up to ``newest_at`` have been consumed and committed.

        To observe records before their commit gives up the guarantee that the watermark
        never passes a record that nobody has processed.
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
        >>> logic.observe(EventTimeMicros(100))
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
        return _FollowingLogic(saved, self.bound_us)


@dataclass(frozen=True, slots=True)
class ManualWatermark:
    """
    The watermark stands still until the source moves it: for sources that know, and for scripts.
    """

    def start(self, saved: EventTimeMicros | None = None) -> InjectorLogic:
        """
        Make the running side; it goes on from a journaled watermark, if there is one.
        """
        return _FollowingLogic(saved, None)


class _FollowingLogic:
    """
    Follows the newest record at a fixed distance (``None``: not at all), and promises of the source.
    """

    __slots__ = ("_bound_us", "_watermark")

    def __init__(self, saved: EventTimeMicros | None, bound_us: int | None) -> None:
        self._watermark = TIME_MIN_US if saved is None else saved
        self._bound_us = bound_us

    @property
    def watermark(self) -> EventTimeMicros:
        return self._watermark

    def observe(self, newest_at: EventTimeMicros) -> None:
        if self._bound_us is not None:
            self.advance(EventTimeMicros(newest_at - self._bound_us))

    def advance(self, at: EventTimeMicros) -> None:
        self._watermark = max(self._watermark, at)

    def finish(self) -> None:
        self._watermark = TIME_MAX_US
