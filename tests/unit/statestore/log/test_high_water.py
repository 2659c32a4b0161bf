"""The high-water mark."""

from __future__ import annotations

from millpond.statestore.log.high_water import Mark, MemoryHighWater, check_high_water
from millpond.statestore.log.snapshot import load
from millpond.statestore.types import TableVersion
from tests.fixtures.commit_requests import Bench


class TestMemoryHighWater:
    def test_it_rises_and_never_falls(self) -> None:
        """The mark is the highest version that was reported, in whatever order."""
        high_water = MemoryHighWater()

        assert high_water.read() is None
        for version in (3, 5, 4, 5):
            high_water.advance(TableVersion(version), str(version))
        high_water.flush()
        assert high_water.read() == Mark(TableVersion(5), "5")


class TestCheck:
    def test_without_a_mark_any_table_passes(self) -> None:
        """A store without a mark is opened as it is."""
        bench = Bench().create()

        check_high_water(None, load(bench.log), bench.log)

    def test_a_live_writer_does_not_look_like_a_rollback(self) -> None:
        """A mark that was read before the snapshot is found in the log, however far that has gone."""
        bench = Bench().create()
        mark = Mark(TableVersion(0), load(bench.log).digest)
        bench.log.put(TableVersion(1), b'{"txn":{"appId":"a","version":1}}\n')

        check_high_water(mark, load(bench.log), bench.log)

    def test_a_mark_below_the_cleaned_up_log_passes(self) -> None:
        """A mark on a commit that was cleaned up cannot be compared, and a newer table has passed it."""
        bench = Bench().create()
        bench.log.put(TableVersion(1), b'{"txn":{"appId":"a","version":1}}\n')
        snapshot = load(bench.log)
        bench.memory.delete(["_delta_log/00000000000000000000.json"])

        check_high_water(Mark(TableVersion(0), "x"), snapshot, bench.log)
