"""The high-water mark in the store's folder."""

from __future__ import annotations

import pytest

from millpond.statestore.errors import DataError, UnavailableError
from millpond.statestore.log.high_water import (
    MARK_FOLDER,
    BothHighWaters,
    Mark,
    MemoryHighWater,
    StoredMark,
    list_marks,
    newest_mark,
)
from millpond.statestore.objects.memory import MemoryObjects
from millpond.statestore.types import TableVersion
from millpond.testing.faults.faulty_objects import Fault, FaultyObjects

DIGESTS = [f"{number:064x}" for number in range(9)]


def mark_of(objects: MemoryObjects, *incarnations: str) -> Mark | None:
    return newest_mark(list_marks(objects), incarnations)


def test_newest_version_is_kept_with_digest() -> None:
    objects = MemoryObjects()
    stored = StoredMark(objects, "one", threaded=False)
    assert stored.read() is None
    for version in (3, 5, 4):
        stored.advance(TableVersion(version), DIGESTS[version])
        stored.flush()
    assert stored.read() == mark_of(objects, "one") == Mark(TableVersion(5), DIGESTS[5])


def test_slower_writer_does_not_lower_mark() -> None:
    objects = MemoryObjects()
    first, second = (StoredMark(objects, "one", threaded=False) for _ in range(2))
    first.advance(TableVersion(5), DIGESTS[5])
    first.flush()
    for version in (1, 2, 3, 5):
        second.advance(TableVersion(version), DIGESTS[version])
        second.flush()
    assert mark_of(objects, "one") == Mark(TableVersion(5), DIGESTS[5])
    second.tidy()
    assert len(list_marks(objects)) == 1


def test_closing_writes_newest_mark() -> None:
    objects = MemoryObjects()
    stored = StoredMark(objects, "one", linger_ms=0)
    for version in range(1, 9):
        stored.advance(TableVersion(version), DIGESTS[version])
    stored.close()
    assert mark_of(objects, "one") == Mark(TableVersion(8), DIGESTS[8])
    assert len(list_marks(objects)) <= 2


def test_unreachable_store_stops_no_commit() -> None:
    """Only `flush` raises, and the next one writes the mark."""
    memory = MemoryObjects()
    objects = FaultyObjects(memory)
    objects.plan(Fault.REFUSED, "put_if_absent", within=MARK_FOLDER, times=2)
    stored = StoredMark(objects, "one", threaded=False)
    stored.advance(TableVersion(1), DIGESTS[1])
    with pytest.raises(UnavailableError):
        stored.flush()
    threaded = StoredMark(objects, "one")
    threaded.advance(TableVersion(1), DIGESTS[1])
    threaded.close()
    stored.flush()
    assert mark_of(memory, "one") == Mark(TableVersion(1), DIGESTS[1])


def test_each_incarnation_has_its_marks() -> None:
    """Marks of an unknown incarnation show that the log was rolled back."""
    objects = MemoryObjects()
    for incarnation, version in (("one", 7), ("two", 3)):
        stored = StoredMark(objects, incarnation, threaded=False)
        stored.advance(TableVersion(version), DIGESTS[version])
        stored.flush()
    assert mark_of(objects, "one", "two") == Mark(TableVersion(3), DIGESTS[3])
    assert mark_of(objects, "one", "two", "three") is None
    with pytest.raises(DataError, match=r"another incarnation.*incarnation=`two` known=`one`"):
        mark_of(objects, "one")


def test_other_files_are_no_marks() -> None:
    """A version without a digest is not stored."""
    objects = MemoryObjects()
    objects.put(f"{MARK_FOLDER}/.DS_Store", b"")
    stored = StoredMark(objects, "one", threaded=False)
    stored.advance(TableVersion(1), "")
    stored.flush()
    assert mark_of(objects, "one") is None


def test_both_marks_advance_together() -> None:
    """Only the service can know a successor."""
    service, objects = MemoryHighWater(), MemoryObjects()
    both = BothHighWaters(service, StoredMark(objects, "one", threaded=False))
    both.advance(TableVersion(2), DIGESTS[2])
    both.flush()
    assert both.read() == mark_of(objects, "one") == Mark(TableVersion(2), DIGESTS[2])
    both.supersede("two")
    service.advance(TableVersion(9), DIGESTS[8])
    assert both.read() == Mark(TableVersion(2), DIGESTS[2], "two")
