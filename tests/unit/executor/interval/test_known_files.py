"""Comparison of another list of committed files with the known one."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from millpond.executor.interval.row_reader import FileKeys
from millpond.executor.interval.soft_state import KnownFiles
from millpond.statestore.log.files import LiveFile
from millpond.statestore.types import TableVersion

OWN: Mapping[str, str] = {"interval": "millpond/interval/c//"}


def file(path: str, first: int | None, last: int | None, tags: Mapping[str, str] = OWN) -> LiveFile:
    return LiveFile(
        path=path,
        size_bytes=1,
        computation="c",
        partition_values={},
        min_key=None,
        max_key=None,
        min_superstep=first,
        max_superstep=last,
        num_records=None,
        tags=tags,
        added_version=TableVersion(1),
    )


def known(*files: LiveFile) -> KnownFiles:
    known_files = KnownFiles()
    known_files.take_in(files, files)
    return known_files


ONE, TWO, THREE = (file(f"{number}", number, number) for number in (1, 2, 3))


def test_unknown_soft_state_reads_every_file() -> None:
    """Soft state without files can continue from no list, not even an empty one."""
    assert known().unread_in([ONE]) is None
    assert known().unread_in([]) is None
    assert not known().are([])


def test_files_of_later_supersteps_are_unread_in_any_order() -> None:
    assert known(ONE).unread_in([THREE, ONE, TWO]) == [THREE, TWO]
    assert known(ONE, TWO).unread_in([ONE, TWO]) == []
    assert known(ONE, TWO).are([TWO, ONE])


@pytest.mark.parametrize(
    "rewrite",
    [
        file("optimised", 1, 2, {}),
        file("compacted", None, 2),
    ],
)
def test_rewrite_of_known_supersteps_need_not_be_read(rewrite: LiveFile) -> None:
    """The file comes from OPTIMIZE or a compaction; a compaction has no lower bound."""
    assert known(ONE, TWO).unread_in([rewrite]) == []
    assert known(ONE, TWO).unread_in([rewrite, THREE]) == [THREE]


@pytest.mark.parametrize(
    "files",
    [
        [file("optimised", 1, 3, {})],
        [file("compacted", None, None, {**OWN, "superstep": "3"})],
        [file("unknown", None, None, {})],
        [ONE, TWO, file("of another history", 2, 2)],
        [ONE],
        [THREE],
        [],
    ],
)
def test_ambiguous_files_force_a_complete_read(files: list[LiveFile]) -> None:
    """The list mixes old and new rows, has unknown files or a second file of a superstep, or lost files."""
    assert known(ONE, TWO).unread_in(files) is None


def test_adopted_file_counts_until_it_is_disowned() -> None:
    """Taking it in moves the superstep."""
    known_files = known(ONE)
    assert known_files.superstep == 1
    known_files.take_in([ONE, TWO], [TWO])
    assert known_files.superstep == 2
    known_files.disown("2")
    assert [file.path for file in known_files.all] == ["1"]


@pytest.mark.parametrize(
    ("low", "high", "expected"), [("a", "b", False), ("a", "m", True), ("x", "z", False), ("n", "o", True)]
)
def test_file_may_hold_keys_if_its_range_overlaps(low: str, high: str, *, expected: bool) -> None:
    """An unknown bound overlaps every range."""
    assert FileKeys("f", "m", "p").may_hold_any(low, high) is expected
    assert FileKeys("f", None, None).may_hold_any(low, high)
