"""State versions: rows of former code are upgraded when they are read."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
import pytest

import millpond as mp
from millpond.testing.fixtures.determinism import ManualClock
from tests.fixtures.both_runners import Play, plays

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Open = Callable[[Callable[[], Any]], Play]


class Count(mp.Computation):
    """The first code: a number."""

    def process_record(self, context: mp.Context, record: mp.Record) -> None:
        count = context.state.get(0)
        if record.value["does"] == "count":
            context.state.set(count + 1)


class Named(Count):
    """The second code: a number by its name."""

    state_version = 1

    def upgrade_state(self, state: Any, version: int) -> Any:
        if state == 13:
            raise ArithmeticError("thirteen")
        return {"count": state}

    def process_record(self, context: mp.Context, record: mp.Record) -> None:
        count = context.state.get({"count": 0})["count"]
        if record.value["does"] == "count":
            context.state.set({"count": count + 1})


class Packed(Named):
    """The third code: the same in MessagePack."""

    state_version = 2
    codec = mp.MsgpackCodec()
    codecs = {0: mp.JsonCodec(), 1: mp.JsonCodec()}  # noqa: RUF012 - as users write it

    def upgrade_state(self, state: Any, version: int) -> Any:
        return super().upgrade_state(state, version) if version == 0 else state


def pipeline(code: mp.Computation, name: str = "counts", **options: Any) -> Callable[[], mp.Pipeline]:
    """``in`` → ``counts``; records have no ids, so reading does not change a row."""

    def make() -> mp.Pipeline:
        pipeline = mp.Pipeline("p")
        pipeline.inject("in", key="k", at="t").apply(code, name=name, **options)
        return pipeline

    return make


def rows(*keys: str, does: str = "count", at: int = 1) -> list[dict[str, Any]]:
    return [{"k": key, "t": at, "does": does} for key in keys]


def stored(play: Play, name: str = "counts") -> dict[str, tuple[Any, int]]:
    table = play.store.rows_view(name).to_arrow().to_pylist()
    return {
        row["key"]: (
            orjson.loads(row["state"])
            if row["state"] is not None
            else mp.MsgpackCodec().decode(row["state_bytes"]),
            row["state_version"],
        )
        for row in table
    }


@pytest.fixture(params=["local", pytest.param("spark", marks=pytest.mark.spark)])
def play(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Open]:
    spark = request.getfixturevalue("spark") if request.param == "spark" else None
    with plays(tmp_path, ManualClock, spark) as start:
        yield start


def test_rows_are_upgraded_when_written(play: Open) -> None:
    """A row that is only read keeps its version on disk."""
    run = play(pipeline(Count()))
    run.inject("in", rows("a", "b", "c"))
    run.make = pipeline(Named())
    run.restart()
    run.inject("in", [*rows("a", at=2), *rows("b", does="look", at=2)])

    assert stored(run) == {"a": ({"count": 2}, 1), "b": (1, 0), "c": (1, 0)}
    run.inject("in", rows("b", at=3))
    assert stored(run)["b"] == ({"count": 2}, 1)


def test_upgrade_may_skip_versions_and_change_codec(play: Open) -> None:
    """Each row is decoded by the codec that wrote it."""
    run = play(pipeline(Count()))
    run.inject("in", rows("a", "b"))
    run.make = pipeline(Named())
    run.restart()
    run.inject("in", rows("b", "c", at=2))
    run.make = pipeline(Packed())
    run.restart()
    run.inject("in", rows("a", "b", "c", "d", at=3))

    assert stored(run) == {
        "a": ({"count": 2}, 2),
        "b": ({"count": 3}, 2),
        "c": ({"count": 2}, 2),
        "d": ({"count": 1}, 2),
    }


def test_older_code_is_refused(play: Open) -> None:
    run = play(pipeline(Packed()))
    run.inject("in", rows("a"))

    for code, declared in ((Named(), 1), (Count(), 0)):
        run.make = pipeline(code)
        with pytest.raises(
            mp.InvalidError,
            match=rf"newer code.*rewind.*fork.*computation=.counts. stored=.2. state_version=.{declared}.",
        ):
            run.restart()
    run.make = pipeline(Packed())
    run.store = run._open_store()
    run.start()
    run.inject("in", rows("a", at=2))
    assert stored(run) == {"a": ({"count": 2}, 2)}


def test_failing_upgrade_is_a_dead_letter(play: Open) -> None:
    """The letter names key and version, and the row stays."""
    run = play(pipeline(Count()))
    run.inject("in", rows(*["bad"] * 13, "good"))
    run.make = pipeline(Named(), retries=0)
    run.restart()
    run.inject("in", rows("bad", "good", at=2))

    (letter,) = run.store.rows_view("dead_letters").to_arrow(whole=True).to_pylist()
    error = orjson.loads(letter["productions"][0]["value"] if letter["productions"] else letter["state"])[
        "error"
    ]
    assert "cannot be upgraded" in error
    assert "key=`bad` version=`0` state_version=`1`" in error
    assert "ArithmeticError: thirteen" in error
    assert stored(run) == {"bad": (13, 0), "good": ({"count": 2}, 1)}


def test_failing_upgrade_may_stop_the_run(play: Open) -> None:
    """The error names key and version."""
    run = play(pipeline(Count()))
    run.inject("in", rows(*["bad"] * 13))
    run.make = pipeline(Named(), on_error="stop")
    run.restart()

    with pytest.raises(mp.InvalidError, match=r"key=.bad.*version=.0."):
        run.inject("in", rows("bad", at=2))


def test_rename_keeps_versions(play: Open) -> None:
    run = play(pipeline(Count()))
    run.inject("in", rows("a", "b"))
    run.make = pipeline(Named(), name="tally", renamed_from="counts")
    run.restart()
    run.inject("in", rows("a", at=2))

    assert stored(run, "tally") == {"a": ({"count": 2}, 1), "b": (1, 0)}
    run.make = pipeline(Count(), name="tally")
    with pytest.raises(mp.InvalidError, match="newer code"):
        run.restart()
    run.make = pipeline(Named(), name="tally")
    run.store = run._open_store()
    run.start()


class Panes(mp.Computation):
    def process_record(self, context: mp.Context, record: mp.Record) -> None:
        context.state.set([*context.state.get([]), record.value["value"]])


def windowed(combine: mp.CombineFn, **options: Any) -> Callable[[], mp.Pipeline]:
    def make() -> mp.Pipeline:
        pipeline = mp.Pipeline("p")
        stream = pipeline.inject("in", key="k", at="t", watermark=mp.ManualWatermark())
        windows = stream.window(mp.FixedWindows("10us"), **options)
        windows.combine(combine, name="w").apply(Panes(), name="panes")
        return pipeline

    return make


def restart_with(run: Play, make: Callable[[], mp.Pipeline]) -> None:
    run.stop()
    run.store = run._open_store()
    run.make = make
    run.start()


def test_open_windows_refuse_other_code_until_they_have_ended(play: Open) -> None:
    """The refused start changed nothing: the former code goes on, and then the other one may start."""
    run = play(windowed(mp.Count()))
    run.inject("in", rows("a", "a", "b"))
    with pytest.raises(mp.InvalidError, match=r"open windows.*stored=.Count\(\). declared=.Sum\(of='t'\)."):
        restart_with(run, windowed(mp.Sum("t")))
    run.make = windowed(mp.Count())
    run.start()
    run.advance("in", 100)
    restart_with(run, windowed(mp.Sum("t")))
    run.inject("in", rows("a", at=105))
    run.advance("in", 200)

    assert run.states("panes") == {"a": "[2,105]", "b": "[1]"}


def test_upgrade_continues_open_windows(play: Open) -> None:
    run = play(windowed(mp.Count()))
    run.inject("in", rows("a", "a", "b", at=5))

    def in_fives(windows: list[dict[str, Any]], version: int) -> list[dict[str, Any]]:
        return [{**window, "accumulator": window["accumulator"] * 5} for window in windows]

    restart_with(run, windowed(mp.Sum("t"), state_version=1, upgrade_state=in_fives))
    run.inject("in", rows("a", at=7))
    run.advance("in", 100)

    assert run.states("panes") == {"a": "[17]", "b": "[5]"}


@pytest.mark.spark
def test_spark_reads_versions(tmp_path: Path, spark: SparkSession) -> None:
    """A store written before versions existed has 0."""
    old = tmp_path / "old"
    shutil.copytree(Path(__file__).parent.parent / "format" / "v0.1" / "store", old)
    with mp.Store.open(old, read_only=True) as store:
        view = store.rows_view("visits")
        frame = view.to_spark(spark)
        assert frame.columns == view.to_arrow().column_names
        assert {row["state_version"] for row in frame.collect()} == {0}
    with plays(tmp_path, ManualClock) as start:
        run = start(pipeline(Count()))
        run.inject("in", rows("a", "b"))
        run.make = pipeline(Packed())
        run.restart()
        run.inject("in", rows("a", "c", at=2))
        found = run.store.rows_view("counts").to_spark(spark).select("key", "state_version").collect()

    assert sorted(tuple(row) for row in found) == [("a", 2), ("b", 0), ("c", 2)]
