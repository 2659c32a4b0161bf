"""The log: versions put once, and opened with or without a checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from millpond.statestore.errors import DataError, ObjectExistsError, ObjectMissingError
from millpond.statestore.interval import Interval
from millpond.statestore.log.checkpoint import checkpoint_path, checkpoints_among
from millpond.statestore.log.committer import Committer
from millpond.statestore.log.high_water import MemoryHighWater
from millpond.statestore.log.log import Log, commit_path
from millpond.statestore.log.snapshot import Snapshot, catch_up, load
from millpond.statestore.log.table import create_rows_table
from millpond.statestore.objects.memory import MemoryObjects
from millpond.statestore.objects.obstore import open_objects
from millpond.statestore.store import Store
from millpond.statestore.types import TableVersion
from millpond.testing.faults.faulty_objects import FaultyObjects
from millpond.testing.fixtures.determinism import ManualClock, SeededRng
from tests.fixtures.commit_requests import fence_request, superstep_request

if TYPE_CHECKING:
    from pathlib import Path

ALL = Interval("counter")


def _version(number: int) -> TableVersion:
    return TableVersion(number)


def _busy_table(folder: Path, supersteps: int) -> Log:
    log = Log(open_objects(str(folder)))
    clock, rng = ManualClock(), SeededRng(str(folder))
    create_rows_table(log, clock, rng)
    committer = Committer(log, clock, rng, MemoryHighWater())
    committer.commit(fence_request(1, ALL))
    for number in range(1, supersteps + 1):
        committer.commit(superstep_request(1, number, ALL, clicks=number))
    return log


def _table_on(disk: MemoryObjects) -> tuple[Log, Committer]:
    log, clock, rng = Log(disk), ManualClock(), SeededRng(1)
    create_rows_table(log, clock, rng)
    committer = Committer(log, clock, rng, MemoryHighWater())
    committer.commit(fence_request(1, ALL))
    return log, committer


def _clean_up(folder: Path, versions: range) -> None:
    for version in versions:
        (folder / commit_path(version)).unlink()


def _facts(snapshot: Snapshot) -> tuple[object, ...]:
    return (
        snapshot.version,
        snapshot.digest,
        snapshot.files,
        snapshot.txns,
        snapshot.metadata,
        snapshot.protocol,
    )


class TestLog:
    def test_version_is_put_once(self) -> None:
        log = Log(MemoryObjects())
        log.put(_version(0), b"first")

        with pytest.raises(ObjectExistsError):
            log.put(_version(0), b"second")
        assert log.read(_version(0)) == b"first"

    def test_empty_folder_has_no_version(self) -> None:
        log = Log(MemoryObjects())

        assert log.latest_version() is None
        assert log.read(_version(0)) is None
        with pytest.raises(ObjectMissingError):
            load(log)

    def test_other_files_are_no_commits(self) -> None:
        objects = MemoryObjects()
        log = Log(objects)
        log.put(_version(3), b"")
        for name in (
            "9.json",
            f"{8:020d}.json.tmp",
            f"sub/{7:020d}.json",
            f"{6:020d}.crc",
            "_last_checkpoint",
        ):
            objects.put(f"_delta_log/{name}", b"")

        assert log.inventory().versions == (3,)
        assert log.latest_version() == 3

    def test_only_complete_checkpoint_counts(self) -> None:
        part = "_delta_log/{:020d}.checkpoint.{:010d}.{:010d}.parquet"
        paths = [
            f"_delta_log/{2:020d}.checkpoint.parquet",
            part.format(4, 1, 2),
            part.format(4, 2, 2),
            part.format(6, 1, 2),
        ]

        checkpoints = checkpoints_among(paths)

        assert [checkpoint.version for checkpoint in checkpoints] == [2, 4]
        assert len(checkpoints[1].paths) == 2


class TestCheckpoint:
    def test_cleaned_up_log_opens_from_checkpoint(self, tmp_path: Path) -> None:
        """The checkpoint is one of delta-rs."""
        log = _busy_table(tmp_path, 5)
        DeltaTable(str(tmp_path)).create_checkpoint()
        committer = Committer(log, ManualClock(), SeededRng(1), MemoryHighWater())
        committer.commit(superstep_request(1, 6, ALL))
        whole = load(log)

        _clean_up(tmp_path, range(5))

        assert _facts(load(log)) == _facts(whole)

    def test_checkpoint_without_its_commit_opens(self, tmp_path: Path) -> None:
        """The digest is unknown, and commits continue."""
        log = _busy_table(tmp_path, 3)
        DeltaTable(str(tmp_path)).create_checkpoint()
        _clean_up(tmp_path, range(5))

        snapshot = load(log)
        committer = Committer(log, ManualClock(), SeededRng(1), MemoryHighWater())
        committer.commit(superstep_request(1, 4, ALL))

        assert (snapshot.version, snapshot.digest, snapshot.file_count) == (4, "", 3)
        assert load(log).file_count == 4

    def test_interrupted_cleanup_is_harmless(self, tmp_path: Path) -> None:
        """The log has holes below its checkpoint."""
        log = _busy_table(tmp_path, 5)
        DeltaTable(str(tmp_path)).create_checkpoint()
        whole = load(log)

        _clean_up(tmp_path, range(2, 4))

        assert _facts(load(log)) == _facts(whole)

    def test_deleted_version_below_checkpoint_is_named(self, tmp_path: Path) -> None:
        log = _busy_table(tmp_path, 5)
        DeltaTable(str(tmp_path)).create_checkpoint()
        _clean_up(tmp_path, range(3))

        with pytest.raises(DataError, match=checkpoint_path(3)):
            load(log, _version(4))

    def test_damaged_only_checkpoint_is_named(self, tmp_path: Path) -> None:
        log = _busy_table(tmp_path, 3)
        DeltaTable(str(tmp_path)).create_checkpoint()
        _clean_up(tmp_path, range(4))
        checkpoint = log.inventory().checkpoints[0].paths[0]
        (tmp_path / checkpoint).write_bytes(b"PAR1 no more")

        with pytest.raises(DataError, match=checkpoint):
            load(log)

    def test_damaged_newest_checkpoint_falls_back(self, tmp_path: Path) -> None:
        log = _busy_table(tmp_path, 2)
        DeltaTable(str(tmp_path)).create_checkpoint()
        committer = Committer(log, ManualClock(), SeededRng(1), MemoryHighWater())
        committer.commit(superstep_request(1, 3, ALL))
        DeltaTable(str(tmp_path)).create_checkpoint()
        whole = load(log)
        _clean_up(tmp_path, range(2))
        (tmp_path / log.inventory().checkpoints[1].paths[0]).write_bytes(b"")

        assert _facts(load(log)) == _facts(whole)

    def test_checkpoint_in_parts_is_read_whole(self, tmp_path: Path) -> None:
        log = _busy_table(tmp_path, 4)
        DeltaTable(str(tmp_path)).create_checkpoint()
        whole = load(log)
        single = tmp_path / log.inventory().checkpoints[0].paths[0]
        table = pq.read_table(single)
        for number, part in enumerate((table.slice(0, 3), table.slice(3)), 1):
            name = f"{5:020d}.checkpoint.{number:010d}.{2:010d}.parquet"
            pq.write_table(part, tmp_path / "_delta_log" / name)
        single.unlink()
        _clean_up(tmp_path, range(5))

        assert _facts(load(log)) == _facts(whole)

    def test_checkpoint_without_statistics_prunes_nothing(self, tmp_path: Path) -> None:
        log = _busy_table(tmp_path, 1)
        DeltaTable(str(tmp_path)).create_checkpoint()
        path = tmp_path / log.inventory().checkpoints[0].paths[0]
        table = pq.read_table(path)
        adds = [add and {**add, "stats": None} for add in table.column("add").to_pylist()]
        at = table.column_names.index("add")
        column = pa.array(adds, table.schema.field("add").type)
        pq.write_table(table.set_column(at, "add", column), path)
        _clean_up(tmp_path, range(2))

        (file,) = load(log).files

        assert (file.min_key, file.max_key, file.num_records) == (None, None, None)
        assert file.overlaps(Interval("counter", "x", "y"))


class _ReadPaths(MemoryObjects):
    def __init__(self) -> None:
        super().__init__()
        self.paths: list[str] = []

    def get(self, path: str) -> bytes:
        self.paths.append(path)
        return super().get(path)


class TestCatchUp:
    def test_snapshot_reads_only_later_commits(self) -> None:
        disk = _ReadPaths()
        log, committer = _table_on(disk)
        snapshot = load(log)
        committer.commit(superstep_request(1, 1, ALL))
        committer.commit(superstep_request(1, 2, ALL))
        disk.paths.clear()

        caught_up = catch_up(log, snapshot)

        assert disk.paths == [commit_path(2), commit_path(3)]
        assert _facts(caught_up) == _facts(load(log))

    def test_opening_reads_each_commit_once(self) -> None:
        disk = _ReadPaths()
        _log, committer = _table_on(disk)
        committer.commit(superstep_request(1, 1, ALL))
        disk.paths.clear()

        Store.in_memory(objects=disk).close()

        assert sorted(disk.paths) == [commit_path(version) for version in range(3)]

    def test_truncated_log_is_reloaded(self, tmp_path: Path) -> None:
        log = _busy_table(tmp_path, 4)
        snapshot = load(log)
        _clean_up(tmp_path, range(4, 6))

        assert catch_up(log, snapshot).version == 3

    def test_cleaned_up_log_is_reloaded_from_checkpoint(self, tmp_path: Path) -> None:
        log = _busy_table(tmp_path, 5)
        snapshot = load(log, _version(2))
        DeltaTable(str(tmp_path)).create_checkpoint()
        whole = load(log)
        _clean_up(tmp_path, range(4, 6))

        assert _facts(catch_up(log, snapshot)) == _facts(whole)

    def test_late_commit_below_cleanup_is_not_followed(self, tmp_path: Path) -> None:
        log = _busy_table(tmp_path, 5)
        snapshot = load(log, _version(2))
        late = log.require(_version(3))
        DeltaTable(str(tmp_path)).create_checkpoint()
        whole = load(log)
        _clean_up(tmp_path, range(6))
        log.put(_version(3), late)

        assert _facts(catch_up(log, snapshot)) == _facts(whole)

    def test_cleanup_between_listing_and_reading_reloads(self, tmp_path: Path) -> None:
        log = _busy_table(tmp_path, 5)
        snapshot = load(log, _version(2))
        DeltaTable(str(tmp_path)).create_checkpoint()
        whole = load(log)
        objects = FaultyObjects(log.objects)
        objects.interrupt("get", lambda: _clean_up(tmp_path, range(5)))

        assert _facts(catch_up(Log(objects), snapshot)) == _facts(whole)

    def test_damaged_later_commit_is_named(self, tmp_path: Path) -> None:
        log = _busy_table(tmp_path, 4)
        snapshot = load(log, _version(2))
        (tmp_path / commit_path(4)).write_bytes(b"{}")

        with pytest.raises(DataError, match=f"{commit_path(4)}|{commit_path(5)}"):
            catch_up(log, snapshot)


class TestDamage:
    def test_gap_without_checkpoint_is_named(self, tmp_path: Path) -> None:
        log = _busy_table(tmp_path, 4)
        (tmp_path / commit_path(2)).unlink()

        with pytest.raises(DataError, match=commit_path(2)):
            load(log)

    @pytest.mark.parametrize("damage", [b"", b"\0" * 300, b"{}", b'{"commitInfo":'])
    def test_damaged_middle_commit_is_named(self, tmp_path: Path, damage: bytes) -> None:
        log = _busy_table(tmp_path, 4)
        (tmp_path / commit_path(2)).write_bytes(damage)

        with pytest.raises(DataError, match=f"{commit_path(2)}|{commit_path(3)}"):
            load(log)

    def test_swapped_commit_breaks_chain(self, tmp_path: Path) -> None:
        log = _busy_table(tmp_path / "one", 4)
        _busy_table(tmp_path / "two", 4)
        other = (tmp_path / "two" / commit_path(3)).read_bytes()
        (tmp_path / "one" / commit_path(3)).write_bytes(other)

        with pytest.raises(DataError, match="built on"):
            load(log)
