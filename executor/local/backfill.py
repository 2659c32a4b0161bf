"""Backfills of the local runner: history in the order of time, in pieces, each of which is a superstep.

The rows of a history are put in the order of their times once, stably, so a run that continues another one has them in
the same order, and a number of rows says where that one was. Of several streams the one that has come least far goes
on. The least time still to come holds the computation's watermark: no row is late, and timers fire on the way.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from millpond.executor.local.row_source import RowSource
from millpond.executor.local.rows import rows_from
from millpond.executor.payloads.decoded_rows import rows_to_extract
from millpond.executor.pipeline.backfill import INPUT, Backfill
from millpond.executor.pipeline.extract_rows import (
    Rows,
    check_fields,
    read_injected,
    row_count,
    sorted_by_time,
)
from millpond.executor.pipeline.positions import BOUNDED_SOURCE, LOCAL_SOURCE, consumed_before
from millpond.executor.superstep.backfills import backfill_position
from millpond.executor.superstep.coordinator import Coordinator
from millpond.executor.superstep.plan import InputPosition
from millpond.statestore.errors import InvalidError
from millpond.statestore.types import TIME_MIN_US, EventTimeMicros

_READ_AT_ONCE: Final = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class BackfillPiece:
    """What one superstep gives a computation of its history.

    Attributes:
        computation: its name.
        rows: the rows.
        position: how much of the history of the stream it has once that is committed.
        oldest_at: no row of any of its streams' histories that is still to come is before this time.
    """

    computation: str
    rows: Rows
    position: InputPosition
    oldest_at: EventTimeMicros


@dataclass(slots=True)
class _History:
    """The history of one stream, in the order of time."""

    stream: str
    rows: Rows
    at: npt.NDArray[np.int64]
    consumed: int

    @property
    def is_left(self) -> bool:
        return self.consumed < len(self.at)

    @property
    def oldest_at(self) -> EventTimeMicros:
        return EventTimeMicros(int(self.at[self.consumed]))

    def take(self, computation: str, records_max: int) -> BackfillPiece:
        start, oldest_at = self.consumed, self.oldest_at
        self.consumed = min(start + records_max, len(self.at))
        rows = self.rows
        batch = backfill_position(self.consumed, is_all=not self.is_left)
        return BackfillPiece(
            computation=computation,
            rows=rows.slice(start, records_max)
            if isinstance(rows, pa.Table)
            else rows[start : self.consumed],
            position=InputPosition(stream=self.stream, source="", batch=batch, backfill=computation),
            oldest_at=oldest_at,
        )


def backfill_pieces(
    coordinator: Coordinator, inputs: Mapping[str, Rows | RowSource] | None, records_max: int
) -> Iterator[BackfillPiece]:
    """What is still to be given, piece by piece; ask for the next one once a piece is committed.

    All of it is read before this returns, so what does not fit is refused at once.

    Args:
        coordinator: knows which computations have not got all of their history.
        inputs: the bounded inputs of the run; ``None`` if it has none.
        records_max: how many rows a piece has at most.

    Raises:
        InvalidError: a history does not fit its stream, or is not the one that the store has a part of.
    """
    histories = {name: _histories(coordinator, name, inputs) for name in coordinator.backfills.pending}
    return _pieces(coordinator, histories, records_max)


def _pieces(
    coordinator: Coordinator, histories: Mapping[str, Sequence[_History]], records_max: int
) -> Iterator[BackfillPiece]:
    for name, parts in histories.items():
        coordinator.backfills.join(name)
        empty = {history.stream: history.consumed for history in parts if not history.is_left}
        while left := [history for history in parts if history.is_left]:
            yield min(left, key=lambda history: history.oldest_at).take(name, records_max)
        coordinator.backfills.end(name, empty)


def _histories(
    coordinator: Coordinator, computation: str, inputs: Mapping[str, Rows | RowSource] | None
) -> list[_History]:
    topology, found = coordinator.topology, list[_History]()
    for stream, consumed in coordinator.backfills.consumed(computation).items():
        if consumed is None:
            continue
        given = topology.backfills[computation][stream]
        node = topology.injectors[stream]
        rows = (
            _of_input(coordinator, stream, inputs)
            if _is_input(given)
            else rows_to_extract(node, history_rows(given))
        )
        _check_rows(coordinator, computation, stream, rows)
        if consumed > row_count(rows):
            raise InvalidError(
                "the store has consumed more of this backfill than there is: it is another one",
                computation=computation,
                stream=stream,
                rows=row_count(rows),
                consumed=consumed,
            )
        ordered, at = sorted_by_time(node, rows)
        found.append(_History(stream, ordered, at, consumed))
    return found


def _is_input(given: Backfill) -> bool:
    return isinstance(given, str) and given == INPUT


def history_rows(given: Any) -> Rows:
    """The rows that a backfill is.

    Raises:
        InvalidError: it has no rows, or is a file that cannot be read.
    """
    if not isinstance(given, str | Path):
        return rows_from(given)
    try:
        return pq.read_table(given)
    except (pa.ArrowException, OSError) as cause:
        raise InvalidError(
            'a backfill is rows, "input" or the path of a Parquet file',
            path=given,
            reason=str(cause).partition("\n")[0],
        ) from cause


def _check_rows(coordinator: Coordinator, computation: str, stream: str, rows: Rows) -> None:
    node = coordinator.topology.injectors[stream]
    subscription = coordinator.topology.computations[computation].subscription(stream)
    key = None if subscription is None else subscription.key
    if isinstance(rows, pa.Table):
        read_injected(node, key, rows.slice(0, 0))
    elif rows:
        check_fields(node, [key], rows)


def _of_input(coordinator: Coordinator, stream: str, inputs: Mapping[str, Rows | RowSource] | None) -> Rows:
    """The rows of a bounded input that the store consumed before."""
    if inputs is None or stream not in inputs:
        raise InvalidError(
            'backfill="input" is of the rows that are given to run: this run has none, so give it rows',
            stream=stream,
        )
    given, known = inputs[stream], coordinator.inputs.consumed(stream)
    # Put in the order of time, so all of them are needed.
    rows = given.all_rows(_READ_AT_ONCE) if isinstance(given, RowSource) else given
    if BOUNDED_SOURCE in known:
        consumed_before(stream, row_count(rows), coordinator.inputs.input_rows(stream))
        return rows
    consumed = known.get(LOCAL_SOURCE)
    is_uncounted = consumed is None and coordinator.watermarks.injector_watermark(stream) > TIME_MIN_US
    if is_uncounted or set(known) - {LOCAL_SOURCE}:
        raise InvalidError(
            'the store has consumed records of this stream that no position of a bounded input counts: backfill="input" '
            "does not know them, so give it rows",
            stream=stream,
        )
    if (consumed or 0) > row_count(rows):
        raise InvalidError(
            "the store has consumed more of this input than there is: it is another input",
            input=stream,
            rows=row_count(rows),
            consumed=consumed,
        )
    return rows.slice(0, consumed or 0) if isinstance(rows, pa.Table) else rows[: consumed or 0]
