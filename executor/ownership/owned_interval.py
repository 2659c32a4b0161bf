"""An interval that this process holds."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from millpond.executor.bundle.result import BundleResult
from millpond.executor.ownership.scan import IntervalSummary
from millpond.statestore.interval import Interval
from millpond.statestore.leases.lease import Lease
from millpond.statestore.rows.row import Fence
from millpond.statestore.types import CommitNumber, EventTimeMicros, WallTimeMicros


class OwnedInterval:
    """An interval that this process holds: its lease, its last fence, what is pending in it."""

    def __init__(self, interval: Interval, lease: Lease, summary: IntervalSummary) -> None:
        self.interval = interval
        self.lease = lease
        self.fence: Fence = Fence(lease.sequencer, CommitNumber(0))
        self.summary: IntervalSummary = summary

    @property
    def next_fence(self) -> Fence:
        """What the interval's next commit must carry."""
        return Fence(self.fence.sequencer, CommitNumber(self.fence.commit_number + 1))

    def is_due(self, now: WallTimeMicros, mark: Callable[[str, float], EventTimeMicros]) -> bool:
        """Whether a timer of the interval fires now.

        Args:
            now: the wall time.
            mark: the input watermark of a computation at a percentile.
        """
        return self.summary.is_due(now, partial(mark, self.interval.computation))

    def observe(self, result: BundleResult) -> None:
        """Replace the summary by what a committed bundle reports as pending."""
        self.summary = IntervalSummary(
            next_event_timer=result.next_event_timer,
            next_wall_timer=result.next_wall_timer,
            hold=result.hold,
            next_percentile_timers=result.next_percentile_timers,
            percentile_holds=result.percentile_holds,
        )
