"""Observations: summaries of the event times of outside records, from which watermarks are computed.

A task sees part of a superstep's records in no particular order; the driver merges the observations of all
tasks. A record's delay is measured against the newest record *committed* before, because that record set the
watermark which the late record met.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from millpond.statestore.durations import duration_text
from millpond.statestore.errors import InvalidError
from millpond.statestore.types import EventTimeMicros, quickly_pickled

_ACCURACY: Final = 200
_GENERATION: Final = 100_000
"""Delays per sketch before the older sketch is forgotten, so that the percentile adapts to a changing source."""


def check_percentile(percentile: float) -> float:
    """Return the percentile as a ``float``, or refuse one that is not above 0 and at most 100."""
    if isinstance(percentile, bool) or not isinstance(percentile, int | float) or not 0 < percentile <= 100:
        raise InvalidError("a percentile must be above 0 and at most 100", percentile=percentile)
    return float(percentile)


def check_declared_percentile(percentile: float) -> float:
    """Refuse a share of 1 as well: the first hundredth of the records tells nothing about the others."""
    checked = check_percentile(percentile)
    if checked < 1:
        raise InvalidError(
            f"a percentile is out of 100; did you mean {round(100 * checked, 9):g}?", percentile=percentile
        )
    return checked


class DelaySketch:
    """The distribution of delays in microseconds, sent from tasks to the driver.

    A t-digest of Apache DataSketches: 5 KB for any number of delays, mergeable, most accurate at the tails
    where percentiles such as 99 lie. Unlike the library's KLL sketches it has no randomness, so simulations
    repeat exactly.
    """

    __slots__ = ("_digest",)

    def __init__(self, serialized: bytes | None = None) -> None:
        from datasketches import tdigest_double

        self._digest = (
            tdigest_double(_ACCURACY) if serialized is None else tdigest_double.deserialize(serialized)
        )

    def __reduce__(self) -> tuple[type[DelaySketch], tuple[bytes]]:
        return DelaySketch, (self._digest.serialize(),)

    def __len__(self) -> int:
        return int(self._digest.get_total_weight())

    def add(self, delays: npt.NDArray[np.int64]) -> None:
        self._digest.update(delays.astype(np.float64))

    def merge(self, other: DelaySketch) -> None:
        self._digest.merge(other._digest)

    def at(self, percentile: float) -> int:
        if not len(self):
            return 0
        delay: float = self._digest.get_quantile(percentile / 100)
        return round(delay)


class RecentDelays:
    """The delays of the last 100,000 to 200,000 records, in two sketches; the older is forgotten in turn."""

    __slots__ = ("_newer", "_older")

    def __init__(self) -> None:
        self._older: DelaySketch | None = None
        self._newer: DelaySketch | None = None

    def __len__(self) -> int:
        return sum(len(sketch) for sketch in (self._older, self._newer) if sketch is not None)

    def merge(self, seen: DelaySketch) -> None:
        if self._newer is None:
            self._newer = DelaySketch()
        self._newer.merge(seen)
        if len(self._newer) >= _GENERATION:
            self._older, self._newer = self._newer, None

    def at(self, percentile: float) -> int:
        both = DelaySketch()
        for sketch in (self._older, self._newer):
            if sketch is not None:
                both.merge(sketch)
        return both.at(percentile)


DEFAULT_MEMBER: Final = ""
"""The name under which a stream without members observes itself."""


OnAhead: TypeAlias = Literal["dead_letter", "clamp", "hold"]
"""The fate of a record ahead of its arrival; `Pipeline.inject` explains it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AheadLimit:
    """How far event times may lie ahead of the arrival of their records; `Pipeline.inject` explains it.

    Attributes:
        on_ahead: the fate of a record beyond the limit.
    """

    max_us: int
    on_ahead: OnAhead

    @property
    def error(self) -> str:
        return (
            f"the time lies more than {duration_text(self.max_us)} ahead of the record's arrival: set the sender's clock, "
            "or raise ahead_max"
        )

    def latest(self, arrived_at: EventTimeMicros) -> EventTimeMicros:
        return EventTimeMicros(arrived_at + self.max_us)


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """Settings for observing the records of a stream.

    Attributes:
        newest: the newest committed time, by member.
        stamp_at: the time of arrival: the event time of records that carry none, or what ``ahead`` measures from.
            ``None`` if neither needs it.
    """

    stream: str
    newest: Mapping[str, EventTimeMicros] = field(default_factory=dict)
    with_delays: bool = False
    stamp_at: EventTimeMicros | None = None
    ahead: AheadLimit | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TimesSeen:
    """The event times of one superstep's records of one member, in microseconds since 1970 UTC.

    Attributes:
        newest_at: the greatest event time.
        oldest_at: the least event time.
        delays: how far each record lay behind the newest record committed before; ``None`` if not measured,
            or if there was no record before.
        mark_at: the source's greatest mark; ``None`` without marks (see `MarkColumn`).
    """

    newest_at: EventTimeMicros
    oldest_at: EventTimeMicros
    delays: DelaySketch | None = None
    mark_at: EventTimeMicros | None = None


@quickly_pickled
@dataclass(frozen=True, slots=True, kw_only=True)
class InputObservation:
    """The observation of one outside input, from which the injector's low watermark follows.

    ``records`` counts each readable record once for all its consumers, ``in_1970`` those with times in that year;
    ``times`` are ``None`` without a record, and for a bounded input, of which only ``newest_at`` is kept: it moves no
    watermark.
    """

    stream: str
    records: int
    times: TimesSeen | None = None
    newest_at: EventTimeMicros | None = None
    members: Mapping[str, TimesSeen] = field(default_factory=dict)
    in_1970: int = 0

    def without_times(self) -> InputObservation:
        """Return the observation as of a bounded input, which moves no watermark."""
        newest_at = self.newest_at if self.times is None else self.times.newest_at
        return InputObservation(
            stream=self.stream, records=self.records, newest_at=newest_at, in_1970=self.in_1970
        )
