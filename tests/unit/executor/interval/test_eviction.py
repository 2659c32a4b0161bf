"""Which rows are evicted first."""

from __future__ import annotations

import numpy as np
import pytest

from millpond.executor.interval.eviction import (
    NEVER,
    Candidates,
    Expectations,
    least_recently_used,
    window_aware,
)

ONLY_TIMERS = Expectations(by_record=0.0, record_gap=0.0, free_gap=0.0)
SESSIONS = Expectations(by_record=0.9, record_gap=2.0, free_gap=100.0)
ONLY_RECORDS = Expectations(by_record=1.0, record_gap=2.0, free_gap=5.0)


def candidates(waits: list[float], ages: list[float], expectations: Expectations) -> Candidates:
    """Rows called by their positions."""
    keys = [str(number) for number in range(len(waits))]
    return Candidates(keys=keys, waits=np.array(waits), ages=np.array(ages), expectations=expectations)


@pytest.mark.parametrize(
    ("waits", "ages", "expectations", "order"),
    [
        # Of rows that were not used since they were read, only the timers are known.
        ([7.0, NEVER, -1.0, 90.0, NEVER], [NEVER] * 5, ONLY_TIMERS, [1, 4, 3, 0, 2]),
        # Windows that no record comes to again: the one that closes last goes first, though it was used last.
        ([10.0, 20.0, 30.0], [9.0, 8.0, 0.5], ONLY_TIMERS, [2, 1, 0]),
        # Sessions: those in use stay, and so do those that are about to end.
        ([1.0, 18.0, 30.0], [29.0, 12.0, 0.5], SESSIONS, [1, 2, 0]),
        # A session that has ended is not used for long, even if it ended just now.
        ([30.0, NEVER], [0.5, 0.1], SESSIONS, [1, 0]),
        # No timers at all.
        ([NEVER, NEVER, NEVER], [30.0, 20.0, 10.0], ONLY_RECORDS, [0, 1, 2]),
        # Timers that never fire, because a record always comes before.
        ([50.0, NEVER], [3.0, 4.0], ONLY_RECORDS, [1, 0]),
    ],
)
def test_the_row_that_is_needed_last_goes_first(
    waits: list[float], ages: list[float], expectations: Expectations, order: list[int]
) -> None:
    """It is needed at its next timer or with its next record, which is the less likely the longer none has come."""
    assert window_aware(candidates(waits, ages, expectations)).tolist() == order


def test_the_baseline_goes_by_use() -> None:
    """Least recently used ignores timers."""
    rows = candidates([7.0, NEVER, 1.0], [3.0, 2.0, 1.0], SESSIONS)
    assert least_recently_used(rows).tolist() == [0, 1, 2]
