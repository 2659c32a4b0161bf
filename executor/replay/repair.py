"""Repair and rewind: one fenced commit that restores a version of a store.

Everything is restored together: rows and input positions, so a runner reads later input again, if its source still
has it. Two numbers do not fall. Fences rise, through leases taken for the repair, so a former owner can no longer
write. Supersteps rise above every earlier one, so a sink that has the outputs of undone supersteps does not mistake
their successors for repetitions. Rows with productions undelivered at the restored version are therefore rewritten
under the new superstep.

A log that can be read to its end stays, and older versions stay readable. Otherwise the repair's commit holds the whole
state, a checkpoint repeats it, and the files of the old log are set aside. A repair killed at any moment leaves a
store that can be repaired again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Final
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.compute as pc

from millpond.executor.inputs.positions import claimed_by
from millpond.executor.ownership.ownership import OwnedNames
from millpond.executor.pipeline.nodes import control_interval
from millpond.executor.replay.repair_plan import RepairPlan
from millpond.statestore.app_ids import RESTORED_APP_ID, SAVEPOINT_RELEASED, AppId, supersteps_of
from millpond.statestore.errors import ConflictError, ObjectMissingError
from millpond.statestore.interval import Interval
from millpond.statestore.leases.lease import Lease, Leases, exclusive
from millpond.statestore.log.action import Action, Add, CommitInfo, JsonValue, Remove, Txn
from millpond.statestore.log.checkpoint import checkpoint_path, write_part
from millpond.statestore.log.commit_file import digest_of, encode
from millpond.statestore.log.files import LiveFile, row_file_to_add
from millpond.statestore.log.log import LOG_FOLDER, Log, commit_path
from millpond.statestore.log.snapshot import RESTORED_VERSION, live_intervals
from millpond.statestore.log.writer import Committed
from millpond.statestore.objects.ranges import put_new
from millpond.statestore.rows.files import read_row_files, write_row_file
from millpond.statestore.rows.row import Fence, pack_fence, unpack_fence
from millpond.statestore.types import (
    TIME_MIN_US,
    Clock,
    CommitNumber,
    Objects,
    Rng,
    Sequencer,
    Superstep,
    TableVersion,
)

SET_ASIDE_FOLDER: Final = "_millpond/set_aside"
"""Copies of the files removed from the log, in one folder per repair."""

_LOST_NAMED_MAX: Final = 100
_RESTARTED: Final = {
    **dict.fromkeys((AppId.TOTAL, AppId.COUNT, AppId.INPUT_ROWS, AppId.INJECTED), 0),
    **dict.fromkeys((AppId.WATERMARK, AppId.LAST_EVENT), int(TIME_MIN_US)),
    AppId.BACKFILL: -1,
    # The newest of these counts, so entries recorded after the restored version must lose.
    **dict.fromkeys((AppId.CODEC, AppId.KEY_COLUMNS, AppId.PIPELINE_NAME), -1),
    **dict.fromkeys((AppId.STATE_COLUMNS, AppId.STATE_VERSION, AppId.FINGERPRINT), -1),
}


def repair_store(
    objects: Objects,
    plan: RepairPlan,
    leases: Leases,
    clock: Clock,
    rng: Rng,
    *,
    then: Callable[[], None] | None = None,
) -> Committed:
    """Carry out a plan, and return its commit.

    ``then`` runs after the commit while the leases are still held, so that no pipeline starts before, for example, the
    checkpoints of the input's queries are rewound.

    Raises:
        ConflictError: a pipeline of the store, another repair or an offline collection is running, or a
            collection removed files that the plan needs. Nothing was changed.
        FencedError: this process was suspended for longer than its session; repair again.
        ObjectExistsError: another process has committed since the plan was made. Nothing was changed.
    """
    with hold_store(plan, leases) as (hold, owners):
        committed = _commit(objects, plan, owners, clock, rng, hold)
        # Before any pipeline can start: a writer compares the log with this mark.
        leases.high_water.advance(committed.version, committed.digest)
        leases.high_water.flush()
        if then is not None:
            then()
    return committed


@contextmanager
def hold_store(plan: RepairPlan, leases: Leases) -> Iterator[tuple[Lease, dict[Interval, Fence]]]:
    """Hold the store exclusively, or raise `ConflictError` if a pipeline, repair or offline collection is running.

    Yields the lock on offline maintenance, and the fences of the leases of every interval.
    """
    # Above both the newest known fence and the restored one, so that no former owner can write.
    fences = {
        one: unpack_fence(max(plan.txns[one.app_id], plan.state.txns.get(one.app_id, 0))).sequencer
        for one in live_intervals(plan.txns)
    }
    with exclusive(leases) as hold:
        taken = leases.take_all(fences, on_held="refuse") if fences else ()
        try:
            yield hold, {lease.interval: Fence(lease.sequencer, CommitNumber(0)) for lease in taken}
        finally:
            for lease in taken:
                leases.release(lease)


def _commit(
    objects: Objects, plan: RepairPlan, owners: Mapping[Interval, Fence], clock: Clock, rng: Rng, hold: Lease
) -> Committed:
    version, now_ms = TableVersion(plan.newest + 1), clock.now_us() // 1_000
    _check_files(objects, plan)
    # Healed files get their original bytes, so this is safe before the commit.
    for path, data in sorted(plan.healed.items()):
        objects.put(path, data)
    supersteps = _next_supersteps(objects, plan)
    live = dict(plan.state.live)
    if plan.is_rollback:
        for path, add in _rewritten_rows(objects, plan, supersteps, owners, version, now_ms, rng):
            del live[path]
            live[add.path] = add
    txns = _transactions(plan, supersteps, owners)
    changes = list(_changes(plan, live, now_ms))
    changes += [Txn(app_id=app_id, version=at, updated_ms=now_ms) for app_id, at in sorted(txns.items())]
    restored: dict[str, JsonValue] = {}
    if plan.is_rollback:
        restored = {"source_offsets": dict(plan.source_offsets), "watermarks": dict(plan.watermarks)}
    info = CommitInfo(
        operation=f"MILLPOND {plan.kind.upper()}",
        timestamp_ms=now_ms,
        parameters={"kind": plan.kind, "restoredVersion": str(plan.state.version)},
        read_version=plan.newest,
        millpond={
            "kind": plan.kind,
            "writer": rng.token(),
            "previous": plan.history.digest if plan.is_readable else "",
            RESTORED_VERSION: int(plan.state.version),
            "lost": list(plan.lost[:_LOST_NAMED_MAX]),
            **restored,
        },
    )
    data = encode([info, *changes])
    # This process may have been suspended until its session ended; then another repair may hold the store.
    hold.check()
    put_new(objects, commit_path(version), data)
    if not plan.is_readable:
        # Readers cannot replay the damaged log, so they must begin with this version.
        actions = tuple(changes)
        path = checkpoint_path(version)
        objects.put(path, write_part(actions, path, digest_of(data)))
        Log(objects).name_checkpoint(version, len(actions))
    # Last: until the commit the damaged log is all there is to repair from.
    _set_aside(objects, plan, version)
    return Committed(version=version, digest=digest_of(data))


def _check_files(objects: Objects, plan: RepairPlan) -> None:
    """Refuse a plan whose files are gone: a collection removes files without a new version."""
    gone = plan.state.live.keys() - set(objects.list(""))
    if gone:
        raise ConflictError(
            "garbage collection has removed files that the repair needs since it was planned; repair again",
            path=min(gone),
            files=len(gone),
        )


def _changes(plan: RepairPlan, live: Mapping[str, Add], now_ms: int) -> Iterator[Action]:
    """Yield the actions that make ``live`` the table's files; all actions if the log is not readable to its end."""
    before = plan.history.state.live if plan.is_readable else {}
    if plan.form is not None:
        yield from plan.form
    elif not plan.is_readable:
        yield plan.history.protocol
        if plan.history.metadata is not None:
            yield plan.history.metadata
    for path, gone in before.items():
        if path not in live:
            yield Remove(
                path=path,
                deletion_time_ms=now_ms,
                partition_values=gone.partition_values,
                size_bytes=gone.size_bytes,
            )
    yield from (add for path, add in live.items() if path not in before)


