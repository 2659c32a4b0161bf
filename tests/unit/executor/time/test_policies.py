"""Injector policies: in order, by observed percentile, by the user's function, and perfect."""

from __future__ import annotations

import numpy as np
import pytest

from millpond.executor.inputs.extraction import times_seen
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
    """Some records."""
    return TimesSeen(newest_at=newest_at, oldest_at=newest_at if oldest_at is None else oldest_at)


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: type(policy).__name__)
def test_all_of_them_keep_the_rules_of_a_watermark(policy):
    """It starts where it was saved, never falls, takes promises, and ends after all time."""
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


def test_a_source_in_order_is_followed_closely():
    """The watermark is the newest record's time."""
    logic = Monotone().start()

    logic.observe(seen(70, 10))

    assert logic.watermark == 70


def test_a_bounded_input_is_waited_for():
    """Records move nothing before the end."""
    logic = Perfect().start()

    logic.observe(seen(70))

    assert logic.watermark == TIME_MIN_US


def test_the_sources_own_marks_are_followed():
    """Records' times move nothing; marks do, and never back."""
    logic = MarkColumn("created").start()

    logic.observe(seen(70))
    assert logic.watermark == TIME_MIN_US
    logic.observe(TimesSeen(newest_at=80, oldest_at=80, mark_at=40))
    logic.observe(TimesSeen(newest_at=90, oldest_at=90, mark_at=30))

    assert logic.watermark == 40


@pytest.mark.parametrize("column", ["", None, 5])
def test_marks_need_a_column(column):
    """Anything else is refused where it is written."""
    with pytest.raises(InvalidError):
        MarkColumn(column)


def test_the_users_function_decides():
    """It is given what was seen, and may say nothing."""
    logic = UserWatermark(lambda seen: seen.oldest_at - 5 if seen.oldest_at > 10 else None).start()

    logic.observe(seen(9, 8))
    assert logic.watermark == TIME_MIN_US
    logic.observe(seen(90, 20))
    assert logic.watermark == 15


def test_a_users_function_that_fails_is_named():
    """What it raised is the error's cause."""
    logic = UserWatermark(lambda seen: 1 // 0).start()

    with pytest.raises(InvalidError, match="watermark's function raised ZeroDivisionError"):
        logic.observe(seen(5))


def test_a_user_watermark_needs_a_function():
    """Anything else is refused where it is written."""
    with pytest.raises(InvalidError):
        UserWatermark("newest")


def test_only_the_percentile_asks_for_delays():
    """Other policies do not pay for measuring them."""
    assert [wants_delays(policy) for policy in POLICIES] == [False, True, False, False, False]


@pytest.mark.parametrize("arguments", [(0,), (101,), (99, 0)])
def test_a_percentile_that_cannot_work_is_refused(arguments):
    """An impossible percentile or number of records is an error where it is written."""
    with pytest.raises(InvalidError):
        ObservedPercentile(*arguments)


def test_the_percentile_waits_until_it_knows_enough():
    """Before that many records have been measured, the watermark stands."""
    logic = ObservedPercentile(50, records_min=3).start()
    watch = Watch(stream="s", newest={DEFAULT_MEMBER: 1_000}, with_delays=True)

    logic.observe(times_seen(watch, np.array([900, 1_000]), DEFAULT_MEMBER))
    assert logic.watermark == TIME_MIN_US
    logic.observe(times_seen(watch, np.array([900, 900, 1_100]), DEFAULT_MEMBER))

    assert logic.watermark == 1_000


@pytest.mark.parametrize("percentile", [90, 99])
def test_about_that_many_records_are_late(percentile):
    """With skewed disorder the share of late records is what the percentile leaves."""
    random = np.random.default_rng(7)
    count, size = 200_000, 500
    made = np.arange(count) * 1_000
    arrival = made + random.lognormal(10, 2, count)
    at = made[np.argsort(arrival)]
    logic, newest, late = ObservedPercentile(percentile).start(), {}, []
    for start in range(0, count, size):
        batch = at[start : start + size]
        late.append(batch < logic.watermark)
        logic.observe(times_seen(Watch(stream="s", newest=newest, with_delays=True), batch, DEFAULT_MEMBER))
        newest = {DEFAULT_MEMBER: max(newest.get(DEFAULT_MEMBER, 0), int(batch.max()))}

    share = 100 * float(np.concatenate(late[40:]).mean())

    assert share == pytest.approx(100 - percentile, rel=0.5)
