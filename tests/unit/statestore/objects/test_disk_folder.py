"""The folder of the disk tier: its budget and its sweeps."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from millpond.statestore.objects import disk_folder
from millpond.statestore.objects.disk_folder import COUNTED_BYTES_MIN, DiskFolder
from millpond.statestore.objects.disk_tier import DiskTier
from millpond.statestore.objects.memory import MemoryObjects
from millpond.testing.fixtures.determinism import ManualClock

MIB = 1 << 20
BUDGET_BYTES = 8 * MIB
SHARE_BYTES = MIB
OBJECT_BYTES = 1 << 18


def path_of(number: int) -> str:
    return f"computation=c/{number:010d}-{number:032x}.parquet"


def held_bytes(folder: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in folder.glob("??/*"))


class Machine:
    def __init__(self, folder: Path, processes: int = 1, budget_bytes: int = BUDGET_BYTES) -> None:
        self.clock = ManualClock()
        self.store = MemoryObjects()
        self.folder = folder
        self.tiers = [
            DiskTier(self.store, DiskFolder(folder, budget_bytes, self.clock), self.clock)
            for _ in range(processes)
        ]

    def write(self, number: int, size_bytes: int = OBJECT_BYTES) -> None:
        self.clock.advance_ms(1)
        self.tiers[number % len(self.tiers)].put_if_absent(
            path_of(number), bytes([number % 256]) * size_bytes
        )

    def has(self, number: int) -> bool:
        return self.tiers[0].forget(path_of(number))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "disk"


@pytest.mark.parametrize("processes", [1, 3])
def test_budget_is_kept(folder: Path, processes: int) -> None:
    """The limit is 90 % of the budget, plus a share for each process."""
    machine = Machine(folder, processes)
    most = 0
    for number in range(150):
        machine.write(number)
        most = max(most, held_bytes(folder))

    assert BUDGET_BYTES // 2 < most <= BUDGET_BYTES * 9 // 10 + processes * SHARE_BYTES


def test_small_object_counts_as_chunk(folder: Path) -> None:
    """The number of files is bounded too."""
    machine = Machine(folder)
    for number in range(300):
        machine.write(number, 10)

    assert len([*folder.glob("??/*")]) <= (BUDGET_BYTES * 9 // 10 + SHARE_BYTES) // COUNTED_BYTES_MIN


def test_recently_read_objects_survive(folder: Path) -> None:
    machine = Machine(folder)
    for number in range(100):
        machine.write(number)
        machine.clock.advance_ms(61_000)
        assert machine.tiers[0].get(path_of(0)) == bytes(OBJECT_BYTES)

    assert machine.has(0)
    assert machine.has(99)
    assert not machine.has(1)
    assert [number for number in range(80, 99) if not machine.has(number)] == []


def test_use_is_recorded_once_a_minute(folder: Path) -> None:
    machine = Machine(folder)
    machine.write(1)
    (copy,) = folder.glob("??/*")
    marks = set()
    for _ in range(180):
        machine.clock.advance_ms(1_000)
        machine.tiers[0].get(path_of(1))
        marks.add(copy.stat().st_mtime_ns)

    assert len(marks) == 4


def test_memory_of_recorded_uses_is_bounded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_folder, "_MARKED_MAX", 3)
    machine = Machine(folder)
    for number in range(5):
        machine.write(number)
    for number in range(5):
        assert machine.tiers[0].get(path_of(number)) == bytes([number]) * OBJECT_BYTES


def test_large_object_is_not_kept(folder: Path) -> None:
    """Otherwise it would evict all others."""
    machine = Machine(folder)
    machine.write(1)
    machine.write(2, BUDGET_BYTES // 8 + 1)
    assert machine.tiers[0].get(path_of(2)) == bytes([2]) * (BUDGET_BYTES // 8 + 1)

    assert (machine.has(1), machine.has(2)) == (True, False)


def test_process_does_not_write_during_another_sweep(folder: Path) -> None:
    machine = Machine(folder)
    machine.write(0)
    with (folder / ".sweep").open("r+b") as sweep:
        fcntl.flock(sweep, fcntl.LOCK_EX)
        for number in range(1, 60):
            machine.write(number)
        assert held_bytes(folder) <= 2 * SHARE_BYTES
        assert machine.tiers[0].get(path_of(59)) == bytes([59]) * OBJECT_BYTES
        assert not machine.has(59)
    machine.write(60)
    assert machine.has(60)


def test_smaller_budget_applies_before_first_write(folder: Path) -> None:
    machine = Machine(folder)
    for number in range(20):
        machine.write(number)
    smaller = Machine(folder, budget_bytes=2 * MIB)
    smaller.write(0)

    assert held_bytes(folder) <= 2 * MIB * 9 // 10 + OBJECT_BYTES + 4_096


def test_sweep_keeps_other_files(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    others = [folder / "notes", folder / "aa" / "notes", folder / "other" / ("ab" * 32)]
    for other in others:
        other.parent.mkdir(exist_ok=True)
        other.write_bytes(bytes(MIB))
        os.utime(other, (0, 0))
    machine = Machine(folder)
    for number in range(60):
        machine.write(number)

    assert all(other.exists() for other in others)


def test_copy_deleted_during_sweep_is_skipped(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(folder)
    for number in range(10):
        machine.write(number)
    entries = disk_folder._entries

    def listed(path: str) -> list[os.DirEntry[str]]:
        found = entries(path)
        for entry in found:
            if entry.is_file() and entry.name != ".sweep":
                Path(entry.path).unlink()
        return found

    monkeypatch.setattr(disk_folder, "_entries", listed)
    other = Machine(folder)
    other.write(11)

    assert other.has(11)
