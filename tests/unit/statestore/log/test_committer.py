"""Commits, other writers and damage."""

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
    def test_superstep_is_one_version(self, bench: Bench) -> None:
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

    def test_commit_info_has_writer_chain_superstep_and_metadata(self, bench: Bench) -> None:
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

    def test_commit_has_source_offsets_of_earlier_inputs(self, bench: Bench) -> None:
        """One commit file must be enough to know them all."""
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

    def test_new_source_replaces_stream_offsets(self, bench: Bench) -> None:
        """The new source is a query with a new checkpoint."""
        committer = bench.committer()
        committer.commit(fence_request(1, LOW))
        for number, source in enumerate(("old", "new"), start=1):
            request = superstep_request(1, number, LOW, clicks=number)
            committer.commit(replace(request, source_offsets={f"p/clicks/{source}": f"offset {number}"}))

        assert load(bench.log).source_offsets == {"p/clicks/new": "offset 2"}

    def test_compaction_changes_no_data(self, bench: Bench) -> None:
        """Vacuum needs the description of the replaced file."""
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

    def test_commit_costs_two_calls(self, bench: Bench) -> None:
        """These are a put and a look at the boundary: the put finds out if another writer was faster."""
        committer, objects = bench.faulty()

        committer.commit(fence_request(1, LOW))

        assert objects.calls == {"put_if_absent": 1, "list": 1}

    def test_commit_after_another_writers_looks_first(self, bench: Bench) -> None:
        committer, objects = bench.faulty()
        other = bench.committer()
        other.commit(fence_request(1, LOW))
        committer.commit(fence_request(1, HIGH))
        objects.calls.clear()

        committer.commit(superstep_request(1, 1, HIGH))
        assert objects.calls == {"get": 1, "put_if_absent": 1, "list": 1}
        objects.calls.clear()
        committer.commit(superstep_request(1, 2, HIGH))
        assert objects.calls == {"put_if_absent": 1, "list": 1}

    def test_request_refused_on_an_older_version_is_tried_on_the_newest(self, bench: Bench) -> None:
        """The other writer adds a file, and this one removes it."""
        committer, other = bench.committer(), bench.committer()
        other.commit(fence_request(1, LOW))
        file = row_file(LOW, _fence(1, 1), superstep=1)
        other.commit(CommitRequest(kind="superstep", writes=(write_of(LOW, 1, 1, file),)))

        removal = replace(write_of(LOW, 1, 2), removed=(file.path,))
        committer.commit(CommitRequest(kind="compaction", writes=(removal,)))

        assert committer.snapshot.file(file.path) is None

    def test_alternating_committers_agree(self, bench: Bench) -> None:
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
        # After a while a writer looks for newer versions; the foreign commit comes between that look and the put.
        bench.clock.advance_ms(10_001)
        objects.interrupt("put_if_absent", lambda: _foreign(bench, *actions))
        committer.commit(request)
        return committer

    def test_change_from_before_the_commit_is_followed(self, bench: Bench) -> None:
        """The writer does not look before its put, and must not take that change for one that came in between."""
        committer = bench.committer()
        committer.commit(fence_request(1, LOW))
        metadata = committer.snapshot.metadata
        assert metadata is not None
        _foreign(bench, replace(metadata, configuration={**metadata.configuration, "delta.x": "1"}))

        committer.commit(superstep_request(1, 1, LOW))

        assert (committer.snapshot.version, committer.snapshot.configuration["delta.x"]) == (3, "1")

    def test_unrelated_append_is_skipped(self, bench: Bench) -> None:
        """The chain continues behind the foreign commit."""
        committer = self._raced(bench, superstep_request(1, 2, LOW), _foreign_add())

        assert committer.snapshot.version == 4
        assert load(bench.log).files == committer.snapshot.files
        assert committer.snapshot.file_count == 3

    def test_file_has_version_it_landed_in(self, bench: Bench) -> None:
        committer = self._raced(bench, superstep_request(1, 2, LOW), _foreign_add())

        assert sorted(file.added_version for file in committer.snapshot.files) == [2, 3, 4]

    def test_foreign_use_of_our_app_id_fences(self, bench: Bench) -> None:
        same = Txn(app_id=LOW.app_id, version=pack_fence(Sequencer(1), CommitNumber(1)))

        with pytest.raises(FencedError):
            self._raced(bench, superstep_request(1, 2, LOW), same)

    def test_foreign_move_of_our_position_conflicts(self, bench: Bench) -> None:
        moved = Txn(app_id="millpond/input/p/clicks/local", version=2)

        with pytest.raises(ConflictError, match="position"):
            self._raced(bench, superstep_request(1, 2, LOW, clicks=2), moved)

    @pytest.mark.parametrize(
        "action",
        [Protocol(), Metadata(table_id="x", name="rows", schema_string="{}")],
        ids=["protocol", "metadata"],
    )
    def test_table_change_conflicts(self, bench: Bench, action: Action) -> None:
        with pytest.raises(ConflictError, match="protocol or metadata"):
            self._raced(bench, superstep_request(1, 2, LOW), action)

    def test_second_removal_of_file_is_refused(self, bench: Bench) -> None:
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

    def test_removal_of_other_file_is_skipped(self, bench: Bench) -> None:
        committer = self._raced(bench, superstep_request(1, 2, LOW), Remove(path="other", deletion_time_ms=0))

        assert committer.snapshot.version == 4

    def test_table_needing_newer_writer_is_refused(self, bench: Bench) -> None:
        _foreign(bench, Protocol(min_writer_version=7))

        with pytest.raises(InvalidError, match="newer Delta writer"):
            bench.committer().commit(fence_request(1, LOW))

    def test_lost_races_end_in_conflict(self, bench: Bench) -> None:
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
    def test_damaged_last_commit_is_named(self, bench: Bench, cut: str) -> None:
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

    def test_deleted_last_commit_is_named(self, bench: Bench) -> None:
        self._table(bench)
        bench.memory.delete([commit_path(4)])

        with pytest.raises(DataError, match=f"cut or rolled back.*{commit_path(4)}"):
            bench.committer()

    def test_rewritten_last_commit_is_found_by_digest(self, bench: Bench) -> None:
        self._table(bench)
        bench.memory.delete([commit_path(4)])
        _foreign(bench, _foreign_add())
        _foreign(bench, _foreign_add("computation=counter/second.parquet"))

        with pytest.raises(DataError, match=f"not the one.*{commit_path(4)}"):
            bench.committer()

    def test_foreign_data_change_stops_writer(self, bench: Bench) -> None:
        committer = bench.committer()
        actions = (CommitInfo(operation="MERGE", timestamp_ms=0, engine_info="other"), _foreign_add())
        bench.log.put(TableVersion(1), encode(actions))

        for _ in range(2):
            with pytest.raises(DataError, match="version=`1` operation=`MERGE` engine=`other`"):
                committer.commit(fence_request(1, LOW))
        assert bench.log.latest_version() == 1

    def test_foreign_commit_raises_mark(self, bench: Bench) -> None:
        """Its loss must be noticed too."""
        committer = bench.committer()
        version = _foreign(bench, _foreign_add())
        committer.refresh()
        bench.memory.delete([commit_path(version)])

        with pytest.raises(DataError, match=commit_path(version)):
            bench.committer()

    def test_mark_without_digest_compares_versions_only(self, bench: Bench) -> None:
        self._table(bench)
        bench.high_water.advance(TableVersion(9), "")

        with pytest.raises(DataError, match="cut or rolled back"):
            bench.committer()

    def test_damaged_new_commit_leaves_snapshot_unchanged(self, bench: Bench) -> None:
        committer = bench.committer()
        bench.memory.put(commit_path(1), b'{"add":')

        with pytest.raises(DataError, match=commit_path(1)):
            committer.refresh()
        assert committer.snapshot.version == 0
