"""
Ingress time: records get the time of their arrival as event time (windowing patent, §"arrival time").

The injector stamps a superstep's records with one time, no earlier than its own watermark, and
the stamp is part of what the superstep commits: a task that runs again finds the same one, and
a superstep that is lost is stamped anew, before anybody has seen the first stamp. The watermark
follows the clock on the wall between supersteps, silence or not, so it is never a guess: nothing
is ever late, and a window by ingress time is complete when the clock has passed its end.
"""

from __future__ import annotations

from dataclasses import dataclass

from millpond.executor.injectors.policy import FollowingLogic, InjectorLogic
from millpond.statestore.types import TIME_MAX_US, EventTimeMicros, WallTimeMicros

__all__ = ["IngressTime", "stamp_of"]


@dataclass(frozen=True, slots=True)
class IngressTime:
    """
    As ``at`` of `Pipeline.inject`: event time is the time of arrival.

    It brings its own watermark. Clocks that are set back are borne: time stands until they
    have caught up.

    Example:
        ``pipeline.inject("clicks", key="user", at=IngressTime())``
    """

    def start(self, saved: EventTimeMicros | None = None) -> InjectorLogic:
        """
        Make the running side of the watermark; it goes on from a journaled one.
        """
        return FollowingLogic(saved, 0)


def stamp_of(now: WallTimeMicros, watermark: EventTimeMicros) -> EventTimeMicros:
    """
    The event time of what arrives now: never behind the watermark, unless the input had ended.
    """
    return EventTimeMicros(now) if watermark == TIME_MAX_US else EventTimeMicros(max(now, watermark))
