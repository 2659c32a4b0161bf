"""One budget for all intervals of a process."""

from __future__ import annotations

import threading

from millpond.executor.interval.row_cache import MemoryBudget
from millpond.statestore.interval import Interval

INTERVALS = [Interval("c", f"{number}", f"{number + 1}") for number in range(4)]


def test_one_that_is_alone_has_all() -> None:
    """Whatever it uses already."""
    budget = MemoryBudget(100)
    assert budget.limit_of(INTERVALS[0]) == 100
    budget.report(INTERVALS[0], 70)
    assert (budget.limit_of(INTERVALS[0]), budget.used_bytes) == (100, 70)


def test_each_has_what_the_others_leave_and_its_part_at_least() -> None:
    """One that has taken more than its part gives way as the others need theirs."""
    budget = MemoryBudget(100)
    for interval, used in zip(INTERVALS, (80, 10, 5, 0), strict=True):
        budget.report(interval, used)
    assert [budget.limit_of(interval) for interval in INTERVALS] == [85, 25, 25, 25]
    assert not budget.is_exceeded

    budget.report(INTERVALS[3], 25)
    assert budget.is_exceeded
    assert budget.limit_of(INTERVALS[0]) == 60
    budget.report(INTERVALS[0], 60)
    assert not budget.is_exceeded


def test_one_that_leaves_gives_all_back() -> None:
    """And counts no more for the parts of the others."""
    budget = MemoryBudget(90)
    for interval in INTERVALS[:3]:
        budget.report(interval, 40)
    budget.leave(INTERVALS[0])
    budget.leave(INTERVALS[3])

    assert budget.used_bytes == 80
    assert budget.limit_of(INTERVALS[1]) == 50
    assert budget.limit_of(INTERVALS[2]) == 50
    budget.report(INTERVALS[2], 89)
    assert budget.limit_of(INTERVALS[1]) == 45


def test_soft_state_has_less_for_what_else_is_kept() -> None:
    """But half of the budget, whatever else the process keeps."""
    page_indexes = 30
    budget = MemoryBudget(100, lambda: page_indexes)
    budget.report(INTERVALS[0], 60)
    assert (budget.limit_of(INTERVALS[0]), budget.limit_of(INTERVALS[1]), budget.is_exceeded) == (
        70,
        35,
        False,
    )

    page_indexes = 80
    assert (budget.limit_of(INTERVALS[0]), budget.limit_of(INTERVALS[1]), budget.is_exceeded) == (
        50,
        25,
        True,
    )


def test_threads_lose_no_report() -> None:
    """What they report one after the other or at once adds up."""
    budget = MemoryBudget(1_000)

    def report(interval: Interval) -> None:
        for used in (*range(500), 7):
            budget.report(interval, used)

    running = [threading.Thread(target=report, args=(interval,)) for interval in INTERVALS]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    assert budget.used_bytes == 7 * len(INTERVALS)
