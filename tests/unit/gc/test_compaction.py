"""The rows, productions, ids and tombstones that a compaction keeps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millpond.gc.compaction import Compaction, CompactionRules, compact_files, compact_updates
from millpond.statestore.errors import DataError
from millpond.statestore.interval import Interval
from millpond.statestore.log.files import LiveFile, row_file_to_add
from millpond.statestore.objects.memory import MemoryObjects
from millpond.statestore.rows.files import read_row_files, write_row_file
from millpond.statestore.rows.merge import merge_updates
from millpond.statestore.rows.record_ids import IdRetention
from millpond.statestore.rows.row import Fence
from millpond.statestore.types import (
    TIME_MIN_US,
    CommitNumber,
    EventTimeMicros,
    Sequencer,
    Superstep,
    TableVersion,
    WallTimeMicros,
)
from tests.fixtures.row_updates import row_histories, row_updates

ALL = CompactionRules(
    pending_from=Superstep(0), ids=IdRetention.of(TIME_MIN_US, WallTimeMicros(0), slack_us=0)
)
INTERVAL = Interval("counter")
MINUTE = 60_000_000
NOW = 10**6 * MINUTE


def rules(*, pending_from: int = 0, ids_from: int = 0, arrived_from: int = 10**18) -> CompactionRules:
    ids = IdRetention(
        at_from=EventTimeMicros(ids_from),
        arrived_from=WallTimeMicros(arrived_from),
        unknown_arrived_at=WallTimeMicros(NOW),
    )
    return CompactionRules(pending_from=Superstep(pending_from), ids=ids)


def update(key: str, number: int, **columns: object) -> dict[str, object]:
    return {"key": key, "commit_number": number, "superstep": number, **columns}


def identified(*ids: tuple[str, int], arrived_at: int | None = 0) -> list[dict[str, object]]:
    return [{"id": name.encode(), "at": at, "arrived_at": arrived_at} for name, at in ids]


def produced(*values: str) -> list[dict[str, object]]:
    return [{"stream": "s", "key": "k", "value": value, "value_bytes": None, "at": 0} for value in values]


@given(history=row_histories(), cut=st.integers(0, 10))
def test_compaction_changes_no_merged_rows(history, cut):
    """It may cover the oldest updates or the newest."""
    if not history:
        return
    old = [entry for entry in history if entry["superstep"] <= cut]
    new = [entry for entry in history if entry["superstep"] > cut]
    seen = merge_updates(row_updates(history)).to_pylist()
    compacted_old = compact_updates(row_updates(old), ALL, is_complete=True).to_pylist()
    compacted_new = compact_updates(row_updates(new), ALL, is_complete=False).to_pylist()

    assert merge_updates(row_updates([*compacted_old, *new])).to_pylist() == seen
    assert merge_updates(row_updates([*old, *compacted_new])).to_pylist() == seen


def test_ids_of_all_updates_are_kept_until_they_expire():
    updates = row_updates(
        [
            update("a", 1, state="1", record_ids=identified(("x", 1), ("y", 5))),
            update("a", 2, record_ids=identified(("z", 6))),
            update("b", 2, state="1", record_ids=identified(("w", 4))),
        ]
    )
    rows = compact_updates(updates, rules(ids_from=5), is_complete=False).to_pylist()

    assert [entry["id"] for entry in rows[0]["record_ids"]] == [b"y", b"z"]
    assert rows[1]["record_ids"] is None


def test_ids_are_kept_until_both_clocks_have_passed():
    """One clock is event time, the other the wall time of the arrival."""
    updates = row_updates(
        [
            update("a", 1, record_ids=identified(("old", 1), ("ahead", 9), arrived_at=MINUTE)),
            update("a", 2, record_ids=identified(("late", 1), arrived_at=3 * MINUTE)),
        ]
    )
    kept = compact_updates(updates, rules(ids_from=5, arrived_from=2 * MINUTE), is_complete=True)
    later = compact_updates(kept, rules(ids_from=5, arrived_from=3 * MINUTE + 1), is_complete=True)
    last = compact_updates(later, rules(ids_from=10, arrived_from=3 * MINUTE + 1), is_complete=True)

    assert [entry["id"] for entry in kept.to_pylist()[0]["record_ids"]] == [b"ahead", b"late"]
    assert [entry["id"] for entry in later.to_pylist()[0]["record_ids"]] == [b"ahead"]
    assert last.num_rows == 0


def test_id_without_an_arrival_is_kept_for_a_slack_from_now():
    """Older versions did not write arrivals, and other engines may drop them."""
    updates = row_updates([update("a", 1, record_ids=identified(("x", 1), arrived_at=None))])
    first = compact_updates(updates, rules(ids_from=5, arrived_from=NOW), is_complete=True)
    second = compact_updates(first, rules(ids_from=5, arrived_from=NOW), is_complete=True)
    gone = compact_updates(second, rules(ids_from=5, arrived_from=NOW + 1), is_complete=True)

    assert first.column("record_ids")[0][0]["arrived_at"].value == NOW
    assert second.num_rows == 1
    assert gone.num_rows == 0


def test_delivered_productions_are_dropped():
    """The last superstep's productions stay in order."""
    updates = row_updates(
        [
            update("a", 1, state="1", productions=produced("old")),
            update("a", 2, state="2", productions=produced("new", "newer")),
            update("b", 1, state="1", productions=produced("gone")),
        ]
    )
    rows = compact_updates(updates, rules(pending_from=2), is_complete=False).to_pylist()

    assert [entry["value"] for entry in rows[0]["productions"]] == ["new", "newer"]
    assert rows[0]["superstep"] == 2
    assert rows[1]["productions"] is None


