"""Commits that are refused: fences, positions and impossible requests."""

from __future__ import annotations

from dataclasses import replace

import pytest

from millpond.statestore.errors import (
    ConflictError,
    FencedError,
    InternalError,
    InvalidError,
)
from millpond.statestore.interval import Interval
from millpond.statestore.log.rules import CommitRequest, IntervalWrite
from millpond.statestore.log.snapshot import load
from millpond.statestore.rows.row import Fence
from millpond.statestore.types import CommitNumber, Sequencer, Superstep
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


def _fence(sequencer: int, number: int) -> Fence:
    return Fence(Sequencer(sequencer), CommitNumber(number))


class TestFence:
    def test_commit_numbers_rise_by_one(self, bench: Bench) -> None:
        committer = bench.committer()
        committer.commit(fence_request(1, LOW))
        committer.commit(superstep_request(1, 1, LOW))

        for number in (1, 3):
            with pytest.raises(FencedError):
                committer.commit(superstep_request(1, number, LOW))
        committer.commit(superstep_request(1, 2, LOW))

    def test_interval_without_fence_accepts_only_fence(self, bench: Bench) -> None:
        with pytest.raises(FencedError):
            bench.committer().commit(superstep_request(1, 1, LOW))

    @pytest.mark.parametrize("sequencer", [1, 2])
    def test_fence_must_exceed_stored_sequencer(self, bench: Bench, sequencer: int) -> None:
        committer = bench.committer()
        committer.commit(fence_request(2, LOW))

        with pytest.raises(FencedError):
            committer.commit(fence_request(sequencer, LOW))
        committer.commit(fence_request(3, LOW))

    def test_former_owner_with_stale_snapshot_is_fenced(self, bench: Bench) -> None:
        zombie, objects = bench.faulty()
        zombie.commit(fence_request(1, LOW))
        objects.interrupt("put_if_absent", lambda: bench.committer().commit(fence_request(2, LOW)))

        with pytest.raises(FencedError):
            zombie.commit(superstep_request(1, 1, LOW))

        assert load(bench.log).file_count == 0

    def test_former_owner_is_fenced_after_reload(self, bench: Bench) -> None:
        zombie = bench.committer()
        zombie.commit(fence_request(1, LOW))
        bench.committer().commit(fence_request(2, LOW))

        for _ in range(3):
            zombie.refresh()
            with pytest.raises(FencedError):
                zombie.commit(superstep_request(1, 1, LOW))
        assert load(bench.log).version == 2

    def test_one_lost_interval_refuses_whole_commit(self, bench: Bench) -> None:
        committer = bench.committer()
        committer.commit(fence_request(1, LOW, HIGH))
        bench.committer().commit(fence_request(2, HIGH))

        with pytest.raises(FencedError, match="=`millpond"):
            committer.commit(superstep_request(1, 1, LOW, HIGH))
        committer.commit(superstep_request(1, 1, LOW))

    def test_delayed_fence_goes_to_next_version(self, bench: Bench) -> None:
        """The old owner has taken its version."""
        old = bench.committer()
        old.commit(fence_request(1, LOW))
        new, objects = bench.faulty()
        objects.interrupt("put_if_absent", lambda: old.commit(superstep_request(1, 1, LOW)))

        committed = new.commit(fence_request(2, LOW))

        assert committed.version == 3
        assert (new.snapshot.fence_of(LOW), new.snapshot.file_count) == (_fence(2, 0), 1)
        with pytest.raises(FencedError):
            old.commit(superstep_request(1, 2, LOW))

    def test_higher_of_two_fences_wins(self, bench: Bench) -> None:
        low, objects = bench.faulty()
        objects.interrupt("put_if_absent", lambda: bench.committer().commit(fence_request(3, LOW)))

        with pytest.raises(FencedError):
            low.commit(fence_request(2, LOW))


class TestRequests:
    def test_positions_do_not_fall(self, bench: Bench) -> None:
        committer = bench.committer()
        committer.commit(fence_request(1, LOW))
        committer.commit(superstep_request(1, 1, LOW, clicks=5))

        with pytest.raises(ConflictError, match="go back"):
            committer.commit(superstep_request(1, 2, LOW, clicks=4))
        committer.commit(superstep_request(1, 2, LOW, clicks=5))

    def test_position_needs_fence_except_in_savepoint(self, bench: Bench) -> None:
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
    def test_impossible_request_is_internal_error(self, bench: Bench, write: IntervalWrite) -> None:
        committer = bench.committer()
        committer.commit(fence_request(1, LOW))

        with pytest.raises(InternalError):
            committer.commit(CommitRequest(kind="superstep", writes=(write,)))
        assert load(bench.log).version == 1

    def test_repeated_interval_or_position_is_internal_error(self, bench: Bench) -> None:
        committer = bench.committer()

        with pytest.raises(InternalError):
            committer.commit(fence_request(1, LOW, LOW))
        with pytest.raises(InternalError):
            committer.commit(replace(fence_request(1, LOW), positions={LOW.app_id: 1}))

    def test_live_file_is_not_added_again(self, bench: Bench) -> None:
        committer = bench.committer()
        committer.commit(fence_request(1, LOW))
        file = row_file(LOW, _fence(1, 1))
        committer.commit(CommitRequest(kind="superstep", writes=(write_of(LOW, 1, 1, file),)))
        again = replace(file, commit_number=CommitNumber(2), superstep=Superstep(2))

        with pytest.raises(InternalError, match="new"):
            committer.commit(CommitRequest(kind="superstep", writes=(write_of(LOW, 1, 2, again),)))
