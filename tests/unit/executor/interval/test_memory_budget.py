"""The memory budget that the intervals of a process share."""

from __future__ import annotations

import threading

from millpond.executor.interval.row_cache import MemoryBudget
from millpond.statestore.interval import Interval

INTERVALS = [Interval("c", f"{number}", f"{number + 1}") for number in range(4)]


def test_single_interval_gets_the_whole_budget() -> None:
    budget = MemoryBudget(100)
    assert budget.limit_of(INTERVALS[0]) == 100
    budget.report(INTERVALS[0], 70)
    assert (budget.limit_of(INTERVALS[0]), budget.used_bytes) == (100, 70)


def test_interval_gets_the_rest_and_at_least_its_share() -> None:
    """An interval above its share shrinks as the others need theirs."""
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


def test_leaving_interval_returns_its_memory() -> None:
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


def test_other_memory_reduces_the_budget_to_half_at_most() -> None:
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


def test_concurrent_reports_add_up() -> None:
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
