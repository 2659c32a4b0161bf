"""Sinks of a fork: its own from the moment it is made, unless the fork takes the original's over."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from millpond.executor.computation.computation import Computation
from millpond.executor.local.runner import LocalRunner
from millpond.executor.pipeline.pipeline import EnginePipeline
from millpond.executor.replay.fork import fork_store
from millpond.executor.sinks.delta_table import take_over_sink
from millpond.executor.sinks.sink import DeltaSink, Sink
from millpond.statestore.app_ids import AppId
from millpond.statestore.errors import ConflictError, InvalidError
from millpond.statestore.leases.memory import MemoryLeases, MemoryRegistry
from millpond.statestore.log.rules import CommitRequest
from millpond.statestore.objects.obstore import open_objects
from millpond.statestore.store import Store
from millpond.statestore.system import SystemClock, SystemRng

OTHER_COPY = r"another copy of this store.*millpond take-over STORE TABLE"


class Pass(Computation):
    def process_record(self, context: Any, record: Any) -> None:
        if record.value["n"] >= 0:
            context.produce("pass", {"n": record.value["n"]})


class Outside:
    """A sink of the user's own kind, of which every opening counts."""

    identity = "queue://outside"

    def __init__(self) -> None:
        self.rows: list[pa.Table] = []
        self.delivered = 0

    def open(self, *_: object, **__: object) -> Outside:
        return self

    def write(self, superstep: int, productions: pa.Table) -> None:
        self.delivered = superstep
        self.rows.append(productions)


class Place:
    """A store in a folder, and its forks."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.sink: Sink = DeltaSink(str(folder / "out"))
        self._registries: dict[str, MemoryRegistry] = {}

    def open(self, name: str) -> Store:
        def leases(incarnation: str, writer_id: str) -> MemoryLeases:
            registry = self._registries.setdefault(incarnation, MemoryRegistry())
            return MemoryLeases(registry, SystemClock(), writer_id=writer_id)

        return Store.open(self.folder / name, leases=leases)

    def run(self, name: str, *numbers: int, sink: Sink | None = None) -> None:
        pipeline = EnginePipeline("flow")
        records = pipeline.inject("records", key="k", at="n", id="n")
        records.apply(Pass(), name="pass").sink("out", sink or self.sink)
        with (
            self.open(name) as store,
            LocalRunner(store, progress=False).start(pipeline, stepping=True) as run,
        ):
            for number in numbers:
                run.inject("records", [{"k": f"k{number % 3}", "n": number}])
                run.run_until_quiet()

    def fork(self, name: str, new: str = "fork") -> None:
        with self.open(name) as store:
            fork_store(store, self.folder / new)

    def take_over(self, name: str, sink: Sink | None = None, *, keeps_rows: bool = False) -> None:
        target = sink or self.sink
        with self.open(name) as store:
            if name != "pond":
                taken = AppId.SINK_TAKEN.of(store.lineage.copied.id, target.identity)
                store.committer.commit(CommitRequest(kind="adoption", positions={taken: 1}))
            if isinstance(target, DeltaSink):
                table = open_objects(target.path)
                take_over_sink(table, store.lineage, SystemClock(), SystemRng(), keeps_rows=keeps_rows)

    def numbers(self, at: str = "out") -> list[int]:
        rows = DeltaTable(str(self.folder / at)).to_pyarrow_table()
        values = rows.column("value").to_pylist()
        return sorted(int(value.split(":")[1].strip(" }")) for value in values)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def upsert(place: Place) -> Sink:
    schema = pa.schema([("key", pa.string()), ("n", pa.int64()), ("value", pa.string())])
    return DeltaSink(str(place.folder / "out"), schema, mode="upsert", keys=["n"])


@pytest.mark.parametrize("mode", ["append", "upsert"])
def test_fork_made_before_the_first_row_leaves_the_sink_alone(place: Place, mode: str) -> None:
    place.sink = upsert(place) if mode == "upsert" else place.sink
    place.run("pond", -1)
    place.fork("pond")
    shutil.rmtree(place.folder / "out")
    place.run("fork", 1, 2)
    assert not (place.folder / "out").exists()
    place.run("pond", 3)
    own, theirs = (DeltaTable(str(place.folder / at)) for at in ("fork/sinks/out", "out"))
    assert (own.to_pyarrow_table().num_rows, theirs.to_pyarrow_table().num_rows) == (2, 1)


def test_sink_with_another_path_is_the_forks_own_and_begins_empty(place: Place) -> None:
    place.run("pond", 1)
    place.fork("pond")
    other = DeltaSink(str(place.folder / "elsewhere"))
    place.run("fork", 2, sink=other)

    assert not (place.folder / "elsewhere").exists()
    # The superstep that the fork began with is delivered again to a sink without it.
    assert place.numbers("fork/sinks/out") == [1, 2]


def test_sink_within_the_forks_folder_stays_where_it_is(place: Place) -> None:
    place.run("pond", 1)
    place.fork("pond")
    place.run("fork", 2, sink=DeltaSink(str(place.folder / "fork" / "mine")))

    assert place.numbers("fork/mine") == [1, 2]


def test_sink_of_another_kind_becomes_a_table_until_it_is_taken_over(place: Place) -> None:
    outside = Outside()
    place.run("pond", 1, sink=outside)
    place.fork("pond")
    place.run("fork", 2, sink=outside)
    assert (len(outside.rows), place.numbers("fork/sinks/out")) == (1, [1, 2])

    place.take_over("fork", outside)
    place.run("fork", 3, sink=outside)
    # It lacks the superstep before, too.
    assert len(outside.rows) == 3


def test_fork_that_takes_a_sink_over_refuses_the_original(place: Place) -> None:
    place.run("pond", 1)
    place.fork("pond")
    place.run("pond", 5)
    place.take_over("fork")
    assert place.numbers() == [1]
    place.run("fork", 2, 3)

    assert place.numbers() == [1, 2, 3]
    assert not (place.folder / "fork/sinks").exists()
    with pytest.raises(InvalidError, match=OTHER_COPY):
        place.run("pond", 6)


def test_fork_takes_over_a_missing_table(place: Place) -> None:
    place.run("pond", -1)
    place.fork("pond")
    shutil.rmtree(place.folder / "out")
    place.take_over("fork")
    place.run("fork", 2)

    assert place.numbers() == [2]


def written_by_both(place: Place) -> None:
    """Let a fork write to its original's table, as forks of earlier releases did."""
    place.run("pond", -1)
    place.fork("pond")
    place.take_over("fork")
    place.run("fork", 1, 2)
    with pytest.raises(InvalidError, match=OTHER_COPY):
        place.run("pond", 7)


