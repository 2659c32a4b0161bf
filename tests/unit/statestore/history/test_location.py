"""The folders in which a store may be created."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from millpond.statestore.errors import InvalidError
from millpond.statestore.history.lineage import check_location


def test_empty_folder_or_remains_of_killed_process_may_become_store(tmp_path: Path) -> None:
    (tmp_path / "begun" / "rows").mkdir(parents=True)
    (tmp_path / "empty").mkdir()
    for name in ("begun", "empty", "nothing"):
        check_location(tmp_path / name, name, create=True)
        with pytest.raises(InvalidError, match="there is no store"):
            check_location(tmp_path / name, name, create=False)


@pytest.mark.parametrize("other", ["letter.txt", "rows", "rows/letter.txt"])
def test_folder_with_other_files_is_refused(tmp_path: Path, other: str) -> None:
    """A stranger's folder may be named like the folder of the rows."""
    (tmp_path / other).parent.mkdir(exist_ok=True)
    (tmp_path / other).write_text("Dear")

    with pytest.raises(InvalidError, match="not empty"):
        check_location(tmp_path, tmp_path, create=True)


def test_store_created_concurrently_is_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its log appears between the look for a log and the look for other files."""
    rows, look = tmp_path / "rows", Path.iterdir
    rows.mkdir()

    def iterdir(folder: Path) -> Iterator[Path]:
        if folder == rows:
            (rows / "_delta_log").mkdir(exist_ok=True)
        return look(folder)

    monkeypatch.setattr(Path, "iterdir", iterdir)
    check_location(tmp_path, tmp_path, create=True)
