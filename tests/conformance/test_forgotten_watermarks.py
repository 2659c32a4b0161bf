"""The warning for an unordered stream without a declared watermark, on both runners."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from millpond.executor.time.watermark_policies import BoundedDisorder, WatermarkPolicy
from millpond.executor.windows.combiners import Count
from millpond.executor.windows.pipeline import Pipeline
from millpond.executor.windows.window_fns import FixedWindows
from millpond.testing.fixtures.determinism import ManualClock
from tests.fixtures.both_runners import plays

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SECOND_US = 1_000_000
START_US = 1_800_000_000 * SECOND_US
Open = Callable[..., Any]


def counting(watermark: WatermarkPolicy | None = None, through: bool = False) -> Pipeline:
    pipeline = Pipeline("p")
    stream = pipeline.inject("s", key="k", at="t", watermark=watermark)
    pipeline.inject("other", key="k", at="t", watermark=watermark).map(dict, name="others")
    if through:
        stream = stream.map(dict, name="mapped")
    stream.window(FixedWindows("1m")).combine(Count(), name="minutes")
    return pipeline


def dropping(watermark: WatermarkPolicy | None = None) -> Pipeline:
    """A computation that drops late records."""
    pipeline = Pipeline("p")
    stream = pipeline.inject("s", key="k", at="t", watermark=watermark)
    stream.map(dict, name="minutes", on_late="drop")
    return pipeline


def rows(*seconds: float) -> list[dict[str, Any]]:
    return [{"k": "k", "t": START_US + int(second * SECOND_US)} for second in seconds]


class Facts:
    """One test per fact; subclasses provide the runner."""

    @pytest.mark.parametrize("make", [counting, partial(counting, through=True), dropping])
    def test_first_dropped_record_warns_with_the_sufficient_delay(
        self, play: Open, make: Callable[..., Pipeline], caplog: pytest.LogCaptureFixture, tmp_path: Path
    ) -> None:
        """With the delay from the warning, the same input drops nothing."""
        caplog.set_level(logging.WARNING, "millpond")
        pieces = [rows(20), rows(600), rows(590, 23, 601), rows(10)]
        run = play(make)
        for piece in pieces:
            run.inject("s", piece)
            run.settle()

        assert run.run.summary().totals.dropped >= 1
        [warning] = [text for text in caplog.messages if "dropped" in text]
        assert "stream=`s`" in warning
        assert "computation=`minutes`" in warning
        assert 'watermark=BoundedDisorder("9m37s")' in warning
        # Repeat the input with the watermark that the warning asks for.
        match = re.search(r'BoundedDisorder\("(.*)"\)', warning)
        assert match is not None
        caplog.clear()
        run = play(partial(make, watermark=BoundedDisorder(match[1])), "again")
        for piece in pieces[:-1]:
            run.inject("s", piece)
            run.settle()
        assert run.run.summary().totals.dropped == 0
        assert not caplog.messages

    def test_declared_watermark_warns_of_nothing(self, play: Open, caplog: pytest.LogCaptureFixture) -> None:
        """Records behind a declared bound are dropped by intent."""
        caplog.set_level(logging.WARNING, "millpond")
        run = play(partial(counting, watermark=BoundedDisorder("0s")))
        for piece in (rows(600), rows(23)):
            run.inject("s", piece)

        assert run.run.summary().totals.dropped == 1
        assert not caplog.messages


class TestLocal(Facts):
    @pytest.fixture
    def play(self, tmp_path: Path) -> Iterator[Open]:
        with plays(tmp_path, lambda: ManualClock(START_US)) as start:
            yield start


class TestSpark(Facts):
    @pytest.fixture
    def play(self, tmp_path: Path, spark: SparkSession) -> Iterator[Open]:
        with plays(tmp_path, lambda: ManualClock(START_US), spark) as start:
            yield start
