"""A full disk: the run waits, fails with its reason after a timeout, and continues with the same answer.

Where mounting is allowed, the disk is a small tmpfs with the whole store, ZooKeeper and catalog included.
An object store without room replaces it everywhere. Where mounting is not allowed, ``[tmpfs]`` is skipped and
these tests show the same facts:

| needs the right to mount                          | without it                                          |
|---------------------------------------------------|-----------------------------------------------------|
| ``test_run_waits_for_room[tmpfs]``                | ``[everything]``, ``[the log]``, ``[row files]``, … |
| ``test_run_ends_with_its_reason[tmpfs]``          | the same                                            |
| ``test_full_sink_stops_the_run_…[tmpfs]``         | ``[no folder]``                                     |
| ``test_full_disk_under_spark_ends_the_run``       | none: Spark's tasks write to a real file system     |
"""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import orjson
import pytest
from deltalake import DeltaTable

from millpond.executor.local.intake import Receipt
from millpond.executor.local.run import LocalRun
from millpond.executor.local.runner import LocalRunner
from millpond.executor.sinks.sink import DeltaSink
from millpond.executor.spark.runner import SparkRunner
from millpond.executor.superstep.plan import InputPosition
from millpond.statestore.errors import OutcomeUnknownError, UnavailableError
from millpond.statestore.leases.memory import MemoryLeases, MemoryRegistry
from millpond.statestore.objects.memory import MemoryObjects
from millpond.statestore.store import Store
from millpond.statestore.system import SystemClock
from millpond.testing.faults.faulty_objects import Fault, FaultyObjects
from millpond.testing.faults.report import FaultReport
from millpond.testing.processes.ledger import LEDGER, ROWS, ledger_of, ledger_pipeline, numbered, written

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.fault

CLOCK = SystemClock()
PATIENCE = "60s"
ALWAYS = 1_000_000
BLOCK = bytes(4_096)


class Disk(Protocol):
    """A location for a store, which can be filled up."""

    def open(self) -> Store: ...

    def fill(self) -> None: ...

    def free(self) -> None: ...


class Tmpfs:
    """A file system in memory of a few megabytes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._filler = folder / "filler"

    def open(self) -> Store:
        return Store.open(self.folder / "pond")

    def fill(self) -> None:
        with self._filler.open("wb", buffering=0) as filler:
            try:
                while True:
                    filler.write(BLOCK)
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise

    def free(self) -> None:
        self._filler.unlink()


class NoFolder:
    """A folder that is "full" while a file lies in its place, which stops every user, root included."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._aside = folder.with_name("aside")

    def fill(self) -> None:
        self.folder.rename(self._aside)
        self.folder.touch()

    def free(self) -> None:
        self.folder.unlink()
        self._aside.rename(self.folder)


class NoRoom:
    """An object store that refuses writes to matching paths while it is full."""

    def __init__(self, within: str = "") -> None:
        self.objects = FaultyObjects(MemoryObjects())
        self._within = within
        self._registry = MemoryRegistry()

    def open(self) -> Store:
        return Store.in_memory(objects=self.objects, registry=self._registry)

    def fill(self) -> None:
        self.objects.plan(Fault.REFUSED, "put_if_absent", within=self._within, times=ALWAYS)

    def free(self) -> None:
        self.objects.heal()


@pytest.fixture
def tmpfs(tmp_path: Path) -> Iterator[Tmpfs]:
    """A mounted tmpfs; skips the test where mounting is not allowed."""
    folder = tmp_path / "small"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("mounting is not allowed here")
    yield Tmpfs(folder)
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.fixture(params=["tmpfs", "no folder"])
def small(request: pytest.FixtureRequest, tmp_path: Path) -> Tmpfs | NoFolder:
    if request.param == "tmpfs":
        mounted: Tmpfs = request.getfixturevalue("tmpfs")
        return mounted
    (tmp_path / "small").mkdir()
    return NoFolder(tmp_path / "small")


@pytest.fixture(params=["tmpfs", "everything", "the log", "row files", "dead letters"])
def disk(request: pytest.FixtureRequest) -> Disk:
    """A disk of each kind; some object stores lack room only for certain paths."""
    parts = {
        "everything": "",
        "the log": "_delta_log",
        "row files": f"={LEDGER}",
        "dead letters": "=dead_letters",
    }
    if request.param == "tmpfs":
        small: Tmpfs = request.getfixturevalue("tmpfs")
        return small
    return NoRoom(parts[request.param])


def write(run: LocalRun, *numbers: int) -> Receipt:
    unreadable = {"k": None, "t": 1, "id": f"none {numbers}", "n": -1}
    return run.inject(ROWS, [*numbered(numbers), unreadable])


def letters(store: Store) -> int:
    return store.rows_view("dead_letters").to_arrow().num_rows