@pytest.mark.parametrize(("keeps_rows", "kept"), [(False, []), (True, [1, 2])])
def test_locked_out_original_gets_its_sink_back(place: Place, kept: list[int], *, keeps_rows: bool) -> None:
    written_by_both(place)
    place.take_over("pond", keeps_rows=keeps_rows)
    place.take_over("pond")

    place.run("pond", 7)
    assert place.numbers() == [*kept, 7]
    with pytest.raises(InvalidError, match=OTHER_COPY):
        place.run("fork", 3)


def test_upsert_table_goes_back_to_the_original_as_it_was(place: Place) -> None:
    place.sink = upsert(place)
    place.run("pond", 1)
    place.fork("pond")
    place.take_over("fork")
    place.run("fork", 2)
    place.take_over("pond")

    assert DeltaTable(str(place.folder / "out")).to_pyarrow_table().column("n").to_pylist() == [1]
    place.run("pond", 4)
    numbers = DeltaTable(str(place.folder / "out")).to_pyarrow_table().column("n").to_pylist()
    assert sorted(numbers) == [1, 4]


def test_table_that_others_compacted_is_taken_over_with_its_rows(place: Place) -> None:
    written_by_both(place)
    DeltaTable(str(place.folder / "out")).optimize.compact()
    with pytest.raises(ConflictError):
        place.take_over("pond")
    place.take_over("pond", keeps_rows=True)
    place.run("pond", 7)

    assert place.numbers() == [1, 2, 7]


def test_fork_of_an_earlier_release_continues_with_the_table_it_wrote(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.run("pond", -1)
    place.fork("pond")
    with monkeypatch.context() as patched:
        patched.setattr("millpond.statestore.history.lineage.Lineage.has_taken", lambda *_: True)
        place.run("fork", 1)
    place.run("fork", 2)

    assert place.numbers() == [1, 2]
