"""Compactions as Spark jobs."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from millpond.executor.local.runner import LocalRunner
from millpond.executor.maintenance import upkeep
from millpond.executor.maintenance.policy import UpkeepPolicy
from millpond.executor.spark.compactions import SparkCompactions
from millpond.executor.spark.runner import SparkRunner
from millpond.executor.spark.session import is_one_machine
from millpond.executor.superstep.plan import InputPosition
from millpond.gc.compaction import Compacted, CompactionPolicy
from millpond.statestore.errors import DataError, InvalidError, UnavailableError
from millpond.statestore.leases.memory import MemoryLeases, MemoryRegistry
from millpond.statestore.log.commit_file import decode
from millpond.statestore.objects.obstore import open_objects
from millpond.statestore.rows.files import read_row_files
from millpond.statestore.store import Store
from millpond.statestore.system import SystemClock
from millpond.testing.processes.ledger import ROWS, ledger_of, ledger_pipeline, numbered, written
from millpond.testing.servers.zookeeper import wait_until

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

CLOCK = SystemClock()
COMPACTIONS = CompactionPolicy(fan_in=2, files_max=3)
SUPERSTEPS = 6


def open_store(path: Path) -> Store:
    registry = MemoryRegistry()
    return Store.open(path, leases=lambda _, writer_id: MemoryLeases(registry, CLOCK, writer_id=writer_id))


class Played:
    """Six supersteps of a record each, with time for compactions after each."""

    def __init__(self, store: Store, spark: SparkSession, policy: UpkeepPolicy) -> None:
        run = SparkRunner(store, spark=spark, intervals=1, progress=False, upkeep=policy).open(
            ledger_pipeline()
        )
        schedule = run._coordinator.upkeep._compactions

        def is_idle() -> bool:
            run._coordinator.maintain()
            return schedule.is_idle and not schedule.busy

        rows = numbered(range(0, SUPERSTEPS * 5, 5))
        for number, row in enumerate(rows):
            frame = spark.createDataFrame([tuple(row.values())], list(row)).coalesce(1)
            run.consume(frame, InputPosition(stream=ROWS, source="test", batch=number))
            assert wait_until(is_idle, CLOCK, 60_000)
        run.stop()
        assert ledger_of(store) == written(rows)
        counts = Counter(file.interval_id for file in store.committer.snapshot.files)
        self.files_of_an_interval = max(counts.values())
        versions = store.log.inventory().versions
        actions = [action for version in versions for action in decode(store.log.require(version))]
        infos = [info for action in actions if (info := getattr(action, "millpond", None)) is not None]
        self.compactions = sum(info["kind"] == "compaction" for info in infos)


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the pools of jobs; the first job's answer is lost after its file was written."""
    # However short the run is: six supersteps take less time than a run waits for its first compaction.
    monkeypatch.setattr(upkeep, "_HELPERS_AFTER_US", 0)
    fates: list[str] = []
    really = SparkCompactions._run

    def run(self: SparkCompactions, work: Callable[[], Compacted]) -> Compacted:
        compacted = really(self, work)
        fates.append(self._tag.rpartition("-")[0])
        if len(fates) == 1:
            raise UnavailableError("the executor was lost")
        return compacted

    monkeypatch.setattr(SparkCompactions, "_run", run)
    return fates


@pytest.mark.parametrize(
    ("memory_bytes_max", "name"), [(1 << 20, "millpond-compactions"), (0, "millpond-large-compactions")]
)
def test_spark_jobs_compact_and_a_lost_job_leaves_only_an_orphan(
    tmp_path: Path, spark: SparkSession, jobs: list[str], memory_bytes_max: int, name: str
) -> None:
    with open_store(tmp_path / "pond") as store:
        compactions = replace(COMPACTIONS, memory_bytes_max=memory_bytes_max)
        played = Played(store, spark, UpkeepPolicy(compaction=compactions, place="spark"))

        live = {file.path for file in store.committer.snapshot.files}
    assert set(jobs) == {name}
    assert 2 <= played.compactions < len(jobs)
    assert played.files_of_an_interval <= 3
    on_disk = {path.relative_to(tmp_path / "pond" / "rows") for path in tmp_path.rglob("*.parquet")}
    assert live < {str(path) for path in on_disk if "_delta_log" not in path.parts}


@pytest.fixture
def spark_compactions(spark: SparkSession) -> Iterator[SparkCompactions]:
    compactions = SparkCompactions(spark.sparkContext, tag="millpond-test", at_once=2)
    yield compactions
    compactions.shutdown()


def test_work_runs_in_a_worker_and_errors_keep_their_class(
    spark_compactions: SparkCompactions, tmp_path: Path
) -> None:
    objects = open_objects(str(tmp_path))

    assert spark_compactions.submit(os.getpid).result() != os.getpid()
    with pytest.raises(DataError, match="missing"):
        spark_compactions.submit(read_row_files, objects, ["gone"]).result()


def test_work_after_a_dead_worker_finds_another_one(spark_compactions: SparkCompactions) -> None:
    with pytest.raises(UnavailableError, match="Spark job"):
        spark_compactions.submit(os._exit, 3).result()
    assert spark_compactions.submit(abs, -3).result() == 3


def test_shutdown_cancels_endless_compactions(spark: SparkSession) -> None:
    """Other jobs must continue."""
    compactions = SparkCompactions(spark.sparkContext, tag="millpond-test-end", at_once=1)
    tracker = spark.sparkContext.statusTracker()
    running = compactions.submit(signal.sigwait, [signal.SIGUSR2])
    waiting = compactions.submit(os.getpid)
    assert wait_until(lambda: bool(tracker.getActiveJobsIds()), CLOCK, 60_000)
    compactions.shutdown()

    assert waiting.cancelled()
    with pytest.raises(UnavailableError, match="Spark job"):
        running.result()
    assert spark.range(3).count() == 3


def test_place_of_compactions_is_checked(tmp_path: Path) -> None:
    """On one machine a job would occupy a superstep's slot."""
    assert not is_one_machine("spark://host:7077")
    assert is_one_machine("local[*]")
    with pytest.raises(InvalidError, match="no Spark in the local runner"):
        LocalRunner(tmp_path, upkeep=UpkeepPolicy(place="spark"))
    with pytest.raises(InvalidError, match="auto, spark, process or thread"):
        UpkeepPolicy(place="elsewhere")


def test_short_runs_compact_at_their_close(tmp_path: Path, spark: SparkSession) -> None:
    """Each is over before a helper process has started."""
    policy = UpkeepPolicy(compaction=COMPACTIONS, place="process")
    rows = numbered(range(0, SUPERSTEPS * 5, 5))
    with open_store(tmp_path / "pond") as store:
        for number, row in enumerate(rows):
            run = SparkRunner(store, spark=spark, intervals=1, progress=False, upkeep=policy).open(
                ledger_pipeline()
            )
            frame = spark.createDataFrame([tuple(row.values())], list(row)).coalesce(1)
            run.consume(frame, InputPosition(stream=ROWS, source="test", batch=number))
            run.stop()
            assert max(Counter(file.interval_id for file in store.snapshot().files).values()) <= 3
        assert ledger_of(store) == written(rows)
