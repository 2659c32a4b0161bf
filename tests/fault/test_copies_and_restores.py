"""Copied, restored and moved stores, with sinks that record their last superstep."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, Final

import pytest
from click.testing import CliRunner
from deltalake import DeltaTable

from millpond.cli.main import main
from millpond.executor.computation.computation import Computation
from millpond.executor.computation.context import Context
from millpond.executor.computation.records import Record
from millpond.executor.local.runner import LocalRunner
from millpond.executor.pipeline.pipeline import EnginePipeline
from millpond.executor.sinks.delta_table import take_back_sink
from millpond.executor.sinks.sink import DeltaSink
from millpond.statestore.errors import ConflictError, DataError, InvalidError
from millpond.statestore.history.lineage import Adoption
from millpond.statestore.leases.memory import MemoryLeases, MemoryRegistry
from millpond.statestore.objects.obstore import open_objects
from millpond.statestore.store import Store
from millpond.statestore.system import SystemClock, SystemRng
from millpond.statestore.types import Superstep

AHEAD: Final = "the sink is ahead of the store.*new sink.*revert the sink"
ELSEWHERE: Final = "location has changed.*moved.*copy.*restored"
OTHER_COPY: Final = "another copy of this store writes into the sink's table"


class Pass(Computation):
    def process_record(self, context: Context, record: Record) -> None:
        context.state.set((context.state.get() or 0) + 1)
        context.produce("pass", {"n": record.value["n"], "seen": context.state.get()})


class Place:
    """A folder with a store, its sink, and an ensemble that survives copies and backups."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pond = folder / "pond"
        self.sink = folder / "out"
        self.upsert = False
        self.registries: dict[str, MemoryRegistry] = {}

    def open(self, pond: Path | None = None, **options: Any) -> Store:
        clock = SystemClock()

        def leases(incarnation: str, writer_id: str) -> MemoryLeases:
            registry = self.registries.setdefault(incarnation, MemoryRegistry())
            return MemoryLeases(registry, clock, writer_id=writer_id)

        return Store.open(pond or self.pond, leases=leases, **options)

    def run(
        self, *numbers: int, pond: Path | None = None, sink: Path | None = None, adopt: Any = None
    ) -> None:
        """Process each record in a superstep, and its productions in another."""
        with self.open(pond, adopt=adopt) as store:
            self.run_on(store, *numbers, sink=sink)

    def run_on(self, store: Store, *numbers: int, sink: Path | None = None) -> None:
        pipeline = EnginePipeline("flow")
        records = pipeline.inject("records", key="k", at="n", id="n")
        out = DeltaSink(str(sink or self.sink), mode="upsert" if self.upsert else "append")
        records.apply(Pass(), name="pass").sink("out", out)
        with LocalRunner(store, progress=False).start(pipeline, stepping=True) as run:
            for number in numbers:
                run.inject("records", [{"k": f"k{number % 3}", "n": number}])
                run.run_until_quiet()

    def forget_ensemble(self) -> None:
        """Forget the leases, as if the service had been restored with the folder."""
        self.registries.clear()

    def rows(self, sink: Path | None = None) -> list[str]:
        return sorted(DeltaTable(str(sink or self.sink)).to_pyarrow_table().column("value").to_pylist())


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def numbers_of(rows: list[str]) -> list[int]:
    return sorted(int(row.split('"n":')[1].split(",")[0]) for row in rows)


def put_back(place: Place) -> None:
    """Restore a backup made after five records over a store that has consumed eight."""
    place.run(0, 1, 2, 3, 4)
    backup = shutil.copytree(place.pond, place.folder / "backup")
    place.run(5, 6, 7)
    shutil.rmtree(place.pond)
    shutil.copytree(backup, place.pond)
    place.forget_ensemble()


