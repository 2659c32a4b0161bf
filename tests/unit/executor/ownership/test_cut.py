"""Cuts of intervals."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millpond.executor.ownership.cuts import Cut
from millpond.statestore.errors import InternalError, InvalidError
from millpond.statestore.interval import Interval, intervals_from_boundaries

KEYS = st.lists(st.text(min_size=1, max_size=2), min_size=1, max_size=6, unique=True).map(sorted)


@given(keys=KEYS)
def test_merge_of_a_split_restores_the_interval(keys: list[str]) -> None:
    split = Cut.split(Interval("c"), keys)

    assert split.by == intervals_from_boundaries("c", keys)
    assert split.kind == "split"
    assert Cut.merge(split.by).by == (Interval("c"),)
    assert Cut.merge(split.by).kind == "merge"


@pytest.mark.parametrize("keys", [[], ["a"], ["g", "e"], ["e", "e"], ["z"]])
def test_split_needs_rising_keys_inside_the_interval(keys: list[str]) -> None:
    """The first key of an interval divides nothing."""
    with pytest.raises(InvalidError, match="rising keys inside"):
        Cut.split(Interval("c", "a", "m"), keys)


def test_merge_needs_two_or_more_neighbours() -> None:
    first, second, third = intervals_from_boundaries("c", ["g", "m"])

    for chosen in ([first, third], [second], []):
        with pytest.raises(InvalidError, match="neighbours"):
            Cut.merge(chosen)


def test_cut_with_other_keys_is_an_internal_error() -> None:
    """The successors have other bounds, a gap, another computation, or include a replaced interval."""
    whole, low, high = Interval("c"), Interval("c", "", "m"), Interval("c", "m")
    for replaced, by in (
        ((whole,), (low,)),
        ((whole,), (Interval("c", "", "g"), high)),
        ((whole,), (Interval("d", "", "m"), Interval("d", "m"))),
        ((low, high), (low, high)),
    ):
        with pytest.raises(InternalError):
            Cut(replaced, by)
