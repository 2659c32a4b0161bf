"""The demo under kills of its driver and its workers, and failing tasks.

It runs in processes, as for users, on the weeks of the blizzard. One run takes all faults, because each
start of Spark costs more than the rest of the demo.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pytest

import millpond as mp
from examples.zeitgeist.results import Results, read_results
from millpond.statestore.system import SystemClock
from tests.processes.tree import command_of, descendants_of
from tests.short_lived import SHORT_LIVED

pytestmark = [pytest.mark.fault, pytest.mark.spark, pytest.mark.slow]

ROOT: Final = Path(__file__).resolve().parents[2]
WEEKS: Final = ("--first", "2013-01-25", "--last", "2013-02-09", "--flights-per-file", "2800")
COMPUTATIONS: Final = ("window_counter", "hour_model", "detector")
_POLL_MS: Final = 2
_FAR_POLL_MS: Final = 25
"""While the same point of the superstep before the last is not reached."""

_PATIENCE_MS: Final = 240_000

Moment = Callable[[Path, int], bool]
"""Whether a run (its output folder) has reached a certain point of the superstep with this number."""


def _planned(output: Path, number: int) -> bool:
    """Spark has recorded the batch's files, and read none."""
    return (output / "pond/checkpoints/flights/offsets" / str(number)).exists()


def _written(output: Path, number: int) -> bool:
    """A task has written row files of an uncommitted superstep."""
    return any((output / "pond/rows").glob(f"computation=*/{number:010d}-*.parquet"))


def _committed(output: Path, number: int) -> bool:
    """The superstep is committed, but neither sinks nor Spark's checkpoint have it."""
    return (output / "pond/rows/_delta_log" / f"{number:020d}.json").exists()


def _delivered(output: Path, number: int) -> bool:
    """A sink has the superstep's productions."""
    return (output / "tables/counts/_delta_log" / f"{number:020d}.json").exists()


def _done(output: Path, number: int) -> bool:
    """Spark's checkpoint has the batch."""
    return (output / "pond/checkpoints/flights/commits" / str(number)).exists()


def _forked(output: Path, _number: int) -> bool:
    """The replay has its store, without the run's later flights."""
    return (output / "what_if/replay.json").exists()


def _replaying(output: Path, number: int) -> bool:
    """The replay's store has so many commits: the first is the fork's, the second takes the leases."""
    return len(list((output / "what_if/rows/_delta_log").glob("*.json"))) >= number


DRIVER: Final = "driver"
WORKERS: Final = "workers"
KILLS: Final[tuple[tuple[Moment, int, str], ...]] = (
    (_planned, 1, DRIVER),
    (_written, 2, DRIVER),
    (_done, 2, DRIVER),
    (_delivered, 4, DRIVER),
    # Let the driver run some supersteps, so that Spark itself retries the tasks of killed workers.
    (_committed, 6, WORKERS),
    (_committed, 9, DRIVER),
    (_committed, 11, WORKERS),
    (_committed, 13, WORKERS),
    (_forked, 0, DRIVER),
    (_replaying, 3, DRIVER),
)
"""Who is killed at which points, one after another, in one run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The results of a run, and of its replay with a more sensitive alarm."""

    results: Results
    sensitive: Results
    rows: dict[str, pa.Table]
    summary: dict[str, Any]

    @classmethod
    def of(cls, output: Path) -> Outcome:
        """Return the results of the finished run in this folder."""
        with mp.Store.open(output / "pond", read_only=True) as store:
            views = {name: store.rows_view(name).to_arrow() for name in COMPUTATIONS}
        rows = {name: view.select(["key", "state", "timers"]) for name, view in views.items()}
        summary = json.loads((output / "summary.json").read_text(encoding="utf-8"))
        return cls(
            results=read_results(output / "tables"),
            sensitive=read_results(output / "what_if" / "sinks"),
            rows=rows,
            summary=summary,
        )

    def assert_same(self, other: Outcome) -> None:
        """Assert equal tables, rows and numbers."""
        for name in ("counts", "expectations", "alerts"):
            ours, theirs = (_sorted(getattr(outcome.results, name)) for outcome in (self, other))
            assert ours == theirs, name
        ours, theirs = (_sorted(outcome.sensitive.final_alerts) for outcome in (self, other))
        assert ours == theirs
        assert len(theirs) > len(other.results.final_alerts)
        for name in COMPUTATIONS:
            assert self.rows[name].equals(other.rows[name]), name
        for name in ("records", "late_records", "alerts", "strongest_days", "final_watermark"):
            assert self.summary[name] == other.summary[name], name


