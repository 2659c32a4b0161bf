"""The choice of files to compact."""

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
    """Make a file of a superstep."""
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
    """Make a compacted file, whose statistics bound the supersteps from above only."""
    return replace(own(superstep, size), min_superstep=None)


def foreign(oldest: int, newest: int, size: int = 10) -> LiveFile:
    """Make a file into which another engine rewrote supersteps ``oldest`` to ``newest``."""
    return replace(own(newest, size), min_superstep=oldest, tags={})


def plan(*files: LiveFile, before: int = 1_000, everything: bool = False) -> Compaction | None:
    return plan_compaction(files, INTERVAL, before=Superstep(before), policy=POLICY, everything=everything)


def supersteps(compaction: Compaction | None) -> list[int]:
    return [] if compaction is None else [file.max_superstep for file in compaction.files]


def test_files_below_the_fan_in_are_not_compacted():
    assert plan(own(1), own(2), own(3)) is None


def test_small_files_are_compacted_in_order_of_supersteps():
    """The order of the list does not matter."""
    assert supersteps(plan(own(3), own(1), own(4), own(2))) == [1, 2, 3, 4]


def test_compaction_of_young_files_omits_a_large_old_one():
    """The compaction is then not complete."""
    compaction = plan(compacted(5, 5_000), own(6), own(7), own(8), own(9))

    assert supersteps(compaction) == [6, 7, 8, 9]
    assert compaction is not None
    assert not compaction.is_complete


def test_young_files_of_half_the_bulks_size_compact_everything():
    """The threshold varies by a fifth."""
    for superstep in range(5, 50):
        bulk = compacted(superstep, 1_000)
        compaction = plan(bulk, own(60, 300), own(61, 301))

        assert supersteps(compaction) == [superstep, 60, 61]
        assert compaction is not None
        assert compaction.is_complete
        assert plan(bulk, own(60, 200), own(61, 199)) is None


def test_bulks_of_one_size_are_not_all_due_at_once():
    """The choice for a bulk is the same each time."""
    due = [
        superstep
        for superstep in range(100)
        if plan(compacted(superstep, 1_000), own(200, 250), own(201, 250)) is not None
    ]

    assert 25 < len(due) < 75
    assert all(plan(compacted(superstep, 1_000), own(200, 250), own(201, 250)) for superstep in due)


def test_files_of_the_last_superstep_are_not_compacted():
    """They may contain undelivered productions."""
    assert supersteps(plan(*map(own, range(1, 7)), before=6)) == [1, 2, 3, 4, 5]


def test_compacting_a_higher_tier_includes_the_small_young_files():
    """The compaction starts at the full tier's oldest file and ends at the youngest of all."""
    files = [compacted(10, 9_000), *(compacted(10 + n, 300) for n in (1, 2, 3, 4)), own(20)]

    assert supersteps(plan(*files)) == [11, 12, 13, 14, 20]


def test_files_max_compacts_files_of_any_size():
    sizes = [10**9, 10**7, 10**7, 10**6, 10**6, 10**5, 10**5, 10**4, 10**4, 10**3]
    files = [own(n, size) for n, size in enumerate(sizes, 1)]

    assert supersteps(plan(*files)) == list(range(2, 11))
    assert plan(*files[:-1]) is None


def test_files_above_the_memory_bound_are_planned():
    policy = replace(POLICY, memory_bytes_max=39)
    compaction = plan_compaction([own(n) for n in range(4)], INTERVAL, before=Superstep(9), policy=policy)

    assert supersteps(compaction) == [0, 1, 2, 3]
    assert compaction is not None
    assert compaction.size_bytes == 40


def test_foreign_file_within_the_interval_is_compacted():
    """It must also be in the order of supersteps."""
    assert supersteps(plan(foreign(1, 5), own(6), own(7), own(8))) == [5, 6, 7, 8]


def test_foreign_file_of_several_intervals_is_not_compacted():
    """Replacing it would lose the other intervals' rows; younger files can still be compacted."""
    wide = replace(foreign(1, 5), max_key="z")
    compaction = plan(wide, own(6), own(7), own(8), own(9))

    assert supersteps(compaction) == [6, 7, 8, 9]
    assert compaction is not None
    assert not compaction.is_complete


def test_interleaved_foreign_files_are_compacted_together_or_not_at_all():
    """A compaction must not start between two files whose supersteps overlap."""
    first, second = foreign(1, 6, 5_000), foreign(3, 7)

    assert supersteps(plan(first, second, own(8), own(9), own(10))) == [6, 7, 8, 9, 10]
    wide = replace(first, max_key="z")
    assert plan(wide, second, own(8), own(9), own(10)) is None


def test_foreign_file_with_rows_of_the_last_superstep_stops_compaction():
    """It may contain rows both newer and older than a compaction's."""
    assert plan(*map(own, range(1, 6)), foreign(2, 9), before=9) is None


def test_file_of_unknown_supersteps_stops_compaction():
    """Its rows could belong to any superstep."""
    unknown = replace(own(3), min_superstep=None, max_superstep=None, tags={})

    assert plan(*map(own, range(4, 9)), unknown) is None


def test_everything_compacts_two_or_more_files():
    """A single file must not be rewritten again and again."""
    assert supersteps(plan(own(1), own(2), everything=True)) == [1, 2]
    assert plan(own(1), everything=True) is None


def test_fan_in_of_one_is_refused():
    """It would rewrite the same file indefinitely."""
    with pytest.raises(InvalidError):
        CompactionPolicy(fan_in=1)


def test_only_younger_files_are_compacted_next_to_a_running_compaction():
    """Older files and files of overlapping supersteps must wait."""
    compaction = Compaction(interval=INTERVAL, files=(own(3), own(4)), is_complete=False)
    files = [own(1), own(3), own(4), own(5), own(6)]

    assert [file.max_superstep for file in younger_than(compaction, files)] == [5, 6]
    assert [file.max_superstep for file in younger_than(compaction, [*files, foreign(7, 9)])] == [5, 6, 9]
    assert younger_than(compaction, [*files, foreign(2, 9)]) == []
