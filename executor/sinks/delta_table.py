"""The Delta table of a sink: opened or created, appended to, read at older versions, and reverted."""

from __future__ import annotations

import re
import threading
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import ClassVar, Final

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from millpond.executor.sinks.columns import SINK_SCHEMA, ColumnWatch, SinkRecord, sink_table
from millpond.executor.sinks.table_upkeep import COMPACTION, FILE_BYTES_MAX, TableUpkeep
from millpond.statestore.app_ids import AppId, sink_reached, superstep_reached, supersteps_of
from millpond.statestore.errors import ConflictError, DataError, InvalidError
from millpond.statestore.failpoint import reach
from millpond.statestore.history.lineage import Lineage
from millpond.statestore.history.replayed_log import Change, newest_histories, replay_log
from millpond.statestore.log.action import Action, Add, Remove, Txn, delta_schema
from millpond.statestore.log.features import Use
from millpond.statestore.log.files import LiveFile
from millpond.statestore.log.log import Log
from millpond.statestore.log.snapshot import Snapshot, load, load_existing
from millpond.statestore.log.table import Append, ChangeSchema, create_table
from millpond.statestore.log.writer import CommitDraft, LogWriter
from millpond.statestore.objects.ranges import put_new
from millpond.statestore.types import Clock, Objects, Rng, Superstep, TableVersion


def open_table(
    objects: Objects, clock: Clock, rng: Rng, record: SinkRecord, schema: pa.Schema, *, whole: bool = False
) -> LogWriter:
    """Return the writer of a sink's table, which is created unless the store has written to it.

    A table that a sink of this name created can change its columns: freely while it has no rows, later by
    further nullable columns. Not with ``whole``: an upsert rewrites rows, and a row would no longer equal its
    retraction.
    """
    log, name = Log(objects), record.name
    snapshot = load_existing(log, use=None)
    if snapshot is None:
        record.refuse_loss(0, objects.url)
        try:
            return create_table(log, clock, rng, schema=schema, name=name)
        except ConflictError:
            # Another process created the table first: check below that it fits.
            snapshot = load(log, use=None)
    writer = LogWriter(log, snapshot, clock, rng)
    columns = _new_columns(snapshot, schema, name, may_grow=not whole)
    if columns is not None:
        before = writer.snapshot.metadata
        if before is None:
            raise ConflictError("the table has no metadata")
        writer.write(ChangeSchema(before=before, after=replace(before, schema_string=columns)))
    return writer


_FIELDS: Final = "fields"
_WAY_OUT: Final = "give the sink another path, or change the columns of the table"


def _new_columns(snapshot: Snapshot, schema: pa.Schema, name: str, *, may_grow: bool) -> str | None:
    """Return the columns with which a table would fit; ``None`` if it fits already, or cannot change."""
    metadata = snapshot.metadata
    if metadata is None or metadata.partition_columns or metadata.configuration or metadata.name != name:
        # Not a table that a sink of this name has created.
        return None
    wanted = orjson.loads(delta_schema(schema))
    existing = orjson.loads(metadata.schema_string)
    kinds = {column["name"]: column["type"] for column in existing[_FIELDS]}
    if all(kinds.get(column["name"]) == column["type"] for column in wanted[_FIELDS]):
        return None
    if not snapshot.file_count:
        return orjson.dumps(wanted).decode()
    further = [column for column in wanted[_FIELDS] if column["name"] not in kinds]
    if not further or not may_grow or not all(column["nullable"] for column in further):
        return None
    if not {column["name"].lower() for column in further}.isdisjoint(map(str.lower, kinds)):
        return None
    return orjson.dumps({**existing, _FIELDS: [*existing[_FIELDS], *further]}).decode()


