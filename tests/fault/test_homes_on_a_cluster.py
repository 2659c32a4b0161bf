"""The placement of slots when executors are lost and replaced."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Final

import orjson
import pytest

from tests.processes.cluster_homes import KEYS
from tests.processes.tree import command_of, descendants_of

pytestmark = [pytest.mark.fault, pytest.mark.spark_all, pytest.mark.slow]

ROOT: Final = Path(__file__).resolve().parents[2]
EXECUTORS: Final = 3
INTERVALS: Final = 6
EXECUTOR: Final = "CoarseGrainedExecutorBackend"
ROUNDS: Final = 12


class Cluster:
    """A program that runs a superstep on request."""

    def __init__(self, folder: Path) -> None:
        self._log = (folder / "log").open("wb")
        module = "tests.processes.cluster_homes"
        command = [sys.executable, "-m", module, str(folder), str(EXECUTORS), str(INTERVALS)]
        self.process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log
        )

    def superstep(self) -> dict[str, int]:
        stdin = self._pipe(self.process.stdin)
        stdin.write(b"\n")
        stdin.flush()
        return self.line()

    def line(self) -> dict[str, int]:
        told: dict[str, int] = orjson.loads(self._pipe(self.process.stdout).readline())
        return told

    def end(self) -> None:
        self._pipe(self.process.stdin).close()

    def kill_an_executor(self) -> None:
        """Send ``kill -9`` to one of the executors."""
        executors = [pid for pid in descendants_of(self.process.pid) if EXECUTOR in command_of(pid)]
        os.kill(executors[0], signal.SIGKILL)

    def close(self) -> None:
        """Kill its remaining processes."""
        left = [*descendants_of(self.process.pid), self.process.pid]
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            self._pipe(pipe).close()
        self._log.close()

    @staticmethod
    def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
        assert pipe is not None
        return pipe


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """Three executors of one core."""
    cluster = Cluster(tmp_path)
    yield cluster
    cluster.close()


@pytest.mark.timeout(600)
def test_slots_move_only_when_executors_are_lost_or_join(cluster: Cluster) -> None:
    """Only slots of the lost executor and of its replacement move."""
    before = [cluster.superstep() for _ in range(4)]
    assert all(report["at_home"] == report["slots"] == INTERVALS for report in before)

    cluster.kill_an_executor()
    after = [cluster.superstep() for _ in range(ROUNDS)]

    share = INTERVALS // EXECUTORS
    moved = [report["slots"] - report["at_home"] for report in after]
    assert 0 < sum(moved) <= 2 * share
    assert after[-1]["executors"] == EXECUTORS
    assert moved[-3:] == [0, 0, 0]
    cluster.end()
    assert [cluster.line(), cluster.line()] == [{str(len(before) + len(after)): KEYS}] * 2
    assert cluster.process.wait() == 0
