"""Supersteps that the driver brings to the homes of slots by itself."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
import pytest

from millpond.executor.computation.computation import Computation
from millpond.executor.computation.context import Context
from millpond.executor.computation.records import Record
from millpond.executor.pipeline.pipeline import EnginePipeline
from millpond.executor.spark import direct
from millpond.executor.spark.engine import SparkEngine
from millpond.executor.spark.run import SparkRun
from millpond.executor.spark.runner import SparkRunner
from millpond.executor.superstep.plan import InputPosition
from millpond.executor.superstep.report import SuperstepReport
from millpond.statestore.store import Store
from millpond.statestore.system import SystemClock
from millpond.testing.servers.zookeeper import wait_until

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

CLOCK = SystemClock()
KEYS = 12
SCHEMA = "key string, at timestamp, do string"


class Count(Computation):
    """Counts, keeps the time of the last record as it came, and does what a record demands."""

    def __init__(self, marks: str) -> None:
        self.marks = marks

    def process_record(self, context: Context, record: Record) -> None:
        state = context.state.get({"count": 0})
        mark = Path(self.marks, context.key)
        if record.value["do"] == "end the process" and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if record.value["do"] == "wait a while":
            CLOCK.sleep_ms(2_000)
        if record.value["do"] == "wait":
            mark.touch()
            while not Path(self.marks, "go on").exists():
                CLOCK.sleep_ms(50)
        context.state.set({"count": state["count"] + 1, "at": str(record.value["at"])})
        context.produce("counted", {"key": context.key})


class Second(Computation):
    def process_record(self, context: Context, record: Record) -> None:
        context.state.set(context.state.get(0) + 1)


def counts(marks: Path, **options: Any) -> EnginePipeline:
    pipeline = EnginePipeline("counts")
    records = pipeline.inject("records", key="key", at="at")
    records.apply(Count(str(marks)), name="count", produces="counted", **options).apply(
        Second(), name="second", key="key"
    )
    return pipeline


@pytest.fixture
def by_spark(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the supersteps that Spark's tasks run, as a list that grows."""
    supersteps: list[int] = []
    run_by_spark = SparkEngine._run_by_spark

    def noted(engine: SparkEngine, plan: Any, *others: Any) -> Any:
        supersteps.append(int(plan.superstep))
        return run_by_spark(engine, plan, *others)

    monkeypatch.setattr(SparkEngine, "_run_by_spark", noted)
    return supersteps


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "pond") as opened:
        yield opened


@pytest.fixture
def run(store: Store, spark: SparkSession, tmp_path: Path) -> Iterator[SparkRun]:
    """Run the pipeline in a session of another time zone, whose times tasks get."""
    zone = spark.conf.get("spark.sql.session.timeZone")
    spark.conf.set("spark.sql.session.timeZone", "Pacific/Auckland")
    runner = SparkRunner(store, spark=spark, progress=False, intervals=4, upkeep=None)
    with runner.open(counts(tmp_path)) as opened:
        yield opened
    spark.conf.set("spark.sql.session.timeZone", str(zone))


def consume(
    run: SparkRun, spark: SparkSession, batch: int, rows: int = KEYS, do: str = "count"
) -> SuperstepReport | None:
    frame = spark.range(rows).selectExpr(
        f"concat('k', id % {KEYS}) AS key",
        f"timestamp_micros({batch} * 1000000) AS at",
        f"if(id = 0, '{do}', 'count') AS do",
    )
    return run.consume(frame, InputPosition(stream="records", source="test", batch=batch))


def states(store: Store, computation: str = "count") -> dict[str, Any]:
    rows = store.rows_view(computation).to_arrow().select(["key", "state"]).to_pylist()
    return {row["key"]: orjson.loads(row["state"]) for row in rows}


def test_only_the_first_superstep_needs_tasks_of_spark(
    run: SparkRun, spark: SparkSession, store: Store, by_spark: list[int]
) -> None:
    """The others go to the homes of their slots, with the same values, and without input start no job at all."""
    reports = [consume(run, spark, 0)]
    first = states(store)
    reports += [consume(run, spark, batch) for batch in range(1, 4)]
    spark.sparkContext.setJobGroup("advance", "deliver the rest")
    reports.append(run.advance())

    assert len(by_spark) == 1
    assert list(spark.sparkContext.statusTracker().getJobIdsForGroup("advance")) == []
    assert [report is not None and report.slots_at_home == report.slots > 0 for report in reports] == [
        True
    ] * 5
    assert states(store) == {
        f"k{number}": {"count": 4, "at": first[f"k{number}"]["at"].replace(":00+", ":03+")}
        for number in range(KEYS)
    }
    assert states(store, "second") == {f"k{number}": 4 for number in range(KEYS)}