def _required_columns(
    snapshot: Snapshot, schema: pa.Schema, name: str, url: str, *, whole: bool
) -> frozenset[str]:
    """Return the columns that take no nulls, or refuse a table that the sink cannot write rightly."""
    metadata = snapshot.metadata
    if metadata is None:
        raise InvalidError("the sink's table has no metadata", sink=name, path=url)
    if metadata.partition_columns:
        raise InvalidError(
            "a Delta sink cannot append to a partitioned table: give the sink another path",
            sink=name,
            path=url,
            partition_columns=list(metadata.partition_columns),
        )
    snapshot.refuse(Use.REWRITE if whole else Use.APPEND, url, schema.names, sink=name)
    fields = orjson.loads(metadata.schema_string)[_FIELDS]
    existing = {column["name"]: column["type"] for column in fields}
    spellings = {column.lower(): column for column in existing}
    for column in orjson.loads(delta_schema(schema))[_FIELDS]:
        kind = existing.get(column["name"])
        if kind != column["type"]:
            spelling = spellings.get(column["name"].lower(), column["name"])
            raise InvalidError(
                f"the sink's table has other columns: {_WAY_OUT}",
                sink=name,
                path=url,
                column=column["name"],
                wanted=column["type"],
                found=kind if spelling == column["name"] else spelling,
            )
    required = frozenset(column["name"] for column in fields if not column.get("nullable", True))
    unfilled = sorted(required - set(schema.names))
    if unfilled:
        raise InvalidError(
            f"the sink's table has columns that take no nulls, and the sink does not fill them: {_WAY_OUT}",
            sink=name,
            path=url,
            columns=unfilled,
        )
    others = sorted(existing.keys() - set(schema.names))
    if whole and others:
        raise InvalidError(
            f"the sink's table has columns that an upsert would lose: {_WAY_OUT}",
            sink=name,
            path=url,
            columns=others,
        )
    return required


FIRST_TAG: Final = "millpond.first"
"""The tag of a file of an upsert's table with the file's first key."""

_RECENT_MAX: Final = 32
_RECENT_BYTES_MAX: Final = 1 << 16
OWN_NAME: Final = re.compile(r"(?:.*-)?(\d{10,})-[0-9a-f]{32}\.parquet")


class TableWriter:
    """The open Delta table of one sink, with the sink's record in it."""

    default_schema: ClassVar[pa.Schema]
    is_whole: ClassVar[bool] = False
    upkeep: TableUpkeep | None = None

    def __init__(
        self,
        objects: Objects,
        clock: Clock,
        rng: Rng,
        *,
        name: str,
        record: SinkRecord,
        schema: pa.Schema | None,
    ) -> None:
        self._objects = objects
        self._clock = clock
        self._rng = rng
        self._name = name
        self._record = record
        self._schema = schema
        self._columns = self.default_schema if schema is None else schema
        self._watch = ColumnWatch(self._columns, name)
        # Small files that the next compaction need not read.
        self._recent: dict[str, pa.Table] = {}
        # A commit by upkeep's thread changes the snapshot that a delivery reads.
        self._lock = threading.RLock()
        self._writer = open_table(objects, clock, rng, record, self._columns, whole=self.is_whole)
        self._writer.successors_kept = True
        self._fitting = self._writer.snapshot.metadata
        self._required = self._required_in(self._writer.snapshot)
        record.check_on_opening(self._writer.snapshot, objects.url)

    @property
    def delivered(self) -> Superstep:
        with self._lock:
            return self._record.delivered(self._writer.snapshot.txns)

    def _required_in(self, snapshot: Snapshot) -> frozenset[str]:
        return _required_columns(snapshot, self._columns, self._name, self._objects.url, whole=self.is_whole)

    def _admit(self, snapshot: Snapshot) -> None:
        """Refuse to commit on a version of another copy of the store, or of a table that another program has changed."""
        self._record.check(snapshot)
        if snapshot.metadata is self._fitting:
            return
        if self._required_in(snapshot) != self._required:
            # The rows at hand were not checked for the new ones.
            raise InvalidError(
                "another program has changed which columns of the sink's table take nulls: start again",
                sink=self._name,
                path=self._objects.url,
            )
        self._fitting = snapshot.metadata

    def keep_up(self) -> None:
        """Give the table checkpoints, compaction and cleanup from now on; see `TableUpkeep.due`."""
        self.upkeep = TableUpkeep(
            self._objects, self._writer, self._clock, self, guard=self._admit, lock=self._lock
        )

    def small_files(self, snapshot: Snapshot) -> Sequence[LiveFile]:
        """Return own files of the lowest tier that has enough of them, oldest first."""
        tiers = defaultdict[int, list[LiveFile]](list)
        for file in sorted(snapshot.files, key=lambda file: file.path):
            # Files of other engines are theirs to compact.
            if file.size_bytes <= FILE_BYTES_MAX and OWN_NAME.fullmatch(file.path):
                tiers[COMPACTION.tier(file.size_bytes)].append(file)
        full = [tier for tier, files in tiers.items() if len(files) >= COMPACTION.fan_in]
        return _fitting(tiers[min(full)]) if full else ()

    def merged(self, files: Sequence[LiveFile]) -> Iterable[Add]:
        tables = []
        for file in files:
            recent = self._recent.pop(file.path, None)
            tables.append(read_file(self._objects, file.path, self._name) if recent is None else recent)
        try:
            rows = pa.concat_tables(tables, promote_options="default")
        except pa.ArrowException as error:
            raise DataError("files of the sink's table have different columns", sink=self._name) from error
        add = self._put(superstep_of(files), rows)
        self._remember(add.path, rows)
        yield add

    def _remember(self, path: str, rows: pa.Table) -> None:
        if rows.nbytes <= _RECENT_BYTES_MAX:
            self._recent[path] = rows
            for old in list(self._recent)[:-_RECENT_MAX]:
                self._recent.pop(old, None)

    def _put(self, superstep: Superstep, rows: pa.Table, tags: Mapping[str, str] | None = None) -> Add:
        """Write rows to a Parquet file, which takes effect once a commit adds it."""
        buffer = pa.BufferOutputStream()
        pq.write_table(rows, buffer, compression="zstd", coerce_timestamps="us", write_page_checksum=True)
        data = buffer.getvalue().to_pybytes()
        path = f"{self._name}-{superstep:010d}-{self._rng.token()}.parquet"
        # No sync yet: the commit that adds the file syncs it first.
        put_new(self._objects, path, data, synced=False)
        reach("sink.file_written")
        return Add(
            path=path,
            size_bytes=len(data),
            partition_values={},
            modification_time_ms=self._clock.now_us() // 1_000,
            stats=orjson.dumps({"numRecords": rows.num_rows}).decode(),
            tags=dict(tags or {}),
        )


