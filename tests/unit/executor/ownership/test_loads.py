"""Loads of intervals."""

from __future__ import annotations

from millpond.executor.interval.bundle import BundleStatistics
from millpond.executor.interval.row_update import BundleResult, Manifest
from millpond.executor.ownership.balancer import Loads
from millpond.statestore.interval import Interval, intervals_from_boundaries
from millpond.statestore.rows.row import Fence
from millpond.statestore.types import CommitNumber, Sequencer

LOW, HIGH = intervals_from_boundaries("c", ["m"])


def manifest(interval: Interval, work_ms: int, *keys: str) -> Manifest:
    """Make a task's report of an interval with one record for each key."""
    return Manifest(
        interval=interval,
        fence=Fence(Sequencer(1), CommitNumber(1)),
        file=None,
        result=BundleResult(
            updates=None, statistics=BundleStatistics(records=len(keys), timers=1), key_sample=keys
        ),
        work_us=work_ms * 1_000,
        home="node/7",
    )


def test_load_is_the_median_over_supersteps() -> None:
    """The first superstep after a start reads more than others."""
    loads = Loads(3)
    for work_ms in (900, 20, 10):
        loads.record([manifest(LOW, work_ms, "a", "b")], [LOW])

    seen = loads.of([LOW])

    assert seen is not None
    assert (seen[LOW].work_ms, seen[LOW].records, seen[LOW].home) == (20, 3, "node/7")
    assert seen[LOW].keys == ("a", "b") * 3


def test_interval_without_a_bundle_has_no_work() -> None:
    """It must count, or it could never be found cold."""
    loads = Loads(2)
    for _ in range(2):
        loads.record([manifest(LOW, 10, "a")], [LOW, HIGH])

    seen = loads.of([LOW, HIGH])

    assert seen is not None
    assert (seen[HIGH].work_ms, seen[HIGH].keys) == (0, ())


def test_loads_are_unknown_until_all_intervals_have_enough_supersteps() -> None:
    """New intervals of a cut start without history."""
    loads = Loads(2)
    loads.record([manifest(LOW, 10, "a")], [LOW, HIGH])
    assert loads.of([LOW, HIGH]) is None

    loads.record([manifest(LOW, 10, "a")], [LOW, HIGH])
    assert loads.of([LOW, HIGH]) is not None

    loads.forget([HIGH])
    assert loads.of([LOW, HIGH]) is None
