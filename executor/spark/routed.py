"""The records of a Spark task as its intervals get them: outside records, and productions that came by shuffle.

Where many slots have many productions, reading all of them in each slot would cost slots times productions. So a first
task reads each file once, extracts the keys for each consumer, and yields one row for each slot with all of its
productions as an Arrow stream, which Spark moves like an outside row. The order of files and rows travels along,
because a key's input must not depend on the order in which Spark merges rows.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, Final

import cloudpickle
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyspark import TaskContext

from millpond.executor.computation.values import ArrowValues, ChangedValues, Values
from millpond.executor.inputs.changes import change_signs, in_commit_order, signed_ids
from millpond.executor.inputs.extraction import (
    member_names,
    mended_texts,
    observe_times,
    row_values,
    rows_to_extract,
    scoped_ids,
    too_large,
    with_marks,
)
from millpond.executor.inputs.keys import extract_key_column
from millpond.executor.inputs.payload import decoded_values
from millpond.executor.inputs.record_size import cut_row, error_of_size
from millpond.executor.inputs.row_digest import unordered_digest
from millpond.executor.interval.bundle import DeadLetter, Deliveries
from millpond.executor.pipeline.nodes import ComputationNode
from millpond.executor.spark.task_plan import (
    AT,
    ID,
    KEY,
    PRODUCTIONS,
    TARGET,
    Route,
    RoutedInput,
    SlotParts,
    WorkerSetting,
    is_readable,
    position_of,
    readable_rows,
    slots_of_rows,
    targets_of,
    unreadable_target,
)
from millpond.executor.spark.worker_process import WorkerProcess
from millpond.executor.superstep.delivery import (
    ProductionSource,
    deliveries_in,
    join_productions,
    keyed_productions,
    values_of,
)
from millpond.executor.time.instants import INSTANT_MAX_US, INSTANT_MIN_US, parse_instant_us
from millpond.executor.time.observations import InputObservation, Watch
from millpond.statestore.errors import DataError, InvalidError, ObjectMissingError, check
from millpond.statestore.rows.key_columns import plain_keys
from millpond.statestore.rows.row import one_array
from millpond.statestore.rows.state_schema import value_fields

_DEAD_LETTERS_MAX: Final = 100_000
_GARBLED: Final = "__millpond_garbled"


class RoutedRecords:
    """The outside records of a slot, in Arrow until user code asks for a value."""

    def __init__(self, source: RoutedInput, table: pa.Table) -> None:
        self._source = source
        self._columns = source.columns
        self.digest: int = _digest(source, table) if source.digested else 0
        if source.watch.stamp_at is not None and source.watch.ahead is None:
            # The input has no other time than that of its arrival.
            times = pa.array(np.full(table.num_rows, source.watch.stamp_at, np.int64))
            table = table.set_column(table.column_names.index(self._columns.at), self._columns.at, times)
        table, garbled = mended_texts(table)
        table, ahead = self._not_ahead(table, source.watch)
        if garbled := ahead | garbled:
            reasons = [garbled.get(row) for row in range(table.num_rows)]
            table = table.append_column(_GARBLED, pa.array(reasons, pa.string()))
        if bad := sorted({*garbled, *too_large(table.select(self._columns.own), source.max_record_bytes)}):
            # Unreadable in the slot that has them, so that they become letters there.
            targets = table.column(TARGET).to_numpy().copy()
            targets[bad] = [unreadable_target(position_of(int(target))) for target in targets[bad]]
            table = table.set_column(table.column_names.index(TARGET), TARGET, pa.array(targets, pa.int32()))
        self._table = table
        self._targets = pc.unique(table.column(TARGET)).to_pylist()

    def _not_ahead(self, table: pa.Table, watch: Watch) -> tuple[pa.Table, dict[int, str]]:
        """Return a table without times beyond the stream's `AheadLimit`, or the errors of its rows that are beyond."""
        if watch.ahead is None or watch.stamp_at is None or watch.ahead.on_ahead == "hold":
            return table, {}
        times, latest = _times(table, self._columns.at), watch.ahead.latest(watch.stamp_at)
        is_beyond = pc.and_(pc.greater(times, latest).fill_null(False), readable_rows(table.column(TARGET)))
        if not pc.any(is_beyond).as_py():
            return table, {}
        if watch.ahead.on_ahead == "dead_letter":
            return table, dict.fromkeys(np.flatnonzero(is_beyond.to_numpy()).tolist(), watch.ahead.error)
        if self._columns.at in table.column_names and self._columns.at != AT:
            # The input's own column stays what it is: it is a part of the value.
            self._columns = replace(self._columns, at=AT)
            return table.append_column(AT, pc.if_else(is_beyond, latest, times)), {}
        place = table.column_names.index(AT)
        return table.set_column(place, AT, pc.if_else(is_beyond, latest, times)), {}

    @classmethod
    def read(cls, source: RoutedInput | None, batches: Iterable[pa.RecordBatch]) -> RoutedRecords | None:
        """Collect a partition's batches; ``None`` if there are no rows, or no outside input."""
        collected = [batch for batch in batches if batch.num_rows]
        if source is None or not collected:
            return None
        table = pa.Table.from_batches(collected).combine_chunks()
        # A shuffle keeps the order within a partition of the input, but changes need the order of commits.
        ordered = table if source.columns.sign is None else in_commit_order(table)
        return cls(source, ordered)

    def check_slot(self, slot: int, slots: int) -> None:
        """Raise if Spark has moved records to the wrong partition, because skipping them would lose them."""
        positions = map(position_of, self._targets)
        strays = sorted(position for position in positions if position % slots != slot)
        check(not strays, "records come to the slot of their interval", slot=slot, slots=slots, strays=strays)

    def deliveries(self, position: int, node: ComputationNode) -> list[Deliveries]:
        if position not in self._targets:
            return []
        table, source = self._of_target(position), self._source
        times = _times(table, self._columns.at)
        at = (times.fill_null(source.untimed_at) if times.null_count else times).to_numpy()
        rows = table.select(self._columns.own)
        values: Values = ArrowValues(rows)
        if source.payload is not None:
            values = row_values(decoded_values(source.payload, rows, stream=source.stream))
        elif self._columns.sign is not None:
            values = ChangedValues(values, change_signs(table), at)
        ids = scoped_ids(self._own_ids(table), source.id_scopes.get(node.name, b""))
        keys = one_array(table.column(self._columns.key))
        if self._columns.key != KEY:
            keys = plain_keys(keys)
        return [Deliveries(stream=source.stream, keys=keys, at=at, values=values, ids=ids)]

    def letters(self, parts: SlotParts) -> Iterator[DeadLetter]:
        """Yield a letter for each record without a readable key or time."""
        for target in self._targets:
            if is_readable(target):
                continue
            table = self._of_target(target)
            computation = parts[position_of(target)].interval.computation
            if table.num_rows > _DEAD_LETTERS_MAX:
                raise InvalidError(
                    "too many unreadable records in one superstep; look at the input first",
                    input=self._source.stream,
                    unreadable=table.num_rows,
                    allowed=_DEAD_LETTERS_MAX,
                    error=next(self._letters_of(table.slice(0, 1), computation)).error,
                )
            yield from self._letters_of(table, computation, self._columns.key_parts.get(position_of(target)))

    def _letters_of(
        self, table: pa.Table, computation: str, key_parts: str | tuple[str, ...] | None = None
    ) -> Iterator[DeadLetter]:
        columns, rows = self._columns, table.num_rows
        key_errors = {} if key_parts is None else extract_key_column(key_parts, table).errors
        keys = table.column(columns.key).to_pylist()
        times = _times(table, columns.at).to_pylist()
        errors = [None] * rows if columns.error is None else table.column(columns.error).to_pylist()
        if _GARBLED in table.column_names:
            errors = [
                why or error for why, error in zip(table.column(_GARBLED).to_pylist(), errors, strict=True)
            ]
        read, large = self._shown_values(table)
        ids = self._own_ids(table)
        record_ids = [None] * rows if ids is None else ids.to_pylist()
        cells = zip(keys, times, errors, record_ids, strict=True)
        for row, (key, at, error, record_id) in enumerate(cells):
            value = partial(read, row)
            untimed = self._time_error(at, value) if error is None and row not in large else None
            is_timed = at is not None and untimed is None and INSTANT_MIN_US <= at <= INSTANT_MAX_US
            key_error = key_errors.get(row, "the key is null") if key is None else None
            yield DeadLetter.of_unreadable(
                computation,
                self._source.stream,
                value,
                large.get(row) or error or key_error or untimed or "the time is unreadable",
                key=key,
                at=at if is_timed else None,
                record_id=record_id,
            )

    def _shown_values(self, table: pa.Table) -> tuple[Callable[[int], Any], dict[int, str]]:
        """Return a reader of the letters' values, and the errors of values that are too large and cut."""
        own, limit = table.select(self._columns.own), self._source.max_record_bytes
        large = too_large(own, limit)
        if limit is None or not large:
            return ArrowValues(own).value, {}
        errors = dict.fromkeys(large, error_of_size(limit))
        return (
            lambda row: cut_row(own, row) if row in errors else ArrowValues(own.slice(row, 1)).value(0),
            errors,
        )

    def _time_error(self, at: int | None, value: Callable[[], Any]) -> str | None:
        raw_at = self._columns.raw_at
        try:
            if raw_at is None:
                parse_instant_us(at)
            else:
                parse_instant_us(value().get(raw_at), self._source.times)
        except InvalidError as error:
            return str(error)
        return None

    def observation(self) -> InputObservation:
        """Return number and delays of records, each counted for its first consumer only, and the bounds of all times."""
        readable = self._table.filter(readable_rows(self._table.column(TARGET)))
        first = pc.is_in(readable.column(TARGET), pa.array(sorted(self._source.first_targets), pa.int32()))
        records = pc.sum(first).as_py() or 0
        times = _times(readable, self._columns.at)
        if times.null_count:
            # A time that is null moves no watermark.
            readable, first = readable.filter(times.is_valid()), first.filter(times.is_valid())
            times = times.drop_null()
        at, counted = times.to_numpy(), first.to_numpy()
        if self._source.injector is None:
            return observe_times(self._source.watch, at, records=records, counted=counted)
        node = cloudpickle.loads(self._source.injector)  # written by the driver of this run
        rows = rows_to_extract(
            node, readable.select(self._columns.own) if self._columns.sign is None else readable
        )
        members = member_names(node, rows)
        seen = observe_times(self._source.watch, at, members, records=records, counted=counted)
        return with_marks(seen, node, rows, members, self._source.watch.stamp_at)

    def _own_ids(self, table: pa.Table) -> pa.Array | None:
        if self._columns.id is None:
            return None
        ids = one_array(table.column(self._columns.id))
        if pa.types.is_integer(ids.type):
            ids = ids.cast(pa.string())
        if ids.null_count == len(ids):
            return None
        own = ids.cast(pa.binary())
        # Ids that a Python extractor made have the sign already.
        is_signed = self._columns.sign is None or self._columns.id == ID
        return own if is_signed else signed_ids(own, change_signs(table))

    def _of_target(self, target: int) -> pa.Table:
        if len(self._targets) == 1:
            return self._table
        return self._table.filter(pc.equal(self._table.column(TARGET), target))


