"""A running pipeline on Spark."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import orjson
import pytest

from millpond.executor.computation.computation import Computation
from millpond.executor.computation.context import Context
from millpond.executor.computation.records import Record
from millpond.executor.computation.timers import Timer
from millpond.executor.local.runner import LocalRunner
from millpond.executor.pipeline.pipeline import EnginePipeline
from millpond.executor.spark.run import SparkRun
from millpond.executor.spark.runner import SparkRunner
from millpond.executor.superstep.plan import InputPosition
from millpond.statestore.errors import FencedError, InvalidError
from millpond.statestore.leases.memory import MemoryLeases, MemoryRegistry
from millpond.statestore.leases.zookeeper_service import LeaseFactory
from millpond.statestore.store import Store
from millpond.statestore.system import SystemClock
from millpond.testing.processes.ledger import LEDGER, ROWS, ledger_of, ledger_pipeline, numbered, written
from millpond.testing.servers.zookeeper import wait_until
from tests.processes.failing_code import Fragile
from tests.processes.spark_task_failures import BATCHES
from tests.short_lived import SHORT_LIVED
from tests.tidy import ROOT

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark

CLOCK = SystemClock()
SCHEMA = "k string, t long, id string, n long, do string"


class Sleeper(Computation):
    def process_record(self, context: Context, record: Record) -> None:
        context.set_timer(context.wall_time + 200_000, domain="wall")

    def process_timer(self, context: Context, timer: Timer) -> None:
        context.state.set({"woken": context.state.get({"woken": 0})["woken"] + 1})
        context.produce("wakings", {"key": context.key})


class Count(Computation):
    def process_record(self, context: Context, record: Record) -> None:
        context.state.set(context.state.get(0) + 1)


def sleepers() -> EnginePipeline:
    pipeline = EnginePipeline("sleepers")
    pipeline.inject(ROWS, key="k", at="t")
    pipeline.add(Sleeper(), name="sleeper", subscribes={ROWS: None}, produces=("wakings",))
    pipeline.stream("wakings").apply(Count(), name="wakings_seen")
    return pipeline


@pytest.fixture
def leases() -> LeaseFactory:
    """One lease service for everyone who opens the store."""
    registry = MemoryRegistry()
    return lambda _, writer_id: MemoryLeases(registry, CLOCK, writer_id=writer_id)


@pytest.fixture
def store(tmp_path: Path, leases: LeaseFactory) -> Iterator[Store]:
    with Store.open(tmp_path / "pond", leases=leases) as opened:
        yield opened


@pytest.fixture
def runner(store: Store, spark: SparkSession) -> SparkRunner:
    return SparkRunner(store, spark=spark, intervals=1, progress=False, tick="50ms")


@pytest.fixture
def stream(spark: SparkSession, tmp_path: Path) -> DataFrame:
    """Stream the files of the folder ``input``."""
    (tmp_path / "input").mkdir()
    return spark.readStream.schema(SCHEMA).json(str(tmp_path / "input"))


def bring(folder: Path, *numbers: int, do: str = "ok") -> None:
    file = folder / f"{numbers}.json"
    file.write_bytes(b"\n".join(orjson.dumps({**row, "do": do}) for row in numbered(numbers)))
    file.rename(folder / "input" / file.name)


def batch(spark: SparkSession, number: int) -> tuple[DataFrame, InputPosition]:
    rows = [(*row.values(), "ok") for row in numbered([number * 5])]
    return (
        spark.createDataFrame(rows, SCHEMA).coalesce(1),
        InputPosition(stream=ROWS, source="test", batch=number),
    )


def test_injected_rows_leave_the_active_session(runner: SparkRunner, spark: SparkSession) -> None:
    spark.createDataFrame([], SCHEMA)
    pipeline = EnginePipeline("p")
    pipeline.inject("in", key="k", at="t", at_unit="us").apply(Count(), name="count")
    with runner.open(pipeline) as run:
        run.inject_durably("in", [{"k": "a", "t": 1}])

    assert spark.getActiveSession() is spark


def test_wall_timers_fire_on_an_idle_stream(
    runner: SparkRunner, store: Store, stream: DataFrame, tmp_path: Path
) -> None:
    """No batch arrives, so the ticker fires the timers and delivers their productions."""
    bring(tmp_path, 0, 1)
    run = runner.start(sleepers(), {ROWS: stream})

    def states(computation: str) -> list[str]:
        return store.rows_view(computation).to_arrow().column("state").to_pylist()

    assert wait_until(lambda: states("wakings_seen") == ["1", "1"], CLOCK, 60_000)
    assert states("sleeper") == ['{"woken":1}'] * 2
    assert not run.await_termination(timeout="10ms")
    assert run.is_active
    summary = run.stop()
    assert (summary.run.timers, summary.run.records) == (2, 4)
    assert not run.is_active


def test_user_error_with_on_error_stop_is_raised_to_every_caller(
    runner: SparkRunner, stream: DataFrame, tmp_path: Path
) -> None:
    pipeline = EnginePipeline(LEDGER)
    pipeline.inject(ROWS, key="k", at="t", id="id")
    pipeline.add(Fragile(), name=LEDGER, subscribes={ROWS: None}, produces=(LEDGER,), on_error="stop")
    bring(tmp_path, 5, do="raise")
    run = runner.start(pipeline, {ROWS: stream})

    with pytest.raises(InvalidError, match=r"on_error says to stop computation=`ledger` key=`k0`") as raised:
        run.await_termination("60s")
    with pytest.raises(InvalidError) as again:
        run.advance()
    assert again.value is raised.value
    assert not run.is_active
    run.abandon()


def test_await_termination_raises_fenced_error_after_a_takeover(
    runner: SparkRunner, store: Store, stream: DataFrame, tmp_path: Path, leases: LeaseFactory
) -> None:
    """Spark's description of the error would not help the caller."""
    bring(tmp_path, 0)
    run = runner.start(ledger_pipeline(), {ROWS: stream})
    assert wait_until(lambda: ledger_of(store) == {"k0": [0]}, CLOCK, 60_000)
    with Store.open(tmp_path / "pond", leases=leases) as other:
        with LocalRunner(other, progress=False).start(ledger_pipeline()) as successor:
            successor.inject(ROWS, numbered([5])).wait("60s")
            bring(tmp_path, 10)
            with pytest.raises(FencedError):
                run.await_termination("60s")
        run.abandon()
        assert ledger_of(other) == {"k0": [0, 5]}


