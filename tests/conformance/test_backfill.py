"""A computation that joins a pipeline with a backfill has, in the end, what it would have had from the start.

On both runners; what has to come of the records is worked out here in plain Python.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

import millpond as mp
from millpond.statestore.failpoint import listening
from millpond.testing.fixtures.determinism import ManualClock
from tests.fixtures.both_runners import Play, plays

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SECOND: Final = 1_000_000
HISTORY: Final = 11
ROWS: Final = [
    {
        "k": "ab"[number % 3 % 2],
        "at": 1_700_000_000 * SECOND + number * 3 * SECOND,
        "id": f"r{number}",
        "n": number,
    }
    for number in range(2 * HISTORY)
]


class Count(mp.Computation):
    """Counts a key's records."""

    def process_record(self, context: mp.Context, record: mp.Record) -> None:
        """Add one."""
        context.state.set(context.state.get(0) + 1)


class Order(mp.Computation):
    """Keeps the numbers of a key's records in the order in which they are given, and whether any was late."""

    def process_record(self, context: mp.Context, record: mp.Record) -> None:
        """Append the number."""
        numbers, late = context.state.get([[], False])
        context.state.set([[*numbers, record.value["n"]], late or record.late])


class Kept(mp.Computation):
    """Keeps what each window of a key showed."""

    def process_record(self, context: mp.Context, record: mp.Record) -> None:
        """Append the start and the count."""
        pane = record.value
        context.state.set(sorted([*context.state.get([]), [pane["window"][0], pane["value"]]]))


def pipeline(joins: bool, backfill: Any = None, *, ids: bool = False) -> mp.Pipeline:
    """Counts from the start; with ``joins`` also a count, an order and windows that are kept."""
    made = mp.Pipeline("p")
    events = made.inject(
        "events", key="k", at="at", id="id" if ids else None, watermark=mp.BoundedDisorder("2s")
    )
    events.apply(Count(), name="old")
    if joins:
        events.apply(Count(), name="new", backfill=backfill)
        events.apply(Order(), name="order", backfill=backfill)
        windows = events.window(mp.FixedWindows("10s")).combine(mp.Count(), name="windows", backfill=backfill)
        windows.apply(Kept(), name="kept")
    return made


