"""
The commit: the fence, the three outcomes, other writers, damage.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from millpond.statestore.action import Action, Add, CommitInfo, Metadata, Protocol, Remove, Txn
from millpond.statestore.commit import CommitRequest, Committer, IntervalWrite
from millpond.statestore.commit_file import decode, encode
from millpond.statestore.errors import (
    ConflictError,
    DataError,
    FencedError,
    InternalError,
    InvalidError,
    OutcomeUnknownError,
    UnavailableError,
)
from millpond.statestore.interval import Interval
from millpond.statestore.log import Log, commit_path
from millpond.statestore.log_writer import FAILPOINTS
from millpond.statestore.retry import RetryPolicy
from millpond.statestore.row import Fence, pack_fence
from millpond.statestore.snapshot import load
from millpond.statestore.types import CommitNumber, Sequencer, Superstep, TableVersion
from millpond.testing.commit_requests import (
    Bench,
    fence_request,
    row_file,
    superstep_request,
    write_of,
)
from millpond.testing.faulty_objects import Fault, FaultyObjects

if TYPE_CHECKING:
    from collections.abc import Callable

LOW, HIGH = Interval("counter", "", "m"), Interval("counter", "m")


@pytest.fixture
def bench() -> Bench:
    return Bench().create()


def _foreign(bench: Bench, *actions: Action) -> TableVersion:
    """
    Let another engine commit.
    """
    version = TableVersion((bench.log.latest_version() or 0) + 1)
    bench.log.put(version, encode((CommitInfo(operation="WRITE", timestamp_ms=0), *actions)))
    return version


def _foreign_add(path: str = "computation=counter/foreign.parquet") -> Add:
    return Add(path=path, size_bytes=1, partition_values={"computation": "counter"}, modification_time_ms=0)


def _fence(sequencer: int, number: int) -> Fence:
    return Fence(Sequencer(sequencer), CommitNumber(number))


def _once(operation: str, action: Callable[[], object]) -> Callable[[str, str], None]:
    pending = [action]

    def before(called: str, _path: str) -> None:
        if called == operation and pending:
            pending.pop()()

    return before


def _fail_reads_after_put(objects: FaultyObjects) -> Callable[[str, str], None]:
    def before(operation: str, path: str) -> None:
        if operation == "put_if_absent":
            objects.plan(Fault.REFUSED, "get", within=path, times=1)

    return before


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

    def test_a_fold_replaces_files_without_changing_data(self, bench: Bench) -> None:
        """A fold's actions say that no data changed, and the replaced file is described for vacuum."""
        committer = bench.committer()
        committer.commit(fence_request(1, LOW))
        request = superstep_request(1, 1, LOW)
        committer.commit(request)
        old = request.writes[0].added[0].path
        folded = replace(write_of(LOW, 1, 2, row_file(LOW, _fence(1, 2), superstep=1)), removed=(old,))
        committer.commit(CommitRequest(kind="fold", writes=(folded,)))

        actions = decode(bench.log.require(TableVersion(3)))

        (remove,) = (action for action in actions if isinstance(action, Remove))
        (add,) = (action for action in actions if isinstance(action, Add))
        assert (remove.path, remove.data_change, add.data_change) == (old, False, False)
        assert (remove.size_bytes, remove.partition_values) == (1_000, {"computation": "counter"})
        assert [file.path for file in committer.snapshot.files_of(LOW)] == [add.path]

    def test_a_commit_costs_two_calls(self, bench: Bench) -> None:
        """One look for a newer version and one put: nothing is listed."""
        committer, objects = bench.faulty()

        committer.commit(fence_request(1, LOW))

        assert objects.calls == {"get": 1, "put_if_absent": 1}

    def test_a_committer_follows_the_others(self, bench: Bench) -> None:
        """Two committers that write in turn end with the same snapshot."""
        one, two = bench.committer(), bench.committer()
        one.commit(fence_request(1, LOW))
        two.commit(fence_request(1, HIGH))
        one.commit(superstep_request(1, 1, LOW))

        assert one.refresh().files == two.refresh().files == load(bench.log).files
        assert one.refresh().digest == two.refresh().digest


