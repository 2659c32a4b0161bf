"""The order in which rows are evicted."""

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
    """Name rows by their positions."""
    keys = [str(number) for number in range(len(waits))]
    return Candidates(keys=keys, waits=np.array(waits), ages=np.array(ages), expectations=expectations)


@pytest.mark.parametrize(
    ("waits", "ages", "expectations", "order"),
    [
        # Rows not used since they were read have only their timers to go by.
        ([7.0, NEVER, -1.0, 90.0, NEVER], [NEVER] * 5, ONLY_TIMERS, [1, 4, 3, 0, 2]),
        # No record returns to these windows: the last to close goes first, even if used last.
        ([10.0, 20.0, 30.0], [9.0, 8.0, 0.5], ONLY_TIMERS, [2, 1, 0]),
        # Active sessions stay, and so do sessions that are about to end.
        ([1.0, 18.0, 30.0], [29.0, 12.0, 0.5], SESSIONS, [1, 2, 0]),
        # An ended session is not needed for long, even if it ended just now.
        ([30.0, NEVER], [0.5, 0.1], SESSIONS, [1, 0]),
        # No timers at all.
        ([NEVER, NEVER, NEVER], [30.0, 20.0, 10.0], ONLY_RECORDS, [0, 1, 2]),
        # These timers never fire, because a record always arrives before.
        ([50.0, NEVER], [3.0, 4.0], ONLY_RECORDS, [1, 0]),
    ],
)
def test_row_that_is_needed_last_is_evicted_first(
    waits: list[float], ages: list[float], expectations: Expectations, order: list[int]
) -> None:
    """A row is needed at its next timer or record, and a record gets less likely the longer none has arrived."""
    assert window_aware(candidates(waits, ages, expectations)).tolist() == order


def test_least_recently_used_ignores_timers() -> None:
    rows = candidates([7.0, NEVER, 1.0], [3.0, 2.0, 1.0], SESSIONS)
    assert least_recently_used(rows).tolist() == [0, 1, 2]
