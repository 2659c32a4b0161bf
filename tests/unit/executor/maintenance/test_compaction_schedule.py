"""Which intervals are compacted next."""

from __future__ import annotations

from typing import Any, cast

from millpond.executor.maintenance.compaction import CompactionSchedule
from millpond.executor.maintenance.policy import UpkeepPolicy
from millpond.gc.compaction import CompactionPolicy
from millpond.statestore.interval import Interval, intervals_from_boundaries
from millpond.testing.fixtures.determinism import ManualClock, SeededRng

UNUSED = cast(Any, None)
INTERVALS = intervals_from_boundaries("c", [f"{number:03d}" for number in range(1, 200)])


def schedule(fan_in: int) -> CompactionSchedule:
    """A schedule that is only asked what is due."""
    policy = UpkeepPolicy(compaction=CompactionPolicy(fan_in=fan_in))
    return CompactionSchedule(
        UNUSED, UNUSED, UNUSED, clock=ManualClock(), rng=SeededRng(1), policy=policy, workers=UNUSED
    )


def record(compactions: CompactionSchedule, *intervals: Interval) -> None:
    """A superstep in which the intervals get a file each."""
    for interval in intervals:
        compactions.files[interval] += 1


def test_those_with_most_files_come_first() -> None:
    """Where more intervals are due than may be prepared, none waits for ever behind others with fewer files."""
    compactions = schedule(fan_in=2)
    for _ in range(2):
        record(compactions, *INTERVALS)
    record(compactions, *INTERVALS[-3:])
    due = compactions.due()

    assert due[:3] == list(INTERVALS[-3:])
    assert due[3:] == list(INTERVALS[: len(due) - 3])
    assert len(due) < len(INTERVALS)


def test_those_with_few_files_are_not_due() -> None:
    """An interval is due from `fan_in` files on."""
    compactions = schedule(fan_in=2)
    record(compactions, *INTERVALS)
    record(compactions, INTERVALS[7])

    assert compactions.due() == [INTERVALS[7]]