class TestFence:
    def test_numbers_rise_by_one(self, bench: Bench) -> None:
        """Within a lease each commit has the next number; a gap or a repetition is refused."""
        committer = bench.committer()
        committer.commit(fence_request(1, LOW))
        committer.commit(superstep_request(1, 1, LOW))

        for number in (1, 3):
            with pytest.raises(FencedError):
                committer.commit(superstep_request(1, number, LOW))
        committer.commit(superstep_request(1, 2, LOW))

    def test_nothing_is_written_without_taking_over(self, bench: Bench) -> None:
        """An interval that nobody has fenced accepts no commit but the fence."""
        with pytest.raises(FencedError):
            bench.committer().commit(superstep_request(1, 1, LOW))

    @pytest.mark.parametrize("sequencer", [1, 2])
    def test_only_a_higher_sequencer_takes_over(self, bench: Bench, sequencer: int) -> None:
        """A fence that does not exceed the stored sequencer is refused."""
        committer = bench.committer()
        committer.commit(fence_request(2, LOW))

        with pytest.raises(FencedError):
            committer.commit(fence_request(sequencer, LOW))
        committer.commit(fence_request(3, LOW))

    def test_a_zombie_with_a_stale_snapshot_is_fenced(self, bench: Bench) -> None:
        """The former owner's commit fails when it has not seen the takeover, and changes nothing."""
        zombie, objects = bench.faulty()
        zombie.commit(fence_request(1, LOW))
        objects.before = _once("put_if_absent", lambda: bench.committer().commit(fence_request(2, LOW)))

        with pytest.raises(FencedError):
            zombie.commit(superstep_request(1, 1, LOW))

        assert load(bench.log).file_count == 0

    def test_a_zombie_that_reads_again_is_fenced(self, bench: Bench) -> None:
        """The former owner's commit fails when it has seen the takeover, however often it tries."""
        zombie = bench.committer()
        zombie.commit(fence_request(1, LOW))
        bench.committer().commit(fence_request(2, LOW))

        for _ in range(3):
            zombie.refresh()
            with pytest.raises(FencedError):
                zombie.commit(superstep_request(1, 1, LOW))
        assert load(bench.log).version == 2

    def test_one_lost_interval_refuses_the_whole_commit(self, bench: Bench) -> None:
        """A commit over two intervals is all or nothing."""
        committer = bench.committer()
        committer.commit(fence_request(1, LOW, HIGH))
        bench.committer().commit(fence_request(2, HIGH))

        with pytest.raises(FencedError, match="=`millpond"):
            committer.commit(superstep_request(1, 1, LOW, HIGH))
        committer.commit(superstep_request(1, 1, LOW))

    def test_a_takeover_overtaken_by_the_old_owner_still_wins(self, bench: Bench) -> None:
        """A fence whose version the old owner takes first goes to the next version."""
        old = bench.committer()
        old.commit(fence_request(1, LOW))
        new, objects = bench.faulty()
        objects.before = _once("put_if_absent", lambda: old.commit(superstep_request(1, 1, LOW)))

        committed = new.commit(fence_request(2, LOW))

        assert committed.version == 3
        assert (new.snapshot.fence_of(LOW), new.snapshot.file_count) == (_fence(2, 0), 1)
        with pytest.raises(FencedError):
            old.commit(superstep_request(1, 2, LOW))

    def test_of_two_takeovers_the_higher_wins(self, bench: Bench) -> None:
        """A fence that a higher one overtakes is refused."""
        low, objects = bench.faulty()
        objects.before = _once("put_if_absent", lambda: bench.committer().commit(fence_request(3, LOW)))

        with pytest.raises(FencedError):
            low.commit(fence_request(2, LOW))


