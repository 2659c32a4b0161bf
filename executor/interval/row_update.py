"""Row updates: the changes of a bundle, as the Arrow table that becomes a row file.

Columns are assembled whole: record ids go from the deliveries to the file without becoming Python objects. A key
without a change has no update. Weak productions are delivered within the superstep, before the commit, and the rows
keep only the productions that a consumer did not get in time (MillWheel §6.1.3, figure 11).

The result of a bundle and its manifest are plain values, which travel from a worker to the committing driver.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import ne
from typing import cast

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from millpond.executor.computation.column_rows import ColumnChange
from millpond.executor.computation.context import Productions
from millpond.executor.computation.state import Encoded, FormerState, StateLayout, StoredState
from millpond.executor.computation.timers import Timer, Timers, hold_of, oldest_but
from millpond.executor.interval.bundle import (
    Bundle,
    BundleStatistics,
    DeadLetter,
    ProductionSummary,
)
from millpond.executor.interval.grouping import Arrivals, Grouping
from millpond.executor.pipeline.nodes import addressed
from millpond.executor.time.clocks import PercentileTimes, timer_clock_name
from millpond.statestore.interval import Interval
from millpond.statestore.rows.files import RowFile
from millpond.statestore.rows.record_ids import arrival_us
from millpond.statestore.rows.row import (
    PRODUCTION_TYPE,
    RECORD_ID_TYPE,
    ROW_SCHEMA,
    STATE_VERSION,
    TIMER_TYPE,
    TIMESTAMP,
    Fence,
    lists_of,
    one_array,
    production_lists,
)
from millpond.statestore.rows.state_schema import struct_of, typed_columns_among
from millpond.statestore.types import EventTimeMicros, Superstep, WallTimeMicros, quickly_pickled

_OPTIONAL = ("timers", "record_ids", "productions", "hold")
_STATE_COLUMNS = ("state", "state_bytes", STATE_VERSION)

_Index = npt.NDArray[np.int64]
_Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class BundleOutcome:
    """The effects of user code, one entry per key of the grouping.

    Attributes:
        timers: all timers of the keys whose timers changed, by the key's index.
        kept_timers: all timers of the keys whose timers did not change, by index.
        in_columns: further productions, which were columns when code gave them.
    """

    before: Sequence[StoredState | None]
    states: Sequence[StoredState | None]
    timers: Mapping[int, Timers]
    kept_timers: Mapping[int, Timers]
    productions: Productions
    production_counts: Sequence[int]
    in_columns: KeptProductions | None = None
    layout: StateLayout = field(default_factory=StateLayout)


@dataclass(frozen=True, slots=True)
class KeptProductions:
    """The productions that a bundle's rows keep; ``owners`` has the index of each one's key, ascending."""

    values: pa.StructArray
    owners: _Index


@dataclass(frozen=True, slots=True)
class RowUpdateDraft:
    """The inputs of a bundle's row updates; the rows keep the productions ``kept``.

    The updates can be built again, because a consumer of weak productions may turn out to be too slow.
    """

    bundle: Bundle
    arrivals: Arrivals
    grouping: Grouping
    outcome: BundleOutcome
    columns: PartInColumns | None
    kept: KeptProductions

    def updates(self) -> pa.Table | None:
        """Build the updates with `ROW_SCHEMA`, sorted by key; return ``None`` when nothing changed."""
        bundle, count = self.bundle, len(self.grouping.keys)
        written, columns = _changed_keys(self.outcome)
        if self.columns is not None:
            written, columns = self.columns.with_keys(written, columns)
        produced = np.bincount(self.kept.owners, minlength=count).astype(np.int64)
        written |= produced > 0
        if self.arrivals.ids is not None:
            columns["record_ids"] = _record_ids(self.arrivals.ids, self)
            written |= pc.is_valid(columns["record_ids"]).to_numpy(zero_copy_only=False)
        if not written.any():
            return None
        if produced.any():
            columns |= production_lists(self.kept.values, produced)
        columns |= {
            "key": self.grouping.key_column,
            "sequencer": pa.repeat(bundle.plan.fence.sequencer, count),
            "commit_number": pa.repeat(bundle.plan.fence.commit_number, count),
            "superstep": pa.repeat(bundle.superstep, count),
        }
        ordered = {name: columns[name] for name in (*ROW_SCHEMA.names, *typed_columns_among(columns))}
        table = pa.table(ordered)
        return table if written.all() else table.filter(pa.array(written))

    def summaries(self) -> tuple[ProductionSummary, ...]:
        values = self.kept.values
        streams = values.field("stream").dictionary_encode()
        codes, times = streams.indices.to_numpy(), values.field("at").view(pa.int64()).to_numpy()
        percentiles = self.bundle.plan.percentile_watermarks
        found = []
        for stream, code in sorted((name, code) for code, name in enumerate(streams.dictionary.to_pylist())):
            own = times[codes == code]
            oldest = oldest_but(own, percentiles) if percentiles else {}
            found.append(ProductionSummary(stream, len(own), EventTimeMicros(int(own.min())), oldest))
        return tuple(found)

    def restamped(self, fence: Fence, superstep: Superstep) -> RowUpdateDraft:
        return replace(self, bundle=self.bundle.restamped(fence, superstep))

    def with_upgrades(self) -> RowUpdateDraft:
        """Replace each former state that code has read by its upgraded form, if its row is written anyway.

        A row without any other change keeps the former state, so reading alone writes nothing.
        """
        upgraded = {
            index: state.upgraded
            for index, state in enumerate(self.outcome.states)
            if isinstance(state, FormerState) and state.upgraded is not None
        }
        updates = self.updates() if upgraded else None
        if updates is None:
            return self
        written = set(updates.column("key").to_pylist())
        states = list(self.outcome.states)
        for index, state in upgraded.items():
            if self.grouping.keys[index] in written:
                states[index] = state
        return replace(self, outcome=replace(self.outcome, states=states))


@dataclass(frozen=True, slots=True)
class PartInColumns:
    """The change of the keys of a bundle that had no turns of their own; the ``others`` had, by their places among all."""

    change: ColumnChange
    others: _Index

    def keys_of(self, grouping: Grouping) -> Sequence[str]:
        if not len(self.others):
            return grouping.keys
        return [grouping.keys[place] for place in self.change.places.tolist()]

    def with_keys(self, written: _Mask, columns: Mapping[str, pa.Array]) -> tuple[_Mask, dict[str, pa.Array]]:
        """Return which of all keys changed, and the columns of their rows, from those of the other keys."""
        change, count = self.change, len(self.change.places)
        own = {name: pa.nulls(count, column.type) for name, column in columns.items()} | {
            change.state_column: change.states,
            "timers": change.timers,
            "hold": change.holds,
            "deleted": pa.array(change.deleted),
        }
        if not len(self.others):
            return change.changed.copy(), own
        order = np.argsort(np.concatenate([change.places, self.others]))
        rows = pa.array(order)
        all_written = np.concatenate([change.changed, written])[order]
        return all_written, {
            name: pa.concat_arrays([own[name], columns[name]]).take(rows) for name in columns
        }

    def with_productions(self, values: pa.StructArray, owners: _Index) -> KeptProductions:
        """Return the productions of all keys, from those of the other keys."""
        change = self.change
        own = change.places[change.owners]
        if not len(owners):
            return KeptProductions(change.productions, own)
        return joined_productions(
            [KeptProductions(change.productions, own), KeptProductions(values, self.others[owners])]
        )


def all_productions(outcome: BundleOutcome, columns: PartInColumns | None) -> KeptProductions:
    counts = outcome.production_counts
    values = production_values(outcome.productions)
    owners = np.repeat(np.arange(len(counts)), counts).astype(np.int64)
    if outcome.in_columns is not None:
        made = [KeptProductions(values, owners)] if len(owners) else []
        return joined_productions([*made, outcome.in_columns])
    return KeptProductions(values, owners) if columns is None else columns.with_productions(values, owners)


def joined_productions(parts: Sequence[KeptProductions]) -> KeptProductions:
    """Return the productions of all parts in the order of their keys; those of one key in the order of the parts."""
    if len(parts) == 1 and _rises(parts[0].owners):
        return parts[0]
    kinds = {field.name: field for part in parts for field in part.values.type}
    owners = np.concatenate([part.owners for part in parts])
    values = pa.concat_arrays([_with_fields(part.values, list(kinds.values())) for part in parts])
    if _rises(owners):
        return KeptProductions(values, owners)
    order = np.argsort(owners, kind="stable")
    return KeptProductions(values.take(pa.array(order)), owners[order])


def _rises(owners: _Index) -> bool:
    return bool((owners[1:] >= owners[:-1]).all())


def _with_fields(values: pa.StructArray, fields: Sequence[pa.Field]) -> pa.StructArray:
    """Return productions with these fields, null where another part has the values of another schema."""
    columns = dict(zip([own.name for own in values.type], values.flatten(), strict=True))
    found = [columns.get(own.name) for own in fields]
    return pa.StructArray.from_arrays(
        [
            pa.nulls(len(values), own.type) if column is None else column
            for own, column in zip(fields, found, strict=True)
        ],
        fields=list(fields),
    )


def _changed_keys(outcome: BundleOutcome) -> tuple[_Mask, dict[str, pa.Array]]:
    """Return which keys changed, and the columns of their rows but ids and productions."""
    count = len(outcome.states)
    changed = np.fromiter(map(ne, outcome.before, outcome.states), np.bool_, count)
    deleted, timers = np.zeros(count, np.bool_), outcome.timers
    if None in outcome.states:
        deleted, timers = _deletions(outcome, changed)
    written = changed | deleted
    written[list(timers)] = True
    columns = {name: pa.nulls(count, ROW_SCHEMA.field(name).type) for name in _OPTIONAL} | {
        "deleted": pa.array(deleted),
        **_states(outcome.states, changed & ~deleted, outcome.layout),
    }
    if timers:
        columns["timers"] = _timers(timers, count)
    if outcome.timers or outcome.kept_timers:
        columns["hold"] = _holds(outcome, count)
    return written, columns


def _deletions(outcome: BundleOutcome, changed: _Mask) -> tuple[_Mask, dict[int, Timers]]:
    """Mark the keys that lose their state, or the last timer of a row without state; return all timers to write."""
    deleted = np.zeros(len(changed), np.bool_)
    states = outcome.states
    for index in np.flatnonzero(changed).tolist():
        deleted[index] = states[index] is None
    for index, timers in outcome.timers.items():
        deleted[index] |= not timers and states[index] is None
    # A deleting update must repeat the unchanged timers, otherwise it would delete them too.
    repeated = {index: timers for index, timers in outcome.kept_timers.items() if deleted[index]}
    return deleted, {**outcome.timers, **repeated}


def _states(states: Sequence[StoredState | None], written: _Mask, layout: StateLayout) -> dict[str, pa.Array]:
    kept = (
        states if written.all() else [s if w else None for s, w in zip(states, written.tolist(), strict=True)]
    )
    count = len(states)
    columns = {name: pa.nulls(count, ROW_SCHEMA.field(name).type) for name in _STATE_COLUMNS}
    # What is written has been encoded, or upgraded, by the code of this bundle.
    columns |= layout.arrays(cast("Sequence[Encoded | None]", kept))
    if layout.version:
        columns[STATE_VERSION] = pa.array(np.full(count, layout.version, np.int32), mask=~written)
    return columns


def _timestamps(times: Sequence[int | None]) -> pa.Array:
    return pa.array(times, pa.int64()).view(TIMESTAMP)


def _lists(column: str, values: pa.StructArray, counts: _Index) -> pa.Array:
    return lists_of(values, counts, ROW_SCHEMA.field(column).type, pa.array(counts == 0))


def _timers(timers: Mapping[int, Timers], count: int) -> pa.Array:
    counts = np.zeros(count, np.int64)
    missing = np.ones(count, np.bool_)
    flat: list[Timer] = []
    for index in sorted(timers):
        pending = timers[index]
        counts[index] = len(pending)
        # An empty list deletes the row's timers, a null keeps them.
        missing[index] = False
        flat += pending
    values = pa.StructArray.from_arrays(
        [
            pa.array([timer.tag for timer in flat], pa.string()),
            pa.array([timer_clock_name(t.domain, t.percentile, holds=t.holds) for t in flat], pa.string()),
            _timestamps([timer.at for timer in flat]),
            _timestamps([timer.output_at for timer in flat]),
        ],
        fields=list(TIMER_TYPE),
    )
    return lists_of(values, counts, ROW_SCHEMA.field("timers").type, pa.array(missing))


def _record_ids(ids: pa.BinaryArray, draft: RowUpdateDraft) -> pa.Array:
    """Return the ids that each key has consumed, including ids of dropped late records."""
    admitted = draft.grouping if draft.grouping.admitted is None else draft.grouping.admitted
    ids, at = ids.take(pa.array(admitted.sources)), draft.arrivals.at[admitted.sources]
    bounds = admitted.bounds
    if ids.null_count:
        valid = pc.is_valid(ids).to_numpy(zero_copy_only=False)
        ids, at = ids.drop_null(), at[valid]
        bounds = np.concatenate([np.zeros(1, np.int64), np.cumsum(valid)])[bounds]
    arrived_at = np.full(len(at), arrival_us(draft.bundle.wall_time), np.int64)
    values = pa.StructArray.from_arrays(
        [ids, pa.array(at).view(TIMESTAMP), pa.array(arrived_at).view(TIMESTAMP)],
        fields=list(RECORD_ID_TYPE),
    )
    return _lists("record_ids", values, np.diff(bounds))


def production_values(productions: Productions) -> pa.StructArray:
    columns = [
        pa.array(productions.streams, pa.string()),
        pa.array(productions.keys, pa.string()),
        pa.array(productions.texts, pa.string()),
        pa.array(productions.blobs, pa.binary()),
        _timestamps(productions.at),
    ]
    fields = list(PRODUCTION_TYPE)
    for typed, rows in productions.cells():
        columns.append(struct_of(rows, typed.type))
        fields.append(typed)
    return pa.StructArray.from_arrays(columns, fields=fields)


def _holds(outcome: BundleOutcome, count: int) -> pa.Array:
    holds: list[int | None] = [None] * count
    for indices in (outcome.kept_timers, outcome.timers):
        for index, timers in indices.items():
            holds[index] = hold_of(timers)
    return _timestamps(holds)


@dataclass(frozen=True, slots=True)
class Straggler:
    """Weak productions that a consumer did not get in time."""

    positions: _Index
    consumer: str


@dataclass(frozen=True, slots=True)
class WeakProductions:
    """A bundle's productions that are delivered before the commit.

    Attributes:
        table: the productions, in order of emission, under the streams' own names.
        owners: the indices of the keys that produced them.
    """

    table: pa.Table
    owners: _Index
    draft: RowUpdateDraft

    @property
    def streams(self) -> frozenset[str]:
        return self.draft.bundle.weak.fused

    def keeping(self, stragglers: Sequence[Straggler]) -> RowUpdateDraft:
        """Return the draft with row updates that also keep these productions, so that no consumer loses any."""
        kept = self.draft.kept
        values, owners = [kept.values], [kept.owners]
        for straggler in stragglers:
            late = one_array(self.table.take(pa.array(straggler.positions)).to_struct_array())
            values.append(_readdressed(late, np.ones(len(late), np.bool_), straggler.consumer))
            owners.append(self.owners[straggler.positions])
        index = np.concatenate(owners)
        order = np.argsort(index, kind="stable")
        return replace(
            self.draft, kept=KeptProductions(pa.concat_arrays(values).take(pa.array(order)), index[order])
        )


def split_productions(draft: RowUpdateDraft) -> WeakProductions:
    """Separate the productions to deliver before the commit from those in the rows."""
    weak, values, owners = draft.bundle.weak, draft.kept.values, draft.kept.owners
    streams = values.field("stream")
    is_fused, is_kept = _is_in(streams, weak.fused), _is_in(streams, weak.kept)
    in_rows = ~is_fused | is_kept
    kept = KeptProductions(
        _readdressed(values.filter(pa.array(in_rows)), is_kept[in_rows], ""), owners[in_rows]
    )
    fused = values.filter(pa.array(is_fused))
    table = pa.Table.from_arrays(fused.flatten(), schema=pa.schema(list(fused.type)))
    return WeakProductions(table, owners[is_fused], replace(draft, kept=kept))


def _is_in(streams: pa.StringArray, chosen: frozenset[str]) -> _Mask:
    is_chosen: _Mask = pc.is_in(streams, pa.array(sorted(chosen), pa.string())).to_numpy(zero_copy_only=False)
    return is_chosen


def _readdressed(values: pa.StructArray, chosen: _Mask, consumer: str) -> pa.StructArray:
    if not chosen.any():
        return values
    streams = values.field("stream")
    renamed = pc.binary_join_element_wise(streams, addressed("", consumer), "")
    columns = [pc.if_else(pa.array(chosen), renamed, streams), *values.flatten()[1:]]
    return pa.StructArray.from_arrays(columns, fields=list(values.type))


@quickly_pickled
@dataclass(frozen=True, slots=True, kw_only=True)
class PendingWork:
    """The timers and the held output times of a whole interval.

    Attributes:
        hold: oldest output time that a row still owes.
        next_percentile_timers: earliest pending timer for each percentile watermark.
        percentile_holds: by percentile *p*, the oldest output time without the oldest 100 - *p* percent of the rows.
    """

    next_event_timer: EventTimeMicros | None = None
    next_wall_timer: WallTimeMicros | None = None
    hold: EventTimeMicros | None = None
    next_percentile_timers: PercentileTimes = field(default_factory=dict)
    percentile_holds: PercentileTimes = field(default_factory=dict)

    def to_text(self) -> str:
        """Return JSON that a commit records for later owners.

        Example:
            >>> PendingWork(hold=EventTimeMicros(9)).to_text()
            '[null,null,9,{},{}]'
        """
        times = (self.next_percentile_timers, self.percentile_holds)
        by_percentile = [{repr(percentile): at for percentile, at in some.items()} for some in times]
        plain = [self.next_event_timer, self.next_wall_timer, self.hold, *by_percentile]
        return orjson.dumps(plain).decode()

    @classmethod
    def from_text(cls, text: str) -> PendingWork | None:
        """Return what `to_text` was called on; ``None`` for any other text, because logs may be anybody's."""
        try:
            event, wall, hold, timers, holds = orjson.loads(text)
            by_percentile = [
                {float(percentile): at for percentile, at in some.items()} for some in (timers, holds)
            ]
        except (ValueError, TypeError, AttributeError):
            return None
        times = [event, wall, hold, *by_percentile[0].values(), *by_percentile[1].values()]
        if any(at is not None and type(at) is not int for at in times):
            return None
        return cls(
            next_event_timer=event,
            next_wall_timer=wall,
            hold=hold,
            next_percentile_timers=by_percentile[0],
            percentile_holds=by_percentile[1],
        )


