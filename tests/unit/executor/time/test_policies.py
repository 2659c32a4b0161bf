"""Watermark policies of injectors."""

from __future__ import annotations

import numpy as np
import pytest

from millpond.executor.inputs.extraction import observe_times
from millpond.executor.time.observations import DEFAULT_MEMBER, TimesSeen, Watch
from millpond.executor.time.watermark_policies import (
    MarkColumn,
    Monotone,
    ObservedPercentile,
    Perfect,
    UserWatermark,
    WatermarkPolicy,
    wants_delays,
)
from millpond.statestore.errors import InvalidError
from millpond.statestore.types import TIME_MAX_US, TIME_MIN_US

POLICIES = (
    Monotone(),
    ObservedPercentile(99),
    Perfect(),
    UserWatermark(lambda seen: seen.newest_at),
    MarkColumn("created"),
)


def seen(newest_at: int, oldest_at: int | None = None) -> TimesSeen:
    return TimesSeen(newest_at=newest_at, oldest_at=newest_at if oldest_at is None else oldest_at)


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: type(policy).__name__)
def test_every_policy_keeps_the_rules_of_a_watermark(policy):
    """A watermark starts at its saved value, never falls, can be advanced, and ends after all time."""
    assert isinstance(policy, WatermarkPolicy)
    assert policy.start().watermark == TIME_MIN_US
    logic = policy.start(100)
    logic.observe(seen(50))
    assert logic.watermark == 100
    logic.advance(500)
    logic.advance(400)
    assert logic.watermark == 500
    logic.finish()
    logic.observe(seen(600))
    assert logic.watermark == TIME_MAX_US


def test_monotone_follows_the_newest_record():
    logic = Monotone().start()

    logic.observe(seen(70, 10))

    assert logic.watermark == 70


def test_perfect_waits_for_the_end():
    logic = Perfect().start()

    logic.observe(seen(70))

    assert logic.watermark == TIME_MIN_US


def test_mark_column_follows_the_sources_marks_only():
    """The times of records do not matter, and marks never fall."""
    logic = MarkColumn("created").start()

    logic.observe(seen(70))
    assert logic.watermark == TIME_MIN_US
    logic.observe(TimesSeen(newest_at=80, oldest_at=80, mark_at=40))
    logic.observe(TimesSeen(newest_at=90, oldest_at=90, mark_at=30))

    assert logic.watermark == 40


@pytest.mark.parametrize("column", ["", None, 5])
def test_mark_column_needs_a_name(column):
    with pytest.raises(InvalidError):
        MarkColumn(column)


def test_user_watermark_follows_its_function():
    """The function may return None."""
    logic = UserWatermark(lambda seen: seen.oldest_at - 5 if seen.oldest_at > 10 else None).start()

    logic.observe(seen(9, 8))
    assert logic.watermark == TIME_MIN_US
    logic.observe(seen(90, 20))
    assert logic.watermark == 15


def test_failing_watermark_function_is_named():
    logic = UserWatermark(lambda seen: 1 // 0).start()

    with pytest.raises(InvalidError, match="watermark's function raised ZeroDivisionError"):
        logic.observe(seen(5))


def test_user_watermark_needs_a_function():
    with pytest.raises(InvalidError):
        UserWatermark("newest")


def test_only_observed_percentile_needs_delays():
    """Other policies must not pay for the measurement."""
    assert [wants_delays(policy) for policy in POLICIES] == [False, True, False, False, False]


@pytest.mark.parametrize("arguments", [(0,), (101,), (99, 0)])
def test_observed_percentile_refuses_invalid_arguments(arguments):
    with pytest.raises(InvalidError):
        ObservedPercentile(*arguments)


def test_observed_percentile_waits_for_records_min():
    logic = ObservedPercentile(50, records_min=3).start()
    watch = Watch(stream="s", newest={DEFAULT_MEMBER: 1_000}, with_delays=True)

    logic.observe(observe_times(watch, np.array([900, 1_000])).times)
    assert logic.watermark == TIME_MIN_US
    logic.observe(observe_times(watch, np.array([900, 900, 1_100])).times)

    assert logic.watermark == 1_000


@pytest.mark.parametrize("percentile", [90, 99])
def test_observed_percentile_leaves_its_share_of_late_records(percentile):
    """The disorder is skewed."""
    random = np.random.default_rng(7)
    count, size = 200_000, 500
    made = np.arange(count) * 1_000
    arrival = made + random.lognormal(10, 2, count)
    at = made[np.argsort(arrival)]
    logic, newest, late = ObservedPercentile(percentile).start(), {}, []
    for start in range(0, count, size):
        batch = at[start : start + size]
        late.append(batch < logic.watermark)
        logic.observe(observe_times(Watch(stream="s", newest=newest, with_delays=True), batch).times)
        newest = {DEFAULT_MEMBER: max(newest.get(DEFAULT_MEMBER, 0), int(batch.max()))}

    share = 100 * float(np.concatenate(late[40:]).mean())

    assert share == pytest.approx(100 - percentile, rel=0.5)
