"""Rounds of garbage collection."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pytest
from deltalake import DeltaTable

from millpond.executor.computation.computation import Computation
from millpond.executor.local.run import LocalRun
from millpond.executor.local.runner import LocalRunner
from millpond.executor.maintenance.policy import UpkeepPolicy
from millpond.executor.pipeline.pipeline import EnginePipeline
from millpond.gc.collectors import CollectionRound, Owned, Retention, collect_garbage, write_checkpoint
from millpond.gc.compaction import CompactionPolicy
from millpond.statestore.app_ids import AppId
from millpond.statestore.catalog.catalog import Catalog
from millpond.statestore.errors import ConflictError, DataError, InvalidError, ObjectMissingError
from millpond.statestore.history.savepoint import (
    HORIZON_FOLDER,
    drop_savepoint,
    make_savepoint,
    open_savepoints,
)
from millpond.statestore.interval import Interval
from millpond.statestore.leases.memory import MemoryRegistry
from millpond.statestore.log.checkpoint import checkpoint_path, read_part
from millpond.statestore.log.committer import Committer
from millpond.statestore.log.high_water import check_high_water
from millpond.statestore.log.log import Log, commit_path
from millpond.statestore.log.rules import CommitRequest
from millpond.statestore.log.snapshot import load
from millpond.statestore.objects.memory import MemoryObjects
from millpond.statestore.objects.obstore import open_objects
from millpond.statestore.rows.files import write_row_file
from millpond.statestore.rows.row import Fence
from millpond.statestore.store import Store
from millpond.statestore.types import CommitNumber, Sequencer, Superstep, TableVersion
from millpond.testing.fixtures.determinism import ManualClock, SeededRng
from tests.fixtures.row_updates import row_updates

MINUTE_MS = 60_000
HOUR_MS = 60 * MINUTE_MS
NOW = Retention(keep_ms=0, checkpoint_every=1)
NAME = "word-count.2"
COMPACTIONS = UpkeepPolicy(compaction=CompactionPolicy(fan_in=4, files_max=8), collect_every=10**9)


class Count(Computation):
    def process_record(self, context, record):
        context.state.set((context.state.get() or 0) + 1)


class Pond:
    """A store, and a stepped pipeline on it with one superstep a minute."""

    def __init__(self, objects: Any = None) -> None:
        self.objects = MemoryObjects() if objects is None else objects
        self.clock, self.registry = ManualClock(), MemoryRegistry()
        self.catalog = Catalog.open("sqlite://", self.clock)
        self.store = Store.in_memory(
            objects=self.objects, registry=self.registry, clock=self.clock, rng=SeededRng(1)
        )
        pipeline = EnginePipeline("p")
        pipeline.inject("in", key="k", at="at").apply(Count(), name=NAME)
        runner = LocalRunner(
            self.store, clock=self.clock, rng=SeededRng(2), progress=False, upkeep=COMPACTIONS
        )
        self.run: LocalRun = runner.start(pipeline, stepping=True)

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.clock.advance_ms(MINUTE_MS)
            self.run.inject("in", [{"k": "a", "at": 1}, {"k": "b", "at": 1}])
            self.run.step()

    def collect(self, retention: Retention = NOW, objects: Any = None, **options: Any) -> CollectionRound:
        return collect_garbage(
            objects or self.objects,
            self.catalog,
            self.clock,
            announce=None,
            retention=retention,
            owned={
                owned.interval: Owned(owned.fence.sequencer, self.superstep)
                for owned in self.run._worker.coordinator.ownership.owned.values()
            },
            **options,
        )

    @property
    def superstep(self) -> Superstep:
        return self.run._worker.coordinator.superstep

    def data_files(self) -> set[str]:
        return {path for path in self.objects.list("") if not path.startswith("_")}

    def savepoint(self, name: str, version: TableVersion) -> None:
        make_savepoint(self.store.committer, Log(self.objects), name, version)

    def versions(self) -> tuple[int, ...]:
        return Log(self.objects).inventory().versions

    def counts(self, version: int | None = None) -> list[str]:
        return list(self.store.rows_view(NAME, version).to_arrow().column("state").to_pylist())


@pytest.fixture(params=["memory", "folder"])
def pond(request, tmp_path: Path) -> Pond:
    """Run on both kinds of object store."""
    made = Pond(MemoryObjects() if request.param == "memory" else open_objects(str(tmp_path / "rows")))
    made.steps(30)
    return made


def by_kind(collected: CollectionRound) -> dict[str, tuple[str, ...]]:
    return {entry.kind: entry.paths for entry in collected.collections}


def test_round_without_retention_leaves_live_files_only(pond):
    """A second round finds nothing to delete."""
    live = {file.path for file in pond.store.committer.snapshot.files}
    assert live < pond.data_files()
    before = pond.counts()
    collected = pond.collect()

    assert pond.data_files() == live
    assert pond.counts() == before == ["30", "30"]
    assert collected.horizon == pond.store.committer.snapshot.version
    assert by_kind(pond.collect()) == {"vacuum": (), "orphans": (), "log": ()}


def test_log_is_truncated_before_a_checkpoint(pond):
    """A cold open must find the same state and digest without version 0."""
    pond.collect()
    pond.steps(10)
    pond.collect()
    mark = pond.store.leases.high_water.read()
    snapshot = load(Log(pond.objects))

    assert pond.versions()[0] > 0
    assert len(pond.versions()) < 20
    assert snapshot.digest == pond.store.committer.snapshot.digest
    assert snapshot.txns == pond.store.committer.snapshot.txns
    assert snapshot.files == pond.store.committer.snapshot.files
    check_high_water(mark, snapshot, Log(pond.objects))


def test_running_pipeline_continues_over_a_truncated_log(pond):
    pond.collect()
    pond.steps(5)

    assert pond.counts() == ["35", "35"]


def test_dry_run_deletes_nothing_and_names_the_paths(pond):
    before = set(pond.objects.list(""))
    named = by_kind(pond.collect(dry_run=True))

    assert set(pond.objects.list("")) == before
    assert pond.catalog.horizons() == ()
    assert named["vacuum"] == by_kind(pond.collect())["vacuum"] != ()


def test_versions_within_the_retention_stay_readable(pond):
    retention = Retention(keep_ms=10 * MINUTE_MS, checkpoint_every=1)
    newest = pond.store.committer.snapshot.version
    before = {version: pond.counts(version) for version in range(newest - 9, newest + 1)}
    for _ in range(3):
        pond.collect(retention)
        pond.steps(1)
        newest += 1
    kept = {version: pond.counts(version) for version in before if version > newest - 8}

    assert kept
    assert all(before[version] == counts for version, counts in kept.items())


def test_savepoint_keeps_its_version_until_dropped(pond):
    """Other versions before the horizon are still collected."""
    version = TableVersion(12)
    before, needed = pond.counts(version), {file.path for file in pond.store.snapshot(version).files}
    pond.savepoint("mine", version)
    pond.collect()
    pond.steps(3)
    collected = pond.collect()

    assert collected.horizon > version
    assert needed <= pond.data_files()
    assert pond.counts(version) == before
    with pytest.raises(ObjectMissingError):
        pond.store.snapshot(version + 1)
    assert pond.data_files() == needed | {file.path for file in pond.store.committer.snapshot.files}
    drop_savepoint(pond.store.committer, "mine")
    pond.steps(1)
    assert needed & set(by_kind(pond.collect())["vacuum"])
    assert pond.data_files() == {file.path for file in pond.store.committer.snapshot.files}


def test_source_offsets_survive_truncation_of_the_log(pond):
    """The commit of a checkpoint's or savepoint's version repeats them."""
    pond.store.committer.commit(
        CommitRequest(kind="request", positions={"a": 1}, source_offsets={"p/clicks/q": "offset 7"})
    )
    pond.steps(1)
    version = TableVersion(pond.store.committer.snapshot.version)
    pond.savepoint("mine", version)
    pond.store.committer.commit(
        CommitRequest(kind="request", positions={"a": 2}, source_offsets={"p/clicks/q": "offset 8"})
    )
    pond.steps(2)
    pond.collect()

    assert min(pond.versions()) == version
    assert load(Log(pond.objects)).source_offsets == {"p/clicks/q": "offset 8"}
    assert load(Log(pond.objects), version).source_offsets == {"p/clicks/q": "offset 7"}


def test_savepoint_without_a_checkpoint_gets_one(pond):
    """Older writers committed savepoints without a checkpoint, which the truncated log needs."""
    version = TableVersion(12)
    before = pond.counts(version)
    pond.store.committer.commit(
        CommitRequest(kind="savepoint", positions={AppId.SAVEPOINT.of("mine"): version})
    )
    pond.collect()
    pond.collect()

    assert pond.counts(version) == before


def test_savepoint_of_a_collected_version_is_refused(pond):
    pond.collect()

    with pytest.raises(ConflictError, match="has been collected"):
        pond.savepoint("mine", TableVersion(3))
    assert open_savepoints(pond.store.committer.refresh().txns) == ()


def test_savepoint_of_a_killed_maker_is_refused_when_repeated_after_collection(pond):
    """The savepoint is in the log, but its maker died before it found the version collected."""
    pond.collect()
    pond.store.committer.commit(CommitRequest(kind="savepoint", positions={AppId.SAVEPOINT.of("mine"): 3}))

    with pytest.raises(ConflictError, match="has been collected"):
        pond.savepoint("mine", TableVersion(3))
    assert open_savepoints(pond.store.committer.refresh().txns) == ()


def test_savepoint_repeated_after_collections_is_the_existing_one(pond):
    """Its version lies before the collectors' horizon by then."""
    version = TableVersion(12)
    made = pond.savepoint("mine", version)
    pond.collect()
    pond.steps(3)

    assert pond.collect().horizon > version
    assert pond.savepoint("mine", version) == made


