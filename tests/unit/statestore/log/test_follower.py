"""Followers of a log that is cleaned up meanwhile."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from deltalake import DeltaTable

from millpond.executor.ownership.cuts import Cut
from millpond.gc.collectors import Retention, collect_garbage, write_checkpoint
from millpond.statestore.errors import (
    ConflictError,
    DataError,
    FencedError,
    OutcomeUnknownError,
    UnavailableError,
)
from millpond.statestore.history.verification import verify_store
from millpond.statestore.interval import Interval
from millpond.statestore.log.action import Add
from millpond.statestore.log.committer import Committer
from millpond.statestore.log.high_water import MemoryHighWater
from millpond.statestore.log.log import Log, commit_path
from millpond.statestore.log.rules import CommitRequest
from millpond.statestore.log.snapshot import load
from millpond.statestore.log.table import Append, create_rows_table
from millpond.statestore.log.writer import LogWriter, log_boundary, publish_log_boundary
from millpond.statestore.objects.obstore import open_objects
from millpond.statestore.types import TableVersion
from millpond.testing.faults.faulty_objects import Fault, FaultyObjects
from millpond.testing.fixtures.determinism import ManualClock, SeededRng
from tests.fixtures.commit_requests import Bench, fence_request, superstep_request, write_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

LOW, HIGH = Interval("counter", "", "m"), Interval("counter", "m")


class FarObjects(FaultyObjects):
    """Objects that are read many at a time, as in an object store."""

    def get_many(self, paths: Sequence[str]) -> Sequence[bytes | None]:
        there = set(self.list("_delta_log"))
        return [self.get(path) if path in there else None for path in paths]


class Cabin:
    def __init__(self, folder: Path, *, is_far: bool = False) -> None:
        self.folder = folder
        self.clock = ManualClock()
        self.service = MemoryHighWater()
        self.objects = (FarObjects if is_far else FaultyObjects)(open_objects(str(folder)))
        create_rows_table(Log(self.objects), self.clock, SeededRng())
        self.sleeper = self._committer("sleeper", Log(self.objects))
        self.awake = self._committer("awake", Log(open_objects(str(folder))))
        self.sleeper.commit(fence_request(1, LOW))
        self.awake.commit(fence_request(1, HIGH))
        self.sleeper.commit(superstep_request(1, 1, LOW))

    def _committer(self, name: str, log: Log) -> Committer:
        return Committer(log, self.clock, SeededRng(name), self.service)

    def sleep_and_clean_up(self) -> None:
        self.clean_up()
        self.clock.advance_ms(60_000)

    def clean_up(self) -> None:
        for number in range(1, 4):
            self.awake.commit(superstep_request(1, number, HIGH))
        DeltaTable(str(self.folder)).create_checkpoint()
        self.service.announce_boundary(self.awake.snapshot.version)
        publish_log_boundary(open_objects(str(self.folder)), self.awake.snapshot.version)
        for version in range(self.awake.snapshot.version):
            (self.folder / commit_path(version)).unlink()

    def go_on_and_collect(self) -> None:
        """The collector's wall clock is a day ahead; the writer was never paused."""
        ahead = ManualClock(self.clock.now_us())
        ahead.jump_ms(86_400_000)
        for number in range(1, 4):
            self.awake.commit(superstep_request(1, number, HIGH))
        collect_garbage(
            open_objects(str(self.folder)),
            None,
            ahead,
            announce=self.service.announce_boundary,
            retention=Retention(keep_ms=0, checkpoint_every=1),
            owned={},
        )


@pytest.fixture
def cabin(tmp_path: Path) -> Cabin:
    return Cabin(tmp_path)


