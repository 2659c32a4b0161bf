"""The log writer and its three outcomes: done, not done, unknown."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from millpond.statestore.errors import (
    OutcomeUnknownError,
    UnavailableError,
)
from millpond.statestore.interval import Interval
from millpond.statestore.log.action import Action, Add, CommitInfo
from millpond.statestore.log.commit_file import encode
from millpond.statestore.log.committer import Committer
from millpond.statestore.log.log import Log, commit_path
from millpond.statestore.log.snapshot import load
from millpond.statestore.log.writer import FAILPOINTS
from millpond.statestore.rows.row import Fence
from millpond.statestore.types import CommitNumber, Sequencer, TableVersion
from millpond.testing.faults.faulty_objects import Fault, FaultyObjects
from tests.fixtures.commit_requests import (
    Bench,
    fence_request,
    superstep_request,
)

if TYPE_CHECKING:
    from collections.abc import Callable

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


def _fail_reads_after_put(objects: FaultyObjects) -> Callable[[str, str], None]:
    def before(operation: str, path: str) -> None:
        if operation == "put_if_absent":
            objects.plan(Fault.REFUSED, "get", within=path, times=1)

    return before


class TestOutcomes:
    def test_lost_reply_of_landed_commit_is_done(self, bench: Bench) -> None:
        committer, objects = bench.faulty()
        objects.plan(Fault.LOST, "put_if_absent")

        committed = committer.commit(fence_request(1, LOW))

        assert (committed.version, load(bench.log).version) == (1, 1)
        assert len(bench.clock.slept_ms) == 1

    def test_failed_put_is_retried(self, bench: Bench) -> None:
        committer, objects = bench.faulty()
        objects.plan(Fault.REFUSED, "put_if_absent", times=2)

        assert committer.commit(fence_request(1, LOW)).version == 1

    def test_late_put_lands_once(self, bench: Bench) -> None:
        committer, objects = bench.faulty()
        objects.plan(Fault.LATE, "put_if_absent")
        committer.commit(fence_request(1, LOW))

        objects.land()
        committer.commit(superstep_request(1, 1, LOW))

        assert load(bench.log).version == 2

    def test_retries_are_bounded_with_growing_waits(self, bench: Bench) -> None:
        committer, objects = bench.faulty()
        objects.plan(Fault.REFUSED, "put_if_absent", times=99)

        with pytest.raises(OutcomeUnknownError):
            committer.commit(fence_request(1, LOW))

        assert objects.calls["put_if_absent"] == 3
        first, second = bench.clock.slept_ms
        assert 5 <= first <= 10 <= second <= 20

    @pytest.mark.parametrize("fault", [Fault.LOST, Fault.REFUSED, Fault.LATE])
    def test_unknown_outcome_resolves_as_done(self, bench: Bench, fault: Fault) -> None:
        """A commit whose version is still free is put."""
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

        settled = committer.resolve()

        assert settled is not None
        assert (settled.version, committer.snapshot.version) == (1, 1)
        assert committer.resolve() == settled
        assert committer.commit(request) == settled
        assert load(bench.log).version == 1

    def test_unknown_outcome_resolves_as_not_done(self, bench: Bench) -> None:
        """Another writer has the version, so even a late put cannot land."""
        committer, objects = bench.faulty()
        objects.plan(Fault.LATE, "put_if_absent", times=3)
        with pytest.raises(OutcomeUnknownError):
            committer.commit(fence_request(1, LOW))
        bench.committer().commit(fence_request(2, LOW))
        objects.land()

        assert committer.resolve() is None
        assert committer.refresh().fence_of(LOW) == _fence(2, 0)
        assert load(bench.log).version == 1

    def test_refresh_resolves_unknown_outcome(self, bench: Bench) -> None:
        committer, objects = bench.faulty()
        objects.plan(Fault.LATE, "put_if_absent", times=3)
        with pytest.raises(OutcomeUnknownError):
            committer.commit(fence_request(1, LOW))
        objects.land()

        assert committer.refresh().version == 1
        assert committer.resolve() is not None
        assert objects.calls["put_if_absent"] == 3

    def test_outcome_stays_unknown_while_store_is_unreachable(self, bench: Bench) -> None:
        """Nothing else may be written."""
        committer, objects = bench.faulty()
        objects.plan(Fault.REFUSED, "put_if_absent", times=99)
        request = fence_request(1, LOW)
        with pytest.raises(OutcomeUnknownError):
            committer.commit(request)

        with pytest.raises(OutcomeUnknownError):
            committer.resolve()
        with pytest.raises(OutcomeUnknownError):
            committer.commit(request)
        with pytest.raises(UnavailableError, match="earlier commit"):
            committer.commit(fence_request(1, HIGH))
        objects.heal()
        assert committer.commit(fence_request(1, HIGH)).version == 2
        assert committer.snapshot.fence_of(LOW) == _fence(1, 0)

    def test_request_not_done_can_be_repeated(self, bench: Bench) -> None:
        committer, objects = bench.faulty()
        objects.plan(Fault.REFUSED, "put_if_absent", times=3)
        request = fence_request(1, LOW)
        with pytest.raises(OutcomeUnknownError):
            committer.commit(request)
        _foreign(bench, _foreign_add())

        assert committer.commit(request).version == 2

    def test_settle_without_unknown_outcome_does_nothing(self, bench: Bench) -> None:
        assert bench.committer().resolve() is None

    def test_unreadable_store_before_put_is_unavailable(self, bench: Bench) -> None:
        """A writer that has slept looks for newer versions first."""
        committer, objects = bench.faulty()
        bench.clock.advance_ms(10_001)
        objects.plan(Fault.REFUSED, "get", times=3)

        with pytest.raises(UnavailableError):
            committer.commit(fence_request(1, LOW))
        assert committer.resolve() is None

    def test_unreadable_taken_version_is_unknown_outcome(self, bench: Bench) -> None:
        committer, objects = bench.faulty()

        def hide(operation: str, path: str) -> None:
            if operation == "put_if_absent":
                bench.memory.put(path, b"another writer")
            elif path == commit_path(1):
                bench.memory.delete([path])

        objects.before = hide
        with pytest.raises(OutcomeUnknownError):
            committer.commit(fence_request(1, LOW))

    @pytest.mark.parametrize(
        "name", [n for n in FAILPOINTS if n not in {"commit.put_failed", "commit.outcome_unknown"}]
    )
    def test_crash_leaves_all_or_nothing(self, bench: Bench, name: str) -> None:
        class Crash(BaseException):
            pass

        def crash(reached: str) -> None:
            if reached == name:
                raise Crash

        other = bench.committer()
        if name == "commit.version_taken":
            _, objects = bench.faulty()
            objects.interrupt("put_if_absent", lambda: other.commit(fence_request(5, HIGH)))
            log = Log(objects)
        else:
            log = bench.log
        committer = Committer(log, bench.clock, bench.rng, bench.high_water, failpoints=crash)
        with pytest.raises(Crash):
            committer.commit(fence_request(1, LOW))

        before_landing = name in {"commit.before_put", "commit.version_taken"}
        assert (load(bench.log).fence_of(LOW) is None) == before_landing
        assert bench.committer().commit(fence_request(2, LOW)).version >= 1
