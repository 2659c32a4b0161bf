"""The local runner with a disk tier."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from millpond.executor.local.run import LocalRun
from millpond.executor.local.runner import LocalRunner
from millpond.statestore.leases.memory import MemoryRegistry
from millpond.statestore.objects.memory import MemoryObjects
from millpond.statestore.objects.ranges import ByteRange, MeteredObjects, Tail, is_written_once
from millpond.statestore.store import Store
from millpond.testing.processes.ledger import ROWS, ledger_of, ledger_pipeline, numbered, written

KEYS = 50


class RowFileMeter(MeteredObjects):
    """An object store that counts the bytes read from row files."""

    row_bytes = 0

    def get(self, path: str) -> bytes:
        data = super().get(path)
        self.row_bytes += len(data) if is_written_once(path) else 0
        return data

    def read_ranges(self, path: str, ranges: Sequence[ByteRange]) -> list[bytes]:
        parts = super().read_ranges(path, ranges)
        self.row_bytes += sum(map(len, parts))
        return parts

    def read_tail(self, path: str, size_bytes: int) -> Tail:
        tail = super().read_tail(path, size_bytes)
        self.row_bytes += len(tail.data)
        return tail


class Machine:
    """A machine that runs the pipeline with a disk and almost no memory."""

    def __init__(self, objects: RowFileMeter, registry: MemoryRegistry, folder: Path, disk_mib: int) -> None:
        self.objects = objects
        self.store = Store.in_memory(objects=objects, registry=registry)
        runner = LocalRunner(
            self.store, cache_mib=0, disk_mib=disk_mib, disk_folder=folder, upkeep=None, progress=False
        )
        self.run: LocalRun = runner.start(ledger_pipeline(), stepping=True)

    def touch(self, first: int) -> int:
        """Inject a record for each key; return the bytes read from row files."""
        before = self.objects.row_bytes
        self.run.inject(ROWS, numbered(range(first, first + KEYS), keys=KEYS))
        self.run.run_until_quiet()
        return self.objects.row_bytes - before


@pytest.mark.parametrize("disk_mib", [0, 64])
def test_evicted_rows_are_read_from_the_store_at_most_once(tmp_path: Path, disk_mib: int) -> None:
    """A machine with a disk does not even read its own files, and a start reads for the first use; without one, each use
    reads the store.
    """
    objects, registry = RowFileMeter(MemoryObjects()), MemoryRegistry()
    former = Machine(objects, registry, tmp_path / "former", disk_mib)
    read = [former.touch(0), former.touch(KEYS)]
    former.run.abandon()
    before = objects.row_bytes
    successor = Machine(objects, registry, tmp_path / "successor", disk_mib)
    read.append(objects.row_bytes - before)
    read += [successor.touch(number * KEYS) for number in range(2, 5)]
    successor.run.stop()

    assert [count > 0 for count in read] == [
        False,
        not disk_mib,
        True,
        not disk_mib,
        not disk_mib,
        not disk_mib,
    ]
    assert ledger_of(successor.store) == written(numbered(range(5 * KEYS), keys=KEYS))
