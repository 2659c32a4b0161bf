"""The choice of files to part after a split."""

from __future__ import annotations

from dataclasses import replace

from millpond.gc.compaction import Compaction, plan_parting
from millpond.statestore.interval import Interval, intervals_from_boundaries
from millpond.statestore.log.files import LiveFile
from millpond.statestore.types import Superstep, TableVersion

WHOLE = Interval("counter")
LOW, HIGH = intervals_from_boundaries("counter", ["m"])


def file(superstep: int, interval: Interval = WHOLE, low: str = "a", high: str = "z") -> LiveFile:
    """Make a file of a superstep with keys from ``low`` to ``high``."""
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


def test_shared_files_are_parted_together_and_completely() -> None:
    """Nothing is older than the parts, so they may drop tombstones."""
    parts = plan(file(2), file(1), file(3, LOW, "a", "b"), file(4, HIGH, "n", "z"))

    assert supersteps(parts) == [1, 2]
    assert [(part.interval, part.is_complete) for part in parts] == [(LOW, True), (HIGH, True)]
    assert parts[0].size_bytes == 20


def test_files_within_one_interval_are_not_parted() -> None:
    """The interval's own compactions replace them."""
    assert plan(file(1, WHOLE, "a", "c"), file(2, WHOLE, "n", "z")) == ()
    assert plan(file(1, LOW, "a", "c"), intervals=(LOW, HIGH)) == ()
    assert plan(file(1), intervals=(WHOLE,)) == ()


def test_file_between_two_shared_ones_is_parted_with_them() -> None:
    """A parting covers supersteps without gaps; files after the last shared one stay."""
    assert supersteps(plan(file(1), file(2, WHOLE, "a", "c"), file(3), file(4, WHOLE, "a", "c"))) == [1, 2, 3]


def test_files_of_the_older_split_are_parted_first() -> None:
    """A part is not complete where the interval has an older file."""
    lower, upper = intervals_from_boundaries("counter", ["g", "m"])[:2]
    intervals = (lower, upper, HIGH)

    first = plan(file(1), file(2, LOW, "a", "l"), intervals=intervals)
    assert supersteps(first) == [1]
    assert [part.interval for part in first] == [lower, upper, HIGH]

    then = plan(file(1, lower, "a", "c"), file(2, LOW, "a", "l"), intervals=intervals)
    assert [(part.interval, part.is_complete) for part in then] == [(lower, False), (upper, True)]


def test_files_of_the_last_superstep_are_not_parted() -> None:
    """Their productions may be undelivered."""
    assert supersteps(plan(file(1), file(2), before=2)) == [1]
    assert plan(file(2), before=2) == ()


def test_file_of_another_engine_stops_parting() -> None:
    """It mixes old rows with new ones."""
    assert plan(file(1), replace(file(2), tags={})) == ()
    assert plan(replace(file(1), max_superstep=None), file(2)) == ()


def test_file_with_unknown_bounds_is_shared() -> None:
    assert supersteps(plan(replace(file(1), max_key=None))) == [1]
