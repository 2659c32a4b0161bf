"""Backfills that give a computation joining a pipeline its history, on both runners."""

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

pytestmark = pytest.mark.slow

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
    def process_record(self, context: mp.Context, record: mp.Record) -> None:
        context.state.set(context.state.get(0) + 1)


class Order(mp.Computation):
    """Keeps the numbers of a key's records in arrival order, and whether any was late."""

    def process_record(self, context: mp.Context, record: mp.Record) -> None:
        numbers, late = context.state.get([[], False])
        context.state.set([[*numbers, record.value["n"]], late or record.late])


class Kept(mp.Computation):
    """Keeps the panes of each window."""

    def process_record(self, context: mp.Context, record: mp.Record) -> None:
        pane = record.value
        context.state.set(sorted([*context.state.get([]), [pane["window"][0], pane["value"]]]))


def pipeline(joins: bool, backfill: Any = None, *, ids: bool = False) -> mp.Pipeline:
    """Counts from the start; with ``joins`` also a count, an order and windows that are backfilled."""
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
    counts = Counter(row["at"] // (10 * SECOND) * 10 * SECOND for row in ROWS if row["k"] == key)
    return [[start, count] for start, count in sorted(counts.items()) if start + 10 * SECOND <= until]


@pytest.fixture(params=["local", pytest.param("spark", marks=pytest.mark.spark)])
def runner_name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def start(request: pytest.FixtureRequest, runner_name: str, tmp_path: Path) -> Iterator[Callable[..., Play]]:
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
    play.restart()
    play.settle()


def check_whole(play: Play) -> None:
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


def test_history_and_later_records_equal_a_run_from_the_start(
    start: Callable[..., Play],
) -> None:
    """The rows of the history are sorted by time."""
    play = joined(start, list(reversed(ROWS[:HISTORY])))
    assert sum(map(int, play.states("new").values())) == HISTORY

    for row in ROWS[HISTORY:]:
        play.inject("events", [row])
        play.settle()

    check_whole(play)


def test_next_run_does_not_repeat_the_history(start: Callable[..., Play]) -> None:
    """The declaration stays in the code."""
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
def test_driver_that_dies_during_a_backfill_gives_it_once(start: Callable[..., Play], place: str) -> None:
    play = start(lambda: pipeline(False))
    play.inject("events", ROWS[:HISTORY])
    play.settle()
    play.make = lambda: pipeline(True, ROWS[:HISTORY])
    reached = Counter[str]()

    def die(name: str) -> None:
        reached[name] += 1
        # Fence existing intervals first.
        if name == place and reached[name] == 2:
            raise Died(name)

    with pytest.raises(Died), listening(die):
        go_on(play)
    go_on(play)
    play.inject("events", ROWS[HISTORY:])
    play.settle()

    check_whole(play)


def test_record_in_history_and_input_counts_once(start: Callable[..., Play]) -> None:
    """Record ids match: 22 records of history overlap 11 later ones."""
    play = joined(start, ROWS, ids=True)
    play.inject("events", ROWS[HISTORY:])
    play.settle()

    check_whole(play)


def test_only_the_joining_computation_gets_the_history(start: Callable[..., Play]) -> None:
    """The stream's watermark does not move."""
    play = joined(start, ROWS)

    assert sum(map(int, play.states("old").values())) == HISTORY
    assert sum(map(int, play.states("new").values())) == len(ROWS)
    assert play.watermark("old") == ROWS[HISTORY - 1]["at"] - 2 * SECOND
    assert play.watermark("new") == play.watermark("old")


def test_computation_that_has_run_takes_no_backfill(start: Callable[..., Play]) -> None:
    """Its records would count twice."""
    play = start(lambda: pipeline(True))
    play.inject("events", ROWS[:HISTORY])
    play.settle()
    play.make = lambda: pipeline(True, ROWS)

    with pytest.raises(mp.InvalidError, match="has run, or was loaded, without its backfill"):
        play.restart()

    play.make = lambda: pipeline(True)
    play.start()
    assert play.states("new") == play.states("old")


def test_input_of_start_is_no_history(start: Callable[..., Play]) -> None:
    """Millpond does not know which of its rows were consumed."""
    play = start(lambda: pipeline(False))
    play.inject("events", ROWS[:HISTORY])
    play.make = lambda: pipeline(True, "input")

    with pytest.raises(mp.InvalidError, match='backfill="input"'):
        play.restart()

    play.make = lambda: pipeline(False)
    play.start()


@pytest.mark.spark
def test_consumed_bounded_frame_is_the_history(spark: SparkSession, tmp_path: Path) -> None:
    """A bounded frame that was not consumed is no history."""
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
def test_history_may_be_a_frame_or_a_parquet_file(spark: SparkSession, tmp_path: Path) -> None:
    frame = spark.createDataFrame(ROWS[:HISTORY])
    frame.write.parquet(str(tmp_path / "rows"))
    for number, backfill in enumerate((frame, str(tmp_path / "rows"))):
        with plays(tmp_path / str(number), ManualClock, spark) as starting:
            play = joined(starting, backfill)
            play.inject("events", ROWS[HISTORY:])
            play.settle()
            check_whole(play)
