"""Windows in a cycle with a feedback, on both runners and after a restart."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
import pytest

from millpond.executor.windows.pipeline import Pipeline
from millpond.statestore.errors import InvalidError
from millpond.testing.fixtures.determinism import ManualClock
from tests.fixtures.both_runners import plays
from tests.fixtures.feedback import DAY_US, pages, pages_by_day

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Open = Callable[[Callable[[], Pipeline]], Any]


class Facts:
    """One test per fact; subclasses provide the runner."""

    def test_cycle_with_a_feedback_shows_windows_day_by_day(self, play: Open) -> None:
        """A day's panes return before the next day ends, so they are counted there and none is late."""
        run = play(partial(pages_by_day, feedback=True))
        run.inject("pages", pages(1))
        run.advance("pages", DAY_US)
        run.restart()
        run.advance("pages", 2 * DAY_US)
        run.advance("pages", 3 * DAY_US)

        assert orjson.loads(run.states("seen")["page"]) == [[0, 1], [1, 1], [2, 1]]
        assert run.watermark("days") == 3 * DAY_US
        assert run.run.summary().totals.late == 0

    def test_feedback_behind_the_watermark_is_late_and_counted(self, play: Open) -> None:
        """A watermark that jumps ahead expires the windows of the records that return."""
        run = play(partial(pages_by_day, feedback=True))
        run.inject("pages", pages(1))
        run.advance("pages", 3 * DAY_US)

        assert orjson.loads(run.states("seen")["page"]) == [[0, 1]]
        counters = run.run.summary().totals.by_computation["days"]
        assert (counters["late"], counters["dropped"]) == (1, 1)

    def test_windowed_cycle_without_a_feedback_does_not_start(self, play: Open) -> None:
        with pytest.raises(InvalidError, match="cycle"):
            play(partial(pages_by_day, feedback=False))


class TestLocal(Facts):
    @pytest.fixture
    def play(self, tmp_path: Path) -> Iterator[Open]:
        with plays(tmp_path, lambda: ManualClock(0)) as start:
            yield start


class TestSpark(Facts):
    @pytest.fixture
    def play(self, tmp_path: Path, spark: SparkSession) -> Iterator[Open]:
        with plays(tmp_path, lambda: ManualClock(0), spark) as start:
            yield start
