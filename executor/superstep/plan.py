"""The plan of a superstep, as plain values that travel to the tasks.

It is separate from the coordinator so that a task's process does not import what only the driver uses.
"""

from __future__ import annotations

from dataclasses import dataclass

from millpond.executor.bundle.interval_plan import IntervalPlan
from millpond.executor.superstep.delivery import ProductionSource
from millpond.executor.watermark.conditions import Conditions
from millpond.statestore.types import Superstep, WallTimeMicros


@dataclass(frozen=True, slots=True, kw_only=True)
class InputPosition:
    """How far an outside input has been consumed once a superstep commits.

    Attributes:
        stream: the injected stream.
        source: the id of the source, for example of a Spark query.
        batch: the number of the batch that this superstep consumed.
        rows: how many rows of a bounded input count towards the watermark from then on;
            ``None`` changes nothing.
        offsets: where the batch ends in the source, as the source says it; ``None`` if it is not known.
        backfill: the computation whose backfill the superstep is of; then ``batch`` is how far that is. ``None`` for
            records that all consumers get.
    """

    stream: str
    source: str
    batch: int
    rows: int | None = None
    offsets: str | None = None
    backfill: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SuperstepPlan:
    """What one superstep does: which intervals run, under which conditions, on which input and productions.

    Attributes:
        superstep: its number.
        conditions: what it meets; its wall time among it.
        started_us: when it was planned, on the monotonic clock.
        intervals: the intervals that have something to do.
        sources: the undelivered productions.
        taken: the records that were injected for it, in their order: streams, each with how many of it came on end.
    """

    superstep: Superstep
    conditions: Conditions
    started_us: int
    intervals: tuple[IntervalPlan, ...]
    sources: tuple[ProductionSource, ...]
    taken: tuple[tuple[str, int], ...] = ()

    @property
    def wall_time(self) -> WallTimeMicros:
        """When it was planned."""
        return self.conditions.wall_time
