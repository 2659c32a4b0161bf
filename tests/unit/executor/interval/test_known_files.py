"""What another list of committed files means for soft state."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from millpond.executor.interval.row_reader import FileKeys
from millpond.executor.interval.soft_state import KnownFiles
from millpond.statestore.log.files import LiveFile
from millpond.statestore.types import TableVersion

OWN: Mapping[str, str] = {"interval": "millpond/interval/c//"}


def file(path: str, first: int | None, last: int | None, tags: Mapping[str, str] = OWN) -> LiveFile:
    """A live file that holds supersteps ``first`` to ``last``."""
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
    """Files that were read from nothing."""
    known_files = KnownFiles()
    known_files.take_in(files, files)
    return known_files


ONE, TWO, THREE = (file(f"{number}", number, number) for number in (1, 2, 3))


def test_from_nothing_everything_is_read() -> None:
    """Soft state without files can follow no list, not even an empty one."""
    assert known().unread_in([ONE]) is None
    assert known().unread_in([]) is None
    assert not known().are([])


def test_later_supersteps_are_unread() -> None:
    """Files of later supersteps are read, whatever their place in the list."""
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
def test_a_rewrite_of_known_supersteps_is_not_unread(rewrite: LiveFile) -> None:
    """OPTIMIZE's files and compactions (which have no lower bound) that reach no further are not read."""
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
def test_what_proves_nothing_is_read_from_nothing(files: list[LiveFile]) -> None:
    """Old and new rows in one file, unknown ones, a second file of a known superstep, files that vanish."""
    assert known(ONE, TWO).unread_in(files) is None


def test_adopted_files_count_until_they_are_disowned() -> None:
    """An adopted file is among the files; only confirming it moves position and superstep."""
    known_files = known(ONE)
    assert (known_files.position, known_files.superstep) == ("1", 1)
    known_files.take_in([ONE, TWO], [TWO])
    assert (known_files.position, known_files.superstep) == ("2", 2)
    known_files.disown("2")
    assert [file.path for file in known_files.all] == ["1"]


@pytest.mark.parametrize(
    ("low", "high", "expected"), [("a", "b", False), ("a", "m", True), ("x", "z", False), ("n", "o", True)]
)
def test_key_ranges_prune(low: str, high: str, *, expected: bool) -> None:
    """A file is left out when its range and the wanted one do not meet; an unknown bound meets all."""
    assert FileKeys("f", "m", "p").may_hold_any(low, high) is expected
    assert FileKeys("f", None, None).may_hold_any(low, high)
