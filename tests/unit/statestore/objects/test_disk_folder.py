"""Facts of the disk tier's folder: the budget is kept, and what is in use stays."""

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
    """Several processes, each with a tier of its own, before one store."""

    def __init__(self, folder: Path, processes: int = 1, budget_bytes: int = BUDGET_BYTES) -> None:
        self.clock = ManualClock()
        self.store = MemoryObjects()
        self.folder = folder
        self.tiers = [
            DiskTier(self.store, DiskFolder(folder, budget_bytes, self.clock), self.clock)
            for _ in range(processes)
        ]

    def write(self, number: int, size_bytes: int = OBJECT_BYTES) -> None:
        """Write an object, from one process after the other."""
        self.clock.advance_ms(1)
        self.tiers[number % len(self.tiers)].put_if_absent(
            path_of(number), bytes([number % 256]) * size_bytes
        )

    def has(self, number: int) -> bool:
        """Whether there is a copy of the object, which is removed by that."""
        return self.tiers[0].forget(path_of(number))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder that is not there yet."""
    return tmp_path / "disk"


@pytest.mark.parametrize("processes", [1, 3])
def test_the_budget_is_kept(folder: Path, processes: int) -> None:
    """However much is written, the folder holds at most 90 % of the budget and a share for each process."""
    machine = Machine(folder, processes)
    most = 0
    for number in range(150):
        machine.write(number)
        most = max(most, held_bytes(folder))

    assert BUDGET_BYTES // 2 < most <= BUDGET_BYTES * 9 // 10 + processes * SHARE_BYTES


def test_small_objects_count_as_a_chunk(folder: Path) -> None:
    """The number of files is bounded too: each counts as 64 KiB at least."""
    machine = Machine(folder)
    for number in range(300):
        machine.write(number, 10)

    assert len([*folder.glob("??/*")]) <= (BUDGET_BYTES * 9 // 10 + SHARE_BYTES) // COUNTED_BYTES_MIN


def test_what_was_used_last_stays(folder: Path) -> None:
    """Objects that are read now and then outlive those that were written after them and not read since."""
    machine = Machine(folder)
    for number in range(100):
        machine.write(number)
        machine.clock.advance_ms(61_000)
        assert machine.tiers[0].get(path_of(0)) == bytes(OBJECT_BYTES)

    assert machine.has(0)
    assert machine.has(99)
    assert not machine.has(1)
    assert [number for number in range(80, 99) if not machine.has(number)] == []


def test_a_use_is_marked_once_a_minute(folder: Path) -> None:
    """Reading an object again and again writes to the disk once a minute and process."""
    machine = Machine(folder)
    machine.write(1)
    (copy,) = folder.glob("??/*")
    marks = set()
    for _ in range(180):
        machine.clock.advance_ms(1_000)
        machine.tiers[0].get(path_of(1))
        marks.add(copy.stat().st_mtime_ns)

    assert len(marks) == 4


def test_the_memory_of_marks_is_bounded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that uses many objects forgets when it marked them, and marks them again."""
    monkeypatch.setattr(disk_folder, "_MARKED_MAX", 3)
    machine = Machine(folder)
    for number in range(5):
        machine.write(number)
    for number in range(5):
        assert machine.tiers[0].get(path_of(number)) == bytes([number]) * OBJECT_BYTES


def test_a_large_object_does_not_push_out_the_rest(folder: Path) -> None:
    """What is longer than an eighth of the budget is not kept when it is written or read whole."""
    machine = Machine(folder)
    machine.write(1)
    machine.write(2, BUDGET_BYTES // 8 + 1)
    assert machine.tiers[0].get(path_of(2)) == bytes([2]) * (BUDGET_BYTES // 8 + 1)

    assert (machine.has(1), machine.has(2)) == (True, False)


def test_a_process_does_not_write_while_another_sweeps(folder: Path) -> None:
    """While another process makes room, objects are read from the store and not kept; then they are kept again."""
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


def test_a_smaller_budget_is_kept_from_the_first_write(folder: Path) -> None:
    """A process with a smaller budget than an earlier one makes room before it writes."""
    machine = Machine(folder)
    for number in range(20):
        machine.write(number)
    smaller = Machine(folder, budget_bytes=2 * MIB)
    smaller.write(0)

    assert held_bytes(folder) <= 2 * MIB * 9 // 10 + OBJECT_BYTES + 4_096


def test_other_files_are_left_alone(folder: Path) -> None:
    """A sweep removes only what has the name of a copy in a folder of copies."""
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


def test_a_copy_that_goes_while_it_is_swept_is_no_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sweep goes on where a copy that it has listed was deleted in the meantime."""
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