class TestOutcomes:
    def test_a_lost_reply_of_a_commit_that_landed(self, bench: Bench) -> None:
        """A commit whose reply was lost is done, once, and the caller sees no error."""
        committer, objects = bench.faulty()
        objects.plan(Fault.LOST, "put_if_absent")

        committed = committer.commit(fence_request(1, LOW))

        assert (committed.version, load(bench.log).version) == (1, 1)
        assert len(bench.clock.slept_ms) == 1

    def test_a_failed_put_is_tried_again(self, bench: Bench) -> None:
        """A put that had no effect is repeated and lands once."""
        committer, objects = bench.faulty()
        objects.plan(Fault.REFUSED, "put_if_absent", times=2)

        assert committer.commit(fence_request(1, LOW)).version == 1

    def test_a_late_put_lands_once(self, bench: Bench) -> None:
        """A put that lands after its repetition has landed changes nothing."""
        committer, objects = bench.faulty()
        objects.plan(Fault.LATE, "put_if_absent")
        committer.commit(fence_request(1, LOW))

        objects.land()
        committer.commit(superstep_request(1, 1, LOW))

        assert load(bench.log).version == 2

    def test_retries_are_bounded_and_grow(self, bench: Bench) -> None:
        """After the last try the outcome is unknown; the waits doubled, with jitter."""
        committer, objects = bench.faulty()
        objects.plan(Fault.REFUSED, "put_if_absent", times=99)

        with pytest.raises(OutcomeUnknownError):
            committer.commit(fence_request(1, LOW))

        assert objects.calls["put_if_absent"] == 3
        first, second = bench.clock.slept_ms
        assert 5 <= first <= 10 <= second <= 20

    @pytest.mark.parametrize("fault", [Fault.LOST, Fault.REFUSED, Fault.LATE])
    def test_an_unknown_outcome_settles_as_done(self, bench: Bench, fault: Fault) -> None:
        """Settling makes the commit land if nobody took its version, and says so, again and again."""
        committer, objects = bench.faulty()
        objects.plan(fault, "put_if_absent", times=3)
        request = fence_request(1, LOW)
        if fault is Fault.LOST:
            objects.before = _fail_reads_after_put(objects)
        with pytest.raises(OutcomeUnknownError):
            committer.commit(request)
        objects.before = None
        objects.heal()
        objects.land()

        settled = committer.settle()

        assert settled is not None
        assert (settled.version, committer.snapshot.version) == (1, 1)
        assert committer.settle() == settled
        assert committer.commit(request) == settled
        assert load(bench.log).version == 1

    def test_an_unknown_outcome_settles_as_not_done(self, bench: Bench) -> None:
        """When another writer has the version, the commit never lands, not even late."""
        committer, objects = bench.faulty()
        objects.plan(Fault.LATE, "put_if_absent", times=3)
        with pytest.raises(OutcomeUnknownError):
            committer.commit(fence_request(1, LOW))
        bench.committer().commit(fence_request(2, LOW))
        objects.land()

        assert committer.settle() is None
        assert committer.refresh().fence_of(LOW) == _fence(2, 0)
        assert load(bench.log).version == 1

    def test_refreshing_decides_too(self, bench: Bench) -> None:
        """A commit of unknown outcome that shows up in the log is recognised as done."""
        committer, objects = bench.faulty()
        objects.plan(Fault.LATE, "put_if_absent", times=3)
        with pytest.raises(OutcomeUnknownError):
            committer.commit(fence_request(1, LOW))
        objects.land()

        assert committer.refresh().version == 1
        assert committer.settle() is not None
        assert objects.calls["put_if_absent"] == 3

    def test_settling_may_stay_unknown(self, bench: Bench) -> None:
        """While the store is away the outcome stays unknown, and nothing else is written."""
        committer, objects = bench.faulty()
        objects.plan(Fault.REFUSED, "put_if_absent", times=99)
        request = fence_request(1, LOW)
        with pytest.raises(OutcomeUnknownError):
            committer.commit(request)

        with pytest.raises(OutcomeUnknownError):
            committer.settle()
        with pytest.raises(OutcomeUnknownError):
            committer.commit(request)
        with pytest.raises(UnavailableError, match="earlier commit"):
            committer.commit(fence_request(1, HIGH))
        objects.heal()
        assert committer.commit(fence_request(1, HIGH)).version == 2
        assert committer.snapshot.fence_of(LOW) == _fence(1, 0)

    def test_the_same_request_is_tried_anew_when_it_was_not_done(self, bench: Bench) -> None:
        """Committing again what was settled as not done commits it, if the fence still allows."""
        committer, objects = bench.faulty()
        objects.plan(Fault.REFUSED, "put_if_absent", times=3)
        request = fence_request(1, LOW)
        with pytest.raises(OutcomeUnknownError):
            committer.commit(request)
        _foreign(bench, _foreign_add())

        assert committer.commit(request).version == 2

    def test_nothing_to_settle(self, bench: Bench) -> None:
        """Without a commit of unknown outcome there is nothing to decide."""
        assert bench.committer().settle() is None

    def test_a_store_that_cannot_be_read_is_unavailable(self, bench: Bench) -> None:
        """A failure before anything was put is no unknown outcome."""
        committer, objects = bench.faulty()
        objects.plan(Fault.REFUSED, "get", times=3)

        with pytest.raises(UnavailableError):
            committer.commit(fence_request(1, LOW))
        assert committer.settle() is None

    def test_a_taken_version_that_cannot_be_read_is_unknown(self, bench: Bench) -> None:
        """A version that is there and not there leaves the outcome unknown."""
        committer, objects = bench.faulty()

        def hide(operation: str, path: str) -> None:
            if operation == "put_if_absent":
                bench.memory.put(path, b"somebody")
            elif path == commit_path(1):
                bench.memory.delete([path])

        objects.before = hide
        with pytest.raises(OutcomeUnknownError):
            committer.commit(fence_request(1, LOW))

    @pytest.mark.parametrize(
        "name", [n for n in FAILPOINTS if n not in {"commit.put_failed", "commit.outcome_unknown"}]
    )
    def test_a_crash_at_any_point_leaves_all_or_nothing(self, bench: Bench, name: str) -> None:
        """Whoever opens the table after a crash finds the commit whole or not at all."""

        class Crash(BaseException):
            pass

        def crash(reached: str) -> None:
            if reached == name:
                raise Crash

        other = bench.committer()
        if name == "commit.version_taken":
            _, objects = bench.faulty()
            objects.before = _once("put_if_absent", lambda: other.commit(fence_request(5, HIGH)))
            log = Log(objects)
        else:
            log = bench.log
        committer = Committer(log, bench.clock, bench.rng, bench.high_water, failpoints=crash)
        with pytest.raises(Crash):
            committer.commit(fence_request(1, LOW))

        before_landing = name in {"commit.before_put", "commit.version_taken"}
        assert (load(bench.log).fence_of(LOW) is None) == before_landing
        assert bench.committer().commit(fence_request(2, LOW)).version >= 1