def test_partial_compaction_keeps_tombstones():
    """Older files may still contain the deleted rows."""
    updates = row_updates([update("a", 2, deleted=True), update("b", 2, state="1")])

    assert compact_updates(updates, ALL, is_complete=False).column("key").to_pylist() == ["a", "b"]
    assert compact_updates(updates, ALL, is_complete=True).column("key").to_pylist() == ["b"]


def test_deleted_row_is_kept_until_its_ids_expire():
    """The key must still recognise duplicates."""
    updates = row_updates([update("a", 2, deleted=True, record_ids=identified(("x", 7)))])

    assert compact_updates(updates, rules(ids_from=7), is_complete=True).num_rows == 1
    assert compact_updates(updates, rules(ids_from=8), is_complete=True).num_rows == 0


class Files:
    """Committed row files of an interval."""

    def __init__(self) -> None:
        self.objects = MemoryObjects()
        self.live: list[LiveFile] = []

    def write(self, number: int, *updates: dict[str, object]) -> None:
        file = write_row_file(
            self.objects,
            INTERVAL,
            row_updates(updates),
            superstep=Superstep(number),
            fence=Fence(Sequencer(1), CommitNumber(number)),
            token=f"{number:032x}",
        )
        version = TableVersion(number)
        add = row_file_to_add(file, INTERVAL, version=version, modification_time_ms=0)
        self.live.append(LiveFile.from_add(add, version))

    def compaction(self, *, is_complete: bool = True) -> Compaction:
        return Compaction(interval=INTERVAL, files=tuple(self.live), is_complete=is_complete)


def test_compacted_file_takes_the_fence_of_its_commit():
    """It may have been prepared under an earlier one."""
    files = Files()
    files.write(1, update("a", 1, state="1"), update("b", 1, state="1"))
    files.write(2, update("a", 2, state="2"))
    last = Fence(Sequencer(1), CommitNumber(2))
    compacted = compact_files(files.objects, files.compaction(), ALL, fence=last, token="f" * 32)
    write = compacted.write(Fence(Sequencer(1), CommitNumber(9)))

    assert write.removed == tuple(file.path for file in files.live)
    assert [(file.commit_number, file.superstep, file.rows) for file in write.added] == [(9, 2, 2)]
    rows = read_row_files(files.objects, [write.added[0].path]).to_pylist()
    assert [(row["key"], row["commit_number"], row["state"]) for row in rows] == [
        ("a", 2, "2"),
        ("b", 1, "1"),
    ]


def test_compaction_of_deleted_rows_writes_no_file():
    files = Files()
    files.write(1, update("a", 1, state="1"))
    files.write(2, update("a", 2, deleted=True))
    last = Fence(Sequencer(1), CommitNumber(2))
    compacted = compact_files(files.objects, files.compaction(), ALL, fence=last, token="f" * 32)

    assert compacted.file is None
    assert compacted.write(Fence(Sequencer(1), CommitNumber(3))).added == ()
    assert compacted.freed_bytes == sum(file.size_bytes for file in files.live)


def test_damaged_file_is_not_compacted():
    """Rewriting it would give the damage a valid checksum."""
    files = Files()
    files.write(1, update("a", 1, state="1"))
    files.write(2, update("a", 2, state="2"))
    path = files.live[0].path
    data = bytearray(files.objects.get(path))
    data[100] ^= 1
    files.objects.put(path, bytes(data))
    last = Fence(Sequencer(1), CommitNumber(2))

    with pytest.raises(DataError, match=path):
        compact_files(files.objects, files.compaction(), ALL, fence=last, token="f" * 32)
