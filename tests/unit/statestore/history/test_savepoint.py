"""Savepoints of a store."""

from __future__ import annotations

from pathlib import Path

import pytest
from deltalake import DeltaTable

from millpond.gc.collectors import write_checkpoint
from millpond.statestore.app_ids import SAVEPOINT_RELEASED, AppId
from millpond.statestore.errors import ConflictError, InvalidError
from millpond.statestore.failpoint import listening
from millpond.statestore.history.savepoint import publish_collected_horizon
from millpond.statestore.interval import Interval
from millpond.statestore.leases.memory import MemoryLeases, MemoryRegistry
from millpond.statestore.log.rules import CommitRequest
from millpond.statestore.store import Store
from millpond.statestore.system import SystemClock
from millpond.statestore.types import TableVersion
from tests.fixtures.commit_requests import fence_request, superstep_request


def opened(path: Path) -> Store:
    registry, clock = MemoryRegistry(), SystemClock()
    return Store.open(path, leases=lambda _, writer: MemoryLeases(registry, clock, writer_id=writer))


@pytest.fixture
def store() -> Store:
    return Store.in_memory()


def test_savepoint_defaults_to_newest_version(store: Store) -> None:
    store.committer.commit(CommitRequest(kind="request", positions={"other": 1}))
    first, newest = store.savepoint("first", 0), store.savepoint("newest")

    assert [(one.name, one.version) for one in store.savepoints()] == [("first", 0), ("newest", 2)]
    assert (first.version, newest.version) == (0, 2)
    store.drop_savepoint("first")
    assert store.savepoints() == (newest,)


def test_repeated_creation_changes_nothing(store: Store) -> None:
    made = store.savepoint("mine")
    version = store.snapshot().version

    assert store.savepoint("mine") == store.savepoint("mine", made.version) == made
    assert store.snapshot().version == version


def test_dropped_name_is_free(store: Store) -> None:
    """The new savepoint may have an older version."""
    store.savepoint("mine")
    store.savepoint("other")
    store.drop_savepoint("mine")

    assert store.savepoint("mine", 0).version == 0


def test_checkpoint_forgets_dropped_savepoints(store: Store) -> None:
    """Otherwise a store with a savepoint a day would open ever more slowly."""
    kept = store.savepoint("kept")
    for day in range(5):
        store.savepoint(f"day {day}")
        store.drop_savepoint(f"day {day}")
    write_checkpoint(store.objects, every=1)

    known = [app_id for app_id in store.snapshot().txns if app_id.startswith(AppId.SAVEPOINT)]
    assert known == [AppId.SAVEPOINT.of("kept")]
    assert store.savepoints() == (kept,)
    assert store.savepoint("day 3", 0).version == 0


@pytest.mark.parametrize("name", ["", "12", "x" * 201])
def test_savepoint_name_must_not_be_number(store: Store, name: str) -> None:
    """Commands accept it in place of a version number."""
    with pytest.raises(InvalidError, match="1 to 200 characters"):
        store.savepoint(name)


def test_taken_name_future_version_and_absent_savepoint_are_refused(store: Store) -> None:
    store.savepoint("mine", 0)
    with pytest.raises(InvalidError, match="another savepoint has that name"):
        store.savepoint("mine", 1)
    with pytest.raises(InvalidError, match="no such table version"):
        store.savepoint("late", 9)
    with pytest.raises(InvalidError, match="no savepoint of that name"):
        store.drop_savepoint("yours")


def test_concurrent_writers_cannot_share_name(store: Store) -> None:
    """The commit refuses a writer that has not seen the other savepoint."""
    store.savepoint("mine", 0)
    other = CommitRequest(kind="savepoint", positions={AppId.SAVEPOINT.of("mine"): 1})
    with pytest.raises(ConflictError, match="another savepoint"):
        store.committer.commit(other)

    drop = CommitRequest(kind="savepoint", positions={AppId.SAVEPOINT.of("mine"): SAVEPOINT_RELEASED})
    store.committer.commit(drop)
    store.committer.commit(other)
    assert [one.version for one in store.savepoints()] == [1]


@pytest.mark.parametrize("version", [None, 0])
def test_savepoint_lost_to_collector_uses_newer_version_or_fails(store: Store, version: int | None) -> None:
    """A version named by the caller is not replaced."""

    def collect(name: str) -> None:
        if name == "checkpoint.written" and not store.log.inventory().checkpoints[1:]:
            store.committer.commit(CommitRequest(kind="request", positions={"other": 1}))
            publish_collected_horizon(store.objects, TableVersion(1))

    with listening(collect):
        if version is None:
            assert store.savepoint("mine").version == 3, "after the other one's commit, and its own two"
            assert [one.version for one in store.savepoints()] == [3]
            return
        with pytest.raises(ConflictError, match="older than the retention"):
            store.savepoint("mine", version)
        assert store.savepoints() == ()


def test_delta_reader_reads_savepoint_without_log(tmp_path: Path) -> None:
    """It needs only the checkpoint."""
    with opened(tmp_path / "pond") as store:
        interval = Interval("c")
        store.committer.commit(fence_request(1, interval))
        for number in range(1, 5):
            store.committer.commit(superstep_request(1, number, interval))
        store.savepoint("mine", 3)
        before = sorted(file.path for file in store.snapshot(3).files)
    log = tmp_path / "pond/rows/_delta_log"
    for path in log.glob("0000000000000000000[012].json"):
        path.unlink()

    table = DeltaTable(str(tmp_path / "pond/rows"), version=3)
    assert sorted(file.rpartition("/rows/")[2] for file in table.file_uris()) == before
