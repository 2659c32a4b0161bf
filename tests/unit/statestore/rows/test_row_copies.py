"""Row files before which there is a disk tier: wrong bytes of the store are named, and gone once the store is repaired."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from millpond.statestore.errors import DataError, ObjectMissingError
from millpond.statestore.interval import Interval
from millpond.statestore.objects.disk_folder import DiskFolder
from millpond.statestore.objects.disk_tier import DiskTier
from millpond.statestore.objects.memory import MemoryObjects
from millpond.statestore.objects.ranges import MeteredObjects
from millpond.statestore.rows import files, row_format
from millpond.statestore.rows.files import read_row_files, row_file_path, write_row_file
from millpond.statestore.rows.pages import PageIndexes
from millpond.statestore.rows.row import Fence
from millpond.statestore.types import CommitNumber, Sequencer, Superstep
from millpond.testing.fixtures.determinism import ManualClock, SeededRng
from tests.fixtures.row_updates import row_updates

FENCE = Fence(Sequencer(1), CommitNumber(1))
PATH = row_file_path("c", Superstep(1), "0" * 32)
KEYS = [f"{number:05d}" for number in range(0, 8_000, 2_000)]


@pytest.fixture(autouse=True)
def indexes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The file has a page index, which this process has not read."""
    monkeypatch.setattr(row_format, "PAGED_BYTES_MIN", 0)
    monkeypatch.setattr(files, "PAGE_INDEXES", PageIndexes(1 << 20))


@pytest.fixture(scope="module")
def file() -> bytes:
    """A row file in blocks."""
    store, rng = MemoryObjects(), SeededRng(1)
    updates = [
        {"key": f"{number:05d}", "state": "".join(rng.token() for _ in range(12))} for number in range(8_000)
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_format, "PAGED_BYTES_MIN", 0)
        write_row_file(
            store,
            Interval("c", "", None),
            row_updates(updates),
            superstep=Superstep(1),
            fence=FENCE,
            token="0" * 32,
        )
    return store.get(PATH)


class Machine:
    """A store with the file, and a process that reads it through a disk tier."""

    def __init__(self, folder: Path, file: bytes) -> None:
        clock = ManualClock()
        self.store = MemoryObjects()
        self.metered = MeteredObjects(self.store)
        self.tier = DiskTier(self.metered, DiskFolder(folder, 1 << 30, clock), clock)
        self.store.put(PATH, file)

    def read(self, *, in_parts: bool) -> pa.Table:
        large = [PATH] if in_parts else []
        return read_row_files(self.tier, [PATH], ["key", "state"], keys=KEYS, large=large)


@pytest.mark.parametrize("in_parts", [False, True])
def test_rows_are_read_again_without_the_store(
    tmp_path: Path, file: bytes, in_parts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second read of some rows, by a process that knows no page index, reads nothing of the store."""
    machine = Machine(tmp_path / "disk", file)
    first = machine.read(in_parts=in_parts)
    once = machine.metered.read_bytes
    monkeypatch.setattr(files, "PAGE_INDEXES", PageIndexes(1 << 20))

    assert machine.read(in_parts=in_parts).equals(first)
    assert first.num_rows == len(KEYS)
    assert machine.metered.read_bytes == once
    assert 0 < once <= len(file)
    assert not in_parts or once < len(file) // 2


@pytest.mark.parametrize("in_parts", [False, True])
def test_wrong_bytes_of_the_store_are_named_until_it_is_repaired(
    tmp_path: Path, file: bytes, in_parts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the store's file is damaged each read names it; when it is restored, the copy of the damaged one is not used."""
    right = Machine(tmp_path / "other", file).read(in_parts=in_parts)
    machine = Machine(tmp_path / "disk", file)
    step = len(file) // 60
    named: list[object] = []
    for place in range(3, len(file), step):
        damaged = bytearray(file)
        damaged[place] ^= 16
        machine.store.put(PATH, bytes(damaged))
        monkeypatch.setattr(files, "PAGE_INDEXES", PageIndexes(1 << 20))
        machine.tier.forget(PATH)
        for _ in range(2):
            try:
                # What is damaged in a part that is not read changes nothing.
                assert machine.read(in_parts=in_parts).equals(right)
            except DataError as error:
                named.append(error.details["path"])
        machine.store.put(PATH, file)
        assert machine.read(in_parts=in_parts).equals(right)
    assert set(named) == {PATH}
    assert len(named) % 2 == 0


def test_a_lost_file_is_named(tmp_path: Path, file: bytes) -> None:
    """A file that the store has lost, and of which not all that is wanted was kept, is an error that names it."""
    machine = Machine(tmp_path / "disk", file)
    machine.read(in_parts=True)
    machine.store.delete([PATH])

    with pytest.raises(ObjectMissingError, match=PATH):
        machine.read(in_parts=False)
