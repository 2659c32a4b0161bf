"""
Slots: intervals keep theirs, and what ran elsewhere than before is not at home.
"""

from __future__ import annotations

from millpond.executor.spark.slots import Slots
from millpond.statestore.interval import Interval

LOW, HIGH, OTHER = Interval("a", "", "m"), Interval("a", "m"), Interval("b", "")


def test_an_interval_keeps_its_slot_whatever_else_runs() -> None:
    """
    A superstep that runs some of the intervals gives them the slots that they have in all others.
    """
    slots = Slots(2)

    first = [slots.position_of(interval) for interval in (LOW, HIGH)]

    assert [position % 2 for position in first] == [0, 1]
    assert slots.position_of(OTHER) % 2 == 0
    assert [slots.position_of(interval) for interval in (HIGH, LOW)] == first[::-1]


def test_only_slots_with_work_need_tasks() -> None:
    """
    Slots behind the last one with work get none.
    """
    slots = Slots(8)

    assert [slots.tasks_for(positions) for positions in ([], [0], [8, 3], [7])] == [1, 1, 4, 8]


def test_a_slot_is_at_home_where_it_ran_before() -> None:
    """
    The first run counts, and after a move the new process is the home.
    """
    slots = Slots(2)

    assert slots.at_home({0: "p", 1: "q"}) == 2
    assert slots.at_home({0: "q", 1: "q"}) == 1
    assert slots.at_home({0: "q"}) == 1
