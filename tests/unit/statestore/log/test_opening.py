"""Opening a table in an object store: requests that do not grow with its age, and no trust in what shortens them."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from io import BytesIO
from typing import Final

import pyarrow.parquet as pq
import pytest

from millpond.gc.collectors import extend_checkpoint, write_checkpoint
from millpond.statestore.errors import DataError
from millpond.statestore.history.replayed_log import replay_log
from millpond.statestore.interval import Interval
from millpond.statestore.log.action import CommitInfo, Remove
from millpond.statestore.log.checkpoint import checkpoint_path, write_part
from millpond.statestore.log.commit_file import encode
from millpond.statestore.log.committer import Committer
from millpond.statestore.log.high_water import MemoryHighWater
from millpond.statestore.log.log import Log, commit_path
from millpond.statestore.log.snapshot import Snapshot, load
from millpond.statestore.log.table import create_rows_table
from millpond.statestore.objects.memory import MemoryObjects
from millpond.statestore.types import TableVersion
from millpond.testing.fixtures.determinism import ManualClock, SeededRng
from tests.fixtures.commit_requests import fence_request, superstep_request

ALL: Final = Interval("counter")
POINTER: Final = "_delta_log/_last_checkpoint"
PAGE: Final = 1_000
EVERY: Final = 8


class Far(MemoryObjects):
    """An object store that counts its requests, and lists a thousand objects at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: Counter[str] = Counter()

    def get(self, path: str) -> bytes:
        self.requests["get"] += 1
        return super().get(path)

    def get_many(self, paths: Sequence[str]) -> Sequence[bytes | None]:
        self.requests["get"] += len(paths)
        return [self._objects.get(path) for path in paths]

    def list(self, prefix: str, start_after: str | None = None) -> Sequence[str]:
        found = super().list(prefix, start_after)
        self.requests["list"] += max(1, -(-len(found) // PAGE))
        return found


def table(objects: Far, versions: int, *, checkpoints: bool = True) -> Committer:
    """Make a table with a checkpoint after every eighth version, except long ago."""
    log, clock, rng = Log(objects), ManualClock(), SeededRng(1)
    create_rows_table(log, clock, rng)
    committer = Committer(log, clock, rng, MemoryHighWater())
    committer.commit(fence_request(1, ALL))
    while committer.snapshot.version < versions:
        version = committer.snapshot.version + 1
        committer.commit(superstep_request(1, version - 1, ALL, clicks=version))
        if checkpoints and version % EVERY == 0 and versions - version < 4 * EVERY:
            extend_checkpoint(objects, [(TableVersion(version), log.require(TableVersion(version)))])
    return committer


def facts(snapshot: Snapshot) -> tuple[object, ...]:
    return snapshot.version, snapshot.digest, snapshot.files, snapshot.txns, snapshot.metadata


@pytest.mark.parametrize("versions", [EVERY, 20, 1_205])
def test_requests_do_not_grow_with_age(versions: int) -> None:
    objects = Far()
    committer = table(objects, versions)
    objects.requests.clear()

    snapshot = load(Log(objects))

    # The pointer, the checkpoint and its commit, and the commits after it.
    assert objects.requests == {"get": 3 + versions % EVERY, "list": 1}
    assert facts(snapshot) == facts(committer.snapshot)


@pytest.mark.parametrize("versions", [20, 1_205])
def test_version_that_was_reached_lately_saves_the_pointer(versions: int) -> None:
    objects = Far()
    committer = table(objects, versions)
    objects.requests.clear()

    snapshot = load(Log(objects), near=versions - 3)

    assert objects.requests == {"get": 2 + versions % EVERY, "list": 1}
    assert facts(snapshot) == facts(committer.snapshot)


@pytest.mark.parametrize("near", [-1, 5, 900, 1_206, 10_000_000])
def test_version_that_was_reached_lately_is_not_believed(near: int) -> None:
    objects = Far()
    committer = table(objects, 1_205)

    assert facts(load(Log(objects), near=near)) == facts(committer.snapshot)


def test_table_without_checkpoint_is_read_at_once() -> None:
    objects = Far()
    committer = table(objects, 300, checkpoints=False)

    assert facts(load(Log(objects))) == facts(committer.snapshot)


def test_older_version_is_read_from_an_older_checkpoint() -> None:
    objects = Far()
    table(objects, 30)

    snapshot = load(Log(objects), TableVersion(13))

    assert (snapshot.version, snapshot.checkpoint) == (13, 8)
    assert facts(snapshot) == facts(replay_log(Log(objects), TableVersion(13)).snapshot)


@pytest.mark.parametrize(
    "pointer",
    [
        b"",
        b"[]",
        b"{}",
        b'{"version":"8"}',
        b'{"version":-1}',
        b'{"version":1e3}',
        b'{"version":7}',
        b'{"version":8}',
        b'{"version":9000000000000000000}',
        b'{"version":12345678}',
        b"[" * 9_000,
    ],
)
def test_pointer_is_not_believed(pointer: bytes) -> None:
    objects = Far()
    committer = table(objects, 30)
    objects.put(POINTER, pointer)

    assert facts(load(Log(objects))) == facts(committer.snapshot)
    assert Log(objects).latest_version() == 30


def test_missing_pointer_costs_a_whole_listing() -> None:
    objects = Far()
    committer = table(objects, 1_100)
    objects.delete([POINTER])
    objects.requests.clear()

    assert facts(load(Log(objects))) == facts(committer.snapshot)
    assert objects.requests["list"] == 2


@pytest.mark.parametrize("damaged", [(24,), (24, 16), (24, 16, 8)])
def test_damaged_checkpoint_falls_back(damaged: tuple[int, ...]) -> None:
    objects = Far()
    committer = table(objects, 30)
    for version in damaged:
        objects.put(checkpoint_path(version), objects.get(checkpoint_path(version))[:-1])

    assert facts(load(Log(objects))) == facts(committer.snapshot)


def test_missing_commit_after_the_checkpoint_is_named() -> None:
    objects = Far()
    table(objects, 30)
    objects.delete([commit_path(27)])

    with pytest.raises(DataError, match=commit_path(27)):
        load(Log(objects))


@pytest.mark.parametrize("commits_left", [True, False])
def test_checkpoint_of_another_log_is_refused(commits_left: bool) -> None:
    """It has a seal of its own, under the right name."""
    objects, others = Far(), Far()
    committer = table(objects, 30)
    table(others, 23).commit(fence_request(2, ALL))
    extend_checkpoint(others, [(TableVersion(24), Log(others).require(TableVersion(24)))])
    objects.put(checkpoint_path(24), others.get(checkpoint_path(24)))
    if commits_left:
        assert facts(load(Log(objects))) == facts(committer.snapshot)
        return
    objects.delete([*map(commit_path, range(24)), checkpoint_path(8), checkpoint_path(16)])
    with pytest.raises(DataError, match="another log"):
        load(Log(objects))


def _unseal(objects: Far, version: int) -> None:
    """Make another engine's checkpoint from one of Millpond's."""
    path, out = checkpoint_path(version), BytesIO()
    pq.write_table(pq.read_table(BytesIO(objects.get(path))).replace_schema_metadata(None), out)
    objects.put(path, out.getvalue())


def _delete_rows(objects: Far, version: int) -> None:
    """Commit another engine's DELETE as the next version, and write its checkpoint, which hides it."""
    log = Log(objects)
    info = CommitInfo(operation="DELETE", timestamp_ms=1, engine_info="another")
    gone = load(log).files[0].path
    log.put(TableVersion(version), encode([info, Remove(path=gone, deletion_time_ms=1)]))
    replayed = replay_log(log, TableVersion(version - 1))
    actions = [
        action for action in replayed.actions(on_disk=replayed.removes) if getattr(action, "path", "") != gone
    ]
    objects.put(checkpoint_path(version), write_part(actions, checkpoint_path(version)))
    _unseal(objects, version)
    log.name_checkpoint(TableVersion(version), len(actions))


def test_foreign_checkpoint_of_a_store_is_not_needed() -> None:
    objects = Far()
    committer = table(objects, 30)
    _unseal(objects, 24)

    snapshot = load(Log(objects))

    assert (snapshot.checkpoint, facts(snapshot)) == (16, facts(committer.snapshot))


@pytest.mark.parametrize("read", [load, lambda log: replay_log(log, TableVersion(30))])
@pytest.mark.parametrize("cleaned_up", [0, 20, 29])
def test_foreign_change_below_a_foreign_checkpoint_is_refused(
    read: Callable[[Log], object], cleaned_up: int
) -> None:
    objects = Far()
    table(objects, 29)
    _delete_rows(objects, 30)
    objects.delete([commit_path(version) for version in range(cleaned_up)])

    with pytest.raises(DataError, match=r"another engine changed|missing"):
        read(Log(objects))


def test_offsets_are_kept_behind_another_engines_commit() -> None:
    """Only commit files have them, and the one of the checkpoint's version has none."""
    objects = Far()
    committer = table(objects, 14)
    offsets = {"millpond/input/p/clicks/a": "7"}
    committer.commit(replace(superstep_request(1, 14, ALL), source_offsets=offsets))
    for version in (16, 17):
        info = CommitInfo(operation="OPTIMIZE", timestamp_ms=1, engine_info="another")
        Log(objects).put(TableVersion(version), encode([info]))
    extend_checkpoint(objects, [(TableVersion(17), Log(objects).require(TableVersion(17)))])

    snapshot = load(Log(objects))

    assert (snapshot.checkpoint, snapshot.source_offsets) == (17, offsets)
    assert replay_log(Log(objects), TableVersion(17)).snapshot.source_offsets == offsets


def test_foreign_change_gets_no_checkpoint_of_ours() -> None:
    objects = Far()
    table(objects, 29)
    _delete_rows(objects, 30)
    info = CommitInfo(operation="VACUUM END", timestamp_ms=1, engine_info="another")
    Log(objects).put(TableVersion(31), encode([info]))

    with pytest.raises(DataError, match="another engine changed"):
        write_checkpoint(objects, every=1)


def test_checkpoint_continues_from_the_last_one() -> None:
    """No commit is read again, and removed files are remembered until garbage is collected."""
    objects = Far()
    committer = table(objects, 16)
    committer.recent = deque(maxlen=9)
    for number in range(16, 24):
        committer.commit(superstep_request(1, number, ALL))
    objects.requests.clear()

    extend_checkpoint(objects, tuple(committer.recent))

    assert not objects.requests
    assert facts(load(Log(objects))) == facts(committer.snapshot)
    assert load(Log(objects)).checkpoint == 24