class Interrupted:
    """Objects that call an action just before the first put in a folder."""

    def __init__(self, objects: Any, folder: str) -> None:
        self._objects, self._folder = objects, folder
        self.meanwhile: Any = None

    def put_if_absent(self, path: str, data: bytes) -> None:
        if path.startswith(self._folder) and self.meanwhile is not None:
            meanwhile, self.meanwhile = self.meanwhile, None
            meanwhile()
        self._objects.put_if_absent(path, data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._objects, name)


def test_collector_keeps_a_savepoint_made_before_its_horizon_is_published(pond):
    version = TableVersion(12)
    before, needed = pond.counts(version), {file.path for file in pond.store.snapshot(version).files}
    objects = Interrupted(pond.objects, HORIZON_FOLDER)
    objects.meanwhile = lambda: pond.savepoint("mine", version)
    pond.collect(objects=objects)

    assert objects.meanwhile is None
    assert needed <= pond.data_files()
    assert pond.counts(version) == before


def test_savepoint_is_refused_if_its_version_is_collected_before_the_commit(pond):
    objects = Interrupted(pond.objects, "_delta_log/")
    writer = Committer(Log(objects), pond.clock, SeededRng(3), pond.store.leases.high_water)
    # Its first put is the checkpoint.
    objects.meanwhile = lambda: setattr(objects, "meanwhile", pond.collect)

    with pytest.raises(ConflictError, match="has been collected"):
        make_savepoint(writer, Log(objects), "mine", TableVersion(12))
    assert objects.meanwhile is None
    assert open_savepoints(load(Log(pond.objects)).txns) == ()


