"""Slots of intervals."""

from __future__ import annotations

from millpond.executor.interval.bundle import BundleStatistics
from millpond.executor.interval.row_update import BundleResult, Manifest
from millpond.executor.ownership.cuts import Cut
from millpond.executor.spark.slots import Slots
from millpond.statestore.interval import Interval, intervals_from_boundaries
from millpond.statestore.rows.row import Fence
from millpond.statestore.types import CommitNumber, Sequencer

LOW, HIGH, OTHER = Interval("a", "", "m"), Interval("a", "m"), Interval("b", "")


def test_interval_keeps_its_slot_in_every_superstep() -> None:
    """A superstep may run only some of the intervals."""
    slots = Slots(2)

    first = [slots.position_of(interval) for interval in (LOW, HIGH)]

    assert [position % 2 for position in first] == [0, 1]
    assert slots.position_of(OTHER) % 2 == 0
    assert [slots.position_of(interval) for interval in (HIGH, LOW)] == first[::-1]


def test_tasks_reach_up_to_the_last_slot_with_work() -> None:
    slots = Slots(8)

    assert [slots.tasks_for(positions) for positions in ([], [0], [8, 3], [7])] == [1, 1, 4, 8]


def test_slot_is_at_home_where_it_ran_last() -> None:
    """The first run counts as at home."""
    slots = Slots(2)

    assert slots.at_home({0: "p", 1: "q"}) == 2
    assert slots.at_home({0: "q", 1: "q"}) == 1
    assert slots.at_home({0: "q"}) == 1


def manifest(interval: Interval, work_us: int) -> Manifest:
    """Make a task's report of an interval."""
    return Manifest(
        interval=interval,
        fence=Fence(Sequencer(1), CommitNumber(1)),
        file=None,
        result=BundleResult(updates=None, statistics=BundleStatistics()),
        work_us=work_us,
    )


def test_first_part_of_a_split_keeps_the_slot() -> None:
    """The process there has its rows; the others go to the slots with the least work."""
    slots = Slots(4)
    intervals = intervals_from_boundaries("c", ["g", "m", "t"])
    before = [slots.position_of(interval) % 4 for interval in intervals]
    slots.record(
        manifest(interval, work) for interval, work in zip(intervals, (900, 300, 100, 200), strict=True)
    )

    cut = Cut.split(intervals[0], ["b", "d"])
    slots.apply(cut)

    assert before == [0, 1, 2, 3]
    assert [slots.position_of(interval) % 4 for interval in cut.by] == [0, 2, 3]
    assert len({slots.position_of(interval) for interval in (*cut.by, *intervals[1:])}) == 6


def test_merged_interval_keeps_the_first_ones_slot() -> None:
    """The others' positions become free."""
    slots = Slots(2)
    low, high = intervals_from_boundaries("c", ["m"])
    assert [slots.position_of(interval) for interval in (low, high)] == [0, 1]

    cut = Cut.merge([low, high])
    slots.apply(cut)

    assert slots.position_of(cut.by[0]) == 0
    assert slots.position_of(OTHER) == 1


def test_level_moves_the_largest_interval_that_helps() -> None:
    """The receiving slot must not become the fuller one."""
    slots = Slots(2)
    intervals = intervals_from_boundaries("c", ["g", "m", "t"])
    assert [slots.position_of(interval) % 2 for interval in intervals] == [0, 1, 0, 1]
    slots.record(
        manifest(interval, work) for interval, work in zip(intervals, (700, 100, 300, 100), strict=True)
    )

    moved = slots.level()

    assert moved == intervals[2]
    assert slots.position_of(intervals[2]) % 2 == 1
    assert slots.level() is None


def test_hot_interval_alone_in_its_slot_does_not_move() -> None:
    slots = Slots(2)
    low, high = intervals_from_boundaries("c", ["m"])
    slots.position_of(low), slots.position_of(high)
    slots.record([manifest(low, 900), manifest(high, 10)])

    assert slots.level() is None
