"""Clocks: their names in rows, and what they show to timers."""

from __future__ import annotations

import pytest

from millpond.executor.time.clocks import (
    EXACT,
    Clocks,
    clock_name,
    declared_percentiles,
    parse_clock,
    parse_timer_clock,
    timer_clock_name,
)
from millpond.statestore.errors import DataError, InvalidError
from millpond.statestore.rows.row import TimeDomain
from millpond.statestore.types import TIME_MIN_US


@pytest.mark.parametrize(
    ("clock", "name"),
    [
        ((TimeDomain.EVENT, EXACT), "event"),
        ((TimeDomain.WALL, EXACT), "wall"),
        ((TimeDomain.HOLD, EXACT), "hold"),
        ((TimeDomain.RECORD, EXACT), "record"),
        ((TimeDomain.EVENT, 80), "event@80.0"),
        ((TimeDomain.EVENT, 90.0), "event@90.0"),
        ((TimeDomain.EVENT, 99.99), "event@99.99"),
    ],
)
def test_a_clock_has_one_name(clock, name):
    """What is written is what is read."""
    assert clock_name(*clock) == name
    assert parse_clock(name) == clock
    assert parse_timer_clock(name) == (*clock, True)
    assert parse_timer_clock(timer_clock_name(*clock, holds=False)) == (*clock, False)


@pytest.mark.parametrize("name", ["", "evening", "event@", "event@0", "event@101", "event@ninety"])
def test_a_clock_that_no_version_writes_is_damage(name):
    """An unknown name in a row is an error of the data."""
    with pytest.raises(DataError):
        parse_clock(name)


def test_a_percentile_that_is_not_tracked_is_the_low_watermark():
    """A timer that waits for it fires, if later than it was meant to."""
    clocks = Clocks(watermark=5, wall_time=7, percentile_watermarks={90.0: 9})

    assert [clocks.of(TimeDomain.EVENT, each) for each in (EXACT, 90.0, 80.0)] == [5, 9, 5]
    assert (clocks.of(TimeDomain.WALL, EXACT), clocks.of(TimeDomain.HOLD, EXACT)) == (7, TIME_MIN_US)


def test_percentiles_are_declared_once():
    """They come sorted, and 100 needs no declaration."""
    assert declared_percentiles((90, 99.5, 100, 90.0), "c") == (99.5, 90.0)


@pytest.mark.parametrize("declared", [90, "90", (0,), (101,), ("90",), None])
def test_what_is_no_set_of_percentiles_is_refused(declared):
    """A computation that declares anything else cannot be added."""
    with pytest.raises(InvalidError):
        declared_percentiles(declared, "c")
