"""Which intervals are compacted next."""

from __future__ import annotations

from typing import Any, cast

from millpond.executor.maintenance.compaction import CompactionSchedule
from millpond.executor.maintenance.policy import UpkeepPolicy
from millpond.gc.compaction import CompactionPolicy
from millpond.statestore.interval import Interval, intervals_from_boundaries
from millpond.statestore.log.rules import CommitRequest, IntervalWrite
from millpond.statestore.rows.files import RowFile, row_file_path
from millpond.statestore.rows.row import Fence
from millpond.statestore.types import CommitNumber, Sequencer, Superstep
from millpond.testing.fixtures.determinism import ManualClock, SeededRng

UNUSED = cast(Any, None)
INTERVALS = intervals_from_boundaries("c", [f"{number:03d}" for number in range(1, 200)])


def schedule(fan_in: int) -> CompactionSchedule:
    """A schedule that is only asked what is due."""
    policy = UpkeepPolicy(compaction=CompactionPolicy(fan_in=fan_in))
    return CompactionSchedule(
        UNUSED, UNUSED, UNUSED, clock=ManualClock(), rng=SeededRng(1), policy=policy, workers=UNUSED
    )


def request(superstep: int, *intervals: Interval) -> CommitRequest:
    """A superstep in which the intervals get a file each."""
    fence = Fence(Sequencer(1), CommitNumber(superstep))
    files = [
        RowFile(
            path=row_file_path("c", Superstep(superstep), f"{number:032x}"),
            size_bytes=1,
            rows=1,
            min_key=interval.low,
            max_key=interval.low,
            superstep=Superstep(superstep),
            sequencer=fence.sequencer,
            commit_number=fence.commit_number,
            productions=0,
        )
        for number, interval in enumerate(intervals)
    ]
    return CommitRequest(
        kind="superstep",
        writes=tuple(
            IntervalWrite(interval=interval, fence=fence, added=(file,))
            for interval, file in zip(intervals, files, strict=True)
        ),
    )


def test_those_with_most_files_come_first() -> None:
    """Where more intervals are due than may be prepared, none waits for ever behind others with fewer files."""
    compactions = schedule(fan_in=2)
    for superstep in (1, 2):
        compactions.record(request(superstep, *INTERVALS))
    compactions.record(request(3, *INTERVALS[-3:]))
    due = compactions.due()

    assert due[:3] == list(INTERVALS[-3:])
    assert due[3:] == list(INTERVALS[: len(due) - 3])
    assert len(due) < len(INTERVALS)


def test_those_with_few_files_are_not_due() -> None:
    """An interval is due from `fan_in` files on."""
    compactions = schedule(fan_in=2)
    compactions.record(request(1, *INTERVALS))
    compactions.record(request(2, INTERVALS[7]))

    assert compactions.due() == [INTERVALS[7]]
