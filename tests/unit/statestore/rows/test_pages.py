"""Row files read in parts, with every bit verified."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millpond.statestore.errors import DataError, ObjectMissingError
from millpond.statestore.interval import Interval
from millpond.statestore.objects.memory import MemoryObjects
from millpond.statestore.objects.ranges import ByteRange, MeteredObjects, Tail
from millpond.statestore.rows import files, row_format
from millpond.statestore.rows.files import RowFileWriter, read_row_files, row_file_path, write_row_file
from millpond.statestore.rows.pages import (
    AlikePages,
    Leaf,
    PageIndex,
    PageIndexes,
    StoredPages,
    join_ranges,
    read_page_index,
)
from millpond.statestore.rows.record_ids import BlockFilter, fingerprints
from millpond.statestore.rows.row import ROW_SCHEMA, Fence
from millpond.statestore.rows.row_format import file_name_of, parquet_seal_holds
from millpond.statestore.types import CommitNumber, Sequencer, Superstep
from tests.fixtures.row_updates import Update, row_updates

FENCE = Fence(Sequencer(1), CommitNumber(1))
PATH = row_file_path("c", Superstep(1), "0" * 32)
COLUMNS = ["key", "state", "timers", "record_ids", "deleted"]


@pytest.fixture(autouse=True)
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small pages and row groups; every file has an index, which no test has read before."""
    monkeypatch.setattr(row_format, "PAGED_BYTES_MIN", 0)
    monkeypatch.setattr(files, "COMPACTED_PAGED_BYTES_MIN", 0)
    monkeypatch.setattr(row_format, "_PAGE_ROWS_MIN", 4)
    monkeypatch.setattr(row_format, "_PAGE_ROWS_MAX", 4)
    monkeypatch.setattr(row_format, "ROWS_PER_GROUP", 14)
    monkeypatch.setattr(files, "ROWS_PER_GROUP", 14)
    monkeypatch.setattr(files, "_GAP_BYTES", 0)


@pytest.fixture
def indexes(monkeypatch: pytest.MonkeyPatch) -> PageIndexes:
    """Page indexes that no other test uses."""
    indexes = PageIndexes(1 << 20)
    monkeypatch.setattr(files, "PAGE_INDEXES", indexes)
    return indexes


def example(count: int) -> list[Update]:
    return [
        {
            "key": f"k{number:05d}",
            "state": None if number % 5 == 0 else f'"{number}"' * (number % 7),
            "state_bytes": bytes([number % 256]) if number % 5 == 0 else None,
            "timers": [
                {"tag": f"t{copy}", "domain": "event", "at": number, "output_at": copy}
                for copy in range(number % 3)
            ]
            or None,
            "record_ids": [{"id": bytes([number % 256, copy]), "at": copy} for copy in range(number % 4)]
            or None,
            "deleted": number % 11 == 0,
        }
        for number in range(count)
    ]


def written(objects: MemoryObjects, updates: Sequence[Update]) -> str:
    return write_row_file(
        objects, Interval("c"), row_updates(updates), superstep=Superstep(1), fence=FENCE, token="0" * 32
    ).path


def answer_of(objects: MemoryObjects, path: str) -> pa.Table | None:
    """Return the rows read in parts, ``None`` for an error that names the file."""
    try:
        return read(objects, path, ["k00009"])
    except DataError as error:
        return None if error.details["path"] == path else pa.table({})


def read(objects: Any, path: str, keys: Sequence[str], columns: Sequence[str] = COLUMNS) -> pa.Table:
    return read_row_files(objects, [path], columns, keys=keys, large=[path])


@settings(deadline=None)
@given(
    st.integers(1, 60),
    st.lists(st.integers(-2, 62), max_size=8),
    st.sets(st.sampled_from(ROW_SCHEMA.names), min_size=1),
)
def test_parts_match_whole_file(count: int, wanted: list[int], columns: set[str]) -> None:
    objects = MemoryObjects()
    path = written(objects, example(count))
    keys = [f"k{max(number, 0):05d}" + ("" if number >= 0 else "x") for number in wanted]
    files.PAGE_INDEXES._known.clear()

    assert read(objects, path, keys, sorted(columns)).equals(
        read_row_files(objects, [path], sorted(columns), keys=keys)
    )


