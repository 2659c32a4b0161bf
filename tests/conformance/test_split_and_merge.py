"""Intervals split and merged while a pipeline runs, on both runners."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from millpond.executor.computation.computation import Computation
from millpond.executor.local.run import LocalRun
from millpond.executor.ownership.cuts import Cut
from millpond.executor.pipeline.pipeline import EnginePipeline
from millpond.executor.spark.run import SparkRun
from millpond.executor.superstep.coordinator import Coordinator
from millpond.statestore.interval import Interval
from millpond.testing.fixtures.determinism import ManualClock
from tests.fixtures.both_runners import Play, plays

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SECOND = 1_000_000
KEYS = [f"{letter}{number}" for letter in "abwx" for number in range(4)]


class First(Computation):
    """Counts a key's records, forwards each to the key's letter, and sets a timer for each."""

    def process_record(self, context: Any, record: Any) -> None:
        context.state.set(context.state.get(0) + 1)
        context.produce("letters", {}, key=record.key[0])
        context.set_timer(record.at + 5 * SECOND, tag=str(record.at))

    def process_timer(self, context: Any, timer: Any) -> None:
        context.produce("letters", {"tag": timer.tag}, key=context.key[1])


class Second(Computation):
    """Counts the records of a letter or a digit."""

    def process_record(self, context: Any, record: Any) -> None:
        context.state.set(context.state.get(0) + 1)


def pipeline() -> EnginePipeline:
    """Two stages, of which both can be cut."""
    made = EnginePipeline("p")
    made.inject("in", key="k", at="at", id="id")
    made.add(First(), name="first", subscribes={"in": None}, produces=("letters",))
    made.stream("letters").apply(Second(), name="second")
    return made


@pytest.fixture(params=["local", pytest.param("spark", marks=pytest.mark.spark)])
def start(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[..., Play]]:
    spark: SparkSession | None = request.getfixturevalue("spark") if request.param == "spark" else None
    with plays(tmp_path, ManualClock, spark) as starting:
        yield starting


def coordinator_of(play: Play) -> Coordinator:
    run = play.run
    if isinstance(run, LocalRun):
        return run._worker.coordinator
    assert isinstance(run, SparkRun)
    return run._coordinator


def rows(batch: int) -> list[dict[str, Any]]:
    return [{"k": key, "at": batch * SECOND, "id": f"{batch}/{key}"} for key in KEYS]


def states(play: Play, computation: str) -> dict[str, int]:
    return {key: json.loads(state) for key, state in play.states(computation).items()}


def split(play: Play, computation: str, *keys: str) -> None:
    coordinator = coordinator_of(play)
    interval = next(one for one in coordinator.intervals_of(computation) if one.contains(keys[0]))
    coordinator.recut(Cut.split(interval, keys))


def merge(play: Play, computation: str) -> None:
    coordinator = coordinator_of(play)
    coordinator.recut(Cut.merge(coordinator.intervals_of(computation)))


def test_records_and_timers_count_once_through_splits_and_merges(start: Callable[..., Play]) -> None:
    """With a restart, duplicates, and productions in flight at each cut."""
    play = start(pipeline)
    play.inject("in", rows(0))
    split(play, "first", "a2")
    play.inject("in", rows(1))
    split(play, "second", "x")
    split(play, "first", "x1", "x3")
    play.inject("in", rows(1))
    play.restart()
    play.inject("in", rows(2))
    merge(play, "first")
    play.inject("in", rows(2))
    play.inject("in", rows(3))
    merge(play, "second")
    play.settle()
    assert states(play, "first") == dict.fromkeys(KEYS, 4)

    play.advance("in", 1_000 * SECOND)
    play.settle()

    expected = Counter(dict.fromkeys("abwx", 4 * 4)) + Counter(dict.fromkeys("0123", 4 * 4))
    assert states(play, "second") == dict(expected)
    assert coordinator_of(play).intervals_of("first") == (Interval("first"),)
