"""A copy of 100,000 records on a Spark cluster whose executors, workers and driver are killed.

The cluster is Spark's own of several processes on one machine. ``make test`` copies a part of the records
with a kill of each kind; ``MILLPOND_CLUSTER=full`` copies all, with three executors killed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from deltalake import DeltaTable

from millpond.statestore.store import Store
from millpond.statestore.system import SystemClock
from millpond.testing.faults.report import FaultReport
from millpond.testing.servers.zookeeper import wait_until
from tests.processes.cluster_copy import COPY
from tests.processes.tree import command_of, descendants_of
from tests.short_lived import SHORT_LIVED

pytestmark = [pytest.mark.fault, pytest.mark.spark, pytest.mark.slow]

CLOCK: Final = SystemClock()
ROOT: Final = Path(__file__).resolve().parents[2]
FULL: Final = os.environ.get("MILLPOND_CLUSTER") == "full"
RECORDS: Final = 100_000 if FULL else 10_000
EXECUTORS: Final = 3 if FULL else 1
FILES: Final = 10 if FULL else 6
"""One for a micro-batch: as many as there are kills to be survived, and two."""

PATIENCE_MS: Final = 400_000
EXECUTOR: Final = "CoarseGrainedExecutorBackend"
WORKER: Final = "pyspark.daemon"


class Driver:
    """The copy as a process, with its child processes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._log = folder / "driver.log"
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "tests.processes.cluster_copy", str(folder)]
        command += [str(RECORDS), str(FILES)]
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                command, cwd=ROOT, stdout=log, stderr=log, env=os.environ | SHORT_LIVED
            )

    def wait_for_copies(self, commits: int) -> None:
        """Wait until the copy has this many commits."""
        log = self.folder / COPY / "_delta_log"
        has_come = wait_until(
            lambda: len(list(log.glob("*.json"))) > commits or self.process.poll() is not None,
            CLOCK,
            PATIENCE_MS,
        )
        assert has_come, self.tail()
        assert self.process.poll() is None, self.tail()

    def kill_one(self, what: str) -> None:
        """Send ``kill -9`` to one child process with this text in its command."""
        children: list[int] = []

        def find() -> bool:
            children[:] = self.processes(what)
            return bool(children) or self.process.poll() is not None

        assert wait_until(find, CLOCK, PATIENCE_MS)
        assert children, self.tail()
        os.kill(children[-1], signal.SIGKILL)

    def kill(self) -> None:
        """Send ``kill -9`` to the driver, then to all processes that it leaves."""
        left = [*self.processes(""), self.process.pid]
        self.process.kill()
        self.process.wait()
        for process in left:
            try:
                os.kill(process, signal.SIGKILL)
            except ProcessLookupError:
                continue

    def finish(self) -> None:
        """Wait for a successful end."""
        assert self.process.wait(PATIENCE_MS / 1_000) == 0, self.tail()

    def tail(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")[-4_000:]

    def processes(self, what: str) -> list[int]:
        """Return its descendants with this text in their command, oldest first."""
        return sorted(child for child in descendants_of(self.process.pid) if what in command_of(child))


@pytest.fixture
def drivers(tmp_path: Path) -> Iterator[list[Driver]]:
    """Start drivers, and kill all of them after the test."""
    started: list[Driver] = []
    yield started
    for driver in started:
        driver.kill()


def copied(folder: Path) -> list[int]:
    return sorted(DeltaTable(folder / COPY).to_pyarrow_table().column("n").to_pylist())


@pytest.mark.timeout(1_800)
def test_copy_on_a_killed_cluster_equals_its_input(
    tmp_path: Path, drivers: list[Driver], fault_report: FaultReport
) -> None:
    """Tasks fail and speculation is on."""
    drivers.append(Driver(tmp_path))
    commits = 1
    for _ in range(EXECUTORS):
        drivers[-1].wait_for_copies(commits)
        drivers[-1].kill_one(EXECUTOR)
        fault_report.fault("R19", kills=1)
        commits += 2
    drivers[-1].wait_for_copies(commits)
    drivers[-1].kill_one(WORKER)
    fault_report.fault("R19", kills=1)
    drivers[-1].wait_for_copies(commits + 1)
    drivers[-1].kill()
    fault_report.fault("R19", kills=1)
    drivers.append(Driver(tmp_path))
    drivers[-1].finish()

    assert copied(tmp_path) == list(range(RECORDS))
    assert sorted(path.name for path in tmp_path.glob("failed-*")) == ["failed-0", "failed-1", "failed-2"]
    with Store.open(tmp_path / "pond", read_only=True) as store:
        for stage in range(3):
            counts = store.sql().sql(f'select sum((state::json)::bigint) from "stage-{stage}"').fetchall()
            assert counts == [(RECORDS,)]
    fault_report.count(records_checked=RECORDS)