class TestOtherWriters:
    def _raced(self, bench: Bench, request: CommitRequest, *actions: Action) -> Committer:
        committer, objects = bench.faulty()
        committer.commit(fence_request(1, LOW))
        committer.commit(superstep_request(1, 1, LOW, clicks=1))
        objects.before = _once("put_if_absent", lambda: _foreign(bench, *actions))
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
        fold = CommitRequest(kind="fold", writes=(replace(write_of(LOW, 1, 2), removed=(path,)),))
        objects.before = _once(
            "put_if_absent", lambda: _foreign(bench, Remove(path=path, deletion_time_ms=0))
        )

        with pytest.raises(ConflictError, match="removed"):
            committer.commit(fold)
        with pytest.raises(ConflictError, match="no longer live"):
            committer.commit(fold)

    def test_a_removal_of_another_file_is_stepped_over(self, bench: Bench) -> None:
        """Somebody's removal of a file that we leave alone is no conflict."""
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


class TestRequests:
    def test_positions_do_not_fall(self, bench: Bench) -> None:
        """A position below the stored one is refused, an equal one is not."""
        committer = bench.committer()
        committer.commit(fence_request(1, LOW))
        committer.commit(superstep_request(1, 1, LOW, clicks=5))

        with pytest.raises(ConflictError, match="go back"):
            committer.commit(superstep_request(1, 2, LOW, clicks=4))
        committer.commit(superstep_request(1, 2, LOW, clicks=5))

    def test_positions_are_fenced(self, bench: Bench) -> None:
        """An input cannot be consumed without an interval's fence; a savepoint can be set."""
        committer = bench.committer()

        with pytest.raises(InvalidError, match="position"):
            committer.commit(CommitRequest(kind="superstep", positions={"millpond/input/p/i/s": 1}))
        committer.commit(CommitRequest(kind="savepoint", positions={"millpond/savepoint/x": 1}))

    @pytest.mark.parametrize(
        "write",
        [
            write_of(LOW, 1, 1, row_file(HIGH, _fence(1, 1))),
            write_of(LOW, 1, 1, row_file(LOW, _fence(1, 2))),
            write_of(LOW, 1, 1, row_file(LOW, _fence(2, 1))),
            write_of(LOW, 1, 1, row_file(LOW, _fence(1, 1), keys=("b", "a"))),
            write_of(LOW, 2, 0, row_file(LOW, _fence(2, 0))),
            write_of(LOW, 1, 1, *[row_file(LOW, _fence(1, 1))] * 2),
            write_of(HIGH, 0, 0),
        ],
        ids=["interval", "number", "sequencer", "keys", "fence with files", "file twice", "no sequencer"],
    )
    def test_a_request_that_cannot_be_right_is_a_bug(self, bench: Bench, write: IntervalWrite) -> None:
        """Broken invariants raise InternalError and nothing is written."""
        committer = bench.committer()
        committer.commit(fence_request(1, LOW))

        with pytest.raises(InternalError):
            committer.commit(CommitRequest(kind="superstep", writes=(write,)))
        assert load(bench.log).version == 1

    def test_nothing_is_named_twice(self, bench: Bench) -> None:
        """An interval that occurs twice, or as a position, is a bug."""
        committer = bench.committer()

        with pytest.raises(InternalError):
            committer.commit(fence_request(1, LOW, LOW))
        with pytest.raises(InternalError):
            committer.commit(replace(fence_request(1, LOW), positions={LOW.app_id: 1}))

    def test_a_live_file_is_not_added_again(self, bench: Bench) -> None:
        """A file that is part of the table already cannot be added by a later commit."""
        committer = bench.committer()
        committer.commit(fence_request(1, LOW))
        file = row_file(LOW, _fence(1, 1))
        committer.commit(CommitRequest(kind="superstep", writes=(write_of(LOW, 1, 1, file),)))
        again = replace(file, commit_number=CommitNumber(2), superstep=Superstep(2))

        with pytest.raises(InternalError, match="new"):
            committer.commit(CommitRequest(kind="superstep", writes=(write_of(LOW, 1, 2, again),)))


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

    def test_a_running_committer_refuses_damaged_news(self, bench: Bench) -> None:
        """A damaged commit is refused on refresh, and the snapshot stays where it was."""
        committer = bench.committer()
        bench.memory.put(commit_path(1), b'{"add":')

        with pytest.raises(DataError, match=commit_path(1)):
            committer.refresh()
        assert committer.snapshot.version == 0
