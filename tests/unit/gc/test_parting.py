"""Which files are parted after a split, and in which order."""

from __future__ import annotations

from dataclasses import replace

from millpond.gc.compaction import Compaction, plan_parting
from millpond.statestore.interval import Interval, intervals_from_boundaries
from millpond.statestore.log.files import LiveFile
from millpond.statestore.types import Superstep, TableVersion

WHOLE = Interval("counter")
LOW, HIGH = intervals_from_boundaries("counter", ["m"])


def file(superstep: int, interval: Interval = WHOLE, low: str = "a", high: str = "z") -> LiveFile:
    """A file of a superstep with keys from ``low`` to ``high``."""
    return LiveFile(
        path=f"{superstep}-{low}.parquet",
        size_bytes=10,
        computation="counter",
        partition_values={},
        min_key=low,
        max_key=high,
        min_superstep=superstep,
        max_superstep=superstep,
        num_records=1,
        tags={"interval": interval.app_id, "superstep": str(superstep), "productions": "0"},
        added_version=TableVersion(superstep),
    )


def plan(
    *files: LiveFile, intervals: tuple[Interval, ...] = (LOW, HIGH), before: int = 100
) -> tuple[Compaction, ...]:
    return plan_parting(files, intervals, before=Superstep(before))


def supersteps(parts: tuple[Compaction, ...]) -> list[int | None]:
    return [one.max_superstep for one in parts[0].files] if parts else []


def test_shared_files_are_parted_together() -> None:
    """Each interval gets one file of all of them, from which tombstones may go: nothing is older."""
    parts = plan(file(2), file(1), file(3, LOW, "a", "b"), file(4, HIGH, "n", "z"))

    assert supersteps(parts) == [1, 2]
    assert [(part.interval, part.is_complete) for part in parts] == [(LOW, True), (HIGH, True)]
    assert parts[0].size_bytes == 20


def test_files_that_lie_in_one_interval_stay() -> None:
    """What the interval's own compactions replace is left to them."""
    assert plan(file(1, WHOLE, "a", "c"), file(2, WHOLE, "n", "z")) == ()
    assert plan(file(1, LOW, "a", "c"), intervals=(LOW, HIGH)) == ()
    assert plan(file(1), intervals=(WHOLE,)) == ()


def test_a_file_between_two_shared_ones_goes_along() -> None:
    """So that the stretch has no gap in time; one behind the last shared file stays."""
    assert supersteps(plan(file(1), file(2, WHOLE, "a", "c"), file(3), file(4, WHOLE, "a", "c"))) == [1, 2, 3]


def test_of_two_splits_the_older_files_come_first() -> None:
    """The next stretch is not complete where a file of its own is older."""
    lower, upper = intervals_from_boundaries("counter", ["g", "m"])[:2]
    intervals = (lower, upper, HIGH)

    first = plan(file(1), file(2, LOW, "a", "l"), intervals=intervals)
    assert supersteps(first) == [1]
    assert [part.interval for part in first] == [lower, upper, HIGH]

    then = plan(file(1, lower, "a", "c"), file(2, LOW, "a", "l"), intervals=intervals)
    assert [(part.interval, part.is_complete) for part in then] == [(lower, False), (upper, True)]


def test_the_last_superstep_waits() -> None:
    """Its productions may be undelivered."""
    assert supersteps(plan(file(1), file(2), before=2)) == [1]
    assert plan(file(2), before=2) == ()


def test_files_of_other_engines_end_it() -> None:
    """They mix old rows with new ones, so no stretch of time is certain."""
    assert plan(file(1), replace(file(2), tags={})) == ()
    assert plan(replace(file(1), max_superstep=None), file(2)) == ()


def test_unknown_bounds_may_be_anywhere() -> None:
    """A file whose range of keys is not known is shared."""
    assert supersteps(plan(replace(file(1), max_key=None))) == [1]
