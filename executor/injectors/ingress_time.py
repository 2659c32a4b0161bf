"""Ingress time: the event time of a record is the time of its arrival (windowing patent, §"arrival time").

The injector stamps all records of a superstep with one time, no earlier than its own watermark. The
superstep commits the stamp: a task that runs again uses the same one, and a superstep that is lost gets a
new stamp before any consumer has seen the first. Between supersteps the watermark follows the wall clock,
with or without records, so it is exact: no record is ever late, and a window by ingress time is complete
when the clock has passed its end.
"""

from __future__ import annotations

from dataclasses import dataclass

from millpond.executor.injectors.policy import FollowingLogic, InjectorLogic
from millpond.statestore.types import TIME_MAX_US, EventTimeMicros, WallTimeMicros


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
