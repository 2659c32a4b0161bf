"""Intervals: which keys they hold, and how the table names them."""

from __future__ import annotations

from bisect import bisect_right

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millpond.statestore.errors import InvalidError
from millpond.statestore.interval import Interval, intervals_from_boundaries, locate

TEXT = st.text(max_size=8)


@given(computation=TEXT, low=TEXT, high=st.none() | TEXT)
def test_a_name_in_the_table_names_one_interval(computation: str, low: str, high: str | None) -> None:
    """Whatever characters names and bounds have, slashes and signs of equality among them, the id leads back."""
    interval = Interval(computation, low, high)

    assert Interval.from_app_id(interval.app_id) == interval


@pytest.mark.parametrize("app_id", ["", "sink", "millpond/superstep/p", "interval/c//"])
def test_other_ids_name_no_interval(app_id: str) -> None:
    """Ids of sinks, positions and other applications are none of an interval's."""
    assert Interval.from_app_id(app_id) is None


@given(boundaries=st.lists(TEXT.filter(bool), unique=True).map(sorted), key=TEXT)
def test_each_key_has_one_interval(boundaries: list[str], key: str) -> None:
    """Intervals between boundaries leave no key out and share none, and each key is located in its own."""
    intervals = intervals_from_boundaries("c", boundaries)
    holders = [number for number, interval in enumerate(intervals) if interval.contains(key)]

    assert (
        holders == [locate([interval.low for interval in intervals], key)] == [bisect_right(boundaries, key)]
    )


@pytest.mark.parametrize("boundaries", [["b", "a"], ["a", "a"], [""]])
def test_boundaries_rise(boundaries: list[str]) -> None:
    """Boundaries out of order, repeated or empty are refused."""
    with pytest.raises(InvalidError, match="must rise"):
        intervals_from_boundaries("c", boundaries)
