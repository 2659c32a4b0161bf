"""The input of a local run: a bounded queue of injected rows, and their extraction into columns.

A caller that injects faster than the pipeline works waits (backpressure), and so does a caller of a stream that is
too far ahead of the others. Records and watermark updates keep the order of the calls. Rows that arrive while a
commit is in flight make the next bundle, which is the group commit.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import Any, Final

import numpy as np
import pyarrow as pa

from millpond.executor.computation.values import Values
from millpond.executor.inputs.extraction import (
    Injected,
    InjectorNode,
    Rows,
    check_fields,
    count_in_1970,
    delivered_values,
    member_names,
    mended_texts,
    observe_times,
    read_injected,
    row_count,
    scoped_ids,
    with_marks,
)
from millpond.executor.inputs.payload import original_row
from millpond.executor.inputs.record_size import cut_row, error_of_size
from millpond.executor.inputs.reserved import refuse_reserved
from millpond.executor.interval.bundle import DeadLetter, Deliveries
from millpond.executor.pipeline.checks import told_of_stream
from millpond.executor.pipeline.topology import Topology
from millpond.executor.run.run import WatermarkUpdate
from millpond.executor.superstep.delivery import take
from millpond.executor.time.observations import InputObservation, Watch
from millpond.statestore.durations import accepts_old_durations, timeout_ms
from millpond.statestore.errors import InvalidError, UnavailableError
from millpond.statestore.types import EventTimeMicros


def check_fit(topology: Topology, stream: str, rows: Rows, only: str | None = None) -> None:
    """Raise unless rows fit their stream and its consumers, or ``only`` the computation of that name."""
    injector = topology.injector(stream)
    keys = [
        consumer.subscription.key
        for consumer in topology.consumers_of(stream)
        if only in (None, consumer.computation.name)
    ]
    if isinstance(rows, pa.Table):
        # A missing column is an error of this call and must not end the run.
        with told_of_stream(stream):
            refuse_reserved(rows.column_names)
            for key in keys:
                read_injected(injector, key, rows.slice(0, 1))
    elif rows:
        check_fields(injector, keys, rows)


def check_still_fits(topology: Topology, former: Topology, stream: str, rows: Rows) -> None:
    """Refuse rows that were injected before the pipeline was changed, if they no longer fit it."""
    if stream not in topology.injectors:
        raise InvalidError(
            "the pipeline was changed before these rows were processed, and no longer has their stream",
            pipeline=topology.name,
            stream=stream,
            injected=sorted(topology.injectors),
        )
    now, before = topology.injectors[stream], former.injectors[stream]
    if now.change != before.change or now.payload != before.payload:
        raise InvalidError(
            "the pipeline was changed before these rows were processed: inject them again", stream=stream
        )
    check_fit(topology, stream, rows)


class Receipt:
    """The durability of injected rows, or of a watermark update; safe to use from any thread."""

    __slots__ = ("_done", "_failure", "_parts")

    def __init__(self, parts: int = 1) -> None:
        self._parts = parts
        self._failure: BaseException | None = None
        self._done = threading.Event()
        if not parts:
            self._done.set()

    @property
    def is_durable(self) -> bool:
        """True once all pieces have been committed."""
        return self._done.is_set() and self._failure is None

    @accepts_old_durations
    def wait(self, timeout: str | timedelta | None = None) -> bool:
        """Wait until all pieces have been committed.

        Args:
            timeout: longest wait; ``None`` waits as long as the run lives.

        Returns:
            True if all pieces were committed in time.

        Raises:
            MillpondError: the error that ended the run; pieces may or may not be durable.
        """
        wait_ms = timeout_ms(timeout)
        if not self._done.wait(None if wait_ms is None else wait_ms / 1_000):
            return False
        if self._failure is not None:
            raise self._failure
        return True

    def settle(self, failure: BaseException | None = None) -> None:
        """Record that one piece is durable, or the error that ended the run; only the run calls it."""
        self._parts -= 1
        if failure is not None:
            self._failure = failure
        if failure is not None or self._parts <= 0:
            self._done.set()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Arrival:
    """Injected rows of one stream.

    Attributes:
        checked: topology that the rows fit; ``None`` if no update can come in between.
    """

    stream: str
    rows: Rows
    count: int
    receipt: Receipt
    checked: Topology | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class UpdateEntry:
    """A watermark update in the order of the injected rows; see `Arrival` for ``checked``."""

    update: WatermarkUpdate
    receipt: Receipt
    checked: Topology | None = None

    @property
    def stream(self) -> str:
        return self.update.stream


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """The input of the next superstep: first the updates, then the arrivals, each in order."""

    updates: list[UpdateEntry] = field(default_factory=list)
    arrivals: list[Arrival] = field(default_factory=list)

    def refuse_unfit(self, topology: Topology) -> bool:
        """Drop the entries that do not fit the running pipeline, and return True if any was dropped.

        Their receipts raise the reason.
        """
        unfit = False
        for entries in (self.updates, self.arrivals):
            for entry in [*entries]:
                former = entry.checked
                if former is None or former is topology:
                    continue
                try:
                    if isinstance(entry, UpdateEntry):
                        entry.update.check(topology)
                    else:
                        check_still_fits(topology, former, entry.stream, entry.rows)
                except Exception as refusal:  # noqa: BLE001 - a key extractor of the user's may raise anything
                    entry.receipt.settle(refusal)
                    entries.remove(entry)
                    unfit = True
        return unfit

    def settle(self, failure: BaseException | None = None) -> None:
        entries: list[Arrival | UpdateEntry] = [*self.updates, *self.arrivals]
        for entry in entries:
            entry.receipt.settle(failure)


class Intake:
    """A bounded queue between any number of producers and one worker.

    Args:
        records_max: waiting records at most; a larger arrival is accepted only into an empty queue.
    """

    def __init__(self, records_max: int) -> None:
        self._records_max = records_max
        self._condition = threading.Condition()
        self._entries: deque[Arrival | UpdateEntry] = deque()
        self._held: dict[str, list[Arrival | UpdateEntry]] = {}
        self._records = 0
        self._idle = False
        self._is_woken = False
        self._ended: BaseException | None = None

    def put(self, entry: Arrival | UpdateEntry, *, timeout_ms: float | None) -> None:
        """Append rows or a watermark update, waiting while the intake is full."""
        count = entry.count if isinstance(entry, Arrival) else 0
        with self._condition:
            has_room = self._condition.wait_for(
                lambda: self._ended is not None or self._has_room(entry.stream, count),
                None if timeout_ms is None else timeout_ms / 1_000,
            )
            if self._ended is not None:
                raise self._ended
            if not has_room and count and entry.stream in self._held:
                raise UnavailableError(
                    "the stream is further ahead than its skew limit: let the others catch up",
                    stream=entry.stream,
                )
            if not has_room:
                raise UnavailableError(
                    "the intake is full: let the pipeline catch up",
                    waiting=self._records,
                    allowed=self._records_max,
                )
            self._held.get(entry.stream, self._entries).append(entry)
            self._records += count
            self._idle = False
            self._condition.notify_all()

    def wait_until_idle(self, timeout_ms: float | None = None) -> bool:
        """Wait until the worker has nothing left to do; return True if that was so in time."""
        with self._condition:
            done = self._condition.wait_for(
                lambda: self._ended is not None or (self._idle and not self._entries),
                None if timeout_ms is None else timeout_ms / 1_000,
            )
            if self._ended is not None:
                raise self._ended
            return done

    def _has_room(self, stream: str, count: int) -> bool:
        if count and stream in self._held:
            return False
        return not self._records or self._records + count <= self._records_max

    def pop(self, records_max: int) -> Taken:
        """Remove the next entries: updates first, then arrivals up to the next update or the limit.

        One arrival is removed even if it has more than ``records_max`` records.
        """
        taken = Taken()
        records = 0
        with self._condition:
            while self._entries:
                entry = self._entries[0]
                if isinstance(entry, UpdateEntry):
                    if taken.arrivals:
                        break
                    taken.updates.append(entry)
                else:
                    if taken.arrivals and records + entry.count > records_max:
                        break
                    taken.arrivals.append(entry)
                    records += entry.count
                self._entries.popleft()
            self._records -= records
            if records:
                self._condition.notify_all()
        return taken

    def hold_back(self, streams: Collection[str]) -> None:
        """Hold entries of streams that are too far ahead, until a later call no longer names them.

        `put` waits while its stream is held. Held entries do not count against the room of other streams, so at most
        one intake's worth of each stream is held.
        """
        with self._condition:
            if streams == self._held.keys():
                return
            released = [entry for stream in self._held.keys() - set(streams) for entry in self._held[stream]]
            waiting = [*released, *self._entries]
            kept = {stream: self._held.get(stream, []) for stream in streams}
            self._entries.clear()
            for entry in waiting:
                kept.get(entry.stream, self._entries).append(entry)
            self._held = kept
            self._records = sum(entry.count for entry in self._entries if isinstance(entry, Arrival))
            self._condition.notify_all()

    def wake(self) -> None:
        """End the present or next `rest`, although no entry has arrived."""
        with self._condition:
            self._idle = False
            self._is_woken = True
            self._condition.notify_all()

    def rest(self, timeout_ms: float) -> None:
        """Report the worker idle, and sleep until an entry arrives, or for ``timeout_ms``."""
        with self._condition:
            is_woken, self._is_woken = self._is_woken, False
            if not self._entries and self._ended is None and not is_woken:
                self._idle = True
                self._condition.notify_all()
                self._condition.wait(timeout_ms / 1_000)
                self._idle = False

    def end(self, reason: BaseException) -> None:
        with self._condition:
            if self._ended is None:
                self._ended = reason
            held = [entry for entries in self._held.values() for entry in entries]
            entries, self._records = [*self._entries, *held], 0
            self._entries.clear()
            self._held.clear()
            self._condition.notify_all()
        for entry in entries:
            entry.receipt.settle(self._ended)


_RUNS_MAX: Final = 100
"""Changes from one stream to another that the log of a superstep keeps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutsideRows:
    """Rows of one injected stream for one superstep.

    Attributes:
        backfill: the only computation that gets the rows, as a part of its backfill; such rows move no watermark.
            ``None`` for all consumers of the stream.
    """

    stream: str
    rows: Rows
    backfill: str | None = None


