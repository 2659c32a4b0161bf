"""The outside records of one Spark task, as its intervals get them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any, Final

import cloudpickle
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from millpond.executor.computation.values import ArrowValues, ChangedValues, Values
from millpond.executor.inputs.changes import change_signs, in_commit_order, signed_ids
from millpond.executor.inputs.extraction import member_names, row_values, scoped_ids, with_marks
from millpond.executor.inputs.keys import extract_key_column
from millpond.executor.inputs.payload import decoded_values, rows_to_extract
from millpond.executor.interval.bundle import DeadLetter, Deliveries
from millpond.executor.spark.task_plan import (
    ID,
    TARGET,
    RoutedInput,
    SlotParts,
    is_readable,
    position_of,
    readable_rows,
    readable_target,
)
from millpond.executor.time.instants import INSTANT_MAX_US, INSTANT_MIN_US, parse_instant_us
from millpond.executor.time.observations import InputObservation, observe_times
from millpond.statestore.errors import InvalidError, check

_DEAD_LETTERS_MAX: Final = 100_000


class RoutedRecords:
    """The outside records of a slot, in Arrow until user code asks for a value.

    Args:
        source: the outside input.
        table: the routed rows, at least one.
        parts: what the slot runs, by position.
    """

    def __init__(self, source: RoutedInput, table: pa.Table, parts: SlotParts) -> None:
        self._source = source
        self._columns = source.columns
        self._table = _stamped(table, source)
        self._parts = parts
        self._targets = pc.unique(table.column(TARGET)).to_pylist()

    @classmethod
    def read(
        cls, source: RoutedInput | None, parts: SlotParts, batches: Iterable[pa.RecordBatch]
    ) -> RoutedRecords | None:
        """Collect a partition's batches; ``None`` if there are no rows, or no outside input."""
        collected = [batch for batch in batches if batch.num_rows]
        if source is None or not collected:
            return None
        table = pa.Table.from_batches(collected).combine_chunks()
        # A shuffle keeps the order within a partition of the input, not that of commits.
        ordered = table if source.columns.sign is None else in_commit_order(table)
        return cls(source, ordered, parts)

    def check_slot(self, slot: int, slots: int) -> None:
        """Refuse records of another slot: skipping them would lose them.

        Raises:
            InternalError: Spark has moved records to the wrong partition.
        """
        positions = map(position_of, self._targets)
        strays = sorted(position for position in positions if position % slots != slot)
        check(not strays, "records come to the slot of their interval", slot=slot, slots=slots, strays=strays)

    def deliveries(self, position: int) -> tuple[Deliveries, ...]:
        """The records of the interval at a position of the plan."""
        target = readable_target(position)
        if target not in self._targets:
            return ()
        table = self._of_target(target)
        at = _times(table, self._columns.at).to_numpy(zero_copy_only=False)
        return (
            Deliveries(
                stream=self._source.stream,
                keys=_column(table, self._columns.key),
                at=at,
                values=self._values(table, at),
                ids=self._ids(table, self._parts[position].interval.computation),
            ),
        )

    def _values(self, table: pa.Table, at: npt.NDArray[np.int64]) -> Values:
        rows = table.select(self._columns.own)
        if self._source.payload is not None:
            return row_values(decoded_values(self._source.payload, rows, stream=self._source.stream))
        values = ArrowValues(rows)
        return values if self._columns.sign is None else ChangedValues(values, change_signs(table), at)

    def dead_letters(self) -> Iterator[DeadLetter]:
        """A letter for each record without a readable key or time.

        Raises:
            InvalidError: there are more of them than one superstep can hold.
        """
        for target in self._targets:
            if is_readable(target):
                continue
            table = self._of_target(target)
            computation = self._parts[position_of(target)].interval.computation
            if table.num_rows > _DEAD_LETTERS_MAX:
                raise InvalidError(
                    "too many unreadable records in one superstep; look at the input first",
                    input=self._source.stream,
                    unreadable=table.num_rows,
                    allowed=_DEAD_LETTERS_MAX,
                    error=next(self._letters(table.slice(0, 1), computation)).error,
                )
            yield from self._letters(table, computation, self._columns.key_parts.get(position_of(target)))

    def _letters(
        self, table: pa.Table, computation: str, key_parts: str | tuple[str, ...] | None = None
    ) -> Iterator[DeadLetter]:
        columns = self._columns
        key_errors = {} if key_parts is None else extract_key_column(key_parts, table).errors
        keys = _column(table, columns.key).to_pylist()
        times = _times(table, columns.at).to_pylist()
        errors = (
            [None] * table.num_rows if columns.error is None else _column(table, columns.error).to_pylist()
        )
        values = table.select(columns.own).to_pylist()
        ids = self._own_ids(table)
        record_ids = [None] * table.num_rows if ids is None else ids.to_pylist()
        cells = zip(keys, times, errors, values, record_ids, strict=True)
        for row, (key, at, error, value, record_id) in enumerate(cells):
            untimed = self._time_error(at, value) if error is None else None
            is_timed = at is not None and untimed is None and INSTANT_MIN_US <= at <= INSTANT_MAX_US
            yield DeadLetter.of_unreadable(
                computation,
                self._source.stream,
                partial(_same, value),
                error
                or (
                    key_errors.get(row, "the key is null")
                    if key is None
                    else untimed or "the time is unreadable"
                ),
                key=key,
                at=at if is_timed else None,
                record_id=record_id,
            )

    def _time_error(self, at: int | None, value: Mapping[str, Any]) -> str | None:
        """Why a record's time is unreadable; ``None`` if it is not."""
        raw_at = self._columns.raw_at
        try:
            if raw_at is None:
                parse_instant_us(at)
            else:
                parse_instant_us(value.get(raw_at), self._source.times)
        except InvalidError as error:
            return str(error)
        return None

    def observation(self) -> InputObservation:
        """The number of records, each counted for its first consumer only, and the times of all."""
        readable = self._table.filter(readable_rows(self._table.column(TARGET)))
        first = pc.is_in(readable.column(TARGET), pa.array(sorted(self._source.first_targets), pa.int32()))
        records = pc.sum(first).as_py() or 0
        at = _times(readable, self._columns.at).to_numpy(zero_copy_only=False)
        if self._source.injector is None:
            return observe_times(self._source.watch, at, records=records)
        node, own = cloudpickle.loads(self._source.injector), readable
        if self._columns.sign is None:
            own = readable.select(self._columns.own)
        rows = rows_to_extract(node, own)
        members = member_names(node, rows)
        seen = observe_times(self._source.watch, at, members, records=records)
        return with_marks(seen, node, rows, members)

    def _ids(self, table: pa.Table, computation: str) -> pa.Array | None:
        return scoped_ids(self._own_ids(table), self._source.id_scopes.get(computation, b""))

    def _own_ids(self, table: pa.Table) -> pa.Array | None:
        if self._columns.id is None:
            return None
        ids = _column(table, self._columns.id)
        if pa.types.is_integer(ids.type):
            ids = ids.cast(pa.string())
        if ids.null_count == len(ids):
            return None
        own = ids.cast(pa.binary())
        # Ids that Python has read have the sign already.
        is_signed = self._columns.sign is None or self._columns.id == ID
        return own if is_signed else signed_ids(own, change_signs(table))

    def _of_target(self, target: int) -> pa.Table:
        if len(self._targets) == 1:
            return self._table
        return self._table.filter(pc.equal(self._table.column(TARGET), target))


def _stamped(table: pa.Table, source: RoutedInput) -> pa.Table:
    """The records with the time of their arrival, if that is their event time."""
    stamp_at, name = source.watch.stamp_at, source.columns.at
    if stamp_at is None:
        return table
    times = pa.array(np.full(table.num_rows, stamp_at, np.int64))
    return table.set_column(table.column_names.index(name), name, times)


def _same(value: Any) -> Any:
    return value


def _times(table: pa.Table, name: str) -> Any:
    # Spark's timestamps are microseconds already: only the type changes.
    return _column(table, name).cast(pa.int64())


def _column(table: pa.Table, name: str) -> Any:
    column = table.column(name)
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