def test_one_key_costs_footer_and_one_page_per_column(indexes: PageIndexes) -> None:
    below = MemoryObjects()
    path = written(
        below,
        [{**update, "state": f'"{"x" * 5_000}{number}"'} for number, update in enumerate(example(1_000))],
    )
    objects = MeteredObjects(below)
    size = len(below.get(path))

    assert read(objects, path, ["k00500"]).column("key").to_pylist() == ["k00500"]
    first = objects.read_bytes
    assert read(objects, path, ["k00123"]).column("key").to_pylist() == ["k00123"]
    assert objects.read_bytes - first < size / 100
    assert read(objects, path, ["absent", "a"]).num_rows == 0
    assert 0 < indexes.size_bytes < 200_000


def test_read_of_most_blocks_reads_whole_file(indexes: PageIndexes) -> None:
    """The seal is verified then."""
    below = MemoryObjects()
    path = written(below, example(40))
    objects = MeteredObjects(below)
    keys = [f"k{number:05d}" for number in range(0, 40, 4)]

    assert read(objects, path, keys).column("key").to_pylist() == keys
    assert objects.read_bytes >= len(below.get(path))


class PartsRead(MemoryObjects):
    def __init__(self) -> None:
        super().__init__()
        self.at_once: list[int] = []

    def read_ranges(self, path: str, ranges: Sequence[ByteRange]) -> list[bytes]:
        parts = [self.get(path)[part.start : part.end] for part in ranges]
        self.at_once.append(sum(map(len, parts)))
        return parts

    def read_tail(self, path: str, size_bytes: int) -> Tail:
        data = self.get(path)
        return Tail(data[-size_bytes:], len(data))


def test_long_file_is_read_in_bounded_pieces(monkeypatch: pytest.MonkeyPatch, indexes: PageIndexes) -> None:
    monkeypatch.setattr(files, "_WHOLE_BYTES_MAX", 0)
    monkeypatch.setattr(files, "_BYTES_AT_ONCE", 2_000)
    objects, updates = PartsRead(), example(200)
    path = written(objects, updates)
    index = indexes.of(objects, path, file_name_of(path))
    assert index is not None
    assert index.size_of(range(len(index.firsts)), COLUMNS) > 5 * 2_000
    objects.at_once.clear()

    table = read(objects, path, [update["key"] for update in updates])

    assert table.column("key").to_pylist() == [update["key"] for update in updates]
    assert max(objects.at_once) <= 2_000


@given(
    st.lists(st.integers(1, 100), min_size=1, max_size=40),
    st.integers(1, 300),
    st.integers(1, 10),
    st.data(),
)
def test_portions_are_as_large_as_allowed(
    sizes: list[int], bytes_max: int, blocks_max: int, data: st.DataObject
) -> None:
    wanted = data.draw(st.lists(st.sampled_from(range(len(sizes))), unique=True).map(sorted))
    zeros = np.zeros(len(sizes), np.int64)
    pages = StoredPages(zeros, np.array(sizes, np.int32), zeros.astype(np.uint32))
    leaf = Leaf(path=("key",), physical_type=6, codec=7, encodings=(0,), pages=pages, values=None)
    index = PageIndex(
        schema=b"",
        firsts=[""] * len(sizes),
        last="",
        rows=zeros.astype(np.int32),
        leaves=(leaf,),
        keys=BlockFilter.empty(1, 0.01),
    )

    portions = list(index.portions(wanted, ["key"], blocks_max=blocks_max, bytes_max=bytes_max))

    assert [block for portion in portions for block in portion] == wanted
    for portion, following in pairwise([*portions, []]):
        size = sum(sizes[block] for block in portion)
        assert len(portion) == 1 or (len(portion) <= blocks_max and size <= bytes_max)
        if following:
            assert len(portion) == blocks_max or size + sizes[following[0]] > bytes_max