def test_reader_keeps_its_version_until_its_horizon_expires(pond):
    version = TableVersion(12)
    pond.catalog.publish_horizon("reader", version, lifetime_ms=MINUTE_MS)

    assert pond.collect().horizon == version
    pond.clock.advance_ms(2 * MINUTE_MS)
    assert pond.collect().horizon > version


def test_reader_of_a_collected_version_is_refused(pond):
    pond.collect()

    with pytest.raises(ConflictError):
        pond.catalog.publish_horizon("reader", TableVersion(3), lifetime_ms=MINUTE_MS)


def test_orphans_of_past_supersteps_are_deleted(pond):
    """A file of the next superstep may still be committed."""

    def orphan(superstep: int, token: str) -> str:
        return write_row_file(
            pond.objects,
            Interval(NAME),
            row_updates([{"key": "a", "state": "1"}]),
            superstep=Superstep(superstep),
            fence=Fence(Sequencer(9), CommitNumber(9)),
            token=token * 32,
        ).path

    past, coming = orphan(pond.superstep, "a"), orphan(pond.superstep + 1, "b")
    collected = by_kind(pond.collect())

    assert collected["orphans"] == (past,)
    assert coming in pond.data_files()


def test_savepoint_survives_a_checkpoint_without_removed_files(tmp_path):
    """Other engines' checkpoints omit files removed more than a week ago."""
    folder = tmp_path / "rows"
    pond = Pond(open_objects(str(folder)))
    pond.steps(30)
    version = TableVersion(12)
    before = pond.counts(version)
    pond.savepoint("mine", version)
    pond.collect()
    pond.steps(5)
    # By the pond's clock every removal was in 1970.
    DeltaTable(str(folder)).create_checkpoint()

    pond.collect()
    assert pond.counts(version) == before
    assert {file.path for file in pond.store.snapshot(version).files} <= pond.data_files()
    drop_savepoint(pond.store.committer, "mine")
    pond.steps(1)
    pond.collect()
    assert set(pond.objects.list(f"computation={NAME}")) == {
        file.path for file in pond.store.committer.snapshot.files
    }


