"""The call that the page about clusters shows, on Spark and an S3 server: a driver that is killed, and one that follows."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import pytest

from millpond.statestore.objects.obstore import ObstoreObjects
from millpond.statestore.store import Store
from millpond.statestore.system import SystemClock
from millpond.testing.faults.report import FaultReport
from millpond.testing.servers.s3_server import S3Server
from millpond.testing.servers.zookeeper import wait_until
from tests.processes.spark_on_s3 import options_for
from tests.processes.tree import descendants_of
from tests.short_lived import SHORT_LIVED
from tests.tidy import ROOT

pytestmark = [pytest.mark.fault, pytest.mark.spark, pytest.mark.slow]

CLOCK: Final = SystemClock()
PATIENCE_MS: Final = 300_000
USERS: Final = 3
VIEWS: Final = 30
"""Of a file, the same number of each user."""


class Bucket:
    """The bucket, with the files of input in it and the records in the store."""

    def __init__(self, url: str, server: S3Server, hosts: str) -> None:
        self.url, self.address, self.hosts = url, server.address, hosts
        self.options = options_for(server.address)
        self._objects = ObstoreObjects(url, self.options)

    def put_views(self, file: int) -> None:
        views = (
            {
                "id": f"{file}-{n}",
                "user": f"u{n % USERS}",
                "page": "home",
                "time": f"2026-01-01T00:00:{file:02}Z",
            }
            for n in range(VIEWS)
        )
        self._objects.put(f"views/{file}.json", "\n".join(map(json.dumps, views)).encode())

    def has(self, views: int) -> bool:
        if not self._commits():
            return False
        with Store.open(
            f"{self.url}/pond", self.hosts, storage_options=self.options, read_only=True
        ) as store:
            states = store.rows_view("counts").to_arrow().column("state").to_pylist()
        return sum(map(int, states)) == views

    def has_compacted(self) -> bool:
        return any(b'"kind":"compaction"' in self._objects.get(path) for path in self._commits())

    def _commits(self) -> list[str]:
        return [path for path in self._objects.list("pond/rows/_delta_log") if path.endswith(".json")]


class Driver:
    """A driver of Spark as a process."""

    def __init__(self, bucket: Bucket, log: Path) -> None:
        self._log = log
        command = [
            sys.executable,
            "-m",
            "tests.processes.spark_on_s3",
            bucket.url,
            bucket.address,
            bucket.hosts,
        ]
        with log.open("ab") as file:
            self._process = subprocess.Popen(
                command,
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
                env=os.environ | SHORT_LIVED,
            )
        assert self._line() == "started", self._tail()

    def wait(self, condition: Callable[[], bool]) -> None:
        is_over = wait_until(lambda: self._process.poll() is not None or condition(), CLOCK, PATIENCE_MS)
        assert is_over, self._tail()
        assert self._process.poll() is None, self._tail()

    def answers(self) -> dict[str, Any]:
        """Stop the pipeline, and return what the driver read of its store."""
        assert self._process.stdin is not None
        self._process.stdin.write("stop\n")
        self._process.stdin.flush()
        line = self._line()
        assert line, self._tail()
        answers: dict[str, Any] = json.loads(line)
        return answers

    def kill(self) -> None:
        """Send ``kill -9`` to the driver, and to the JVM and the workers that it leaves."""
        left = [self._process.pid, *descendants_of(self._process.pid)]
        for process in left:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        self._process.communicate()

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def _tail(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")[-4_000:]


@pytest.fixture
def drivers() -> Iterator[list[Driver]]:
    started: list[Driver] = []
    yield started
    for driver in started:
        driver.kill()


@pytest.mark.timeout(900)
def test_killed_driver_on_s3_is_continued_from_its_checkpoint_exactly(
    tmp_path: Path,
    s3_bucket: str,
    s3_server: S3Server,
    zookeeper_hosts: str,
    drivers: list[Driver],
    fault_report: FaultReport,
) -> None:
    """Spark reads input, checkpoints, the store and its sink through S3A; no process shows the secret."""
    bucket, files = Bucket(s3_bucket, s3_server, zookeeper_hosts), 4
    bucket.put_views(0)
    drivers.append(Driver(bucket, tmp_path / "log"))
    for file in range(1, files):
        drivers[-1].wait(lambda done=file * VIEWS: bucket.has(done))
        bucket.put_views(file)
    drivers[-1].wait(bucket.has_compacted)
    drivers[-1].kill()
    fault_report.fault("R19", kills=1)
    bucket.put_views(files)
    drivers.append(Driver(bucket, tmp_path / "log"))
    views = (files + 1) * VIEWS
    drivers[-1].wait(lambda: bucket.has(views))
    answers = drivers[-1].answers()

    each = {f"u{user}": str(views // USERS) for user in range(USERS)}
    assert answers["by_millpond"] == answers["by_spark"] == answers["embedded"] == each
    assert answers["sink"] == sorted([*range(1, views // USERS + 1)] * USERS)
    assert answers["shown"] == []
    fault_report.count(records_checked=views)
