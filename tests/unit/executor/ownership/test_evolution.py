"""What a rename and a drop leave in the table: readers, verification and the way back find everything in its place."""

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
    """Keeps the time of its last record."""

    def process_record(self, context, record):
        context.state.set(record.at)


class Packed(Last):
    """The same in another codec."""

    codec = MsgpackCodec()


class Pond:
    """A store in memory, and pipelines on it one after the other."""

    def __init__(self) -> None:
        self.objects, self.registry = MemoryObjects(), MemoryRegistry()
        self.clock, self.rng = ManualClock(), SeededRng(7)

    def store(self) -> Store:
        return Store.in_memory(objects=self.objects, registry=self.registry, clock=self.clock, rng=self.rng)

    def run(self, pipeline: EnginePipeline, *keys: str) -> Snapshot:
        """Run the pipeline with a record of each key."""
        runner = LocalRunner(self.store(), clock=self.clock, rng=self.rng, progress=False, intervals=2)
        with runner.start(pipeline, stepping=True) as run:
            if keys:
                run.inject("in", [{"k": key, "t": 1} for key in keys])
            run.run_until_quiet()
        return load(Log(self.objects))


def one(
    name: str, computation: Computation | None = None, drop: tuple[str, ...] = (), **options: str | int
) -> EnginePipeline:
    """A pipeline of one computation."""
    pipeline = EnginePipeline("p", drop=drop)
    pipeline.inject("in", key="k", at="t").apply(computation or Last(), name=name, **options)
    return pipeline


def without_records(snapshot: Snapshot) -> Snapshot:
    """The table as a version left it that recorded neither codecs nor declared numbers of intervals."""
    prefixes = (AppId.CODEC, AppId.DECLARED_INTERVALS)
    snapshot.txns = {name: at for name, at in snapshot.txns.items() if not name.startswith(prefixes)}
    return snapshot


def test_a_rename_copies_no_file_and_can_be_walked_back():
    """The files keep their paths and statistics and change their partition; the version before has them under the former
    name, both for a reader of that version and for a repair, which walks back from the newest one. The store is sound.
    """
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


def test_a_dropped_computations_files_are_removed():
    """They leave the table as data, so that readers of changes see it, and the store is sound."""
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
def test_contradictions_are_refused_without_a_store(pipeline: EnginePipeline, message: str):
    """What names a computation both as gone and as there, or gives its rows twice, is refused by the check."""
    with pytest.raises(InvalidError, match=message):
        pipeline.check()


def test_rows_under_both_names_are_not_merged():
    """A rename whose new name has rows of its own already is refused."""
    pond = Pond()
    both = one("old")
    both.stream("in").apply(Last(), name="new")
    pond.run(both, "a")

    with pytest.raises(InvalidError, match="rows under both names"):
        pond.run(one("new", renamed_from="old"))


def test_a_name_that_had_other_intervals_is_not_taken():
    """Rows do not move to a name whose keys were cut elsewhere: two sets of intervals would fire timers twice."""
    pond = Pond()
    pond.run(one("used"), "x", "y")
    pond.run(one("old", drop=("used",)), "a", "b")

    with pytest.raises(InvalidError, match="choose another name"):
        pond.run(one("used", renamed_from="old"))


def test_rows_of_another_pipeline_are_not_taken():
    """Only the pipeline that wrote them gives rows another name."""
    pond = Pond()
    pond.run(one("old"), "a")
    other = EnginePipeline("q")
    other.inject("in", key="k", at="t").apply(Last(), name="new", renamed_from="old")

    with pytest.raises(InvalidError, match=r"another pipeline.*belongs_to=.p"):
        pond.run(other)


def test_a_store_that_recorded_nothing_still_tells(caplog):
    """In a store of an older version text and bytes are told by the rows, and more intervals by the table; fewer, which
    may come of few keys, are accepted with a warning.
    """
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
