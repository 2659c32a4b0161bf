"""
An embedded computation after a failed batch, without Spark.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from millpond.executor.pipeline.pipeline import EnginePipeline
from millpond.executor.spark.foreach_batch import ForeachBatch
from millpond.statestore.errors import UnavailableError


class Runner:
    """
    A runner that records its calls, and whose run fails at batch 13.
    """

    def __init__(self) -> None:
        self.events: list[str] = []

    def open(self, _pipeline: EnginePipeline, _frames: Mapping[str, Any]) -> Runner:
        self.events.append("open")
        return self

    def start_ticker(self, _tick_ms: float) -> None:
        pass

    def on_batch(self, _stream: str):
        return self.consume

    def consume(self, _frame: Any, batch: int) -> None:
        if batch == 13:
            raise UnavailableError("away")
        self.events.append(f"batch {batch}")

    def abandon(self) -> None:
        self.events.append("abandon")

    def run_until_quiet(self) -> None:
        self.events.append("work")

    def stop(self) -> None:
        self.events.append("stop")


def test_a_failed_batch_abandons_the_run_and_the_next_opens_another() -> None:
    """
    A failed batch fails its query and abandons the run; the next batch opens a new run.
    """
    runner = Runner()
    function = ForeachBatch(runner, EnginePipeline("p"), tick_ms=1)

    function(None, 1)
    with pytest.raises(UnavailableError):
        function(None, 13)
    function(None, 2)
    function.close()
    function.close()

    assert runner.events == ["open", "batch 1", "abandon", "open", "batch 2", "work", "stop"]