def test_scan_of_some_columns_skips_others(indexes: PageIndexes) -> None:
    below = MemoryObjects()
    states = (hashlib.shake_128(bytes([number])).hexdigest(2_000) for number in range(99))
    path = written(
        below, [{**update, "state": state} for update, state in zip(example(99), states, strict=True)]
    )
    objects = MeteredObjects(below)
    size = len(below.get(path))

    scanned = read_row_files(objects, [path], ["key", "timers"], large=[path])
    assert scanned.equals(read_row_files(below, [path], ["key", "timers"]))
    index = indexes.of(below, path, file_name_of(path))
    assert index is not None
    every = range(len(index.firsts))
    assert objects.read_bytes - (1 << 16) < size / 10
    assert index.size_of(every, ROW_SCHEMA.names) < size
    assert read_row_files(objects, [path], large=[path]).num_rows == 99


def test_stock_parquet_readers_ignore_page_index() -> None:
    objects = MemoryObjects()
    path = written(objects, example(40))
    data = objects.get(path)

    assert pq.read_table(pa.BufferReader(data)).num_rows == 40
    assert parquet_seal_holds(memoryview(data), file_name_of(path))
    index = read_page_index(objects, path, file_name_of(path))
    assert index is not None
    assert (len(index.firsts), index.last, index.rows.tolist()[-2:]) == (10, "k00039", [4, 4])
    at = data.index(index.to_bytes()) + 5
    assert not parquet_seal_holds(memoryview(data[:at] + b"?" + data[at + 1 :]), file_name_of(path))


