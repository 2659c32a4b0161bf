"""Following a log that is cleaned up while the follower sleeps."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from deltalake import DeltaTable

from millpond.gc.collectors import Retention, collect_garbage
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
from millpond.statestore.log.snapshot import load
from millpond.statestore.log.table import Append, create_rows_table
from millpond.statestore.log.writer import LogWriter, log_boundary, publish_log_boundary
from millpond.statestore.objects.obstore import open_objects
from millpond.testing.faults.faulty_objects import Fault, FaultyObjects
from millpond.testing.fixtures.determinism import ManualClock, SeededRng
from tests.fixtures.commit_requests import Bench, fence_request, superstep_request

if TYPE_CHECKING:
    from pathlib import Path

LOW, HIGH = Interval("counter", "", "m"), Interval("counter", "m")


class Cabin:
    """A table on disk with a sleeper and a wakeful writer."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.clock = ManualClock()
        self.objects = FaultyObjects(open_objects(str(folder)))
        create_rows_table(Log(self.objects), self.clock, SeededRng())
        self.sleeper = self._committer("sleeper", Log(self.objects))
        self.awake = self._committer("awake", Log(open_objects(str(folder))))
        self.sleeper.commit(fence_request(1, LOW))
        self.awake.commit(fence_request(1, HIGH))
        self.sleeper.commit(superstep_request(1, 1, LOW))

    def _committer(self, name: str, log: Log) -> Committer:
        return Committer(log, self.clock, SeededRng(name), MemoryHighWater())

    def sleep_and_clean_up(self) -> None:
        """The same, and a minute passes."""
        self.clean_up()
        self.clock.advance_ms(60_000)

    def clean_up(self) -> None:
        """The other writer goes on, a checkpoint is made, and the older commits are deleted."""
        for number in range(1, 4):
            self.awake.commit(superstep_request(1, number, HIGH))
        DeltaTable(str(self.folder)).create_checkpoint()
        publish_log_boundary(open_objects(str(self.folder)), self.awake.snapshot.version)
        for version in range(self.awake.snapshot.version):
            (self.folder / commit_path(version)).unlink()


@pytest.fixture
def cabin(tmp_path: Path) -> Cabin:
    return Cabin(tmp_path)


