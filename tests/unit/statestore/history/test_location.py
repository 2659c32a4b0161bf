"""Where a store may lie."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from millpond.statestore.errors import InvalidError
from millpond.statestore.history.lineage import check_location


def test_an_empty_folder_and_what_a_killed_process_leaves_may_become_a_store(tmp_path: Path) -> None:
    """So may a path where nothing is; if none may be created, each is refused."""
    (tmp_path / "begun" / "rows").mkdir(parents=True)
    (tmp_path / "empty").mkdir()
    for name in ("begun", "empty", "nothing"):
        check_location(tmp_path / name, name, create=True)
        with pytest.raises(InvalidError, match="there is no store"):
            check_location(tmp_path / name, name, create=False)


@pytest.mark.parametrize("other", ["letter.txt", "rows", "rows/letter.txt"])
def test_a_folder_with_something_else_is_refused(tmp_path: Path, other: str) -> None:
    """Also where it is called as the folder of the rows is, or lies in it."""
    (tmp_path / other).parent.mkdir(exist_ok=True)
    (tmp_path / other).write_text("Dear")

    with pytest.raises(InvalidError, match="not empty"):
        check_location(tmp_path, tmp_path, create=True)


def test_a_store_that_another_process_creates_at_this_moment_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its log comes after the first look for it, and before the look for anything else."""
    rows, look = tmp_path / "rows", Path.iterdir
    rows.mkdir()

    def iterdir(folder: Path) -> Iterator[Path]:
        if folder == rows:
            (rows / "_delta_log").mkdir(exist_ok=True)
        return look(folder)

    monkeypatch.setattr(Path, "iterdir", iterdir)
    check_location(tmp_path, tmp_path, create=True)
