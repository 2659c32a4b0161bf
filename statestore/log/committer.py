"""The commit: state, timers, record ids, productions and consumed positions change together.

One Delta commit carries the row files of all touched intervals, their watermarks, and a ``txn`` per touched interval (its
next fence) and per consumed input. It lands only if every interval's stored fence is exactly the owner's last one, on the
snapshot that the commit is built on. This check, and the ``txn`` app ids on which two commits of one interval collide,
are the two halves of the fence (MillWheel §6.2, §7.1: a sequencer on every write).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from millpond.statestore.app_ids import AppId, pipeline_number, supersteps_of
from millpond.statestore.errors import ConflictError, FencedError, InternalError
from millpond.statestore.interval import Interval
from millpond.statestore.log.action import Action, CommitInfo, JsonValue, Metadata, Protocol, Remove, Txn
from millpond.statestore.log.files import PENDING, row_file_moved, row_file_to_add, tags_of_compacted
from millpond.statestore.log.high_water import HighWater, check_high_water
from millpond.statestore.log.log import Log
from millpond.statestore.log.rules import CommitRequest, IntervalWrite, check_commit
from millpond.statestore.log.snapshot import Snapshot, catch_up, load
from millpond.statestore.log.table import with_row_columns
from millpond.statestore.log.writer import CommitDraft, Committed, LogWriter
from millpond.statestore.rows.row import pack_fence
from millpond.statestore.system import RetryPolicy
from millpond.statestore.types import Clock, Rng, Superstep, TableVersion


class Committer(LogWriter):
    """The `LogWriter` of one store's table: it commits requests under fences.

    Opening a committer reads the log and compares it with the high-water mark; a table that is damaged or older than the
    mark is a `DataError`. ``loaded`` is a snapshot that the caller has just loaded, at the monotonic time ``loaded_us``; it
    becomes the committer's own.
    """

    def __init__(
        self,
        log: Log,
        clock: Clock,
        rng: Rng,
        high_water: HighWater,
        *,
        loaded: Snapshot | None = None,
        loaded_us: int | None = None,
        writer_id: str | None = None,
        retry: RetryPolicy | None = None,
        failpoints: Callable[[str], None] | None = None,
    ) -> None:
        # Read the mark before the log is listed: a commit in between would make a sound log look rolled back.
        mark = high_water.read()
        if loaded is None:
            snapshot = load(log)
        elif mark is None or mark.version <= loaded.version:
            # As good as one that is read now: the first put finds out what is newer.
            snapshot = loaded
        else:
            snapshot = catch_up(log, loaded)
        check_high_water(mark, snapshot, log)
        super().__init__(
            log,
            snapshot,
            clock,
            rng,
            writer_id=writer_id,
            retry=retry,
            high_water=high_water,
            failpoints=failpoints,
            seen_us=loaded_us,
        )
        # Only now has the version been synced. A mark above it would accuse a sound table after a power cut.
        high_water.advance(snapshot.version, snapshot.digest)

    def commit(self, request: CommitRequest) -> Committed:
        """Make the request the next version of the table.

        Raises:
            FencedError: another owner has an interval; nothing was written.
            ConflictError: the table has changed in a way that forbids the commit; nothing was written.
            OutcomeUnknownError: the commit may or may not have landed; `resolve` decides.
            UnavailableError: the store is unavailable; nothing was written.
        """
        committed = self.write(_RequestPlan(request))
        if committed is None:
            raise InternalError("a commit request always makes a version", kind=request.kind)
        return committed


@dataclass(frozen=True, slots=True)
class _RequestPlan:
    request: CommitRequest

    def build(self, snapshot: Snapshot, now_ms: int) -> CommitDraft:
        request = self.request
        # The fence is checked on the snapshot whose next version this commit will be, not on one from earlier.
        check_commit(request, snapshot)
        fences: dict[str, int] = {}
        watermarks: dict[str, JsonValue] = {}
        rows = 0
        for write in request.writes:
            app_id = write.interval.app_id
            fences[app_id] = pack_fence(write.fence.sequencer, write.fence.commit_number)
            if write.watermark is not None:
                watermarks[app_id] = int(write.watermark)
            for file in write.added:
                rows += file.rows
        actions = self._columns(snapshot)
        actions += [
            Txn(app_id=app_id, version=version, updated_ms=now_ms)
            for app_id, version in (fences | dict(request.positions)).items()
        ]
        self._add_files(actions, snapshot, now_ms)
        fields: dict[str, JsonValue] = {**request.metadata, "kind": request.kind}
        parameters = {"kind": request.kind, "intervals": str(len(request.writes))}
        superstep = _superstep(request)
        if superstep is not None:
            fields["superstep"], parameters["superstep"] = superstep, str(superstep)
        if watermarks:
            fields["watermarks"] = watermarks
        if offsets := _source_offsets(request, snapshot):
            fields["source_offsets"] = offsets
        return CommitDraft(
            operation=f"MILLPOND {request.kind.upper()}",
            actions=tuple(actions),
            fields=fields,
            parameters=parameters,
            rows=rows,
        )

    def admit(self, winner: tuple[Action, ...]) -> None:
        taken_over = {write.interval.app_id for write in self.request.writes if write.fence.commit_number}
        removed = {path for write in self.request.writes for path in write.removed}
        is_own = any(isinstance(action, CommitInfo) and action.millpond is not None for action in winner)
        for action in winner:
            match action:
                # Only the next fence of the same owner may follow a fence, so a rebuilt commit would be refused too.
                case Txn() if action.app_id in taken_over:
                    raise FencedError("another owner's commit came first", interval=action.app_id)
                case Txn() if action.app_id in self.request.positions:
                    raise ConflictError("another writer moved the position first", app_id=action.app_id)
                case Remove() if action.path in removed:
                    raise ConflictError("another writer removed the file first", path=action.path)
                case Metadata() if is_own and action == with_row_columns(action):
                    # The winner has added a column, which this commit's files do not need.
                    pass
                case Protocol() | Metadata():
                    raise ConflictError("another writer changed the table's protocol or metadata")
                case _:
                    pass

    def _columns(self, snapshot: Snapshot) -> list[Action]:
        # Tables of earlier versions have no column for versions of states; the first version that is recorded adds it. So
        # does the first file with a column of states with a schema, because readers take the columns from the metadata.
        request, metadata = self.request, snapshot.metadata
        typed = {
            field.name: field
            for write in request.writes
            for file in write.added
            for field in file.typed_columns
        }
        has_versions = any(app_id.startswith(AppId.STATE_VERSION) for app_id in request.positions)
        if metadata is None or not (typed or has_versions):
            return []
        complete = with_row_columns(metadata, typed.values())
        return [] if complete == metadata else [complete]

    def _add_files(self, actions: list[Action], snapshot: Snapshot, now_ms: int) -> None:
        request, version = self.request, TableVersion(snapshot.version + 1)
        # A rewrite moves rows without changing them; readers that follow changes of data may skip it.
        rewrite = request.kind != "superstep" and any(write.removed for write in request.writes)
        for write in request.writes:
            if write.removed:
                actions += [_remove(snapshot, path, now_ms, rewrite=rewrite) for path in write.removed]
            tags = _tags_of(write, snapshot)
            actions += [
                row_file_to_add(file, write.interval, version, now_ms, rewrite=rewrite, tags=tags)
                for file in write.added
            ]
        for old, new in request.renames.items():
            actions += [
                row_file_moved(file, new, now_ms, snapshot.statistics_of(file.path))
                for file in snapshot.files_in(old)
            ]
        for name in sorted(request.drops):
            files = snapshot.files_in(name)
            actions += [_remove(snapshot, file.path, now_ms, rewrite=False) for file in files]


def _tags_of(write: IntervalWrite, snapshot: Snapshot) -> Mapping[str, str]:
    if write.pending is not None:
        return {PENDING: write.pending}
    replaced = [snapshot.file(path) for path in write.removed]
    return (
        tags_of_compacted([file for file in replaced if file is not None], write.interval) if replaced else {}
    )


def _remove(snapshot: Snapshot, path: str, now_ms: int, *, rewrite: bool) -> Remove:
    file = snapshot.file(path)
    return Remove(
        path=path,
        deletion_time_ms=now_ms,
        data_change=not rewrite,
        partition_values=None if file is None else file.partition_values,
        size_bytes=None if file is None else file.size_bytes,
    )


def _superstep(request: CommitRequest) -> int | None:
    newest = None
    for app_id, version in request.positions.items():
        if app_id.startswith(AppId.SUPERSTEP) and (newest is None or version > newest):
            newest = version
    return newest


def _source_offsets(request: CommitRequest, snapshot: Snapshot) -> dict[str, JsonValue]:
    # Each commit repeats all offsets: a log that was cleaned up starts from a checkpoint and one commit file.
    if not request.source_offsets:
        return {**snapshot.source_offsets}
    # Only the last source of a stream counts: a query whose checkpoint was replaced never reads on.
    streams = {_stream_of(app_id) for app_id in request.source_offsets}
    known = {
        app_id: at for app_id, at in snapshot.source_offsets.items() if _stream_of(app_id) not in streams
    }
    return {**known, **request.source_offsets}


def _stream_of(app_id: str) -> str:
    return app_id if app_id.startswith(AppId.BACKFILL) else app_id.rpartition("/")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingFiles:
    """Files of a computation that may hold undelivered productions of ``interval``, or (``None``) of all intervals.

    Superstep *n + 1* delivers all productions of superstep *n* of its pipeline, so only productions of the last
    superstep, ``superstep``, can be undelivered (MillWheel §6.1.2).
    """

    paths: tuple[str, ...]
    interval: Interval | None
    superstep: Superstep


def pending_files(snapshot: Snapshot, computation: str) -> tuple[PendingFiles, ...]:
    """Return the files of a computation that may hold undelivered productions.

    The contents of files that another program rewrote are unknown, so those files are included.
    """
    found: list[PendingFiles] = []
    for interval, superstep in _owners(snapshot, computation):
        files = snapshot.files_in(computation) if interval is None else snapshot.files_of(interval)
        paths = tuple(
            file.path
            for file in files
            if file.productions != 0 and (file.max_superstep is None or file.max_superstep >= superstep)
        )
        if paths:
            found.append(PendingFiles(paths=paths, interval=interval, superstep=superstep))
    return tuple(found)


def _owners(snapshot: Snapshot, computation: str) -> Iterator[tuple[Interval | None, Superstep]]:
    """Yield the last superstep of each pipeline that writes to the computation.

    Dead letters belong to no pipeline: each pipeline has an interval in them that is named after it.
    """
    supersteps = supersteps_of(snapshot.txns)
    claim = snapshot.txns.get(AppId.CLAIM.of(computation))
    if claim is not None:
        for pipeline, superstep in supersteps.items():
            if pipeline_number(pipeline) == claim:
                yield None, superstep
        return
    for app_id in snapshot.txns:
        interval = Interval.from_app_id(app_id)
        if interval is not None and interval.computation == computation:
            pipeline = interval.low.removesuffix("/")
            if pipeline in supersteps:
                yield interval, supersteps[pipeline]
