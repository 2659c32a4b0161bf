"""Forks: independent stores that begin with a version of another store.

A fork has the rows, timers, ids and positions of that version, and a log that begins right after it. On one disk row
files are hard-linked instead of copied (`millpond.statestore.objects.disk_tier`), so garbage collection of either store
cannot affect the other. A fork continues the parent's version numbers.

A fork is another incarnation, as an adopted copy is: it has its own leases, and its parent's sinks refuse it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from millpond.statestore.app_ids import RESTORED_APP_ID, SAVEPOINT_RELEASED, AppId, supersteps_of
from millpond.statestore.errors import ConflictError, DataError, ObjectMissingError
from millpond.statestore.history.lineage import Origin
from millpond.statestore.history.replayed_log import ReplayedLog, replay_log
from millpond.statestore.log.action import Action, CommitInfo, JsonValue, Txn
from millpond.statestore.log.checkpoint import checkpoint_path, write_part
from millpond.statestore.log.commit_file import digest_of, encode
from millpond.statestore.log.log import Log, commit_path
from millpond.statestore.log.table import table_id_of
from millpond.statestore.log.writer import publish_log_boundary
from millpond.statestore.objects.disk_tier import share_object
from millpond.statestore.types import Clock, Objects, Rng, TableVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class Forked:
    """The result of a fork: its incarnation, and the number and total size of its row files."""

    version: TableVersion  # of the parent; the fork's own log begins with the next one
    incarnation: str
    files: int
    size_bytes: int
    copied: int  # files that had to be copied


def fork_table(
    source: Objects,
    target: Objects,
    place: str,
    version: TableVersion,
    clock: Clock,
    rng: Rng,
    *,
    on_progress: Callable[[int, int], None] = lambda *_: None,
) -> Forked:
    """Create a table that begins with a version of another table; the caller pins that version.

    ``target`` is an empty root, and ``place`` the location of its store. ``on_progress`` is called after each
    file, with the number of files done and the total.

    Raises:
        ConflictError: files of that version have been collected.
        DataError: the log is damaged, or does not reach back that far.
    """
    log = Log(source)
    replayed = replay_log(log, version)
    if replayed.metadata is None:
        raise DataError("the log has no metadata", store=source.url)
    copied = 0
    for number, path in enumerate(replayed.adds, start=1):
        try:
            copied += not share_object(source, target, path)
        except ObjectMissingError as error:
            raise ConflictError(
                "files of that version have been collected", version=version, path=path
            ) from error
        on_progress(number, len(replayed.adds))
    incarnation, now_ms = rng.token(), clock.now_us() // 1_000
    began = TableVersion(version + 1)
    actions = tuple(_actions(replayed, place, incarnation, began, now_ms, rng.token()))
    fields: dict[str, JsonValue] = {
        "kind": "fork",
        "writer": rng.token(),
        "previous": "",
        "forked_from": source.url,
        "forked_version": int(version),
        "watermarks": dict(replayed.snapshot.watermarks),
        "source_offsets": dict(replayed.snapshot.source_offsets),
    }
    info = CommitInfo(
        operation="MILLPOND FORK", timestamp_ms=now_ms, parameters={"kind": "fork"}, millpond=fields
    )
    # The log begins here: without the boundary readers would miss the commits before it.
    publish_log_boundary(target, began)
    target.sync()
    commit = encode([info, *actions])
    target.put_if_absent(commit_path(began), commit)
    # Last: a checkpoint is a table by itself, and without its commit it would lack watermarks and source offsets.
    path = checkpoint_path(began)
    target.put(path, write_part(actions, path, digest_of(commit)))
    Log(target).name_checkpoint(began, len(actions))
    target.sync()
    return Forked(
        version=version,
        incarnation=incarnation,
        files=len(replayed.adds),
        size_bytes=sum(add.size_bytes for add in replayed.adds.values()),
        copied=copied,
    )


def _actions(
    replayed: ReplayedLog, place: str, incarnation: str, began: TableVersion, now_ms: int, table: str
) -> Iterator[Action]:
    yield replayed.protocol
    if replayed.metadata is not None:
        yield replace(replayed.metadata, table_id=table_id_of(table), created_ms=now_ms)
    # The parent's ensemble has the parent's leases; the fork's may be anywhere.
    txns = {
        app_id: at for app_id, at in replayed.snapshot.txns.items() if not app_id.startswith(AppId.ENSEMBLE)
    }
    # Savepoints name the parent's versions, which the fork does not have.
    txns |= {app_id: SAVEPOINT_RELEASED for app_id in txns if app_id.startswith(AppId.SAVEPOINT)}
    txns |= {
        AppId.FORK.of(incarnation, pipeline): superstep for pipeline, superstep in supersteps_of(txns).items()
    }
    txns[AppId.LOCATION.of(place)] = int(began)
    txns[AppId.INCARNATION.of(incarnation, Origin.FORK)] = int(began)
    txns[RESTORED_APP_ID] = int(began)
    for app_id, at in sorted(txns.items()):
        yield Txn(app_id=app_id, version=at, updated_ms=now_ms)
    yield from replayed.adds.values()
