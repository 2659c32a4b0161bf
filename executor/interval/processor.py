"""The interval processor: a bundle in, row updates and productions out (MillWheel §6.1.1).

It uses no clock, no file and no thread of its own, so the same code runs in a Spark task, in the
local runner and in the simulator. Work per record is done in whole columns; Python runs per key,
and per record only if user code reads single records.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from millpond.executor.computation.records import RecordColumns
from millpond.executor.computation.state import StoredState
from millpond.executor.computation.timers import Timers
from millpond.executor.computation.watchdog import OnStuck, UserCodeWatchdog
from millpond.executor.interval.bundle import Arrivals, Bundle, BundleStatistics, Deliveries
from millpond.executor.interval.grouping import (
    Admission,
    Grouping,
    KeyCodes,
    admit,
    are_ids,
    encode_keys,
    group,
    sample_keys,
    unseen_ids,
    without_duplicates,
)
from millpond.executor.interval.key_executor import KeyExecutor, MicroBatchExecutor
from millpond.executor.interval.row_update import (
    BundleOutcome,
    BundleResult,
    RowUpdateDraft,
    WeakProductions,
    row_updates,
    split_productions,
    summarise,
    summarise_kept,
    with_upgrades,
)
from millpond.executor.interval.time_sorted import TimeSortedExecutor
from millpond.statestore.errors import check
from millpond.statestore.rows.row import ROW_SCHEMA, TimeDomain
from millpond.statestore.types import EventTimeMicros, WallTimeMicros

if TYPE_CHECKING:
    from millpond.executor.computation.computation import Computation
    from millpond.executor.interval.soft_state import SoftState
    from millpond.executor.pipeline.nodes import ComputationNode
    from millpond.statestore.interval import Interval


_NO_UPDATES: Final = ROW_SCHEMA.empty_table()
_SAMPLED_KEYS: Final = 8


class IntervalProcessor:
    """Runs a computation's code for the keys of one interval.

    Args:
        node: the computation as declared.
        interval: the interval.
        soft_state: the soft state of its rows, synchronised.
        on_stuck: called if the code exceeds its time limit and cannot be interrupted.
    """

    def __init__(
        self,
        node: ComputationNode,
        interval: Interval,
        soft_state: SoftState,
        on_stuck: OnStuck | None = None,
    ) -> None:
        timeout_ms = node.user_code_timeout_ms
        self._limit = None if timeout_ms is None else UserCodeWatchdog(node.name, timeout_ms, on_stuck)
        self._node = node
        self._interval = interval
        self._soft_state = soft_state

    def process(self, bundle: Bundle) -> BundleResult:
        """Process a bundle and apply its outcome to soft state, tentatively.

        Due timers and records run key by key in key order. If this raises, soft state is
        unchanged.

        Raises:
            InvalidError: user code failed and failures stop the pipeline, or timers never end.
            DataError: a committed file is missing or its bytes are wrong.
        """
        soft_state = self._soft_state
        soft_state.begin()
        node = self._node
        sorts = node.time_sorted
        deliveries = _by_rank(node, bundle.deliveries) if sorts else bundle.deliveries
        ids_of_letters = unseen_ids(bundle.retried) if node.exactly_once else []
        arrivals = Arrivals.of([*deliveries, *ids_of_letters], with_ids=node.exactly_once)
        codes = encode_keys(arrivals.keys)
        admission = admit(arrivals, codes, soft_state)
        refused = are_ids(ids_of_letters, admission, len(arrivals))
        letters = without_duplicates(bundle.retried, ids_of_letters, admission, len(arrivals))
        late = _late(arrivals, admission, bundle) & ~refused
        reached = bundle.until if sorts else bundle.watermark
        due = soft_state.timers.due_keys(reached, bundle.wall_time, bundle.percentile_watermarks)
        due |= {letter.key for letter in letters}
        by_time = sorts or not node.computation.in_order_of_arrival
        order = arrivals.at if by_time else np.zeros_like(arrivals.at)
        grouping = group(codes, order, admission.kept, due)
        dropped = 0
        if late.any() and node.on_late != "process":
            drops = late & self._drops(arrivals, admission.kept)
            dropped = int(drops.sum())
            refused |= drops
        if refused.any():
            grouping = _without(refused, grouping, codes, order, arrivals, admission, due)
        self._check_keys(grouping)
        at = arrivals.at[grouping.sources]
        columns = RecordColumns(
            at,
            arrivals.streams_of(grouping.sources),
            grouping.sources,
            arrivals.values,
            arrivals.ids,
            bundle.watermark if bundle.late_before is None else bundle.late_before,
            by_time=by_time,
        )
        executor = _executor_of(node)
        turns = executor(node, replace(bundle, retried=letters), columns, self._limit)
        with nullcontext() if self._limit is None else self._limit.watching(), _bundle_of(node.computation):
            outcome = _run(turns, grouping, soft_state, node.computation.state_version)
        statistics = BundleStatistics(
            records=len(at) + dropped + turns.retried_records,
            late=int(late.sum()),
            dropped=dropped,
            duplicates=admission.duplicates,
            timers=turns.fired,
            keys=_count_turns(grouping, due),
            counters=turns.counters.sums(),
            waited=turns.waited,
            resumed=turns.resumed,
            retried=turns.retried,
        )
        return self._conclude(bundle, arrivals, admission, grouping, turns, outcome, statistics)

    def _conclude(
        self,
        bundle: Bundle,
        arrivals: Arrivals,
        admission: Admission,
        grouping: Grouping,
        turns: KeyExecutor,
        outcome: BundleOutcome,
        statistics: BundleStatistics,
    ) -> BundleResult:
        soft_state = self._soft_state
        if outcome.state_version:
            outcome = with_upgrades(bundle, arrivals, grouping, outcome)
        weak = _weak_productions(bundle, arrivals, grouping, outcome)
        updates = row_updates(bundle, arrivals, grouping, outcome, None if weak is None else weak.draft.kept)
        # Weak productions may still have to be kept, even if nothing else changed.
        if updates is not None or weak is not None:
            soft_state.apply(
                _NO_UPDATES if updates is None else updates,
                grouping.keys,
                outcome.states,
                {grouping.keys[index]: timers for index, timers in outcome.timers.items()},
                admission.fingerprints,
                (bundle.watermark, bundle.wall_time),
            )
        queue = soft_state.timers
        next_event, next_wall, hold = (
            queue.next_at(TimeDomain.EVENT),
            queue.next_at(TimeDomain.WALL),
            queue.hold(),
        )
        return BundleResult(
            updates=updates,
            statistics=statistics if weak is None else replace(statistics, weak=weak.table.num_rows),
            next_event_timer=None if next_event is None else EventTimeMicros(next_event),
            next_wall_timer=None if next_wall is None else WallTimeMicros(next_wall),
            hold=None if hold is None else EventTimeMicros(hold),
            next_percentile_timers=queue.next_percentile_timers(),
            percentile_holds=queue.holds(bundle.percentile_watermarks),
            productions=summarise(outcome.productions, bundle.percentile_watermarks)
            if weak is None
            else summarise_kept(weak.draft.kept, bundle.percentile_watermarks),
            dead_letters=tuple(turns.dead_letters),
            weak=weak,
            key_sample=sample_keys(grouping, _SAMPLED_KEYS),
            retried=tuple(letter.name for letter in bundle.retried),
        )

    def _drops(self, arrivals: Arrivals, kept: npt.NDArray[np.int64] | None) -> npt.NDArray[np.bool_]:
        """Which of the admitted records are on streams whose late records are dropped."""
        by_stream = [self._node.drops_late(stream) for stream in arrivals.streams]
        drops = np.repeat(np.array(by_stream, dtype=np.bool_), arrivals.counts)
        return drops if kept is None else drops[kept]

    def _check_keys(self, grouping: Grouping) -> None:
        keys, interval = grouping.keys, self._interval
        check(
            not keys or (interval.contains(keys[0]) and interval.contains(keys[-1])),
            "every key of a bundle lies in the interval",
            interval=interval.app_id,
        )


def _executor_of(node: ComputationNode) -> type[KeyExecutor]:
    if node.time_sorted:
        return TimeSortedExecutor
    return MicroBatchExecutor if node.computation.in_micro_batches else KeyExecutor


@contextmanager
def _bundle_of(computation: Computation) -> Iterator[None]:
    computation.begin_bundle()
    try:
        yield
    finally:
        computation.end_bundle()


def _without(
    refused: npt.NDArray[np.bool_],
    grouping: Grouping,
    codes: KeyCodes,
    order: npt.NDArray[np.int64],
    arrivals: Arrivals,
    admission: Admission,
    due: Collection[str],
) -> Grouping:
    """The grouping without refused records. If records have ids, all keys stay: the rows must keep the refused ids too."""
    kept = np.flatnonzero(~refused) if admission.kept is None else admission.kept[~refused]
    if arrivals.ids is None:
        return group(codes, order, kept, due)
    others = {*due, *grouping.keys}
    return replace(group(codes, order, kept, others), admitted=grouping)


def _by_rank(node: ComputationNode, deliveries: Sequence[Deliveries]) -> list[Deliveries]:
    """Deliveries in the order of the computation's streams, which decides between records of one time."""
    return sorted(deliveries, key=lambda delivery: node.rank(delivery.stream))


