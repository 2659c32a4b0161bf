"""Recovery of pending work from committed files."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import pytest

from millpond.executor.interval.row_update import PendingWork
from millpond.executor.ownership.ownership import recorded_work, scan_interval
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
from millpond.statestore.types import CommitNumber, EventTimeMicros, Sequencer, Superstep, WallTimeMicros
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

    def commit(
        self,
        interval: Interval,
        superstep: int,
        *updates: dict[str, Any],
        pending: str | None = None,
        removed: Sequence[str] = (),
    ) -> str:
        self._numbers[interval] += 1
        fence = Fence(Sequencer(1), CommitNumber(self._numbers[interval]))
        placed = {"superstep": superstep, "commit_number": fence.commit_number}
        rows = row_updates([{**placed, **update} for update in updates])
        file = write_row_file(
            self.objects, interval, rows, superstep=Superstep(superstep), fence=fence, token=self._rng.token()
        )
        write = IntervalWrite(
            interval=interval, fence=fence, added=(file,), pending=pending, removed=tuple(removed)
        )
        kind = "compaction" if removed else "superstep"
        self.committer.commit(CommitRequest(kind=kind, writes=(write,)))
        return file.path

    def recorded(self, interval: Interval, *percentiles: float) -> PendingWork | None:
        return recorded_work(interval, self.committer.snapshot.files_of(interval), percentiles)

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


def at(time: int) -> PendingWork:
    return PendingWork(next_event_timer=EventTimeMicros(time))


class TestRecorded:
    """What commits record of the timers and holds of an interval, in place of a scan."""

    def test_newest_change_counts(self) -> None:
        table = Table(ALL)
        table.commit(ALL, 1, {"key": "a"}, pending=at(10).to_text())
        table.commit(ALL, 2, {"key": "b"}, pending=at(20).to_text())

        assert table.recorded(ALL) == at(20)

    def test_change_without_a_record_needs_a_scan(self) -> None:
        """An earlier version, an upgrade or another engine wrote it."""
        table = Table(ALL)
        table.commit(ALL, 1, {"key": "a"}, pending=at(10).to_text())
        table.commit(ALL, 2, {"key": "b"})
        assert table.recorded(ALL) is None

        table.commit(ALL, 3, {"key": "a"}, pending=at(30).to_text())
        assert table.recorded(ALL) == at(30)

    def test_compaction_keeps_the_record_of_its_youngest_file(self) -> None:
        table = Table(ALL)
        first = table.commit(ALL, 1, {"key": "a"}, pending=at(10).to_text())
        second = table.commit(ALL, 2, {"key": "b"}, pending=at(20).to_text())
        table.commit(ALL, 2, {"key": "a"}, {"key": "b"}, removed=[first, second])

        assert table.recorded(ALL) == at(20)

    def test_record_outlives_a_compaction_that_was_prepared_before(self) -> None:
        """The compacted file is added later, but its record is older."""
        table = Table(ALL)
        old = [table.commit(ALL, number, {"key": "a"}, pending=at(number).to_text()) for number in (1, 2)]
        table.commit(ALL, 3, {"key": "b"}, pending=at(3).to_text())
        table.commit(ALL, 2, {"key": "a"}, removed=old)

        assert table.recorded(ALL) == at(3)

    def test_compaction_of_a_change_without_a_record_hides_it_from_nobody(self) -> None:
        table = Table(ALL)
        old = [
            table.commit(ALL, 1, {"key": "a"}, pending=at(1).to_text()),
            table.commit(ALL, 2, {"key": "a"}),
        ]
        compacted = table.commit(ALL, 2, {"key": "a"}, removed=old)
        assert table.recorded(ALL) is None

        last = table.commit(ALL, 3, {"key": "b"}, pending=at(3).to_text())
        assert table.recorded(ALL) == at(3)
        table.commit(ALL, 3, {"key": "a"}, removed=[compacted, last])
        assert table.recorded(ALL) == at(3)

    def test_record_of_a_former_interval_says_nothing_of_its_parts(self) -> None:
        left, right = Interval("c", "", "m"), Interval("c", "m")
        table = Table(ALL, left, right)
        whole = table.commit(ALL, 1, {"key": "a"}, {"key": "x"}, pending=at(10).to_text())
        assert table.recorded(left) is None
        table.commit(left, 1, {"key": "a"}, removed=[whole])
        assert table.recorded(left) is None

        table.commit(left, 2, {"key": "a"}, pending=at(20).to_text())
        assert table.recorded(left) == at(20)
        assert table.recorded(right) is None

    def test_record_of_other_percentiles_needs_a_scan(self) -> None:
        """The oldest of 90 percent of the holds is not known from that of 95."""
        held = PendingWork(hold=EventTimeMicros(5), percentile_holds={95.0: EventTimeMicros(7)})
        table = Table(ALL)
        table.commit(ALL, 1, {"key": "a"}, pending=held.to_text())

        assert table.recorded(ALL, 95.0) == held
        assert table.recorded(ALL, 90.0) is None
        assert table.recorded(ALL) is None

    @pytest.mark.parametrize(
        "text",
        [
            "",
            "7",
            "[]",
            "[1,2,3]",
            '["1",null,null,{},{}]',
            '[null,null,null,{"x":1},{}]',
            "[true,null,null,{},{}]",
        ],
    )
    def test_record_that_nobody_wrote_needs_a_scan(self, text: str) -> None:
        table = Table(ALL)
        table.commit(ALL, 1, {"key": "a"}, pending=text)

        assert table.recorded(ALL) is None

    def test_record_is_the_work_that_it_tells(self) -> None:
        work = PendingWork(
            next_event_timer=EventTimeMicros(-3),
            next_wall_timer=WallTimeMicros(4),
            hold=EventTimeMicros(5),
            next_percentile_timers={99.5: EventTimeMicros(6)},
            percentile_holds={99.5: EventTimeMicros(7)},
        )
        for one in (work, PendingWork()):
            assert PendingWork.from_text(one.to_text()) == one


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
