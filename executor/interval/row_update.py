"""Row updates: what a bundle changed, as the Arrow table that becomes a row file.

Columns are assembled whole; record ids go from the deliveries to the file without becoming
Python objects. A key for which nothing changed has no update.

Weak productions of one bundle: what is delivered within the superstep, and what its rows must keep.

Which productions are kept is decided in whole columns, and a bundle's row updates can be built again
if a consumer turns out to be too slow (MillWheel §6.1.3, figure 11).

The result of a bundle, and the manifest with which a task reports it.

Both are plain values: they travel from a worker to the driver, which commits them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from millpond.executor.computation.context import Productions
from millpond.executor.computation.state import FormerState, StoredState
from millpond.executor.computation.timers import Timer, Timers, hold_of, oldest_but
from millpond.executor.interval.bundle import (
    Arrivals,
    Bundle,
    BundleStatistics,
    DeadLetter,
    ProductionSummary,
)
from millpond.executor.interval.grouping import Grouping
from millpond.executor.pipeline.nodes import WeakStreams, addressed
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
)
from millpond.statestore.types import EventTimeMicros, WallTimeMicros, quickly_pickled

if TYPE_CHECKING:
    from millpond.statestore.types import Superstep


_Counts = npt.NDArray[np.int64]
_Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class BundleOutcome:
    """The effects of user code, one entry per key of the grouping.

    Attributes:
        before: states at the start of the bundle.
        states: states at its end.
        timers: all timers of the keys whose timers changed, by the key's index.
        kept_timers: all timers of the keys whose timers did not change, by index.
        productions: the productions, key by key.
        production_counts: how many each key produced.
        state_version: the version of the states that the code has set.
    """

    before: Sequence[StoredState | None]
    states: Sequence[StoredState | None]
    timers: Mapping[int, Timers]
    kept_timers: Mapping[int, Timers]
    productions: Productions
    production_counts: Sequence[int]
    state_version: int = 0


@dataclass(frozen=True, slots=True)
class KeptProductions:
    """The productions that a bundle's rows keep, key by key.

    Attributes:
        values: the productions, of type `PRODUCTION_TYPE`.
        owners: for each production, the index of its key, ascending.
    """

    values: pa.StructArray
    owners: npt.NDArray[np.int64]


def row_updates(
    bundle: Bundle,
    arrivals: Arrivals,
    grouping: Grouping,
    outcome: BundleOutcome,
    kept: KeptProductions | None = None,
) -> pa.Table | None:
    """The updates with `ROW_SCHEMA`, sorted by key; ``None`` when nothing changed.

    Args:
        bundle: the bundle.
        arrivals: its records.
        grouping: their keys.
        outcome: the effects of user code.
        kept: the productions that the rows keep; ``None``: all of them.
    """
    count = len(grouping.keys)
    changed = _changed_states(outcome)
    deleted = _deleted(outcome, changed)
    timers = _timers_to_write(outcome, deleted)
    record_ids = _record_ids(bundle, arrivals, grouping)
    if kept is None:
        produced = np.asarray(outcome.production_counts, np.int64)
    else:
        produced = np.bincount(kept.owners, minlength=count).astype(np.int64)
    written = changed | (produced > 0) | _at_indices(timers, count) | deleted
    if record_ids is not None:
        written |= pc.is_valid(record_ids).to_numpy(zero_copy_only=False)
    if not written.any():
        return None
    columns = {
        "key": grouping.key_column,
        "sequencer": _constant(bundle.fence.sequencer, count),
        "commit_number": _constant(bundle.fence.commit_number, count),
        "superstep": _constant(bundle.superstep, count),
        **_states(outcome.states, changed & ~deleted, outcome.state_version),
        "timers": _timers(timers, count),
        "record_ids": pa.nulls(count, ROW_SCHEMA.field("record_ids").type)
        if record_ids is None
        else record_ids,
        "productions": _productions(outcome.productions, kept, produced),
        "hold": _holds(outcome, count),
        "deleted": pa.array(deleted),
    }
    table = pa.Table.from_arrays([columns[name] for name in ROW_SCHEMA.names], schema=ROW_SCHEMA)
    return table if written.all() else table.filter(pa.array(written))


def with_upgrades(
    bundle: Bundle, arrivals: Arrivals, grouping: Grouping, outcome: BundleOutcome
) -> BundleOutcome:
    """The outcome with the upgraded form of each former state that code has read, if its row is written anyway.

    Where nothing else of a row has changed, it keeps the former state.
    """
    upgraded = {
        index: state.upgraded
        for index, state in enumerate(outcome.states)
        if isinstance(state, FormerState) and state.upgraded is not None
    }
    updates = row_updates(bundle, arrivals, grouping, outcome) if upgraded else None
    if updates is None:
        return outcome
    written = set(updates.column("key").to_pylist())
    states = list(outcome.states)
    for index, state in upgraded.items():
        if grouping.keys[index] in written:
            states[index] = state
    return replace(outcome, states=states)


def _changed_states(outcome: BundleOutcome) -> _Mask:
    pairs = zip(outcome.before, outcome.states, strict=True)
    return np.fromiter((old != new for old, new in pairs), np.bool_, len(outcome.states))


def _deleted(outcome: BundleOutcome, changed: _Mask) -> _Mask:
    """Which keys lose their state, or the last timer of a row without state."""
    deleted = np.zeros(len(changed), np.bool_)
    states = outcome.states
    if None in states:
        for index in np.flatnonzero(changed).tolist():
            deleted[index] = states[index] is None
        for index, timers in outcome.timers.items():
            deleted[index] |= not timers and states[index] is None
    return deleted


def _timers_to_write(outcome: BundleOutcome, deleted: _Mask) -> dict[int, Timers]:
    # A deleting update without timers would delete those that stay.
    repeated = {index: timers for index, timers in outcome.kept_timers.items() if deleted[index]}
    return {**outcome.timers, **repeated}


def _at_indices(indices: Mapping[int, object], count: int) -> _Mask:
    mask = np.zeros(count, np.bool_)
    mask[list(indices)] = True
    return mask


def _constant(value: int, count: int) -> pa.Array:
    return pa.array(np.full(count, value, np.int64))


def _states(states: Sequence[StoredState | None], written: _Mask, version: int) -> dict[str, pa.Array]:
    kept = (
        states if written.all() else [s if w else None for s, w in zip(states, written.tolist(), strict=True)]
    )
    first = next((state for state in kept if state is not None), None)
    nulls = len(states)
    is_binary = isinstance(first, bytes)
    return {
        "state": pa.nulls(nulls, pa.string()) if is_binary else pa.array(kept, pa.string()),
        "state_bytes": pa.array(kept, pa.binary()) if is_binary else pa.nulls(nulls, pa.binary()),
        STATE_VERSION: pa.array(np.full(nulls, version, np.int32), mask=~written)
        if version
        else pa.nulls(nulls, pa.int32()),
    }


def _timestamps(times: Sequence[int | None]) -> pa.Array:
    return pa.array(times, pa.int64()).view(TIMESTAMP)


def _timers(timers: Mapping[int, Timers], count: int) -> pa.Array:
    kind = ROW_SCHEMA.field("timers").type
    if not timers:
        return pa.nulls(count, kind)
    counts = np.zeros(count, np.int64)
    missing = np.ones(count, np.bool_)
    flat: list[Timer] = []
    for index in sorted(timers):
        pending = timers[index]
        counts[index] = len(pending)
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
    return lists_of(values, counts, kind, pa.array(missing))


def _record_ids(bundle: Bundle, arrivals: Arrivals, grouping: Grouping) -> pa.Array | None:
    """The ids that each key has consumed, including those of dropped late records."""
    if arrivals.ids is None:
        return None
    admitted = grouping if grouping.admitted is None else grouping.admitted
    ids, at = arrivals.ids.take(pa.array(admitted.sources)), arrivals.at[admitted.sources]
    bounds = admitted.bounds
    if ids.null_count:
        valid = pc.is_valid(ids).to_numpy(zero_copy_only=False)
        ids, at = ids.drop_null(), at[valid]
        bounds = np.concatenate([np.zeros(1, np.int64), np.cumsum(valid)])[bounds]
    arrived_at = np.full(len(at), arrival_us(bundle.wall_time), np.int64)
    values = pa.StructArray.from_arrays(
        [ids, pa.array(at).view(TIMESTAMP), pa.array(arrived_at).view(TIMESTAMP)],
        fields=list(RECORD_ID_TYPE),
    )
    counts = np.diff(bounds)
    return lists_of(values, counts, ROW_SCHEMA.field("record_ids").type, pa.array(counts == 0))


def production_values(productions: Productions) -> pa.StructArray:
    """The productions as a column of `PRODUCTION_TYPE`, in order of emission."""
    return pa.StructArray.from_arrays(
        [
            pa.array(productions.streams, pa.string()),
            pa.array(productions.keys, pa.string()),
            pa.array(productions.texts, pa.string()),
            pa.array(productions.blobs, pa.binary()),
            _timestamps(productions.at),
        ],
        fields=list(PRODUCTION_TYPE),
    )


def _productions(productions: Productions, kept: KeptProductions | None, counts: _Counts) -> pa.Array:
    kind = ROW_SCHEMA.field("productions").type
    if not len(productions) or (kept is not None and not len(kept.owners)):
        return pa.nulls(len(counts), kind)
    values = production_values(productions) if kept is None else kept.values
    return lists_of(values, counts, kind, pa.array(counts == 0))


def _holds(outcome: BundleOutcome, count: int) -> pa.Array:
    if not outcome.timers and not outcome.kept_timers:
        return pa.nulls(count, TIMESTAMP)
    holds: list[int | None] = [None] * count
    for indices in (outcome.kept_timers, outcome.timers):
        for index, timers in indices.items():
            holds[index] = hold_of(timers)
    return _timestamps(holds)


def summarise(productions: Productions, percentiles: Collection[float] = ()) -> tuple[ProductionSummary, ...]:
    """The number of productions per stream and the oldest time, also by percentile if any are given."""
    return _summaries(zip(productions.streams, productions.at, strict=True), percentiles)


def summarise_kept(
    kept: KeptProductions, percentiles: Collection[float] = ()
) -> tuple[ProductionSummary, ...]:
    """Summarise the productions that rows keep, by the streams under which they are kept."""
    streams = kept.values.field("stream").to_pylist()
    times = kept.values.field("at").view(pa.int64()).to_pylist()
    return _summaries(zip(streams, times, strict=True), percentiles)


def _summaries(
    productions: Iterable[tuple[str, int]], percentiles: Collection[float]
) -> tuple[ProductionSummary, ...]:
    times: dict[str, list[int]] = {}
    for stream, at in productions:
        times.setdefault(stream, []).append(at)
    return tuple(
        ProductionSummary(
            stream=stream,
            count=len(at),
            oldest_at=EventTimeMicros(min(at)),
            percentile_oldest_at=oldest_but(np.array(at, np.int64), percentiles) if percentiles else {},
        )
        for stream, at in sorted(times.items())
    )


_Positions = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Straggler:
    """Weak productions that a consumer did not get in time.

    Attributes:
        positions: their positions among the bundle's weak productions.
        consumer: the computation that still waits for them.
    """

    positions: _Positions
    consumer: str


@dataclass(frozen=True, slots=True)
class RowUpdateDraft:
    """The inputs of a bundle's row updates."""

    bundle: Bundle
    arrivals: Arrivals
    grouping: Grouping
    outcome: BundleOutcome
    kept: KeptProductions

    def updates(self) -> pa.Table | None:
        """Build the row updates; ``None`` when nothing changed."""
        return row_updates(self.bundle, self.arrivals, self.grouping, self.outcome, self.kept)

    def restamped(self, fence: Fence, superstep: Superstep) -> RowUpdateDraft:
        """The same bundle as part of another superstep."""
        return replace(self, bundle=replace(self.bundle, fence=fence, superstep=superstep))


