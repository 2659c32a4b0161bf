"""A rewind of a store fed by Spark, killed between any two of its changes of files."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import orjson
import pytest
from deltalake import DeltaTable

from millpond.executor.sinks.sink import DeltaSink
from millpond.executor.spark.foreach_batch import foreach_batch
from millpond.statestore.app_ids import AppId
from millpond.statestore.history.verification import verify_store
from millpond.statestore.store import Store
from millpond.statestore.system import SystemClock
from millpond.testing.processes.ledger import LEDGER, START_US, Ledger, ledger_of, numbered, written
from tests.fault.killed_command import KILLED
from tests.short_lived import SHORT_LIVED
from tests.tidy import ROOT

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.fault, pytest.mark.spark, pytest.mark.zookeeper, pytest.mark.slow]

SCHEMA = "k string, t long, id string, n long"
FILES = [range(first, first + 3) for first in range(0, 15, 3)]
BACK_TO = 1
NEVER = 10**9
PATIENCE = 60
LOCKED = "another process is repairing the store"
COUNTED = (AppId.TOTAL, AppId.COUNT, AppId.INPUT_ROWS)


class Job:
    """A query over a folder with a file per batch, its store, its sink, and the command that rewinds."""

    def __init__(self, spark: SparkSession, folder: Path, hosts: str) -> None:
        self._spark, self._hosts = spark, hosts
        self.folder, self.pond, self.sink = folder, folder / "pond", folder / "sink"
        self._input = folder / "input"
        self._input.mkdir()
        for number, numbers in enumerate(FILES):
            file = self._input / f"{number:04d}.json"
            file.write_bytes(b"\n".join(orjson.dumps(row) for row in numbered(numbers)))
            os.utime(file, (START_US / 1e6 + number, START_US / 1e6 + number))

    def query(self) -> None:
        """Consume all files from the query's position."""
        with Store.open(self.pond, zookeeper=self._hosts) as store:
            function = foreach_batch(
                store,
                Ledger(),
                key="k",
                at="t",
                name=LEDGER,
                sink=DeltaSink(str(self.sink)),
                spark=self._spark,
                intervals=1,
                progress=False,
            )
            frame = self._spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1)
            writer = frame.json(str(self._input)).writeStream.foreachBatch(function)
            writer = writer.option("checkpointLocation", str(self.pond / "checkpoints" / "in"))
            try:
                writer.trigger(availableNow=True).start().awaitTermination()
            finally:
                function.close()

    def rewind(self, version: int, killed_at: int = NEVER) -> int | None:
        """Rewind; return the number of changes, or ``None`` if the command was killed."""
        command = [sys.executable, "-m", "tests.fault.killed_command"]
        command += [str(self.folder), str(killed_at), "rewind", str(self.pond), "--zookeeper", self._hosts]
        command += ["--version", str(version), "--take-back", str(self.sink), "--yes"]
        for _ in range(PATIENCE):
            done = subprocess.run(
                command, cwd=ROOT, env=os.environ | SHORT_LIVED, capture_output=True, text=True, check=False
            )
            if LOCKED not in done.stderr:
                break
            # The killed command holds the lease until its session ends.
            SystemClock().sleep_ms(1_000)
        if done.returncode == KILLED:
            return None
        assert done.returncode == 0, done.stderr
        return int(done.stdout.split()[-1])

    def version_after(self, batch: int) -> int:
        with Store.open(self.pond, read_only=True) as store:
            return next(
                version
                for version in range(store.snapshot().version + 1)
                if batch in positions(store.snapshot(version).txns, AppId.INPUT)
            )

    def counts(self) -> dict[str, int]:
        """Return the counts without batches: Spark joins batches whose files it had listed before."""
        with Store.open(self.pond, read_only=True) as store:
            txns = store.snapshot().txns
        return {app_id: at for app_id, at in txns.items() if app_id.startswith(COUNTED)}

    def check(self, files: Sequence[range]) -> None:
        """Check that each record of these files counts once, and no other does."""
        numbers = [number for part in files for number in part]
        with Store.open(self.pond, read_only=True) as store:
            assert ledger_of(store) == written(numbered(numbers))
            assert not verify_store(store.objects).findings

    def delivered(self) -> list[int]:
        values = DeltaTable(self.sink).to_pyarrow_table().column("value").to_pylist()
        return sorted(orjson.loads(value)["n"] for value in values)


def positions(txns: dict[str, int], prefix: str) -> list[int]:
    return [at for app_id, at in txns.items() if app_id.startswith(prefix)]


def check_kills(job: Job, chosen: Callable[[int], Sequence[int]]) -> None:
    """Check that a query continues correctly after a killed rewind of its store.

    ``chosen`` maps the number of a rewind's changes to the changes before which it is killed.
    """
    job.query()
    version, counts, everything = (
        job.version_after(BACK_TO),
        job.counts(),
        sorted(n for f in FILES for n in f),
    )
    job.check(FILES)
    assert job.delivered() == everything
    job.rewind(version)
    job.query()
    # The number is constant from now on: rewound files return as one batch.
    changes = job.rewind(version)
    assert changes is not None
    kills = 0
    for killed_at in chosen(changes):
        job.query()
        job.check(FILES)
        assert job.delivered() == everything
        assert job.counts() == counts
        kills += job.rewind(version, killed_at) is None
        assert job.rewind(version) is not None
        job.check(FILES[: BACK_TO + 1])
    job.query()
    job.check(FILES)
    assert job.delivered() == everything
    assert job.counts() == counts
    assert kills > len(chosen(changes)) * 3 // 4


@pytest.fixture
def job(spark: SparkSession, tmp_path: Path, zookeeper_hosts: str) -> Job:
    return Job(spark, tmp_path, zookeeper_hosts)


@pytest.mark.timeout(900)
@pytest.mark.spark_all
def test_query_continues_after_a_killed_rewind(job: Job) -> None:
    """Rows, counts and sink have each record once."""
    check_kills(job, lambda changes: [changes // 3, changes * 2 // 3])


@pytest.mark.spark_all
@pytest.mark.timeout(3_600)
def test_query_continues_after_a_rewind_killed_anywhere(job: Job) -> None:
    check_kills(job, range)
