"""
Observations: what is remembered of the times of outside records once the records are gone.

A task sees a part of a superstep's records in no particular order; an observation of each part
can be summed up with those of the others. How late records come is measured against the newest
record that was *committed* before: that is what the watermark they met had been worked out from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from millpond.executor.event_time.delay_sketch import DelaySketch
from millpond.statestore.types import EventTimeMicros

__all__ = ["DEFAULT_MEMBER", "InputObservation", "TimesSeen", "Watch", "observe_times", "times_seen"]

DEFAULT_MEMBER: Final = ""
"""The member of a stream that has none: the stream itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """
    What to look at while records of a stream come in.

    Attributes:
        stream: the injected stream.
        newest: the newest time that has been committed, by member.
        with_delays: whether anybody asks how late records come.
        stamp_at: the event time that records get on arrival; ``None``: they bring their own.
    """

    stream: str
    newest: Mapping[str, EventTimeMicros] = field(default_factory=dict)
    with_delays: bool = False
    stamp_at: EventTimeMicros | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TimesSeen:
    """
    The times of some records of one member.

    Attributes:
        newest_at: the greatest of them.
        oldest_at: the least of them.
        delays: how far each lay behind what had been committed before; ``None``: nobody asked,
            or nothing had been.
        mark_at: the greatest time in the column that the source puts its own marks into, if it does.
    """

    newest_at: EventTimeMicros
    oldest_at: EventTimeMicros
    delays: DelaySketch | None = None
    mark_at: EventTimeMicros | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class InputObservation:
    """
    What was seen of one outside input: feeds the injector's low watermark.

    Attributes:
        stream: the injected stream.
        records: readable records, each counted once however many consumers it has.
        newest_at: greatest event time among them, ``None`` when there were none.
        oldest_at: least event time among them.
        delays: how far they lay behind what had been committed before, if anybody asked.
        mark_at: the greatest of the source's own marks, if it makes any.
        members: the same by member, where the stream has members.
    """

    stream: str
    records: int
    newest_at: EventTimeMicros | None
    oldest_at: EventTimeMicros | None = None
    delays: DelaySketch | None = None
    mark_at: EventTimeMicros | None = None
    members: Mapping[str, TimesSeen] = field(default_factory=dict)


def observe_times(
    watch: Watch,
    at: npt.NDArray[np.int64],
    members: Sequence[str | None] | None = None,
    *,
    records: int | None = None,
) -> InputObservation:
    """
    Sum up the times of readable records.

    Args:
        watch: what to look at.
        at: their event times.
        members: the member that each comes from, where the stream has members; ``None``: unknown.
        records: how many they count for, when that is not their number.
    """
    count = len(at) if records is None else records
    if not len(at):
        return InputObservation(stream=watch.stream, records=count, newest_at=None)
    whole = times_seen(watch, at, DEFAULT_MEMBER)
    return InputObservation(
        stream=watch.stream,
        records=count,
        newest_at=whole.newest_at,
        oldest_at=whole.oldest_at,
        delays=whole.delays,
        members={} if members is None else _by_member(watch, at, members),
    )


def times_seen(watch: Watch, at: npt.NDArray[np.int64], member: str) -> TimesSeen:
    """
    Sum up the times of one member's records, of which there is at least one.
    """
    known = watch.newest.get(member)
    delays = None
    if watch.with_delays and known is not None:
        delays = DelaySketch()
        delays.add(np.maximum(known - at, 0))
    return TimesSeen(
        newest_at=EventTimeMicros(int(at.max())), oldest_at=EventTimeMicros(int(at.min())), delays=delays
    )


def _by_member(
    watch: Watch, at: npt.NDArray[np.int64], members: Sequence[str | None]
) -> dict[str, TimesSeen]:
    names = np.array(["" if member is None else member for member in members], dtype=object)
    found = sorted({member for member in members if member is not None})
    return {name: times_seen(watch, at[names == name], name) for name in found}