def _fitting(files: Sequence[LiveFile]) -> Sequence[LiveFile]:
    """Return the first files, as many as can be merged in memory."""
    sizes = accumulate(file.size_bytes for file in files)
    return files[: max(2, sum(size <= COMPACTION.memory_bytes_max for size in sizes))]


def superstep_of(files: Sequence[LiveFile]) -> Superstep:
    matches = (OWN_NAME.fullmatch(file.path) for file in files)
    return Superstep(max((int(match[1]) for match in matches if match), default=0))


def read_file(objects: Objects, path: str, sink: str) -> pa.Table:
    data = objects.get(path)
    try:
        return pq.read_table(pa.BufferReader(data), page_checksum_verification=True)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise DataError(
            "a file of the sink's table cannot be read", sink=sink, path=path, reason=error
        ) from error


class DeltaSinkWriter(TableWriter):
    """Appends supersteps to one Delta table: one file and one commit each; `SINK_SCHEMA` without a schema."""

    default_schema = SINK_SCHEMA

    def _required_in(self, snapshot: Snapshot) -> frozenset[str]:
        if any(FIRST_TAG in file.tags for file in snapshot.files):
            raise InvalidError(
                "the sink's table has one row per key, and appended panes would stand next to these rows: keep "
                'mode="upsert", or give the sink another path',
                sink=self._name,
                path=self._objects.url,
            )
        return super()._required_in(snapshot)

    def write(self, superstep: Superstep, productions: pa.Table) -> None:
        # The table has it: a runner repeats the last superstep after a crash.
        if superstep <= self.delivered or not productions.num_rows:
            return
        table = sink_table(productions, self._schema, self._name, self._watch, self._required)
        add = self._put(superstep, table)
        self._remember(add.path, table)
        # Data and superstep in one commit, guarded by the record: otherwise a crash between them would deliver
        # the superstep twice, and another copy of the store could mix its rows with these.
        self._writer.write(
            Append(
                added=(add,),
                txns={self._record.app_id: superstep},
                metadata={"sink": self._name, "superstep": superstep},
                rows=table.num_rows,
                guard=self._admit,
            )
        )


