"""The choice of a key at which to split an interval."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from millpond.executor.ownership.cuts import middle_of
from millpond.statestore.interval import Interval

SAMPLES = st.lists(st.text(alphabet="abcdefgh", min_size=1, max_size=2), max_size=30)


@given(sample=SAMPLES)
def test_middle_divides_the_work_most_evenly(sample: list[str]) -> None:
    """Samples with a single key have no middle."""
    interval = Interval("c", "b", "g")
    inside = [key for key in sample if interval.contains(key)]

    def difference(cut: str) -> int:
        below = sum(key < cut for key in inside)
        return abs(below - (len(inside) - below))

    middle = middle_of(interval, sample)

    if middle is None:
        assert len(set(inside)) < 2
    else:
        assert min(inside) < middle <= max(inside)
        assert all(difference(middle) <= difference(key) for key in set(inside) - {min(inside)})


def test_long_key_is_truncated_to_a_prefix_that_still_divides() -> None:
    low, high = "a" * 300, "b" * 300

    assert middle_of(Interval("c"), [low, high]) == "b" * 256
    assert middle_of(Interval("c"), ["b" * 299, "b" * 300]) is None
