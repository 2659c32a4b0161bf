"""Productions by shuffle: each file is read once, and each production goes to the slot of its consumer's interval.

Where many slots have many productions, to read all of them in each slot costs slots times productions. So a first task
reads the files, has each consumer extract its keys, and yields for each slot one row with all of its productions as an
Arrow stream, which Spark moves like a row from outside. The order of files and rows travels along: what a key gets
does not depend on how Spark merges what it moves.
"""

from __future__ import annotations

import pickle
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from millpond.executor.computation.values import JsonValues
from millpond.executor.interval.bundle import DeadLetter, Deliveries
from millpond.executor.pipeline.nodes import ComputationNode
from millpond.executor.spark.task_plan import (
    PRODUCTIONS,
    TARGET,
    SlotParts,
    WorkerSetting,
    is_readable,
    position_of,
    readable_target,
    unreadable_target,
)
from millpond.executor.spark.worker_process import WorkerProcess
from millpond.executor.superstep.delivery import ProductionSource, deliveries_in, keyed_productions
from millpond.statestore.errors import DataError, check

ROUTED_SCHEMA: Final = f"{TARGET} int, {PRODUCTIONS} binary"
"""Schema of the frame that routing tasks yield."""

_TABLE: Final = pa.schema(
    [
        ("target", pa.int32()),
        ("number", pa.int64()),
        ("stream", pa.string()),
        ("key", pa.string()),
        ("at", pa.int64()),
        ("value", pa.string()),
        ("value_bytes", pa.binary()),
        ("error", pa.string()),
    ]
)
_ROWS_MAX: Final = 1 << 16
"""The most productions in a row: a worker gets several rows at once."""