def version_within(log: Log, limits: Mapping[str, int]) -> TableVersion | None:
    """Return a table's newest version in which no transaction is beyond its limit; ``None`` if it has none.

    ``limits`` is by application id. Raises `DataError` if the log is damaged or does not reach back far
    enough.
    """
    for history in newest_histories(log):
        version, at = history.newest, dict(history.state.txns)
        # Undo the transactions commit by commit, newest first, until each is within its limit.
        for change in reversed(history.changes):
            if _is_within(at, limits):
                return version
            for app_id, before in change.txns_before:
                at[app_id] = before or 0
            version = TableVersion(change.version - 1)
        if _is_within(at, limits):
            return version if version >= 0 else None
    raise DataError("the log of the sink's table does not reach back that far", store=log.objects.url)


def _is_within(at: Mapping[str, int], limits: Mapping[str, int]) -> bool:
    return all(at.get(app_id, 0) <= limit for app_id, limit in limits.items())


def read_rows(objects: Objects, version: TableVersion) -> pa.Table:
    paths = replay_log(Log(objects), version).adds
    tables = [pq.read_table(pa.BufferReader(objects.get(path))) for path in paths]
    return pa.concat_tables(tables, promote_options="permissive") if tables else pa.table({})


@dataclass(frozen=True, slots=True, kw_only=True)
class TakenBack:
    """How far one sink was reverted: its last superstep before and now, and the number of removed files."""

    pipeline: str
    name: str
    delivered: int
    superstep: int
    files: int


def take_back_sink(
    objects: Objects, lineage: Lineage, supersteps: Mapping[str, Superstep], clock: Clock, rng: Rng
) -> tuple[TakenBack, ...]:
    """Revert a store's deliveries to a table after the store's last superstep in ``supersteps``, by pipeline.

    A store that was restored from an older copy runs these supersteps again, possibly with other results. One
    commit removes the files that they added, restores the files that they replaced, and sets the sink's
    record to the store's superstep. Files of other writers stay; if those changed the same files, it raises
    `ConflictError` and changes nothing. The call can be repeated after a crash.
    """
    log = Log(objects)
    snapshot = load(log)
    done = []
    for record in _records_of(lineage, snapshot.txns):
        if record.pipeline in supersteps:
            limits = record.limits(snapshot.txns, supersteps[record.pipeline])
            plan = _plan(log, snapshot, record, limits)
            if plan is not None:
                snapshot = _write(log, snapshot, plan, clock, rng)
                done.append(plan.result)
    return tuple(done)


def take_over_sink(
    objects: Objects, lineage: Lineage, clock: Clock, rng: Rng, *, keeps_rows: bool = False
) -> tuple[TakenBack, ...]:
    """Make a store the only copy that writes to a sink's table, and revert what its other copies delivered alone.

    Deliveries from before the copies parted stay. Each sink takes one commit, after which the other copies are refused.
    With ``keeps_rows`` no row is reverted. Raises `ConflictError` and changes nothing if another writer changed the
    same files since. The call can be repeated after a crash.
    """
    log = Log(objects)
    if log.latest_version() is None:
        return ()
    snapshot = load(log)
    done = []
    for record in _records_of(lineage, snapshot.txns):
        limits = record.limits_of_others(snapshot.txns)
        owner = record.owner(snapshot.txns)
        # The table is this copy's already, or an earlier call took it over.
        if not limits or (owner is not None and not lineage.is_of_another_copy(owner)):
            continue
        plan = None if keeps_rows else _plan(log, snapshot, record, limits)
        if plan is None:
            result = TakenBack(pipeline=record.pipeline, name=record.name, delivered=0, superstep=0, files=0)
            plan = _TakeBackPlan(result=result, read_at=snapshot.version)
        claim = {record.owner_app_id: snapshot.version + 1}
        plan = replace(plan, txns={**plan.txns, **claim}, operation="MILLPOND TAKE OVER")
        snapshot = _write(log, snapshot, plan, clock, rng)
        done.append(plan.result)
    return tuple(done)


def begin_anew(
    objects: Objects, lineage: Lineage, identities: Collection[str], txns: Mapping[str, int]
) -> dict[str, int]:
    """Return the positions with which a store's sinks begin anew in a table that was removed or replaced."""
    snapshot = load_existing(Log(objects))
    delivered = {} if snapshot is None else snapshot.txns
    positions: dict[str, int] = {}
    for app_id in (one for one in txns if one.startswith(AppId.SINK_REACHED)):
        pipeline, name = AppId.SINK_REACHED.parts(app_id)
        expected = max(superstep_reached(txns[app_id], identity) for identity in identities)
        if SinkRecord(lineage, pipeline, name).delivered(delivered) < expected:
            positions[app_id] = sink_reached(supersteps_of(txns)[pipeline], "")
    return positions