def test_first_failure_is_raised_by_every_later_call(
    runner: SparkRunner, store: Store, spark: SparkSession
) -> None:
    run = runner.open(ledger_pipeline())
    run.consume(*batch(spark, 0))

    with pytest.raises(InvalidError, match="ahead of the store"):
        run.consume(*batch(spark, 2))
    with pytest.raises(InvalidError, match="ahead of the store"):
        run.consume(*batch(spark, 1))
    with pytest.raises(InvalidError, match="ahead of the store"):
        run.finish_inputs()
    run.abandon()
    assert ledger_of(store) == {"k0": [0]}


def test_stopped_run_refuses_batches_and_releases_leases(
    runner: SparkRunner, store: Store, spark: SparkSession
) -> None:
    run: SparkRun = runner.open(ledger_pipeline())
    run.consume(*batch(spark, 0))
    assert run.stop().superstep == run.stop().superstep == 1

    with pytest.raises(InvalidError, match="the run has been stopped"):
        run.consume(*batch(spark, 1))
    again = SparkRunner(store, spark=spark, on_held="refuse", progress=False).open(ledger_pipeline())
    again.consume(*batch(spark, 1))
    summary = again.stop()
    assert (summary.supersteps, summary.superstep) == (1, 2)
    assert (summary.run.injected, summary.totals.injected) == (1, 2)


@pytest.mark.slow
@pytest.mark.fault
def test_records_count_once_after_a_failed_task_and_a_killed_worker(
    tmp_path: Path, leases: LeaseFactory
) -> None:
    """Both happen in the middle of a bundle."""
    marks = tmp_path / "marks"
    marks.mkdir()
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "tests.processes.spark_task_failures",
            str(tmp_path / "pond"),
            str(marks),
        ],
        cwd=ROOT,
        env=os.environ | SHORT_LIVED,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    rows = numbered(number for numbers in BATCHES for number in numbers)

    assert done.returncode == 0, done.stderr[-4_000:]
    assert orjson.loads(done.stdout.splitlines()[-1]) == written(rows)
    assert sorted(file.name for file in marks.iterdir()) == ["died", "failed"]
    with Store.open(tmp_path / "pond", leases=leases) as store:
        assert ledger_of(store) == written(rows)
