"""
What the driver tells the tasks of a superstep, and what each task reports back.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

import pyarrow as pa

from millpond.executor.bundle.bundle import DeadLetter
from millpond.executor.bundle.result import Manifest
from millpond.executor.event_time.time_reading import DEFAULT_READING, TimeReading
from millpond.executor.injectors.observation import InputObservation, Watch
from millpond.executor.pipeline.weak import WeakStreams
from millpond.executor.spark.routed_columns import RoutedColumns
from millpond.executor.superstep.delivery import ProductionSource
from millpond.executor.superstep.plan import IntervalPlan
from millpond.statestore.errors import MillpondError
from millpond.statestore.types import Durability, Superstep, WallTimeMicros

__all__ = ["SLOT_REPORT_SCHEMA", "RoutedInput", "SlotReport", "TaskPlan", "read_slot_reports"]

SLOT_REPORT_SCHEMA: Final = "report binary"
"""Schema of the frame that tasks yield: one pickled `SlotReport` a row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedInput:
    """
    The outside input whose records the partitions contain.

    Attributes:
        stream: the injected stream.
        columns: which column has which part of a record.
        first_targets: positions of the first consumer's intervals, so that each record is counted once.
        id_scopes: prefix of record ids, by consumer.
        watch: what the driver needs to know of the records' times.
        injector: the pickled injector, if its watermark depends on more than times.
        times: how the injector reads times that do not say their unit or zone.
    """

    stream: str
    columns: RoutedColumns
    first_targets: frozenset[int]
    id_scopes: Mapping[str, bytes]
    watch: Watch
    injector: bytes | None = None
    times: TimeReading = DEFAULT_READING


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskPlan:
    """
    The instructions for all tasks of one superstep.

    Attributes:
        url: root of the rows table.
        storage_options: credentials and endpoints to open it.
        durability: what files survive before they are reported to the driver.
        pipeline: the pipeline's name.
        code: the pickled computations by name.
        code_digest: a hash of ``code``; a worker process that has loaded it does not unpickle it again.
        superstep: number of the superstep.
        wall_time: wall time of the whole superstep.
        slots: number of tasks.
        intervals: the intervals with work; the one at position *i* belongs to slot ``i % slots``.
        sources: committed files with undelivered productions.
        input: the outside input of this superstep, if any.
        cache_bytes: soft-state budget of one interval, in bytes.
        weak: which productions are delivered before the commit, by computation.
        handed_on: uncommitted files of this superstep, with weak productions.
    """

    url: str
    storage_options: dict[str, str]
    durability: Durability
    pipeline: str
    code: bytes
    code_digest: str
    superstep: Superstep
    wall_time: WallTimeMicros
    slots: int
    intervals: tuple[IntervalPlan, ...]
    sources: tuple[ProductionSource, ...]
    input: RoutedInput | None
    cache_bytes: int
    weak: Mapping[str, WeakStreams] = field(default_factory=dict)
    handed_on: tuple[ProductionSource, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotReport:
    """
    The answer of one task to the driver.

    Attributes:
        slot: the slot that it ran.
        manifests: one per interval that had work.
        dead_letters: unreadable records.
        inputs: counts and times of the outside input.
        failure: the error that ended the task, if another attempt would fail in the same way.
    """

    slot: int
    manifests: tuple[Manifest, ...] = ()
    dead_letters: tuple[DeadLetter, ...] = ()
    inputs: tuple[InputObservation, ...] = ()
    failure: MillpondError | None = None

    def to_batch(self) -> pa.RecordBatch:
        """
        The report as a row of `SLOT_REPORT_SCHEMA`.
        """
        return pa.RecordBatch.from_pydict({"report": pa.array([pickle.dumps(self)], pa.binary())})


def read_slot_reports(reports: pa.Table) -> tuple[SlotReport, ...]:
    """
    The reports in a table that the driver collected; only its own tasks write them.

    Args:
        reports: rows of `SLOT_REPORT_SCHEMA`.
    """
    pickled: Iterable[bytes] = reports.column("report").cast(pa.binary()).to_pylist()
    return tuple(pickle.loads(report) for report in pickled)  # noqa: S301 - written by our own tasks
