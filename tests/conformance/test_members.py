"""Expected senders on both runners: each has its own marks or files, and the stream waits for all."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from millpond.executor.computation.computation import Computation
from millpond.executor.computation.context import Context
from millpond.executor.computation.records import Record
from millpond.executor.pipeline.pipeline import EnginePipeline
from millpond.executor.run.directory_injector import FILE_ROW, DirectoryInjector
from millpond.executor.time.watermark_policies import ManualWatermark, MarkColumn
from millpond.statestore.errors import InvalidError
from millpond.statestore.types import TIME_MIN_US
from millpond.testing.fixtures.determinism import ManualClock
from tests.fixtures.both_runners import plays

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

START_US = 1_800_000_000_000_000
Open = Callable[[Callable[[], EnginePipeline]], Any]


class Count(Computation):
    def process_record(self, context: Context, record: Record) -> None:
        context.state.set(context.state.get(0) + 1)


def marked() -> EnginePipeline:
    """Return rows of two expected hosts, with a column of marks."""
    pipeline = EnginePipeline("members")
    pipeline.inject(
        "s", key="k", at="t", watermark=MarkColumn("mark"), members=("a", "b"), member="host"
    ).apply(Count(), name="c")
    return pipeline


def row(host: str, at: int, mark: int | None) -> dict[str, Any]:
    return {
        "k": "k",
        "t": START_US + at,
        "host": host,
        "mark": None if mark is None else START_US + mark,
    }


def filed() -> EnginePipeline:
    pipeline = EnginePipeline("files")
    pipeline.inject(
        "s", key="k", at="t", id=FILE_ROW, watermark=ManualWatermark(), members=("a", "b"), member="host"
    ).apply(Count(), name="c", on_late="drop")
    return pipeline


def write(folder: Path, host: str, created: int, *keys: str) -> Path:
    """Write a file named by its host and opening time, with a row for each key."""
    path = folder / f"{host}-{created}.log"
    rows = [{"k": key, "t": START_US + created + 1, "host": host} for key in keys]
    path.write_text("".join(json.dumps(one) + "\n" for one in rows))
    return path


def injector(play: Any, folder: Path, **options: Any) -> DirectoryInjector:
    """The directory's injector on the run of a play."""
    return DirectoryInjector(
        play.run,
        "s",
        folder,
        read=lambda path: map(json.loads, path.read_text().splitlines()),
        created=lambda path: START_US + int(path.stem.partition("-")[2]),
        pattern="*.log",
        member=lambda path: path.name.partition("-")[0],
        **options,
    )


class Facts:
    """One test per fact; subclasses provide the runner."""

    def test_watermark_is_the_least_of_the_members_marks(self, play: Open) -> None:
        """A mark covers only its own member's rows."""
        run = play(marked)
        run.inject("s", [row("a", 50, 40), row("a", 60, 30), row("stranger", 1, 900)])
        assert run.watermark("c") == TIME_MIN_US

        run.inject("s", [row("b", 10, 5), row("a", 70, None), row("b", 20, None)])
        assert run.watermark("c") == START_US + 5
        run.restart()
        run.inject("s", [row("b", 90, 80), row("a", 75, 6)])
        assert run.watermark("c") == START_US + 6
        run.inject("s", [row("a", 90, 70)])
        assert run.watermark("c") == START_US + 70

    def test_directory_waits_for_every_expected_sender(self, play: Open, tmp_path: Path) -> None:
        """The watermark follows the oldest unfinished file, and a host without files holds it."""
        logs = tmp_path / "logs"
        logs.mkdir()
        write(logs, "a", 100, "x", "y")
        unfinished = {write(logs, "a", 300, "x")}
        run = play(filed)
        files = injector(run, logs, is_closed=lambda path: path not in unfinished)
        assert files.poll() == 1
        run.settle()
        assert run.watermark("c") == TIME_MIN_US

        unfinished.add(write(logs, "b", 50, "x"))
        write(logs, "stranger", 60, "z")
        assert files.poll() == 1
        run.settle()
        assert run.watermark("c") == START_US + 50
        run.restart()
        unfinished.clear()
        write(logs, "b", 200, "y")
        again = injector(run, logs)
        assert again.poll() == 5
        run.settle()

        assert run.watermark("c") == START_US + 200
        assert again.poll() == 0
        assert run.states("c") == {"x": "3", "y": "2", "z": "1"}
        assert run.run.summary().totals.dropped == 0


class TestLocally(Facts):
    @pytest.fixture
    def play(self, tmp_path: Path) -> Iterator[Open]:
        with plays(tmp_path, ManualClock) as start:
            yield start

    def test_members_of_files_and_stream_must_match(self, play: Open, tmp_path: Path) -> None:
        def without() -> EnginePipeline:
            pipeline = EnginePipeline("files")
            stream = pipeline.inject("s", key="k", at="t", id=FILE_ROW, watermark=ManualWatermark())
            stream.apply(Count(), name="c")
            return pipeline

        run = play(without)

        with pytest.raises(InvalidError, match="belong together"):
            injector(run, tmp_path)


@pytest.mark.spark
class TestOnSpark(Facts):
    @pytest.fixture
    def play(self, tmp_path: Path, spark: SparkSession) -> Iterator[Open]:
        with plays(tmp_path, ManualClock, spark) as start:
            yield start
