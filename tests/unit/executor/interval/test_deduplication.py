"""Scopes of record ids when a pipeline's streams change."""

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
    def process_record(self, context, record):
        context.state.set([*context.state.get([]), f"{record.stream} {record.id.decode()}"])


class Pond:
    def __init__(self) -> None:
        self.store = Store.in_memory(clock=ManualClock(), rng=SeededRng(1))

    def run(self, streams: str, *arrivals: tuple[str, str]) -> list[str]:
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
        ids: list[str] = orjson.loads(state)
        return ids


@pytest.mark.parametrize("later", ["xy", "yx"])
def test_duplicates_are_recognised_after_a_stream_is_added(later: str) -> None:
    """The order of declaration must not matter."""
    pond = Pond()
    pond.run("x", ("x", "1"))

    assert pond.run(later, ("x", "1"), ("y", "1"), ("y", "1"), ("x", "1")) == ["x 1", "y 1"]


def test_duplicates_are_recognised_after_a_stream_is_removed() -> None:
    """The remaining stream keeps its scope."""
    pond = Pond()
    pond.run("xy", ("x", "1"), ("y", "1"))

    assert pond.run("y", ("y", "1"), ("y", "2")) == ["x 1", "y 1", "y 2"]
    assert pond.run("yx", ("x", "1"), ("y", "2"), ("x", "2")) == ["x 1", "y 1", "y 2", "x 2"]
