"""Statistics of what uses rows."""

from __future__ import annotations

import pytest

from millpond.executor.interval.eviction import NEVER, UseStatistics


def wait(microseconds: float):
    return lambda key: microseconds


def test_share_of_uses_by_records_is_learned() -> None:
    """Nine of ten uses are records, ten microseconds apart; then the timer fires."""
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


def test_unused_rows_without_timers_lengthen_the_expected_gap() -> None:
    """One row is used each microsecond, and nine are never used again."""
    statistics = UseStatistics()
    statistics.follow([f"cold {number}" for number in range(9)], wait(NEVER), (0, 0))
    for now in range(1, 101):
        statistics.record_uses(["hot"], wait(NEVER), (0, now))
        statistics.follow(["hot"], wait(NEVER), (0, now))
    assert statistics.expectations((0, 100)).free_gap == pytest.approx((99 + 9 * 100) / 100, rel=0.02)


def test_statistics_follow_a_bounded_sample_of_rows() -> None:
    statistics = UseStatistics()
    statistics.follow([f"{number}" for number in range(10_000)], wait(NEVER), (0, 0))
    assert 32 <= len(statistics._followed) <= 64

    for bundle in range(1_000):
        statistics.follow([f"{bundle} {number}" for number in range(100)], wait(NEVER), (0, bundle))
    assert len(statistics._followed) == 8_192
    assert statistics.expectations((0, 1_000)).free_gap > 1_000


def test_newest_uses_count_most() -> None:
    """A changed load must be learned within some thousand uses."""
    statistics = UseStatistics()
    for number in range(40_000):
        clocks = (number * 10, 0)
        statistics.record_uses(["a"], wait(100 if number < 20_000 else 0), clocks)
        statistics.follow(["a"], wait(100), clocks)
    assert statistics.expectations((400_000, 0)).by_record < 0.1