@pytest.mark.parametrize("upsert", [False, True])
def test_restored_backup_does_not_skip_repeated_work(place: Place, *, upsert: bool) -> None:
    """A store behind its sink is refused; adopted as restored, it reverts the sink."""
    place.upsert = upsert
    put_back(place)
    before = place.rows()
    with pytest.raises(DataError, match=AHEAD):
        place.run(15, 16, 17)
    assert place.rows() == before
    with pytest.raises(DataError, match=AHEAD):
        place.run(15, 16, 17, adopt="restored")

    with place.open(adopt="restored") as store:
        supersteps = {"flow": Superstep(store.committer.snapshot.txns["millpond/superstep/flow"])}
        objects = open_objects(str(place.sink))
        taken = take_back_sink(objects, store.lineage, supersteps, SystemClock(), SystemRng())
        assert [(part.name, part.files) for part in taken] == [("out", 1 if upsert else 3)]
        assert not take_back_sink(objects, store.lineage, supersteps, SystemClock(), SystemRng())
        if not upsert:
            assert numbers_of(place.rows()) == [0, 1, 2, 3, 4]
        place.run_on(store, 15, 16, 17)
    place.run(18)
    if not upsert:
        assert numbers_of(place.rows()) == [0, 1, 2, 3, 4, 15, 16, 17, 18]
    place.run(5, 6, 7)
    fresh = Place(place.folder / "fresh")
    fresh.upsert = upsert
    fresh.run(0, 1, 2, 3, 4, 15, 16, 17, 18, 5, 6, 7)
    assert place.rows() == fresh.rows()


def test_restored_store_writes_to_a_new_sink_at_once(place: Place) -> None:
    """The new sink begins with the backup's last superstep."""
    put_back(place)
    place.run(15, 16, sink=place.folder / "new", adopt="restored")
    assert numbers_of(place.rows(place.folder / "new")) == [4, 15, 16]
    assert numbers_of(place.rows()) == [0, 1, 2, 3, 4, 5, 6, 7]


def test_copy_does_not_write_into_the_table_of_its_original(place: Place) -> None:
    """Adopted as a copy, it needs a sink of its own."""
    place.run(0, 1, 2)
    copy = shutil.copytree(place.pond, place.folder / "copy")
    with pytest.raises(InvalidError, match=ELSEWHERE):
        place.run(3, pond=copy)
    with place.open(copy, read_only=True) as store:
        assert store.rows_view("pass").to_arrow().num_rows == 3
    with pytest.raises(InvalidError, match=OTHER_COPY):
        place.run(3, pond=copy, adopt="copy")

    place.run(13, 14, pond=copy, sink=place.folder / "own")
    place.run(3, 4)
    assert numbers_of(place.rows()) == [0, 1, 2, 3, 4]
    assert numbers_of(place.rows(place.folder / "own")) == [2, 13, 14]
    with pytest.raises(InvalidError, match=OTHER_COPY):
        place.run(5, sink=place.folder / "own")


def test_copy_and_original_have_separate_leases(place: Place) -> None:
    """The copy changes no mark of the original's either."""
    place.run(0)
    copy = shutil.copytree(place.pond, place.folder / "copy")
    with place.open() as original, place.open(copy, adopt="copy") as other:
        place.run_on(other, 10, 11, 12, sink=place.folder / "own")
        place.run_on(original, 1)
        assert original.lineage.current.id == original.store_id != other.lineage.current.id
        assert len(place.registries) == 2
    place.open().close()
    place.open(copy).close()


def test_moved_store_keeps_its_identity(place: Place) -> None:
    place.run(0, 1)
    with place.open() as store:
        before = store.lineage.current
    moved = place.pond.rename(place.folder / "elsewhere")
    with pytest.raises(InvalidError, match=ELSEWHERE):
        place.run(2, pond=moved)

    place.run(2, pond=moved, adopt="moved")
    place.run(3, pond=moved, adopt="moved")
    with place.open(moved) as store:
        assert (store.lineage.current, store.lineage.location) == (before, str(moved))
    assert numbers_of(place.rows()) == [0, 1, 2, 3]


def test_ensemble_refuses_a_superseded_store(place: Place) -> None:
    place.run(0, 1, 2)
    backup = shutil.copytree(place.pond, place.folder / "backup")
    with place.open(backup, adopt="restored") as store:
        successor = store.lineage.current.id

    with pytest.raises(DataError, match=rf"took the place of this one.*successor=`{successor}`"):
        place.open()
    place.run(3, 4, pond=backup)
    assert numbers_of(place.rows()) == [0, 1, 2, 3, 4]


