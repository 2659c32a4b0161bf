"""Records sorted by time on both runners: waiting, restarts, duplicates and late records."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
import pytest

from millpond.executor.computation.computation import Computation
from millpond.executor.computation.context import Context
from millpond.executor.computation.records import Record
from millpond.executor.computation.timers import Timer
from millpond.executor.pipeline.pipeline import EnginePipeline
from millpond.executor.time.watermark_policies import BoundedDisorder
from millpond.testing.fixtures.determinism import ManualClock
from tests.fixtures.both_runners import plays

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

START_US = 1_800_000_000_000_000
Open = Callable[[Callable[[], EnginePipeline]], Any]


class Journal(Computation):
    """Keeps records and timers in arrival order; a record's timer is due five seconds later."""

    time_sorted = True

    def process_record(self, context: Context, record: Record) -> None:
        mark = "late" if record.late else "record"
        context.state.set([*context.state.get([]), [mark, (record.at - START_US) // 1_000_000]])
        context.set_timer(record.at + 5_000_000)

    def process_timer(self, context: Context, timer: Timer) -> None:
        context.state.set([*context.state.get([]), ["timer", (timer.at - START_US) // 1_000_000]])


def pipeline() -> EnginePipeline:
    """A stream that is out of order by ten seconds."""
    made = EnginePipeline("sorted")
    stream = made.inject("s", key="k", at="t", id="id", watermark=BoundedDisorder("10s"))
    stream.apply(Journal(), name="journal")
    return made


def rows(*seconds: int) -> list[dict[str, Any]]:
    return [{"k": "k", "t": START_US + second * 1_000_000, "id": str(second)} for second in seconds]


@pytest.fixture(params=["local", pytest.param("spark", marks=pytest.mark.spark)])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Open]:
    session: SparkSession | None = request.getfixturevalue("spark") if request.param == "spark" else None
    with plays(tmp_path, ManualClock, session) as start:
        yield start


def test_runners_sort_records_alike(opened: Open) -> None:
    """Waiting records survive restarts; late records run at once."""
    play = opened(pipeline)
    play.inject("s", rows(12, 3, 9))
    play.settle()
    play.restart()
    play.inject("s", rows(9, 4, 20, 22))
    play.settle()
    play.restart()
    play.inject("s", rows(30, 11, 15))
    play.settle()

    assert orjson.loads(play.states("journal")["k"]) == [
        ["record", 3],
        ["record", 4],
        ["timer", 9],
        ["record", 9],
        ["late", 11],
        ["record", 12],
        ["record", 15],
        ["timer", 20],
    ]
    waiting = play.store.rows_view("journal").to_arrow().to_pylist()[0]["timers"]
    assert [timer["domain"] for timer in waiting] == ["record", "record", "record"]
