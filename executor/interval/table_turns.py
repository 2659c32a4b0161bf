"""Code that takes a bundle as one table: all keys at once, and single keys where a table of them fails.

A table takes the keys that have records and nothing else to do: no timers, no retried letters. If the code raises, the
bundle is halved by keys until the tables that succeed are as large as they can be; their effects are kept, and those of
a failed call are not, because nothing is applied before a call has returned. A key that fails alone gets a turn of its
own (`KeyExecutor`), in which the code gets tables of the key's records, and then of single records. So a dead letter
names a record, and there is one place where letters are made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from millpond.executor.computation.computation import Computation
from millpond.executor.computation.context import Context, Counters, Productions
from millpond.executor.computation.key_groups import GroupedRecords, KeyGroups, TableContext, TableProduction
from millpond.executor.computation.record_table import table_of
from millpond.executor.computation.records import InputTime, Records
from millpond.executor.computation.state import StoredState, key_state
from millpond.executor.computation.timers import KeyTimers
from millpond.executor.computation.watchdog import CodeTimeoutError, UserCodeWatchdog
from millpond.executor.interval.bundle import Bundle
from millpond.executor.interval.grouping import Arrivals, Grouping, chosen_of
from millpond.executor.interval.row_update import (
    BundleOutcome,
    KeptProductions,
    PartInColumns,
    joined_productions,
    production_values,
)
from millpond.executor.interval.soft_state import SoftState
from millpond.executor.interval.state_columns import AddedColumns, StateColumns
from millpond.executor.pipeline.nodes import ComputationNode
from millpond.executor.time.clocks import Clocks
from millpond.statestore.errors import InvalidError
from millpond.statestore.rows.row import PRODUCTION_TYPE, TIMESTAMP
from millpond.statestore.rows.state_schema import (
    AddendCodec,
    SchemaCodec,
    StateCells,
    cells_of,
    struct_of,
)
from millpond.statestore.types import TIME_MIN_US

_Index = npt.NDArray[np.int64]
ProcessRecords: TypeAlias = Callable[[Context, Records], None]


def takes_tables(computation: Computation) -> bool:
    """Return True for code with ``process_table``."""
    return type(computation).process_table is not Computation.process_table


def _codec_of(computation: Computation) -> SchemaCodec | None:
    codec = computation.codec
    return codec if isinstance(codec, SchemaCodec) else None


# ------------------------------------------------------------- the records of one key


def process_records_of(computation: Computation) -> ProcessRecords:
    """Return the hook for the records of one key, which hands them to ``process_table`` as a table of one key."""
    if not takes_tables(computation):
        return computation.process_records
    codec = _codec_of(computation)

    def process_records(context: Context, records: Records) -> None:
        groups = _groups_of_key(context, records, codec)
        start, stop = records.range
        table = table_of(records.columns.values, np.array(records.columns.sources[start:stop], np.int64))
        computation.process_table(TableContext(context), table, groups)
        _apply(context, groups, codec)

    return process_records


def _groups_of_key(context: Context, records: Records, codec: SchemaCodec | None) -> KeyGroups:
    start, stop = records.range
    streams = records.columns.streams
    grouped = GroupedRecords(
        keys=pa.array([context.key], pa.string()),
        bounds=np.array([0, stop - start], np.int64),
        at=records.at,
        oldest_at=np.array([context.oldest_at], np.int64),
        late_before=records.columns.watermark,
        streams=lambda: pa.array(streams[start:stop], pa.string()),
        ids=lambda: records.ids,
    )
    # Read at once: an earlier state may not be upgraded, and then the hook has failed.
    state = None if codec is None or isinstance(codec, AddendCodec) else context.state.get()
    return KeyGroups(context, grouped, codec, lambda: _state_of_key(codec, state))


def _state_of_key(codec: SchemaCodec | None, state: Any) -> pa.StructArray:
    if codec is None:
        raise InvalidError("the states have no schema")
    return struct_of([None if state is None else codec.encode(state)], codec.column.type)


def _apply(context: Context, groups: KeyGroups, codec: SchemaCodec | None) -> None:
    settled = groups.settled_states()
    if settled is not None and codec is not None and settled[1][0]:
        cells = cells_of(settled[0])[0]
        if isinstance(codec, AddendCodec):
            context.state.add({} if cells is None else codec.decode(cells))
        elif cells is None:
            context.state.delete()
        else:
            context.state.set(codec.decode(cells))
    for production in groups.settled_productions():
        values = [production.codec.decode(cells) for cells in cells_of(production.values)]
        for value, at in zip(values, production.at.tolist(), strict=True):
            context.produce(production.stream, value, at=at)


# ------------------------------------------------------------- the records of all keys


@dataclass(frozen=True, slots=True, kw_only=True)
class TablePart:
    """The effects on the keys of a bundle that tables took; the ``others`` need turns, by their places among all."""

    places: _Index
    others: _Index
    before: Sequence[StoredState | None]
    states: Sequence[StoredState | None]
    productions: KeptProductions | None
    counters: Mapping[str, int]

    def with_turns(self, turns: BundleOutcome) -> BundleOutcome:
        """Return the outcome for all keys, given the outcome of the turns."""
        count = len(self.places) + len(self.others)
        if not len(self.others):
            before, states, counts = self.before, self.states, [0] * count
        else:
            before, states = (
                _merged(count, (self.places, own), (self.others, of_turns))
                for own, of_turns in ((self.before, turns.before), (self.states, turns.states))
            )
            all_counts = np.zeros(count, np.int64)
            all_counts[self.others] = turns.production_counts
            counts = all_counts.tolist()
        numbers = self.others.tolist()
        return BundleOutcome(
            before=before,
            states=states,
            timers={numbers[index]: timers for index, timers in turns.timers.items()},
            kept_timers={numbers[index]: timers for index, timers in turns.kept_timers.items()},
            productions=turns.productions,
            production_counts=counts,
            in_columns=self.productions,
            layout=turns.layout,
        )


def _merged(count: int, *parts: tuple[_Index, Sequence[StoredState | None]]) -> list[StoredState | None]:
    merged: list[StoredState | None] = [None] * count
    for places, states in parts:
        for place, state in zip(places.tolist(), states, strict=True):
            merged[place] = state
    return merged


class TableTurns:
    """Hands the bundles of one interval to ``process_table``.

    ``slack_us`` is the time by which a production may be older than its record.
    """

    def __init__(
        self, node: ComputationNode, soft_state: SoftState, slack_us: int, limit: UserCodeWatchdog | None
    ) -> None:
        self._node = node
        self._codec = _codec_of(node.computation)
        self._soft_state = soft_state
        self._slack_us = slack_us
        self._limit = limit

    def make_columns(self) -> StateColumns | None:
        """Return empty columns for the interval's states; ``None`` if they must keep the form that the row has."""
        # States of earlier versions are upgraded in turns of their keys.
        if self._codec is None or self._node.computation.state_version:
            return None
        return (
            AddedColumns(self._codec) if isinstance(self._codec, AddendCodec) else StateColumns(self._codec)
        )

    def run(
        self, bundle: Bundle, arrivals: Arrivals, grouping: Grouping, due: pa.StringArray
    ) -> TablePart | PartInColumns:
        """Return the effects on the keys with records, none of which may be applied yet; ``due`` keys need turns.

        They are a `PartInColumns` while the states of the keys are columns in memory (`StateColumns`).
        """
        keys = grouping.keys
        places = np.flatnonzero(np.diff(grouping.bounds) > 0)
        if len(due):
            is_due = pc.is_in(grouping.key_column, due).to_numpy(zero_copy_only=False)
            places = places[~is_due[places]]
        own = [keys[place] for place in places.tolist()] if len(places) < len(keys) else keys
        if not bundle.plan.percentile_watermarks:
            part = self._run_in_columns(bundle, arrivals, grouping, places, own)
            if part is not None:
                return part
        before = self._soft_state.load(own)
        stored, is_ready = self._readable(before)
        for index, timers in enumerate(self._soft_state.timers_of(own)):
            if timers:
                is_ready[index] = False
        if not is_ready.all():
            ready = np.flatnonzero(is_ready).tolist()
            places = places[ready]
            before, stored = [before[index] for index in ready], [stored[index] for index in ready]
        chosen = grouping if len(places) == len(keys) else chosen_of(grouping, places)

        def read(start: int, stop: int) -> pa.StructArray:
            if self._codec is None:
                raise InvalidError("the states have no schema")
            return struct_of(stored[start:stop], self._codec.column.type)

        calls = _Calls(self._node, self._codec, self._limit, bundle, arrivals, chosen, read, self._slack_us)
        done = calls.run(0, len(places)) if len(places) else []
        return self._part(len(keys), places, before, calls, done)

    def _run_in_columns(
        self, bundle: Bundle, arrivals: Arrivals, grouping: Grouping, places: _Index, own: list[str]
    ) -> PartInColumns | None:
        """Return the effects on the keys whose states are columns; ``None``, before any call, if most states are not."""
        rows, count = self._soft_state.columns, len(grouping.keys)
        if not isinstance(rows, StateColumns) or not own:
            return None
        elsewhere = self._soft_state.not_in_columns(own, takes_up=True)
        if elsewhere:
            left = [key for key in own if key in elsewhere]
            states, timers = self._soft_state.load(left), self._soft_state.timers_of(left)
            if any(
                type(state) in _TEXTS and not pending for state, pending in zip(states, timers, strict=True)
            ):
                # States from before the schema become cells when they are written, so this is for a while.
                return None
            places = places[[key not in elsewhere for key in own]]
            own = [key for key in own if key not in elsewhere]
        chosen = grouping if len(places) == count else chosen_of(grouping, places)
        numbers = rows.numbers_of(own)
        before = rows.states_of(numbers)

        def read(start: int, stop: int) -> pa.StructArray:
            return before.slice(start, stop - start)

        calls = _Calls(self._node, self._codec, self._limit, bundle, arrivals, chosen, read, self._slack_us)
        done = calls.run(0, len(places)) if len(places) else []
        is_done = np.zeros(len(places), np.bool_)
        after: list[pa.StructArray] = []
        produced: list[KeptProductions] = []
        for start, stop, groups in done:
            is_done[start:stop] = True
            after.append(_after(before.slice(start, stop - start), groups))
            produced += [_kept(one, groups, np.arange(start, stop)) for one in groups.settled_productions()]
        states_before = before
        if not is_done.all():
            kept = np.flatnonzero(is_done)
            shift = np.cumsum(is_done) - 1
            produced = [replace(one, owners=shift[one.owners]) for one in produced]
            numbers, places = numbers[kept], places[kept]
            states_before = before.take(pa.array(kept))
        others = np.ones(count, np.bool_)
        others[places] = False
        productions = joined_productions(produced) if produced else _NO_PRODUCTIONS
        states_after = pa.concat_arrays(after) if after else states_before
        change = rows.changed(
            numbers, places, states_before, states_after, productions.values, productions.owners
        )
        return PartInColumns(replace(change, counters=calls.counters.sums()), np.flatnonzero(others))

    def _readable(
        self, before: Sequence[StoredState | None]
    ) -> tuple[list[StateCells | None], npt.NDArray[np.bool_]]:
        """Return the states as cells, and of which keys; the upgrade of an earlier state may raise, so it needs a turn."""
        is_ready = np.ones(len(before), np.bool_)
        if self._codec is None:
            return [None] * len(before), is_ready
        if set(map(type, before)) <= _CELLS:
            return cast("list[StateCells | None]", list(before)), is_ready
        stored: list[StateCells | None] = []
        for index, state in enumerate(before):
            cells = None
            if type(state) in _TEXTS:
                try:
                    # The row was written before there was a schema.
                    cells = self._codec.encode(self._codec.decode(state))
                except Exception:  # noqa: BLE001 - the key's turn raises it again, and makes the letter
                    is_ready[index] = False
            elif type(state) in _CELLS:
                cells = cast("StateCells | None", state)
            else:
                is_ready[index] = False
            stored.append(cells)
        return stored, is_ready

    def _part(
        self,
        count: int,
        places: _Index,
        before: Sequence[StoredState | None],
        calls: _Calls,
        done: Sequence[_Done],
    ) -> TablePart:
        is_done = np.zeros(len(places), np.bool_)
        states = list(before)
        produced: list[KeptProductions] = []
        for start, stop, groups in done:
            is_done[start:stop] = True
            _set_states(states, start, groups)
            produced += [
                _kept(production, groups, places[start:stop]) for production in groups.settled_productions()
            ]
        if not is_done.all():
            kept = np.flatnonzero(is_done).tolist()
            before, states = [before[index] for index in kept], [states[index] for index in kept]
            places = places[kept]
        is_other = np.ones(count, np.bool_)
        is_other[places] = False
        return TablePart(
            places=places,
            others=np.flatnonzero(is_other),
            before=before,
            states=states,
            productions=joined_productions(produced) if produced else None,
            counters=calls.counters.sums(),
        )


