"""Dead letters retried after their code was corrected: each takes effect once, on both runners."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

import millpond as mp
from millpond.executor.superstep.letter_retries import waiting_letter_requests
from millpond.testing.fixtures.determinism import ManualClock
from tests.fixtures.both_runners import LocalPlay, Play, SparkPlay, plays

SECOND = 1_000_000
Open = Callable[[Callable[[], Any]], Play]


class Tally(mp.Computation):
    """Adds up its records and sets a timer for each; some fail until the code is corrected."""

    def __init__(self, mended: str) -> None:
        self.mended = mended

    def is_mended(self) -> bool:
        """Return True once the code is corrected, in any process."""
        return Path(self.mended).exists()

    def process_record(self, context: mp.Context, record: mp.Record) -> None:
        n = record.value["n"]
        context.produce("tallied", {"n": n, "id": record.id.decode() if record.id else None})
        context.state.set(context.state.get(0) + n)
        if n % 6 == 1 and not self.is_mended():
            raise ValueError(f"{n} is bad")
        context.set_timer(record.at + 5 * SECOND, tag=str(n))

    def process_timer(self, context: mp.Context, timer: mp.Timer) -> None:
        context.produce("tallied", {"rung": timer.tag})
        if timer.tag.endswith("2") and not self.is_mended():
            raise ValueError(f"timer {timer.tag} is bad")


class Kept(mp.Computation):
    """Keeps its inputs, sorted."""

    def process_record(self, context: mp.Context, record: mp.Record) -> None:
        kept = [*context.state.get([]), [orjson.dumps(record.value).decode(), record.at]]
        context.state.set(sorted(kept))


def tally(mended: Path, **options: Any) -> Callable[[], mp.Pipeline]:
    """``in`` → ``tally`` → ``kept``, with weak productions or strong ones."""

    def make() -> mp.Pipeline:
        pipeline = mp.Pipeline("p")
        stream = pipeline.inject("in", key="k", at="at", id="id")
        produced = stream.apply(Tally(str(mended)), name="tally", produces="tallied", **options)
        produced.apply(Kept(), name="kept")
        return pipeline

    return make


def rows(count: int, first: int = 0) -> list[dict[str, Any]]:
    numbers = range(first, first + count)
    return [{"k": f"k{n % 5}", "at": n * SECOND, "id": f"id{n}", "n": n} for n in numbers]


@pytest.fixture(params=[LocalPlay, pytest.param(SparkPlay, marks=pytest.mark.spark)])
def play(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[..., Play]]:
    spark = request.getfixturevalue("spark") if request.param is SparkPlay else None
    with plays(tmp_path, ManualClock, spark) as start:
        yield start


def ask(pond: Play, action: Callable[..., int] = mp.retry_dead_letters, **selection: Any) -> int:
    """Request a retry as a tool does: through a writer that is gone when the pipeline honours it."""
    with pond._open_store() as asking:
        return action(asking, **selection)


def letters(pond: Play) -> list[dict[str, Any]]:
    return [orjson.loads(state) for state in pond.states("dead_letters").values()]


def run_out(pond: Play) -> dict[str, dict[str, str]]:
    pond.settle()
    pond.advance("in", 1_000 * SECOND)
    pond.settle()
    return {name: pond.states(name) for name in ("tally", "kept")}


@pytest.fixture(params=[LocalPlay, pytest.param(SparkPlay, marks=[pytest.mark.spark, pytest.mark.spark_all])])
def sampled(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[..., Play]]:
    """The same pipelines, on Spark only in ``make test-spark``: these options share code between runners."""
    spark = request.getfixturevalue("spark") if request.param is SparkPlay else None
    with plays(tmp_path, ManualClock, spark) as start:
        yield start


@pytest.mark.parametrize("options", [{}, {"productions": "weak"}], ids=["plain", "weak productions"])
def test_retried_letters_give_the_state_of_correct_code(
    play: Callable[..., Play], tmp_path: Path, options: dict[str, Any]
) -> None:
    """Each counts once with its time, value and id, however late, and no letter remains."""
    assert_states_of_right_code(play, tmp_path, options)


@pytest.mark.parametrize(
    "options",
    [{"on_late": "drop"}, {"on_error": "dead_letter", "retries": 0}],
    ids=["late records dropped", "one attempt"],
)
def test_retry_ignores_the_computations_options(
    sampled: Callable[..., Play], tmp_path: Path, options: dict[str, Any]
) -> None:
    """Late records are not dropped, and code already tried is tried again."""
    assert_states_of_right_code(sampled, tmp_path, options)


def assert_states_of_right_code(play: Callable[..., Play], tmp_path: Path, options: dict[str, Any]) -> None:
    mended = tmp_path / "mended"
    pond = play(tally(mended, **options), within="pond")
    for batch in range(3):
        pond.inject("in", rows(20, 20 * batch))
    run_out(pond)
    assert len(letters(pond)) == 10 + 6

    mended.touch()
    assert ask(pond) == 16
    pond.restart()
    repaired = run_out(pond)
    right = play(tally(mended, **options), within="right")
    right.inject("in", rows(60))

    assert repaired == run_out(right)
    assert letters(pond) == []
    assert waiting_letter_requests(pond.store.snapshot().txns) == ()
    assert pond.run.summary().run.by_computation["tally"]["retried"] == 16


def test_running_pipeline_honours_a_request(play: Callable[..., Play], tmp_path: Path) -> None:
    """Only the named letters are retried; a known id remains a duplicate."""
    mended = tmp_path / "mended"
    pond = play(tally(mended), within="pond")
    pond.inject("in", rows(20))
    mended.touch()
    assert ask(pond, key="k1") == 1
    assert ask(pond, computation="tally", error="13 is bad") == 1
    pond.inject("in", rows(20))
    pond.clock.sleep_ms(1_000)
    pond.settle()

    assert sorted(letter["key"] for letter in letters(pond)) == ["k2", "k4"]
    assert {key: int(state) for key, state in pond.states("tally").items()} == {
        "k0": 0 + 5 + 10 + 15,
        "k1": 1 + 6 + 11 + 16,
        "k2": 2 + 12 + 17,
        "k3": 3 + 8 + 13 + 18,
        "k4": 4 + 9 + 14,
    }


def test_letter_that_fails_again_is_a_new_one(play: Callable[..., Play], tmp_path: Path) -> None:
    """Each letter is tried once, and neither ``on_error`` nor the limit stops the run."""
    mended = tmp_path / "mended"
    pond = play(tally(mended), within="pond")
    pond.inject("in", rows(20))
    pond.settle()
    before = pond.states("tally")
    first = pond.states("dead_letters")
    pond.make = tally(mended, on_error="stop")
    for tries in (1, 2):
        assert ask(pond) == 6
        pond.restart()
        pond.settle()

        assert {letter["retried"] for letter in letters(pond)} == {tries}
        assert waiting_letter_requests(pond.store.snapshot().txns) == ()
    assert pond.states("tally") == before
    assert pond.states("dead_letters").keys().isdisjoint(first)
    assert sorted(str(letter["id"]) for letter in letters(pond)) == sorted(
        str(orjson.loads(state)["id"]) for state in first.values()
    )


def test_dropped_letters_are_not_processed(play: Callable[..., Play], tmp_path: Path) -> None:
    pond = play(tally(tmp_path / "mended"), within="pond")
    pond.inject("in", rows(20))
    pond.settle()
    before = pond.states("tally")
    assert ask(pond, mp.drop_dead_letters, key="k3") == 1
    pond.clock.sleep_ms(1_000)
    pond.settle()
    assert sorted(letter["key"] for letter in letters(pond)) == ["k1", "k2", "k2", "k2", "k4"]

    assert ask(pond, mp.drop_dead_letters) == 5
    pond.restart()
    pond.settle()
    assert letters(pond) == []
    assert pond.states("tally") == before


class Listed(mp.Computation):
    def process_record(self, context: mp.Context, record: mp.Record) -> None:
        context.state.set(sorted([*context.state.get([]), record.value["n"]]))


def keyed(key: Any) -> Callable[[], mp.Pipeline]:
    """``in`` → ``listed``, whose keys are extracted by ``key``."""

    def make() -> mp.Pipeline:
        pipeline = mp.Pipeline("p")
        pipeline.inject("in", key=key, at="at", id="id").apply(Listed(), name="listed")
        return pipeline

    return make


def test_letters_without_a_key_get_one_from_the_corrected_extractor(play: Callable[..., Play]) -> None:
    """A record injected again before or after the retry is a duplicate."""
    pond = play(keyed("k"))
    given = [{**row, "k": None if row["n"] % 5 == 1 else row["k"]} for row in rows(20)]
    pond.inject("in", given)
    assert {letter["error"] for letter in letters(pond)} == {"the key is null"}

    pond.make = keyed(lambda row: row["k"] or "none")
    pond.restart()
    pond.inject("in", given[:7])
    assert pond.states("listed")["none"] == "[1,6]"
    assert ask(pond) == 4
    pond.clock.sleep_ms(1_000)
    pond.settle()
    pond.inject("in", given)

    assert letters(pond) == []
    assert pond.states("listed")["none"] == "[1,6,11,16]"
    assert pond.run.summary().run.duplicates == 5 + 2 + 20


def test_letter_behind_its_window_stays_a_letter(play: Callable[..., Play], tmp_path: Path) -> None:
    """A window that accepts late data counts it."""
    mended = tmp_path / "mended"

    class Extracted(mp.CombineFn):
        """A sum that raises for a bad value."""

        def create(self) -> int:
            return 0

        def add(self, accumulator: int, value: Any) -> int:
            if value["n"] == 7 and not Path(str(mended)).exists():
                raise ValueError("7 is bad")
            return accumulator + int(value["n"])

        def merge(self, accumulators: Any) -> int:
            return sum(accumulators)

        def extract(self, accumulator: int) -> int:
            return accumulator

    def make() -> mp.Pipeline:
        pipeline = mp.Pipeline("p")
        windowed = pipeline.inject("in", key="k", at="at", id="id").window(
            mp.FixedWindows("10s"), allowed_lateness="1h"
        )
        windowed.combine(Extracted(), name="sums")
        return pipeline

    pond = play(make)
    pond.inject("in", [{**row, "k": "k"} for row in rows(10)])
    assert [letter["key"] for letter in letters(pond)] == ["k"]
    pond.advance("in", 10_000 * SECOND)
    mended.touch()
    ask(pond)
    pond.restart()
    pond.settle()

    (letter,) = letters(pond)
    assert "too late" in letter["error"]
    assert letter["retried"] == 1
