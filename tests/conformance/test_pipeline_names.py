"""A pipeline that continues under another name, with rows, timers, ids, inputs, totals and sinks."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from click.testing import CliRunner
from deltalake import DeltaTable

import millpond as mp
from millpond.cli.main import main
from millpond.executor.replay.repair import repair_store
from millpond.executor.replay.repair_plan import plan_rewind
from millpond.statestore.failpoint import listening
from millpond.statestore.history.verification import verify_store
from millpond.statestore.leases.memory import MemoryLeases
from millpond.testing.fixtures.determinism import ManualClock, SeededRng
from tests.fixtures.both_runners import Play, plays

Open = Callable[[Callable[[], Any]], Play]
SECOND_US = 1_000_000


class Count(mp.Computation):
    """Counts, produces each count, adds a hundred ten seconds later, and refuses bad records."""

    def process_record(self, context: mp.Context, record: mp.Record) -> None:
        if record.value["bad"]:
            raise ValueError("bad")
        context.state.set(context.state.get(0) + 1)
        context.produce("counts", context.state.get())
        context.set_timer(record.at + 10 * SECOND_US, tag="end")

    def process_timer(self, context: mp.Context, timer: mp.Timer) -> None:
        context.state.set(context.state.get(0) + 100)


class Last(mp.Computation):
    def process_record(self, context: mp.Context, record: mp.Record) -> None:
        context.state.set(record.value)


def pipeline(name: str, sink: Path, **options: Any) -> Callable[[], mp.Pipeline]:
    """``in`` → ``count`` → ``last``, and a sink."""

    def make() -> mp.Pipeline:
        pipeline = mp.Pipeline(name, **options)
        counts = pipeline.inject("in", key="k", at="t", id="id", watermark=mp.Monotone())
        told = counts.apply(Count(), name="count", produces="counts", retries=0)
        told.apply(Last(), name="last")
        told.sink("out", mp.DeltaSink(str(sink)))
        return pipeline

    return make


def rows(*at: int, key: str = "k", bad: bool = False) -> list[dict[str, Any]]:
    return [{"k": key, "t": second * SECOND_US, "id": f"{key}{second}", "bad": bad} for second in at]


def delivered(sink: Path) -> list[int]:
    return sorted(orjson.loads(row["value"]) for row in DeltaTable(sink).to_pyarrow_table().to_pylist())


def reopen(play: Play) -> None:
    play.store = play._open_store()
    play.start()


@pytest.fixture
def sink(tmp_path: Path) -> Path:
    return tmp_path / "out"


@pytest.fixture(params=["local", pytest.param("spark", marks=pytest.mark.spark)])
def play(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Open]:
    spark = request.getfixturevalue("spark") if request.param == "spark" else None
    with plays(tmp_path, ManualClock, spark) as start:
        yield start


def test_renamed_pipeline_continues(play: Open, sink: Path) -> None:
    """Nothing is read or delivered twice, whether the argument stays or is removed."""
    run = play(pipeline("old", sink))
    run.inject("in", [*rows(1, 2), *rows(3, key="b", bad=True)])
    before = run.run.summary().totals
    new, kept = pipeline("new", sink, renamed_from="old"), pipeline("new", sink)
    for make in (new, new, kept):
        run.make = make
        run.restart()
        assert run.watermark("count") == 3 * SECOND_US
        assert run.run.summary().totals.records == before.records
        assert run.run.summary().totals.dead_letters == 1
    run.settle()
    run.inject("in", [*rows(2), *rows(30, key="c")])
    run.settle()

    # The former name set the key's timer, and the key's second record is a duplicate.
    assert run.states("count") == {"c": "1", "k": "102"}
    assert run.states("last") == {"c": "1", "k": "2"}
    assert run.run.summary().totals.duplicates == 1
    run.restart()
    assert delivered(sink) == [1, 1, 2]
    assert verify_store(run.store.objects).findings == ()


def test_renamed_pipeline_reads_only_new_input(sink: Path) -> None:
    store, given = mp.Store.in_memory(), rows(1, 2)
    mp.LocalRunner(store, progress=False).run(pipeline("old", sink)(), {"in": given}, finish=False)
    given += rows(4)
    new = pipeline("new", sink, renamed_from="old")()
    summary = mp.LocalRunner(store, progress=False).run(new, {"in": given}, finish=False)

    assert (summary.run.records, summary.totals.records) == (1 + 1, 3 + 3)
    assert delivered(sink) == [1, 2, 3]


def test_former_name_is_refused(play: Open, sink: Path) -> None:
    """It would be another pipeline; a second pipeline with the same ``renamed`` is refused too."""
    run = play(pipeline("old", sink))
    run.inject("in", rows(1))
    run.make = pipeline("new", sink, renamed_from="old")
    run.restart()

    for make in (pipeline("old", sink), pipeline("third", sink, renamed_from="old")):
        run.make = make
        with pytest.raises(mp.InvalidError, match=r"has another one by now.*former=.old. now=.new."):
            run.restart()
    run.make = pipeline("unrelated", sink)
    with pytest.raises(mp.InvalidError, match=r"renamed_from= of the pipeline"):
        run.restart()
    run.make = pipeline("old", sink, renamed_from="new")
    reopen(run)
    run.inject("in", rows(2))
    assert run.states("count") == {"k": "2"}


def test_new_store_ignores_the_former_name(play: Open, sink: Path) -> None:
    run = play(pipeline("new", sink, renamed_from="old"))
    run.inject("in", rows(1))
    run.restart()

    assert run.states("count") == {"k": "1"}


def test_interrupted_rename_is_completed_by_the_next_start(tmp_path: Path, sink: Path) -> None:
    """The process dies before or after the commit of the rename."""

    class Died(BaseException):
        pass

    with plays(tmp_path, ManualClock) as start:
        run = start(pipeline("p0", sink))
        run.inject("in", rows(1, 2))
        for number in range(8):
            run.make = pipeline(f"p{number + 1}", sink, renamed_from=f"p{number}")
            run.stop()
            run.store = run._open_store()
            reached = [0]

            def die(_: str, reached: list[int] = reached, last: int = number) -> None:
                reached[0] += 1
                if reached[0] > last:
                    raise Died

            try:
                with listening(die):
                    run.start()
            except Died:
                reopen(run)
            run.settle()
        assert run.states("count") == {"k": "2"}
        run.stop()
        run.store = run._open_store()
        run.start()
        assert delivered(sink) == [1, 2]


def test_name_of_another_pipeline_is_refused(tmp_path: Path) -> None:
    with plays(tmp_path, ManualClock) as start:
        run = start(pipeline("old", tmp_path / "a"))
        run.inject("in", rows(1))
        run.stop()

        def other() -> mp.Pipeline:
            graph = mp.Pipeline("new")
            graph.inject("in", key="k", at="t").apply(Last(), name="other")
            return graph

        run.make = other
        run.store = run._open_store()
        run.start()
        run.make = pipeline("new", tmp_path / "a", renamed_from="old")
        with pytest.raises(mp.InvalidError, match="a pipeline under either name"):
            run.restart()
        run.make = other
        reopen(run)


def test_status_shows_the_current_name_once(tmp_path: Path, sink: Path) -> None:
    with plays(tmp_path, ManualClock) as start:
        run = start(pipeline("old", sink))
        run.inject("in", rows(1))
        run.make = pipeline("new", sink, renamed_from="old")
        run.restart()
        told = CliRunner().invoke(main, ["status", str(tmp_path / "pond"), "--json"])

    assert [one["pipeline"] for one in json.loads(told.stdout)["pipelines"]] == ["new"]


def test_rewind_restores_the_former_name(tmp_path: Path, sink: Path) -> None:
    with plays(tmp_path, ManualClock) as start:
        run = start(pipeline("old", sink))
        run.inject("in", rows(1))
        run.settle()
        version = run.store.committer.snapshot.version
        run.make = pipeline("new", sink, renamed_from="old")
        run.restart()
        run.stop()
        leases = MemoryLeases(run._registry, run.clock, writer_id="r")
        plan = plan_rewind(run.store.objects, version, None)
        committed = repair_store(run.store.objects, plan, leases, run.clock, SeededRng(3))
        assert committed.version > version

        run.make = pipeline("old", sink)
        reopen(run)
        assert run.states("count") == {"k": "1"}


def test_rename_from_its_own_or_an_invalid_name_is_refused() -> None:
    with pytest.raises(mp.InvalidError, match="another name"):
        mp.Pipeline("p", renamed_from="p")
    with pytest.raises(mp.InvalidError, match="name"):
        mp.Pipeline("p", renamed_from="a/b")
