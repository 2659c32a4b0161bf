"""Renamed and dropped computations in the table."""

from __future__ import annotations

import logging

import pytest

from millpond.executor.computation.computation import Computation
from millpond.executor.local.runner import LocalRunner
from millpond.executor.ownership.evolution import Evolution, check_codecs, plan_evolution
from millpond.executor.pipeline.pipeline import EnginePipeline
from millpond.statestore.app_ids import AppId
from millpond.statestore.errors import InvalidError
from millpond.statestore.history.replayed_log import read_histories
from millpond.statestore.history.verification import verify_store
from millpond.statestore.leases.memory import MemoryRegistry
from millpond.statestore.log.log import Log
from millpond.statestore.log.snapshot import Snapshot, load
from millpond.statestore.objects.memory import MemoryObjects
from millpond.statestore.rows.codec import MsgpackCodec
from millpond.statestore.store import Store
from millpond.statestore.types import TableVersion
from millpond.testing.fixtures.determinism import ManualClock, SeededRng


class Last(Computation):
    def process_record(self, context, record):
        context.state.set(record.at)


class Packed(Last):
    codec = MsgpackCodec()


class Pond:
    """A store in memory, and pipelines that run on it in turn."""

    def __init__(self) -> None:
        self.objects, self.registry = MemoryObjects(), MemoryRegistry()
        self.clock, self.rng = ManualClock(), SeededRng(7)

    def store(self) -> Store:
        return Store.in_memory(objects=self.objects, registry=self.registry, clock=self.clock, rng=self.rng)

    def run(self, pipeline: EnginePipeline, *keys: str) -> Snapshot:
        runner = LocalRunner(self.store(), clock=self.clock, rng=self.rng, progress=False, intervals=2)
        with runner.start(pipeline, stepping=True) as run:
            if keys:
                run.inject("in", [{"k": key, "t": 1} for key in keys])
            run.run_until_quiet()
        return load(Log(self.objects))


def one(
    name: str, computation: Computation | None = None, drop: tuple[str, ...] = (), **options: str | int
) -> EnginePipeline:
    pipeline = EnginePipeline("p", drop=drop)
    pipeline.inject("in", key="k", at="t").apply(computation or Last(), name=name, **options)
    return pipeline


def without_records(snapshot: Snapshot) -> Snapshot:
    """Remove the records of codecs and of declared intervals, which older versions did not write."""
    prefixes = (AppId.CODEC, AppId.DECLARED_INTERVALS)
    snapshot.txns = {name: at for name, at in snapshot.txns.items() if not name.startswith(prefixes)}
    return snapshot


def test_rename_keeps_paths_and_earlier_versions_keep_the_former_name():
    """A repair walks back from the newest version and must find the former partitions."""
    pond = Pond()
    before = pond.run(one("old"), "a", "b", "c")
    paths = {file.path for file in before.files_in("old")}

    after = pond.run(one("new", renamed_from="old"))

    assert {file.path for file in after.files_in("new")} == paths
    assert all(before.statistics_of(path) == after.statistics_of(path) is not None for path in paths)
    assert after.files_in("old") == ()
    assert {file.path for file in load(Log(pond.objects), before.version).files_in("old")} == paths
    (history,) = read_histories(Log(pond.objects), None)
    walked = {
        state.version: {
            path for path, add in state.live.items() if add.partition_values["computation"] == "old"
        }
        for state, _ in history.states()
    }
    assert walked[before.version] == paths
    assert walked[TableVersion(after.version)] == set()
    assert verify_store(pond.objects).findings == ()


def test_files_of_a_dropped_computation_leave_the_table():
    """They are removed as data, so that readers of changes see it."""
    pond = Pond()
    before = pond.run(one("old"), "a", "b")

    after = pond.run(one("new", drop=("old",)), "a")

    assert after.computations == ("new",)
    assert all(after.file(file.path) is None for file in before.files)
    assert verify_store(pond.objects).findings == ()


@pytest.mark.parametrize(
    ("pipeline", "message"),
    [
        (one("a", renamed_from="a"), "still has"),
        (one("a", drop=("a",)), "still has the computation that it drops"),
        (one("a", renamed_from="b", drop=("b",)), "can only go to one other, or be dropped"),
    ],
)
def test_contradictory_renames_and_drops_fail_the_check(pipeline: EnginePipeline, message: str):
    with pytest.raises(InvalidError, match=message):
        pipeline.check()


def test_rename_to_a_name_with_rows_is_refused():
    pond = Pond()
    both = one("old")
    both.stream("in").apply(Last(), name="new")
    pond.run(both, "a")

    with pytest.raises(InvalidError, match="rows under both names"):
        pond.run(one("new", renamed_from="old"))


def test_rename_to_a_name_with_former_intervals_is_refused():
    """Two sets of intervals would fire timers twice."""
    pond = Pond()
    pond.run(one("used"), "x", "y")
    pond.run(one("old", drop=("used",)), "a", "b")

    with pytest.raises(InvalidError, match="choose another name"):
        pond.run(one("used", renamed_from="old"))


def test_rename_of_another_pipelines_computation_is_refused():
    pond = Pond()
    pond.run(one("old"), "a")
    other = EnginePipeline("q")
    other.inject("in", key="k", at="t").apply(Last(), name="new", renamed_from="old")

    with pytest.raises(InvalidError, match=r"another pipeline.*belongs_to=.p"):
        pond.run(other)


def test_store_of_an_older_version_is_checked_by_its_rows_and_intervals(caplog):
    """Fewer intervals than declared may result from few keys, so they cause only a warning."""
    pond = Pond()
    stored = without_records(pond.run(one("c"), "a", "b", "c"))

    with pytest.raises(InvalidError, match=r"another codec.*written_by=.one of text"):
        check_codecs(one("c", Packed()).check(), stored, Evolution(), pond.objects)
    check_codecs(one("c").check(), stored, Evolution(), pond.objects)
    with pytest.raises(InvalidError, match=r"another number.*stored=.2"):
        plan_evolution(one("c", intervals=1).check(), stored)
    with caplog.at_level(logging.WARNING):
        plan_evolution(one("c", intervals=3).check(), stored)

    assert "did not record" in caplog.text
