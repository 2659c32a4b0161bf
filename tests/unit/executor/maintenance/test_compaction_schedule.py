"""The order in which intervals are compacted."""

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
    """Make a schedule that is only asked for due intervals."""
    policy = UpkeepPolicy(compaction=CompactionPolicy(fan_in=fan_in))
    return CompactionSchedule(
        UNUSED,
        UNUSED,
        UNUSED,
        clock=ManualClock(),
        rng=SeededRng(1),
        policy=policy,
        workers=UNUSED,
        row_files=UNUSED,
    )


def record(compactions: CompactionSchedule, *intervals: Interval) -> None:
    """Record a superstep that writes a file for each interval."""
    for interval in intervals:
        compactions.files[interval] += 1


def test_intervals_with_most_files_are_due_first() -> None:
    """No interval may wait indefinitely behind others with fewer files."""
    compactions = schedule(fan_in=2)
    for _ in range(2):
        record(compactions, *INTERVALS)
    record(compactions, *INTERVALS[-3:])
    due = compactions.due()

    assert due[:3] == list(INTERVALS[-3:])
    assert due[3:] == list(INTERVALS[: len(due) - 3])
    assert len(due) < len(INTERVALS)


def test_interval_is_due_from_fan_in_files_on() -> None:
    compactions = schedule(fan_in=2)
    record(compactions, *INTERVALS)
    record(compactions, INTERVALS[7])

    assert compactions.due() == [INTERVALS[7]]
