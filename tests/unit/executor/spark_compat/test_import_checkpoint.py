"""Checkpoints that an import writes into a store's folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from millpond.executor.spark_compat.import_checkpoint import QueryCheckpoint, put_checkpoint
from millpond.statestore.errors import DataError


@pytest.fixture
def checkpoint(tmp_path: Path) -> QueryCheckpoint:
    folder = tmp_path / "old"
    for part in ("offsets", "commits"):
        (folder / part).mkdir(parents=True)
        (folder / part / "3").write_text('v1\n{"conf":{"a":"b"}}\n7')
    return QueryCheckpoint(
        path="old",
        batch=3,
        unfinished=None,
        watermark_ms=0,
        next_watermark_ms=0,
        offsets=("7",),
        folder=folder,
    )


def test_checkpoint_is_of_new_query(checkpoint: QueryCheckpoint, tmp_path: Path) -> None:
    target = tmp_path / "pond" / "checkpoints" / "q"
    for _ in range(2):
        put_checkpoint(checkpoint, target, "new")

    assert (target / "metadata").read_text() == '{"id":"new"}'
    assert (target / "offsets" / "3").read_text() == 'v1\n{"conf":{}}\n7'
    assert [path.name for path in target.parent.iterdir()] == ["q"]


@pytest.mark.parametrize("name", ["q", ".q.importing"])
@pytest.mark.parametrize("is_fifo", [True, False])
def test_fifo_or_link_in_place_of_checkpoint_is_damage(
    checkpoint: QueryCheckpoint, tmp_path: Path, name: str, is_fifo: bool
) -> None:
    """Removing a FIFO as if it were a folder would wait for its writer."""
    target = tmp_path / "pond" / "checkpoints" / "q"
    target.parent.mkdir(parents=True)
    (tmp_path / "outside").mkdir()
    foreign = target.with_name(name)
    os.mkfifo(foreign) if is_fifo else foreign.symlink_to(tmp_path / "outside")

    with pytest.raises(DataError, match="must not be links"):
        put_checkpoint(checkpoint, target, "new")
    assert list((tmp_path / "outside").iterdir()) == []