def test_versions_within_the_retention_survive_a_checkpoint_without_removed_files(tmp_path):
    """Uncommitted files are still deleted."""
    folder = tmp_path / "rows"
    pond = Pond(open_objects(str(folder)))
    pond.steps(30)
    DeltaTable(str(folder)).create_checkpoint()
    pond.steps(1)
    orphan = write_row_file(
        pond.objects,
        Interval(NAME),
        row_updates([{"key": "a", "state": "1"}]),
        superstep=Superstep(3),
        fence=Fence(Sequencer(9), CommitNumber(9)),
        token="c" * 32,
    ).path
    newest = pond.store.committer.snapshot.version
    collected = pond.collect(Retention(keep_ms=25 * MINUTE_MS, checkpoint_every=1))

    assert by_kind(collected)["orphans"] == (orphan,)
    assert newest - collected.horizon >= 25
    kept = range(collected.horizon, newest + 1)
    at_some_time = {file.path for at in kept for file in pond.store.snapshot(TableVersion(at)).files}
    at_the_ends = {file.path for at in (kept[0], newest) for file in pond.store.snapshot(at).files}
    assert at_the_ends < at_some_time <= pond.data_files()


def test_other_pipelines_dead_letters_are_not_orphans(pond):
    """Pipelines share the computation of dead letters but not its keys."""

    def letter(pipeline: str, token: str) -> str:
        return write_row_file(
            pond.objects,
            Interval("dead_letters"),
            row_updates([{"key": f"{pipeline}/0000000001/000000", "state": "1"}]),
            superstep=Superstep(1),
            fence=Fence(Sequencer(9), CommitNumber(9)),
            token=token * 32,
        ).path

    ours, theirs = letter("p", "a"), letter("q", "b")
    collected = by_kind(pond.collect())

    assert collected["orphans"] == (ours,)
    assert theirs in pond.data_files()


def test_files_of_other_engines_are_never_orphans(pond):
    """Their names do not have our form."""
    path = f"computation={NAME}/part-00000-abc.parquet"
    pond.objects.put(path, b"PAR1")
    pond.collect()

    assert path in pond.data_files()


