"""The load of an interval: a median over supersteps, and only once there are enough of them."""

from __future__ import annotations

from millpond.executor.interval.bundle import BundleStatistics
from millpond.executor.interval.row_update import BundleResult, Manifest
from millpond.executor.ownership.balancer import Loads
from millpond.statestore.interval import Interval, intervals_from_boundaries
from millpond.statestore.rows.row import Fence
from millpond.statestore.types import CommitNumber, Sequencer

LOW, HIGH = intervals_from_boundaries("c", ["m"])


def manifest(interval: Interval, work_ms: int, *keys: str) -> Manifest:
    """What a task reports of an interval with one record a key."""
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


def test_a_single_superstep_does_not_count_for_all() -> None:
    """One that read much, as the first after a start does, changes the median little."""
    loads = Loads(3)
    for work_ms in (900, 20, 10):
        loads.record([manifest(LOW, work_ms, "a", "b")], [LOW])

    seen = loads.of([LOW])

    assert seen is not None
    assert (seen[LOW].work_ms, seen[LOW].records, seen[LOW].home) == (20, 3, "node/7")
    assert seen[LOW].keys == ("a", "b") * 3


def test_an_interval_without_a_bundle_had_nothing_to_do() -> None:
    """It counts with no work, so that it can be seen to be cold."""
    loads = Loads(2)
    for _ in range(2):
        loads.record([manifest(LOW, 10, "a")], [LOW, HIGH])

    seen = loads.of([LOW, HIGH])

    assert seen is not None
    assert (seen[HIGH].work_ms, seen[HIGH].keys) == (0, ())


def test_nothing_is_said_until_all_have_been_seen_for_long_enough() -> None:
    """After a cut the new intervals begin from nothing."""
    loads = Loads(2)
    loads.record([manifest(LOW, 10, "a")], [LOW, HIGH])
    assert loads.of([LOW, HIGH]) is None

    loads.record([manifest(LOW, 10, "a")], [LOW, HIGH])
    assert loads.of([LOW, HIGH]) is not None

    loads.forget([HIGH])
    assert loads.of([LOW, HIGH]) is None
