"""Updates of a running pipeline on both runners: the effect of a restart, without one."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from deltalake import DeltaTable

from millpond.executor.computation.computation import Computation
from millpond.executor.pipeline.pipeline import EnginePipeline
from millpond.executor.sinks.sink import DeltaSink
from millpond.executor.time.watermark_policies import Monotone
from millpond.statestore.errors import InvalidError
from millpond.testing.fixtures.determinism import ManualClock
from tests.fixtures.both_runners import Play, plays

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SECOND = 1_000_000
Make = Callable[[], EnginePipeline]


class Tally(Computation):
    """Adds a number for each record, forwards it, and adds a hundred ten seconds later.

    Args:
        by: the number.
        output: the stream that it produces to.
    """

    def __init__(self, by: int = 1, output: str = "") -> None:
        self.by = by
        self.output = output

    def process_record(self, context: Any, record: Any) -> None:
        context.state.set(context.state.get(0) + self.by)
        context.set_timer(record.at + 10 * SECOND, tag=str(record.at))
        if self.output:
            context.produce(self.output, {"n": context.state.get(0)})

    def process_timer(self, context: Any, timer: Any) -> None:
        context.state.set(context.state.get(0) + 100)


def tallies(*names: str, sinks: dict[str, Path] | None = None, **options: Any) -> Make:
    """A pipeline of computations that all read one stream; ``second`` reads what ``first`` produces.

    Args:
        names: the computations.
        sinks: folders of sinks of ``first``'s stream, by name.
        options: ``by`` of computations by name, and options of the pipeline.
    """
    numbers: dict[str, int] = options.pop("by", {})

    def make() -> EnginePipeline:
        pipeline = EnginePipeline("p", **options)
        pipeline.inject("s", key="k", at="t", id="id", watermark=Monotone())
        for name in names:
            output = ("firsts",) if name == "first" else ()
            source = "firsts" if name == "second" else "s"
            code = Tally(numbers.get(name, 1), output[0] if output else "")
            pipeline.add(code, name=name, subscribes={source: None}, produces=output)
        for name, folder in (sinks or {}).items():
            pipeline.add_sink(name, "firsts", DeltaSink(str(folder)))
        return pipeline

    return make


def rows(*at: int, key: str = "k") -> list[dict[str, Any]]:
    return [{"k": key, "t": second * SECOND, "id": f"{key}{second}"} for second in at]


def counts(play: Play, computation: str) -> dict[str, int]:
    return {key: json.loads(state) for key, state in play.states(computation).items()}


def written(folder: Path) -> list[int]:
    values = DeltaTable(str(folder)).to_pyarrow_table().column("value").to_pylist()
    return sorted(json.loads(value)["n"] for value in values)


@pytest.fixture(params=["local", pytest.param("spark", marks=pytest.mark.spark)])
def start(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[..., Play]]:
    spark: SparkSession | None = request.getfixturevalue("spark") if request.param == "spark" else None
    with plays(tmp_path, ManualClock, spark) as starting:
        yield starting


def test_added_computation_gets_later_records(start: Callable[..., Play]) -> None:
    play = start(tallies("first"))
    play.inject("s", rows(1, 2))

    update = play.update(tallies("first", "other"))
    play.inject("s", rows(3))
    play.settle()

    assert (update.change.added, update.change.removed, update.change.changed) == (("other",), (), ())
    assert (counts(play, "first"), counts(play, "other")) == ({"k": 3}, {"k": 1})


def test_added_consumer_gets_pending_productions(start: Callable[..., Play]) -> None:
    """The productions of the last superstep are delivered as after a restart."""
    play = start(tallies("first", "other"))
    play.inject("s", rows(1, 2))
    play.update(tallies("first", "other", "second"))
    play.settle()
    assert counts(play, "second") == {"k": 2}

    play.inject("s", rows(3, 4))
    play.update(tallies("first", "other", "second", by={"second": 10}))
    play.settle()
    assert counts(play, "second") == {"k": 22}


def test_replaced_computation_keeps_its_rows(
    start: Callable[..., Play],
) -> None:
    """The next record runs the new code."""
    play = start(tallies("first"))
    play.inject("s", rows(1))

    update = play.update(tallies("first", by={"first": 1_000}))
    play.inject("s", rows(1, 2))

    assert update.change.changed == ("first",)
    assert counts(play, "first") == {"k": 1_001}
    play.advance("s", 11 * SECOND)
    assert counts(play, "first") == {"k": 1_101}


def test_retired_computation_stays_readable_and_can_return(
    start: Callable[..., Play],
) -> None:
    """It misses the records in between, and its timers fire on its return."""
    play = start(tallies("first", "other"))
    play.inject("s", rows(1))

    update = play.update(tallies("first", retire=("other",)))
    play.inject("s", rows(2, 30))
    play.settle()
    assert update.change.removed == ("other",)
    assert (counts(play, "first"), counts(play, "other")) == ({"k": 203}, {"k": 1})

    play.update(tallies("first", "other"))
    play.settle()
    assert counts(play, "other") == {"k": 101}
    play.inject("s", rows(1, 31))
    assert counts(play, "other") == {"k": 102}


def test_retired_computation_may_stay_away_over_restarts(start: Callable[..., Play]) -> None:
    """A restart must still declare it retired."""
    play = start(tallies("first", "other"))
    play.inject("s", rows(1))
    play.update(tallies("first", retire=("other",)))
    play.restart()
    play.inject("s", rows(2))

    play.make = tallies("first")
    with pytest.raises(InvalidError, match=r"retire= to keep"):
        play.restart()
    play.make = tallies("first", "other")
    play.start()
    assert (counts(play, "first"), counts(play, "other")) == ({"k": 2}, {"k": 1})


def test_computation_is_renamed_or_dropped(start: Callable[..., Play]) -> None:
    play = start(tallies("first", "other", "more"))
    play.inject("s", rows(1))

    def renamed() -> EnginePipeline:
        pipeline = EnginePipeline("p", drop=("more",))
        stream = pipeline.inject("s", key="k", at="t", id="id", watermark=Monotone())
        stream.apply(Tally(), name="first")
        stream.apply(Tally(), name="another", renamed_from="other")
        return pipeline

    play.update(renamed)
    play.inject("s", rows(1, 2))
    assert [counts(play, name) for name in ("first", "another", "other", "more")] == [
        {"k": 2},
        {"k": 2},
        {},
        {},
    ]


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        (tallies("first"), "the pipeline no longer has"),
        (tallies("first", "other", retire=("other",)), "that it retires"),
        (tallies(), "has rows of a computation"),
        (tallies("first", "other", "second", sinks={"a": Path("x"), "b": Path("x")}), "same destination"),
        (lambda: EnginePipeline("q"), "no injector"),
    ],
)
def test_refused_update_leaves_the_run_unchanged(start: Callable[..., Play], changed: Make, why: str) -> None:
    """The old pipeline continues under the same leases."""
    play = start(tallies("first", "other"))
    play.inject("s", rows(1))
    version = play.store.committer.snapshot.version

    with pytest.raises(InvalidError, match=why):
        play.run.update(changed())

    assert play.store.committer.refresh().version == version
    play.inject("s", rows(2))
    assert (counts(play, "first"), counts(play, "other")) == ({"k": 2}, {"k": 2})


def test_sinks_come_and_go_without_repeating_productions(
    start: Callable[..., Play], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An added sink begins with the next superstep, one that comes back too, with a warning; the others miss nothing."""
    first, second = tmp_path / "first", tmp_path / "second"
    play = start(tallies("first", sinks={"a": first}))
    play.inject("s", rows(1))
    play.inject("s", rows(2))

    update = play.update(tallies("first", sinks={"a": first, "b": second}))
    play.inject("s", rows(3))
    play.update(tallies("first", sinks={"b": second}))
    play.inject("s", rows(4))
    play.inject("s", rows(5))
    play.update(tallies("first", sinks={"a": first, "b": second}))
    play.inject("s", rows(6))
    play.settle()
    # Sinks write a superstep while the next one runs, and the last one when the run stops.
    play.run.stop()

    assert (update.change.sinks_added, update.change.sinks_removed) == (("b",), ())
    assert written(second) == [3, 4, 5, 6]
    assert written(first) == [1, 2, 3, 6]
    told = [record.message for record in caplog.records if "lacks the results" in record.message]
    assert [f"sink=`a` path=`{first}` supersteps=`2`" in message for message in told] == [True]


def test_sink_with_another_name_repeats_nothing(start: Callable[..., Play], tmp_path: Path) -> None:
    """The last superstep, which might have been lost in a crash, is in the table under the former name."""
    play = start(tallies("first", sinks={"a": tmp_path / "out"}))
    play.inject("s", rows(1))
    play.inject("s", rows(2))

    play.update(tallies("first", sinks={"b": tmp_path / "out"}))
    play.inject("s", rows(3))
    play.settle()
    play.run.stop()

    assert written(tmp_path / "out") == [1, 2, 3]


def test_update_keeps_the_watermark(start: Callable[..., Play]) -> None:
    """A record before it is late."""
    play = start(tallies("first"))
    play.inject("s", rows(1))
    play.advance("s", 5 * SECOND)

    play.update(tallies("first", "other"))

    assert (play.watermark("first"), play.watermark("other")) == (5 * SECOND, 5 * SECOND)
    with pytest.raises(InvalidError, match="no such computation"):
        play.watermark("nothing")
