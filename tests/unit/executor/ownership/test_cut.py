"""Cuts: what replaces intervals has their keys, no more and no fewer."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millpond.executor.ownership.cuts import Cut
from millpond.statestore.errors import InternalError, InvalidError
from millpond.statestore.interval import Interval, intervals_from_boundaries

KEYS = st.lists(st.text(min_size=1, max_size=2), min_size=1, max_size=6, unique=True).map(sorted)


@given(keys=KEYS)
def test_a_split_and_its_merge_are_each_others_inverse(keys: list[str]) -> None:
    """Merging what a split made gives the interval that was split."""
    split = Cut.split(Interval("c"), keys)

    assert split.by == intervals_from_boundaries("c", keys)
    assert split.kind == "split"
    assert Cut.merge(split.by).by == (Interval("c"),)
    assert Cut.merge(split.by).kind == "merge"


@pytest.mark.parametrize("keys", [[], ["a"], ["g", "e"], ["e", "e"], ["z"]])
def test_a_split_needs_rising_keys_inside(keys: list[str]) -> None:
    """The first key of an interval divides nothing, and neither does one outside it."""
    with pytest.raises(InvalidError, match="rising keys inside"):
        Cut.split(Interval("c", "a", "m"), keys)


def test_only_neighbours_are_merged() -> None:
    """Intervals with keys between them, or a single one, are not merged."""
    first, second, third = intervals_from_boundaries("c", ["g", "m"])

    for chosen in ([first, third], [second], []):
        with pytest.raises(InvalidError, match="neighbours"):
            Cut.merge(chosen)


def test_a_cut_leaves_no_key_out() -> None:
    """Successors with other bounds, a gap, another computation or one of the replaced intervals are a bug."""
    whole, low, high = Interval("c"), Interval("c", "", "m"), Interval("c", "m")
    for replaced, by in (
        ((whole,), (low,)),
        ((whole,), (Interval("c", "", "g"), high)),
        ((whole,), (Interval("d", "", "m"), Interval("d", "m"))),
        ((low, high), (low, high)),
    ):
        with pytest.raises(InternalError):
            Cut(replaced, by)
