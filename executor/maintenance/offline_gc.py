"""Offline maintenance: compaction and garbage collection of a store whose pipelines are stopped.

A running pipeline compacts its own files and is skipped; the log and removed files are collected either way, behind the
same horizons.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from millpond.executor.inputs.positions import (
    claimed_by,
    id_slack_of,
    percentile_watermark_app_id,
    superstep_of,
)
from millpond.executor.maintenance.policy import UpkeepPolicy
from millpond.executor.ownership.ownership import OwnedNames
from millpond.executor.pipeline.nodes import control_interval
from millpond.gc.collectors import CollectionRound, Owned, collect_garbage
from millpond.gc.compaction import Compaction, CompactionRules, compact_files, plan_compaction
from millpond.gc.survey import Collection
from millpond.statestore.app_ids import supersteps_of
from millpond.statestore.catalog.catalog import Catalog
from millpond.statestore.errors import ConflictError, InvalidError, UnavailableError
from millpond.statestore.interval import Interval
from millpond.statestore.leases.lease import Lease, exclusive
from millpond.statestore.log.rules import CommitRequest, IntervalWrite
from millpond.statestore.log.snapshot import Snapshot
from millpond.statestore.rows.record_ids import ID_SLACK_US, IdRetention
from millpond.statestore.rows.row import Fence
from millpond.statestore.store import Store
from millpond.statestore.types import (
    TIME_MIN_US,
    Clock,
    CommitNumber,
    EventTimeMicros,
    Rng,
    Sequencer,
    Superstep,
)

_LOG = logging.getLogger("millpond")


@dataclass(frozen=True, slots=True, kw_only=True)
class _HeldPipeline:
    """A pipeline whose intervals are held."""

    pipeline: str
    superstep: Superstep
    fences: dict[Interval, Fence]


def collect_offline(
    store: Store, clock: Clock, rng: Rng, policy: UpkeepPolicy, *, dry_run: bool = False
) -> CollectionRound:
    """Compact all stopped pipelines, then run one round of garbage collection; a dry run only reads.

    Raises:
        ConflictError: another process is repairing the store or collecting its garbage offline.
        FencedError: this process slept for longer than its session; a repetition does no harm.
    """
    if dry_run:
        return _collect(store, clock, rng, policy, check=None, dry_run=True)
    # A repair may restore a file that is judged to be garbage here, so the two exclude each other.
    with exclusive(store.leases) as hold:
        return _collect(store, clock, rng, policy, check=hold.check, dry_run=False)


def _collect(
    store: Store,
    clock: Clock,
    rng: Rng,
    policy: UpkeepPolicy,
    *,
    check: Callable[[], None] | None,
    dry_run: bool,
) -> CollectionRound:
    # A dry run sees one snapshot; otherwise each commit below makes a new one.
    stored = store.snapshot() if dry_run else None
    pipelines = sorted(supersteps_of((stored or store.committer.refresh()).txns))
    compacted: list[Collection] = []
    owned: dict[Interval, Owned] = {}
    with _held(store, pipelines, stored) as (held, running):
        for pipeline in held:
            compacted += _compact_pipeline(store, clock, rng, pipeline, policy, stored)
            owned |= {
                interval: Owned(fence.sequencer, pipeline.superstep)
                for interval, fence in pipeline.fences.items()
            }
        catalog = _catalog_to_look_at(store) if dry_run else store.catalog
        collected = collect_garbage(
            store.objects,
            catalog,
            clock,
            retention=policy.kept,
            owned=owned,
            # A dry run has no leases, and deletes nothing.
            announce=None if dry_run else store.leases.high_water.announce_boundary,
            check=check,
            dry_run=dry_run,
            # The next round may be far away.
            at_once=True,
        )
    left = tuple(f"pipeline {name} is running and compacts its own files" for name in running)
    compactions = Collection(
        kind="compactions",
        paths=tuple(path for compaction in compacted for path in compaction.paths),
        made=tuple(path for compaction in compacted for path in compaction.made),
        freed_bytes=sum(compaction.freed_bytes for compaction in compacted),
        skipped=left,
    )
    return replace(collected, collections=(compactions, *collected.collections))


def _catalog_to_look_at(store: Store) -> Catalog | None:
    try:
        return store.catalog
    except (InvalidError, UnavailableError) as error:
        _LOG.info("readers and savepoints of the catalog are not looked at: %s", error)
        return None


@contextmanager
def _held(
    store: Store, pipelines: Sequence[str], stored: Snapshot | None
) -> Iterator[tuple[list[_HeldPipeline], list[str]]]:
    """Yield the stopped pipelines, with their leases held, and the names of the running ones; a dry run holds none."""
    held: list[_HeldPipeline] = []
    running: list[str] = []
    leases: list[Lease] = []
    if stored is not None:
        yield [_as_stored(stored, pipeline) for pipeline in pipelines], running
        return
    try:
        for pipeline in pipelines:
            snapshot = store.committer.snapshot
            known = {interval: snapshot.fence_of(interval) for interval in _intervals_of(snapshot, pipeline)}
            above = {
                interval: Sequencer(0) if fence is None else fence.sequencer
                for interval, fence in known.items()
            }
            try:
                taken = store.leases.take_all(above, on_held="refuse")
            except ConflictError:
                running.append(pipeline)
                continue
            leases += taken
            # Without this commit a former owner that has lost its leases unnoticed could still commit.
            fences = {lease.interval: Fence(lease.sequencer, CommitNumber(0)) for lease in taken}
            writes = tuple(
                IntervalWrite(interval=interval, fence=fence) for interval, fence in fences.items()
            )
            store.committer.commit(CommitRequest(kind="fence", writes=writes))
            superstep = superstep_of(store.committer.snapshot.txns, pipeline)
            held.append(_HeldPipeline(pipeline=pipeline, superstep=superstep, fences=fences))
        yield held, running
    finally:
        # Released at once: a pipeline that starts now must not wait for this process's session to expire.
        for lease in leases:
            store.leases.release(lease)


def _intervals_of(snapshot: Snapshot, pipeline: str) -> list[Interval]:
    claimed = claimed_by(snapshot.txns, pipeline)
    own = [interval for interval in snapshot.live_intervals() if interval.computation in claimed]
    return [control_interval(pipeline), *own]


def _as_stored(snapshot: Snapshot, pipeline: str) -> _HeldPipeline:
    none = Fence(Sequencer(1), CommitNumber(0))
    fences = {interval: snapshot.fence_of(interval) or none for interval in _intervals_of(snapshot, pipeline)}
    return _HeldPipeline(pipeline=pipeline, superstep=superstep_of(snapshot.txns, pipeline), fences=fences)


def _compact_pipeline(
    store: Store, clock: Clock, rng: Rng, owned: _HeldPipeline, policy: UpkeepPolicy, stored: Snapshot | None
) -> list[Collection]:
    snapshot = stored or store.committer.snapshot
    planned = [
        plan_compaction(
            snapshot.files_of(interval),
            interval,
            before=owned.superstep,
            policy=policy.compaction,
            everything=True,
        )
        for interval in owned.fences
    ]
    compactions = [compaction for compaction in planned if compaction is not None]
    if stored is not None:
        return [
            Collection(kind="compactions", paths=tuple(file.path for file in compaction.files))
            for compaction in compactions
        ]
    # One commit each: offline no superstep waits, and an interruption loses little.
    return [_compact(store, clock, rng, owned, compaction, policy) for compaction in compactions]


def _compact(
    store: Store, clock: Clock, rng: Rng, owned: _HeldPipeline, compaction: Compaction, policy: UpkeepPolicy
) -> Collection:
    last = owned.fences[compaction.interval]
    ids = _ids_to_keep(store, owned.pipeline, compaction.interval.computation, clock)
    rules = CompactionRules(pending_from=owned.superstep, ids=ids)
    names = OwnedNames(rng, owned.pipeline, lambda: last.sequencer)
    compacted = compact_files(
        store.objects,
        compaction,
        rules,
        fence=last,
        token=names.token(),
        row_format=store.row_format,
        memory_bytes_max=policy.compaction.memory_bytes_max,
    )
    # The next number under the fence that `_held` committed: a pipeline that took over since refuses it.
    fence = Fence(last.sequencer, CommitNumber(last.commit_number + 1))
    request = CommitRequest(
        kind="compaction", writes=(compacted.write(fence),), metadata={"pipeline": owned.pipeline}
    )
    store.committer.commit(request)
    owned.fences[compaction.interval] = fence
    made = () if compacted.file is None else (compacted.file.path,)
    return Collection(
        kind="compactions",
        paths=tuple(file.path for file in compaction.files),
        made=made,
        freed_bytes=compacted.freed_bytes,
    )


def _ids_to_keep(store: Store, pipeline: str, computation: str, clock: Clock) -> IdRetention:
    positions = store.committer.snapshot.txns
    name = percentile_watermark_app_id(pipeline, "computation", computation)
    watermark = EventTimeMicros(positions.get(name, TIME_MIN_US))
    slack_us = id_slack_of(positions, computation)
    return IdRetention.of(watermark, clock.now_us(), ID_SLACK_US if slack_us is None else slack_us)
