"""The end of inputs in a Spark run, without Spark."""

from __future__ import annotations

from typing import Any

import pytest

from millpond.executor.computation.computation import Computation
from millpond.executor.pipeline.pipeline import EnginePipeline
from millpond.executor.run.options import RunnerOptions
from millpond.executor.spark.run import SparkRun
from millpond.executor.superstep.coordinator import Coordinator
from millpond.executor.superstep.plan import InputPosition
from millpond.executor.time.observations import InputObservation, TimesSeen
from millpond.executor.time.watermark_policies import BoundedDisorder
from millpond.statestore.errors import InvalidError
from millpond.statestore.store import Store
from millpond.statestore.types import TIME_MAX_US
from millpond.testing.fixtures.determinism import ManualClock, SeededRng
from tests.fixtures.supersteps import commit


class Engine:
    """An engine without Spark jobs that commits each plan as one record at time 5."""

    def __init__(self, coordinator: Coordinator) -> None:
        self.coordinator = coordinator

    def consume(self, _frame: Any, position: InputPosition, *, is_last: bool = False, in_steps: bool = False):
        if not self.coordinator.inputs.admit(position):
            return None
        plan = self.coordinator.begin(inputs={position.stream})
        seen = InputObservation(stream=position.stream, records=1, times=TimesSeen(newest_at=5, oldest_at=5))
        return commit(self.coordinator, plan, [], position=position, inputs=[seen])

    def run(self, _batch: Any):
        return commit(self.coordinator, self.coordinator.begin(), [])

    def close(self):
        return


def a_run(store: Store, clock: ManualClock) -> SparkRun:
    """Start a pipeline with one computation that reads facts and events."""
    pipeline = EnginePipeline("p")
    for stream in ("facts", "events"):
        pipeline.inject(stream, key="k", at="at", watermark=BoundedDisorder("0s"))
    pipeline.add(Computation(), name="join", subscribes={"facts": None, "events": None})
    options = RunnerOptions(store=store, clock=clock, rng=SeededRng(2), progress=False)
    coordinator = Coordinator(store, pipeline.check(), options)
    coordinator.open()
    return SparkRun(Engine(coordinator), coordinator, options, release=lambda: None)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def store(clock: ManualClock) -> Store:
    return Store.in_memory(clock=clock, rng=SeededRng(1))


def test_consumed_bounded_input_does_not_hold_the_watermark(store: Store, clock: ManualClock) -> None:
    """Only the streaming input bounds the watermark."""
    run = a_run(store, clock)
    run.consume_bounded("facts", None)
    run.advance_watermark("events", 1_000)
    run.advance()

    assert run.watermark("join") == 1_000


def test_bounded_input_consumed_before_a_restart_has_ended(store: Store, clock: ManualClock) -> None:
    """It is not read again."""
    first = a_run(store, clock)
    first.consume_bounded("facts", None)
    first.stop()

    again = a_run(store, clock)
    again.consume_bounded("facts", None)
    again.advance_watermark("events", 2_000)
    again.advance()

    assert again.watermark("join") == 2_000
    assert again.summary().totals.injected == 1


class EndedQuery:
    """A query that has read everything."""

    isActive = False  # noqa: N815 - Spark's name

    def awaitTermination(self, _seconds: int) -> bool:  # noqa: N802 - Spark's name
        return True

    def stop(self) -> None:
        """It has ended."""


def test_work_that_is_due_is_done_before_await_termination_returns(store: Store, clock: ManualClock) -> None:
    """With a timeout the call returns False while work remains."""
    run = a_run(store, clock)
    run.start_queries({"events": EndedQuery}, is_bounded=True)
    run.consume(None, InputPosition(stream="events", source="query", batch=0))
    run.declare("facts", "idle")
    assert run.has_work()
    clock.advance_ms(1)

    assert not run.await_termination(timeout="-1ms")
    assert run.has_work()
    assert run.await_termination()
    assert not run.has_work()
    assert run.watermark("join") == 5


def test_run_stopped_before_its_work_is_done_warns(
    store: Store, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    """The next run does the remaining work."""
    run = a_run(store, clock)
    run.start_queries({"events": EndedQuery}, is_bounded=True)
    run.declare("facts", "idle")
    run.stop()

    assert "call await_termination() before stop()" in caplog.text


def test_batch_after_stop_is_refused(store: Store, clock: ManualClock) -> None:
    """Spark may still deliver one."""
    run = a_run(store, clock)
    run.stop()
    before = store.committer.refresh().version

    with pytest.raises(InvalidError, match="stopped"):
        run.consume(None, InputPosition(stream="events", source="query", batch=0))

    assert store.committer.refresh().version == before


def test_ended_stream_stays_ended_after_a_restart(store: Store, clock: ManualClock) -> None:
    """The next superstep commits the end."""
    run = a_run(store, clock)
    for stream in ("facts", "events"):
        run.consume_bounded(stream, None)
    run.advance()
    run.stop()

    assert a_run(store, clock).watermark("join") == TIME_MAX_US
