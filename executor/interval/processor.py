"""The interval processor: a bundle in, row updates and productions out (MillWheel §6.1.1).

It uses no clock, file or thread, so the same code runs in a Spark task, in the local runner and in the simulator.
Records are handled in whole columns; Python runs per key, and per record only if user code reads single records.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from millpond.executor.computation.column_rows import ColumnRows, KeepsColumnRows, KeyedRecords
from millpond.executor.computation.records import RecordColumns
from millpond.executor.computation.state import StateLayout, StoredState
from millpond.executor.computation.timers import Timers
from millpond.executor.computation.watchdog import OnStuck, UserCodeWatchdog
from millpond.executor.interval.bundle import Bundle, BundleStatistics
from millpond.executor.interval.grouping import (
    Admission,
    Arrivals,
    Grouping,
    KeyCodes,
    admit,
    admitted_letters,
    chosen_of,
    encode_keys,
    group,
    sample_keys,
    unseen_ids,
)
from millpond.executor.interval.key_executor import KeyExecutor, MicroBatchExecutor
from millpond.executor.interval.letters import RetriedLetter
from millpond.executor.interval.row_update import (
    BundleOutcome,
    BundleResult,
    PartInColumns,
    PendingWork,
    RowUpdateDraft,
    all_productions,
    split_productions,
)
from millpond.executor.interval.soft_state import SoftState
from millpond.executor.interval.table_turns import TablePart, TableTurns, takes_tables
from millpond.executor.interval.time_sorted import TimeSortedExecutor
from millpond.executor.pipeline.nodes import ComputationNode
from millpond.executor.time.clocks import Clocks, slack_us
from millpond.statestore.durations import duration_ms
from millpond.statestore.errors import check
from millpond.statestore.interval import Interval
from millpond.statestore.rows.row import ROW_SCHEMA, TimeDomain
from millpond.statestore.types import EventTimeMicros, WallTimeMicros

_NO_UPDATES: Final = ROW_SCHEMA.empty_table()
_SAMPLED_KEYS: Final = 8


@dataclass(frozen=True, slots=True)
class _Ran:
    """The effects and counters of code on ``keys`` and on the keys in ``part``; ``turns`` ran single keys."""

    turns: KeyExecutor
    outcome: BundleOutcome
    part: PartInColumns | None
    keys: Sequence[str]
    counters: Mapping[str, int]


class IntervalProcessor:
    """Runs a computation's code for the keys of one interval, against its synchronised soft state."""

    def __init__(
        self,
        node: ComputationNode,
        interval: Interval,
        soft_state: SoftState,
        on_stuck: OnStuck | None = None,
    ) -> None:
        timeout = node.user_code_timeout
        self._limit = (
            None
            if timeout is None
            else UserCodeWatchdog(node.name, duration_ms("user_code_timeout", timeout), on_stuck)
        )
        self._node = node
        self._interval = interval
        self._soft_state = soft_state
        # A duration is text that must be parsed, so not in every bundle.
        self._slack_us = slack_us(node.computation.late_data_horizon)
        self._executor: type[KeyExecutor] = KeyExecutor
        self._is_by_time = node.time_sorted or not node.computation.in_order_of_arrival
        computation = node.computation
        self._tables = (
            TableTurns(node, soft_state, self._slack_us, self._limit) if takes_tables(computation) else None
        )
        make_columns: Callable[[], ColumnRows | None] = lambda: None  # noqa: E731 - of one type with the others
        if self._tables is not None:
            make_columns = self._tables.make_columns
        elif isinstance(computation, KeepsColumnRows) and self._limit is None and not node.cycle:
            make_columns = partial(computation.column_rows, node.production_names)
        soft_state.keep_in_columns(make_columns)
        if node.time_sorted:
            self._executor = TimeSortedExecutor
        elif node.computation.in_micro_batches:
            self._executor = MicroBatchExecutor

    def process(self, bundle: Bundle) -> BundleResult:
        """Process a bundle and apply its outcome to soft state, tentatively; if this raises, soft state is unchanged."""
        node, soft_state, letters = self._node, self._soft_state, bundle.plan.retried
        soft_state.begin()
        deliveries, sorts = bundle.deliveries, node.time_sorted
        if sorts:
            # The order of the computation's streams decides between records of one time.
            deliveries = sorted(deliveries, key=lambda delivery: node.rank(delivery.stream))
        unseen = unseen_ids(letters) if letters and node.exactly_once else None
        if unseen is not None:
            deliveries = [*deliveries, unseen]
        arrivals = Arrivals.of(deliveries, with_ids=node.exactly_once)
        codes = encode_keys(arrivals.keys)
        # Duplicates go first: neither lateness nor user code may see a record twice.
        admission = admit(arrivals, codes, soft_state)
        late_before = bundle.plan.late_until
        late = (arrivals.at if admission.kept is None else arrivals.at[admission.kept]) < late_before
        refused = np.zeros(len(late), np.bool_)
        if unseen is not None:
            refused, letters = admitted_letters(letters, unseen, admission, len(arrivals.at))
            late &= ~refused
        due = soft_state.due_keys(
            bundle.plan.until if sorts else bundle.plan.watermark,
            bundle.wall_time,
            bundle.plan.percentile_watermarks,
        )
        if letters:
            due = pc.unique(
                pa.concat_arrays([due, pa.array([letter.key for letter in letters], pa.string())])
            )
        order = arrivals.at if self._is_by_time else np.zeros_like(arrivals.at)
        grouping = group(codes, order, admission.kept, due)
        dropped = 0
        if node.on_late != "process" and late.any():
            drops = np.repeat([node.drops_late(stream) for stream in arrivals.streams], arrivals.counts)
            drops = late & (drops if admission.kept is None else drops[admission.kept])
            dropped = int(drops.sum())
            refused |= drops
        if refused.any():
            grouping = _without(refused, grouping, codes, order, arrivals, admission, due)
        keys = grouping.keys
        check(
            not keys or (self._interval.contains(keys[0]) and self._interval.contains(keys[-1])),
            "every key of a bundle lies in the interval",
            interval=self._interval.app_id,
        )
        ran = self._run_code(bundle, letters, arrivals, grouping, due)
        turns, outcome, part = ran.turns, ran.outcome, ran.part
        statistics = BundleStatistics(
            records=len(grouping.sources) + dropped + turns.retried_records,
            late=int(late.sum()),
            dropped=dropped,
            duplicates=admission.duplicates,
            timers=turns.fired + (0 if part is None else part.change.fired),
            keys=len(keys) if grouping.admitted is None else _count_turns(grouping, due),
            counters=ran.counters,
            waited=turns.waited,
            resumed=turns.resumed,
            retried=turns.retried,
        )
        draft = RowUpdateDraft(bundle, arrivals, grouping, outcome, part, all_productions(outcome, part))
        return self._conclude(draft, admission, turns, statistics, ran.keys)

    def _in_columns(self, bundle: Bundle, arrivals: Arrivals, grouping: Grouping) -> PartInColumns | None:
        """Return the effects on the keys that need no turns; ``None`` if all need one."""
        plan, keys = bundle.plan, grouping.keys
        rows = None if plan.percentile_watermarks else self._soft_state.columns
        added = None if rows is None else rows.added(arrivals.values, arrivals.at)
        if rows is None or added is None:
            return None
        # Timers alone fire where their rows are.
        elsewhere = self._soft_state.not_in_columns(keys, takes_up=len(grouping.sources) > 0)
        clocks = Clocks(watermark=plan.watermark, wall_time=bundle.wall_time)
        records = KeyedRecords(
            keys, grouping.key_column, grouping.bounds, arrivals.at, grouping.sources, added, elsewhere
        )
        change = rows.change(records, clocks)
        if change is None:
            return None
        others = np.ones(len(keys), np.bool_)
        others[change.places] = False
        return PartInColumns(change, np.flatnonzero(others))

    def _run_code(
        self,
        bundle: Bundle,
        letters: Sequence[RetriedLetter],
        arrivals: Arrivals,
        grouping: Grouping,
        due: pa.StringArray,
    ) -> _Ran:
        """Run code: as a table where it takes tables, in columns where it has such rows, and key by key."""
        part: PartInColumns | TablePart | None = None
        with self._code_of_bundle():
            if self._tables is not None:
                part = self._tables.run(bundle, arrivals, grouping, due)
            elif grouping.keys and not letters:
                part = self._in_columns(bundle, arrivals, grouping)
            own = grouping if part is None else chosen_of(grouping, part.others)
            turns, outcome = self._run(bundle, letters, self._columns(bundle, arrivals, own), own)
        if isinstance(part, TablePart):
            merged, counters = part.with_turns(outcome), _summed(turns, part.counters)
            return _Ran(turns, merged, None, grouping.keys, counters)
        counters = _summed(turns, {} if part is None else part.change.counters)
        return _Ran(turns, outcome, part, own.keys, counters)

    def _columns(self, bundle: Bundle, arrivals: Arrivals, grouping: Grouping) -> RecordColumns:
        return RecordColumns(
            at=arrivals.at[grouping.sources].tolist(),
            streams=arrivals.streams_of(grouping.sources),
            sources=grouping.sources.tolist(),
            values=arrivals.values,
            ids=arrivals.ids,
            watermark=bundle.plan.late_until,
            by_time=self._is_by_time,
        )

    @contextmanager
    def _code_of_bundle(self) -> Iterator[None]:
        """Run the code of a bundle: within its time limit, between `begin_bundle` and `end_bundle`."""
        computation = self._node.computation
        with nullcontext() if self._limit is None else self._limit.watching():
            computation.begin_bundle()
            try:
                yield
            finally:
                computation.end_bundle()

    def _run(
        self, bundle: Bundle, letters: Sequence[RetriedLetter], columns: RecordColumns, grouping: Grouping
    ) -> tuple[KeyExecutor, BundleOutcome]:
        if letters is not bundle.plan.retried:
            bundle = replace(bundle, plan=replace(bundle.plan, retried=letters))
        turns = self._executor(self._node, bundle, columns, self._slack_us, self._limit)
        run, productions, key_timers = turns.run, turns.productions.at, turns.timers
        states: list[StoredState | None] = []
        timers: dict[int, Timers] = {}
        kept_timers: dict[int, Timers] = {}
        counts: list[int] = []
        produced = 0
        bounds = grouping.bounds.tolist()
        before = self._soft_state.load(grouping.keys)
        rows = zip(grouping.keys, before, self._soft_state.timers_of(grouping.keys), strict=True)
        for index, (key, state, old) in enumerate(rows):
            states.append(run(key, state, old, bounds[index], bounds[index + 1]))
            new = key_timers.changed()
            if new is not None:
                timers[index] = new
            elif old:
                kept_timers[index] = old
            count = len(productions)
            counts.append(count - produced)
            produced = count
        return turns, BundleOutcome(
            before=before,
            states=states,
            timers=timers,
            kept_timers=kept_timers,
            productions=turns.productions,
            production_counts=counts,
            layout=StateLayout.of(self._node.computation),
        )

    def _conclude(
        self,
        draft: RowUpdateDraft,
        admission: Admission,
        turns: KeyExecutor,
        statistics: BundleStatistics,
        keys: Sequence[str],
    ) -> BundleResult:
        """Build the row updates, apply them to soft state, and summarise the interval's pending work."""
        soft_state, bundle, weak = self._soft_state, draft.bundle, None
        if draft.outcome.layout.version:
            draft = draft.with_upgrades()
        if bundle.weak.fused and len(draft.kept.owners):
            weak = split_productions(draft)
            draft = weak.draft
            statistics = replace(statistics, weak=weak.table.num_rows)
        updates, outcome, part = draft.updates(), draft.outcome, draft.columns
        # Weak productions may still have to be kept, even if nothing else changed.
        if updates is not None or weak is not None:
            soft_state.apply(
                _NO_UPDATES if updates is None else updates,
                keys,
                outcome.states,
                {keys[index]: timers for index, timers in outcome.timers.items()},
                admission.fingerprints,
                (bundle.plan.watermark, bundle.wall_time),
                None if part is None else (part.keys_of(draft.grouping), part.change),
            )
        return BundleResult(
            updates=updates,
            statistics=statistics,
            pending=_pending_work(soft_state, bundle),
            productions=draft.summaries(),
            dead_letters=tuple(turns.dead_letters),
            weak=weak,
            key_sample=sample_keys(draft.grouping, _SAMPLED_KEYS),
            retried=tuple(map(attrgetter("name"), bundle.plan.retried)),
            unset=turns.unset,
        )


