"""Commits read back from the log."""

from __future__ import annotations

import pytest

from millpond.statestore.errors import DataError
from millpond.statestore.history.replayed_log import (
    LoggedCommit,
    newest_commits,
    read_commit,
    readable_commits,
)
from millpond.statestore.log.action import Action, CommitInfo, Txn
from millpond.statestore.log.commit_file import encode
from millpond.statestore.log.log import Log, commit_path
from millpond.statestore.objects.memory import MemoryObjects
from millpond.statestore.types import TableVersion


@pytest.fixture
def log() -> Log:
    log = Log(MemoryObjects())
    for version in range(8):
        info = CommitInfo(
            operation="X", timestamp_ms=10 + version, millpond={"kind": "superstep", "odd": version % 2}
        )
        actions: list[Action] = [info, Txn(app_id="a", version=version), Txn(app_id=f"b{version}", version=1)]
        log.put(TableVersion(version), encode(actions))
    return log


def versions(log: Log, newest: int, limit: int | None = None, naming: bytes = b"") -> list[int]:
    return [commit.version for commit in newest_commits(log, TableVersion(newest), limit, naming=naming)]


def test_commit_has_facts_of_its_file(log: Log) -> None:
    commit = read_commit(log, TableVersion(3))

    assert commit is not None
    assert (commit.version, commit.wall_us, commit.kind) == (3, 13_000, "superstep")
    assert (commit.txns, commit.metadata["odd"]) == ({"a": 3, "b3": 1}, 1)


def test_commits_come_newest_first_up_to_limit_or_gap(log: Log) -> None:
    assert versions(log, 7, 3) == [7, 6, 5]
    assert versions(log, 1, 100) == [1, 0]
    assert versions(log, 9, 3) == []
    log.objects.delete([commit_path(TableVersion(4))])
    assert versions(log, 7) == [7, 6, 5]


def test_commits_are_selected_by_bytes(log: Log) -> None:
    """A commit without the bytes does not end the walk."""
    assert versions(log, 7, naming=b'"b4"') == [4]


def test_damaged_commit_raises_unless_only_readable_are_wanted(log: Log) -> None:
    log.objects.put(commit_path(TableVersion(5)), b"no commit")

    with pytest.raises(DataError):
        versions(log, 7)
    wanted = (TableVersion(version) for version in (4, 5, 6, 99))
    assert [commit.version for commit in readable_commits(log, wanted)] == [4, 6]


def test_foreign_commit_has_only_time() -> None:
    data = encode([CommitInfo(operation="OPTIMIZE", timestamp_ms=2)])
    commit = LoggedCommit.of(TableVersion(3), data)

    assert not commit.is_sealed
    assert (commit.wall_us, commit.kind, commit.metadata, commit.txns) == (2_000, "", {}, {})
