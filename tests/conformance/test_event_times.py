"""Event times set by user code or by arrival, on both runners."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
import pytest

from millpond.executor.computation.computation import Computation
from millpond.executor.computation.context import Context
from millpond.executor.computation.records import Record
from millpond.executor.time.watermark_policies import IngressTime, ManualWatermark
from millpond.executor.windows.combiners import ToList
from millpond.executor.windows.pipeline import Pipeline
from millpond.executor.windows.time_triggers import AfterWatermark
from millpond.executor.windows.window_fns import FixedWindows
from millpond.testing.fixtures.determinism import ManualClock
from tests.fixtures.both_runners import Play, plays

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

START_US = 1_800_000_000_000_000
Open = Callable[[Callable[[], Pipeline]], Any]


class Panes(Computation):
    """Keeps each pane's window start, values, and whether the record was late."""

    def process_record(self, context: Context, record: Record) -> None:
        shown = record.value
        entry = [shown["window"][0] - START_US, sorted(shown["value"]), record.late]
        context.state.set([*context.state.get([]), entry])


def rows(*at: int, move: int = 0) -> list[dict[str, Any]]:
    return [{"k": "k", "t": START_US + seconds, "move": move} for seconds in at]


def moved(value: Any, at: int) -> int:
    return at + int(value["move"])


def shifting(horizon: Any) -> Callable[[], Pipeline]:
    """Rows shift their times, and are collected in windows of ten microseconds."""

    def make() -> Pipeline:
        pipeline = Pipeline("times")
        stream = pipeline.inject("s", key="k", at="t", watermark=ManualWatermark())
        shifted = stream.with_timestamps(moved, name="shifted", late_data_horizon=horizon)
        windowed = shifted.window(FixedWindows("10us"), trigger=AfterWatermark())
        windowed.combine(ToList("move"), name="lists").apply(Panes(), name="panes")
        return pipeline

    return make


def arriving() -> Pipeline:
    pipeline = Pipeline("times")
    stream = pipeline.inject("s", key="k", at=IngressTime())
    stream.window(FixedWindows("10s")).combine(ToList("move"), name="lists").apply(Panes(), name="panes")
    return pipeline


def panes(run: Play) -> list[list[Any]]:
    state = run.states("panes").get("k", "[]")
    return list(orjson.loads(state))


class Facts:
    """One test per fact; subclasses provide the runner."""

    def test_horizon_holds_the_watermark_back(self, play: Open) -> None:
        """The horizon survives a restart, so moved values are not late."""
        run = play(shifting("10us"))
        run.inject("s", rows(25))
        run.advance("s", START_US + 22)
        assert run.watermark("lists") == START_US + 12
        run.restart()

        run.inject("s", rows(22, move=-10))
        run.settle()
        run.advance("s", START_US + 30)
        assert panes(run) == [[10, [-10], False]]
        assert run.watermark("lists") == START_US + 20
        run.advance("s", START_US + 40)

        assert panes(run) == [[10, [-10], False], [20, [0], False]]
        assert run.run.summary().totals.late == 0

    def test_ingress_window_closes_with_the_clock(self, play: Open) -> None:
        """It closes without input, after a restart, and whatever the times of the rows."""
        run = play(arriving)
        run.inject("s", rows(500, move=1))
        run.clock.advance_ms(9_999)
        run.inject("s", rows(-500, move=2))
        run.settle()
        assert panes(run) == []
        run.clock.advance_ms(1)
        run.settle()
        assert panes(run) == [[0, [1, 2], False]]

        run.inject("s", rows(0, move=3))
        run.restart()
        run.clock.advance_ms(10_000)
        run.settle()

        assert panes(run) == [[0, [1, 2], False], [10_000_000, [3], False]]
        assert run.watermark("lists") == START_US + 20_000_000
        assert run.run.summary().totals.late == 0

    def test_unbounded_horizon_lets_moved_values_be_late(self, play: Open) -> None:
        """The watermark advances, and values moved behind it are counted and dropped."""
        run = play(shifting("unbounded"))
        run.inject("s", rows(25))
        run.advance("s", START_US + 22)
        assert run.watermark("lists") == START_US + 22

        run.inject("s", rows(25, move=-20))
        run.settle()
        run.advance("s", START_US + 100)

        assert panes(run) == [[20, [0], False]]
        assert run.run.summary().totals.late == 1


class TestLocalRunner(Facts):
    """Facts that one runner is enough for, besides the common ones."""

    @pytest.fixture
    def play(self, tmp_path: Path) -> Iterator[Open]:
        with plays(tmp_path, lambda: ManualClock(START_US)) as start:
            yield start

    def test_ingress_time_stands_while_the_clock_is_set_back(self, play: Open) -> None:
        """Records get the latest time reached, so they are not late."""
        run = play(arriving)
        run.clock.advance_ms(12_000)
        run.inject("s", rows(0, move=1))
        run.settle()
        run.clock = ManualClock(START_US)
        run.restart()

        run.inject("s", rows(0, move=2))
        run.clock.advance_ms(20_000)
        run.settle()

        assert panes(run) == [[10_000_000, [1, 2], False]]
        assert run.run.summary().totals.late == 0

    def test_value_moved_beyond_the_horizon_is_a_dead_letter(self, play: Open) -> None:
        run = play(shifting("10us"))
        run.inject("s", [*rows(25, move=-11), *rows(25, move=-1)])
        run.settle()
        run.advance("s", START_US + 100)

        assert panes(run) == [[20, [-1], False]]
        assert run.run.summary().totals.dead_letters == 1

    def test_moving_forwards_needs_no_horizon(self, play: Open) -> None:
        run = play(shifting(0))
        run.inject("s", rows(5, move=20))
        run.settle()
        run.advance("s", START_US + 22)
        assert run.watermark("lists") == START_US + 22
        run.inject("s", rows(23, move=2))
        run.advance("s", START_US + 30)

        assert panes(run) == [[20, [2, 20], False]]


class TestSpark(Facts):
    @pytest.fixture
    def play(self, tmp_path: Path, spark: SparkSession) -> Iterator[Open]:
        with plays(tmp_path, lambda: ManualClock(START_US), spark) as start:
            yield start
