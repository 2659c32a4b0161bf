"""Takes a sink back: undoes the deliveries of supersteps that the store does not have.

A store that was restored from an older copy runs these supersteps again, and their results may differ. One commit
removes the files that they added, restores those that they replaced, and sets the sink's record to the store's
superstep. Files of other sinks and other writers stay; if those changed the same files, nothing is done. The call
can be repeated after a crash.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from millpond.executor.sinks.record import SinkRecord
from millpond.statestore.app_ids import SINK_PREFIX, app_id_parts
from millpond.statestore.errors import ConflictError, DataError
from millpond.statestore.identity.lineage import Lineage
from millpond.statestore.integrity.table_history import Change, read_histories
from millpond.statestore.log.action import Action, Add, Remove, Txn
from millpond.statestore.log.log import Log
from millpond.statestore.log.plan import CommitDraft
from millpond.statestore.log.snapshot import Snapshot, load
from millpond.statestore.log.writer import LogWriter
from millpond.statestore.types import Clock, Objects, Rng, Superstep, TableVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class TakenBack:
    """How far one sink was taken back.

    Attributes:
        pipeline: the pipeline's name.
        name: the sink's name.
        delivered: the last superstep in the table before.
        superstep: the last superstep in the table now.
        files: how many files were removed.
    """

    pipeline: str
    name: str
    delivered: int
    superstep: int
    files: int


def take_back_sink(
    objects: Objects, lineage: Lineage, supersteps: Mapping[str, Superstep], clock: Clock, rng: Rng
) -> tuple[TakenBack, ...]:
    """Undo what a store's sinks have written to a table after the store's last superstep.

    Args:
        objects: the table's folder.
        lineage: the store's lineage.
        supersteps: by pipeline, the store's last superstep.
        clock: for timestamps.
        rng: the source of the writer's name.

    Returns:
        The sinks that were taken back; none if the table is not ahead of the store.

    Raises:
        ConflictError: another writer has changed the same files since, or has just committed.
        DataError: the table's log does not reach back that far, or files to be restored are gone.
        UnavailableError: the table is unavailable.
        OutcomeUnknownError: it may or may not have been done; repeat the call.
    """
    log = Log(objects)
    snapshot = load(log)
    done = []
    for record in _records_of(lineage, snapshot.txns, supersteps):
        plan = _plan(log, snapshot, record, supersteps[record.pipeline])
        if plan is not None:
            writer = LogWriter(log, snapshot, clock, rng)
            _check_files(objects, plan.restored)
            writer.write(plan)
            snapshot = writer.snapshot
            done.append(plan.result)
    return tuple(done)


def _records_of(
    lineage: Lineage, txns: Mapping[str, int], supersteps: Mapping[str, Superstep]
) -> Sequence[SinkRecord]:
    parts = [app_id_parts(app_id, SINK_PREFIX) for app_id in txns if app_id.startswith(SINK_PREFIX)]
    sinks = {(pipeline, name) for store_id, pipeline, name, *_ in parts if store_id == lineage.store_id}
    return [SinkRecord(lineage, *sink) for sink in sorted(sinks) if sink[0] in supersteps]


def _plan(log: Log, snapshot: Snapshot, record: SinkRecord, superstep: Superstep) -> _TakeBackPlan | None:
    limits = record.limits(snapshot.txns, superstep)
    ahead = {app_id: limit for app_id, limit in limits.items() if snapshot.txns[app_id] > limit}
    if not ahead:
        return None
    histories = read_histories(log, None)
    newest = histories[0] if histories else None
    if newest is None or newest.newest != snapshot.version:
        raise DataError("the log of the sink's table cannot be read", store=log.objects.url)
    undone = _undone(newest.changes, ahead, log.objects.url)
    added = {add.path: add for change in undone for add in change.added}
    removed = {add.path: add for change in undone for add in change.removed}
    obsolete = [add for path, add in added.items() if path not in removed]
    restored = [add for path, add in removed.items() if path not in added]
    touched = [add.path for add in obsolete if snapshot.file(add.path) is None]
    touched += [add.path for add in restored if snapshot.file(add.path) is not None]
    if touched:
        raise ConflictError(
            "another writer has changed the same files of the sink's table since: write to a new sink",
            store=log.objects.url,
            path=touched[0],
        )
    result = TakenBack(
        pipeline=record.pipeline,
        name=record.name,
        delivered=max(snapshot.txns[app_id] for app_id in ahead),
        superstep=min(ahead.values()),
        files=len(obsolete),
    )
    return _TakeBackPlan(
        result=result,
        obsolete=tuple(obsolete),
        restored=tuple(restored),
        txns=dict(sorted(ahead.items())),
        read_at=snapshot.version,
    )


def _undone(changes: Sequence[Change], ahead: Mapping[str, int], url: str) -> list[Change]:
    """The deliveries of later supersteps, newest first."""
    undone, left = [], set(ahead)
    for change in reversed(changes):
        moved = dict(change.txns_before)
        if left & moved.keys():
            undone.append(change)
            left -= {app_id for app_id in left & moved.keys() if (moved[app_id] or 0) <= ahead[app_id]}
        if not left:
            return undone
    raise DataError(
        "the log of the sink's table does not reach back that far: write to a new sink", store=url
    )


def _check_files(objects: Objects, restored: Sequence[Add]) -> None:
    gone = {add.path for add in restored} - set(objects.list("")) if restored else set()
    if gone:
        raise DataError(
            "files that the sink replaced have been vacuumed: write to a new sink",
            store=objects.url,
            path=min(gone),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _TakeBackPlan:
    result: TakenBack
    obsolete: tuple[Add, ...]
    restored: tuple[Add, ...]
    txns: Mapping[str, int] = field(default_factory=dict)
    read_at: TableVersion

    def build(self, snapshot: Snapshot, now_ms: int) -> CommitDraft | None:
        if all(snapshot.txns.get(app_id, -1) == at for app_id, at in self.txns.items()):
            return None
        if snapshot.version != self.read_at:
            raise ConflictError(
                "the table has changed since it was read; repeat the call", version=snapshot.version
            )
        removes = [
            Remove(
                path=add.path,
                deletion_time_ms=now_ms,
                partition_values=add.partition_values,
                size_bytes=add.size_bytes,
            )
            for add in self.obsolete
        ]
        txns = [Txn(app_id=app_id, version=at, updated_ms=now_ms) for app_id, at in self.txns.items()]
        return CommitDraft(
            operation="MILLPOND TAKE BACK",
            actions=(*txns, *removes, *self.restored),
            fields={"kind": "take_back", "sink": self.result.name, "superstep": self.result.superstep},
        )

    def admit(self, winner: tuple[Action, ...]) -> None:
        """Accept every commit here: `build` refuses any version except the one that was read."""
