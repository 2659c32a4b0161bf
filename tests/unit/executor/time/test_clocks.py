"""Clocks of timers, and their names in rows."""

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
def test_clock_name_survives_a_round_trip(clock, name):
    assert clock_name(*clock) == name
    assert parse_clock(name) == clock
    assert parse_timer_clock(name) == (*clock, True)
    assert parse_timer_clock(timer_clock_name(*clock, holds=False)) == (*clock, False)


@pytest.mark.parametrize("name", ["", "evening", "event@", "event@0", "event@101", "event@ninety"])
def test_unknown_clock_name_is_a_data_error(name):
    with pytest.raises(DataError):
        parse_clock(name)


def test_untracked_percentile_reads_the_low_watermark():
    """A timer at such a percentile fires late rather than never."""
    clocks = Clocks(watermark=5, wall_time=7, percentile_watermarks={90.0: 9})

    assert [clocks.of(TimeDomain.EVENT, each) for each in (EXACT, 90.0, 80.0)] == [5, 9, 5]
    assert (clocks.of(TimeDomain.WALL, EXACT), clocks.of(TimeDomain.HOLD, EXACT)) == (7, TIME_MIN_US)


def test_declared_percentiles_are_sorted_and_unique():
    """The low watermark, percentile 100, needs no declaration."""
    assert declared_percentiles((90, 99.5, 100, 90.0), "c") == (99.5, 90.0)


@pytest.mark.parametrize("declared", [90, "90", (0,), (101,), ("90",), None])
def test_invalid_percentiles_are_refused(declared):
    with pytest.raises(InvalidError):
        declared_percentiles(declared, "c")
