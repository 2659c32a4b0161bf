"""Recovery of pending work from committed files."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest

from millpond.executor.interval.row_update import PendingWork
from millpond.executor.ownership.ownership import scan_interval
from millpond.executor.pipeline.nodes import DEAD_LETTERS, control_interval
from millpond.executor.superstep.pending import undelivered_sources
from millpond.statestore.errors import DataError
from millpond.statestore.interval import Interval
from millpond.statestore.log.committer import Committer
from millpond.statestore.log.high_water import MemoryHighWater
from millpond.statestore.log.log import Log
from millpond.statestore.log.rules import CommitRequest, IntervalWrite
from millpond.statestore.log.table import create_rows_table
from millpond.statestore.objects.memory import MemoryObjects
from millpond.statestore.objects.ranges import MeteredObjects
from millpond.statestore.rows import row_format
from millpond.statestore.rows.files import write_row_file
from millpond.statestore.rows.row import Fence
from millpond.statestore.types import CommitNumber, Sequencer, Superstep
from millpond.testing.fixtures.determinism import ManualClock, SeededRng
from tests.fixtures.commit_requests import fence_request
from tests.fixtures.row_updates import row_updates

ALL = Interval("c")
CONTROL = control_interval("p")


class Table:
    """A table to which row updates are committed, one file a commit."""

    def __init__(self, *intervals: Interval) -> None:
        self.objects = MemoryObjects()
        log, clock, self._rng = Log(self.objects), ManualClock(), SeededRng(1)
        create_rows_table(log, clock, self._rng)
        self.committer = Committer(log, clock, self._rng, MemoryHighWater())
        self.committer.commit(fence_request(1, *intervals))
        self._numbers = dict.fromkeys(intervals, 0)

    def commit(self, interval: Interval, superstep: int, *updates: dict[str, Any]) -> str:
        self._numbers[interval] += 1
        fence = Fence(Sequencer(1), CommitNumber(self._numbers[interval]))
        placed = {"superstep": superstep, "commit_number": fence.commit_number}
        rows = row_updates([{**placed, **update} for update in updates])
        file = write_row_file(
            self.objects, interval, rows, superstep=Superstep(superstep), fence=fence, token=self._rng.token()
        )
        write = IntervalWrite(interval=interval, fence=fence, added=(file,))
        self.committer.commit(CommitRequest(kind="superstep", writes=(write,)))
        return file.path

    def scan(self, interval: Interval) -> PendingWork:
        return scan_interval(self.objects, interval, self.committer.snapshot.files_of(interval))

    def sources(self, superstep: int, *computations: str) -> list[str]:
        sources = undelivered_sources(self.committer.snapshot, computations, CONTROL, Superstep(superstep))
        return [source.path for source in sources]


def timer(at: int, domain: str = "event", tag: str = "") -> dict[str, Any]:
    return {"tag": tag, "domain": domain, "at": at, "output_at": at}


def made(stream: str = "s") -> list[dict[str, Any]]:
    return [{"stream": stream, "key": "k", "value": "1", "value_bytes": None, "at": 1}]


class TestScan:
    def test_interval_without_files_has_no_pending_work(self) -> None:
        assert Table(ALL).scan(ALL) == PendingWork()

    def test_earliest_timers_and_hold_over_all_keys_count(self) -> None:
        table = Table(ALL)
        table.commit(
            ALL,
            1,
            {"key": "a", "timers": [timer(30), timer(900, "wall")], "hold": 30},
            {"key": "b", "timers": [timer(40), timer(800, "wall"), timer(20, tag="x")], "hold": 20},
            {"key": "c", "state": "1"},
        )

        assert table.scan(ALL) == PendingWork(next_event_timer=20, next_wall_timer=800, hold=20)

    def test_newer_update_replaces_timers_unless_null(self) -> None:
        """A null column of timers means unchanged."""
        table = Table(ALL)
        table.commit(
            ALL,
            1,
            {"key": "a", "timers": [timer(10)], "hold": 10},
            {"key": "b", "timers": [timer(20)], "hold": 20},
            {"key": "c", "timers": [timer(15)], "hold": 15},
        )
        table.commit(
            ALL,
            2,
            {"key": "a", "timers": []},
            {"key": "b", "state": "1", "timers": None, "hold": 20},
            {"key": "c", "timers": [], "deleted": True},
        )

        assert table.scan(ALL) == PendingWork(next_event_timer=20, hold=20)

    def test_scan_ignores_keys_of_other_intervals(self) -> None:
        """A file may contain keys of a neighbour."""
        left, right = Interval("c", "", "m"), Interval("c", "m")
        table = Table(ALL, left, right)
        table.commit(ALL, 1, {"key": "a", "timers": [timer(10)]}, {"key": "x", "timers": [timer(5)]})

        assert table.scan(left).next_event_timer == 10
        assert table.scan(right).next_event_timer == 5

    def test_scan_of_a_large_file_skips_states(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The file has 5 MB of states and timers, in blocks."""
        monkeypatch.setattr(row_format, "PAGED_BYTES_MIN", 0)
        table = Table(ALL)
        states = (hashlib.shake_128(f"{number}".encode()).hexdigest(1_000) for number in range(2_500))
        path = table.commit(
            ALL,
            1,
            *(
                {"key": f"k{number:04d}", "state": state, "timers": [timer(5_000 - number)]}
                for number, state in enumerate(states)
            ),
        )
        objects = MeteredObjects(table.objects)
        summary = scan_interval(objects, ALL, table.committer.snapshot.files_of(ALL))

        assert summary.next_event_timer == 2_501
        assert objects.read_bytes < len(table.objects.get(path)) / 10

    def test_scan_of_a_missing_file_names_it(self) -> None:
        """An owner that cannot know the pending work must not start."""
        table = Table(ALL)
        path = table.commit(ALL, 1, {"key": "a", "timers": [timer(10)]})
        table.objects.delete([path])

        with pytest.raises(DataError, match=path.rpartition("/")[2]):
            table.scan(ALL)


class TestUndelivered:
    def test_undelivered_productions_are_in_files_of_the_last_superstep(self) -> None:
        """That superstep delivered all earlier productions."""
        table = Table(ALL)
        table.commit(ALL, 1, {"key": "a", "productions": made()})
        last = table.commit(ALL, 2, {"key": "a", "productions": made()})
        table.commit(ALL, 2, {"key": "b", "state": "1"})

        assert table.sources(2, "c") == [last]
        assert table.sources(3, "c") == []

    def test_undelivered_files_are_ordered_by_computation_and_key(self) -> None:
        """A restart must not change the order of arrival."""
        left, right, other = Interval("c", "", "m"), Interval("c", "m"), Interval("b")
        table = Table(left, right, other)
        written = [
            table.commit(interval, 2, {"key": key, "productions": made()})
            for interval, key in ((right, "z"), (other, "q"), (left, "a"))
        ]

        assert table.sources(2, "c", "b") == [written[1], written[2], written[0]]

    def test_undelivered_dead_letters_are_limited_to_the_pipeline(self) -> None:
        theirs = control_interval("q")
        table = Table(CONTROL, theirs)
        mine = table.commit(CONTROL, 2, {"key": "p/1", "productions": made(DEAD_LETTERS)})
        table.commit(theirs, 2, {"key": "q/1", "productions": made(DEAD_LETTERS)})
        sources = undelivered_sources(table.committer.snapshot, ["c"], CONTROL, Superstep(2))

        assert [(source.path, source.interval) for source in sources] == [(mine, CONTROL)]
