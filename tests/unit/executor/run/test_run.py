"""Behaviour that the runs of both runners share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from millpond.executor.computation.computation import Computation
from millpond.executor.local.runner import LocalRunner
from millpond.executor.pipeline.pipeline import EnginePipeline
from millpond.executor.run.options import RunnerOptions
from millpond.executor.run.run import Run
from millpond.executor.spark.run import SparkRun
from millpond.executor.superstep.coordinator import Coordinator
from millpond.statestore.errors import InvalidError
from millpond.statestore.store import Store
from millpond.statestore.system import SystemClock
from millpond.testing.fixtures.determinism import ManualClock, SeededRng
from tests.fixtures.supersteps import commit


class Engine:
    """An engine of Spark supersteps without a job."""

    def __init__(self, coordinator: Coordinator) -> None:
        self.coordinator = coordinator

    def advance(self) -> Any:
        return commit(self.coordinator, self.coordinator.begin(), [])

    def close(self) -> None:
        return


def pipeline() -> EnginePipeline:
    made = EnginePipeline("p")
    made.inject("in", key="k", at="at").apply(Computation(), name="c")
    return made


def local_run(store: Store, clock: ManualClock) -> Run[Any]:
    return LocalRunner(store, clock=clock, rng=SeededRng(2), progress=False).start(pipeline(), stepping=True)


def spark_run(store: Store, clock: ManualClock) -> Run[Any]:
    options = RunnerOptions(store=store, clock=clock, rng=SeededRng(2), progress=False)
    coordinator = Coordinator(store, pipeline().check(), options)
    coordinator.open()
    return SparkRun(Engine(coordinator), coordinator, options, release=lambda: None)


Start = Callable[[Store, ManualClock], Run[Any]]


@pytest.fixture(params=[local_run, spark_run])
def run(request: pytest.FixtureRequest) -> Run[Any]:
    clock = ManualClock()
    start: Start = request.param
    return start(Store.in_memory(clock=clock, rng=SeededRng(1)), clock)


def test_run_stops_at_the_end_of_a_with_block(run: Run[Any]) -> None:
    """Stopping it again does nothing."""
    with run as entered:
        assert entered is run
        assert run.is_active

    assert not run.is_active
    assert run.stop() == run.summary()
    with pytest.raises(InvalidError, match="has been stopped"):
        run.finish("in")


def test_error_in_a_with_block_is_raised_and_stops_the_run(run: Run[Any]) -> None:
    with pytest.raises(KeyError, match="mine"), run:
        raise KeyError("mine")

    assert not run.is_active


def test_invalid_arguments_are_refused_without_ending_the_run(run: Run[Any]) -> None:
    with run:
        with pytest.raises(InvalidError, match="stream=`nowhere`"):
            run.finish("nowhere")
        with pytest.raises(InvalidError, match="no such member"):
            run.advance_watermark("in", 5, member="m")
        with pytest.raises(InvalidError, match="expected, idle or gone"):
            run.declare("in", "lost")
        with pytest.raises(InvalidError, match="computation=`missing`"):
            run.watermark("missing")
        assert run.is_active


class Full:
    """A sink that refuses everything."""

    identity = "full"
    delivered = 0

    def open(self, *_: Any, **__: Any) -> Full:
        return self

    def write(self, superstep: int, _: Any) -> None:
        raise InvalidError("the sink is full", superstep=superstep)


class Echo(Computation):
    def process_record(self, context: Any, record: Any) -> None:
        context.produce("c", record.value)


def test_sink_failure_on_a_quiet_stream_ends_the_run() -> None:
    """No further record, batch or tick is needed."""
    made = EnginePipeline("p")
    made.inject("in", key="k", at="at").apply(Echo(), name="c").sink("full", Full())
    clock = SystemClock()
    run = LocalRunner(Store.in_memory(), clock=clock, progress=False).start(made)
    run.inject("in", {"k": "a", "at": 1}).wait()
    with pytest.raises(InvalidError, match="the sink is full"):
        run.run_until_quiet()

    assert not run.is_active
    run.abandon()
    assert run.summary().error == "the sink is full superstep=`1`"


def test_sink_failure_ends_a_run_of_either_runner(run: Run[Any]) -> None:
    """The failure comes from the sinks' thread."""
    coordinator: Coordinator = run._coordinator if isinstance(run, SparkRun) else run._worker.coordinator  # type: ignore[attr-defined]
    coordinator.sinks.on_failure(InvalidError("the sink is full"))

    assert not run.is_active
    assert run.summary().error == "the sink is full"
    with pytest.raises(InvalidError, match="the sink is full"):
        run.finish("in")
    run.abandon()