_CELLS: Final = frozenset({tuple, type(None)})
_TEXTS: Final = frozenset({str, bytes})
_NO_PRODUCTIONS: Final = KeptProductions(production_values(Productions()), np.empty(0, np.int64))
_Done: TypeAlias = tuple[int, int, KeyGroups]


def _set_states(states: list[StoredState | None], start: int, groups: KeyGroups) -> None:
    settled = groups.settled_states()
    if settled is None:
        return
    rows, changed = settled
    new = cells_of(rows)
    if changed.all():
        states[start : start + len(new)] = new
        return
    for index in np.flatnonzero(changed).tolist():
        states[start + index] = new[index]


def _after(before: pa.StructArray, groups: KeyGroups) -> pa.StructArray:
    """Return the states of keys after a call, in the types of the row's column."""
    settled = groups.settled_states()
    if settled is None:
        return before
    states, changed = settled
    if changed.all():
        return states
    chosen = np.where(changed, np.arange(len(changed)) + len(changed), np.arange(len(changed)))
    return pa.concat_arrays([before, states]).take(pa.array(chosen))


def _kept(production: TableProduction, groups: KeyGroups, places: _Index) -> KeptProductions:
    count = len(production.values)
    columns = [
        pa.repeat(production.stream, count),
        groups.keys.take(pa.array(production.owners)),
        pa.nulls(count, pa.string()),
        pa.nulls(count, pa.binary()),
        pa.array(production.at).view(TIMESTAMP),
        production.values,
    ]
    fields = [*PRODUCTION_TYPE, production.codec.produced]
    return KeptProductions(pa.StructArray.from_arrays(columns, fields=fields), places[production.owners])


