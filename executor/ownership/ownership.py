"""Ownership: the intervals of a pipeline that this process holds, and their fences.

Taking over is a commit: before a new owner writes anything, it commits a fence without files, and from then on every
write of the former owner fails, however late it lands (MillWheel §6.2: "new workers invalidate any extant
sequencers"). The owner of the control interval owns the pipeline: keys are cut into intervals only by a commit that
carries its fence, so two owners never leave two sets of intervals behind, whose timers would fire twice.

A new owner then scans the committed files for pending timers and holds (§7.1). The rows stay in their files; a
worker's soft state reads them when it needs them.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from typing import Final, TypeAlias, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from millpond.executor.computation.state import StateLayout
from millpond.executor.computation.timers import oldest_but
from millpond.executor.inputs.positions import conflicting_pipeline, id_slack_position
from millpond.executor.interval.row_cache import clock_names
from millpond.executor.interval.row_update import PendingWork
from millpond.executor.ownership.catalog_recorder import definition_metadata
from millpond.executor.ownership.cuts import Cut, boundaries_of
from millpond.executor.ownership.evolution import (
    Evolution,
    changed_fingerprints,
    check_states,
    evolution_request,
    intervals_of,
    new_fingerprints,
    number_of_runner,
    plan_evolution,
    state_records,
)
from millpond.executor.pipeline.nodes import ComputationNode, control_interval
from millpond.executor.pipeline.topology import Topology
from millpond.executor.time.clocks import EXACT
from millpond.executor.time.instants import INSTANT_MAX_US
from millpond.statestore.app_ids import AppId, pipeline_number
from millpond.statestore.errors import (
    ConflictError,
    FencedError,
    InvalidError,
    OutcomeUnknownError,
    UnavailableError,
)
from millpond.statestore.failpoint import reach
from millpond.statestore.interval import Interval, intervals_from_boundaries
from millpond.statestore.leases.lease import TIMEOUT_MS, Lease, LeaseState, OnHeld, unrecorded_ensemble
from millpond.statestore.log.action import JsonValue
from millpond.statestore.log.committer import Committer
from millpond.statestore.log.files import LiveFile, recorded_pending
from millpond.statestore.log.rules import CommitRequest, IntervalWrite
from millpond.statestore.log.snapshot import Snapshot
from millpond.statestore.log.writer import Committed
from millpond.statestore.objects.disk_tier import without_keeping
from millpond.statestore.outage import Outage
from millpond.statestore.rows.files import LARGE_BYTES, RowFile, read_row_files
from millpond.statestore.rows.merge import MERGE_COLUMNS, combine_updates
from millpond.statestore.rows.row import ROW_SCHEMA, Fence
from millpond.statestore.store import Store
from millpond.statestore.types import (
    Clock,
    CommitNumber,
    EventTimeMicros,
    Objects,
    Rng,
    Sequencer,
    TableVersion,
    WallTimeMicros,
)

_STATE_COLUMNS: Final = ("state", "state_bytes", "state_version")
# Below this a takeover takes a fraction of a second, and threads would cost more than they save.
_SCANNED_ALONE_BYTES: Final = 1 << 24
# State is the bulk of a row and does not affect timers or holds, so a scan does not read it.
_SCAN_COLUMNS: Final = tuple(name for name in MERGE_COLUMNS if name not in _STATE_COLUMNS)


def recorded_work(
    interval: Interval, files: Collection[LiveFile], percentiles: Collection[float] = ()
) -> PendingWork | None:
    """Return what the last commit to change the interval recorded of its timers and holds; ``None`` if a scan must tell."""
    text = recorded_pending(files, interval)
    work = None if text is None else PendingWork.from_text(text)
    if work is None or (work.hold is not None and work.percentile_holds.keys() != {*percentiles}):
        # Other percentile watermarks than the last run's need other holds.
        return None
    return work


def scan_interval(
    objects: Objects, interval: Interval, files: Sequence[LiveFile], percentiles: Collection[float] = ()
) -> PendingWork:
    """Read the timers and holds of an interval from all its live files, for the pipeline's percentile watermarks."""
    if not files:
        return PendingWork()
    files = _in_key_order(files)
    updates = read_row_files(
        objects,
        [file.path for file in files],
        columns=list(_SCAN_COLUMNS),
        interval=interval,
        large={file.path for file in files if file.size_bytes >= LARGE_BYTES},
    )
    for name in _STATE_COLUMNS:
        updates = updates.append_column(name, pa.nulls(updates.num_rows, ROW_SCHEMA.field(name).type))
    rows = combine_updates(updates)
    timers = pc.list_flatten(rows.column("timers").combine_chunks())
    holds = rows.column("hold").cast(pa.int64()).drop_null().to_numpy()
    event_names, wall_names = clock_names(timers.field("domain"))
    by_percentile = {percentile: _earliest(timers, names) for percentile, names in event_names.items()}
    event, wall = by_percentile.pop(EXACT, None), _earliest(timers, wall_names)
    return PendingWork(
        next_event_timer=None if event is None else EventTimeMicros(event),
        next_wall_timer=None if wall is None else WallTimeMicros(wall),
        hold=EventTimeMicros(int(holds.min())) if len(holds) else None,
        next_percentile_timers={
            percentile: EventTimeMicros(at) for percentile, at in by_percentile.items() if at is not None
        },
        percentile_holds=oldest_but(holds, percentiles) if len(holds) else {},
    )