def test_run_waits_for_room(disk: Disk, fault_report: FaultReport) -> None:
    """While the disk is full nothing is acknowledged, and once there is room everything is, once."""
    with disk.open() as store, LocalRunner(store, progress=False).start(ledger_pipeline()) as run:
        write(run, 0, 1).wait(PATIENCE)
        version = store.snapshot().version
        disk.fill()
        fault_report.fault("R14")
        receipts = [write(run, number, number + 1) for number in range(2, 12, 2)]
        assert not receipts[0].wait("500ms")
        assert store.snapshot().version == version
        assert run.is_active
        disk.free()
        assert all(receipt.wait(PATIENCE) for receipt in receipts)
        assert ledger_of(store) == written(numbered(range(12)))
        assert letters(store) == 6


def test_run_ends_with_its_reason(disk: Disk, fault_report: FaultReport) -> None:
    """After its timeout the run names the store, nothing is half written, and a restart continues."""
    with disk.open() as store:
        run = LocalRunner(store, progress=False, pause_timeout="200ms").start(ledger_pipeline())
        write(run, 0, 1).wait(PATIENCE)
        version = store.snapshot().version
        disk.fill()
        fault_report.fault("R14")
        with pytest.raises((UnavailableError, OutcomeUnknownError)):
            write(run, 2, 3).wait(PATIENCE)
        assert store.snapshot().version == version
        assert ledger_of(store) == written(numbered(range(2)))
        disk.free()
        run.abandon()
    with disk.open() as store:
        with LocalRunner(store, progress=False).start(ledger_pipeline()) as again:
            write(again, 0, 1, 2, 3).wait(PATIENCE)
        assert ledger_of(store) == written(numbered(range(4)))


def test_full_disk_is_named_where_the_store_is_opened(tmpfs: Tmpfs, fault_report: FaultReport) -> None:
    with tmpfs.open():
        pass
    tmpfs.fill()
    fault_report.fault("R14")
    with pytest.raises(UnavailableError, match="the disk is full"):
        tmpfs.open()
    tmpfs.free()
    with tmpfs.open() as store:
        assert store.snapshot().version == 0


def test_full_sink_stops_the_run_and_catches_up(
    small: Tmpfs | NoFolder, tmp_path: Path, fault_report: FaultReport
) -> None:
    """The sink stops the store's progress, and gets the missing rows once, at the next start."""
    sink = small.folder / "sink"
    registry = MemoryRegistry()
    with Store.open(
        tmp_path / "pond", leases=lambda _, writer_id: MemoryLeases(registry, CLOCK, writer_id=writer_id)
    ) as store:
        run = LocalRunner(store, progress=False).start(ledger_pipeline(DeltaSink(str(sink))), stepping=True)
        run.inject(ROWS, numbered([0, 1]))
        run.run_until_quiet()
        small.fill()
        fault_report.fault("R14")
        run.inject(ROWS, numbered([2, 3]))
        with pytest.raises((UnavailableError, OutcomeUnknownError)):
            run.run_until_quiet()
        version = store.snapshot().version
        with pytest.raises((UnavailableError, OutcomeUnknownError)):
            run.inject(ROWS, numbered([4]))
        assert store.snapshot().version == version
        assert ledger_of(store) == written(numbered(range(4)))
        run.abandon()
        small.free()
        with LocalRunner(store, progress=False).start(ledger_pipeline(DeltaSink(str(sink)))) as again:
            again.inject(ROWS, numbered([4])).wait(PATIENCE)
        values = DeltaTable(sink).to_pyarrow_table().column("value").to_pylist()
        assert sorted(orjson.loads(value)["n"] for value in values) == [0, 1, 2, 3, 4]
        assert ledger_of(store) == written(numbered(range(5)))


@pytest.mark.spark
def test_full_disk_under_spark_ends_the_run(
    tmpfs: Tmpfs, spark: SparkSession, fault_report: FaultReport
) -> None:
    """The next run gives the same answer."""
    registry = MemoryRegistry()

    def batch(number: int) -> tuple[DataFrame, InputPosition]:
        rows = [tuple(row.values()) for row in numbered(range(number * 5, number * 5 + 5))]
        frame = spark.createDataFrame(rows, "k string, t long, id string, n long").coalesce(1)
        return frame, InputPosition(stream=ROWS, source="test", batch=number)

    with Store.open(
        tmpfs.folder / "pond", leases=lambda _, writer_id: MemoryLeases(registry, CLOCK, writer_id=writer_id)
    ) as store:
        runner = SparkRunner(store, spark=spark, progress=False, intervals=1)
        run = runner.open(ledger_pipeline())
        run.consume(*batch(0))
        tmpfs.fill()
        fault_report.fault("R14")
        with pytest.raises(Exception, match=r"(?is)no space left"):
            run.consume(*batch(1))
        run.abandon()
        assert ledger_of(store) == written(numbered(range(5)))
        tmpfs.free()
        again = runner.open(ledger_pipeline())
        again.consume(*batch(1))
        again.stop()
        assert ledger_of(store) == written(numbered(range(10)))
