"""Damage to the disk tier of a pipeline on S3, and to the store itself."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

from millpond.executor.local.run import LocalRun
from millpond.executor.local.runner import LocalRunner
from millpond.statestore.errors import DataError
from millpond.statestore.leases.memory import MemoryLeases, MemoryRegistry
from millpond.statestore.objects.ranges import is_written_once
from millpond.statestore.store import Store
from millpond.testing.fixtures.determinism import ManualClock, SeededRng
from millpond.testing.processes.ledger import ROWS, ledger_of, ledger_pipeline, numbered, written

if TYPE_CHECKING:
    from millpond.testing.faults.report import FaultReport
    from millpond.testing.servers.s3_server import S3Server

pytestmark = pytest.mark.fault

STEPS: Final = 40
KEYS: Final = 20
FLIPS: Final = 4


class Pond:
    """A store on S3, and one machine with a disk and almost no memory."""

    def __init__(self, url: str, options: dict[str, str], folder: Path) -> None:
        registry, clock = MemoryRegistry(), ManualClock()
        self.folder = folder
        self.store = Store.open(
            f"{url}/pond",
            storage_options=options,
            leases=lambda _, writer_id: MemoryLeases(registry, clock, writer_id=writer_id),
            clock=clock,
        )

    def start(self) -> LocalRun:
        runner = LocalRunner(
            self.store, cache_mib=0, disk_mib=64, disk_folder=self.folder, upkeep=None, progress=False
        )
        return runner.start(ledger_pipeline(), stepping=True)

    def copies(self) -> list[Path]:
        return sorted(self.folder.glob("??/*"))


@pytest.fixture
def pond(s3_bucket: str, s3_server: S3Server, tmp_path: Path) -> Pond:
    return Pond(s3_bucket, s3_server.options, tmp_path / "disk")


def step(run: LocalRun, number: int) -> None:
    run.inject(ROWS, numbered(range(number * KEYS, (number + 1) * KEYS), keys=KEYS))
    run.run_until_quiet()


def flip_bits(copy: Path, rng: SeededRng) -> None:
    data = bytearray(copy.read_bytes())
    for _ in range(FLIPS):
        data[int(rng.random() * len(data))] ^= 1 << int(rng.random() * 8)
    copy.write_bytes(data)


def damage(pond: Pond, rng: SeededRng, number: int) -> None:
    """Damage the local copies: flip bits of all, then truncate, empty or remove one, then remove all."""
    for copy in pond.copies():
        flip_bits(copy, rng)
    chosen = pond.copies()[int(rng.random() * len(pond.copies()))]
    match number % 4:
        case 0:
            chosen.write_bytes(chosen.read_bytes()[: int(rng.random() * chosen.stat().st_size)])
        case 1:
            chosen.write_bytes(b"")
        case 2:
            chosen.unlink()
        case _:
            shutil.rmtree(pond.folder)


def test_damaged_disk_changes_nothing(pond: Pond, caplog: pytest.LogCaptureFixture) -> None:
    rng = SeededRng(7)
    with caplog.at_level(logging.INFO, "millpond"), pond.store:
        run = pond.start()
        for number in range(STEPS):
            step(run, number)
            damage(pond, rng, number)
        run.stop()
        assert ledger_of(pond.store) == written(numbered(range(STEPS * KEYS), keys=KEYS))
    found = [
        record for record in caplog.records if "damaged and read from the store again" in record.getMessage()
    ]
    assert len(found) > STEPS


def test_flipped_bit_in_the_store_is_named_until_repaired(pond: Pond, fault_report: FaultReport) -> None:
    objects = pond.store.objects
    with pond.store:
        run = pond.start()
        step(run, 0)
        (path,) = [path for path in objects.list("") if is_written_once(path)]
        whole = objects.get(path)
        damaged = bytearray(whole)
        damaged[len(damaged) // 2] ^= 1
        objects.put(path, bytes(damaged))
        shutil.rmtree(pond.folder)
        with pytest.raises(DataError, match=path):
            step(run, 1)
        run.abandon()
        assert len(pond.copies()) == 1
        objects.put(path, whole)
        run = pond.start()
        step(run, 1)
        run.stop()
        assert ledger_of(pond.store) == written(numbered(range(2 * KEYS), keys=KEYS))
    fault_report.fault("R15", 1, flips=1)
