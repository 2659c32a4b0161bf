"""The commit: what it is, other writers, damage."""

from __future__ import annotations

from dataclasses import replace

import pytest

from millpond.statestore.errors import (
    ConflictError,
    DataError,
    FencedError,
    InvalidError,
)
from millpond.statestore.interval import Interval
from millpond.statestore.log.action import Action, Add, CommitInfo, Metadata, Protocol, Remove, Txn
from millpond.statestore.log.commit_file import decode, encode
from millpond.statestore.log.committer import Committer
from millpond.statestore.log.log import commit_path
from millpond.statestore.log.rules import CommitRequest
from millpond.statestore.log.snapshot import load
from millpond.statestore.rows.row import Fence, pack_fence
from millpond.statestore.system import RetryPolicy
from millpond.statestore.types import CommitNumber, Sequencer, TableVersion
from tests.fixtures.commit_requests import (
    Bench,
    fence_request,
    row_file,
    superstep_request,
    write_of,
)

LOW, HIGH = Interval("counter", "", "m"), Interval("counter", "m")


@pytest.fixture
def bench() -> Bench:
    return Bench().create()


def _foreign(bench: Bench, *actions: Action) -> TableVersion:
    """Let another writer commit."""
    version = TableVersion((bench.log.latest_version() or 0) + 1)
    bench.log.put(
        version, encode((CommitInfo(operation="WRITE", timestamp_ms=0, millpond={"kind": "other"}), *actions))
    )
    return version


def _foreign_add(path: str = "computation=counter/foreign.parquet") -> Add:
    return Add(path=path, size_bytes=1, partition_values={"computation": "counter"}, modification_time_ms=0)


def _fence(sequencer: int, number: int) -> Fence:
    return Fence(Sequencer(sequencer), CommitNumber(number))


class TestWhatACommitIs:
    def test_everything_changes_together(self, bench: Bench) -> None:
        """Files, fences, positions and watermarks of a superstep are one version."""
        committer = bench.committer()
        committer.commit(fence_request(1, LOW, HIGH))
        request = superstep_request(1, 1, LOW, HIGH, clicks=7)

        committed = committer.commit(request)

        snapshot = load(bench.log)
        assert (committed.version, committed.digest) == (2, snapshot.digest)
        assert {file.path for file in snapshot.files} == {w.added[0].path for w in request.writes}
        assert snapshot.fence_of(LOW) == snapshot.fence_of(HIGH) == _fence(1, 1)
        assert snapshot.txns["millpond/input/p/clicks/local"] == 7
        assert snapshot.watermarks == {LOW.app_id: 1, HIGH.app_id: 1}

    def test_the_history_says_who_and_why(self, bench: Bench) -> None:
        """The commitInfo carries the writer, the chain, the superstep and the caller's metadata."""
        committer = bench.committer()
        committer.commit(fence_request(1, LOW))
        request = replace(superstep_request(1, 1, LOW), metadata={"records": 3, "kind": "ignored"})
        request = replace(request, positions={"millpond/superstep/p": 9})
        digest = committer.snapshot.digest
        committer.commit(request)

        info = decode(bench.log.require(TableVersion(2)))[0]

        assert isinstance(info, CommitInfo)
        assert info.millpond is not None
        told = {name: info.millpond[name] for name in ("kind", "superstep", "records", "writer", "previous")}
        assert told == {
            "kind": "superstep",
            "superstep": 9,
            "records": 3,
            "writer": committer.writer_id,
            "previous": digest,
        }
        assert (info.is_blind_append, info.read_version, info.metrics["numOutputRows"]) == (True, 1, "10")

    def test_each_commit_says_where_inputs_are_in_their_sources(self, bench: Bench) -> None:
        """Those of the commits before it too, so that one commit file is enough."""
        committer = bench.committer()
        committer.commit(fence_request(1, LOW))
        first = superstep_request(1, 1, LOW, queries=1)
        committer.commit(replace(first, source_offsets={"p/queries/local": "offset 7"}))
        second = superstep_request(1, 2, LOW, clicks=1)
        committer.commit(replace(second, source_offsets={"p/clicks/local": "offset 9"}))
        committer.commit(CommitRequest(kind="request", positions={"other": 1}))

        newest = load(bench.log)
        assert newest.source_offsets == {"p/queries/local": "offset 7", "p/clicks/local": "offset 9"}
        (info, *_) = decode(bench.log.require(newest.version), commit_path(newest.version))
        assert isinstance(info, CommitInfo)
        assert (info.millpond or {})["source_offsets"] == newest.source_offsets
        assert load(bench.log, TableVersion(newest.version - 2)).source_offsets == {
            "p/queries/local": "offset 7"
        }

    def test_of_a_stream_the_offsets_of_its_last_source_stay(self, bench: Bench) -> None:
        """A query with a new checkpoint takes the place of the one before it."""
        committer = bench.committer()
        committer.commit(fence_request(1, LOW))
        for number, source in enumerate(("old", "new"), start=1):
            request = superstep_request(1, number, LOW, clicks=number)
            committer.commit(replace(request, source_offsets={f"p/clicks/{source}": f"offset {number}"}))

        assert load(bench.log).source_offsets == {"p/clicks/new": "offset 2"}

    def test_a_compaction_replaces_files_without_changing_data(self, bench: Bench) -> None:
        """A compaction's actions say that no data changed, and the replaced file is described for vacuum."""
        committer = bench.committer()
        committer.commit(fence_request(1, LOW))
        request = superstep_request(1, 1, LOW)
        committer.commit(request)
        old = request.writes[0].added[0].path
        compacted = replace(write_of(LOW, 1, 2, row_file(LOW, _fence(1, 2), superstep=1)), removed=(old,))
        committer.commit(CommitRequest(kind="compaction", writes=(compacted,)))

        actions = decode(bench.log.require(TableVersion(3)))

        (remove,) = (action for action in actions if isinstance(action, Remove))
        (add,) = (action for action in actions if isinstance(action, Add))
        assert (remove.path, remove.data_change, add.data_change) == (old, False, False)
        assert (remove.size_bytes, remove.partition_values) == (1_000, {"computation": "counter"})
        assert [file.path for file in committer.snapshot.files_of(LOW)] == [add.path]

    def test_a_commit_costs_three_calls(self, bench: Bench) -> None:
        """One look for a newer version, one put, and one look at the log's boundary, a folder of one object."""
        committer, objects = bench.faulty()

        committer.commit(fence_request(1, LOW))

        assert objects.calls == {"get": 1, "put_if_absent": 1, "list": 1}

    def test_a_committer_follows_the_others(self, bench: Bench) -> None:
        """Two committers that write in turn end with the same snapshot."""
        one, two = bench.committer(), bench.committer()
        one.commit(fence_request(1, LOW))
        two.commit(fence_request(1, HIGH))
        one.commit(superstep_request(1, 1, LOW))

        assert one.refresh().files == two.refresh().files == load(bench.log).files
        assert one.refresh().digest == two.refresh().digest


