"""
What each interval of a computation gets as its part of a superstep.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from millpond.executor.ownership.owned_interval import OwnedInterval
from millpond.executor.superstep.plan import IntervalPlan
from millpond.executor.watermark.pipeline_watermarks import PipelineWatermarks
from millpond.statestore.log.snapshot import Snapshot
from millpond.statestore.types import EventTimeMicros

__all__ = ["interval_plans"]


def interval_plans(
    computation: str,
    owned: Iterable[tuple[OwnedInterval, bool]],
    watermarks: PipelineWatermarks,
    files_in: Snapshot | None,
    after: Mapping[str, EventTimeMicros],
) -> list[IntervalPlan]:
    """
    The parts of some intervals of a computation.

    Args:
        computation: its name.
        owned: the intervals, each with whether timers of it are due.
        watermarks: the pipeline's watermarks.
        files_in: the table that the intervals' files are listed from; ``None`` lists none.
        after: by injected stream, its watermark once the superstep is committed, as far as it is known.
    """
    watermark = watermarks.input_watermark(computation)
    percentiles = watermarks.percentile_watermarks(computation)
    settled = watermarks.settled(computation, after)
    return [
        IntervalPlan(
            interval=one.interval,
            fence=one.next_fence,
            watermark=watermark,
            files=() if files_in is None else files_in.files_of(one.interval),
            due=due,
            percentile_watermarks=percentiles,
            settled=settled,
        )
        for one, due in owned
    ]
