"""The plan of a superstep, as plain values that travel to the tasks.

It is separate from the coordinator so that a task's process does not import modules of the driver.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from millpond.executor.interval.letters import RetriedLetter
from millpond.executor.interval.worker import IntervalPlan
from millpond.executor.ownership.ownership import OwnedInterval
from millpond.executor.superstep.delivery import ProductionSource
from millpond.executor.watermark.authority import Conditions
from millpond.executor.watermark.pipeline_watermarks import PipelineWatermarks
from millpond.statestore.interval import Interval
from millpond.statestore.log.snapshot import Snapshot
from millpond.statestore.types import TIME_MIN_US, EventTimeMicros, Superstep, WallTimeMicros


@dataclass(frozen=True, slots=True, kw_only=True)
class InputPosition:
    """Progress in an outside input once a superstep commits.

    Attributes:
        stream: the injected stream.
        source: id of the source, for example of a Spark query.
        batch: number of the batch that the superstep consumes.
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
        superstep: its number.
        conditions: wall time and watermarks that every interval meets.
        started_us: start of planning on the monotonic clock.
        intervals: the intervals that have work.
        sources: files with undelivered productions.
        taken: injected records in their order of arrival: streams, each with its number of consecutive records.
    """

    superstep: Superstep
    conditions: Conditions
    started_us: int
    intervals: tuple[IntervalPlan, ...]
    sources: tuple[ProductionSource, ...]
    taken: tuple[tuple[str, int], ...] = ()

    @property
    def wall_time(self) -> WallTimeMicros:
        """Time of planning by the wall clock."""
        return self.conditions.wall_time


def interval_plans(
    computation: str,
    owned: Iterable[OwnedInterval],
    now: WallTimeMicros,
    *,
    in_micro_batches: bool,
    only_due: bool,
    watermarks: PipelineWatermarks,
    files_in: Snapshot | None,
    after: Mapping[str, EventTimeMicros],
    retried_in: Callable[[Interval], tuple[RetriedLetter, ...]],
) -> list[IntervalPlan]:
    """Return the parts of a computation's intervals in a superstep.

    With ``in_micro_batches`` records are late by Spark's rule, one superstep behind the watermark. With ``only_due``
    intervals without a due timer and without a dead letter to retry are left out. ``after`` has the watermarks of
    injected streams once the superstep is committed, if they are known.
    """
    chosen = []
    for one in owned:
        retried = retried_in(one.interval)
        due = one.is_due(now, watermarks.mark) or bool(retried)
        if due or not only_due:
            chosen.append((one, due, retried))
    if not chosen:
        return []
    watermark = watermarks.input_watermark(computation)
    percentiles = watermarks.percentile_watermarks(computation)
    settled = watermarks.settled(computation, after)
    late_before = _late_in_spark(watermarks.former_watermark(computation)) if in_micro_batches else None
    return [
        IntervalPlan(
            interval=one.interval,
            fence=one.next_fence,
            watermark=watermark,
            files=() if files_in is None else files_in.files_of(one.interval),
            due=due,
            percentile_watermarks=percentiles,
            settled=settled,
            late_before=late_before,
            retried=retried,
        )
        for one, due, retried in chosen
    ]


def _late_in_spark(watermark: EventTimeMicros) -> EventTimeMicros:
    """Return the time before which Spark drops a record: it counts whole milliseconds, and the watermark itself is late."""
    return watermark if watermark == TIME_MIN_US else EventTimeMicros(watermark // 1_000 * 1_000 + 1)