class _Calls:
    """The calls of a bundle: one of all keys, and more only after an exception."""

    def __init__(
        self,
        node: ComputationNode,
        codec: SchemaCodec | None,
        limit: UserCodeWatchdog | None,
        bundle: Bundle,
        arrivals: Arrivals,
        grouping: Grouping,
        read_states: Callable[[int, int], pa.StructArray],
        slack_us: int,
    ) -> None:
        self._computation = node.computation
        self._codec = codec
        self._limit = limit
        self._arrivals = arrivals
        self._grouping = grouping
        self._read_states = read_states
        self._slack_us = slack_us
        self._late_before = bundle.plan.late_until
        self._has_given_up = False
        self._table: pa.Table | None = None
        self.counters: Counters = Counters()
        clocks = Clocks(
            watermark=bundle.plan.watermark,
            wall_time=bundle.wall_time,
            percentile_watermarks=bundle.plan.percentile_watermarks,
        )
        timers, input_time = KeyTimers(clocks), InputTime()
        state = key_state(node.computation.codec, timers, input_time)
        self._context = Context(node, state, timers, Productions(), input_time, clocks, self.counters)
        self._context.late_before = self._late_before

    def run(self, start: int, stop: int) -> list[_Done]:
        """Return the calls that succeeded of the keys ``start`` to ``stop``; the other keys need turns of their own."""
        counted = len(self.counters)
        groups = None
        try:
            groups = self._call(start, stop)
        except CodeTimeoutError:
            # Halving would cost the limit at each step, so all keys that are left go one by one.
            self._has_given_up = True
        except Exception:  # noqa: BLE001 - what fails alone is raised again in the key's turn
            groups = None
        mistake, self._context.mistake = self._context.mistake, None
        if groups is not None and mistake is None:
            return [(start, stop, groups)]
        self.counters.truncate(counted)
        if mistake is not None and (mistake.name is None or stop - start == 1):
            # The turn of a key ends the run with it, unless the name is from the input.
            self._has_given_up = True
        if self._has_given_up or stop - start == 1:
            return []
        middle = (start + stop) // 2
        done = self.run(start, middle)
        return done if self._has_given_up else done + self.run(middle, stop)

    def _call(self, start: int, stop: int) -> KeyGroups:
        grouping, arrivals = self._grouping, self._arrivals
        first, last = int(grouping.bounds[start]), int(grouping.bounds[stop])
        sources = grouping.sources[first:last]
        at, bounds = arrivals.at[sources], grouping.bounds[start : stop + 1] - first
        oldest = np.minimum.reduceat(at, bounds[:-1])
        # Where it would lie before all time, the difference may be beyond 64 bits.
        oldest_at = np.where(oldest < TIME_MIN_US + self._slack_us, TIME_MIN_US, oldest - self._slack_us)
        records = GroupedRecords(
            keys=grouping.key_column.slice(start, stop - start),
            bounds=bounds,
            at=at,
            oldest_at=oldest_at,
            late_before=self._late_before,
            streams=lambda: pa.array(arrivals.streams_of(sources), pa.string()),
            ids=lambda: _ids(arrivals, sources),
        )
        groups = KeyGroups(self._context, records, self._codec, lambda: self._read_states(start, stop))
        if self._table is not None:
            table = self._table.slice(first, last - first)
        else:
            table = table_of(arrivals.values, sources)
            if len(sources) == len(grouping.sources):
                self._table = table
        context = TableContext(self._context)
        if self._limit is None:
            self._computation.process_table(context, table, groups)
            return groups
        try:
            self._limit.begin("")
            self._computation.process_table(context, table, groups)
        finally:
            self._limit.end()
        return groups


def _ids(arrivals: Arrivals, sources: _Index) -> pa.BinaryArray:
    if arrivals.ids is None:
        return pa.nulls(len(sources), pa.binary())
    scoped, streams = arrivals.ids.take(pa.array(sources)).to_pylist(), arrivals.streams_of(sources)
    # With several streams, each id begins with its stream's name: see `Topology.id_scope`.
    own = [
        None if one is None else one.removeprefix(f"{stream}\0".encode())
        for one, stream in zip(scoped, streams, strict=True)
    ]
    return pa.array(own, pa.binary())
