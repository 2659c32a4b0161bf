"""The plan of a superstep, as plain values that travel to the tasks.

It is separate from the coordinator so that a task's process does not import what only the driver uses.

What each interval of a computation gets as its part of a superstep.
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
    """The parts of a computation's intervals in a superstep.

    Args:
        computation: its name.
        owned: its intervals.
        now: the wall time of the superstep.
        in_micro_batches: whether records are late as Spark has it, one superstep later than the watermark says.
        only_due: whether to leave out those without a timer that is due and without a dead letter to retry.
        watermarks: the pipeline's watermarks.
        files_in: the table that the intervals' files are listed from; ``None`` lists none.
        after: by injected stream, its watermark once the superstep is committed, as far as it is known.
        retried_in: returns the dead letters that an interval retries.
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
    """The time before which a record is late in Spark: at the watermark, in whole milliseconds, it is late already."""
    return watermark if watermark == TIME_MIN_US else EventTimeMicros(watermark // 1_000 * 1_000 + 1)