def test_checkpoint_with_a_flipped_bit_is_refused():
    """Opening the store avoids the damaged checkpoint if the log suffices."""
    pond = Pond()
    pond.steps(12)
    pond.collect()
    pond.steps(5)
    pond.collect()
    version = max(entry.version for entry in Log(pond.objects).inventory().checkpoints)
    path = checkpoint_path(version)
    whole = pond.objects.get(path)
    damaged = bytearray(whole)
    for index in range(len(whole)):
        damaged[index] ^= 1 << (index % 8)
        with pytest.raises(DataError):
            list(read_part(bytes(damaged), path))
        damaged[index] = whole[index]
    damaged[100] ^= 1
    pond.objects.put(path, bytes(damaged))

    assert pond.versions()[0] > 0
    assert load(Log(pond.objects)).txns == pond.store.committer.snapshot.txns


def test_checkpoint_under_another_versions_name_is_refused():
    """It would silently restore an older table."""
    pond = Pond()
    pond.steps(12)
    pond.collect()
    older = pond.objects.get(checkpoint_path(Log(pond.objects).inventory().checkpoints[-1].version))
    pond.steps(5)
    pond.collect()
    path = checkpoint_path(Log(pond.objects).inventory().checkpoints[-1].version)

    with pytest.raises(DataError, match=path):
        list(read_part(older, path))


def test_delta_rs_reads_the_truncated_log_through_our_checkpoint(tmp_path):
    objects = open_objects(str(tmp_path / "rows"))
    pond = Pond(objects)
    for _ in range(2):
        pond.steps(10)
        pond.collect()
    table = DeltaTable(str(tmp_path / "rows"))
    seen = pond.store.committer.snapshot

    assert not (tmp_path / "rows" / commit_path(0)).exists()
    assert table.version() == seen.version
    assert table.to_pyarrow_table().num_rows == sum(file.num_records or 0 for file in seen.files)
    assert all(table.transaction_version(app_id) == version for app_id, version in seen.txns.items())
    assert orjson.loads(objects.get("_delta_log/_last_checkpoint"))["version"] == seen.version
    assert isinstance(table.to_pyarrow_table(), pa.Table)


def test_checkpoint_is_written_every_so_many_versions():
    pond = Pond()
    pond.steps(5)
    newest = pond.store.committer.snapshot.version

    assert write_checkpoint(pond.objects, every=newest + 1) is None
    assert write_checkpoint(pond.objects, every=newest) == newest
    assert write_checkpoint(pond.objects, every=1) is None


def test_new_catalog_delays_collection():
    """After a lost catalog, readers from before may be unknown for as long as a horizon lives."""
    pond = Pond()
    pond.steps(60)
    pond.catalog = Catalog.open("sqlite://", pond.clock)

    assert pond.collect(Retention(keep_ms=30 * MINUTE_MS, checkpoint_every=1)).horizon == 0
    pond.clock.advance_ms(16 * MINUTE_MS)
    assert pond.collect(Retention(keep_ms=30 * MINUTE_MS, checkpoint_every=1)).horizon > 0


def test_running_pipeline_writes_checkpoints_and_collects_garbage():
    clock, objects = ManualClock(), MemoryObjects()
    store = Store.in_memory(objects=objects, clock=clock, rng=SeededRng(1))
    pipeline = EnginePipeline("p")
    pipeline.inject("in", key="k", at="at").apply(Count(), name="count")
    policy = UpkeepPolicy(
        compaction=CompactionPolicy(fan_in=4, files_max=8), retention="10m", collect_every=16
    )
    run = LocalRunner(store, clock=clock, rng=SeededRng(2), progress=False, upkeep=policy).start(
        pipeline, stepping=True
    )
    for _ in range(120):
        clock.advance_ms(MINUTE_MS)
        run.inject("in", [{"k": "a", "at": 1}])
        run.step()
    files = [path for path in objects.list("") if path.startswith("computation=")]

    assert len(Log(objects).inventory().versions) < 80
    assert len(files) < 80
    assert store.rows_view("count").to_arrow().column("state").to_pylist() == ["120"]


def test_negative_retention_is_refused():
    with pytest.raises(InvalidError):
        Retention(keep_ms=-1)
