"""Times of the last use of rows."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from millpond.executor.interval.row_cache import LastUses

BUNDLES = st.lists(st.lists(st.sampled_from("abcdefgh"), min_size=1, unique=True), max_size=12)


@given(BUNDLES)
def test_estimated_age_is_at_least_the_real_age(bundles: list[list[str]]) -> None:
    """A row may get the age of an earlier bundle once that bundle's first row was used again."""
    uses, order, last = LastUses(), dict[str, int](), dict[str, int]()
    for number, bundle in enumerate(bundles):
        for key in bundle:
            order.pop(key, None)
            order[key] = last[key] = number
        uses.record(bundle[0], (number, 0))
    now = len(bundles)
    ages = uses.ages(list(order), (now, 0))

    assert (ages[:-1] >= ages[1:]).all()
    for key, age in zip(order, ages.tolist(), strict=True):
        assert age >= now - last[key]
    firsts = {bundle[0] for bundle in bundles}
    assert all(
        age == now - last[key]
        for key, age in zip(order, ages.tolist(), strict=True)
        if key in firsts and bundles[last[key]][0] == key
    )


def test_age_follows_the_clock_that_advanced_further() -> None:
    """The watermark stands still without input, and runs ahead while old input is read."""
    uses = LastUses()
    uses.record("a", (100, 1_000))

    assert uses.ages(["a"], (100, 1_005)).tolist() == [5]
    assert uses.ages(["a"], (900, 1_005)).tolist() == [800]
    assert uses.ages(["z", "a"], (100, 1_000)).tolist() == [float("inf"), 0]


def test_bundle_of_an_evicted_row_is_forgotten() -> None:
    """The bundle's other rows then count to the bundle before."""
    uses = LastUses()
    for number, key in enumerate("abc"):
        uses.record(key, (number, 0))
    uses.keep_only(["a", "c"])

    assert uses.ages(["a", "x", "c"], (10, 0)).tolist() == [10, 10, 8]
