"""Spark tasks and worker processes, without Spark."""

from __future__ import annotations

import gc
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import cloudpickle
import pyarrow as pa
import pytest

from millpond.executor.computation.computation import Computation
from millpond.executor.computation.context import Context
from millpond.executor.computation.records import Record
from millpond.executor.interval.bundle import IntervalPlan
from millpond.executor.pipeline.pipeline import EnginePipeline
from millpond.executor.spark.hand_over import HandedOver
from millpond.executor.spark.routed import RoutedRecords
from millpond.executor.spark.task import _serve, make_task, run_slot
from millpond.executor.spark.task_plan import (
    TARGET,
    RoutedColumns,
    RoutedInput,
    SlotReport,
    TaskPlan,
    WorkerSetting,
    pack_parts,
    read_slot_reports,
    unreadable_target,
)
from millpond.executor.spark.worker_process import WorkerProcess
from millpond.executor.superstep.delivery import ProductionSource
from millpond.executor.time.observations import DEFAULT_MEMBER, Watch
from millpond.statestore.errors import InternalError, InvalidError
from millpond.statestore.interval import Interval
from millpond.statestore.log.files import LiveFile
from millpond.statestore.objects.disk_tier import DiskOptions
from millpond.statestore.rows.row import Fence
from millpond.statestore.types import CommitNumber, EventTimeMicros, Sequencer, Superstep, WallTimeMicros
from tests.fixtures.interval_run import live_file

LOW, HIGH = Interval("first", "", "m"), Interval("first", "m")
SECOND_LOW, SECOND_HIGH = Interval("second", "", "m"), Interval("second", "m")


class Forward(Computation):
    """A count that forwards its records and fails for thirteen."""

    def __init__(self, output: str | None = None) -> None:
        self.output = output

    def process_record(self, context: Context, record: Record) -> None:
        if record.value["n"] == 13:
            raise ValueError("thirteen")
        context.state.set(context.state.get(0) + 1)
        if self.output is not None:
            context.produce(self.output, record.value)


def key_of(value: Any) -> str | None:
    """Extract the second computation's key; seven has none."""
    return None if value["n"] == 7 else value["k"]


def code() -> bytes:
    pipeline = EnginePipeline("p")
    stream = pipeline.inject("in", key="k", at="at")
    first = stream.apply(Forward("mid"), name="first", produces="mid", on_error="stop")
    first.apply(Forward(), name="second", key=key_of)
    return cloudpickle.dumps(dict(pipeline.check().computations))


def plan(
    folder: Path,
    superstep: int,
    intervals: Sequence[Interval],
    *,
    slots: int = 1,
    files: Sequence[LiveFile] = (),
    sources: Sequence[ProductionSource] = (),
) -> TaskPlan:
    parts = {
        position: IntervalPlan(
            interval=interval,
            fence=Fence(Sequencer(1), CommitNumber(superstep)),
            watermark=EventTimeMicros(0),
            files=tuple(files),
            due=False,
        )
        for position, interval in enumerate(intervals)
    }
    return TaskPlan(
        setting=setting(folder),
        superstep=Superstep(superstep),
        wall_time=WallTimeMicros(0),
        slots=slots,
        parts=pack_parts(parts, slots),
        sources=tuple(sources),
        input=None
        if sources
        else RoutedInput(
            stream="in",
            columns=RoutedColumns(key="k", at="at", id=None, error=None, own=("k", "at", "n")),
            first_targets=frozenset(range(len(intervals))),
            id_scopes={},
            watch=Watch(stream="in"),
        ),
    )


def setting(folder: Path, disk: DiskOptions | None = None) -> WorkerSetting:
    return WorkerSetting(
        url=str(folder),
        storage_options={},
        durability="disk",
        code=code(),
        code_digest=str(folder),
        cache_bytes=1 << 20,
        disk=disk or DiskOptions(),
    )