def taken_of(outside: Sequence[OutsideRows]) -> tuple[tuple[str, int], ...]:
    """Return the order of arrival: streams, each with its number of consecutive rows.

    If streams alternate more than a hundred times, return only the number of each stream's rows.

    Example:
        >>> rows = [OutsideRows(stream=stream, rows=[{}]) for stream in "aab"]
        >>> taken_of(rows)
        (('a', 2), ('b', 1))
    """
    if len(outside) == 1:
        return ((outside[0].stream, row_count(outside[0].rows)),)
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
    """Outside rows as columns of key, time, id and value, by consumer, with a letter for each unreadable record."""

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

    With ``is_bounded`` leave the newest times out, so that watermarks wait for the input's end.
    """
    scope_of = id_scope or topology.id_scope
    by_computation: dict[str, list[Deliveries]] = {}
    letters: list[DeadLetter] = []
    observations: list[InputObservation] = []
    for entry in _merged(outside):
        node = topology.injectors[entry.stream]
        watch = (watches or {}).get(entry.stream, Watch(stream=entry.stream))
        garbled: Mapping[int, str] = {}
        if isinstance(entry.rows, pa.Table):
            table, garbled = mended_texts(entry.rows)
            entry = replace(entry, rows=table) if garbled else entry  # noqa: PLW2901 - the same rows
        readings = {
            consumer.computation.name: read_injected(
                node, consumer.subscription.key, entry.rows, watch.stamp_at, garbled
            )
            for consumer in topology.consumers.get(entry.stream, ())
            if entry.backfill in (None, consumer.computation.name)
        }
        for name, injected in readings.items():
            ids = injected.ids
            scoped = None if ids is None else scoped_ids(ids, scope_of(name, entry.stream))
            deliveries, unreadable = _split(node, entry, name, injected, scoped)
            by_computation.setdefault(name, []).append(deliveries)
            letters += unreadable
        if entry.backfill is not None:
            continue
        members = member_names(node, entry.rows)
        seen = _observation(watch, list(readings.values()), members, is_bounded=is_bounded)
        observations.append(with_marks(seen, node, entry.rows, members, watch.stamp_at))
    return ExtractedInputs(by_computation=by_computation, letters=letters, observations=observations)


def _merged(outside: Sequence[OutsideRows]) -> Sequence[OutsideRows]:
    """Merge rows of a stream that are Python objects; the columns of tables may differ, so they stay apart."""
    if len(outside) < 2:
        return outside
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
            partial(_row_of_letter, node, outside.rows, values, row, error),
            error,
            key=keys[row].as_py(),
            at=None if row in injected.untimed else int(injected.at[row]),
            record_id=None if own_ids is None else own_ids[row].as_py(),
        )
        for row, error in injected.errors.items()
    ]
    chosen = np.setdiff1d(np.arange(len(keys)), np.fromiter(injected.errors, np.int64), assume_unique=True)
    return take(deliveries, chosen), letters


def _row_of_letter(node: InjectorNode, rows: Rows, values: Values, row: int, error: str) -> Any:
    """Return an unreadable row for its letter; with a payload undecoded, so that a mended decoder can try again."""
    if node.max_record_bytes is not None and error == error_of_size(node.max_record_bytes):
        return cut_row(rows, row) if isinstance(rows, pa.Table) else cut_row([original_row(rows[row])], 0)
    return original_row(values.value(row) if node.payload is None else rows[row])


def _observation(
    watch: Watch, readings: Sequence[Injected], members: Sequence[str | None] | None, *, is_bounded: bool
) -> InputObservation:
    at = readings[0].at if readings else np.empty(0, np.int64)
    records = len(at) - len(readings[0].errors) if readings else 0
    unreadable = set(readings[0].errors) if readings else set[int]()
    for reading in readings[1:]:
        unreadable.intersection_update(reading.errors)
    if unreadable:
        at = np.delete(at, list(unreadable))
        if members is not None:
            members = [member for row, member in enumerate(members) if row not in unreadable]
    if is_bounded:
        newest_at = EventTimeMicros(int(at.max())) if len(at) else None
        return InputObservation(
            stream=watch.stream, records=records, newest_at=newest_at, in_1970=count_in_1970(at)
        )
    return replace(observe_times(watch, at, members), records=records)
