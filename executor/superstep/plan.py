"""The plan of a superstep, as plain values that travel to the tasks.

It is separate from the coordinator so that a task's process does not import modules of the driver.
"""

from __future__ import annotations

from dataclasses import dataclass

from millpond.executor.interval.bundle import IntervalPlan
from millpond.executor.superstep.delivery import ProductionSource
from millpond.executor.watermark.authority import Conditions
from millpond.statestore.types import Superstep


@dataclass(frozen=True, slots=True, kw_only=True)
class InputPosition:
    """Progress in an outside input once a superstep commits.

    Attributes:
        source: id of the source, for example of a Spark query.
        rows: rows of a bounded input that count towards the watermark from then on; ``None`` changes nothing.
        offsets: end of the batch in the source's own words, if it is known.
        backfill: computation whose backfill the superstep consumes; ``batch`` is then a `backfill_position`.
            ``None`` for records of all consumers.
    """

    stream: str
    source: str
    batch: int
    rows: int | None = None
    offsets: str | None = None
    backfill: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SuperstepPlan:
    """The intervals of one superstep, with their conditions, input and productions.

    Attributes:
        conditions: wall time and watermarks that every interval meets.
        taken: injected records in their order of arrival: streams, each with its number of consecutive records.
    """

    superstep: Superstep
    conditions: Conditions
    started_us: int
    intervals: tuple[IntervalPlan, ...]
    sources: tuple[ProductionSource, ...]
    taken: tuple[tuple[str, int], ...] = ()