def test_batch_of_more_rows_than_were_likely_goes_to_spark(
    run: SparkRun, spark: SparkSession, store: Store, by_spark: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct, "ROWS_MAX", 64)
    for batch, rows in enumerate([48, 48, 96, 48, 48]):
        consume(run, spark, batch, rows)

    # The third is found to be too large, and the fourth comes after a large one.
    assert by_spark == [1, 3, 4]
    assert {state["count"] for state in states(store).values()} == {24}


def test_superstep_of_a_process_that_ends_is_run_again_by_spark(
    run: SparkRun, spark: SparkSession, store: Store, by_spark: list[int]
) -> None:
    consume(run, spark, 0)
    consume(run, spark, 1, do="end the process")
    consume(run, spark, 2)

    assert by_spark[:2] == [1, 2]
    assert {state["count"] for state in states(store).values()} == {3}


def test_code_with_a_time_limit_runs_in_tasks(
    store: Store, spark: SparkSession, tmp_path: Path, by_spark: list[int]
) -> None:
    """Only there can a call that blocks be interrupted, because tasks run in the main thread."""
    runner = SparkRunner(store, spark=spark, progress=False, intervals=4, upkeep=None)
    with runner.open(counts(tmp_path, user_code_timeout="1m")) as run:
        for batch in range(2):
            consume(run, spark, batch)

    assert by_spark == [1, 2]


def test_workers_are_kept_while_spark_sees_them_idle(
    run: SparkRun, spark: SparkSession, by_spark: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spark would end them after a minute, in the middle of a superstep or between two."""
    kept: list[str] = []
    settle = direct.DirectRuns._settle
    monkeypatch.setattr(direct.DirectRuns, "_settle", lambda *given: [settle(*given), kept.append("again")])
    consume(run, spark, 0)
    consume(run, spark, 1)
    kept.clear()
    monkeypatch.setattr(direct, "_IDLE_US", 1_000_000)
    consume(run, spark, 2, do="wait a while")
    assert kept

    kept.clear()
    CLOCK.sleep_ms(1_100)
    consume(run, spark, 3)
    assert kept == ["again"]
    assert by_spark == [1]


def test_stopped_query_waits_for_no_superstep(
    store: Store, spark: SparkSession, tmp_path: Path, by_spark: list[int]
) -> None:
    """As where Spark cancels the tasks. The next start brings the batch again."""
    folder = tmp_path / "input"
    folder.mkdir()
    stream = spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1).json(str(folder))
    runner = SparkRunner(store, spark=spark, progress=False, intervals=1, upkeep=None)
    for batch, do in enumerate(("count", "count", "wait")):
        row = orjson.dumps({"key": "k0", "at": f"2026-01-01T00:00:0{batch}Z", "do": do})
        (folder / f"{batch}.json").write_bytes(row)
        os.utime(folder / f"{batch}.json", (1e9 + batch, 1e9 + batch))

    run = runner.start(counts(tmp_path), {"records": stream})
    assert wait_until((tmp_path / "k0").exists, CLOCK)
    run.stop()
    assert len(by_spark) == 1
    assert states(store)["k0"]["count"] == 2

    (tmp_path / "go on").touch()
    again = runner.start(counts(tmp_path), {"records": stream}, trigger={"availableNow": True})
    again.await_termination()
    again.stop()
    assert states(store)["k0"]["count"] == 3


def test_spark_measures_no_batches_of_records_that_were_small_last_time(
    store: Store, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would add up the sizes of all columns after each row. The settings of the user's session stay."""

    def limit_in(session: Any) -> int:
        return int(session._jsparkSession.sessionState().conf().arrowMaxBytesPerBatch())

    limits: list[int] = []
    collect = SparkEngine._collect

    def noted(engine: SparkEngine, frame: Any, plan: Any) -> Any:
        limits.append(limit_in(frame.sparkSession))
        return collect(engine, frame, plan)

    monkeypatch.setattr(SparkEngine, "_collect", noted)
    monkeypatch.setattr(direct, "ROWS_MAX", 0)
    folder, default = tmp_path / "input", limit_in(spark)
    folder.mkdir()
    for batch, size in enumerate((10, 10, 5_000, 10)):
        row = orjson.dumps({"key": "k0", "at": f"2026-01-01T00:00:0{batch}Z", "do": "x" * size})
        (folder / f"{batch}.json").write_bytes(row)
        os.utime(folder / f"{batch}.json", (1e9 + batch, 1e9 + batch))
    stream = spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1).json(str(folder))
    runner = SparkRunner(store, spark=spark, progress=False, intervals=1, upkeep=None)
    run = runner.start(counts(tmp_path), {"records": stream}, trigger={"availableNow": True})
    run.await_termination()
    run.stop()

    unmeasured = 2**31 - 1
    # The first batch has none before it, and the fourth comes after large records.
    assert limits[:4] == [default, unmeasured, unmeasured, default]
    assert limit_in(spark) == default == 64 << 20
    assert states(store)["k0"]["count"] == 4
