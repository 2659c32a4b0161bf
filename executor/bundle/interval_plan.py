"""One interval's part in a superstep, as a plain value that travels to the tasks."""

from __future__ import annotations

from dataclasses import dataclass, field

from millpond.executor.bundle.retried_letter import RetriedLetter
from millpond.executor.event_time.clocks import PercentileTimes
from millpond.statestore.interval import Interval
from millpond.statestore.log.live_file import LiveFile
from millpond.statestore.quick_pickle import quickly_pickled
from millpond.statestore.rows.row import Fence
from millpond.statestore.types import EventTimeMicros


@quickly_pickled
@dataclass(frozen=True, slots=True, kw_only=True)
class IntervalPlan:
    """One interval's part in a superstep.

    Attributes:
        interval: the interval.
        fence: the fence of its next commit.
        watermark: input low watermark of the computation for the whole superstep.
        files: the committed files with its rows, oldest first; empty unless requested.
        due: whether it has something to do without a record: a pending timer is due, or dead letters are retried.
        percentile_watermarks: percentile watermarks of the computation, all that the pipeline keeps.
        settled: no record before this time comes after the superstep; ``None``: that is known only up to ``watermark``.
        late_before: records before this time are late; ``None``: those before ``watermark``.
        retried: dead letters of its keys that are given once more.
    """

    interval: Interval
    fence: Fence
    watermark: EventTimeMicros
    files: tuple[LiveFile, ...]
    due: bool
    percentile_watermarks: PercentileTimes = field(default_factory=dict)
    settled: EventTimeMicros | None = None
    late_before: EventTimeMicros | None = None
    retried: tuple[RetriedLetter, ...] = ()