class TestSleepers:
    def test_follower_behind_cleanup_reloads(self, cabin: Cabin) -> None:
        cabin.sleep_and_clean_up()

        assert cabin.sleeper.refresh().version == cabin.awake.snapshot.version
        assert cabin.sleeper.snapshot.files == load(Log(open_objects(str(cabin.folder)))).files

    @pytest.mark.parametrize("jump_ms", [-3_600_000, -60_000])
    def test_wall_clock_set_back_hides_no_pause(self, cabin: Cabin, jump_ms: int) -> None:
        cabin.sleep_and_clean_up()
        cabin.clock.jump_ms(jump_ms)

        assert cabin.sleeper.refresh().version == cabin.awake.snapshot.version

    def test_paused_owner_commits_after_reload(self, cabin: Cabin) -> None:
        cabin.sleep_and_clean_up()

        committed = cabin.sleeper.commit(superstep_request(1, 2, LOW))

        assert committed.version == cabin.awake.refresh().version

    def test_paused_owner_is_fenced_by_checkpoint(self, cabin: Cabin) -> None:
        cabin.awake.commit(fence_request(2, LOW))
        cabin.sleep_and_clean_up()

        with pytest.raises(FencedError):
            cabin.sleeper.commit(superstep_request(1, 2, LOW))

    def test_put_below_boundary_fails(self, cabin: Cabin) -> None:
        cabin.objects.interrupt("put_if_absent", cabin.sleep_and_clean_up)
        request = superstep_request(1, 2, LOW)
        with pytest.raises(ConflictError, match="cleaned up"):
            cabin.sleeper.commit(request)

        assert request.writes[0].added[0].path not in {file.path for file in cabin.awake.refresh().files}
        assert cabin.sleeper.commit(request).version == cabin.awake.refresh().version

    def test_cleanup_is_noticed_without_clock(self, cabin: Cabin) -> None:
        cabin.objects.interrupt("put_if_absent", cabin.go_on_and_collect)
        request = superstep_request(1, 2, LOW)
        with pytest.raises(ConflictError, match="cleaned up"):
            cabin.sleeper.commit(request)

        assert cabin.clock.monotonic_us() == 0
        # The rejected file stays until the next cleanup and is no damage.
        limit = log_boundary(cabin.objects)
        in_vain = [version for version in Log(cabin.objects).inventory().versions if version < limit]
        assert in_vain
        assert verify_store(cabin.objects).commits < len(Log(cabin.objects).inventory().versions)
        assert not [entry for entry in verify_store(cabin.objects).findings if "_delta_log" in entry.path]
        assert request.writes[0].added[0].path not in {file.path for file in cabin.awake.refresh().files}
        assert cabin.sleeper.commit(request).version == cabin.awake.refresh().version

    def test_unknown_outcome_below_boundary_is_not_done(self, cabin: Cabin) -> None:
        cabin.objects.plan(Fault.LOST, "put_if_absent")
        cabin.objects.plan(Fault.REFUSED, "put_if_absent", times=99)
        cabin.objects.interrupt("put_if_absent", cabin.clean_up)
        request = superstep_request(1, 2, LOW)
        with pytest.raises(OutcomeUnknownError):
            cabin.sleeper.commit(request)
        cabin.objects.heal()

        assert cabin.sleeper.refresh().version == cabin.awake.refresh().version
        assert cabin.sleeper.resolve() is None
        assert cabin.sleeper.commit(request).version == cabin.awake.refresh().version

    def test_unreachable_store_leaves_outcome_unknown(self, cabin: Cabin) -> None:
        """Reloading the table resolves it."""

        def clean_up_and_go_away() -> None:
            cabin.clean_up()
            cabin.objects.plan(Fault.REFUSED, "list", within="_delta_log", times=99)

        cabin.objects.interrupt("put_if_absent", clean_up_and_go_away)
        request = superstep_request(1, 2, LOW)
        with pytest.raises(OutcomeUnknownError):
            cabin.sleeper.commit(request)
        cabin.objects.heal()

        assert cabin.sleeper.resolve() is None
        assert cabin.sleeper.snapshot.version == cabin.awake.refresh().version
        assert cabin.sleeper.commit(request).version == cabin.awake.refresh().version

    def test_unreadable_boundary_leaves_outcome_unknown(self, cabin: Cabin) -> None:
        cabin.objects.plan(Fault.LOST, "put_if_absent")
        cabin.objects.plan(Fault.REFUSED, "put_if_absent", times=99)
        request = superstep_request(1, 2, LOW)
        with pytest.raises(OutcomeUnknownError):
            cabin.sleeper.commit(request)
        cabin.objects.heal()
        cabin.objects.plan(Fault.REFUSED, "list", times=99)
        with pytest.raises(UnavailableError):
            cabin.sleeper.refresh()
        cabin.objects.heal()

        settled = cabin.sleeper.resolve()

        assert settled is not None
        assert settled.version == cabin.sleeper.snapshot.version == cabin.awake.refresh().version

    def test_cleaned_up_commit_is_done_by_its_fence(self, cabin: Cabin) -> None:
        cabin.objects.plan(Fault.LATE, "put_if_absent", times=99)
        request = superstep_request(1, 2, LOW)
        with pytest.raises(OutcomeUnknownError):
            cabin.sleeper.commit(request)
        cabin.objects.heal()
        cabin.objects.land()
        cabin.sleep_and_clean_up()

        cabin.sleeper.refresh()

        settled = cabin.sleeper.resolve()
        assert settled is not None
        assert cabin.sleeper.commit(request) == settled
        assert settled.version < cabin.sleeper.snapshot.version
        assert cabin.sleeper.snapshot.file(request.writes[0].added[0].path) is not None

    def test_commit_landed_before_pause_is_done(self, cabin: Cabin) -> None:
        """The fence is in the table, though the file is gone."""
        cabin.objects.interrupt("list", cabin.clean_up)
        request = superstep_request(1, 2, LOW)
        committed = cabin.sleeper.commit(request)

        newest = cabin.awake.refresh()
        assert committed.version < log_boundary(cabin.objects)
        assert newest.file(request.writes[0].added[0].path) is not None
        assert cabin.sleeper.snapshot.version == newest.version
        assert cabin.sleeper.commit(superstep_request(1, 3, LOW)).version == newest.version + 1

    @pytest.mark.parametrize("is_cut", [False, True])
    def test_commit_before_possible_takeover_is_unknown(self, cabin: Cabin, is_cut: bool) -> None:
        """The next owner's fence hides which of the two came first, and the checkpoint after a cut has no fence at all."""

        def take_over_and_clean_up() -> None:
            cabin.awake.commit(fence_request(2, LOW))
            if is_cut:
                parts = [write_of(part, 3, 0) for part in Cut.split(LOW, ["c"]).by]
                cabin.awake.commit(CommitRequest(kind="split", writes=(write_of(LOW, 2, 1), *parts)))
                write_checkpoint(open_objects(str(cabin.folder)), every=1)
            cabin.clean_up()

        cabin.objects.interrupt("list", take_over_and_clean_up)
        request = superstep_request(1, 2, LOW)
        with pytest.raises(OutcomeUnknownError, match="is no longer known"):
            cabin.sleeper.commit(request)
        with pytest.raises(OutcomeUnknownError, match="is no longer known"):
            cabin.sleeper.resolve()
        with pytest.raises(FencedError):
            cabin.sleeper.commit(request)
        assert (LOW.app_id in cabin.sleeper.snapshot.txns) is not is_cut
        assert cabin.awake.refresh().file(request.writes[0].added[0].path) is not None

    def test_unguarded_append_of_unknown_outcome_is_not_repeated(self, cabin: Cabin) -> None:
        """Without a transaction its files would be there twice."""
        log = Log(cabin.objects)
        writer = LogWriter(log, load(log), cabin.clock, SeededRng("appender"))
        add = Add(
            path="a.parquet", size_bytes=1, partition_values={"computation": "c"}, modification_time_ms=0
        )
        cabin.objects.interrupt("list", cabin.clean_up)
        for _ in range(2):
            with pytest.raises(OutcomeUnknownError, match="is no longer known"):
                writer.write(Append(added=(add,)))
        assert cabin.awake.refresh().file("a.parquet") is not None

    def test_paused_writer_commits_to_unchanged_log(self) -> None:
        bench = Bench().create()
        committer, objects = bench.faulty()
        objects.interrupt("put_if_absent", lambda: bench.clock.advance_ms(60_000))

        assert committer.commit(fence_request(1, LOW)).version == 1

    def test_version_deleted_under_commit_is_damage(self) -> None:
        bench = Bench().create()
        committer, objects = bench.faulty()

        def vanish() -> None:
            bench.memory.delete([commit_path(0)])
            bench.clock.advance_ms(60_000)

        objects.interrupt("put_if_absent", vanish)
        with pytest.raises(DataError, match=commit_path(0)):
            committer.commit(fence_request(1, LOW))

    def test_deleted_version_without_checkpoint_is_damage(self) -> None:
        bench = Bench().create()
        sleeper = bench.committer()
        sleeper.commit(fence_request(1, LOW))
        bench.memory.delete([commit_path(1)])
        bench.clock.advance_ms(60_000)

        with pytest.raises(DataError, match=commit_path(1)):
            sleeper.refresh()
        with pytest.raises(DataError, match=commit_path(1)):
            sleeper.commit(superstep_request(1, 1, LOW))

    def test_idle_committer_looks_once_more(self) -> None:
        bench = Bench().create()
        committer, objects = bench.faulty()
        bench.clock.advance_ms(60_000)

        committer.commit(fence_request(1, LOW))

        assert objects.calls == {"get": 2, "put_if_absent": 1, "list": 1}


