"""Injector watermarks: bounded disorder, promises of the source, restarts."""

from __future__ import annotations

from datetime import timedelta

import pytest

from millpond.executor.time.observations import TimesSeen
from millpond.executor.time.watermark_policies import BoundedDisorder, ManualWatermark, WatermarkPolicy
from millpond.statestore.errors import InvalidError
from millpond.statestore.types import TIME_MAX_US, TIME_MIN_US


def seen(at: int) -> TimesSeen:
    """One record at ``at``."""
    return TimesSeen(newest_at=at, oldest_at=at)


def test_nothing_is_known_before_the_first_record():
    """A new injector's watermark is before all time."""
    assert BoundedDisorder("30s").start().watermark == TIME_MIN_US


def test_it_follows_the_newest_record_at_the_bound():
    """The watermark is the newest time less the bound."""
    logic = BoundedDisorder("30s").start()

    logic.observe(seen(100_000_000))

    assert logic.watermark == 70_000_000


def test_it_never_falls():
    """Older records and older promises change nothing."""
    logic = BoundedDisorder(0).start()
    logic.observe(seen(100))

    logic.observe(seen(50))
    logic.advance(60)

    assert logic.watermark == 100


def test_the_source_may_promise_more():
    """A promise moves the watermark past the records."""
    logic = BoundedDisorder("1s").start()
    logic.observe(seen(100))

    logic.advance(500)

    assert logic.watermark == 500


def test_it_goes_on_from_a_saved_watermark():
    """After a restart the watermark stands where it was journaled."""
    logic = BoundedDisorder(10).start(1_000)

    logic.observe(seen(1_005))
    assert logic.watermark == 1_000
    logic.observe(seen(1_020))
    assert logic.watermark == 1_010


def test_a_finished_input_is_after_all_time():
    """The end of the input is the greatest watermark, and stays."""
    logic = BoundedDisorder(0).start()

    logic.finish()
    logic.observe(seen(5))

    assert logic.watermark == TIME_MAX_US


def test_a_very_old_record_does_not_underflow():
    """A bound that reaches back before all time leaves the watermark there."""
    logic = BoundedDisorder(2**63 - 1).start()

    logic.observe(seen(-(2**55)))

    assert logic.watermark == TIME_MIN_US


def test_a_manual_watermark_moves_only_by_promise():
    """Records leave it where it is."""
    logic = ManualWatermark().start()

    logic.observe(seen(100))
    assert logic.watermark == TIME_MIN_US
    logic.advance(70)
    assert logic.watermark == 70


@pytest.mark.parametrize("bound", ["-1s", -1, timedelta(seconds=-1), "soon", 1.5])
def test_a_bound_that_cannot_work_is_refused_at_once(bound):
    """A negative bound, or none at all, is an error where it is written."""
    with pytest.raises(InvalidError):
        BoundedDisorder(bound)


def test_both_are_policies():
    """Runners know a policy by its protocol."""
    assert isinstance(BoundedDisorder("1s"), WatermarkPolicy)
    assert isinstance(ManualWatermark(), WatermarkPolicy)
