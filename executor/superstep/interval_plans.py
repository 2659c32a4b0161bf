"""What each interval of a computation gets as its part of a superstep."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from millpond.executor.bundle.interval_plan import IntervalPlan
from millpond.executor.bundle.retried_letter import RetriedLetter
from millpond.executor.ownership.owned_interval import OwnedInterval
from millpond.executor.watermark.pipeline_watermarks import PipelineWatermarks
from millpond.statestore.interval import Interval
from millpond.statestore.log.snapshot import Snapshot
from millpond.statestore.types import TIME_MIN_US, EventTimeMicros, WallTimeMicros


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
