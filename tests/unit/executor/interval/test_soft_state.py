"""Soft state that follows the committed files."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

import numpy as np
import pyarrow as pa
import pytest

from millpond.executor.computation.computation import Computation
from millpond.executor.computation.context import Context
from millpond.executor.computation.records import Record
from millpond.executor.computation.timers import Timer
from millpond.executor.computation.values import PythonValues
from millpond.executor.interval.bundle import Deliveries
from millpond.executor.interval.known_files import KnownIds
from millpond.executor.interval.row_cache import MemoryBudget
from millpond.executor.interval.row_reader import RowReader
from millpond.executor.interval.soft_state import SoftState
from millpond.executor.pipeline.nodes import ComputationNode
from millpond.statestore.errors import DataError, InternalError
from millpond.statestore.interval import Interval
from millpond.statestore.rows.record_ids import fingerprints
from millpond.statestore.types import EventTimeMicros, WallTimeMicros
from tests.fixtures.interval_run import IntervalRun

INTERVAL = Interval("c")


class Append(Computation):
    def process_record(self, context: Context, record: Record) -> None:
        context.state.set([*context.state.get([]), record.value])
        context.set_timer(record.value)

    def process_timer(self, context: Context, timer: Timer) -> None:
        context.state.set([*context.state.get([]), f"fired {timer.at}"])


class CountingReader(RowReader):
    """A reader that records every read."""

    def __init__(self, run: IntervalRun) -> None:
        super().__init__(run.objects)
        self.reads: list[tuple[int, tuple[str, ...], list[str] | None]] = []

    def read(
        self,
        paths: Sequence[str],
        columns: Sequence[str],
        *,
        keys: Iterable[str] | None = None,
        interval: Interval | None = None,
        large: Collection[str] = (),
        keep: Callable[[pa.Table], pa.Table] | None = None,
    ) -> pa.Table:
        wanted = None if keys is None else sorted(keys)
        self.reads.append((len(paths), tuple(columns), wanted))
        return super().read(paths, columns, keys=wanted, interval=interval, large=large, keep=keep)


def run_of(workers: int = 1, budget_bytes: int = 1 << 20) -> IntervalRun:
    return IntervalRun(
        ComputationNode(name="c", computation=Append(), subscriptions=()), INTERVAL, workers, budget_bytes
    )


def records(*pairs: tuple[str, int], ids: Sequence[bytes] | None = None) -> list[Deliveries]:
    return [
        Deliveries(
            stream="in",
            keys=pa.array([key for key, _ in pairs]),
            at=np.zeros(len(pairs), np.int64),
            values=PythonValues([value for _, value in pairs]),
            ids=None if ids is None else pa.array(ids, pa.binary()),
        )
    ]


def state_of(soft_state: SoftState, *keys: str) -> list[str | bytes | None]:
    return soft_state.load(sorted(keys))


def due(soft_state: SoftState, watermark: int) -> set[str]:
    return soft_state.timers.due_keys(EventTimeMicros(watermark), WallTimeMicros(0))


class TestFollowing:
    def test_soft_state_that_is_behind_reads_only_the_missing_files(self) -> None:
        run = run_of()
        run.step(records(("a", 10), ("b", 50)))
        reader = CountingReader(run)
        behind = SoftState(INTERVAL, reader)
        behind.synchronise(run.files)
        run.step(records(("a", 20)))
        run.step(records(("c", 30)), watermark=20)
        behind.synchronise(run.files)
        behind.synchronise(run.files)

        assert [count for count, _, _ in reader.reads] == [1, 2]
        assert state_of(behind, "a", "b", "c") == ['[10,20,"fired 20"]', "[50]", "[30]"]
        assert (due(behind, 49), due(behind, 50), behind.files[-1].path) == (
            {"c"},
            {"b", "c"},
            run.files[-1].path,
        )

    def test_deletion_by_another_process_removes_row_and_timer(self) -> None:
        class Deletes(Append):
            def process_timer(self, context: Context, timer: Timer) -> None:
                context.state.delete()

        node = ComputationNode(name="c", computation=Deletes(), subscriptions=())
        run = IntervalRun(node, INTERVAL)
        run.step(records(("a", 10), ("b", 50)))
        behind = SoftState(INTERVAL, RowReader(run.objects))
        behind.synchronise(run.files)
        run.step(watermark=10)
        behind.synchronise(run.files)

        assert (state_of(behind, "a", "b"), due(behind, 99)) == ([None, "[50]"], {"b"})

    def test_lost_bundle_is_reverted_by_reading_the_winners_file_only(self) -> None:
        run = run_of(workers=2)
        run.step(records(("a", 10), ("b", 11)))
        reader = CountingReader(run)
        loser = SoftState(INTERVAL, reader)
        run.replace_soft_state(0, loser)
        loser.synchronise(run.files)
        bundle = run.bundle(records(("a", 20), ("n", 5)), watermark=5)
        run.attempt(bundle, worker=0)
        run.commit(run.attempt(run.bundle(records(("a", 21))), worker=1))
        loser.synchronise(run.files)

        assert [count for count, _, _ in reader.reads] == [1, 1]
        assert state_of(loser, "a", "b", "n") == ["[10,21]", "[11]", None]
        assert due(loser, 99) == {"a", "b"}
        assert loser.timers.hold() == 11

    def test_timers_of_a_lost_bundle_are_reverted(self) -> None:
        """A consumed timer is pending again."""
        run = run_of()
        run.step(records(("a", 10)))
        run.attempt(run.bundle(records(("b", 7)), watermark=10))
        soft_state = run.soft_state()
        soft_state.synchronise(run.files)

        assert (due(soft_state, 99), soft_state.timers.hold()) == ({"a"}, 10)
        assert [timer.at for timer in soft_state.timers_of(["a"])[0]] == [10]

    def test_row_evicted_during_a_lost_bundle_is_read_again(self) -> None:
        """The timers must return with the row."""
        run = run_of(budget_bytes=0)
        run.step(records(("a", 10)))

        class Touches(Append):
            def process_record(self, context: Context, record: Record) -> None:
                context.state.set([*context.state.get([]), record.value])

        soft_state = run.soft_state()
        touching = IntervalRun(ComputationNode(name="c", computation=Touches(), subscriptions=()), INTERVAL)
        touching.objects, touching.files, touching.superstep = run.objects, run.files, run.superstep
        touching.replace_soft_state(0, soft_state)
        bundle = touching.bundle(records(("a", 20)))
        touching.attempt(bundle)
        result = touching.attempt(bundle).result

        assert result.updates is not None
        assert result.updates.select(["state", "timers"]).to_pylist() == [
            {"state": "[10,20]", "timers": None}
        ]
        assert (result.pending.hold, result.pending.next_event_timer) == (10, 10)
        assert result.updates.column("hold").cast(pa.int64()).to_pylist() == [10]

    def test_bundle_that_was_never_adopted_is_reverted(self) -> None:
        run = run_of()
        run.step(records(("a", 10)))
        bundle = run.bundle(records(("a", 20)))
        run.soft_state().synchronise(run.files)
        run.process_only(bundle)
        result = run.process_only(bundle)

        assert result.updates is not None
        assert result.updates.column("state").to_pylist() == ["[10,20]"]

    def test_rewrite_of_known_rows_is_not_read(self) -> None:
        """OPTIMIZE changes only the file that later reads use."""
        run = run_of(budget_bytes=0)
        reader = CountingReader(run)
        soft_state = SoftState(INTERVAL, reader, MemoryBudget(0))
        run.replace_soft_state(0, soft_state)
        run.step(records(("a", 10)))
        run.step(records(("b", 20)))
        soft_state.synchronise(run.files)
        reader.reads.clear()
        for _ in range(2):  # first two files by one, then one by one
            run.optimise()
            soft_state.synchronise(run.files)

        assert reader.reads == []
        assert state_of(soft_state, "a", "b") == ["[10]", "[20]"]
        assert [count for count, _, _ in reader.reads] == [1]
        assert [file.path for file in soft_state.files] == [file.path for file in run.files]

    def test_rewrite_with_unknown_rows_forces_a_complete_read(self) -> None:
        """The mixed file does not show which of its rows are new."""
        run = run_of()
        run.step(records(("a", 10)))
        behind = SoftState(INTERVAL, CountingReader(run))
        behind.synchronise(run.files)
        run.step(records(("a", 20)))
        run.step(records(("b", 30)))
        run.optimise(0, 2)
        behind.synchronise(run.files)

        assert state_of(behind, "a", "b") == ["[10,20]", "[30]"]

    def test_adopted_file_rewritten_at_once_is_applied_once(self) -> None:
        """The bundle must neither be lost nor applied twice."""
        run = run_of()
        run.step(records(("a", 10)))
        run.step(records(("a", 20)))
        run.optimise()
        run.step(records(("a", 30)))

        assert run.rows().column("state").to_pylist() == ["[10,20,30]"]

    def test_rows_of_vanished_files_are_dropped(self) -> None:
        run = run_of()
        run.step(records(("a", 10)))
        run.step(records(("b", 20)))
        soft_state = run.soft_state()
        soft_state.synchronise(run.files)
        soft_state.synchronise(run.files[1:])

        assert (state_of(soft_state, "a", "b"), due(soft_state, 99)) == ([None, "[20]"], {"b"})
        soft_state.synchronise([])
        assert (state_of(soft_state, "b"), due(soft_state, 99), soft_state.files) == ([None], set(), [])

    def test_failed_read_empties_the_soft_state(self) -> None:
        """The next synchronise reads everything."""
        run = run_of()
        run.step(records(("a", 10)))
        behind = SoftState(INTERVAL, RowReader(run.objects))
        behind.synchronise(run.files)
        run.step(records(("b", 20)))
        path = run.files[-1].path
        data = run.objects.get(path)
        run.objects.delete([path])
        with pytest.raises(DataError, match=path):
            behind.synchronise(run.files)
        run.objects.put(path, data)
        behind.synchronise(run.files)

        assert state_of(behind, "a", "b") == ["[10]", "[20]"]

    def test_keys_of_other_intervals_are_ignored(self) -> None:
        """A file may contain keys of several intervals."""
        run = run_of()
        run.step(records(("a", 10), ("m", 20), ("z", 30)))
        part = SoftState(Interval("c", "b", "n"), RowReader(run.objects))
        part.synchronise(run.files)

        assert (due(part, 99), part.timers.hold()) == ({"m"}, 20)

    def test_adopting_twice_is_an_internal_error(self) -> None:
        run = run_of()
        attempt = run.attempt(run.bundle(records(("a", 10))))

        with pytest.raises(InternalError):
            run.soft_state().adopt(attempt.file)


class TestMemory:
    def test_new_keys_cost_no_read(self) -> None:
        """After an eviction, a filter still proves most new keys to be new."""
        run = run_of()
        reader = CountingReader(run)
        soft_state = SoftState(INTERVAL, reader, MemoryBudget(3_000))
        run.replace_soft_state(0, soft_state)
        for start in range(0, 200, 10):
            run.step(records(*((f"key {number}", 10) for number in range(start, start + 10))))

        assert soft_state.used_bytes <= 3_000
        assert len(reader.reads) <= 2

    def test_evicted_rows_are_read_back_in_one_pruned_read(self) -> None:
        """All missing rows of a bundle are read together, by key."""
        run = run_of()
        run.step(records(("a", 1), ("b", 2), ("c", 3)))
        reader = CountingReader(run)
        soft_state = SoftState(INTERVAL, reader, MemoryBudget(0))
        soft_state.synchronise(run.files)
        reader.reads.clear()

        assert state_of(soft_state, "a", "c") == ["[1]", "[3]"]
        assert [(count, keys) for count, _, keys in reader.reads] == [(1, ["a", "c"])]
        assert [timer.at for timer in soft_state.timers_of(["c"])[0]] == [3]

    def test_files_without_the_missing_rows_are_not_read(self) -> None:
        """The process knows the keys of every file that it wrote since the first eviction."""
        run = run_of()
        run.step(records(*((f"key {number:03}", 10) for number in range(100))))
        reader = CountingReader(run)
        soft_state = SoftState(INTERVAL, reader, MemoryBudget(10_000))
        run.replace_soft_state(0, soft_state)
        for number in range(20):
            run.step(records((f"key {number:03}", 20), (f"key {99 - number:03}", 20)))
        reader.reads.clear()
        middle = [f"key {number:03}" for number in range(20, 80)]

        assert state_of(soft_state, *middle) == ["[10]"] * 60
        assert [count for count, _, _ in reader.reads] == [1]
        assert state_of(soft_state, "key 000", "key 099") == ["[10,20]"] * 2

    def test_idle_interval_returns_memory_to_a_busy_one(self) -> None:
        """Both must have the right rows afterwards."""
        run, memory = run_of(), MemoryBudget(24_000)
        run.step(records(*((f"key {number:03}", 10) for number in range(100))))
        idle = SoftState(Interval("c", "", "key 050"), RowReader(run.objects), memory)
        busy = SoftState(Interval("c", "key 050"), RowReader(run.objects), memory)
        idle.synchronise(run.files)
        assert 12_000 < idle.used_bytes == memory.used_bytes
        busy.synchronise(run.files)
        busy.load([f"key {number:03}" for number in range(50, 100)])
        busy.shrink()
        assert 8_000 < busy.used_bytes <= memory.used_bytes - idle.used_bytes <= 12_000
        assert memory.is_exceeded

        idle.shrink()
        assert not memory.is_exceeded
        assert idle.used_bytes > 9_000
        assert idle.load(["key 007"]) == busy.load(["key 077"]) == ["[10]"]
        busy.leave()
        idle.shrink()
        assert idle.used_bytes <= memory.used_bytes <= idle.used_bytes + 3_000

    def test_filters_count_towards_the_budget_and_rows_keep_a_quarter(self) -> None:
        """The fewer rows fit, the more keys and ids the filters must know."""
        run, memory = run_of(), MemoryBudget(200_000)
        soft_state = SoftState(INTERVAL, RowReader(run.objects), memory)
        run.replace_soft_state(0, soft_state)
        for start in range(0, 10_000, 100):
            run.step(records(*((f"key {number:05}", 10) for number in range(start, start + 100))))
        before = soft_state.used_bytes
        assert 50_000 < before < memory.used_bytes - 50_000
        assert memory.used_bytes <= 200_000

        ids = [b"%016d" % number for number in range(100)]
        run.step(records(*((f"key {number:05}", 10) for number in range(100)), ids=ids))
        assert 40_000 < soft_state.used_bytes <= 50_000 < memory.used_bytes - (1 << 20)

    def test_timers_and_holds_of_evicted_rows_stay_known(self) -> None:
        run = run_of(budget_bytes=0)
        run.step(records(("a", 5), ("b", 9)))
        result = run.step(watermark=5)

        assert (result.statistics.timers, result.pending.next_event_timer, result.pending.hold) == (1, 9, 9)
        assert run.rows().column("state").to_pylist() == ['[5,"fired 5"]', "[9]"]

    def test_cold_start_loads_the_rows_with_the_nearest_timers(self) -> None:
        run = run_of()
        run.step(records(*((f"key {number:03}", 1_000 - number) for number in range(100))))
        reader = CountingReader(run)
        soft_state = SoftState(INTERVAL, reader, MemoryBudget(12_000))
        soft_state.synchronise(run.files)
        reader.reads.clear()
        soft_state.load(["key 098", "key 099"])
        nearest_reads = len(reader.reads)
        soft_state.load(["key 000"])

        assert 0 < soft_state.used_bytes <= 12_000 + 1_000
        assert (nearest_reads, len(reader.reads)) == (0, 1)


class TestKnownIds:
    def test_new_owner_of_a_large_interval_reads_timers_but_no_states(self) -> None:
        """A state is read when its key first gets a record."""
        run = run_of(budget_bytes=1_000)
        run.step(records(*((f"k{number:03}", 100 + number) for number in range(100))))
        run.step(records(("k007", 5_000)), watermark=101)
        reader = CountingReader(run)
        owner = SoftState(INTERVAL, reader, MemoryBudget(1_000))
        owner.synchronise(run.files)

        assert len(reader.reads) == 2
        assert all("timers" in columns and "state" not in columns for _, columns, _ in reader.reads)
        assert (owner.used_bytes, due(owner, 102), due(owner, 4_999)) == (
            0,
            {"k002"},
            {f"k{number:03}" for number in range(2, 100) if number != 7},
        )
        assert state_of(owner, "k000", "k007", "none") == ['[100,"fired 100"]', "[107,5000]", None]
        assert [timer.at for timer in owner.timers_of(["k007"])[0]] == [5_000]
        assert reader.reads[-1][2] == ["k000", "k007"]

    def test_new_ids_cost_no_read(self) -> None:
        run = run_of()
        reader = CountingReader(run)
        run.replace_soft_state(0, SoftState(INTERVAL, reader))
        for number in range(5):
            run.step(records(("a", number), ids=[b"%d" % number]))

        assert reader.reads == []

    def test_own_duplicates_are_found_in_memory_and_others_by_one_read(self) -> None:
        """Ids of files that this process wrote are in memory."""
        run = run_of(workers=2)
        reader = CountingReader(run)
        run.replace_soft_state(0, SoftState(INTERVAL, reader))
        run.step(records(("a", 1), ids=[b"1"]))
        run.step(records(("a", 1), ids=[b"1"]))
        assert reader.reads == []

        run.step(records(("a", 2), ("b", 2), ids=[b"2", b"2"]), worker=1)
        reader.reads.clear()
        result = run.step(records(("a", 2), ("b", 3), ids=[b"2", b"3"]))

        assert result.statistics.duplicates == 1
        assert [keys for _, columns, keys in reader.reads if columns == ("key", "record_ids")] == [["a"]]

    def test_ids_of_replaced_files_leave_memory(self) -> None:
        """After a compaction the ids are read from the large file."""
        run = run_of()
        reader = CountingReader(run)
        run.replace_soft_state(0, SoftState(INTERVAL, reader))
        for number in range(5):
            run.step(records(("a", number), ids=[b"%d" % number]))
        ids = run.soft_state(0).ids
        held_bytes = ids.size_bytes
        run.optimise(0, 4)
        result = run.step(records(("a", 0), ("a", 9), ids=[b"0", b"9"]))

        assert result.statistics.duplicates == 1
        assert run.soft_state(0).ids is ids
        assert 0 < ids.size_bytes < held_bytes / 2
        assert [columns for _, columns, _ in reader.reads] == [("key", "record_ids")]

    def test_full_filter_is_rebuilt_from_the_ids_in_files(self) -> None:
        run = run_of()
        run.step(records(*(("a", number) for number in range(60)), ids=[b"%d" % n for n in range(60)]))
        files = run.soft_state(0).files
        known = KnownIds(INTERVAL, RowReader(run.objects), lambda: 1 << 20, capacity_max=100)
        known.prepare(files)
        gone = fingerprints(pa.array([b"gone %d" % number for number in range(100)], pa.binary()))
        known.add(gone[:99])
        known.prepare(files)
        assert known.may_be_known(gone[:99]).all()

        known.add(gone[99:])
        known.prepare(files)

        assert not known.may_be_known(gone).any()
        assert known.may_be_known(fingerprints(pa.array([b"%d" % n for n in range(60)], pa.binary()))).all()

    def test_id_of_a_reverted_bundle_is_new_again(self) -> None:
        """The filter still contains the id, but the files decide."""
        run = run_of()
        bundle = run.bundle(records(("a", 1), ids=[b"1"]))
        run.attempt(bundle)
        again = run.attempt(bundle)

        assert (again.result.statistics.records, again.result.statistics.duplicates) == (1, 0)