@quickly_pickled
@dataclass(frozen=True, slots=True, kw_only=True)
class BundleResult:
    """The result of a bundle.

    Attributes:
        updates: row updates with `ROW_SCHEMA`, sorted by key; ``None`` when nothing changed.
        productions: one summary per stream of the productions that rows keep.
        key_sample: keys of the bundle; a key with more records occurs more often.
        retried: the names of the retried dead letters, including failed ones, which are also in ``dead_letters``.
        unset: a key whose state was changed in place and not set; ``None`` without one among the first of the bundle.
    """

    updates: pa.Table | None
    statistics: BundleStatistics
    pending: PendingWork = PendingWork()
    productions: tuple[ProductionSummary, ...] = ()
    dead_letters: tuple[DeadLetter, ...] = ()
    weak: WeakProductions | None = None
    key_sample: tuple[str, ...] = ()
    retried: tuple[str, ...] = ()
    unset: str | None = None


@quickly_pickled
@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A task's report of one interval; only collected manifests are committed (F12).

    Attributes:
        file: the row updates, written but not yet committed; ``None`` when nothing changed.
        result: the bundle's result; its ``updates`` may be ``None``, because they are in ``file``.
        home: the process that ran it; empty for the coordinator's.
        work_us: the processing time of the bundle, by the worker's stopwatch.
    """

    interval: Interval
    fence: Fence
    file: RowFile | None
    result: BundleResult
    work_us: int = 0
    home: str = ""
