"""A nightly job over a growing folder: three days give the result of one run over all of them."""

from __future__ import annotations

import json
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest
from deltalake import DeltaTable

import millpond as mp
from millpond.statestore.leases.memory import MemoryLeases, MemoryRegistry
from millpond.statestore.system import SystemClock
from millpond.statestore.types import TIME_MAX_US

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.slow

SECOND: Final = 1_000_000
HOUR: Final = 3_600 * SECOND
DAY: Final = 24 * HOUR
START: Final = 20_000 * DAY
A_DAY: Final = 13_120
KEYS: Final = ("a", "b", "c")
DISORDER: Final = 90 * 60 * SECOND
SCHEMA: Final = "k string, t long, id string"

Rows = list[dict[str, Any]]
Day = Callable[[Sequence[Path]], mp.RunSummary]


class Alarm(mp.Computation):
    """Produces a record for each hour in which a key was seen."""

    def process_record(self, context: mp.Context, record: mp.Record) -> None:
        end = record.at // HOUR * HOUR + HOUR
        context.set_timer(end, tag=str(end))

    def process_timer(self, context: mp.Context, timer: mp.Timer) -> None:
        context.produce("alarms", {"key": context.key, "hour": timer.at})


class Kept(mp.Computation):
    """Keeps the panes of each window, which must not be late."""

    def process_record(self, context: mp.Context, record: mp.Record) -> None:
        assert not record.late
        context.state.set([*context.state.get([]), record.value["value"]])


def pipeline(folder: Path) -> mp.Pipeline:
    """Counts by hour, kept by a second stage, and an alarm for each key and hour."""
    made = mp.Pipeline("daily")
    events = made.inject("events", key="k", at="t", id="id", watermark=mp.BoundedDisorder(f"{DISORDER}us"))
    counts = events.window(mp.FixedWindows("1h")).combine(mp.Count(), name="counts")
    counts.apply(Kept(), name="kept")
    counts.sink("counts", mp.DeltaSink(str(folder / "counts")))
    alarms = events.apply(Alarm(), name="alarm", produces="alarms")
    alarms.sink("alarms", mp.DeltaSink(str(folder / "alarms")))
    return made


