"""
More ways for an injector's low watermark to follow from its records (MillWheel §5.2, §7.2).

`Monotone` for sources in order, `ObservedPercentile` for those whose disorder is not known
beforehand, `UserWatermark` for those that the user knows better, `Perfect` for bounded ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from millpond.executor.event_time.delay_sketch import RecentDelays, check_percentile
from millpond.executor.event_time.duration import Instant, instant_us
from millpond.executor.injectors.observation import TimesSeen
from millpond.executor.injectors.policy import FollowingLogic, InjectorLogic
from millpond.statestore.errors import InvalidError
from millpond.statestore.types import EventTimeMicros

__all__ = ["MarkColumn", "Monotone", "ObservedPercentile", "Perfect", "UserWatermark", "wants_delays"]


@dataclass(frozen=True, slots=True)
class Monotone:
    """
    Records come in order of time: the watermark is the newest one's time.

    What is older than a record of an earlier superstep is late; order within one does not matter.
    """

    def start(self, saved: EventTimeMicros | None = None) -> InjectorLogic:
        """
        Make the running side; it goes on from a journaled watermark, if there is one.
        """
        return FollowingLogic(saved, 0)


@dataclass(frozen=True, slots=True)
class Perfect:
    """
    The input is bounded and all of it will be waited for: the watermark stands until its end.

    No record is ever late, and nothing that waits for event time happens before the end.
    """

    def start(self, saved: EventTimeMicros | None = None) -> InjectorLogic:
        """
        Make the running side; it goes on from a journaled watermark, if there is one.
        """
        return FollowingLogic(saved, None)


@dataclass(frozen=True, slots=True)
class ObservedPercentile:
    """
    The watermark stays as far behind the newest record as ``percentile`` of the records have come.

    How far the others lay behind is measured all the time, over the last 100,000 to 200,000
    records, so the bound follows a source that changes. About ``100 - percentile`` percent of
    the records are late.

    Args:
        percentile: above 0 and not above 100; 100 waits as long as the latest record seen.
        records_min: records that must have been measured before the watermark moves; after a
            restart they are measured anew while the journaled watermark stands.

    Raises:
        InvalidError: an argument that cannot work.
    """

    percentile: float
    records_min: int = 1_000

    with_delays = True

    def __post_init__(self) -> None:
        """
        Refuse arguments that cannot work while the caller is still near.
        """
        check_percentile(self.percentile)
        if self.records_min < 1:
            raise InvalidError("records_min is at least 1", value=self.records_min)

    def start(self, saved: EventTimeMicros | None = None) -> InjectorLogic:
        """
        Make the running side; it goes on from a journaled watermark, if there is one.
        """
        return _PercentileLogic(saved, self)


@dataclass(frozen=True, slots=True)
class MarkColumn:
    """
    The watermark is the greatest time in a column into which the source puts marks of its own.

    For Spark's file sources it is that of figure 10: files come whole, in the order of their
    modification, so with ``_metadata.file_modification_time`` in a column (or the time that a
    file was opened, if its name tells) no unfinished file is older than the mark.

    Args:
        column: a column of times, or a function of the row; rows without one say nothing.

    Raises:
        InvalidError: it is neither a name nor a function.
    """

    column: str | Callable[[Any], Any]

    def __post_init__(self) -> None:
        """
        Refuse what is no column while the caller is still near.
        """
        if not self.column or not (isinstance(self.column, str) or callable(self.column)):
            raise InvalidError("marks come from a column or a function of the row", column=self.column)

    def start(self, saved: EventTimeMicros | None = None) -> InjectorLogic:
        """
        Make the running side; it goes on from a journaled watermark, if there is one.
        """
        return _MarkLogic(saved, None)


@dataclass(frozen=True, slots=True)
class UserWatermark:
    """
    The watermark is what a function of the user's makes of what was seen.

    Args:
        function: given the `TimesSeen` of a superstep's records (``newest_at``, ``oldest_at``),
            returns a time that the watermark may move up to, or ``None`` to leave it. It runs
            on the driver, once a superstep (on Spark once a task), and may keep what it likes in
            itself: all of that is lost with the process, and the watermark is not.

    Example:
        >>> policy = UserWatermark(lambda seen: seen.oldest_at)
    """

    function: Callable[[TimesSeen], Instant | None]

    def __post_init__(self) -> None:
        """
        Refuse what is no function while the caller is still near.
        """
        if not callable(self.function):
            raise InvalidError("the watermark's function cannot be called", type=type(self.function).__name__)

    def start(self, saved: EventTimeMicros | None = None) -> InjectorLogic:
        """
        Make the running side; it goes on from a journaled watermark, if there is one.
        """
        return _UserLogic(saved, self.function)


def wants_delays(policy: object) -> bool:
    """
    Whether a policy asks how late records come; measuring it costs a sort of their times.
    """
    return bool(getattr(policy, "with_delays", False))


class _PercentileLogic(FollowingLogic):
    """
    Follows the newest record at a distance that is measured.
    """

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
    """
    Follows the source's own marks.
    """

    __slots__ = ()

    def observe(self, seen: TimesSeen) -> None:
        if seen.mark_at is not None:
            self.advance(seen.mark_at)


class _UserLogic(FollowingLogic):
    """
    Does as the user's function says.
    """

    __slots__ = ("_function",)

    def __init__(
        self, saved: EventTimeMicros | None, function: Callable[[TimesSeen], Instant | None]
    ) -> None:
        super().__init__(saved, None)
        self._function = function

    def observe(self, seen: TimesSeen) -> None:
        try:
            found = self._function(seen)
        except Exception as cause:
            raise InvalidError(f"the watermark's function raised {type(cause).__name__}: {cause}") from cause
        if found is not None:
            self.advance(instant_us(found))