def _digest(source: RoutedInput, table: pa.Table) -> int:
    """Return the digest of the rows, each of which counts with its first consumer."""
    positions = [position_of(target) for target in table.column(TARGET).to_pylist()]
    counts = pc.is_in(pa.array(positions, pa.int32()), pa.array(sorted(source.first_targets), pa.int32()))
    return unordered_digest(table.filter(counts).select(source.digested))


def _times(table: pa.Table, name: str) -> Any:
    # Spark's timestamps are microseconds already: only the type changes.
    return one_array(table.column(name)).cast(pa.int64())


# -- productions by shuffle ----------------------------------------------------------------

ROUTED_SCHEMA: Final = f"{TARGET} int, {PRODUCTIONS} binary"
"""Schema of the routing tasks' rows."""

_TABLE: Final = pa.schema(
    {
        "target": pa.int32(),
        "number": pa.int64(),
        "stream": pa.string(),
        "key": pa.string(),
        "at": pa.int64(),
        "value": pa.string(),
        "value_bytes": pa.binary(),
        "error": pa.string(),
    }
)
_ROWS_MAX: Final = 1 << 16
"""Productions in a row at most, because a worker gets several rows at once."""

_FILE_BITS: Final = 32
_HEADER_BYTES: Final = 8
_FAILED: Final = -1
"""The header of a row with an error, in place of the number of bytes read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductionRoutes:
    """The instructions for the tasks that route a superstep's productions.

    Attributes:
        consumers: the routes by computation.
        sources: the files that each task reads, with their numbers.
    """

    setting: WorkerSetting
    slots: int
    consumers: Mapping[str, Route]
    sources: Mapping[int, Sequence[tuple[int, ProductionSource]]]


def make_routing_task(
    routes: ProductionRoutes,
) -> Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Return the function that ``mapInArrow`` runs on each partition of a frame, whose rows it ignores."""

    def task(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
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
            # A retry would fail in the same way, so the task that gets this row reports the error to the driver.
            slot = min(route.first for route in routes.consumers.values()) % routes.slots
            # As JSON and not pickled, because these bytes travel in a column among those of the input.
            fields = {
                "is_missing": isinstance(failure, ObjectMissingError),
                "message": failure.message,
                "details": {name: str(value) for name, value in failure.details.items()},
                "notes": getattr(failure, "__notes__", []),
            }
            header = _FAILED.to_bytes(_HEADER_BYTES, "little", signed=True)
            yield _row(slot, header + json.dumps(fields).encode())

    return task


def route_productions(
    productions: pa.Table,
    number: int,
    routes: ProductionRoutes,
    nodes: Mapping[str, ComputationNode],
    read_bytes: int,
) -> Iterator[pa.RecordBatch]:
    """Yield rows of `ROUTED_SCHEMA` with the productions of one file. The first of them reports ``read_bytes``."""
    tables = []
    for computation, route in routes.consumers.items():
        for stream, part, extracted in keyed_productions(productions, nodes[computation]):
            rows = part.num_rows
            errors = [extracted.errors.get(row) for row in range(rows)] if extracted.errors else None
            columns = [
                pa.array(targets_of(extracted.keys, route), pa.int32()),
                pa.array((number << _FILE_BITS) + np.arange(rows)),
                pa.array([stream]).take(pa.array(np.zeros(rows, np.int8))),
                extracted.keys,
                part.column("at").cast(pa.int64()),
                part.column("value"),
                part.column("value_bytes"),
                pa.nulls(rows, pa.string()) if errors is None else pa.array(errors, pa.string()),
            ]
            typed = value_fields(part.schema)
            columns += [part.column(field.name) for field in typed]
            tables.append(pa.table(columns, schema=pa.schema([*_TABLE, *typed])))
    if tables:
        yield from _by_slot(join_productions(tables).combine_chunks(), routes.slots, read_bytes)


def _by_slot(table: pa.Table, slots: int, read_bytes: int) -> Iterator[pa.RecordBatch]:
    slot_of_row = slots_of_rows(table.column("target").to_numpy(), slots)
    order = np.argsort(slot_of_row, kind="stable")
    for slot, (start, end) in _runs(slot_of_row[order]).items():
        for begin in range(start, end, _ROWS_MAX):
            rows = table.take(pa.array(order[begin : min(begin + _ROWS_MAX, end)]))
            packed = pa.BufferOutputStream()
            packed.write(read_bytes.to_bytes(_HEADER_BYTES, "little", signed=True))
            with pa.ipc.new_stream(packed, rows.schema) as writer:
                writer.write_table(rows)
            yield _row(slot, packed.getvalue().to_pybytes())
            read_bytes = 0


def _runs(ordered: npt.NDArray[Any]) -> dict[int, tuple[int, int]]:
    """Return start and end of each value in an ordered array."""
    present, starts = np.unique(ordered, return_index=True)
    return dict(zip(present.tolist(), pairwise([*starts.tolist(), len(ordered)]), strict=True))


def _row(slot: int, packed: bytes) -> pa.RecordBatch:
    columns = [pa.array([slot], pa.int32()), pa.array([packed], pa.binary())]
    return pa.RecordBatch.from_arrays(columns, names=[TARGET, PRODUCTIONS])


def _unpacked_error(packed: bytes) -> DataError:
    fields = json.loads(packed)
    kind = ObjectMissingError if fields["is_missing"] else DataError
    error = kind(fields["message"], **fields["details"])
    for note in fields["notes"]:
        error.add_note(note)
    return error


def pop_productions(
    batches: Iterable[pa.RecordBatch],
) -> tuple[RoutedProductions | None, list[pa.RecordBatch]]:
    """Separate a slot's routed productions, if there are any, from its outside records."""
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
                raise _unpacked_error(packed[_HEADER_BYTES:].to_pybytes())
            read_bytes += header
            tables.append(pa.ipc.open_stream(packed[_HEADER_BYTES:]).read_all())
        records = batch.filter(column.is_null()).drop_columns([PRODUCTIONS])
        if records.num_rows:
            outside.append(records)
    return (RoutedProductions(join_productions(tables), read_bytes) if tables else None), outside


class RoutedProductions:
    """The productions of a slot, under their consumers' keys, and the cost of reading them in bytes."""

    def __init__(self, table: pa.Table, read_bytes: int) -> None:
        self.read_bytes = read_bytes
        ordered = table.sort_by([("target", "ascending"), ("number", "ascending")])
        self._table = ordered.combine_chunks()
        self._rows = _runs(self._table.column("target").to_numpy())

    def check_slot(self, slot: int, slots: int) -> None:
        """Raise if Spark has moved rows to the wrong partition, because skipping them would lose them."""
        strays = sorted({position_of(target) for target in self._rows if position_of(target) % slots != slot})
        check(not strays, "productions come to the slot of their interval", slot=slot, strays=strays)

    def deliveries(self, position: int, node: ComputationNode) -> list[Deliveries]:
        """Return the part of the interval at a position, by stream. No entry is empty."""
        rows = self._rows.get(position)
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
        """Yield a dead letter for each production without a key for its consumer."""
        for target, (start, end) in self._rows.items():
            if is_readable(target):
                continue
            mine = self._table.slice(start, end - start)
            values = values_of(mine)
            columns = (mine.column(name).to_pylist() for name in ("stream", "error", "at"))
            for row, (stream, error, at) in enumerate(zip(*columns, strict=True)):
                yield DeadLetter.of_unreadable(
                    parts[position_of(target)].interval.computation,
                    stream,
                    partial(values.value, row),
                    error,
                    at=at,
                )
