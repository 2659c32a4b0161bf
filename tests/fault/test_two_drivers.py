"""Spark drivers as real processes: some start at once, and one loses its JVM."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import orjson
import pytest

from millpond.statestore.store import Store
from millpond.statestore.system import SystemClock
from millpond.testing.processes.ledger import ledger_of, numbered
from millpond.testing.servers.zookeeper import wait_until
from tests.short_lived import SHORT_LIVED
from tests.tidy import ROOT

pytestmark = [pytest.mark.fault, pytest.mark.spark, pytest.mark.zookeeper, pytest.mark.slow]

CLOCK = SystemClock()
PATIENCE_MS = 180_000


class Driver:
    """A driver as a process, with its output."""

    def __init__(self, folder: Path, hosts: str) -> None:
        command = [sys.executable, "-m", "tests.processes.spark_driver"]
        command += [str(folder / "pond"), hosts, str(folder / "input")]
        self._log = folder / f"driver-{len(list(folder.glob('driver-*')))}.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=os.environ | SHORT_LIVED,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self.said: list[str] = []
        self._told = 0
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        self.said += map(str.strip, iter(self._process.stdout.readline, ""))

    def tell(self) -> None:
        """Let the driver continue."""
        assert self._process.stdin is not None
        self._told = len(self.said)
        self._process.stdin.write("go\n")
        self._process.stdin.flush()

    def wait_for(self, condition: Callable[[list[str]], bool]) -> None:
        """Wait until the output fulfils a condition; the driver must not end before."""
        assert wait_until(lambda: condition(self.said) or not self._reader.is_alive(), CLOCK, PATIENCE_MS)
        assert condition(self.said), (self.said, self.tail())

    @property
    def answers(self) -> list[str]:
        """Return the output since the driver was last continued."""
        return self.said[self._told :]

    @property
    def is_fenced(self) -> bool:
        """Return True if that run has ended with this error."""
        return self.answers[-1:] != [] and self.answers[-1].partition(" ")[0] == "FencedError"

    @property
    def has_ended(self) -> bool:
        """Return True if the process has ended and its output is complete."""
        return not self._reader.is_alive() and self._process.poll() is not None

    def tail(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")[-3_000:]

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.join()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


Start = Callable[[int], list[Driver]]


@pytest.fixture
def start(tmp_path: Path, zookeeper_hosts: str) -> Iterator[Start]:
    """Start drivers, and wait until they can begin."""
    (tmp_path / "input").mkdir()
    drivers: list[Driver] = []

    def begin(number: int) -> list[Driver]:
        begun = [Driver(tmp_path, zookeeper_hosts) for _ in range(number)]
        drivers.extend(begun)
        for driver in begun:
            driver.wait_for(lambda said: said[:1] == ["ready"])
        return begun

    yield begin
    for driver in drivers:
        driver.end()


def bring(folder: Path, *numbers: int) -> None:
    file = folder / f"{numbers}.json"
    file.write_bytes(b"\n".join(map(orjson.dumps, numbered(numbers))))
    file.rename(folder / "input" / file.name)


def ledger(folder: Path, hosts: str) -> dict[str, list[int]]:
    with Store.open(folder / "pond", zookeeper=hosts, read_only=True) as store:
        return {key: sorted(numbers) for key, numbers in ledger_of(store).items()}


def holds(folder: Path, hosts: str, numbers: list[int]) -> Callable[[], bool]:
    """Return True if the store holds these numbers; read it only after another commit."""
    commits: set[Path] = set()

    def condition() -> bool:
        found = set((folder / "pond" / "rows" / "_delta_log").glob("*.json"))
        if found == commits:
            return False
        commits.update(found)
        return ledger(folder, hosts) == {"k0": numbers}

    return condition


@pytest.mark.timeout(900)
def test_of_drivers_at_the_same_moment_one_wins_and_tells_of_its_killed_jvm(
    tmp_path: Path, zookeeper_hosts: str, start: Start
) -> None:
    """One driver wins on a fresh store and, twice, on an existing checkpoint; the others end with FencedError.

    When the JVM of the last winner is killed, every call reports it, ``is_active`` is false, and ``stop``
    releases the leases.
    """
    brought = [0, 5]
    bring(tmp_path, *brought)
    winner: Driver | None = None
    drivers = start(2)
    for number in range(3):
        for driver in drivers:
            if driver is not winner:
                driver.tell()
        winner = _the_winner(drivers)
        brought.append(10 + 5 * number)
        bring(tmp_path, brought[-1])
        assert wait_until(holds(tmp_path, zookeeper_hosts, brought), CLOCK, PATIENCE_MS), (
            winner.said,
            winner.tail(),
        )
        assert winner.answers == ["started"]
        if number == 0:
            drivers += start(1)
    assert winner is not None
    _kill_its_jvm(winner)
    with Store.open(tmp_path / "pond", zookeeper=zookeeper_hosts) as store:
        assert ledger_of(store) == {"k0": brought}


def _the_winner(drivers: list[Driver]) -> Driver:
    """Return the driver that continues when all others are fenced."""
    is_settled = wait_until(lambda: sum(not driver.is_fenced for driver in drivers) == 1, CLOCK, PATIENCE_MS)
    assert is_settled, [(driver.said, driver.tail()) for driver in drivers]
    (winner,) = (driver for driver in drivers if not driver.is_fenced)
    return winner


def _kill_its_jvm(driver: Driver) -> None:
    driver.tell()
    driver.wait_for(lambda _: len(driver.answers) == 1)
    os.kill(int(driver.answers[0]), signal.SIGKILL)
    driver.tell()
    assert wait_until(lambda: driver.has_ended, CLOCK, PATIENCE_MS)

    active, *calls, active_again, stopped = driver.answers
    assert (active, active_again) == ("False", "False")
    assert len(calls) == 3
    for said in calls:
        assert said.startswith("UnavailableError spark's jvm has ended"), said
    assert stopped.startswith("RunSummary("), stopped
