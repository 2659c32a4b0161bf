"""The high-water mark."""

from __future__ import annotations

from millpond.statestore.log.high_water import Mark, MemoryHighWater, check_high_water
from millpond.statestore.log.snapshot import load
from millpond.statestore.types import TableVersion
from tests.fixtures.commit_requests import Bench


class TestMemoryHighWater:
    def test_mark_never_falls(self) -> None:
        high_water = MemoryHighWater()

        assert high_water.read() is None
        for version in (3, 5, 4, 5):
            high_water.advance(TableVersion(version), str(version))
        high_water.flush()
        assert high_water.read() == Mark(TableVersion(5), "5")


class TestCheck:
    def test_table_without_mark_opens(self) -> None:
        bench = Bench().create()

        check_high_water(None, load(bench.log), bench.log)

    def test_live_writer_is_not_rollback(self) -> None:
        """The mark was read before the snapshot, and the log has grown since."""
        bench = Bench().create()
        mark = Mark(TableVersion(0), load(bench.log).digest)
        bench.log.put(TableVersion(1), b'{"txn":{"appId":"a","version":1}}\n')

        check_high_water(mark, load(bench.log), bench.log)

    def test_mark_below_cleaned_up_log_passes(self) -> None:
        """A newer table has passed the deleted commit."""
        bench = Bench().create()
        bench.log.put(TableVersion(1), b'{"txn":{"appId":"a","version":1}}\n')
        snapshot = load(bench.log)
        bench.memory.delete(["_delta_log/00000000000000000000.json"])

        check_high_water(Mark(TableVersion(0), "x"), snapshot, bench.log)