def _pending_work(soft_state: SoftState, bundle: Bundle) -> PendingWork:
    # First, because it may move rows to the queue.
    holds = soft_state.holds(bundle.plan.percentile_watermarks)
    event, wall, hold = (
        soft_state.next_event_timer(),
        soft_state.timers.next_at(TimeDomain.WALL),
        soft_state.hold(),
    )
    return PendingWork(
        next_event_timer=None if event is None else EventTimeMicros(event),
        next_wall_timer=None if wall is None else WallTimeMicros(wall),
        hold=None if hold is None else EventTimeMicros(hold),
        next_percentile_timers=soft_state.timers.next_percentile_timers(),
        percentile_holds=holds,
    )


def _without(
    refused: npt.NDArray[np.bool_],
    grouping: Grouping,
    codes: KeyCodes,
    order: npt.NDArray[np.int64],
    arrivals: Arrivals,
    admission: Admission,
    due: pa.StringArray,
) -> Grouping:
    kept = np.flatnonzero(~refused) if admission.kept is None else admission.kept[~refused]
    if arrivals.ids is None:
        return group(codes, order, kept, due)
    # All keys stay, because the rows must keep the refused ids too: otherwise a redelivery would not be a duplicate.
    return replace(group(codes, order, kept, grouping.key_column), admitted=grouping)


def _summed(turns: KeyExecutor, others: Mapping[str, int]) -> Mapping[str, int]:
    counters = turns.counters.sums()
    return {name: counters.get(name, 0) + others.get(name, 0) for name in {*counters, *others}}


def _count_turns(grouping: Grouping, due: pa.StringArray) -> int:
    """Count the keys with records or due timers, without keys that stay only for the ids of refused records."""
    is_due = pc.is_in(grouping.key_column, due).to_numpy(zero_copy_only=False)
    return int(((np.diff(grouping.bounds) > 0) | is_due).sum())
