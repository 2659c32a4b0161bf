"""Power cuts on a real file system: the run continues on a copy of an ext4 image, made at some instant.

The copy lacks the operating system's cache, as does a disk after a power cut. It shows that the store's
syncs are enough for a journaling file system. The simulation (`power_cut`) is stricter, but models its file
system.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import orjson
import pytest
from deltalake import DeltaTable

from millpond.executor.local.runner import LocalRunner
from millpond.executor.pipeline.pipeline import EnginePipeline
from millpond.executor.sinks.sink import DeltaSink
from millpond.statestore.errors import DataError, InvalidError
from millpond.statestore.failpoint import listening
from millpond.statestore.leases.memory import MemoryLeases, MemoryRegistry
from millpond.statestore.store import Store
from millpond.statestore.system import SystemClock
from millpond.statestore.types import Durability
from millpond.testing.faults.report import FaultReport
from millpond.testing.fixtures.determinism import SeededRng
from millpond.testing.processes.ledger import ROWS, ledger_of, ledger_pipeline, numbered, written

pytestmark = pytest.mark.fault

CLOCK = SystemClock()
POWER_CUTS = int(os.environ.get("MILLPOND_POWER_CUTS", "20"))
IMAGE_BYTES = 32 << 20
RECORDS_A_LIFE = 6
FAILPOINTS_A_LIFE = 40


class Disk:
    """A small ext4 in a file, mounted at `folder`."""

    def __init__(self, root: Path) -> None:
        self.folder = root / "disk"
        self.folder.mkdir()
        self._root = root
        self._image = root / "image"
        self._number = 0
        with self._image.open("wb") as image:
            image.truncate(IMAGE_BYTES)
        make = ["mkfs.ext4", "-q", "-F", "-E", "lazy_itable_init=0,lazy_journal_init=0", str(self._image)]
        subprocess.run(make, check=True, capture_output=True)

    def mount(self) -> bool:
        """Mount it; return whether mounting is allowed."""
        command = ["mount", "-o", "loop", str(self._image), str(self.folder)]
        return not subprocess.run(command, check=False, capture_output=True).returncode

    def copy(self) -> Path:
        """Return a copy of the disk without the operating system's cache."""
        self._number += 1
        return Path(shutil.copyfile(self._image, self._root / f"image-{self._number}"))

    def go_on_with(self, copy: Path) -> None:
        """Mount the copy in place of the disk."""
        self.unmount()
        self._image.unlink()
        self._image = copy
        assert self.mount()

    def unmount(self) -> None:
        subprocess.run(["umount", "--lazy", str(self.folder)], check=True)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    """A mounted disk; skips the test where mounting is not allowed."""
    made = Disk(tmp_path)
    if os.geteuid() != 0 or not made.mount():
        pytest.skip("mounting is not allowed here")
    yield made
    made.unmount()


def opened(disk: Disk, registry: MemoryRegistry, durability: Durability) -> Store:
    """The store on the disk; its leases and its mark survive elsewhere."""
    return Store.open(
        disk.folder / "pond",
        durability=durability,
        leases=lambda _, writer_id: MemoryLeases(registry, CLOCK, writer_id=writer_id),
    )


class PowerCutError(BaseException):
    """The power cut, after which no code of the run continues."""


def cutting(disk: Disk, failpoint: int, copies: list[Path]) -> Callable[[str], None]:
    """Return a listener that cuts the power at the n-th failpoint."""
    left = [failpoint]

    def listen(_name: str) -> None:
        left[0] -= 1
        if left[0] == 0:
            copies.append(disk.copy())
            raise PowerCutError

    return listen


def pipeline_of(disk: Disk, durability: Durability) -> EnginePipeline:
    return ledger_pipeline(DeltaSink(str(disk.folder / "sink"), durability=durability))


def live(disk: Disk, registry: MemoryRegistry, acknowledged: int, failpoint: int) -> tuple[Path, int]:
    """Check the store, then process records until the power is cut.

    Returns the disk at that moment, and the number of acknowledged records.
    """
    copies: list[Path] = []
    with opened(disk, registry, "disk") as store:
        there = ledger_of(store) if store.snapshot().version else {}
        assert set(range(acknowledged)) <= {number for numbers in there.values() for number in numbers}
        try:
            with listening(cutting(disk, failpoint, copies)):
                run = LocalRunner(store, progress=False).start(pipeline_of(disk, "disk"), stepping=True)
                for number in range(acknowledged, acknowledged + RECORDS_A_LIFE):
                    run.inject_durably(ROWS, numbered([number]))
                    acknowledged = number + 1
        except PowerCutError:
            pass
        else:
            # Cut the power right after the last acknowledgement.
            copies.append(disk.copy())
    return copies[0], acknowledged


def test_acknowledged_records_survive_each_power_cut(disk: Disk, fault_report: FaultReport) -> None:
    """Other records are sent again and count once, in the store and in a sink on the same disk."""
    rng, registry, acknowledged = SeededRng("power cuts"), MemoryRegistry(), 0
    for _ in range(POWER_CUTS):
        failpoint = 1 + int(rng.random() * FAILPOINTS_A_LIFE)
        copy, acknowledged = live(disk, registry, acknowledged, failpoint)
        disk.go_on_with(copy)
        fault_report.fault("R18")
    sent = acknowledged + 1
    with opened(disk, registry, "disk") as store:
        with LocalRunner(store, progress=False).start(pipeline_of(disk, "disk")) as run:
            run.inject_durably(ROWS, numbered(range(sent)))
        assert ledger_of(store) == written(numbered(range(sent)))
    values = DeltaTable(disk.folder / "sink").to_pyarrow_table().column("value").to_pylist()
    assert sorted(orjson.loads(value)["n"] for value in values) == list(range(sent))


def test_loss_without_syncs_is_refused(disk: Disk) -> None:
    """With os_cache acknowledged commits are lost, so the copies do lack unsynced data."""
    registry = MemoryRegistry()
    with opened(disk, registry, "os_cache") as store:
        run = LocalRunner(store, progress=False).start(pipeline_of(disk, "os_cache"), stepping=True)
        run.inject_durably(ROWS, numbered(range(5)))
        copy = disk.copy()
        run.abandon()
    disk.go_on_with(copy)

    with pytest.raises((DataError, InvalidError)), opened(disk, registry, "os_cache"):
        pass
