"""The interval worker."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from millpond.executor.computation.computation import Computation
from millpond.executor.computation.values import PythonValues
from millpond.executor.interval.bundle import Bundle, Deliveries, IntervalPlan
from millpond.executor.interval.row_cache import MemoryBudget
from millpond.executor.interval.row_update import Manifest
from millpond.executor.interval.worker import IntervalWorker, WorkerState
from millpond.executor.pipeline.pipeline import EnginePipeline
from millpond.statestore.errors import InternalError, InvalidError, UnavailableError
from millpond.statestore.interval import Interval
from millpond.statestore.log.files import LiveFile
from millpond.statestore.objects.memory import MemoryObjects
from millpond.statestore.rows.row import Fence
from millpond.statestore.types import CommitNumber, EventTimeMicros, Sequencer, Superstep, WallTimeMicros
from millpond.testing.faults.faulty_objects import Fault, FaultyObjects
from tests.fixtures.interval_run import live_file

INTERVAL = Interval("c")


class Sum(Computation):
    def process_record(self, context, record):
        if record.value == 13:
            raise ValueError("thirteen")
        context.state.set(context.state.get(0) + record.value)


class Table:
    """The committed files of an interval; count how often they are read."""

    def __init__(self) -> None:
        self.committed: list[LiveFile] = []
        self.reads = 0
        self.on_read: Callable[[], None] = lambda: None

    def files(self) -> Sequence[LiveFile]:
        self.reads += 1
        self.on_read()
        return tuple(self.committed)

    def commit(self, manifest: Manifest) -> None:
        assert manifest.file is not None
        version = len(self.committed) + 1
        self.committed.append(live_file(manifest.file, INTERVAL, version))


class Setting:
    """A worker and its table in memory."""

    def __init__(self) -> None:
        pipeline = EnginePipeline("p")
        pipeline.inject("in", key="k", at="t").apply(Sum(), name="c", on_error="stop")
        self.objects = FaultyObjects(MemoryObjects())
        self.table = Table()
        self.supersteps = 0
        self.worker = IntervalWorker(
            pipeline.check().computations["c"],
            INTERVAL,
            self.objects,
            memory=MemoryBudget(1 << 20),
            stopwatch=lambda: 0,
        )

    def bundle(self, *numbers: int) -> Bundle:
        self.supersteps += 1
        part = IntervalPlan(
            interval=INTERVAL,
            fence=Fence(Sequencer(1), CommitNumber(self.supersteps)),
            watermark=EventTimeMicros(0),
            files=(),
            due=False,
        )
        records = Deliveries(
            stream="in",
            keys=pa.array(["k"] * len(numbers), pa.string()),
            at=np.zeros(len(numbers), np.int64),
            values=PythonValues(list(numbers)),
        )
        return Bundle(
            plan=part, deliveries=[records], superstep=Superstep(self.supersteps), wall_time=WallTimeMicros(0)
        )

    def step(self, *numbers: int) -> Manifest:
        """Run the steps of the local engine up to the commit."""
        bundle = self.bundle(*numbers)
        result = self.worker.process(bundle, self.table.files)
        return self.worker.finish(bundle, result, self.worker.write(bundle, result, self.token))

    def run(self, *numbers: int) -> Manifest:
        """Run the single call of a Spark task."""
        return self.worker.run(self.bundle(*numbers), self.table.files, self.token)

    @property
    def token(self) -> str:
        return f"{self.supersteps:032x}"

    def state(self) -> Any:
        return self.worker._soft_state.load(["k"])[0]


def test_confirmed_bundles_do_not_read_the_table_again() -> None:
    """Only the first bundle reads the committed files."""
    setting = Setting()
    for number in (1, 2, 3):
        manifest = setting.step(number)
        setting.table.commit(manifest)
        setting.worker.confirm(manifest.file)

    assert setting.table.reads == 1
    assert setting.state() == "6"
    assert setting.worker.state is WorkerState.FOLLOWING


def test_unconfirmed_bundle_is_reverted_by_the_next() -> None:
    setting = Setting()
    first = setting.step(1)
    setting.table.commit(first)
    setting.worker.confirm(first.file)
    setting.step(10)
    setting.step(100)

    assert setting.table.reads == 2
    assert setting.state() == "101"


def test_worker_that_fell_behind_reads_the_files_before_its_next_bundle() -> None:
    setting = Setting()
    first = setting.step(1)
    setting.table.commit(first)
    setting.worker.confirm(first.file)
    setting.worker.fall_behind()

    second = setting.step(2)
    setting.table.commit(second)
    setting.worker.confirm(second.file)
    assert setting.table.reads == 2
    assert setting.worker.state is WorkerState.FOLLOWING


def test_worker_that_falls_behind_during_a_read_reads_again() -> None:
    """Confirming its bundle must not hide the other commit."""
    setting = Setting()
    setting.table.on_read = setting.worker.fall_behind
    first = setting.step(1)
    setting.table.commit(first)
    setting.worker.confirm(first.file)
    assert setting.worker.state is WorkerState.BEHIND

    setting.table.on_read = lambda: None
    for number in (2, 3):
        manifest = setting.step(number)
        setting.table.commit(manifest)
        setting.worker.confirm(manifest.file)

    assert setting.table.reads == 2
    assert setting.state() == "6"


def test_spark_task_reads_the_table_before_every_bundle() -> None:
    """Nothing confirms a task's commit; it learns of it from the files."""
    setting = Setting()
    setting.table.commit(setting.run(1))
    setting.run(10)
    setting.table.commit(setting.run(100))

    assert setting.table.reads == 3
    assert setting.state() == "101"


def test_failed_task_discards_its_soft_state() -> None:
    """User code fails first, then writing."""
    setting = Setting()
    setting.table.commit(setting.run(1))
    with pytest.raises(InvalidError, match="thirteen"):
        setting.run(13)
    assert setting.worker._soft_state.files == []
    assert setting.worker.state is WorkerState.BEHIND
    setting.objects.plan(Fault.REFUSED, "put_if_absent", within="", times=1_000)
    with pytest.raises(UnavailableError):
        setting.run(2)
    assert setting.worker._soft_state.files == []
    setting.objects.heal()

    setting.table.commit(setting.run(3))
    assert setting.state() == "4"


def test_bundle_whose_file_was_not_written_can_be_repeated() -> None:
    """It must count once."""
    setting = Setting()
    first = setting.step(1)
    setting.table.commit(first)
    setting.worker.confirm(first.file)
    setting.objects.plan(Fault.REFUSED, "put_if_absent", within="", times=1_000)
    with pytest.raises(UnavailableError):
        setting.step(2)
    setting.objects.heal()

    setting.table.commit(setting.step(2))
    assert setting.state() == "3"


def test_confirming_twice_or_finishing_too_early_is_an_internal_error() -> None:
    setting = Setting()
    manifest = setting.step(1)
    setting.worker.confirm(manifest.file)

    with pytest.raises(InternalError, match="confirmed once"):
        setting.worker.confirm(manifest.file)
    with pytest.raises(InternalError, match="finished after it ran"):
        setting.worker.finish(setting.bundle(2), manifest.result, manifest.file)
