"""Weak productions on both runners, mixed with strong ones and across restarts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from deltalake import DeltaTable

from millpond.executor.computation.computation import Computation
from millpond.executor.computation.context import Context
from millpond.executor.computation.records import Record
from millpond.executor.computation.timers import Timer
from millpond.executor.pipeline.nodes import ProductionMode
from millpond.executor.pipeline.pipeline import EnginePipeline
from millpond.executor.sinks.sink import DeltaSink
from millpond.executor.superstep.delivery import ProductionSource, read_productions
from millpond.statestore.types import Superstep
from millpond.testing.fixtures.determinism import ManualClock
from tests.fixtures.both_runners import LocalPlay, Play, SparkPlay, plays

Open = Callable[[Callable[[], EnginePipeline]], Play]


class Pass(Computation):
    def __init__(self, output: str) -> None:
        self.output = output

    def process_record(self, context: Context, record: Record) -> None:
        context.produce(self.output, {"n": record.value["n"]}, key=f"k{record.value['n'] % 2}")


class Sum(Computation):
    """Sums its records, and produces the sum when the watermark has passed the first hundred microseconds."""

    def __init__(self, output: str) -> None:
        self.output = output

    def process_record(self, context: Context, record: Record) -> None:
        context.state.set(context.state.get(0) + record.value["n"])
        context.set_timer(100)

    def process_timer(self, context: Context, timer: Timer) -> None:
        context.produce(self.output, {"n": context.state.get()})


@pytest.fixture(
    params=[
        LocalPlay,
        pytest.param(SparkPlay, marks=pytest.mark.spark),
    ]
)
def play(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Open]:
    spark = request.getfixturevalue("spark") if request.param is SparkPlay else None
    with plays(tmp_path, ManualClock, spark) as start:
        yield start


def mixed(
    folder: Path, modes: tuple[ProductionMode, ProductionMode, ProductionMode]
) -> Callable[[], EnginePipeline]:
    """``in`` → ``a`` → ``b`` → ``sum`` → ``last``, and ``a`` into ``total`` as well; ``b`` flows into a sink too."""

    def make() -> EnginePipeline:
        pipeline = EnginePipeline("mixed")
        first = pipeline.inject("in", key="k", at="t", id="n")
        first.apply(Pass("a"), name="a", productions=modes[0], exactly_once=False)
        pipeline.stream("a").apply(Pass("b"), name="b", productions=modes[1]).sink(
            "out", DeltaSink(str(folder / "out"))
        )
        sums = pipeline.stream("b").apply(Sum("sums"), name="sum", produces="sums", productions=modes[2])
        sums.apply(Sum("ends"), name="last", produces="ends")
        pipeline.stream("a").apply(Sum("totals"), name="total", produces="totals")
        return pipeline

    return make


def rows(*numbers: int) -> list[dict[str, object]]:
    return [{"k": f"k{n}", "t": n, "n": n} for n in numbers]


@pytest.mark.parametrize(
    "modes", [("weak", "weak", "weak"), ("weak", "strong", "weak"), ("strong", "weak", "strong")]
)
def test_mixed_productions_equal_strong_ones(
    play: Open, tmp_path: Path, modes: tuple[ProductionMode, ProductionMode, ProductionMode]
) -> None:
    """A restart follows every step."""
    pond = play(mixed(tmp_path, modes))
    pond.inject("in", rows(1, 2, 3))
    pond.restart()
    pond.inject("in", rows(4, 5))
    pond.restart()
    pond.settle()
    pond.advance("in", 200)
    pond.restart()
    pond.settle()

    assert pond.states("sum") == pond.states("total") == {"k0": "6", "k1": "9"}
    assert pond.states("last") == {"k0": "6", "k1": "9"}
    sunk = DeltaTable(tmp_path / "out").to_pyarrow_table()
    assert sorted(sunk["at"].cast("int64").to_pylist()) == [1, 2, 3, 4, 5]


def test_weak_productions_take_one_superstep(play: Open, tmp_path: Path) -> None:
    """The commit that consumes a record also has its effects two stages later."""
    pond = play(mixed(tmp_path, ("weak", "weak", "strong")))
    pond.inject("in", rows(1, 2, 3))
    stored = pond.store.snapshot()
    paths = [file.path for file in stored.files if file.productions]
    left = read_productions(
        pond.store.objects, [ProductionSource(path=path, superstep=Superstep(1)) for path in paths]
    )
    # Productions kept for a sink, or passed between tasks, name no consumer.
    assert {stream.rpartition("@")[2] for stream in left["stream"].to_pylist()} <= {""}

    assert pond.states("sum") == {"k0": "2", "k1": "4"}
    assert pond.run.summary().superstep == 1
