"""Observations: summaries of the event times of outside records, from which watermarks are computed.

A task sees part of a superstep's records in no particular order; the observations of all parts are merged.
A record's delay is measured against the newest record *committed* before, because the watermark that the
record met had been computed from it.

Delay sketches: how far behind the newest record later records come, at any percentile.

A t-digest of Apache DataSketches (the ``datasketches`` wheel, from the project that Druid and
Spark take their sketches from): 5 KB whatever has been seen, sharpest at the tails, where
marks such as 99 lie, mergeable across tasks, and, unlike the KLL sketches of the same library, without
randomness, so that a simulation repeats itself. It stands in for the exact distribution that
MillWheel §7.2 needs for percentile low watermarks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from millpond.statestore.errors import InvalidError
from millpond.statestore.types import EventTimeMicros, quickly_pickled

_ACCURACY: Final = 200
_GENERATION: Final = 100_000
"""Delays after which the older half is forgotten, so that a source may change its habits."""


def check_percentile(percentile: float) -> float:
    """Refuse what is no percentile: it must lie above 0 and not above 100.

    Raises:
        InvalidError: it does not.
    """
    if isinstance(percentile, bool) or not isinstance(percentile, int | float) or not 0 < percentile <= 100:
        raise InvalidError("a percentile lies above 0 and not above 100", percentile=percentile)
    return float(percentile)


class DelaySketch:
    """The distribution of some delays in microseconds; travels from tasks to the driver."""

    __slots__ = ("_digest",)

    def __init__(self, serialized: bytes | None = None) -> None:
        from datasketches import tdigest_double

        self._digest = (
            tdigest_double(_ACCURACY) if serialized is None else tdigest_double.deserialize(serialized)
        )

    def __reduce__(self) -> tuple[type[DelaySketch], tuple[bytes]]:
        """Travel as the library's own bytes."""
        return DelaySketch, (self._digest.serialize(),)

    def __len__(self) -> int:
        return int(self._digest.get_total_weight())

    def add(self, delays: npt.NDArray[np.int64]) -> None:
        """Take in a column of delays."""
        self._digest.update(delays.astype(np.float64))

    def merge(self, other: DelaySketch) -> None:
        """Take in what another sketch has seen."""
        self._digest.merge(other._digest)

    def at(self, percentile: float) -> int:
        """The delay that ``percentile`` percent of the records do not exceed; 0 before the first record."""
        if not len(self):
            return 0
        delay: float = self._digest.get_quantile(percentile / 100)
        return round(delay)


class RecentDelays:
    """The delays of the last 100,000 to 200,000 records: two sketches, the older one forgotten in turn."""

    __slots__ = ("_newer", "_older")

    def __init__(self) -> None:
        self._older: DelaySketch | None = None
        self._newer: DelaySketch | None = None

    def __len__(self) -> int:
        return sum(len(sketch) for sketch in (self._older, self._newer) if sketch is not None)

    def merge(self, seen: DelaySketch) -> None:
        """Take in the delays of a superstep."""
        if self._newer is None:
            self._newer = DelaySketch()
        self._newer.merge(seen)
        if len(self._newer) >= _GENERATION:
            self._older, self._newer = self._newer, None

    def at(self, percentile: float) -> int:
        """The delay that ``percentile`` percent of the recent records do not exceed; 0 when there are none."""
        both = DelaySketch()
        for sketch in (self._older, self._newer):
            if sketch is not None:
                both.merge(sketch)
        return both.at(percentile)


DEFAULT_MEMBER: Final = ""
"""The member of a stream that has none: the stream itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """What to observe in the records of a stream.

    Attributes:
        stream: the injected stream.
        newest: the newest committed time, by member.
        with_delays: whether to measure the delays of records.
        stamp_at: the event time to give to records; ``None`` if they carry their own.
    """

    stream: str
    newest: Mapping[str, EventTimeMicros] = field(default_factory=dict)
    with_delays: bool = False
    stamp_at: EventTimeMicros | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TimesSeen:
    """The event times of some records of one member, in microseconds since 1970 UTC.

    Attributes:
        newest_at: the greatest event time.
        oldest_at: the least event time.
        delays: how far each record lay behind the newest committed before; ``None`` if delays are not
            measured, or there was no record before.
        mark_at: the greatest mark of the source; ``None`` if it makes none.
    """

    newest_at: EventTimeMicros
    oldest_at: EventTimeMicros
    delays: DelaySketch | None = None
    mark_at: EventTimeMicros | None = None


@quickly_pickled
@dataclass(frozen=True, slots=True, kw_only=True)
class InputObservation:
    """The observation of one outside input, from which the injector's low watermark follows.

    Attributes:
        stream: the injected stream.
        records: the number of readable records, each counted once for all its consumers.
        newest_at: the greatest event time; ``None`` without a record.
        oldest_at: the least event time; ``None`` without a record.
        delays: how far the records lay behind the newest committed before, if that is measured.
        mark_at: the greatest mark of the source, if it makes any.
        members: the times by member, where the stream has members.
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
    """Summarise the times of readable records.

    Args:
        watch: what to observe.
        at: the event times.
        members: the member that sent each record, ``None`` if unknown; where the stream has members.
        records: the count to report if it is not the number of times.
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
    """Summarise the times of one member's records, at least one."""
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
    senders = np.array(["" if member is None else member for member in members], dtype=object)
    names = sorted({member for member in members if member is not None})
    return {name: times_seen(watch, at[senders == name], name) for name in names}