def _count_turns(grouping: Grouping, due: Collection[str]) -> int:
    """How many keys have records or due timers, without the keys that stay only for the ids of refused records."""
    if grouping.admitted is None:
        return len(grouping.keys)
    counts = np.diff(grouping.bounds).tolist()
    return sum(count > 0 or key in due for key, count in zip(grouping.keys, counts, strict=True))


def _weak_productions(
    bundle: Bundle, arrivals: Arrivals, grouping: Grouping, outcome: BundleOutcome
) -> WeakProductions | None:
    if not bundle.weak.fused or not len(outcome.productions):
        return None
    kept, (table, owners) = split_productions(outcome, bundle.weak)
    return WeakProductions(table, owners, RowUpdateDraft(bundle, arrivals, grouping, outcome, kept))


def _late(arrivals: Arrivals, admission: Admission, bundle: Bundle) -> npt.NDArray[np.bool_]:
    """Which of the admitted records are behind the low watermark."""
    at = arrivals.at if admission.kept is None else arrivals.at[admission.kept]
    bound = bundle.watermark if bundle.late_before is None else bundle.late_before
    late: npt.NDArray[np.bool_] = at < bound
    return late


def _run(turns: KeyExecutor, grouping: Grouping, soft_state: SoftState, state_version: int) -> BundleOutcome:
    before = soft_state.load(grouping.keys)
    states: list[StoredState | None] = []
    timers: dict[int, Timers] = {}
    kept_timers: dict[int, Timers] = {}
    counts: list[int] = []
    run, timers_of, productions, key_timers = turns.run, soft_state.timers_of, turns.productions, turns.timers
    bounds = grouping.bounds.tolist()
    produced = 0
    for index, key in enumerate(grouping.keys):
        old = timers_of(key)
        states.append(run(key, before[index], old, bounds[index], bounds[index + 1]))
        new = key_timers.changed()
        if new is not None:
            timers[index] = new
        elif old:
            kept_timers[index] = old
        count = len(productions)
        counts.append(count - produced)
        produced = count
    return BundleOutcome(
        before=before,
        states=states,
        timers=timers,
        kept_timers=kept_timers,
        productions=productions,
        production_counts=counts,
        state_version=state_version,
    )