@dataclass(frozen=True, slots=True)
class WeakProductions:
    """A bundle's productions that are delivered before the commit.

    Attributes:
        table: the productions, in order of emission, under the streams' own names.
        owners: the indices of the keys that produced them.
        draft: the inputs of the bundle's row updates.
    """

    table: pa.Table
    owners: _Positions
    draft: RowUpdateDraft

    @property
    def streams(self) -> frozenset[str]:
        """The streams of the productions."""
        return self.draft.bundle.weak.fused

    def keeping(self, stragglers: Sequence[Straggler]) -> RowUpdateDraft:
        """The draft with row updates that also keep these productions."""
        values = [self.draft.kept.values]
        owners = [self.draft.kept.owners]
        for straggler in stragglers:
            late = self.table.take(pa.array(straggler.positions)).to_struct_array()
            late = late.combine_chunks() if isinstance(late, pa.ChunkedArray) else late
            values.append(_readdressed(late, np.ones(len(late), np.bool_), straggler.consumer))
            owners.append(self.owners[straggler.positions])
        index = np.concatenate(owners)
        order = np.argsort(index, kind="stable")
        kept = KeptProductions(pa.concat_arrays(values).take(pa.array(order)), index[order])
        return replace(self.draft, kept=kept)


def split_productions(
    outcome: BundleOutcome, weak: WeakStreams
) -> tuple[KeptProductions, tuple[pa.Table, _Positions]]:
    """Split productions into those that the rows keep and those that are delivered before the commit."""
    values = production_values(outcome.productions)
    owners = np.repeat(np.arange(len(outcome.production_counts)), outcome.production_counts)
    streams = values.field("stream")
    is_fused = _is_in(streams, weak.fused)
    is_kept = _is_in(streams, weak.kept)
    in_rows = ~is_fused | is_kept
    kept = KeptProductions(
        _readdressed(values.filter(pa.array(in_rows)), is_kept[in_rows], ""), owners[in_rows].astype(np.int64)
    )
    fused = values.filter(pa.array(is_fused))
    table = pa.Table.from_arrays(fused.flatten(), schema=pa.schema(list(PRODUCTION_TYPE)))
    return kept, (table, owners[is_fused].astype(np.int64))


