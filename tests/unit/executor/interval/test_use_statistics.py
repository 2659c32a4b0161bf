"""What rows are used by."""

from __future__ import annotations

import pytest

from millpond.executor.interval.eviction import NEVER, UseStatistics


def wait(microseconds: float):
    """Each row waits so long for its next timer."""
    return lambda key: microseconds


def test_rows_that_records_come_to_before_their_timers() -> None:
    """Nine records ten microseconds apart, then the timer: nine uses of ten are records'."""
    statistics = UseStatistics()
    for session in range(50):
        for number in range(10):
            clocks = (session * 1_000 + number * 10, 0)
            statistics.record_uses(["a"], wait(100), clocks)
            statistics.follow(["a"], wait(100), clocks)
        clocks = (session * 1_000 + 500, 0)
        statistics.record_uses(["a"], wait(0), clocks)
    expected = statistics.expectations((50_000, 0))

    assert expected.by_record == pytest.approx(0.9, abs=0.02)
    assert expected.record_gap == pytest.approx(10, rel=0.02)


def test_rows_without_timers_that_are_not_used_again_count() -> None:
    """One row is used each microsecond, and nine never again: a row is not used for long on average."""
    statistics = UseStatistics()
    statistics.follow([f"cold {number}" for number in range(9)], wait(NEVER), (0, 0))
    for now in range(1, 101):
        statistics.record_uses(["hot"], wait(NEVER), (0, now))
        statistics.follow(["hot"], wait(NEVER), (0, now))
    assert statistics.expectations((0, 100)).free_gap == pytest.approx((99 + 9 * 100) / 100, rel=0.02)


def test_a_bundle_of_any_size_is_followed_by_few_of_its_rows() -> None:
    """And so is any number of bundles."""
    statistics = UseStatistics()
    statistics.follow([f"{number}" for number in range(10_000)], wait(NEVER), (0, 0))
    assert 32 <= len(statistics._followed) <= 64

    for bundle in range(1_000):
        statistics.follow([f"{bundle} {number}" for number in range(100)], wait(NEVER), (0, bundle))
    assert len(statistics._followed) == 8_192
    assert statistics.expectations((0, 1_000)).free_gap > 1_000


def test_the_newest_uses_count_most() -> None:
    """A load that changes is learned again within some thousand uses."""
    statistics = UseStatistics()
    for number in range(40_000):
        clocks = (number * 10, 0)
        statistics.record_uses(["a"], wait(100 if number < 20_000 else 0), clocks)
        statistics.follow(["a"], wait(100), clocks)
    assert statistics.expectations((400_000, 0)).by_record < 0.1