def run(plan: TaskPlan, slot: int, batches: Sequence[pa.RecordBatch]) -> SlotReport:
    """Run a slot in this process, like a task that finds it at home."""
    return run_slot(WorkerProcess.of(plan.setting), plan, slot, batches)


def batch(*rows: tuple[int, str | None, int]) -> pa.RecordBatch:
    """Make routed rows of target, key and number."""
    targets, keys, numbers = zip(*rows, strict=True)
    return pa.record_batch(
        {
            TARGET: pa.array(targets, pa.int32()),
            "k": pa.array(keys, pa.string()),
            "at": pa.array(numbers, pa.int64()),
            "n": pa.array(numbers, pa.int64()),
        }
    )


def test_slot_reports_its_own_intervals_and_letters(tmp_path: Path) -> None:
    whole = plan(tmp_path, 1, [LOW, HIGH], slots=2)

    low = run(whole, 0, [batch((0, "a", 1), (0, "b", 2), (unreadable_target(0), None, 3))])
    high = run(whole, 1, [batch((1, "x", 4))])

    assert [manifest.interval for manifest in low.manifests] == [LOW]
    assert [manifest.interval for manifest in high.manifests] == [HIGH]
    assert [(letter.computation, letter.error) for letter in low.dead_letters] == [
        ("first", "the key is null")
    ]
    assert [report.inputs[0].records for report in (low, high)] == [2, 1]


def test_delay_of_a_record_is_measured_once_for_all_its_consumers(tmp_path: Path) -> None:
    """Otherwise a percentile watermark leaves the low watermark sooner, the more consumers a stream has."""
    source = plan(tmp_path, 1, [LOW, SECOND_LOW]).input
    assert source is not None
    watch = Watch(stream="in", newest={DEFAULT_MEMBER: EventTimeMicros(10)}, with_delays=True)
    source = replace(source, first_targets=frozenset({0}), watch=watch)
    only_second = batch((unreadable_target(0), None, 12), (1, "c", 12))

    records = RoutedRecords.read(
        source, [batch((0, "a", 4), (1, "b", 4), (0, "a", 9), (1, "b", 9)), only_second]
    )

    assert records is not None
    seen = records.observation()
    assert seen.times is not None
    assert seen.times.delays is not None
    assert (seen.records, len(seen.times.delays), seen.times.newest_at) == (2, 2, 12)


def test_garbage_collection_after_a_task_skips_older_objects(tmp_path: Path) -> None:
    """PySpark collects garbage after each task; searching all modules would take long."""
    gc.unfreeze()
    before = len(gc.get_objects())
    try:
        WorkerProcess.of(setting(tmp_path))
        assert len(gc.get_objects()) < before / 10
        own: list[Any] = []
        own.append(own)
        del own
        assert gc.collect() > 0
    finally:
        gc.unfreeze()


def test_reads_from_the_machines_disk_do_not_count(tmp_path: Path) -> None:
    """`read_bytes` measures reads from the store."""
    made = run(plan(tmp_path / "pond", 1, [LOW]), 0, [batch((0, "a", 1))])
    file = made.manifests[0].file
    assert file is not None
    source = ProductionSource(path=file.path, superstep=Superstep(1), streams=frozenset({"mid"}))
    on_disk = setting(tmp_path / "pond", DiskOptions(folder=str(tmp_path / "disk")))

    first, second = WorkerProcess(on_disk), WorkerProcess(on_disk)

    assert first.productions(source).equals(second.productions(source))
    assert (first.read_bytes, second.read_bytes) == (file.size_bytes, 0)
    assert on_disk.name != setting(tmp_path / "pond").name


def test_productions_are_divided_among_their_consumers_intervals(tmp_path: Path) -> None:
    """The first interval alone reports records without a key."""
    made = run(plan(tmp_path, 1, [LOW]), 0, [batch((0, "a", 1), (0, "c", 7), (0, "d", 2))])
    file = made.manifests[0].file
    assert file is not None
    source = ProductionSource(path=file.path, superstep=Superstep(1), streams=frozenset({"mid"}))
    whole = plan(tmp_path, 2, [SECOND_LOW, SECOND_HIGH], slots=2, sources=[source])

    low, high = run(whole, 0, []), run(whole, 1, [])

    assert [manifest.result.statistics.records for manifest in low.manifests] == [2]
    assert high.manifests == ()
    assert (len(low.dead_letters), len(high.dead_letters)) == (1, 0)


