"""Row files streamed in pieces, compared with whole ones."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millpond.gc import compaction
from millpond.gc.compaction import Compacted, Compaction, CompactionRules, compact_files, stretches
from millpond.statestore.errors import DataError, InternalError, ObjectExistsError, UnavailableError
from millpond.statestore.interval import Interval
from millpond.statestore.log.files import LiveFile, row_file_to_add
from millpond.statestore.objects.memory import MemoryObjects
from millpond.statestore.objects.obstore import open_objects
from millpond.statestore.rows import files as row_files
from millpond.statestore.rows.files import RowFileWriter, open_runs, read_row_files, write_row_file
from millpond.statestore.rows.record_ids import IdRetention
from millpond.statestore.rows.row import Fence
from millpond.statestore.types import (
    CommitNumber,
    EventTimeMicros,
    Objects,
    Sequencer,
    Superstep,
    TableVersion,
    WallTimeMicros,
)
from tests.fixtures.row_updates import Update, row_updates

INTERVAL = Interval("counter")
LAST = Fence(Sequencer(9), CommitNumber(9))
MINUTE = 60_000_000
# Ids go in event time from 500 on, and by their arrival after the second of three minutes.
IDS = IdRetention.of(EventTimeMicros(500 + 2 * MINUTE), WallTimeMicros(4 * MINUTE), 2 * MINUTE)
RULES = CompactionRules(pending_from=Superstep(3), ids=IDS)


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode as little as possible at a time, so that a few hundred rows are many pieces."""
    monkeypatch.setattr(compaction, "_STREAMED_BYTES", 1)
    monkeypatch.setattr(compaction, "_BATCH_BYTES_MIN", 1)
    monkeypatch.setattr(row_files, "_BATCH_ROWS_MIN", 16)
    monkeypatch.setattr(row_files, "ROWS_PER_GROUP", 50)


def drawn_update(draw: Any, key: str, number: int) -> Update:
    ids = [
        {
            "id": draw.randbytes(4),
            "at": draw.randrange(1_000),
            "arrived_at": draw.choice([None, MINUTE, 2 * MINUTE, 3 * MINUTE]),
        }
        for _ in range(draw.randrange(3))
    ]
    made = [
        {"stream": "s", "key": key, "value": str(draw.random()), "value_bytes": None, "at": 0}
        for _ in range(draw.randrange(3))
    ]
    return {
        "key": key,
        "commit_number": number,
        "superstep": number,
        "state": draw.choice([None, "1", "x" * draw.randrange(40)]),
        "hold": draw.choice([None, 5]),
        "deleted": draw.random() < 0.2,
        "record_ids": ids or None,
        "productions": made or None,
    }


def drawn_files(draw: Any, files: int, keys: int) -> list[list[Update]]:
    names = sorted(f"{draw.choice('aä😀')}{draw.randrange(10**6)}" for _ in range(keys))
    return [
        [drawn_update(draw, key, number) for key in sorted({*draw.sample(names, draw.randint(1, keys))})]
        for number in range(1, files + 1)
    ]


def written(objects: Objects, files: Sequence[Sequence[Update]]) -> tuple[LiveFile, ...]:
    live = []
    for number, updates in enumerate(files, start=1):
        file = write_row_file(
            objects,
            INTERVAL,
            row_updates(updates),
            superstep=Superstep(number),
            fence=Fence(Sequencer(1), CommitNumber(number)),
            token=f"{number:032x}",
        )
        add = row_file_to_add(file, INTERVAL, version=TableVersion(number), modification_time_ms=0)
        live.append(LiveFile.from_add(add, TableVersion(number)))
    return tuple(live)


def foreign(objects: Objects, files: Sequence[LiveFile]) -> LiveFile:
    rows = read_row_files(objects, [file.path for file in files])
    sink = pa.BufferOutputStream()
    pq.write_table(rows, sink, row_group_size=70)
    path = "computation=counter/part-0.parquet"
    objects.put(path, sink.getvalue().to_pybytes())
    return replace(files[0], path=path, size_bytes=len(objects.get(path)))


def both_ways(objects: Objects, compaction: Compaction) -> tuple[Compacted, Compacted]:
    whole = compact_files(objects, compaction, RULES, fence=LAST, token="e" * 32)
    return whole, through_disk(objects, compaction)


def through_disk(objects: Objects, compaction: Compaction, scratch: str | None = None) -> Compacted:
    return compact_files(
        objects, compaction, RULES, fence=LAST, token="f" * 32, memory_bytes_max=0, scratch=scratch
    )


def assert_same(objects: Objects, whole: Compacted, pieces: Compacted) -> None:
    if whole.file is None or pieces.file is None:
        assert whole.file is pieces.file
        return
    unnamed = {"path": "", "size_bytes": 0}
    assert replace(pieces.file, **unnamed) == replace(whole.file, **unnamed)
    rows = [read_row_files(objects, [file.path]) for file in (whole.file, pieces.file)]
    assert rows[1].equals(rows[0])
    assert len(objects.get(pieces.file.path)) == pieces.file.size_bytes


