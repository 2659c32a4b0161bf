"""Code that raises, hangs or is nondeterministic harms its own record only, on both runners."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
import pytest

from millpond.executor.computation.computation import Computation
from millpond.executor.computation.context import Context
from millpond.executor.computation.records import Record
from millpond.executor.pipeline.nodes import OnError
from millpond.executor.pipeline.pipeline import EnginePipeline
from millpond.statestore.errors import InvalidError
from millpond.statestore.system import SystemClock
from millpond.testing.fixtures.determinism import ManualClock
from tests.fixtures.both_runners import LocalPlay, Play, SparkPlay, plays

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Open = Callable[..., Play]
CALLS = itertools.count()
RETRIES = 2


class Bad(Computation):
    """Keeps and forwards its records, and fails if they demand it."""

    def process_record(self, context: Context, record: Record) -> None:
        n, does, call = record.value["n"], record.value["does"], next(CALLS)
        context.produce("out", {"n": n, "call": call})
        context.state.set([*context.state.get([]), n])
        if does == "raises":
            raise ValueError("on purpose")
        if does == "raises now and then" and call % 3:
            raise ValueError("not always")
        while does == "spins":
            pass
        if does == "sleeps":
            SystemClock().sleep_ms(600_000)
        context.produce("out", {"n": n, "call": call})


class Pairs(Computation):
    """Keeps its records: both halves of a record must come from one call."""

    def process_record(self, context: Context, record: Record) -> None:
        context.state.set([*context.state.get([]), [record.value["n"], record.value["call"]]])


def bad(on_error: OnError = "dead_letter") -> Callable[[], EnginePipeline]:
    """``in`` → ``bad`` → ``pairs``."""

    def make() -> EnginePipeline:
        pipeline = EnginePipeline("bad")
        stream = pipeline.inject("in", key="k", at="n", id="n").apply(
            Bad(), name="bad", produces="out", retries=RETRIES, on_error=on_error, user_code_timeout="200ms"
        )
        stream.apply(Pairs(), name="pairs")
        return pipeline

    return make


def rows(*does: str) -> list[dict[str, Any]]:
    records = []
    for number, action in enumerate(does):
        records.append({"k": "bad", "n": 2 * number, "does": action})
        records.append({"k": "good", "n": 2 * number + 1, "does": "nothing"})
    return records


@pytest.fixture(params=[LocalPlay, pytest.param(SparkPlay, marks=pytest.mark.spark)])
def play(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Open]:
    spark = request.getfixturevalue("spark") if request.param is SparkPlay else None
    with plays(tmp_path, ManualClock, spark) as start:
        yield start


def letters(pond: Play) -> list[dict[str, Any]]:
    dead = [orjson.loads(state) for state in pond.states("dead_letters").values()]
    return sorted(dead, key=lambda letter: str(letter["at"]))


def kept(pond: Play) -> tuple[list[int], list[int]]:
    """Return the contents of the bad and the good key, after checking each record's two halves."""
    states = {key: orjson.loads(state) for key, state in pond.states("bad").items()}
    pairs = [pair for state in pond.states("pairs").values() for pair in orjson.loads(state)]
    assert sorted(pairs) == sorted(2 * [[n, call] for n, call in {(n, call) for n, call in pairs}])
    assert sorted(n for n, _ in pairs) == sorted(2 * [*states.get("bad", []), *states.get("good", [])])
    return states.get("bad", []), states.get("good", [])


def test_record_whose_code_raises_or_hangs_becomes_a_dead_letter(play: Open) -> None:
    """The records before and after it count once."""
    pond = play(bad())
    pond.inject("in", rows("nothing", "raises", "nothing", "spins", "nothing"))
    pond.settle()

    assert kept(pond) == ([0, 4, 8], [1, 3, 5, 7, 9])
    first, second = letters(pond)
    assert "on purpose" in first["error"]
    assert "exceeds its time limit" in second["error"]
    assert (second["computation"], second["key"]) == ("bad", "bad")


def test_nondeterministic_code_has_the_effects_of_one_call(play: Open) -> None:
    pond = play(bad())
    pond.inject("in", rows(*["raises now and then"] * 6))
    pond.restart()
    pond.inject("in", rows(*["raises now and then"] * 6))
    pond.settle()
    survivors, good = kept(pond)

    assert survivors == sorted(set(survivors) & {0, 2, 4, 6, 8, 10})
    assert good == [1, 3, 5, 7, 9, 11]
    assert len(letters(pond)) == 6 - len(survivors)


def test_hanging_code_may_stop_the_pipeline(play: Open) -> None:
    """The error names computation and key, and the superstep has no effect."""
    pond = play(bad(on_error="stop"))
    with pytest.raises(InvalidError, match=r"user code failed.*`bad`.*`bad`.*exceeds its time limit"):
        pond.inject("in", rows("nothing", "spins"))

    assert pond.states("bad") == {}


@pytest.mark.spark
def test_blocking_call_in_a_task_is_interrupted(tmp_path: Path, spark: SparkSession) -> None:
    pond = SparkPlay(bad(), tmp_path, ManualClock())
    pond.spark = spark
    pond.start()
    pond.inject("in", rows("nothing", "sleeps"))
    pond.settle()

    assert kept(pond) == ([0], [1, 3])
    assert [letter["key"] for letter in letters(pond)] == ["bad"]
    pond.stop()