def _in_key_order(files: Sequence[LiveFile]) -> Sequence[LiveFile]:
    """Return files that share no key in the order of their keys, in which their rows need no merge; others unchanged."""
    ordered = sorted(files, key=lambda file: file.min_key or "")
    is_apart = all(
        low.max_key is not None and high.min_key is not None and low.max_key < high.min_key
        for low, high in pairwise(ordered)
    )
    return ordered if is_apart else files


def _earliest(timers: pa.StructArray, names: Sequence[str]) -> int | None:
    if not names:
        return None
    chosen = timers.filter(pc.is_in(timers.field("domain"), pa.array(names, pa.string())))
    earliest = pc.min(chosen.field("at").cast(pa.int64())).as_py()
    return None if earliest is None else int(earliest)


class OwnedInterval:
    """An interval that this process holds: its lease, its pending work, and the fences of its last and next commit."""

    fence: Fence
    next_fence: Fence

    def __init__(self, interval: Interval, lease: Lease, pending: PendingWork) -> None:
        self.interval = interval
        self.lease = lease
        self.pending: PendingWork = pending
        self.advance(Fence(lease.sequencer, CommitNumber(0)))

    def advance(self, fence: Fence) -> None:
        self.fence = fence
        # Numbers rise by exactly 1: a gap would hide a lost commit of the same sequencer (I4).
        self.next_fence = Fence(fence.sequencer, CommitNumber(fence.commit_number + 1))

    def is_due(self, now: WallTimeMicros, mark: Callable[[str, float], EventTimeMicros]) -> bool:
        """Return True if a timer fires now; ``mark`` returns a computation's input watermark at a percentile."""
        pending, computation = self.pending, self.interval.computation
        if pending.next_wall_timer is not None and pending.next_wall_timer <= now:
            return True
        if pending.next_event_timer is not None and pending.next_event_timer <= mark(computation, EXACT):
            return True
        timers = pending.next_percentile_timers.items()
        return bool(timers) and any(at <= mark(computation, percentile) for percentile, at in timers)


def refuse_claimed(positions: Mapping[str, int], pipeline: str, computations: Iterable[str]) -> None:
    for name in sorted(computations):
        rival = conflicting_pipeline(positions, pipeline, name)
        if rival is not None:
            raise InvalidError(
                "the computation's rows belong to another pipeline of this store: choose another name, or, if the "
                "pipeline has a new one, say the former in renamed_from= of the pipeline",
                computation=name,
                pipeline=pipeline,
                belongs_to=rival,
            )