@settings(max_examples=15)
@given(draw=st.randoms(use_true_random=False), is_complete=st.booleans(), is_foreign=st.booleans())
def test_compaction_on_disk_equals_compaction_in_memory(
    draw: Any, is_complete: bool, is_foreign: bool
) -> None:
    objects = MemoryObjects()
    live = written(objects, drawn_files(draw, files=4, keys=draw.choice([1, 10, 120])))
    if is_foreign:
        live = (foreign(objects, live[:2]), *live[2:])
    compaction = Compaction(interval=INTERVAL, files=live, is_complete=is_complete)

    assert_same(objects, *both_ways(objects, compaction))


def test_large_compaction_has_small_row_groups(tmp_path: Path) -> None:
    objects = open_objects(str(tmp_path))
    old, young = (
        [
            {"key": f"{key:06}", "state": str(number), "commit_number": number, "superstep": number}
            for key in keys
        ]
        for number, keys in ((1, range(60)), (2, range(5, 150, 2)))
    )
    live = written(objects, [old, young])
    whole, pieces = both_ways(objects, Compaction(interval=INTERVAL, files=live, is_complete=True))

    assert_same(objects, whole, pieces)
    assert pieces.file is not None
    groups = pq.ParquetFile(tmp_path / pieces.file.path).metadata
    assert [groups.row_group(n).num_rows for n in range(2)] == [50] * 2
    with pytest.raises(ObjectExistsError):
        through_disk(objects, Compaction(interval=INTERVAL, files=live, is_complete=True))


@pytest.mark.parametrize("rows", [49, 50, 51, 100])
def test_full_last_row_group_is_written(tmp_path: Path, rows: int) -> None:
    objects = open_objects(str(tmp_path / "table"))
    updates = [
        {"key": f"{key:06}", "state": str(key), "commit_number": 1, "superstep": 1} for key in range(rows)
    ]
    (tmp_path / "scratch").mkdir()
    writer = RowFileWriter(tmp_path / "scratch", INTERVAL, superstep=Superstep(1), fence=LAST, token="f" * 32)
    for start in range(0, rows, 25):
        writer.write(row_updates(updates[start : start + 25]))
    file = writer.finish(objects)

    assert file is not None
    assert read_row_files(objects, [file.path]).num_rows == rows


def test_stretch_of_keys_has_all_updates() -> None:
    """An empty batch ends no stretch."""

    def run(*batches: str) -> Iterator[pa.Table]:
        return iter([row_updates([{"key": key} for key in keys]) for keys in batches])

    keys_by_piece = [
        sorted(piece.column("key").to_pylist())
        for piece in stretches([run("ab", "", "cx"), run("b", "dz"), run("")])
    ]

    assert [key for piece in keys_by_piece for key in piece] == sorted("abbcdxz")
    assert all(max(one) < min(other) for one, other in itertools.pairwise(keys_by_piece))


def test_damaged_file_is_not_compacted(tmp_path: Path) -> None:
    """Otherwise the damage would get a fresh seal."""
    objects = MemoryObjects()
    live = written(objects, [[{"key": "a", "state": "x" * 99}], [{"key": "b"}]])
    data = objects.get(live[0].path)
    flipped = bytearray(data)
    flipped[100] ^= 1
    for damaged in (bytes(flipped), data[:-20], b"", None):
        objects.delete([live[0].path])
        if damaged is not None:
            objects.put(live[0].path, damaged)
        with pytest.raises(DataError, match=live[0].path):
            through_disk(objects, Compaction(interval=INTERVAL, files=live, is_complete=True), str(tmp_path))
    assert not list(tmp_path.iterdir())
    assert len(objects.list("")) == 1


def test_full_local_disk_postpones_compaction(tmp_path: Path) -> None:
    objects = MemoryObjects()
    compaction = Compaction(interval=INTERVAL, files=written(objects, [[{"key": "a"}]]), is_complete=False)

    with pytest.raises(UnavailableError, match="cannot create a folder to compact in"):
        compact_files(
            objects,
            compaction,
            RULES,
            fence=LAST,
            token="f" * 32,
            memory_bytes_max=0,
            scratch=str(tmp_path / "missing"),
        )
    with pytest.raises(UnavailableError, match="disk failed"):
        open_runs(
            objects, compaction.files[0].path, interval=INTERVAL, scratch=tmp_path / "missing", batch_bytes=1
        )


def test_repeated_key_is_internal_error(tmp_path: Path) -> None:
    writer = RowFileWriter(tmp_path, INTERVAL, superstep=Superstep(1), fence=LAST, token="f" * 32)
    writer.write(row_updates([{"key": "a"}, {"key": "b"}]))

    with pytest.raises(InternalError, match="keys of a row file rise"):
        writer.write(row_updates([{"key": "b"}]))