class TestSleepers:
    def test_a_sleeper_finds_its_way_back(self, cabin: Cabin) -> None:
        """A log that was cleaned up past the snapshot is reloaded, not taken for unchanged."""
        cabin.sleep_and_clean_up()

        assert cabin.sleeper.refresh().version == cabin.awake.snapshot.version
        assert cabin.sleeper.snapshot.files == load(Log(open_objects(str(cabin.folder)))).files

    @pytest.mark.parametrize("jump_ms", [-3_600_000, -60_000])
    def test_a_wall_clock_that_is_set_back_hides_no_sleep(self, cabin: Cabin, jump_ms: int) -> None:
        """A sleeper has slept as long as time has passed, whatever its wall clock says."""
        cabin.sleep_and_clean_up()
        cabin.clock.jump_ms(jump_ms)

        assert cabin.sleeper.refresh().version == cabin.awake.snapshot.version

    def test_a_sleeper_that_still_owns_its_interval_commits(self, cabin: Cabin) -> None:
        """After finding its way back the sleeper's commit lands at the table's end."""
        cabin.sleep_and_clean_up()

        committed = cabin.sleeper.commit(superstep_request(1, 2, LOW))

        assert committed.version == cabin.awake.refresh().version

    def test_a_sleeper_that_was_taken_over_is_fenced(self, cabin: Cabin) -> None:
        """A takeover that only the checkpoint records fences the sleeper."""
        cabin.awake.commit(fence_request(2, LOW))
        cabin.sleep_and_clean_up()

        with pytest.raises(FencedError):
            cabin.sleeper.commit(superstep_request(1, 2, LOW))

    def test_a_put_into_a_cleaned_up_part_is_no_commit(self, cabin: Cabin) -> None:
        """A writer that sleeps before its put, and puts below the boundary, gets an error."""
        cabin.objects.interrupt("put_if_absent", cabin.sleep_and_clean_up)
        request = superstep_request(1, 2, LOW)
        with pytest.raises(ConflictError, match="cleaned up"):
            cabin.sleeper.commit(request)

        assert request.writes[0].added[0].path not in {file.path for file in cabin.awake.refresh().files}
        assert cabin.sleeper.commit(request).version == cabin.awake.refresh().version

    def test_no_clock_is_needed_to_see_a_cleanup(self, cabin: Cabin) -> None:
        """A collector whose wall clock is a day ahead cleans up under a writer that was never paused."""
        ahead = ManualClock(cabin.clock.now_us())
        ahead.jump_ms(86_400_000)

        def go_on_and_collect() -> None:
            for number in range(1, 4):
                cabin.awake.commit(superstep_request(1, number, HIGH))
            collect_garbage(
                open_objects(str(cabin.folder)),
                None,
                ahead,
                retention=Retention(keep_ms=0, checkpoint_every=1),
                owned={},
            )

        cabin.objects.interrupt("put_if_absent", go_on_and_collect)
        request = superstep_request(1, 2, LOW)
        with pytest.raises(ConflictError, match="cleaned up"):
            cabin.sleeper.commit(request)

        assert cabin.clock.monotonic_us() == 0
        # What was put in vain stays until the next cleanup, and is no damage.
        limit = log_boundary(cabin.objects)
        in_vain = [version for version in Log(cabin.objects).inventory().versions if version < limit]
        assert in_vain
        assert verify_store(cabin.objects).commits < len(Log(cabin.objects).inventory().versions)
        assert not [entry for entry in verify_store(cabin.objects).findings if "_delta_log" in entry.path]
        assert request.writes[0].added[0].path not in {file.path for file in cabin.awake.refresh().files}
        assert cabin.sleeper.commit(request).version == cabin.awake.refresh().version

    def test_an_unknown_outcome_in_a_cleaned_up_part_is_not_done(self, cabin: Cabin) -> None:
        """A commit that landed unnoticed below the boundary is not taken for done by following that part."""
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

    def test_a_store_that_is_away_when_a_cleanup_is_seen_leaves_the_outcome_unknown(
        self, cabin: Cabin
    ) -> None:
        """A put into a cleaned up part stays unknown until the table is reloaded; then it settles."""

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

    def test_a_boundary_that_cannot_be_read_leaves_the_outcome_unknown(self, cabin: Cabin) -> None:
        """A commit that landed unseen is found by following; whether it counts is settled once the store is back."""
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

    def test_an_unknown_outcome_that_was_cleaned_up_is_told_by_its_fence(self, cabin: Cabin) -> None:
        """A commit that landed unseen and was then summed up is known to be done, and is not made again."""
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

    def test_a_commit_that_landed_before_its_writer_fell_asleep_is_done(self, cabin: Cabin) -> None:
        """Its file was cleaned up before the writer looked at the boundary; its fence is in the table."""
        cabin.objects.interrupt("list", cabin.clean_up)
        request = superstep_request(1, 2, LOW)
        committed = cabin.sleeper.commit(request)

        newest = cabin.awake.refresh()
        assert committed.version < log_boundary(cabin.objects)
        assert newest.file(request.writes[0].added[0].path) is not None
        assert cabin.sleeper.snapshot.version == newest.version
        assert cabin.sleeper.commit(superstep_request(1, 3, LOW)).version == newest.version + 1

    def test_a_commit_that_may_have_landed_before_a_takeover_is_unknown(self, cabin: Cabin) -> None:
        """The next owner's fence covers its own, and nothing tells any more which came first; it is not made again."""

        def take_over_and_clean_up() -> None:
            cabin.awake.commit(fence_request(2, LOW))
            cabin.clean_up()

        cabin.objects.interrupt("list", take_over_and_clean_up)
        request = superstep_request(1, 2, LOW)
        with pytest.raises(OutcomeUnknownError, match="is no longer known"):
            cabin.sleeper.commit(request)
        with pytest.raises(OutcomeUnknownError, match="is no longer known"):
            cabin.sleeper.resolve()
        with pytest.raises(FencedError):
            cabin.sleeper.commit(request)
        assert cabin.awake.refresh().file(request.writes[0].added[0].path) is not None

    def test_what_no_transaction_guards_is_not_repeated_when_its_outcome_is_lost(self, cabin: Cabin) -> None:
        """Files appended without a transaction would be there twice."""
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

    def test_falling_asleep_while_nothing_happens_does_no_harm(self) -> None:
        """Who falls asleep between looking and putting commits, if the log is as it was."""
        bench = Bench().create()
        committer, objects = bench.faulty()
        objects.interrupt("put_if_absent", lambda: bench.clock.advance_ms(60_000))

        assert committer.commit(fence_request(1, LOW)).version == 1

    def test_a_version_that_vanishes_under_a_commit_is_damage(self) -> None:
        """A commit on a version that is deleted meanwhile, with nothing in its place, names the file."""
        bench = Bench().create()
        committer, objects = bench.faulty()

        def vanish() -> None:
            bench.memory.delete([commit_path(0)])
            bench.clock.advance_ms(60_000)

        objects.interrupt("put_if_absent", vanish)
        with pytest.raises(DataError, match=commit_path(0)):
            committer.commit(fence_request(1, LOW))

    def test_a_vanished_version_without_checkpoint_is_damage(self) -> None:
        """A sleeper whose own version is gone, with nothing in its place, names the file."""
        bench = Bench().create()
        sleeper = bench.committer()
        sleeper.commit(fence_request(1, LOW))
        bench.memory.delete([commit_path(1)])
        bench.clock.advance_ms(60_000)

        with pytest.raises(DataError, match=commit_path(1)):
            sleeper.refresh()
        with pytest.raises(DataError, match=commit_path(1)):
            sleeper.commit(superstep_request(1, 1, LOW))

    def test_an_idle_committer_looks_once_more_and_goes_on(self) -> None:
        """After a long pause a commit costs one more look and lands as usual."""
        bench = Bench().create()
        committer, objects = bench.faulty()
        bench.clock.advance_ms(60_000)

        committer.commit(fence_request(1, LOW))

        assert objects.calls == {"get": 2, "put_if_absent": 1, "list": 1}