def _write(log: Log, snapshot: Snapshot, plan: _TakeBackPlan, clock: Clock, rng: Rng) -> Snapshot:
    writer = LogWriter(log, snapshot, clock, rng)
    # Check before the commit: no reader could open a table that names vacuumed files.
    _check_files(log.objects, plan.restored)
    writer.write(plan)
    return writer.snapshot


def _records_of(lineage: Lineage, txns: Mapping[str, int]) -> Sequence[SinkRecord]:
    parts = [AppId.SINK.parts(app_id) for app_id in txns if app_id.startswith(AppId.SINK)]
    sinks = {(pipeline, name) for store_id, pipeline, name, *_ in parts if store_id == lineage.store_id}
    return [SinkRecord(lineage, *sink) for sink in sorted(sinks)]


def _plan(
    log: Log, snapshot: Snapshot, record: SinkRecord, limits: Mapping[str, int]
) -> _TakeBackPlan | None:
    ahead = {app_id: limit for app_id, limit in limits.items() if snapshot.txns[app_id] > limit}
    if not ahead:
        return None
    undone, live = _undone(log, ahead, snapshot.version)
    then = dict(live)
    for change in undone:
        # A compaction by another engine, for example, merges rows of several supersteps into one file: removing the
        # sink's own files would then revert nothing, and restoring them would repeat rows.
        touched = [add.path for add in change.added if then.pop(add.path, None) is None]
        touched += [add.path for add in change.removed if add.path in then]
        if touched:
            raise ConflictError(
                "another writer has changed the same files of the sink's table since: write to a new sink",
                store=log.objects.url,
                path=touched[0],
            )
        then |= {add.path: add for add in change.removed}
    obsolete = [add for path, add in live.items() if path not in then]
    restored = [add for path, add in then.items() if path not in live]
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


def _undone(
    log: Log, ahead: Mapping[str, int], newest: TableVersion
) -> tuple[Sequence[Change], Mapping[str, Add]]:
    """Return the changes to undo, newest first, and the live files.

    To be undone are deliveries beyond their limits, and compactions that merged their rows.
    """
    for history in newest_histories(log):
        if history.newest != newest:
            raise ConflictError("the table has changed since it was read; repeat the call", version=newest)
        undone: list[Change] = []
        compactions: list[Change] = []
        left = set(ahead)
        for change in reversed(history.changes):
            moved = dict(change.txns_before)
            if change.kind == "compaction":
                compactions.append(change)
            elif left & moved.keys():
                undone.append(change)
                left -= {app_id for app_id in left & moved.keys() if (moved[app_id] or 0) <= ahead[app_id]}
            if not left:
                return _with_compactions(undone, compactions), history.adds
    raise DataError(
        "the log of the sink's table does not reach back that far: write to a new sink", store=log.objects.url
    )


def _with_compactions(undone: Sequence[Change], compactions: Sequence[Change]) -> Sequence[Change]:
    # Oldest first: a compaction may have merged what an earlier one had made of the rows.
    gone = {add.path for change in undone for add in change.added}
    merged: list[Change] = []
    for change in reversed(compactions):
        if any(add.path in gone for add in change.removed):
            merged.append(change)
            gone.update(add.path for add in change.added)
    return sorted([*undone, *merged], key=lambda change: -change.version)


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
    obsolete: tuple[Add, ...] = ()
    restored: tuple[Add, ...] = ()
    txns: Mapping[str, int] = field(default_factory=dict)
    read_at: TableVersion
    operation: str = "MILLPOND TAKE BACK"

    def build(self, snapshot: Snapshot, now_ms: int) -> CommitDraft | None:
        # An earlier try has landed, so a repeated call after a crash changes nothing.
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
            operation=self.operation,
            actions=(*txns, *removes, *self.restored),
            fields={"kind": "take_back", "sink": self.result.name, "superstep": self.result.superstep},
        )

    def admit(self, winner: tuple[Action, ...]) -> None:
        """Accept every commit here: `build` refuses any version except the one that was read."""