def claims_of(
    store: Store, topology: Topology, names: frozenset[str], moved: frozenset[str]
) -> dict[str, int]:
    """Return the positions that the commit that takes intervals records about their computations.

    ``moved`` are computations that receive the rows of others, which have scoped ids already.
    """
    pipeline, positions = topology.name, store.committer.snapshot.txns
    refuse_claimed(positions, pipeline, names)
    claims = {AppId.CLAIM.of(name): pipeline_number(pipeline) for name in sorted(names)}
    claims |= store.lineage.unrecorded_location(store.path)
    claims |= unrecorded_ensemble(store.leases, positions, store.committer.snapshot.version + 1)
    for name in sorted((names & topology.computations.keys()) - moved):
        stream = topology.bare_stream(name)
        if stream is not None and AppId.BARE_IDS.of(name) not in positions:
            claims[AppId.BARE_IDS.of(name)] = pipeline_number(stream)
        slack = AppId.ID_SLACK.of(name)
        if stream is not None:
            claims[slack] = id_slack_position(positions.get(slack), topology.id_slack_us(name))
    return claims | state_records(topology, store.committer.snapshot, names)


def sequencers_before(
    snapshot: Snapshot,
    intervals: Iterable[Interval],
    replaced: Collection[Interval],
    above: Mapping[Interval, Interval],
) -> dict[Interval, Sequencer]:
    """Return the sequencer that the new lease of each interval must exceed.

    Otherwise the fence could be lower than a former owner's, whose late writes would then pass.

    ``intervals`` take over the keys of ``replaced``, and by interval the rows of ``above``.
    """
    wanted = {interval: _stored_sequencer(snapshot.fence_of(interval)) for interval in intervals}
    former = [*above.items(), *((by, one) for by in wanted for one in replaced if one.overlaps(by))]
    for interval, one in former:
        wanted[interval] = max(wanted[interval], _stored_sequencer(snapshot.fence_of(one)))
    return wanted


def _stored_sequencer(fence: Fence | None) -> Sequencer:
    return Sequencer(0) if fence is None else fence.sequencer


_POLL_MS: Final = 50.0
_WAIT_MS_MAX: Final = 10_000.0
# A service that was away for a minute costs at most a quarter of a minute more.
_WAITED_SHARE: Final = 0.25
_Result = TypeVar("_Result")


def wait_ms(waited_ms: float, chance: float) -> float:
    """Return how long to wait before the next try, after ``waited_ms`` of an outage; ``chance`` is in [0, 1).

    Example:
        >>> [wait_ms(waited, 0.5) for waited in (0, 1_000, 8_000, 600_000)]
        [50.0, 187.5, 1500.0, 7500.0]
    """
    # Jittered, so that processes that lost a service together do not return to it together.
    return max(min(waited_ms * _WAITED_SHARE, _WAIT_MS_MAX) * (0.5 + chance / 2), _POLL_MS)


class ServiceRetry:
    """Retries while ZooKeeper or the object store is unavailable, each `run` for at most ``timeout_ms``.

    Any thread may `end` it. ``waits`` is the user of the services, for the log.
    """

    def __init__(
        self, clock: Clock, timeout_ms: float, rng: Rng | None = None, waits: str = "this process"
    ) -> None:
        self._clock = clock
        self._timeout_ms = timeout_ms
        self._rng = rng
        self._outage = Outage(waits, clock)
        self._ended = False

    def end(self) -> None:
        """Stop retrying: from now on `run` raises the next error at once, even where it is already waiting."""
        self._ended = True

    def run(self, action: Callable[[], _Result], meanwhile: Callable[[], None] | None = None) -> _Result:
        """Call ``action`` until no service is unavailable; return its result.

        It must be safe to repeat: it first reads back what its last call left unknown. The waits grow, unless
        ``meanwhile``, called before each retry, says that ``action`` asks no service and another part tells of the outage.
        """
        deadline_us = self._clock.monotonic_us() + self._timeout_ms * 1_000
        was_away = False
        while True:
            try:
                result = action()
            except (OutcomeUnknownError, UnavailableError) as error:
                if self._ended or self._clock.monotonic_us() > deadline_us:
                    raise
                cause = error
            else:
                # Of a service that this action has missed: another one may succeed without it.
                if was_away:
                    self._outage.back()
                return result
            if meanwhile is None:
                was_away = True
                self._outage.away(cause)
                self._wait((deadline_us - self._clock.monotonic_us()) / 1_000)
            else:
                meanwhile()
                self._clock.sleep_ms(_POLL_MS)

    def _wait(self, left_ms: float) -> None:
        waited_ms = self._timeout_ms - left_ms
        chance = 0.0
        # The first tries burden no service, and draw no randomness.
        if self._rng is not None and waited_ms * _WAITED_SHARE > _POLL_MS:
            chance = self._rng.random()
        # One more try follows when the time is over.
        wait = min(wait_ms(waited_ms, chance), max(left_ms, 0.0) + 1.0)
        # In short sleeps, so that the end of the run need not wait for the next try.
        while wait > 0 and not self._ended:
            self._clock.sleep_ms(min(wait, _POLL_MS))
            wait -= _POLL_MS