class TestOtherWriters:
    def _raced(self, bench: Bench, request: CommitRequest, *actions: Action) -> Committer:
        committer, objects = bench.faulty()
        committer.commit(fence_request(1, LOW))
        committer.commit(superstep_request(1, 1, LOW, clicks=1))
        objects.interrupt("put_if_absent", lambda: _foreign(bench, *actions))
        committer.commit(request)
        return committer

    def test_an_unrelated_append_is_stepped_over(self, bench: Bench) -> None:
        """Another engine's append takes the version; the commit takes the next and the chain holds."""
        committer = self._raced(bench, superstep_request(1, 2, LOW), _foreign_add())

        assert committer.snapshot.version == 4
        assert load(bench.log).files == committer.snapshot.files
        assert committer.snapshot.file_count == 3

    def test_the_file_knows_its_real_version(self, bench: Bench) -> None:
        """A file's version is the one that it landed in, not the one that was tried first."""
        committer = self._raced(bench, superstep_request(1, 2, LOW), _foreign_add())

        assert sorted(file.added_version for file in committer.snapshot.files) == [2, 3, 4]

    def test_our_application_id_fences(self, bench: Bench) -> None:
        """A commit that touches our interval's application id, with whatever value, fences us."""
        same = Txn(app_id=LOW.app_id, version=pack_fence(Sequencer(1), CommitNumber(1)))

        with pytest.raises(FencedError):
            self._raced(bench, superstep_request(1, 2, LOW), same)

    def test_our_position_conflicts(self, bench: Bench) -> None:
        """A commit that moves one of our inputs first is a conflict."""
        moved = Txn(app_id="millpond/input/p/clicks/local", version=2)

        with pytest.raises(ConflictError, match="position"):
            self._raced(bench, superstep_request(1, 2, LOW, clicks=2), moved)

    @pytest.mark.parametrize(
        "action",
        [Protocol(), Metadata(table_id="x", name="rows", schema_string="{}")],
        ids=["protocol", "metadata"],
    )
    def test_a_change_of_the_table_conflicts(self, bench: Bench, action: Action) -> None:
        """A protocol or metadata change in between is a conflict."""
        with pytest.raises(ConflictError, match="protocol or metadata"):
            self._raced(bench, superstep_request(1, 2, LOW), action)

    def test_a_removal_of_the_same_file_conflicts(self, bench: Bench) -> None:
        """Two rewrites of one file: the second one is refused, before and during the race."""
        committer, objects = bench.faulty()
        committer.commit(fence_request(1, LOW))
        request = superstep_request(1, 1, LOW)
        committer.commit(request)
        path = request.writes[0].added[0].path
        compaction = CommitRequest(kind="compaction", writes=(replace(write_of(LOW, 1, 2), removed=(path,)),))
        objects.interrupt("put_if_absent", lambda: _foreign(bench, Remove(path=path, deletion_time_ms=0)))

        with pytest.raises(ConflictError, match="removed"):
            committer.commit(compaction)
        with pytest.raises(ConflictError, match="no longer live"):
            committer.commit(compaction)

    def test_a_removal_of_another_file_is_stepped_over(self, bench: Bench) -> None:
        """Another writer's removal of a file that the commit does not touch is no conflict."""
        committer = self._raced(bench, superstep_request(1, 2, LOW), Remove(path="other", deletion_time_ms=0))

        assert committer.snapshot.version == 4

    def test_a_table_that_asks_for_a_newer_writer_is_left_alone(self, bench: Bench) -> None:
        """A table that another engine has upgraded is not written to."""
        _foreign(bench, Protocol(min_writer_version=7))

        with pytest.raises(InvalidError, match="newer Delta writer"):
            bench.committer().commit(fence_request(1, LOW))

    def test_the_race_is_bounded(self, bench: Bench) -> None:
        """A writer that always comes second gives up with a conflict."""
        bench.retry = RetryPolicy(versions_max=3)
        committer, objects = bench.faulty()
        objects.before = lambda op, _path: _foreign(bench, _foreign_add()) if op == "put_if_absent" else None

        with pytest.raises(ConflictError, match="too often"):
            committer.commit(fence_request(1, LOW))
        assert objects.calls["put_if_absent"] == 3