_FILE_BITS: Final = 32
_HEADER_BYTES: Final = 8
_FAILED: Final = -1
"""In the place of the number of bytes that were read: the rest is the error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerRoute:
    """Where a computation's productions go.

    Attributes:
        computation: its name.
        lows: low bounds of its intervals in key order; the first is ``""``.
        positions: their positions.
    """

    computation: str
    lows: tuple[str, ...]
    positions: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductionRoutes:
    """The instructions for the tasks that route a superstep's productions.

    Attributes:
        setting: the store and the code.
        slots: number of slots.
        consumers: where the productions go.
        sources: the files that each task reads, with their numbers.
    """

    setting: WorkerSetting
    slots: int
    consumers: tuple[ConsumerRoute, ...]
    sources: Mapping[int, Sequence[tuple[int, ProductionSource]]]


def make_routing_task(
    routes: ProductionRoutes,
) -> Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """The function that ``mapInArrow`` runs on each partition of a frame whose rows mean nothing."""

    def task(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext

        for _ in batches:
            pass
        context = TaskContext.get()
        process = WorkerProcess.of(routes.setting)
        mine = routes.sources.get(0 if context is None else context.partitionId(), ())
        try:
            for number, source in mine:
                before = process.read_bytes
                productions = process.productions(source)
                read_bytes = process.read_bytes - before
                yield from route_productions(productions, number, routes, process.nodes, read_bytes)
        except DataError as failure:
            # A retry would repeat it: the task that gets the row reports it, so that the driver raises it as it is.
            yield _row(min(route.positions[0] for route in routes.consumers) % routes.slots, _failed(failure))

    return task


def route_productions(
    productions: pa.Table,
    number: int,
    routes: ProductionRoutes,
    nodes: Mapping[str, ComputationNode],
    read_bytes: int,
) -> Iterator[pa.RecordBatch]:
    """Rows of `ROUTED_SCHEMA` with the productions of one file.

    Args:
        productions: rows of `PRODUCTION_SCHEMA`.
        number: the file's.
        routes: where they go.
        nodes: the computations.
        read_bytes: what it cost to read them; told once.
    """
    tables = []
    for route in routes.consumers:
        for stream, part, extracted in keyed_productions(productions, nodes[route.computation]):
            targets = _targets(extracted.keys, route)
            errors = [extracted.errors.get(row) for row in range(part.num_rows)] if extracted.errors else None
            columns = [
                pa.array(targets, pa.int32()),
                pa.array((number << _FILE_BITS) + np.arange(part.num_rows)),
                pa.array([stream]).take(pa.array(np.zeros(part.num_rows, np.int8))),
                extracted.keys,
                part.column("at").cast(pa.int64()),
                part.column("value"),
                part.column("value_bytes"),
                pa.nulls(part.num_rows, pa.string()) if errors is None else pa.array(errors, pa.string()),
            ]
            tables.append(pa.table(columns, schema=_TABLE))
    if tables:
        yield from _by_slot(pa.concat_tables(tables).combine_chunks(), routes.slots, read_bytes)


def _targets(keys: pa.Array, route: ConsumerRoute) -> npt.NDArray[np.int32]:
    """The target of each key: by binary search for the bounds in the sorted keys, of which there are more."""
    targets = np.full(len(keys), unreadable_target(route.positions[0]), np.int32)
    order = pc.sort_indices(keys).to_numpy()[: len(keys) - keys.null_count]
    ordered = _Keys(keys.take(pa.array(order)))
    starts = [0, *(bisect_left(ordered, low) for low in route.lows[1:]), len(order)]
    for position, (start, end) in zip(route.positions, pairwise(starts), strict=True):
        targets[order[start:end]] = readable_target(position)
    return targets


class _Keys(Sequence[str]):
    """An Arrow array as a sequence that `bisect` compares."""

    def __init__(self, keys: pa.Array) -> None:
        self._keys = keys

    def __len__(self) -> int:
        return len(self._keys)

    def __getitem__(self, index: Any) -> Any:
        return self._keys[index].as_py()


def _by_slot(table: pa.Table, slots: int, read_bytes: int) -> Iterator[pa.RecordBatch]:
    targets = table.column("target").to_numpy()
    slot_of_row = np.where(targets < 0, -1 - targets, targets) % slots
    order = np.argsort(slot_of_row, kind="stable")
    present, starts = np.unique(slot_of_row[order], return_index=True)
    bounds = [*starts.tolist(), len(order)]
    for slot, (start, end) in zip(present.tolist(), pairwise(bounds), strict=True):
        for begin in range(start, end, _ROWS_MAX):
            rows = table.take(pa.array(order[begin : min(begin + _ROWS_MAX, end)]))
            yield _row(slot, _packed(rows, read_bytes))
            read_bytes = 0


def _row(slot: int, packed: bytes) -> pa.RecordBatch:
    columns = [pa.array([slot], pa.int32()), pa.array([packed], pa.binary())]
    return pa.RecordBatch.from_arrays(columns, names=[TARGET, PRODUCTIONS])


def _failed(failure: DataError) -> bytes:
    return _FAILED.to_bytes(_HEADER_BYTES, "little", signed=True) + pickle.dumps(failure)


def _packed(rows: pa.Table, read_bytes: int) -> bytes:
    sink = pa.BufferOutputStream()
    sink.write(read_bytes.to_bytes(_HEADER_BYTES, "little", signed=True))
    with pa.ipc.new_stream(sink, rows.schema) as writer:
        writer.write_table(rows)
    packed: bytes = sink.getvalue().to_pybytes()
    return packed


def take_productions(
    batches: Iterable[pa.RecordBatch],
) -> tuple[RoutedProductions | None, list[pa.RecordBatch]]:
    """What a slot gets: its productions, if they were routed, and the records from outside.

    Raises:
        DataError: a file with productions is missing or its bytes are wrong.
    """
    tables: list[pa.Table] = []
    outside = []
    read_bytes = 0
    for batch in batches:
        if PRODUCTIONS not in batch.schema.names:
            outside.append(batch)
            continue
        column = batch.column(PRODUCTIONS)
        for row in column.drop_null():
            packed = row.as_buffer()
            header = int.from_bytes(packed[:_HEADER_BYTES].to_pybytes(), "little", signed=True)
            if header == _FAILED:
                raise pickle.loads(packed[_HEADER_BYTES:].to_pybytes())  # noqa: S301 - written by our own tasks
            read_bytes += header
            tables.append(pa.ipc.open_stream(packed[_HEADER_BYTES:]).read_all())
        records = batch.filter(column.is_null()).drop_columns([PRODUCTIONS])
        if records.num_rows:
            outside.append(records)
    return (RoutedProductions(pa.concat_tables(tables), read_bytes) if tables else None), outside


class RoutedProductions:
    """The productions of a slot, under their consumers' keys.

    Args:
        table: what the routing tasks have made for the slot.
        read_bytes: what it cost them to read the files that they have told this slot of.
    """

    def __init__(self, table: pa.Table, read_bytes: int) -> None:
        self.read_bytes = read_bytes
        ordered = table.sort_by([("target", "ascending"), ("number", "ascending")])
        self._table = ordered.combine_chunks()
        targets = self._table.column("target").to_numpy()
        present, starts = np.unique(targets, return_index=True)
        bounds = [*starts.tolist(), len(targets)]
        self._rows = dict(zip(present.tolist(), pairwise(bounds), strict=True))

    def check_slot(self, slot: int, slots: int) -> None:
        """Refuse productions of another slot: skipping them would lose them.

        Raises:
            InternalError: Spark has moved rows to the wrong partition.
        """
        strays = sorted({position_of(target) for target in self._rows if position_of(target) % slots != slot})
        check(not strays, "productions come to the slot of their interval", slot=slot, strays=strays)

    def deliveries(self, position: int, node: ComputationNode) -> list[Deliveries]:
        """The part of the interval at a position, stream by stream; no entry is empty."""
        rows = self._rows.get(readable_target(position))
        if rows is None:
            return []
        mine = self._table.slice(rows[0], rows[1] - rows[0])
        streams = mine.column("stream")
        parts = (
            (subscription.stream, mine.filter(pc.equal(streams, subscription.stream)))
            for subscription in node.subscriptions
        )
        return [deliveries_in(part, stream) for stream, part in parts if part.num_rows]

    def letters(self, parts: SlotParts) -> Iterator[DeadLetter]:
        """A dead letter for each production from which its consumer got no key."""
        for target, (start, end) in self._rows.items():
            if is_readable(target):
                continue
            mine = self._table.slice(start, end - start)
            values = JsonValues(
                mine.column("value").combine_chunks(), mine.column("value_bytes").combine_chunks()
            )
            columns = (mine.column(name).to_pylist() for name in ("stream", "error", "at"))
            for row, (stream, error, at) in enumerate(zip(*columns, strict=True)):
                yield DeadLetter.of_unreadable(
                    parts[position_of(target)].interval.computation,
                    stream,
                    partial(values.value, row),
                    error,
                    at=at,
                )
