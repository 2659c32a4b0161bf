"""Row files behind a disk tier, with damage in the store."""

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
    monkeypatch.setattr(row_format, "PAGED_BYTES_MIN", 0)
    monkeypatch.setattr(files, "PAGE_INDEXES", PageIndexes(1 << 20))


@pytest.fixture(scope="module")
def file() -> bytes:
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
def test_rows_are_read_again_without_store(
    tmp_path: Path, file: bytes, in_parts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
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
def test_damage_is_named_until_store_is_repaired(
    tmp_path: Path, file: bytes, in_parts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy of the damaged file must not be used."""
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
                # Damage in a part that is not read changes nothing.
                assert machine.read(in_parts=in_parts).equals(right)
            except DataError as error:
                named.append(error.details["path"])
        machine.store.put(PATH, file)
        assert machine.read(in_parts=in_parts).equals(right)
    assert set(named) == {PATH}
    assert len(named) % 2 == 0


def test_lost_file_is_named(tmp_path: Path, file: bytes) -> None:
    machine = Machine(tmp_path / "disk", file)
    machine.read(in_parts=True)
    machine.store.delete([PATH])

    with pytest.raises(ObjectMissingError, match=PATH):
        machine.read(in_parts=False)