def test_repeated_task_counts_once(tmp_path: Path) -> None:
    """The next attempt in the same process reverts the uncommitted one."""
    whole = plan(tmp_path, 1, [LOW])
    first = run(whole, 0, [batch((0, "a", 1))])
    again = run(whole, 0, [batch((0, "a", 1))])
    file = again.manifests[0].file
    assert file is not None
    assert first.manifests[0].file != file

    committed = live_file(file, LOW, 1)
    after = run(plan(tmp_path, 2, [LOW], files=[committed]), 0, [batch((0, "a", 2))])
    assert after.manifests[0].result.statistics.keys == 1
    assert after.manifests[0].file is not None


def test_error_of_user_code_is_in_the_report(tmp_path: Path) -> None:
    """Spark would retry a failed task, which would fail again."""
    task = make_task(plan(tmp_path, 1, [LOW]))
    (report,) = read_slot_reports(pa.Table.from_batches(list(task([batch((0, "a", 13))]))))

    assert isinstance(report, SlotReport)
    assert isinstance(report.failure, InvalidError)
    with pytest.raises(InvalidError, match="on_error says to stop"):
        raise report.failure


def test_records_of_another_slot_fail_the_task(tmp_path: Path) -> None:
    """Skipping them would lose them."""
    columns = RoutedColumns(key="k", at="at", id=None, error=None, own=("k", "at"))
    two_slots = TaskPlan(
        setting=setting(tmp_path),
        superstep=Superstep(1),
        wall_time=WallTimeMicros(0),
        slots=2,
        parts={},
        sources=(),
        input=RoutedInput(
            stream="a",
            columns=columns,
            first_targets=frozenset({0}),
            id_scopes={},
            watch=Watch(stream="a"),
        ),
    )
    records = pa.record_batch(
        {
            TARGET: pa.array([1, 3, unreadable_target(3)], pa.int32()),
            "k": ["a", "b", "c"],
            "at": pa.array([1, 2, 3], pa.int64()),
        }
    )

    assert run(two_slots, 1, [records.slice(0, 2)]).slot == 1
    with pytest.raises(InternalError, match="slot of their interval"):
        run(two_slots, 0, [records])


def test_runs_of_two_stores_with_one_secret_have_separate_homes(tmp_path: Path) -> None:
    """Seeded generators may draw the same secret."""
    first, second = (replace(plan(tmp_path / name, 1, [LOW]), secret="drawn") for name in ("first", "second"))

    assert first.home_secret != second.home_secret
    assert first.home_secret == replace(first, superstep=Superstep(9)).home_secret


def test_process_gives_up_the_slots_of_an_earlier_run(tmp_path: Path) -> None:
    process, other = WorkerProcess(setting(tmp_path)), WorkerProcess(setting(tmp_path / "other"))
    try:
        homes = process.homes("a run", lambda _: None, os.getpid())

        assert homes.neighbour(0, 1) is None
        assert process.homes("a run", lambda _: None, os.getpid()) is homes
        assert process.homes("another run", lambda _: None, os.getpid()) is not homes
        assert other.homes("a run", lambda _: None, os.getpid()).neighbour(0, 1) is None
    finally:
        process.close()
        other.close()


def test_slot_of_another_store_is_refused(tmp_path: Path) -> None:
    """The process that handed it over then runs it itself."""
    process = WorkerProcess(setting(tmp_path))
    other = plan(tmp_path / "other", 1, [LOW])

    with pytest.raises(InternalError, match="handed over within a run"):
        _serve(process, HandedOver(None, other.to_neighbour(0), []))  # type: ignore[arg-type]