def test_backup_behind_the_mark_needs_adoption(place: Place) -> None:
    """The ensemble knows a newer version, until the backup is adopted as restored."""
    place.run(0, 1, 2)
    backup = shutil.copytree(place.pond, place.folder / "backup")
    place.run(3, 4)
    shutil.rmtree(place.pond)
    shutil.copytree(backup, place.pond)
    with pytest.raises(DataError, match="cut or rolled back"):
        place.open()

    place.run(3, sink=place.folder / "new", adopt="restored")
    place.run(4, sink=place.folder / "new")
    assert numbers_of(place.rows(place.folder / "new")) == [2, 3, 4]


def test_table_restored_behind_its_adoption_is_refused(place: Place) -> None:
    """Its marks have an incarnation that the log does not know."""
    place.run(0)
    rows = shutil.copytree(place.pond / "rows", place.folder / "rows")
    place.open(adopt="restored").close()
    shutil.rmtree(place.pond / "rows")
    shutil.copytree(rows, place.pond / "rows")

    with pytest.raises(DataError, match="has been another incarnation"):
        place.open(read_only=True)


def test_store_is_not_adopted_while_its_pipeline_runs(place: Place) -> None:
    place.run(0)
    with place.open() as store:
        pipeline = EnginePipeline("flow")
        pipeline.inject("records", key="k", at="n", id="n").apply(Pass(), name="pass")
        with (
            LocalRunner(store, progress=False).start(pipeline, stepping=True),
            pytest.raises(ConflictError, match="stop it before"),
        ):
            place.open(adopt="restored")
    with pytest.raises(InvalidError, match="as a copy where it always was"):
        place.open(adopt="copy")
    with pytest.raises(InvalidError, match="moved, copy or restored"):
        place.open(adopt="borrowed")
    with pytest.raises(InvalidError, match="cannot adopt a store that is opened read-only"):
        place.open(adopt="restored", read_only=True)


def test_users_sink_reveals_a_restored_store(place: Place) -> None:
    """The number of its last superstep is enough."""
    put_back(place)

    class Own:
        identity = "own"
        delivered = Superstep(99)

        def open(self, *_: object, **__: object) -> Own:
            return self

        def write(self, *_: object) -> None:
            raise AssertionError

    pipeline = EnginePipeline("flow")
    pipeline.inject("records", key="k", at="n", id="n").apply(Pass(), name="pass").sink("own", Own())
    with place.open() as store, pytest.raises(DataError, match="delivered=`99`"):
        LocalRunner(store, progress=False).start(pipeline, stepping=True)


def test_sink_files_changed_by_others_are_not_reverted(place: Place) -> None:
    """Another engine compacted them, so only a new sink helps."""
    put_back(place)
    DeltaTable(str(place.sink)).optimize.compact()
    before = place.rows()
    with place.open(adopt="restored") as store:
        supersteps = {"flow": Superstep(store.committer.snapshot.txns["millpond/superstep/flow"])}
        with pytest.raises(ConflictError, match="write to a new sink"):
            take_back_sink(
                open_objects(str(place.sink)), store.lineage, supersteps, SystemClock(), SystemRng()
            )
    assert place.rows() == before


@pytest.mark.zookeeper
def test_command_adopts_on_a_real_ensemble(place: Place, zookeeper_hosts: str) -> None:
    """The superseded folder stays refused."""

    def run(pond: Path, *numbers: int) -> None:
        with Store.open(pond, zookeeper=zookeeper_hosts) as store:
            place.run_on(store, *numbers)

    def adopt(pond: Path, *arguments: str, kind: Adoption = "restored") -> str:
        command = ["adopt", str(pond), "--as", kind, "--zookeeper", zookeeper_hosts, *arguments]
        told = CliRunner().invoke(main, command)
        assert told.exit_code == 0, (told.output, told.exception)
        return told.output

    run(place.pond, 0, 1, 2)
    backup = shutil.copytree(place.pond, place.folder / "backup")
    run(place.pond, 3, 4)
    with pytest.raises(InvalidError, match=ELSEWHERE):
        run(backup, 3)
    assert "back from superstep" in adopt(backup, "--take-back", str(place.sink))
    with pytest.raises(DataError, match="took the place"):
        run(place.pond, 5)
    run(backup, 13, 14)
    assert numbers_of(place.rows()) == [0, 1, 2, 13, 14]
    moved = backup.rename(place.folder / "moved")
    adopt(moved, kind="moved")
    run(moved, 15)
    assert numbers_of(place.rows()) == [0, 1, 2, 13, 14, 15]