def _sorted(table: Any) -> list[str]:
    return sorted(map(repr, table.to_dict("records")))


class Demo:
    """The demo as a process, with its standard output in a file."""

    def __init__(self, output: Path, *arguments: str, module: str = "examples.zeitgeist") -> None:
        self.output = output
        self._log = output / "demo.log"
        output.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", module, "--output", str(output), *WEEKS, *arguments]
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                command, cwd=ROOT, stdout=log, stderr=log, env=os.environ | SHORT_LIVED
            )

    def finish(self) -> None:
        """Wait for a successful end."""
        assert self.process.wait(_PATIENCE_MS / 1_000) == 0, self._log.read_text(encoding="utf-8")[-4_000:]

    def wait_for(self, moment: Moment, number: int) -> None:
        """Poll the run's files until it has reached this point."""
        clock = SystemClock()
        until_us = clock.monotonic_us() + _PATIENCE_MS * 1_000
        while clock.monotonic_us() < until_us:
            if moment(self.output, number):
                return
            assert self.process.poll() is None, self._log.read_text(encoding="utf-8")[-4_000:]
            is_near = number <= 2 or moment(self.output, number - 2)
            clock.sleep_ms(_POLL_MS if is_near else _FAR_POLL_MS)
        pytest.fail(f"the run did not reach {moment.__name__} {number}")

    def kill(self) -> None:
        """Send ``kill -9`` to a live driver; its JVM notices by itself."""
        self.process.kill()
        self.process.wait()

    def kill_workers(self) -> int:
        """Send ``kill -9`` to the Python workers, the children of the JVM's daemon; return their number."""
        workers = [
            child
            for child, parent in descendants_of(self.process.pid).items()
            if "pyspark.worker" in command_of(child) and "pyspark.worker" in command_of(parent)
        ]
        for worker in workers:
            os.kill(worker, signal.SIGKILL)
        return len(workers)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """The results of a run without faults."""
    output = tmp_path_factory.mktemp("undisturbed")
    demo = Demo(output)
    try:
        demo.finish()
    finally:
        demo.kill()
    return Outcome.of(output)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[], Demo]]:
    """Start demos with failing tasks in the test's folder; all end with the test."""
    with ExitStack() as kills:

        def started() -> Demo:
            demo = Demo(tmp_path, "--master", "local[2,4]", module="tests.fault.failing_demo")
            kills.callback(demo.kill)
            return demo

        yield started


@pytest.mark.timeout(600)  # Eight starts of Spark, and the fixture's undisturbed run.
def test_killed_drivers_killed_workers_and_failed_tasks_change_nothing(
    undisturbed: Outcome, start: Callable[[], Demo], tmp_path: Path
) -> None:
    """The driver is killed between any two steps of a superstep.

    Partial files of a killed worker, and files of a failed attempt, must not count.
    """
    demo, killed = start(), 0
    for moment, number, victim in KILLS:
        demo.wait_for(moment, number)
        if victim == WORKERS:
            killed += demo.kill_workers()
        else:
            demo.kill()
            demo = start()
    demo.finish()
    assert killed > 0
    for failure in range(2):
        assert len(list(tmp_path.glob(f"failed-*-{failure}"))) > 1
    Outcome.of(tmp_path).assert_same(undisturbed)
