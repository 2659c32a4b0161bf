"""The cuts that a load calls for."""

from __future__ import annotations

from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st

from millpond.executor.ownership.balancer import BalancePolicy, IntervalLoad, cuts_for, hot_keys
from millpond.executor.ownership.cuts import Cut
from millpond.statestore.interval import Interval, intervals_from_boundaries

POLICY = BalancePolicy()
CUTS = ["b", "c", "d", "e", "f", "g", "h"]


def loads(*work_ms: float, per_key: int = 8) -> dict[Interval, IntervalLoad]:
    """Make intervals of one letter each, with ``per_key`` equally costly keys."""
    intervals = intervals_from_boundaries("c", CUTS[: len(work_ms) - 1])
    letters = ["a", *CUTS]
    return {
        interval: IntervalLoad(
            work_ms=work,
            records=work,
            keys=tuple(f"{letter}{number}" for number in range(per_key)) if work else (),
        )
        for interval, letter, work in zip(intervals, letters, work_ms, strict=False)
    }


def cuts(
    given: Mapping[Interval, IntervalLoad], parallelism: int = 4, policy: BalancePolicy = POLICY
) -> list[Cut]:
    return list(cuts_for(given, policy, parallelism=parallelism))


def test_load_without_hot_or_cold_intervals_is_not_cut() -> None:
    assert not cuts(loads(100, 100, 100, 100))
    assert not cuts(loads(150, 90, 70, 90))


def test_hot_interval_is_split_into_fair_shares() -> None:
    """An interval with three quarters of the work of four becomes three."""
    (cut,) = cuts(loads(900, 100, 100, 100))

    assert cut.replaced == (Interval("c", "", "b"),)
    assert len(cut.by) == 3


def test_single_interval_is_split_for_all_tasks() -> None:
    """A computation whose first input had one key starts with one interval."""
    (cut,) = cuts(loads(1_000), parallelism=4)

    assert len(cut.by) == 4


def test_little_work_is_not_cut() -> None:
    """A few milliseconds a superstep are not worth a cut."""
    assert not cuts(loads(40, 1, 1, 1))


def test_cold_neighbours_are_merged() -> None:
    """Each task must keep an interval."""
    given = loads(1, 1, 100, 100, 100, 100, 2, 2)

    merged = cuts(given, parallelism=4)

    assert [len(cut.replaced) for cut in merged] == [2, 2]
    assert not cuts(given, parallelism=8)
    assert [len(cut.replaced) for cut in cuts(given, parallelism=7)] == [2]


def test_single_hot_key_is_named_and_not_cut() -> None:
    given = loads(900, 100, 100, 100, per_key=1)

    assert not cuts(given)
    assert hot_keys(given, POLICY, parallelism=4) == ((Interval("c", "", "b"), "a0"),)
    assert not hot_keys(loads(900, 100, 100, 100), POLICY, parallelism=4)


def test_split_stops_at_intervals_max() -> None:
    (cut,) = cuts(loads(9_000, 100, 100, 100), policy=BalancePolicy(intervals_max=5))

    assert len(cut.by) == 2
    assert not cuts(loads(9_000, 100, 100, 100), policy=BalancePolicy(intervals_max=4))


@given(work=st.lists(st.integers(0, 2_000), min_size=1, max_size=8), parallelism=st.integers(1, 8))
def test_cut_does_not_call_for_its_opposite(work: list[int], parallelism: int) -> None:
    """Assume that the parts get equal shares of the work."""
    before = loads(*map(float, work))
    for cut in cuts(before, parallelism):
        total = sum(before[interval].work_ms for interval in cut.replaced)
        after = {interval: load for interval, load in before.items() if interval not in cut.replaced}
        after |= {
            part: IntervalLoad(
                work_ms=total / len(cut.by), records=0, keys=tuple(f"{part.low}{n}" for n in range(8))
            )
            for part in cut.by
        }
        ordered = {interval: after[interval] for interval in sorted(after, key=lambda interval: interval.low)}
        for following in cuts(ordered, parallelism):
            assert following.kind == cut.kind or {*following.replaced}.isdisjoint(cut.by)