def _next_supersteps(objects: Objects, plan: RepairPlan) -> dict[str, Superstep]:
    """Return, by pipeline, a superstep above every one in the log or in a file's name."""
    supersteps: dict[str, Superstep] = {}
    names = [path.partition("/") for path in objects.list("") if path.startswith("computation=")]
    then = supersteps_of(plan.state.txns)
    for pipeline, last in supersteps_of(plan.txns).items():
        own = claimed_by(plan.txns, pipeline) | {control_interval(pipeline).computation}
        numbers = (
            int(name.partition("-")[0])
            for folder, _, name in names
            if unquote(folder.removeprefix("computation=")) in own and name.partition("-")[0].isdecimal()
        )
        supersteps[pipeline] = Superstep(max([last, then.get(pipeline, 0), *numbers]) + 1)
    return supersteps


def _transactions(
    plan: RepairPlan, supersteps: Mapping[str, Superstep], owners: Mapping[Interval, Fence]
) -> dict[str, int]:
    fences = {
        interval.app_id: pack_fence(fence.sequencer, fence.commit_number)
        for interval, fence in owners.items()
    }
    # Running processes forget their cached files when they see this.
    fences[RESTORED_APP_ID] = int(plan.newest) + 1
    if not plan.is_rollback:
        return fences
    positions: dict[str, int] = {}
    for app_id, was in plan.txns.items():
        restored = plan.state.txns.get(app_id)
        if app_id.startswith(AppId.SUPERSTEP):
            positions[app_id] = supersteps[unquote(app_id.removeprefix(AppId.SUPERSTEP))]
        elif app_id.startswith(AppId.INPUT):
            positions[app_id] = -1 if restored is None else restored
        elif app_id.startswith(AppId.SINK_REACHED):
            # The sinks may go back, too, to before what the restored version expects of them.
            positions[app_id] = 0
        elif app_id.startswith(AppId.SAVEPOINT):
            is_kept = plan.is_readable and was <= plan.newest
            positions[app_id] = was if is_kept else SAVEPOINT_RELEASED
        elif Interval.from_app_id(app_id) is not None:
            # Live intervals are fenced by the repair's leases; fences of intervals cut since must not fall.
            continue
        else:
            restart = next((at for prefix, at in _RESTARTED.items() if app_id.startswith(prefix)), was)
            positions[app_id] = restart if restored is None else restored
    return positions | fences


