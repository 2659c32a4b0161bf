"""
Drivers on Spark as real processes: two that start at the same moment, and one whose JVM is killed.
"""

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
    """
    A driver as a process of its own; what it says is kept.
    """

    def __init__(self, folder: Path, hosts: str, *options: str) -> None:
        command = [sys.executable, "-m", "millpond.testing.processes.spark_driver"]
        command += [str(folder / "pond"), hosts, str(folder / "input"), *options]
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
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        self.said += map(str.strip, iter(self._process.stdout.readline, ""))

    def tell(self) -> None:
        """
        Give it the word to go on.
        """
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()

    def wait_for(self, condition: Callable[[list[str]], bool]) -> None:
        """
        Wait until what it has said fulfils a condition; it must not end before.
        """
        assert wait_until(lambda: condition(self.said) or not self._reader.is_alive(), CLOCK, PATIENCE_MS)
        assert condition(self.said), (self.said, self.tail())

    @property
    def has_ended(self) -> bool:
        """
        Whether the process has ended, and all that it has said is known.
        """
        return not self._reader.is_alive() and self._process.poll() is not None

    def tail(self) -> str:
        """
        The end of its output.
        """
        return self._log.read_text(encoding="utf-8", errors="replace")[-3_000:]

    def end(self) -> None:
        """
        Kill it.
        """
        self._process.kill()
        self._process.wait()
        self._reader.join()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


Start = Callable[..., Driver]


@pytest.fixture
def start(tmp_path: Path, zookeeper_hosts: str) -> Iterator[Start]:
    """
    Starts drivers, and waits until they can begin.
    """
    (tmp_path / "input").mkdir()
    drivers: list[Driver] = []

    def begin(*options: str) -> Driver:
        drivers.append(Driver(tmp_path, zookeeper_hosts, *options))
        drivers[-1].wait_for(lambda said: said[:1] == ["ready"])
        return drivers[-1]

    yield begin
    for driver in drivers:
        driver.end()


def bring(folder: Path, *numbers: int) -> None:
    """
    One more file.
    """
    file = folder / f"{numbers}.json"
    file.write_bytes(b"\n".join(map(orjson.dumps, numbered(numbers))))
    file.rename(folder / "input" / file.name)


def ledger(folder: Path, hosts: str) -> dict[str, list[int]]:
    """
    What the store holds.
    """
    with Store.open(folder / "pond", zookeeper=hosts, read_only=True) as store:
        return {key: sorted(numbers) for key, numbers in ledger_of(store).items()}


@pytest.mark.timeout(900)
def test_of_two_drivers_at_the_same_moment_one_wins(
    tmp_path: Path, zookeeper_hosts: str, start: Start
) -> None:
    """
    On a fresh store and on an existing checkpoint one of them goes on, and the other ends with FencedError.
    """
    brought = [0, 5]
    bring(tmp_path, *brought)
    winner: Driver | None = None
    for number in range(3):
        rivals = [start(), start()]
        for driver in rivals:
            driver.tell()
        rivals += [] if winner is None else [winner]

        def is_settled(rivals: list[Driver] = rivals) -> bool:
            return sum(not driver.has_ended for driver in rivals) == 1

        assert wait_until(is_settled, CLOCK, PATIENCE_MS), [(each.said, each.tail()) for each in rivals]
        losers = [driver for driver in rivals if driver.has_ended]
        assert [driver.said[-1].partition(" ")[0] for driver in losers] == ["FencedError"] * len(losers)
        (winner,) = (driver for driver in rivals if not driver.has_ended)
        brought.append(10 + 5 * number)
        bring(tmp_path, brought[-1])
        assert wait_until(lambda: ledger(tmp_path, zookeeper_hosts) == {"k0": brought}, CLOCK, PATIENCE_MS), (
            winner.said,
            winner.tail(),
        )
        assert not winner.has_ended


@pytest.mark.timeout(600)
def test_a_killed_jvm_is_said_in_one_sentence(tmp_path: Path, zookeeper_hosts: str, start: Start) -> None:
    """
    Every call says that Spark's JVM has ended, ``is_active`` is false, and ``stop`` gives the leases back.
    """
    bring(tmp_path, 0, 5)
    driver = start("jvm")
    driver.tell()
    driver.wait_for(lambda said: len(said) == 3)
    assert wait_until(lambda: ledger(tmp_path, zookeeper_hosts) == {"k0": [0, 5]}, CLOCK, PATIENCE_MS)

    os.kill(int(driver.said[2]), signal.SIGKILL)
    driver.tell()
    assert wait_until(lambda: driver.has_ended, CLOCK, PATIENCE_MS)

    active, *calls, active_again, stopped = driver.said[3:]
    assert (active, active_again) == ("False", "False")
    assert len(calls) == 3
    for said in calls:
        assert said.startswith("UnavailableError spark's jvm has ended"), said
    assert stopped.startswith("RunSummary("), stopped
    with Store.open(tmp_path / "pond", zookeeper=zookeeper_hosts) as store:
        assert ledger_of(store) == {"k0": [0, 5]}