class TestFarSleepers:
    """In an object store a look at the boundary is a request, and the lease service saves it."""

    @pytest.fixture
    def cabin(self, tmp_path: Path) -> Cabin:
        cabin = Cabin(tmp_path, is_far=True)
        # The first commit after another writer's looks at the store.
        cabin.sleeper.commit(superstep_request(1, 2, LOW))
        cabin.objects.calls.clear()
        return cabin

    def test_commit_that_follows_an_own_one_is_a_put(self, cabin: Cabin) -> None:
        for number in range(3, 6):
            cabin.sleeper.commit(superstep_request(1, number, LOW))

        assert cabin.objects.calls == {"put_if_absent": 3}

    def test_put_below_announced_boundary_fails(self, cabin: Cabin) -> None:
        cabin.objects.interrupt("put_if_absent", cabin.go_on_and_collect)
        request = superstep_request(1, 3, LOW)
        with pytest.raises(ConflictError, match="cleaned up"):
            cabin.sleeper.commit(request)

        assert cabin.clock.monotonic_us() == 0
        assert request.writes[0].added[0].path not in {file.path for file in cabin.awake.refresh().files}
        assert cabin.sleeper.commit(request).version == cabin.awake.refresh().version

    def test_commit_below_a_boundary_that_was_announced_too_high_counts(self, cabin: Cabin) -> None:
        """A cleanup announces what it has seen for a while, and deletes what is behind a checkpoint."""
        cabin.service.announce_boundary(TableVersion(99))
        request = superstep_request(1, 3, LOW)

        committed = cabin.sleeper.commit(request)

        assert committed.version == cabin.awake.refresh().version
        assert cabin.awake.snapshot.file(request.writes[0].added[0].path) is not None

    @pytest.mark.parametrize("lost_by", ["service", "sleep"])
    def test_store_is_asked_where_the_service_cannot_tell(self, cabin: Cabin, lost_by: str) -> None:
        """A cleanup of an earlier version tells the service nothing."""

        def clean_up_silently() -> None:
            announced = cabin.service.boundary()
            cabin.clean_up()
            cabin.service.lose_boundary()
            if lost_by == "sleep":
                cabin.service = MemoryHighWater()
                assert announced == cabin.service.boundary() == 0
                cabin.clock.advance_ms(60_000)

        cabin.objects.interrupt("put_if_absent", clean_up_silently)
        with pytest.raises(ConflictError, match="cleaned up"):
            cabin.sleeper.commit(superstep_request(1, 3, LOW))
        assert cabin.objects.calls["list"] >= 1

    def test_first_commit_after_another_writers_looks_at_the_store(self, cabin: Cabin) -> None:
        cabin.awake.commit(superstep_request(1, 1, HIGH))
        cabin.sleeper.refresh()
        cabin.objects.calls.clear()

        cabin.sleeper.commit(superstep_request(1, 3, LOW))
        assert cabin.objects.calls["list"] == 1