def _is_in(streams: pa.StringArray, chosen: frozenset[str]) -> npt.NDArray[np.bool_]:
    is_chosen: npt.NDArray[np.bool_] = pc.is_in(streams, pa.array(sorted(chosen), pa.string())).to_numpy(
        zero_copy_only=False
    )
    return is_chosen


def _readdressed(values: pa.StructArray, chosen: npt.NDArray[np.bool_], consumer: str) -> pa.StructArray:
    if not chosen.any():
        return values
    streams = values.field("stream")
    renamed = pc.binary_join_element_wise(streams, addressed("", consumer), "")
    columns = [pc.if_else(pa.array(chosen), renamed, streams), *values.flatten()[1:]]
    return pa.StructArray.from_arrays(columns, fields=list(PRODUCTION_TYPE))


@quickly_pickled
@dataclass(frozen=True, slots=True, kw_only=True)
class BundleResult:
    """The result of a bundle.

    Attributes:
        updates: row updates with `ROW_SCHEMA`, sorted by key; ``None`` when nothing changed.
        next_event_timer: earliest pending event-domain firing time of the whole interval.
        next_wall_timer: earliest pending wall-domain firing time of the whole interval.
        hold: oldest output timestamp that any row of the interval still owes.
        next_percentile_timers: earliest firing time of the timers that wait for each percentile watermark.
        percentile_holds: oldest output timestamps when a share of the rows is left out, by percentile.
        productions: one summary per stream of the productions that rows keep.
        weak: the productions to be delivered within the superstep; ``None`` if there are none.
        key_sample: some of the bundle's keys, a key the more often the more records it had.
        retried: the names of the dead letters that were given once more; those that failed again are among
            ``dead_letters``.
    """

    updates: pa.Table | None
    statistics: BundleStatistics
    next_event_timer: EventTimeMicros | None = None
    next_wall_timer: WallTimeMicros | None = None
    hold: EventTimeMicros | None = None
    next_percentile_timers: PercentileTimes = field(default_factory=dict)
    percentile_holds: PercentileTimes = field(default_factory=dict)
    productions: tuple[ProductionSummary, ...] = ()
    dead_letters: tuple[DeadLetter, ...] = ()
    weak: WeakProductions | None = None
    key_sample: tuple[str, ...] = ()
    retried: tuple[str, ...] = ()


@quickly_pickled
@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A task's report of one interval; only collected manifests are committed (F12).

    Attributes:
        file: the row updates, written but not yet committed; ``None`` when nothing changed.
        result: the bundle's result; its ``updates`` may be ``None``, because they are in ``file``.
        home: the process that ran it; empty for that of the coordinator.
        work_us: how long the bundle was processed, by the worker's stopwatch.
    """

    interval: Interval
    fence: Fence
    file: RowFile | None
    result: BundleResult
    work_us: int = 0
    home: str = ""
