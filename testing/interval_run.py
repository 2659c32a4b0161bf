"""
One interval's bundles with a store in memory and any number of workers.

Stands in for the runners around `IntervalProcessor`: a worker processes a bundle and
writes a file; the test decides which file is committed, as a driver would.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from millpond.executor.bundle import Bundle, BundleResult, Deliveries
from millpond.executor.interval_processor import IntervalProcessor
from millpond.executor.row_reader import StoreRowReader
from millpond.executor.soft_state import BUDGET_BYTES, SoftState
from millpond.statestore.action import Add
from millpond.statestore.live_file import LiveFile, row_file_to_add
from millpond.statestore.objects import MemoryObjects
from millpond.statestore.row import Fence
from millpond.statestore.rowfile import (
    PARQUET,
    RowFile,
    RowFormat,
    merge_updates,
    read_row_files,
    row_file_path,
    write_row_file,
)
from millpond.statestore.types import (
    CommitNumber,
    EventTimeMicros,
    Sequencer,
    Superstep,
    TableVersion,
    WallTimeMicros,
)

if TYPE_CHECKING:
    from millpond.executor.topology import ComputationNode
    from millpond.statestore.interval import Interval

__all__ = ["Attempt", "IntervalRun", "live_file"]


@dataclass(frozen=True, slots=True)
class Attempt:
    """
    A worker's result for a bundle, and the file it wrote, if any.
    """

    result: BundleResult
    file: RowFile | None


class _Worker:
    def __init__(self, node: ComputationNode, interval: Interval, soft_state: SoftState) -> None:
        self.processor = IntervalProcessor(node, interval, soft_state)
        self.soft_state = soft_state


class IntervalRun:
    """
    A store of one interval, and workers that share it.

    Args:
        node: the computation.
        interval: the keys.
        workers: how many processes pretend to own the interval.
        budget_bytes: each worker's cache.
        row_format: how files are encoded.
    """

    def __init__(
        self,
        node: ComputationNode,
        interval: Interval,
        workers: int = 1,
        budget_bytes: int = BUDGET_BYTES,
        row_format: RowFormat = PARQUET,
    ) -> None:
        self.objects = MemoryObjects()
        self._node = node
        self._row_format = row_format
        self.interval = interval
        self.files: list[LiveFile] = []
        self.superstep = 0
        self._tokens = count(1)
        self._workers = []
        for _ in range(workers):
            soft_state = SoftState(interval, StoreRowReader(self.objects), budget_bytes)
            self._workers.append(_Worker(node, interval, soft_state))

    def soft_state(self, worker: int = 0) -> SoftState:
        """
        What a worker remembers.
        """
        return self._workers[worker].soft_state

    def replace_soft_state(self, worker: int, soft_state: SoftState) -> None:
        """
        Have a worker start again with other soft state.
        """
        self._workers[worker] = _Worker(self._node, self.interval, soft_state)

    def bundle(self, deliveries: Sequence[Deliveries] = (), watermark: int = 0, wall_time: int = 0) -> Bundle:
        """
        The bundle of the next superstep.
        """
        return Bundle(
            interval=self.interval,
            fence=Fence(Sequencer(1), CommitNumber(self.superstep + 1)),
            superstep=Superstep(self.superstep + 1),
            watermark=EventTimeMicros(watermark),
            wall_time=WallTimeMicros(wall_time),
            deliveries=deliveries,
        )

    def attempt(self, bundle: Bundle, worker: int = 0) -> Attempt:
        """
        Have a worker process the bundle and write its file; nothing is committed.
        """
        chosen = self._workers[worker]
        chosen.soft_state.synchronise(self.files)
        result = chosen.processor.process(bundle)
        file = None
        if result.updates is not None:
            file = write_row_file(
                self.objects,
                self.interval,
                result.updates,
                superstep=bundle.superstep,
                fence=bundle.fence,
                token=self._token(),
                row_format=self._row_format,
            )
        chosen.soft_state.adopt(file)
        return Attempt(result, file)

    def process_only(self, bundle: Bundle, worker: int = 0) -> BundleResult:
        """
        Have a worker process the bundle and then fail to write its file.
        """
        return self._workers[worker].processor.process(bundle)

    def commit(self, attempt: Attempt) -> None:
        """
        Make an attempt's file part of the table; the superstep is over.
        """
        self.superstep += 1
        if attempt.file is not None:
            self.files.append(live_file(attempt.file, self.interval, self.superstep))

    def step(
        self, deliveries: Sequence[Deliveries] = (), watermark: int = 0, wall_time: int = 0, worker: int = 0
    ) -> BundleResult:
        """
        A superstep in which nothing goes wrong.
        """
        attempt = self.attempt(self.bundle(deliveries, watermark, wall_time), worker)
        self.commit(attempt)
        return attempt.result

    def optimise(self, first: int = 0, last: int | None = None) -> None:
        """
        Replace some files by one with the same updates, as another engine's OPTIMIZE does.
        """
        chosen = self.files[first:last]
        if not chosen:
            return
        table = self._read(chosen)
        # Another engine sorts as it likes, and holds a key several times.
        path = row_file_path(self.interval.computation, Superstep(self.superstep), self._token())
        path = path.replace(".parquet", ".zstd.parquet")
        self.objects.put_if_absent(path, _foreign(table))
        self.files = [file for file in self.files if file not in chosen]
        self.files.append(_foreign_file(path, table, self.interval, self.superstep))

    def updates(self) -> pa.Table:
        """
        All committed row updates.
        """
        return self._read(self.files)

    def rows(self) -> pa.Table:
        """
        What readers see: one row a key.
        """
        return merge_updates(self.updates())

    def _read(self, files: Sequence[LiveFile]) -> pa.Table:
        return read_row_files(self.objects, [file.path for file in files])

    def _token(self) -> str:
        return f"{next(self._tokens):032x}"


def _foreign(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(table.take(pc.sort_indices(table, [("superstep", "descending")])), sink)
    return bytes(sink.getvalue())


def _foreign_file(path: str, table: pa.Table, interval: Interval, version: int) -> LiveFile:
    bounds = {name: pc.min_max(table.column(name)).as_py() for name in ("key", "superstep")}
    stats = {
        "numRecords": table.num_rows,
        "minValues": {name: bound["min"] for name, bound in bounds.items()},
        "maxValues": {name: bound["max"] for name, bound in bounds.items()},
    }
    add = Add(
        path=path,
        size_bytes=0,
        partition_values={"computation": interval.computation},
        modification_time_ms=0,
        stats=json.dumps(stats),
        data_change=False,
    )
    return LiveFile.from_add(add, TableVersion(version))


def live_file(file: RowFile, interval: Interval, version: int) -> LiveFile:
    """
    A written file as the snapshot shows it once it is committed.
    """
    add = row_file_to_add(file, interval, version=TableVersion(version), modification_time_ms=0)
    return LiveFile.from_add(add, TableVersion(version))