KeepUndelivered: TypeAlias = Callable[[frozenset[str], Fence], RowFile | None]
"""Writes the undelivered productions of computations to a file of the control interval, under a fence."""

# Cuts by a former owner while a new one takes the keys; each cut needs its fences, so it is rarely more than one.
_CUTS_MEANWHILE_MAX: Final = 8

# A standby waits while the owner lives, in effect indefinitely. An owner does not wait for a successor that fenced it.
_STANDBY_MS: Final = 10 * 365 * 86_400_000


class Ownership:
    """Takes, fences and releases the intervals of one pipeline."""

    control: OwnedInterval  # the driver's own, part of every commit

    def __init__(
        self,
        store: Store,
        topology: Topology,
        *,
        clock: Clock,
        intervals: int,  # of a computation that declares no number
        has_own_intervals: bool = False,  # the caller has given that number
        on_held: OnHeld,
        pause_timeout_ms: float,  # how long to wait for ZooKeeper or the object store to come back
        rng: Rng | None = None,  # lets the tries of several processes come at different times
        on_taken: Callable[[CommitRequest, Committed], None] | None = None,
        keep_undelivered: KeepUndelivered | None = None,
        row_files: Objects | None = None,  # where small row files are read; by default the store
    ) -> None:
        self._store = store
        self._row_files = row_files or store.objects
        self.committer: Committer = store.committer
        self._topology = topology
        self._intervals = intervals
        self._has_own_intervals = has_own_intervals
        self._on_held = on_held
        waits = f"pipeline {topology.title}"
        self.patience: ServiceRetry = ServiceRetry(clock, pause_timeout_ms, rng, waits)
        self._on_taken = on_taken
        self._keep_undelivered = keep_undelivered
        self.owned: dict[Interval, OwnedInterval] = {}
        self.by_computation: dict[str, tuple[OwnedInterval, ...]] = {}  # in key order
        self._control_interval = control_interval(topology.name)

    def of(self, computation: str) -> tuple[OwnedInterval, ...]:
        return self.by_computation.get(computation, ())

    def next_wall_timer(self) -> WallTimeMicros | None:
        times = (owned.pending.next_wall_timer for owned in self.owned.values())
        return min((at for at in times if at is not None), default=None)

    def next_event_timer(self, after: EventTimeMicros) -> EventTimeMicros | None:
        """Return the earliest event time after ``after`` that an interval waits for."""
        times: list[EventTimeMicros] = []
        for owned in self.owned.values():
            pending = owned.pending
            times += pending.next_percentile_timers.values()
            if pending.next_event_timer is not None:
                times.append(pending.next_event_timer)
        return min((at for at in times if after < at < INSTANT_MAX_US), default=None)

    def open(self, *, is_current: bool = False) -> None:
        """Take every interval that the table has for this pipeline, and the control interval.

        Renamed and dropped computations leave the table before this returns. See `plan_evolution` for refused changes.
        ``is_current`` means that the caller has just followed the log.
        """
        if not is_current:
            self.committer.refresh()
        # Before any lease is taken, so that a refused pipeline disturbs no running one.
        new_names = frozenset(self._plan_evolution(self._topology).renames.values())
        self._take_known(new_names)
        try:
            self._take_rest()
        except InvalidError:
            self.close()
            raise
        if changed := changed_fingerprints(self._topology, self.committer.snapshot):
            self.record(changed)

    def check_update(self, topology: Topology) -> None:
        """Refuse a changed pipeline that could not open the store; nothing is written and no lease is touched."""
        self.check_owner()
        refuse_claimed(self.committer.snapshot.txns, topology.name, topology.computations)
        self._plan_evolution(topology)

    def update(self, topology: Topology) -> TableVersion:
        """Continue with a changed pipeline, between two supersteps, and return the version of the last commit.

        The leases on kept intervals stay held. Intervals of computations that it no longer has are released,
        and all others are taken, as `open` takes them. The last commit names in the log the pipeline that runs from
        it on. `check_update` must have accepted ``topology``.
        """
        self.committer.refresh()
        former, self._topology = self._topology, topology
        # No superstep runs, so no write of this process can follow the release.
        for interval in [one for one in self.owned if one != self._control_interval]:
            if interval.computation not in topology.computations:
                self._store.leases.release(self.owned.pop(interval).lease)
        self._index()
        reach("update.leases_released")
        self._take_rest()
        if topology.percentiles != former.percentiles:
            # Summaries are by percentile, so they lack the new ones.
            self._scan([*self.owned])
        kept = frozenset(one.computation for one in self.owned if one != self._control_interval)
        committed = self._commit_taken(
            CommitRequest(
                kind="topology",
                writes=(self._write(self._control_interval),),
                positions=claims_of(self._store, topology, kept, frozenset())
                | new_fingerprints(topology, self.committer.snapshot)
                | changed_fingerprints(topology, self.committer.snapshot),
                metadata=definition_metadata(topology),
            )
        )
        reach("update.committed")
        return committed.version

    def _take_rest(self) -> None:
        """Take all other intervals of the table, and let rows follow the changes of the pipeline.

        A former owner may have cut keys until it was fenced; no process can after that.
        """
        evolution = self._plan_evolution(self._topology)
        new_names = frozenset(evolution.renames.values())
        missed = [interval for interval in self._known(new_names) if interval not in self.owned]
        if missed:
            self._take(missed)
        if evolution:
            self._evolve(evolution)

    def _take_known(self, new_names: Collection[str]) -> None:
        """Take the control interval and the table's; if a former owner cuts them meanwhile, take the replacements."""
        for _ in range(_CUTS_MEANWHILE_MAX):
            try:
                self._take([self._control_interval, *self._known(new_names)])
            except ConflictError:
                live = self.committer.refresh().live_intervals()
                if self.owned.keys() - {self._control_interval} <= live.keys():
                    # All intervals still exist, so the conflict is no cut of a former owner.
                    raise
                self.close()
            else:
                return
        raise ConflictError("another process keeps cutting the keys", pipeline=self._topology.name)

    def _plan_evolution(self, topology: Topology) -> Evolution:
        snapshot = self.committer.snapshot
        intervals = self._intervals if self._has_own_intervals else None
        evolution = plan_evolution(topology, snapshot, intervals)
        check_states(topology, snapshot, evolution, self._store.objects)
        return evolution

    def _evolve(self, evolution: Evolution) -> None:
        """Move or remove the rows of computations that the pipeline no longer has, in one commit."""
        # All their intervals are fenced first, so that no write of a former owner lands after the move.
        leaving = intervals_of(self.committer.snapshot, evolution.leaving)
        coming = {
            replace(former, computation=evolution.renames[former.computation]): former
            for former in leaving
            if former.computation in evolution.renames
        }
        self._take([*leaving, *coming], above=coming, is_scanned=False)
        kept = None
        if evolution.drops and self._keep_undelivered is not None:
            # Consumers still wait for these productions, and the rows that hold them go with the commit.
            kept = self._keep_undelivered(evolution.drops, self.control.next_fence)
        writes = [self._write(self._control_interval, *([] if kept is None else [kept]))]
        writes += [self._write(interval) for interval in (*leaving, *coming)]
        snapshot = self.committer.snapshot
        self._commit_taken(evolution_request(self._topology, snapshot, evolution, writes))
        # Released only after the commit, otherwise another process could take an interval whose rows are about to move.
        for interval in leaving:
            self._store.leases.release(self.owned.pop(interval).lease)
        self._scan(list(coming))
        self._index()

    def create(self, node: ComputationNode, sample: pa.Array) -> None:
        """Cut the keys of a computation that has never run, and take the intervals."""
        # Before any lease is taken: a new owner may hold one on the same interval.
        self.check_owner()
        cuts = boundaries_of(sample, node.intervals or self._intervals)
        next_version = self.committer.snapshot.version + 1
        of_runner = number_of_runner(self._intervals) if self._has_own_intervals else 0
        declared = {AppId.DECLARED_INTERVALS.of(node.name, node.intervals or of_runner): next_version}
        self._take(list(intervals_from_boundaries(node.name, cuts)), records=declared)

    def recut(self, cut: Cut, records: Mapping[str, int]) -> None:
        """Split an interval, or merge neighbours (MillWheel §7.1).

        One commit fences the replaced and the new intervals, under higher sequencers, so a process that believes to
        own any of the former is fenced. Files stay where they are, and are read by range.
        """
        # Before any lease is taken: a new owner may hold one on the same interval.
        self.check_owner()
        self._take(cut.by, cut=cut, records=records)

    def record(self, positions: Mapping[str, int]) -> None:
        self.commit(
            CommitRequest(kind="record", writes=(self._write(self._control_interval),), positions=positions)
        )

    def check_owner(self) -> None:
        """Check that this process owns the pipeline, by its leases and by the fence in the table."""
        self.wait_until_held()
        # A lease may be lost without notice, but the fence in the table cannot: it is part of the rival's take-over.
        stored = self.committer.refresh().fence_of(self._control_interval)
        if stored != self.control.fence:
            raise FencedError(
                "another process has taken the pipeline", stored=stored, mine=self.control.fence
            )

    def check_leases(self) -> None:
        """Raise `FencedError` if a lease is known to be lost, without a call to a service."""
        for owned in [*self.owned.values()]:
            if owned.lease.state is LeaseState.LOST:
                owned.lease.check()

    def close(self) -> None:
        for owned in self.owned.values():
            self._store.leases.release(owned.lease)
        self.owned.clear()
        self.by_computation.clear()
        reach("lease.released")

    def commit(self, request: CommitRequest) -> Committed:
        """Commit, and advance the fences of the intervals that it writes.

        Waits while a lease is suspended or the outcome is unknown, up to the pause timeout.
        """

        def attempt() -> Committed:
            self.wait_until_held()
            # Equal requests are one commit: a retry reads back the outcome of the last attempt before it writes.
            return self.committer.commit(request)

        committed = self.patience.run(attempt)
        for write in request.writes:
            self.owned[write.interval].advance(write.fence)
        return committed

    def wait_until_held(self) -> None:
        """Wait while ZooKeeper is unavailable; raise `FencedError` if a lease is lost."""
        for owned in self.owned.values():
            if owned.lease.state is not LeaseState.HELD:
                self.patience.run(self._check_all, self._store.revive_zookeeper)
                return

    def _check_all(self) -> None:
        for owned in self.owned.values():
            owned.lease.check()

    def _known(self, new_names: Collection[str]) -> list[Interval]:
        names = self._topology.computations.keys() - new_names
        return [one for one in self.committer.snapshot.live_intervals() if one.computation in names]

    def _write(self, interval: Interval, *added: RowFile) -> IntervalWrite:
        return IntervalWrite(interval=interval, fence=self.owned[interval].next_fence, added=added)

    def _commit_taken(self, request: CommitRequest) -> Committed:
        committed = self.commit(request)
        if self._on_taken is not None:
            self._on_taken(request, committed)
        return committed

    def _take(
        self,
        intervals: Sequence[Interval],
        *,
        records: Mapping[str, int] | None = None,
        above: Mapping[Interval, Interval] | None = None,
        cut: Cut | None = None,
        is_scanned: bool = True,
    ) -> None:
        """Take leases on intervals and fence them, and record ``records`` in the same commit.

        ``above`` maps intervals to the former ones whose rows they receive and whose sequencers they must exceed. The
        intervals that a ``cut`` replaces are fenced too, and released.
        """
        # Claims and sequencers come from the version that the caller has just read or committed: an older one could miss
        # a rival's commit.
        snapshot = self.committer.snapshot
        names = frozenset(
            interval.computation for interval in intervals if interval != self._control_interval
        )
        moved = frozenset(interval.computation for interval in above or ())
        claims = claims_of(self._store, self._topology, names, moved) | dict(records or {})
        owned_before = self.owned.get(self._control_interval)
        replaced = () if cut is None else cut.replaced
        wanted = sequencers_before(snapshot, intervals, replaced, above or {})
        timeout_ms = TIMEOUT_MS
        if self._on_held == "wait" and owned_before is None:
            # Arrow imports pandas when it first sees a numpy array: half a second, which a standby has now.
            pa.array(np.empty(0))
            timeout_ms = _STANDBY_MS
        leases = self._store.leases.take_all(wanted, on_held=self._on_held, timeout_ms=timeout_ms)
        reach("lease.taken")
        writes = []
        for interval, lease in zip(intervals, leases, strict=True):
            owned = self.owned[interval] = OwnedInterval(interval, lease, PendingWork())
            if interval == self._control_interval:
                self.control = owned
            writes.append(IntervalWrite(interval=interval, fence=owned.fence))
        if owned_before is not None:
            # The control interval's fence proves that this process still owns the pipeline.
            writes.append(self._write(self._control_interval))
        writes += [self._write(one) for one in replaced]
        metadata: Mapping[str, JsonValue] = {}
        if replaced:
            metadata = {"replaced": [one.app_id for one in replaced]}
        elif self._control_interval in intervals:
            # A new owner records which pipeline it runs.
            metadata = definition_metadata(self._topology)
            claims |= new_fingerprints(self._topology, snapshot)
        request = CommitRequest(
            kind="fence" if cut is None else cut.kind,
            writes=tuple(writes),
            positions=claims,
            metadata=metadata,
        )
        # From this commit on every late write of a former owner fails. A lease alone could not stop one.
        self._commit_taken(request)
        reach("lease.fenced")
        # Released only after the fence, otherwise another process could take an interval that is about to vanish.
        for one in replaced:
            self._store.leases.release(self.owned.pop(one).lease)
        if is_scanned:
            # The scan is final only now: no write of a former owner can land after the fence.
            self._scan(intervals)
        self._index()

    def _scan(self, intervals: Sequence[Interval]) -> None:
        fenced = self.committer.snapshot
        files = {one: fenced.files_of(one) for one in intervals if one != self._control_interval}

        def scan(interval: Interval) -> PendingWork:
            own, node = files[interval], self._topology.computations.get(interval.computation)
            if node is not None and StateLayout.of(node.computation).adds:
                # Rows that only add have no timers.
                return PendingWork()
            if sum(file.size_bytes for file in own) < LARGE_BYTES:
                # Its first superstep reads it once more.
                return scan_interval(self._row_files, interval, own, self._topology.percentiles)
            recorded = recorded_work(interval, own, self._topology.percentiles)
            if recorded is not None:
                return recorded
            # It would crowd out other copies.
            objects = without_keeping(self._row_files)
            return scan_interval(objects, interval, own, self._topology.percentiles)

        if (
            len(files) > 1
            and sum(file.size_bytes for own in files.values() for file in own) > _SCANNED_ALONE_BYTES
        ):
            # Arrow decodes without Python's lock, so each core reads an interval.
            with ThreadPoolExecutor(min(len(files), os.cpu_count() or 1), "millpond-scan") as threads:
                found = list(threads.map(scan, files))
        else:
            found = list(map(scan, files))
        for interval, pending in zip(files, found, strict=True):
            self.owned[interval].pending = pending
        reach("recovery.scanned")

    def _index(self) -> None:
        self.by_computation = {
            name: tuple(
                self.owned[interval] for interval in sorted(self.owned) if interval.computation == name
            )
            for name in self._topology.computations
        }


class OwnedNames:
    """An `Rng` whose tokens belong to one owner of a pipeline, so that its file names do too.

    A process that restarts with the same seed draws the same tokens, and would overwrite files that it left
    uncommitted, or fail on them. So each token is hashed with the pipeline and the sequencer of its lease: no two
    owners share both, and a repeated run draws the same names. ``sequencer`` is called at every draw.

    Example:
        >>> from millpond.testing.fixtures.determinism import SeededRng
        >>> first, second = (OwnedNames(SeededRng(1), "p", lambda n=n: n) for n in (1, 2))
        >>> first.token() == second.token()
        False
    """

    def __init__(self, rng: Rng, pipeline: str, sequencer: Callable[[], Sequencer]) -> None:
        self._rng = rng
        self._pipeline = pipeline
        self._sequencer = sequencer

    def random(self) -> float:
        return self._rng.random()

    def token(self) -> str:
        drawn = f"{self._pipeline}\n{self._sequencer()}\n{self._rng.token()}"
        return hashlib.sha256(drawn.encode("utf-8", "surrogatepass")).hexdigest()[:32]
