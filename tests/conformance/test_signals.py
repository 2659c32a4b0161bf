"""Signals from outside: durable and exactly once, on both runners (I1, I2)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
import pytest

import millpond as mp
from millpond.statestore.failpoint import listening
from millpond.testing.fixtures.determinism import ManualClock
from tests.fixtures.both_runners import LocalPlay, Play, SparkPlay, plays

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Open = Callable[..., Play]
WINDOW = (0, 10)
CRASHES = [
    "superstep.planned",
    "superstep.before_commit",
    "commit.before_put",
    "commit.after_put",
    "commit.before_apply",
    "commit.done",
    "superstep.committed",
    "superstep.applied",
]


class Panes(mp.Computation):
    """Keeps the values of the panes of a key."""

    def process_record(self, context: mp.Context, record: mp.Record) -> None:
        context.state.set([*context.state.get([]), record.value["value"]])


class Crash(BaseException):
    """The end of the process."""


def scores(**options: Any) -> Callable[[], mp.Pipeline]:
    """Sums of windows of ten microseconds, shown by signals, and a record of their panes."""

    def make() -> mp.Pipeline:
        pipeline = mp.Pipeline("scores")
        stream = pipeline.inject(
            "in", key="team", at="at", at_unit="us", watermark=mp.ManualWatermark(), **options
        )
        trigger = mp.Repeatedly(mp.AfterSignal("show"))
        sums = stream.window(mp.FixedWindows("10us"), trigger=trigger).combine(mp.Sum("points"), name="sums")
        sums.apply(Panes(), name="panes")
        return pipeline

    return make


@pytest.fixture(params=[LocalPlay, pytest.param(SparkPlay, marks=pytest.mark.spark)])
def play(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Open]:
    spark: SparkSession | None = request.getfixturevalue("spark") if request.param is SparkPlay else None
    with plays(tmp_path, ManualClock, spark) as start:
        yield start


def score(team: str, at: int, points: int, **more: Any) -> dict[str, Any]:
    return {"team": team, "at": at, "points": points, **more}


def shown(pond: Play) -> dict[str, list[int]]:
    return {key: orjson.loads(state) for key, state in pond.states("panes").items()}


def missed(pond: Play) -> int:
    return pond.run.summary().totals.by_computation["sums"].get("signals_missed", 0)


def test_signal_shows_the_windows_of_its_key(play: Open) -> None:
    """A signal for another key, window or name is counted as stray."""
    pond = play(scores())
    pond.inject("in", [score("red", 1, 3), score("blue", 2, 4), score("red", 11, 5)])
    pond.settle()
    pond.signal("show", "red", WINDOW)
    assert shown(pond) == {"red": [3]}
    pond.signal("show", "blue")
    pond.signal("show", "green", WINDOW)

    assert shown(pond) == {"red": [3], "blue": [4]}
    assert missed(pond) == 1
    with pytest.raises(mp.InvalidError, match="no windowed step waits for this signal"):
        pond.signal("hide", "red")
    with pytest.raises(mp.InvalidError, match="a window must be its start and end"):
        pond.signal("show", "red", (10, 0))


def test_signal_with_an_id_counts_once(play: Open) -> None:
    """Also after a restart."""
    pond = play(scores(id="id"))
    pond.inject("in", [score("red", 1, 3, id="a")])
    pond.signal("show", "red", WINDOW, "a")
    pond.inject("in", [score("red", 2, 4, id="b")])
    pond.signal("show", "red", WINDOW, "a")
    pond.restart()
    pond.signal("show", "red", WINDOW, "a")
    assert shown(pond) == {"red": [3]}
    pond.signal("show", "red", WINDOW, "b")

    assert shown(pond) == {"red": [3, 4]}


def test_signals_neither_hold_watermarks_nor_are_late(play: Open) -> None:
    pond = play(scores())
    pond.inject("in", [score("red", 1, 3)])
    pond.advance("in", 10)
    assert pond.watermark("sums") == 10
    pond.signal("show", "red", WINDOW)

    assert shown(pond) == {"red": [3]}
    assert pond.run.summary().totals.late == 0
    assert pond.run.summary().ended == ()


def test_signal_before_any_input_chooses_no_intervals(play: Open) -> None:
    """A signal is no sample of the keys."""
    pond = play(scores())
    pond.signal("show", "red", WINDOW)
    pond.inject("in", [score(team, 1, 1) for team in "abcdefgh"])
    pond.settle()
    for team in "abcdefgh":
        pond.signal("show", team)

    assert shown(pond) == {team: [1] for team in "abcdefgh"}


@pytest.mark.parametrize("name", CRASHES)
def test_crash_neither_loses_nor_repeats_a_signal(name: str, tmp_path: Path) -> None:
    def crash(reached: str) -> None:
        if reached == name:
            raise Crash(name)

    with plays(tmp_path, ManualClock) as start:
        pond = start(scores())
        pond.inject("in", [score("red", 1, 3)])
        pond.settle()
        with pytest.raises(Crash), listening(crash):
            pond.signal("show", "red", WINDOW, "a")
        pond.restart()
        pond.settle()
        pond.signal("show", "red", WINDOW, "a")
        assert shown(pond) == {"red": [3]}
        pond.inject("in", [score("red", 2, 4)])
        pond.signal("show", "red", WINDOW, "a")

        assert shown(pond) == {"red": [3]}
