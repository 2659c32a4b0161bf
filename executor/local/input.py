"""Local input: the key, time and id of injected rows, for each consumer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import Any, Final

import numpy as np
import pyarrow as pa

from millpond.executor.bundle.bundle import DeadLetter, Deliveries
from millpond.executor.computation.values import Values
from millpond.executor.injectors.observation import InputObservation, Watch, observe_times
from millpond.executor.payloads.decoded_rows import original_row
from millpond.executor.pipeline.extract_rows import (
    Injected,
    Rows,
    delivered_values,
    member_names,
    read_injected,
    row_count,
    scoped_ids,
    with_marks,
)
from millpond.executor.pipeline.injector_node import InjectorNode
from millpond.executor.pipeline.topology import Topology
from millpond.executor.superstep.delivery import take
from millpond.statestore.types import EventTimeMicros

_RUNS_MAX: Final = 100
"""So many changes from one stream to another are kept of a superstep."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutsideRows:
    """Rows of one injected stream for one superstep.

    Attributes:
        stream: the injected stream.
        rows: a table, or mappings of fields.
        backfill: the only computation that gets them, as a part of its backfill; then they say nothing of the
            stream's time. ``None`` for all that consume the stream.
    """

    stream: str
    rows: Rows
    backfill: str | None = None


def taken_of(outside: Sequence[OutsideRows]) -> tuple[tuple[str, int], ...]:
    """What a superstep takes, in the order of arrival: streams, each with how many of its rows come on end.

    Of a superstep that takes from streams in turn, row by row, only the number of each stream's rows is kept.

    Example:
        >>> rows = [OutsideRows(stream=stream, rows=[{}]) for stream in "aab"]
        >>> taken_of(rows)
        (('a', 2), ('b', 1))
    """
    counts = [(rows.stream, row_count(rows.rows)) for rows in outside]
    runs = [(stream, sum(count for _, count in run)) for stream, run in groupby(counts, itemgetter(0))]
    if len(runs) <= _RUNS_MAX:
        return tuple(runs)
    totals = Counter[str]()
    for stream, count in runs:
        totals[stream] += count
    return tuple(totals.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtractedInputs:
    """Outside rows as their consumers get them.

    Attributes:
        by_computation: the readable records, with each consumer's own keys.
        letters: a dead letter for each consumer of an unreadable record.
        observations: counts and times of each stream.
    """

    by_computation: Mapping[str, list[Deliveries]]
    letters: list[DeadLetter]
    observations: list[InputObservation]


def extract_inputs(
    topology: Topology,
    outside: Sequence[OutsideRows],
    *,
    is_bounded: bool,
    watches: Mapping[str, Watch] | None = None,
    id_scope: Callable[[str, str], bytes] | None = None,
) -> ExtractedInputs:
    """Read key, time and id of every row, for every consumer.

    Args:
        topology: the checked pipeline.
        outside: the rows, in the order of their arrival.
        is_bounded: leave the newest times out, so that watermarks wait for the input's end.
        watches: what to observe of each stream's records, if it is more than their times.
        id_scope: returns the prefix of record ids, by computation and stream; see `Topology.id_scope`.
    """
    scope_of = id_scope or topology.id_scope
    by_computation: dict[str, list[Deliveries]] = {}
    letters: list[DeadLetter] = []
    observations: list[InputObservation] = []
    for entry in _merged(outside):
        watch = (watches or {}).get(entry.stream, Watch(stream=entry.stream))
        readings = _read_for_consumers(topology, entry, watch.stamp_at)
        for name, injected in readings.items():
            scoped = scoped_ids(injected.ids, scope_of(name, entry.stream))
            deliveries, unreadable = _split(topology.injectors[entry.stream], entry, name, injected, scoped)
            by_computation.setdefault(name, []).append(deliveries)
            letters += unreadable
        if entry.backfill is not None:
            continue
        node = topology.injectors[entry.stream]
        members = member_names(node, entry.rows)
        seen = _observation(watch, list(readings.values()), members, is_bounded=is_bounded)
        observations.append(with_marks(seen, node, entry.rows, members))
    return ExtractedInputs(by_computation=by_computation, letters=letters, observations=observations)


def _merged(outside: Iterable[OutsideRows]) -> list[OutsideRows]:
    """One entry per stream for rows that are Python objects; tables are not merged, as their columns may differ."""
    rows_of: dict[str, list[Mapping[str, Any]]] = {}
    merged: list[OutsideRows] = []
    for entry in outside:
        if isinstance(entry.rows, pa.Table) or entry.backfill is not None:
            merged.append(entry)
            # To keep the order of arrival, rows after a table must not join those before it.
            rows_of.pop(entry.stream, None)
        elif entry.stream in rows_of:
            rows_of[entry.stream].extend(entry.rows)
        else:
            rows_of[entry.stream] = list(entry.rows)
            merged.append(OutsideRows(stream=entry.stream, rows=rows_of[entry.stream]))
    return merged


def _read_for_consumers(
    topology: Topology, outside: OutsideRows, stamp_at: EventTimeMicros | None
) -> dict[str, Injected]:
    injector = topology.injectors[outside.stream]
    return {
        consumer.computation.name: read_injected(injector, consumer.subscription.key, outside.rows, stamp_at)
        for consumer in topology.consumers_of(outside.stream)
        if outside.backfill in (None, consumer.computation.name)
    }


def _split(
    node: InjectorNode, outside: OutsideRows, computation: str, injected: Injected, ids: pa.BinaryArray | None
) -> tuple[Deliveries, list[DeadLetter]]:
    values = delivered_values(node, outside.rows, injected.at)
    deliveries = Deliveries(stream=outside.stream, keys=injected.keys, at=injected.at, values=values, ids=ids)
    if not injected.errors:
        return deliveries, []
    keys, own_ids = injected.keys, injected.ids
    letters = [
        DeadLetter.of_unreadable(
            computation,
            outside.stream,
            partial(_row_of_letter, node, outside.rows, values, row),
            error,
            key=keys[row].as_py(),
            at=None if row in injected.untimed else int(injected.at[row]),
            record_id=None if own_ids is None else own_ids[row].as_py(),
        )
        for row, error in injected.errors.items()
    ]
    chosen = np.setdiff1d(np.arange(len(keys)), np.fromiter(injected.errors, np.int64), assume_unique=True)
    return take(deliveries, chosen), letters


def _row_of_letter(node: InjectorNode, rows: Rows, values: Values, row: int) -> Any:
    """What a letter keeps of an unreadable row: with a payload the row as it came, so that it can be decoded once more."""
    return values.value(row) if node.payload is None else original_row(rows[row])


def _observation(
    watch: Watch, readings: Sequence[Injected], members: Sequence[str | None] | None, *, is_bounded: bool
) -> InputObservation:
    """The times of the rows that at least one consumer can read; each row counts for its first consumer only."""
    at = readings[0].at if readings else np.empty(0, np.int64)
    records = len(at) - len(readings[0].errors) if readings else 0
    unreadable = set[int]().union(*(reading.errors for reading in readings[:1]))
    unreadable.intersection_update(*(reading.errors for reading in readings[1:]))
    if unreadable:
        at = np.delete(at, list(unreadable))
        if members is not None:
            members = [member for row, member in enumerate(members) if row not in unreadable]
    if is_bounded:
        return InputObservation(stream=watch.stream, records=records, newest_at=None)
    return replace(observe_times(watch, at, members), records=records)