def test_flipped_bit_is_named_or_not_read(indexes: PageIndexes) -> None:
    objects = MemoryObjects()
    path = written(objects, example(24))
    whole = objects.get(path)
    right = read(objects, path, ["k00009"])
    index = read_page_index(objects, path, file_name_of(path))
    assert index is not None
    parts = index.ranges(index.blocks_of(["k00009"], fingerprints(pa.array(["k00009"]))), COLUMNS)
    named = 0
    for bit in range(0, 8 * len(whole), 197):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        objects.put(path, bytes(damaged))
        files.PAGE_INDEXES._known.clear()
        answer = answer_of(objects, path)
        if answer is None:
            named += 1
        else:
            assert answer.equals(right), bit
            assert not any(part.start <= bit // 8 < part.end for part in parts)
    assert named > 8 * sum(part.end - part.start for part in parts) / 197 / 2


def test_cached_index_does_not_hide_damaged_page(indexes: PageIndexes) -> None:
    objects = MemoryObjects()
    path = written(objects, example(24))
    index = indexes.of(objects, path, file_name_of(path))
    assert index is not None
    page = index.ranges(index.blocks_of(["k00009"], fingerprints(pa.array(["k00009"]))), ["state"])[0]
    data = objects.get(path)
    for damaged in (data[: page.start] + b"?" + data[page.start + 1 :], data[: page.end - 1], b""):
        objects.put(path, damaged)
        with pytest.raises(DataError, match="checksum") as raised:
            read(objects, path, ["k00009"])
        assert raised.value.details["path"] == path
    objects.delete([path])
    with pytest.raises(ObjectMissingError):
        read(objects, path, ["k00009"])


def test_index_of_another_file_is_refused(indexes: PageIndexes) -> None:
    objects = MemoryObjects()
    path = written(objects, example(24))
    other = path.replace("0" * 32, "1" * 32)
    objects.put(other, objects.get(path))

    assert read_page_index(objects, other, file_name_of(other)) is None
    with pytest.raises(DataError, match="seal"):
        read(objects, other, ["k00009"])


@pytest.mark.parametrize("data", [b"", b"PAR1", b"x" * 100, b"\xff" * 40])
def test_non_row_file_has_no_index(data: bytes) -> None:
    objects = MemoryObjects()
    objects.put(PATH, data)

    assert read_page_index(objects, PATH, file_name_of(PATH)) is None


def test_long_index_is_read_in_two_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    from millpond.statestore.rows import pages

    objects = MemoryObjects()
    path = written(objects, example(200))
    expected = read_page_index(objects, path, file_name_of(path))
    monkeypatch.setattr(pages, "_READ_BYTES", 16)
    index = read_page_index(objects, path, file_name_of(path))

    assert expected is not None
    assert index is not None
    assert (index.firsts, index.schema) == (expected.firsts, expected.schema)


def test_file_written_in_pieces_has_index(tmp_path: Any, indexes: PageIndexes) -> None:
    objects = MemoryObjects()
    updates = example(101)
    writer = RowFileWriter(tmp_path, Interval("c"), superstep=Superstep(1), fence=FENCE, token="2" * 32)
    for start in range(0, 101, 7):
        writer.write(row_updates(updates[start : start + 7]))
    file = writer.finish(objects)
    assert file is not None

    keys = ["k00000", "k00050", "k00100"]
    assert read(objects, file.path, keys).equals(read_row_files(objects, [file.path], COLUMNS, keys=keys))
    index = indexes.of(objects, file.path, file_name_of(file.path))
    assert index is not None
    assert index.rows.sum() == 101
    assert parquet_seal_holds(memoryview(objects.get(file.path)), file_name_of(file.path))


def test_absent_key_costs_almost_nothing(indexes: PageIndexes) -> None:
    """The index has a filter of the keys."""
    objects = MemoryObjects()
    path = written(objects, example(2_000))
    index = indexes.of(objects, path, file_name_of(path))
    assert index is not None
    absent = [f"k{number:05d}x" for number in range(1_000)]
    present = [f"k{number:05d}" for number in range(0, 2_000, 50)]

    assert len(index.blocks_of(absent, fingerprints(pa.array(absent)))) < 40
    assert index.blocks_of(present, fingerprints(pa.array(present))) == sorted(
        {bisect_right(index.firsts, key) - 1 for key in present}
    )


def test_constant_column_is_not_read() -> None:
    """The index has the value."""
    objects = MemoryObjects()
    path = written(objects, [{"key": f"k{number:05d}", "state": f"{number}"} for number in range(399)])
    index = read_page_index(objects, path, file_name_of(path))
    assert index is not None
    alike = {leaf.path[0] for leaf in index.leaves if isinstance(leaf.pages, AlikePages)}

    assert index.empty_columns == {"timers", "record_ids", "productions", "hold", "state_bytes"}
    assert alike == {"sequencer", "commit_number", "superstep", "deleted"}
    assert index.ranges([0, 5], ["timers", "productions", "hold"]) == []
    assert read(objects, path, ["k00007"], ["key", "timers", "hold"]).to_pylist() == [
        {"key": "k00007", "timers": None, "hold": None}
    ]


def test_index_cache_is_bounded() -> None:
    objects = MemoryObjects()
    path = written(objects, example(40))
    other = row_file_path("c", Superstep(2), "3" * 32)
    objects.put(other, b"small")
    index = read_page_index(objects, path, file_name_of(path))
    assert index is not None
    indexes = PageIndexes(index.size_bytes + 100)

    kept = indexes.of(objects, path, file_name_of(path))
    assert indexes.of(objects, path, file_name_of(path)) is kept
    assert indexes.of(objects, other, file_name_of(other)) is None
    assert indexes.size_bytes <= index.size_bytes + 100
    assert indexes.of(objects, path, file_name_of(path)) is not kept


def test_neighbouring_ranges_are_joined() -> None:
    ranges = [ByteRange(20, 30), ByteRange(0, 5), ByteRange(6, 20), ByteRange(40, 41)]

    assert join_ranges(ranges, 1) == [ByteRange(0, 30), ByteRange(40, 41)]
    assert join_ranges([], 1) == []


def test_index_round_trips() -> None:
    objects = MemoryObjects()
    path = written(objects, example(30))
    index = read_page_index(objects, path, file_name_of(path))
    assert index is not None

    again = PageIndex.from_bytes(index.to_bytes())

    assert (again.schema, list(again.firsts), again.last) == (index.schema, list(index.firsts), index.last)
    assert again.to_bytes() == index.to_bytes()
