"""Intervals: their keys and their names in the table."""

from __future__ import annotations

from bisect import bisect_right

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millpond.statestore.errors import InvalidError
from millpond.statestore.interval import Interval, intervals_from_boundaries, locate

TEXT = st.text(max_size=8)


@given(computation=TEXT, low=TEXT, high=st.none() | TEXT)
def test_interval_id_round_trips(computation: str, low: str, high: str | None) -> None:
    """Names and bounds may hold any character."""
    interval = Interval(computation, low, high)

    assert Interval.from_app_id(interval.app_id) == interval


@pytest.mark.parametrize("app_id", ["", "sink", "millpond/superstep/p", "interval/c//"])
def test_other_ids_name_no_interval(app_id: str) -> None:
    assert Interval.from_app_id(app_id) is None


@given(boundaries=st.lists(TEXT.filter(bool), unique=True).map(sorted), key=TEXT)
def test_each_key_has_one_interval(boundaries: list[str], key: str) -> None:
    intervals = intervals_from_boundaries("c", boundaries)
    holders = [number for number, interval in enumerate(intervals) if interval.contains(key)]

    assert (
        holders == [locate([interval.low for interval in intervals], key)] == [bisect_right(boundaries, key)]
    )


@pytest.mark.parametrize("boundaries", [["b", "a"], ["a", "a"], [""]])
def test_boundaries_must_rise(boundaries: list[str]) -> None:
    with pytest.raises(InvalidError, match="must rise"):
        intervals_from_boundaries("c", boundaries)
