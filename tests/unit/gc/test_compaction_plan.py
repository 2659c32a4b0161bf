"""The choice of files that a compaction rewrites."""

from __future__ import annotations

from dataclasses import replace

import pytest

from millpond.gc.compaction import Compaction, CompactionPolicy, plan_compaction, younger_than
from millpond.statestore.errors import InvalidError
from millpond.statestore.interval import Interval
from millpond.statestore.log.files import LiveFile
from millpond.statestore.types import Superstep, TableVersion

INTERVAL = Interval("counter", "a", "m")
POLICY = CompactionPolicy(fan_in=4, files_max=10, small_bytes=100)


def own(superstep: int, size: int = 10) -> LiveFile:
    """A file that a superstep wrote."""
    return LiveFile(
        path=f"{superstep}.parquet",
        size_bytes=size,
        computation="counter",
        partition_values={},
        min_key="b",
        max_key="c",
        min_superstep=superstep,
        max_superstep=superstep,
        num_records=1,
        tags={"interval": INTERVAL.app_id, "superstep": str(superstep), "productions": "0"},
        added_version=TableVersion(superstep),
    )


def compacted(superstep: int, size: int) -> LiveFile:
    """A file that a compaction wrote: its statistics bound the supersteps from above only."""
    return replace(own(superstep, size), min_superstep=None)


def foreign(oldest: int, newest: int, size: int = 10) -> LiveFile:
    """A file into which another engine rewrote the rows of supersteps ``oldest`` to ``newest``."""
    return replace(own(newest, size), min_superstep=oldest, tags={})


def plan(*files: LiveFile, before: int = 1_000, everything: bool = False) -> Compaction | None:
    return plan_compaction(files, INTERVAL, before=Superstep(before), policy=POLICY, everything=everything)


def supersteps(compaction: Compaction | None) -> list[int]:
    return [] if compaction is None else [file.max_superstep for file in compaction.files]


def test_few_files_are_left_alone():
    """Below the fan-in nothing is rewritten."""
    assert plan(own(1), own(2), own(3)) is None


def test_small_files_become_one():
    """As many small files as the fan-in are compacted, in order of supersteps, whatever the order of the list."""
    assert supersteps(plan(own(3), own(1), own(4), own(2))) == [1, 2, 3, 4]


def test_a_large_old_file_is_left_out():
    """A compaction of small young files leaves the bulk out and is marked as not complete."""
    compaction = plan(compacted(5, 5_000), own(6), own(7), own(8), own(9))

    assert supersteps(compaction) == [6, 7, 8, 9]
    assert compaction is not None
    assert not compaction.is_complete


def test_young_files_of_half_the_size_of_the_oldest_compact_everything():
    """Young files that together are half as large as the bulk, give or take a fifth, are compacted into it."""
    for superstep in range(5, 50):
        bulk = compacted(superstep, 1_000)
        compaction = plan(bulk, own(60, 300), own(61, 301))

        assert supersteps(compaction) == [superstep, 60, 61]
        assert compaction is not None
        assert compaction.is_complete
        assert plan(bulk, own(60, 200), own(61, 199)) is None


def test_bulks_of_one_size_are_not_all_due_at_once():
    """With young files of exactly half their size some of many bulks are compacted, and the choice is the same
    each time.
    """
    due = [
        superstep
        for superstep in range(100)
        if plan(compacted(superstep, 1_000), own(200, 250), own(201, 250)) is not None
    ]

    assert 25 < len(due) < 75
    assert all(plan(compacted(superstep, 1_000), own(200, 250), own(201, 250)) for superstep in due)


def test_files_of_the_last_superstep_stay():
    """Files that may hold undelivered productions are not compacted."""
    assert supersteps(plan(*map(own, range(1, 7)), before=6)) == [1, 2, 3, 4, 5]


def test_compacting_a_higher_tier_includes_the_small_young_files():
    """When a tier is full its compaction begins at the tier's oldest file and ends at the youngest file of all."""
    files = [compacted(10, 9_000), *(compacted(10 + n, 300) for n in (1, 2, 3, 4)), own(20)]

    assert supersteps(plan(*files)) == [11, 12, 13, 14, 20]


def test_the_number_of_files_is_bounded():
    """With ``files_max`` files the young ones are compacted whatever their sizes."""
    sizes = [10**9, 10**7, 10**7, 10**6, 10**6, 10**5, 10**5, 10**4, 10**4, 10**3]
    files = [own(n, size) for n, size in enumerate(sizes, 1)]

    assert supersteps(plan(*files)) == list(range(2, 11))
    assert plan(*files[:-1]) is None


def test_no_compaction_is_too_large():
    """Files that exceed the memory bound are planned like any others."""
    policy = replace(POLICY, memory_bytes_max=39)
    compaction = plan_compaction([own(n) for n in range(4)], INTERVAL, before=Superstep(9), policy=policy)

    assert supersteps(compaction) == [0, 1, 2, 3]
    assert compaction is not None
    assert compaction.size_bytes == 40


def test_a_foreign_file_of_the_interval_is_compacted():
    """A file that another engine rewrote is compacted if it lies in the interval and in order."""
    assert supersteps(plan(foreign(1, 5), own(6), own(7), own(8))) == [5, 6, 7, 8]


def test_a_foreign_file_of_several_intervals_stays():
    """A file with other intervals' keys is never replaced; only younger files are."""
    wide = replace(foreign(1, 5), max_key="z")
    compaction = plan(wide, own(6), own(7), own(8), own(9))

    assert supersteps(compaction) == [6, 7, 8, 9]
    assert compaction is not None
    assert not compaction.is_complete


def test_interleaved_foreign_files_are_compacted_together_or_not_at_all():
    """A compaction never begins between two files whose supersteps overlap."""
    first, second = foreign(1, 6, 5_000), foreign(3, 7)

    assert supersteps(plan(first, second, own(8), own(9), own(10))) == [6, 7, 8, 9, 10]
    wide = replace(first, max_key="z")
    assert plan(wide, second, own(8), own(9), own(10)) is None


def test_a_foreign_file_that_reaches_into_the_last_superstep_stops_compacting():
    """It may hold newer rows as well as rows older than those of a compaction."""
    assert plan(*map(own, range(1, 6)), foreign(2, 9), before=9) is None


def test_a_file_of_unknown_age_stops_compacting():
    """No compaction is planned around rows that could belong to any superstep."""
    unknown = replace(own(3), min_superstep=None, max_superstep=None, tags={})

    assert plan(*map(own, range(4, 9)), unknown) is None


def test_everything_is_compacted_on_demand():
    """With ``everything`` two files are enough; a single file is not rewritten again and again."""
    assert supersteps(plan(own(1), own(2), everything=True)) == [1, 2]
    assert plan(own(1), everything=True) is None


def test_a_policy_that_never_ends_is_refused():
    """A fan-in of one would rewrite the same file for ever."""
    with pytest.raises(InvalidError):
        CompactionPolicy(fan_in=1)


def test_in_parallel_with_a_compaction_only_younger_files_are_compacted():
    """While a stretch is being compacted, its files, older files and files of mixed supersteps stay."""
    compaction = Compaction(interval=INTERVAL, files=(own(3), own(4)), is_complete=False)
    files = [own(1), own(3), own(4), own(5), own(6)]

    assert [file.max_superstep for file in younger_than(compaction, files)] == [5, 6]
    assert [file.max_superstep for file in younger_than(compaction, [*files, foreign(7, 9)])] == [5, 6, 9]
    assert younger_than(compaction, [*files, foreign(2, 9)]) == []