def _rewritten_rows(
    objects: Objects,
    plan: RepairPlan,
    supersteps: Mapping[str, Superstep],
    owners: Mapping[Interval, Fence],
    version: TableVersion,
    now_ms: int,
    rng: Rng,
) -> Iterator[tuple[str, Add]]:
    """Rewrite rows of each pipeline's last superstep, whose productions are undelivered, under its new number."""
    for pipeline, superstep in sorted(supersteps.items()):
        last = plan.state.txns.get(AppId.SUPERSTEP.of(pipeline))
        if last is None:
            continue
        control = control_interval(pipeline)
        sequencer = owners[control].sequencer if control in owners else Sequencer(1)
        names = OwnedNames(rng, pipeline, partial(Sequencer, sequencer))
        own = claimed_by(plan.state.txns, pipeline)
        for path, add in sorted(plan.state.live.items()):
            file = LiveFile.from_add(add, plan.state.version)
            if file.computation not in own and file.interval_id != control.app_id:
                continue
            rows = read_row_files(objects, [path])
            is_last = pc.equal(rows.column("superstep"), int(last))
            if not pc.any(is_last).as_py():
                continue
            numbers = pc.if_else(is_last, pa.scalar(int(superstep), pa.int64()), rows.column("superstep"))
            column = rows.schema.get_field_index("superstep")
            interval = Interval.from_app_id(file.interval_id) or Interval(file.computation)
            fence = owners.get(interval) or Fence(Sequencer(1 << 30), CommitNumber(0))
            written = write_row_file(
                objects,
                interval,
                rows.set_column(column, rows.schema.field(column), numbers),
                superstep=superstep,
                fence=fence,
                token=names.token(),
            )
            rewritten = row_file_to_add(
                written, interval, version=version, modification_time_ms=now_ms, rewrite=True
            )
            yield path, rewritten


def _set_aside(objects: Objects, plan: RepairPlan, version: TableVersion) -> None:
    """Remove files from the log, oldest first, and keep copies."""
    gone = []
    for path in plan.set_aside:
        try:
            data = objects.get(path)
        except ObjectMissingError:
            continue
        objects.put(f"{SET_ASIDE_FOLDER}/{version:020d}/{path.rpartition('/')[2]}", data)
        gone.append(path)
    if plan.is_readable and gone:
        # The pointer may name a checkpoint that is gone; without the pointer Delta readers list the log.
        gone.append(f"{LOG_FOLDER}/_last_checkpoint")
    objects.delete(sorted(gone))
    objects.sync()