def day(number: int, count: int = A_DAY, keys: Sequence[str] = KEYS) -> Rows:
    rows = [
        {"k": keys[n % len(keys)], "t": START + number * DAY + n * DAY // count, "id": f"{number}-{n}"}
        for n in range(count)
    ]
    return sorted(rows, key=lambda row: row["t"] + int(row["id"].partition("-")[2]) * 7_919 % 600 * SECOND)


def write(folder: Path, number: int, rows: Rows) -> Path:
    folder.mkdir(exist_ok=True)
    file = folder / f"day-{number}.json"
    hidden = folder.parent / f"{file.name}.part"
    hidden.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return hidden.rename(file)


def rows_of(files: Sequence[Path]) -> Rows:
    """Return the rows in the files."""
    return [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]


def due(rows: Rows, *, at_the_end: bool = False) -> dict[tuple[str, int], int]:
    """Return the number of records per key and completed hour."""
    mark = TIME_MAX_US if at_the_end else max(row["t"] for row in rows) - DISORDER
    counts = Counter((row["k"], row["t"] // HOUR * HOUR + HOUR) for row in rows)
    return {hour: count for hour, count in counts.items() if hour[1] <= mark}


def rows_in(table: Path) -> list[tuple[str, Any]]:
    """Return key and value of each row in a sink, none before its first row."""
    if not table.exists():
        return []
    rows = DeltaTable(table).to_pyarrow_table().to_pylist()
    return [(row["key"], json.loads(row["value"])) for row in rows]


def shown(folder: Path) -> tuple[dict[tuple[str, int], int], list[tuple[str, int]]]:
    """Return the rows of both tables: counts by key and end of the hour, and alarms in order."""
    panes = rows_in(folder / "counts")
    counts = {(key, pane["window"][1]): pane["value"] for key, pane in panes}
    assert len(counts) == len(panes), "an hour was shown twice"
    return counts, sorted((key, alarm["hour"]) for key, alarm in rows_in(folder / "alarms"))


def kept(store: mp.Store) -> dict[str, list[int]]:
    rows = store.rows_view("kept").to_arrow().to_pylist()
    return {row["key"]: sorted(json.loads(row["state"])) for row in rows}


class Job:
    """A job in its folder, run once a day."""

    def __init__(self, folder: Path, spark: SparkSession | None = None) -> None:
        folder.mkdir()
        registry = MemoryRegistry()
        self.folder = folder
        self.input = folder / "input"
        self._spark = spark
        self.store = mp.Store.open(
            folder / "pond",
            leases=lambda _, writer_id: MemoryLeases(registry, SystemClock(), writer_id=writer_id),
        )

    @property
    def runner(self) -> mp.LocalRunner | mp.SparkRunner:
        """A runner on the store, as a new process makes it."""
        if self._spark is None:
            return mp.LocalRunner(self.store, intervals=2, progress=False)
        return mp.SparkRunner(self.store, spark=self._spark, intervals=2, progress=False)

    def frame(self) -> DataFrame:
        assert self._spark is not None
        return self._spark.readStream.schema(SCHEMA).json(str(self.input))

    def run(self, *, finish: bool) -> mp.RunSummary:
        if isinstance(runner := self.runner, mp.SparkRunner):
            return runner.run(pipeline(self.folder), {"events": self.frame()}, finish=finish)
        files = sorted(self.input.iterdir())
        return runner.run(pipeline(self.folder), {"events": rows_of(files)}, finish=finish)

    def run_available_now(self) -> mp.RunSummary:
        """One night, started, waited for and stopped."""
        runner = self.runner
        assert isinstance(runner, mp.SparkRunner)
        run = runner.start(pipeline(self.folder), {"events": self.frame()}, trigger={"availableNow": True})
        assert run.await_termination()
        assert not run.has_work()
        return run.stop()


@pytest.fixture(params=["local", pytest.param("spark", marks=pytest.mark.spark)])
def job(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[str], Job]]:
    """Makes jobs of a runner, by the name of their folder."""
    spark = request.getfixturevalue("spark") if request.param == "spark" else None
    made: list[Job] = []

    def make(name: str) -> Job:
        made.append(Job(tmp_path / name, spark))
        return made[-1]

    yield make
    for one in made:
        one.store.close()


def assert_all_due_is_done(job: Job, rows: Rows, *, at_the_end: bool = False) -> None:
    """Assert that the tables hold each completed hour once, and nothing else."""
    expected = due(rows, at_the_end=at_the_end)
    counts, alarms = shown(job.folder)
    assert counts == expected
    assert alarms == sorted(expected)
    values: dict[str, list[int]] = {}
    for (key, _), count in expected.items():
        values.setdefault(key, []).append(count)
    assert kept(job.store) == {key: sorted(of_key) for key, of_key in values.items()}


@pytest.mark.parametrize("last_day_ends", [False, True])
def test_three_days_of_a_growing_folder_equal_one_run(job: Callable[[str], Job], last_day_ends: bool) -> None:
    """Each night shows all completed hours, and none of 13,120 records a day is late."""
    nightly, once = job("nightly"), job("once")
    for number in range(3):
        write(nightly.input, number, day(number))
        finish = last_day_ends and number == 2
        summary = nightly.run(finish=finish)
        rows = rows_of(sorted(nightly.input.iterdir()))
        assert (summary.run.injected, summary.run.late, summary.run.dropped) == (A_DAY, 0, 0)
        assert summary.ended == (("events",) if finish else ())
        assert_all_due_is_done(nightly, rows, at_the_end=finish)

    for number in range(3):
        write(once.input, number, day(number))
    whole = once.run(finish=last_day_ends)

    assert (whole.totals, whole.watermark) == (summary.totals, summary.watermark)
    assert shown(nightly.folder) == shown(once.folder)
    assert kept(nightly.store) == kept(once.store)
    assert len(shown(once.folder)[1]) == (216 if last_day_ends else 210)


def test_input_after_the_end_is_refused(job: Callable[[str], Job]) -> None:
    """All 13,120 records of the second day would be late, so the error names the ways out."""
    daily = job("daily")
    write(daily.input, 0, day(0))
    assert daily.run(finish=True).ended == ("events",)
    write(daily.input, 1, day(1))

    with pytest.raises(mp.InvalidError, match=r"has ended.*finish=False.*accept_ended=True.*input=`events`"):
        daily.run(finish=True)
    with pytest.raises(mp.InvalidError, match="has ended"):
        daily.run(finish=False)

    assert_all_due_is_done(daily, day(0), at_the_end=True)


def test_run_without_new_input_logs_its_reason(
    job: Callable[[str], Job], caplog: pytest.LogCaptureFixture
) -> None:
    daily = job("daily")
    write(daily.input, 0, day(0, 50))
    daily.run(finish=False)

    with caplog.at_level(logging.WARNING, "millpond"):
        summary = daily.run(finish=False)

    assert summary.run.injected == 0
    assert "consumed before" in summary.skipped["events"]
    assert [record.message for record in caplog.records if "consumed before" in record.message]


def test_run_to_the_end_logs_the_streams_it_ends(
    job: Callable[[str], Job], caplog: pytest.LogCaptureFixture
) -> None:
    daily = job("daily")
    write(daily.input, 0, day(0, 50))
    with caplog.at_level(logging.INFO, "millpond"):
        daily.run(finish=False)
        assert "has ended" not in caplog.text
        daily.run(finish=True)

    assert "the input has ended" in caplog.text


@pytest.mark.spark
def test_available_now_completes_all_due_work(spark: SparkSession, tmp_path: Path) -> None:
    """When ``await_termination`` returns, all 22 completed hours have been shown."""
    job = Job(tmp_path / "job", spark)
    rows = day(0, 480, keys=("a",))
    write(job.input, 0, rows)

    with job.store:
        summary = job.run_available_now()

        assert len(due(rows)) == 22
        assert_all_due_is_done(job, rows)
        assert summary.watermark == max(row["t"] for row in rows) - DISORDER


@pytest.mark.spark
def test_closing_an_embedded_computation_completes_all_due_work(spark: SparkSession, tmp_path: Path) -> None:
    """After three nights, 210 of 216 alarms are due."""
    job = Job(tmp_path / "job", spark)
    with job.store:
        for number in range(3):
            write(job.input, number, day(number, 1_440))
            function = mp.foreach_batch(
                job.store,
                Alarm(),
                key="k",
                at="t",
                id="id",
                watermark=mp.BoundedDisorder(f"{DISORDER}us"),
                name="alarms",
                sink=mp.DeltaSink(str(job.folder / "alarms")),
                spark=spark,
                intervals=2,
                progress=False,
            )
            writer = job.frame().writeStream.foreachBatch(function).trigger(availableNow=True)
            writer.option("checkpointLocation", str(tmp_path / "checkpoint")).start().awaitTermination()
            function.close()

            told = sorted((key, alarm["hour"]) for key, alarm in rows_in(job.folder / "alarms"))
            assert told == sorted(due(rows_of(sorted(job.input.iterdir()))))

        assert len(told) == 210


@pytest.mark.spark
def test_grown_bounded_frame_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    """A bounded DataFrame is read once: the same one is skipped, a larger one refused."""
    job = Job(tmp_path / "job", spark)
    rows = day(0, 50)
    write(job.input, 0, [*rows, {"k": None, "t": rows[0]["t"], "id": "unreadable"}])

    def run() -> mp.RunSummary:
        frame = spark.read.schema(SCHEMA).json(str(job.input))
        runner = mp.SparkRunner(job.store, spark=spark, intervals=2, progress=False)
        return runner.run(pipeline(job.folder), {"events": frame}, finish=False)

    with job.store:
        first = run()
        assert (first.run.injected, first.ended, dict(first.skipped)) == (50, (), {})
        assert_all_due_is_done(job, rows)
        assert run().skipped == {"events": "all 51 rows were consumed before"}
        write(job.input, 1, day(1, 20))
        with pytest.raises(mp.InvalidError, match=r"spark\.readStream.*rows=`71` consumed=`51`"):
            run()


@pytest.mark.spark
def test_replaced_file_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    """Names have characters that a URL escapes; a time that is set back makes the file the former one."""
    folder = tmp_path / "føl der"
    folder.mkdir()
    made = mp.Pipeline("p")
    made.inject("events", key="k", at="t").apply(Count(), name="counts")

    def put(name: str, *times: int) -> None:
        (folder / name).write_text("\n".join(json.dumps({"k": "a", "t": time}) for time in times))
        os.utime(folder / name, (1e9 + times[0], 1e9 + times[0]))

    def run() -> int:
        runner = mp.SparkRunner(tmp_path / "pond", spark=spark, intervals=1, progress=False)
        frame = spark.readStream.schema("k string, t long").json(str(folder))
        return runner.run(made, {"events": frame}, finish=False).run.injected

    put("a 1%.json", 1)
    put("b.json", 2)
    assert run() == 2
    put("c.json", 3, 4)
    (folder / "b.json").unlink()
    assert run() == 2
    put("a 1%.json", 5)
    with pytest.raises(mp.InvalidError, match=r"files that were consumed have changed.*first=`.*a 1%\.json`"):
        run()
    put("a 1%.json", 1)
    put("d.json", 6)
    assert run() == 1


class Count(mp.Computation):
    def process_record(self, context: mp.Context, record: mp.Record) -> None:
        context.state.set(context.state.get(0) + 1)


@pytest.mark.spark
def test_bounded_frame_of_other_rows_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    """Rows have no order in a frame, and a backfill from the input is told by the same digest."""
    rows = [{"k": "ab"[n % 2], "t": 1_000_000 * n, "n": n} for n in range(30)]

    def run(given: list[dict[str, Any]], backfill: str | None = None) -> mp.RunSummary:
        made = mp.Pipeline("p")
        made.inject("events", key="k", at="t").apply(Count(), name="old")
        made.inject("other", key=lambda row: row["k"], at="t").apply(Count(), name="others")
        if backfill:
            made.stream("events").apply(Count(), name="new", backfill=backfill)
        runner = mp.SparkRunner(tmp_path / "pond", spark=spark, intervals=2, progress=False)
        frame = spark.createDataFrame(given).repartition(3)
        return runner.run(made, {"events": frame, "other": frame}, finish=False)

    assert run(rows).run.injected == 60
    assert run(rows[::-1]).skipped == dict.fromkeys(("events", "other"), "all 30 rows were consumed before")
    for others in ([*rows[1:], rows[1]], [{**rows[0], "n": 7}, *rows[1:]]):
        with pytest.raises(mp.InvalidError, match=r"spark\.readStream.*rows=`30` consumed=`30`"):
            run(others)
        with pytest.raises(mp.InvalidError, match="not the one that was consumed"):
            run(others, "input")
    assert run(rows[::-1], "input").skipped.keys() == {"events", "other"}