def expected_windows(key: str, until: int) -> list[list[int]]:
    """The windows of a key that end at or before a time, with their counts."""
    counts = Counter(row["at"] // (10 * SECOND) * 10 * SECOND for row in ROWS if row["k"] == key)
    return [[start, count] for start, count in sorted(counts.items()) if start + 10 * SECOND <= until]


@pytest.fixture(params=["local", pytest.param("spark", marks=pytest.mark.spark)])
def runner_name(request: pytest.FixtureRequest) -> str:
    """Which runner."""
    return str(request.param)


@pytest.fixture
def start(request: pytest.FixtureRequest, runner_name: str, tmp_path: Path) -> Iterator[Callable[..., Play]]:
    """Starts plays on one runner."""
    spark = request.getfixturevalue("spark") if runner_name == "spark" else None
    with plays(tmp_path, ManualClock, spark) as starting:
        yield starting


def joined(start: Callable[..., Play], backfill: Any, *, ids: bool = False) -> Play:
    """A play in which eleven records came before the new computations joined."""
    play = start(lambda: pipeline(False, ids=ids))
    play.inject("events", ROWS[:HISTORY])
    play.settle()
    play.make = lambda: pipeline(True, backfill, ids=ids)
    play.restart()
    play.settle()
    return play


def go_on(play: Play) -> None:
    """Start again, and do what is due."""
    play.restart()
    play.settle()


def check_whole(play: Play) -> None:
    """All records count once, in their order, and none was late."""
    counts = Counter(row["k"] for row in ROWS)
    assert play.states("old") == play.states("new") == {key: str(count) for key, count in counts.items()}
    numbers = {key: [row["n"] for row in ROWS if row["k"] == key] for key in counts}
    assert play.states("order") == {
        key: f"[[{','.join(map(str, own))}],false]" for key, own in numbers.items()
    }
    kept = play.states("kept")
    until = ROWS[-1]["at"] - 2 * SECOND
    assert {key: json.loads(text) for key, text in kept.items()} == {
        key: expected_windows(key, until) for key in counts
    }


def test_history_and_then_what_comes_is_what_would_have_come_from_the_start(
    start: Callable[..., Play],
) -> None:
    """Rows in any order are given in that of their times."""
    play = joined(start, list(reversed(ROWS[:HISTORY])))
    assert sum(map(int, play.states("new").values())) == HISTORY

    for row in ROWS[HISTORY:]:
        play.inject("events", [row])
        play.settle()

    check_whole(play)


def test_history_is_not_given_again_by_the_next_run(start: Callable[..., Play]) -> None:
    """Though the declaration stays in the code."""
    play = joined(start, ROWS[:HISTORY])
    for _ in range(2):
        play.restart()
        play.settle()
    play.inject("events", ROWS[HISTORY:])
    play.settle()

    check_whole(play)


class Died(BaseException):
    """The process died here."""


@pytest.mark.parametrize("place", ["lease.fenced", "superstep.before_commit", "superstep.committed"])
def test_a_driver_that_dies_while_it_gives_history_gives_it_once(
    start: Callable[..., Play], place: str
) -> None:
    """Before anything of it is committed, and after."""
    play = start(lambda: pipeline(False))
    play.inject("events", ROWS[:HISTORY])
    play.settle()
    play.make = lambda: pipeline(True, ROWS[:HISTORY])
    reached = Counter[str]()

    def die(name: str) -> None:
        reached[name] += 1
        # The first fence is that of the intervals which are there already.
        if name == place and reached[name] == 2:
            raise Died(name)

    with pytest.raises(Died), listening(die):
        go_on(play)
    go_on(play)
    play.inject("events", ROWS[HISTORY:])
    play.settle()

    check_whole(play)


def test_a_record_that_is_in_history_and_comes_again_counts_once(start: Callable[..., Play]) -> None:
    """By its id: 22 records of history overlap 11 that come afterwards."""
    play = joined(start, ROWS, ids=True)
    play.inject("events", ROWS[HISTORY:])
    play.settle()

    check_whole(play)


def test_only_the_computation_that_joins_gets_the_history(start: Callable[..., Play]) -> None:
    """And the watermark of the stream stays where it was."""
    play = joined(start, ROWS)

    assert sum(map(int, play.states("old").values())) == HISTORY
    assert sum(map(int, play.states("new").values())) == len(ROWS)
    assert play.watermark("old") == ROWS[HISTORY - 1]["at"] - 2 * SECOND
    assert play.watermark("new") == play.watermark("old")


def test_a_computation_that_has_run_takes_no_backfill(start: Callable[..., Play]) -> None:
    """It would count twice what it has."""
    play = start(lambda: pipeline(True))
    play.inject("events", ROWS[:HISTORY])
    play.settle()
    play.make = lambda: pipeline(True, ROWS)

    with pytest.raises(mp.InvalidError, match="has run, or was loaded, without its backfill"):
        play.restart()

    play.make = lambda: pipeline(True)
    play.start()
    assert play.states("new") == play.states("old")


def test_the_input_of_start_is_no_history(start: Callable[..., Play]) -> None:
    """Nothing says what came of it."""
    play = start(lambda: pipeline(False))
    play.inject("events", ROWS[:HISTORY])
    play.make = lambda: pipeline(True, "input")

    with pytest.raises(mp.InvalidError, match='backfill="input"'):
        play.restart()

    play.make = lambda: pipeline(False)
    play.start()


@pytest.mark.spark
def test_a_bounded_frame_that_was_consumed_is_the_history(spark: SparkSession, tmp_path: Path) -> None:
    """Without being given twice; and one that was not is none."""
    for name, first in (("later", False), ("at once", True)):
        runner = mp.SparkRunner(tmp_path / name, spark=spark, intervals=2, progress=False)
        frame = spark.createDataFrame(ROWS)
        if not first:
            runner.run(pipeline(False), {"events": frame}, finish=False)
        runner.run(pipeline(True, "input"), {"events": frame}, finish=False)

        with mp.Store.open(tmp_path / name, read_only=True) as store:
            counts = {
                computation: {
                    row["key"]: row["state"] for row in store.rows_view(computation).to_arrow().to_pylist()
                }
                for computation in ("old", "new")
            }
        assert (
            counts["old"]
            == counts["new"]
            == {key: str(count) for key, count in Counter(row["k"] for row in ROWS).items()}
        )


@pytest.mark.spark
def test_a_frame_may_be_history(spark: SparkSession, tmp_path: Path) -> None:
    """Or the path of a Parquet file."""
    frame = spark.createDataFrame(ROWS[:HISTORY])
    frame.write.parquet(str(tmp_path / "rows"))
    for number, backfill in enumerate((frame, str(tmp_path / "rows"))):
        with plays(tmp_path / str(number), ManualClock, spark) as starting:
            play = joined(starting, backfill)
            play.inject("events", ROWS[HISTORY:])
            play.settle()
            check_whole(play)
