"""
Record ids stay what they were when a pipeline is changed, and user code sees them as they came.
"""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from millpond.executor.computation.computation import Computation
from millpond.executor.local.runner import LocalRunner
from millpond.executor.pipeline.pipeline import EnginePipeline
from millpond.statestore.store import Store
from millpond.testing.fixtures.determinism import ManualClock, SeededRng


class Ids(Computation):
    """
    Keeps the ids of its records.
    """

    def process_record(self, context, record):
        context.state.set([*context.state.get([]), f"{record.stream} {record.id.decode()}"])


class Pond:
    """
    A store in memory, and one run after the other on it.
    """

    def __init__(self) -> None:
        self.store = Store.in_memory(clock=ManualClock(), rng=SeededRng(1))

    def run(self, streams: str, *arrivals: tuple[str, str]) -> list[str]:
        """
        Run a pipeline with these streams, and inject a record with this id on each of those.
        """
        pipeline = EnginePipeline("p")
        for stream in streams:
            pipeline.inject(stream, key="k", at="at", id="id")
        pipeline.add(Ids(), name="ids", subscribes=dict.fromkeys(streams))
        run = LocalRunner(self.store, clock=ManualClock(), rng=SeededRng(streams), progress=False).start(
            pipeline, stepping=True
        )
        for stream, record_id in arrivals:
            row: dict[str, Any] = {"k": "a", "at": 1, "id": record_id}
            run.inject(stream, row)
            run.run_until_quiet()
        run.stop()
        [state] = self.store.rows_view("ids").to_arrow().column("state").to_pylist()
        found: list[str] = orjson.loads(state)
        return found


@pytest.mark.parametrize("later", ["xy", "yx"])
def test_a_stream_that_is_added_hides_no_repetition(later: str) -> None:
    """
    What the first stream delivered before the change is known afterwards, on whatever place it is named.
    """
    pond = Pond()
    pond.run("x", ("x", "1"))

    assert pond.run(later, ("x", "1"), ("y", "1"), ("y", "1"), ("x", "1")) == ["x 1", "y 1"]


def test_a_stream_that_is_removed_hides_none_either() -> None:
    """
    The stream that stays alone keeps the scope that it had beside the other one.
    """
    pond = Pond()
    pond.run("xy", ("x", "1"), ("y", "1"))

    assert pond.run("y", ("y", "1"), ("y", "2")) == ["x 1", "y 1", "y 2"]
    assert pond.run("yx", ("x", "1"), ("y", "2"), ("x", "2")) == ["x 1", "y 1", "y 2", "x 2"]
