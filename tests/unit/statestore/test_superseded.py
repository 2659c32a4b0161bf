"""Intervals replaced by splits and merges."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from millpond.statestore.interval import Interval, intervals_from_boundaries, superseded
from millpond.statestore.types import Sequencer

CUTS = st.lists(st.sampled_from("abcdefgh"), max_size=5, unique=True).map(sorted)


@given(st.lists(CUTS, min_size=1, max_size=5), st.sampled_from([["c"], ["c", "d"]]))
def test_only_intervals_of_last_cut_are_live(history: list[list[str]], computations: list[str]) -> None:
    sequencers: dict[Interval, Sequencer] = {}
    for number, cuts in enumerate(history, start=1):
        for computation in computations:
            for interval in intervals_from_boundaries(computation, cuts):
                sequencers[interval] = Sequencer(number)
    live = sequencers.keys() - superseded(sequencers).keys()

    assert live == {
        interval
        for computation in computations
        for interval in intervals_from_boundaries(computation, history[-1])
    }


def test_equal_sequencers_replace_nothing() -> None:
    same = {Interval("c"): Sequencer(1), Interval("c", "m"): Sequencer(1)}

    assert superseded(same) == {}
