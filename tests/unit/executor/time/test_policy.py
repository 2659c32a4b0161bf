"""Bounded disorder and manual watermarks."""

from __future__ import annotations

from datetime import timedelta

import pytest

from millpond.executor.time.observations import TimesSeen
from millpond.executor.time.watermark_policies import BoundedDisorder, ManualWatermark, WatermarkPolicy
from millpond.statestore.errors import InvalidError
from millpond.statestore.types import TIME_MAX_US, TIME_MIN_US


def seen(at: int) -> TimesSeen:
    return TimesSeen(newest_at=at, oldest_at=at)


def test_watermark_before_the_first_record_is_the_least_time():
    assert BoundedDisorder("30s").start().watermark == TIME_MIN_US


def test_watermark_is_the_newest_time_less_the_bound():
    logic = BoundedDisorder("30s").start()

    logic.observe(seen(100_000_000))

    assert logic.watermark == 70_000_000


def test_watermark_never_falls():
    logic = BoundedDisorder(0).start()
    logic.observe(seen(100))

    logic.observe(seen(50))
    logic.advance(60)

    assert logic.watermark == 100


def test_advance_moves_the_watermark_past_the_records():
    logic = BoundedDisorder("1s").start()
    logic.observe(seen(100))

    logic.advance(500)

    assert logic.watermark == 500


def test_saved_watermark_is_the_start():
    logic = BoundedDisorder("10us").start(1_000)

    logic.observe(seen(1_005))
    assert logic.watermark == 1_000
    logic.observe(seen(1_020))
    assert logic.watermark == 1_010


def test_watermark_of_a_finished_input_is_the_greatest_time():
    logic = BoundedDisorder(0).start()

    logic.finish()
    logic.observe(seen(5))

    assert logic.watermark == TIME_MAX_US


def test_large_bound_does_not_underflow():
    logic = BoundedDisorder(f"{2**63 - 1}us").start()

    logic.observe(seen(-(2**55)))

    assert logic.watermark == TIME_MIN_US


def test_manual_watermark_ignores_records():
    logic = ManualWatermark().start()

    logic.observe(seen(100))
    assert logic.watermark == TIME_MIN_US
    logic.advance(70)
    assert logic.watermark == 70


@pytest.mark.parametrize("bound", ["-1s", 1, timedelta(seconds=-1), "soon", 1.5])
def test_invalid_bound_is_refused_when_declared(bound):
    with pytest.raises(InvalidError):
        BoundedDisorder(bound)


def test_both_policies_fulfil_the_protocol():
    """Runners recognise a policy by its protocol."""
    assert isinstance(BoundedDisorder("1s"), WatermarkPolicy)
    assert isinstance(ManualWatermark(), WatermarkPolicy)