class TestDamage:
    def _table(self, bench: Bench) -> None:
        committer = bench.committer()
        committer.commit(fence_request(1, LOW))
        for number in (1, 2, 3):
            committer.commit(superstep_request(1, number, LOW))

    @pytest.mark.parametrize("cut", ["zeroed", "emptied", "at a line", "within a line", "swapped"])
    def test_a_damaged_last_commit_is_named(self, bench: Bench, cut: str) -> None:
        """A last commit that was zeroed, emptied, cut or replaced is refused, with its name."""
        self._table(bench)
        path = commit_path(4)
        data = bench.memory.get(path)
        damaged = {
            "zeroed": b"\0" * len(data),
            "emptied": b"",
            "at a line": b"".join(data.splitlines(keepends=True)[:-1]),
            "within a line": data[:-20],
            "swapped": bench.memory.get(commit_path(3)),
        }[cut]
        bench.memory.put(path, damaged)

        with pytest.raises(DataError, match=path):
            bench.committer()

    def test_a_deleted_last_commit_is_named(self, bench: Bench) -> None:
        """A log that ends before the high-water mark is refused, with the missing file's name."""
        self._table(bench)
        bench.memory.delete([commit_path(4)])

        with pytest.raises(DataError, match=f"cut or rolled back.*{commit_path(4)}"):
            bench.committer()

    def test_a_log_that_was_rolled_back_and_written_again_is_named(self, bench: Bench) -> None:
        """Another commit in the place of an acknowledged one is refused by its digest."""
        self._table(bench)
        bench.memory.delete([commit_path(4)])
        _foreign(bench, _foreign_add())
        _foreign(bench, _foreign_add("computation=counter/second.parquet"))

        with pytest.raises(DataError, match=f"not the one.*{commit_path(4)}"):
            bench.committer()

    def test_a_change_of_data_by_another_engine_stops_the_writer(self, bench: Bench) -> None:
        """A writer that another engine comes between refuses it by name, and nothing is written on top of it."""
        committer = bench.committer()
        actions = (CommitInfo(operation="MERGE", timestamp_ms=0, engine_info="other"), _foreign_add())
        bench.log.put(TableVersion(1), encode(actions))

        for _ in range(2):
            with pytest.raises(DataError, match="version=`1` operation=`MERGE` engine=`other`"):
                committer.commit(fence_request(1, LOW))
        assert bench.log.latest_version() == 1

    def test_foreign_commits_raise_the_mark_too(self, bench: Bench) -> None:
        """A version that was only read is missed as well when it goes."""
        committer = bench.committer()
        version = _foreign(bench, _foreign_add())
        committer.refresh()
        bench.memory.delete([commit_path(version)])

        with pytest.raises(DataError, match=commit_path(version)):
            bench.committer()

    def test_a_mark_without_digest_compares_versions_only(self, bench: Bench) -> None:
        """A mark whose digest is unknown still tells how far the table reached."""
        self._table(bench)
        bench.high_water.advance(TableVersion(9), "")

        with pytest.raises(DataError, match="cut or rolled back"):
            bench.committer()

    def test_a_running_committer_refuses_damaged_new_commits(self, bench: Bench) -> None:
        """A damaged commit is refused on refresh, and the snapshot stays where it was."""
        committer = bench.committer()
        bench.memory.put(commit_path(1), b'{"add":')

        with pytest.raises(DataError, match=commit_path(1)):
            committer.refresh()
        assert committer.snapshot.version == 0
