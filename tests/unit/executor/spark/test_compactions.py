"""Compactions as Spark jobs: what they do, where, and what is lost when they fail, which is nothing."""

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
    """Six supersteps of a record each, with a moment after each for what is being compacted."""

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
    """The pools of the jobs that ran; the answer of the first is lost although its file is written."""
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
def test_a_pipeline_is_compacted_by_spark_jobs(
    tmp_path: Path, spark: SparkSession, jobs: list[str], memory_bytes_max: int, name: str
) -> None:
    """Each record counts once, an interval has few files, and a job that was lost leaves an orphan only."""
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


def test_work_is_done_in_a_worker(spark_compactions: SparkCompactions, tmp_path: Path) -> None:
    """A piece of work runs in another process, and its errors come back as they are."""
    objects = open_objects(str(tmp_path))

    assert spark_compactions.submit(os.getpid).result() != os.getpid()
    with pytest.raises(DataError, match="missing"):
        spark_compactions.submit(read_row_files, objects, ["gone"]).result()


def test_a_job_that_fails_can_be_submitted_again(spark_compactions: SparkCompactions) -> None:
    """A worker that dies fails the piece, and the next one finds another worker."""
    with pytest.raises(UnavailableError, match="Spark job"):
        spark_compactions.submit(os._exit, 3).result()
    assert spark_compactions.submit(abs, -3).result() == 3


def test_the_end_of_a_run_cancels_what_is_under_way(spark: SparkSession) -> None:
    """A run does not wait for a compaction that would never end; other jobs continue."""
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


def test_where_compactions_are_prepared(tmp_path: Path) -> None:
    """On one machine a job would take a superstep's slot; the runner without Spark refuses it."""
    assert not is_one_machine("spark://host:7077")
    assert is_one_machine("local[*]")
    with pytest.raises(InvalidError, match="no Spark in the local runner"):
        LocalRunner(tmp_path, upkeep=UpkeepPolicy(place="spark"))
    with pytest.raises(InvalidError, match="auto, spark, process or thread"):
        UpkeepPolicy(place="elsewhere")
