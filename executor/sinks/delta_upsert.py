"""A sink table that keeps one row per key: panes replace rows, retractions delete them.

The table's files are the leaves of a tree of one level: each holds the sorted rows of one range of keys, at
most `LEAF_ROWS_MAX`. A superstep rewrites only the leaves of its keys, in one commit that also records the
superstep. So every version of the table has one row per key for any Delta reader, and a superstep's cost
depends on the touched leaves, not on the table's size. One leaf at a time is in memory.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import orjson
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from millpond.executor.sinks.changes import (
    RowChange,
    RowKey,
    contents,
    key_columns,
    key_texts,
    net_changes,
    row_keys,
)
from millpond.executor.sinks.columns import (
    ROW_SCHEMA_BY_WINDOW,
    ColumnWatch,
    SinkRecord,
    retractions,
    sink_table,
)
from millpond.executor.sinks.delta_table import open_table, write_sink_file
from millpond.statestore.app_ids import SINK_PREFIX, app_id_parts
from millpond.statestore.errors import ConflictError, DataError
from millpond.statestore.history.lineage import Lineage
from millpond.statestore.history.replayed_log import Change, read_histories
from millpond.statestore.log.action import Action, Add, Remove, Txn
from millpond.statestore.log.files import LiveFile
from millpond.statestore.log.log import Log
from millpond.statestore.log.snapshot import Snapshot, load
from millpond.statestore.log.table import replace_files
from millpond.statestore.log.writer import CommitDraft, LogWriter
from millpond.statestore.types import Clock, Objects, Rng, Superstep, TableVersion

LEAF_ROWS_MAX: Final = 20_000
"""A leaf with more rows is split."""

_LEAF_BYTES: Final = 16 * 1024 * 1024
"""Uncompressed size of a leaf with wide rows, in bytes."""

_TRIES: Final = 10
_FIRST_TAG: Final = "millpond.first"
_LAST_TAG: Final = "millpond.last"


@dataclass(frozen=True, slots=True)
class _Leaf:
    """A file with its first and last key; ``None`` if another engine wrote the file, which may hold any keys."""

    file: LiveFile
    first: RowKey | None
    last: RowKey | None

    def may_hold(self, key: RowKey) -> bool:
        return self.first is None or self.last is None or self.first <= key <= self.last


class UpsertSinkWriter:
    """Updates one Delta table with each superstep, in one commit; `ROW_SCHEMA_BY_WINDOW` without a schema."""

    def __init__(
        self,
        objects: Objects,
        clock: Clock,
        rng: Rng,
        *,
        name: str,
        record: SinkRecord,
        schema: pa.Schema | None,
        keys: Sequence[str],
        leaf_rows_max: int = LEAF_ROWS_MAX,
    ) -> None:
        self._objects = objects
        self._clock = clock
        self._rng = rng
        self._name = name
        self._record = record
        self._schema = ROW_SCHEMA_BY_WINDOW if schema is None else schema
        self._watch = ColumnWatch(schema, name)
        self._keys = tuple(keys)
        self._leaf_rows_max = leaf_rows_max
        self._writer = open_table(objects, clock, rng, name, self._schema, whole=True)
        record.check_on_opening(self._writer.snapshot, objects.url)
        self._known: dict[str, _Leaf] = {}

    @property
    def delivered(self) -> Superstep:
        return self._record.delivered(self._writer.snapshot.txns)

    def write(self, superstep: Superstep, productions: pa.Table) -> None:
        """Update the table with a superstep's productions, unless it has the superstep already.

        Raises `ConflictError` if other writers of the table won every try; nothing was written then.
        """
        if superstep <= self.delivered or not productions.num_rows:
            return
        rows = sink_table(productions, self._schema, self._name, self._watch)
        changes = net_changes(rows, self._keys, retractions(productions, self._name))
        for _ in range(_TRIES):
            # Read the leaves again after each conflict: they are rewritten from their current rows.
            snapshot = self._writer.refresh()
            if superstep <= self.delivered:
                return
            try:
                self._update(snapshot, superstep, rows, changes)
            except ConflictError:
                continue
            return
        raise ConflictError("other writers of the sink's table came first in every try", sink=self._name)

    def _update(
        self, snapshot: Snapshot, superstep: Superstep, rows: pa.Table, changes: Mapping[RowKey, RowChange]
    ) -> None:
        version = snapshot.version
        removed: list[LiveFile] = []
        added: list[Add] = []
        written = 0
        for leaf, table, is_last in self._rewritten(self._leaves(snapshot), rows, changes):
            if leaf is not None:
                removed.append(leaf.file)
            for part in self._parts(table, is_last=is_last):
                added.append(self._put(superstep, part))
                written += part.num_rows
        replace_files(
            self._writer,
            removed,
            added,
            read_at=version,
            txns={self._record.app_id: superstep},
            metadata={"sink": self._name, "superstep": superstep},
            rows=written,
            guard=self._record.check,
        )

    # -- leaves ----------------------------------------------------------------------------

    def _leaves(self, snapshot: Snapshot) -> list[_Leaf]:
        """Return the table's files in key order, after the files of other engines."""
        self._known = {file.path: self._known.get(file.path) or _leaf_of(file) for file in snapshot.files}
        return sorted(
            self._known.values(),
            key=lambda leaf: (leaf.first is not None, leaf.first or (), leaf.file.path),
        )

    def _rewritten(
        self, leaves: Sequence[_Leaf], rows: pa.Table, changes: Mapping[RowKey, RowChange]
    ) -> Iterator[tuple[_Leaf | None, pa.Table, bool]]:
        """Yield each changed leaf, its new rows, and True for the last leaf of the table."""
        ordered = sorted(changes)
        texts = dict(zip(ordered, key_texts(_table_of(ordered, rows, self._keys)).to_pylist(), strict=True))
        if not leaves:
            new = [key for key in ordered if changes[key].put is not None]
            if new:
                yield None, self._with(rows.schema.empty_table(), rows, changes, new), True
            return
        keys_by_leaf, overlapping = _keys_by_leaf(leaves, ordered), _overlapping(leaves)
        for index in sorted(keys_by_leaf.keys() | overlapping):
            leaf = leaves[index]
            new = [key for key in keys_by_leaf.get(index, ()) if changes[key].put is not None]
            candidates = ordered if index in overlapping else keys_by_leaf[index]
            touched = {texts[key]: changes[key] for key in candidates if leaf.may_hold(key)}
            if not touched and not new:
                continue
            before = self._read(leaf)
            kept = self._without(before, touched)
            # Split another engine's file into leaves at once: until then every superstep must read it.
            if kept.num_rows < before.num_rows or new or leaf.first is None:
                yield leaf, self._with(kept, rows, changes, new), index == len(leaves) - 1

    def _without(self, table: pa.Table, touched: Mapping[str, RowChange]) -> pa.Table:
        """Return a leaf's rows except the replaced and retracted ones."""
        if not touched or not table.num_rows:
            return table
        texts = key_texts(key_columns(table, self._keys))
        indices = pc.indices_nonzero(pc.is_in(texts, pa.array(list(touched), pa.string())))
        candidates = contents(table.take(indices), self._keys)
        removed = [
            index
            for index, text, content in zip(
                indices.to_pylist(), texts.take(indices).to_pylist(), candidates, strict=True
            )
            if touched[text].put is not None or content in touched[text].taken_back
        ]
        if not removed:
            return table
        is_kept = pc.invert(pc.is_in(pa.array(range(table.num_rows)), pa.array(removed, pa.int64())))
        return table.filter(is_kept)

    def _with(
        self, kept: pa.Table, rows: pa.Table, changes: Mapping[RowKey, RowChange], new: Iterable[RowKey]
    ) -> pa.Table:
        indices = [index for key in new if (index := changes[key].put) is not None]
        table = pa.concat_tables([kept, rows.take(pa.array(indices, pa.int64()))])
        return table.take(_order(key_columns(table, self._keys)))

    def _parts(self, table: pa.Table, *, is_last: bool) -> Iterator[pa.Table]:
        """Yield the rows of a leaf, split if there are too many for one."""
        rows = table.num_rows
        rows_by_bytes = max(1, _LEAF_BYTES * rows // max(table.nbytes, 1))
        rows_max = min(self._leaf_rows_max, rows_by_bytes)
        # Fill the last leaves before beginning the next: keys that follow time are appended there.
        size = rows_max if is_last or rows <= rows_max else -(-rows // -(-rows // rows_max))
        for start in range(0, rows, size):
            yield table.slice(start, size)

    # -- files -----------------------------------------------------------------------------

    def _read(self, leaf: _Leaf) -> pa.Table:
        data = self._objects.get(leaf.file.path)
        try:
            table = pq.read_table(pa.BufferReader(data), page_checksum_verification=True)
            return table.select(self._schema.names).cast(self._schema)
        except (pa.ArrowException, OSError, ValueError, KeyError) as error:
            raise DataError(
                "a file of the sink's table cannot be read",
                sink=self._name,
                path=leaf.file.path,
                reason=error,
            ) from error

    def _put(self, superstep: Superstep, table: pa.Table) -> Add:
        ends = key_columns(pa.concat_tables([table.slice(0, 1), table.slice(table.num_rows - 1)]), self._keys)
        first, last = row_keys(ends)
        tags = {_FIRST_TAG: _tag(first), _LAST_TAG: _tag(last)}
        return write_sink_file(self._objects, self._clock, self._rng, self._name, superstep, table, tags=tags)


def _order(columns: pa.Table) -> pa.Array:
    """Return the indices of rows in the order of their `RowKey`, nulls first."""
    by: dict[str, pa.ChunkedArray] = {}
    for name in columns.column_names:
        by |= {f"{name} is there": pc.is_valid(columns.column(name)), name: columns.column(name)}
    return pc.sort_indices(pa.table(by), sort_keys=[(name, "ascending") for name in by])


def _tag(key: RowKey) -> str:
    return orjson.dumps([value if is_valid else None for is_valid, value in key]).decode()


def _from_tag(text: str | None) -> RowKey | None:
    if text is None:
        return None
    return tuple((value is not None, 0 if value is None else value) for value in orjson.loads(text))


def _leaf_of(file: LiveFile) -> _Leaf:
    return _Leaf(file, _from_tag(file.tags.get(_FIRST_TAG)), _from_tag(file.tags.get(_LAST_TAG)))


def _overlapping(leaves: Sequence[_Leaf]) -> set[int]:
    """Return leaves that may share keys with others: none, unless other engines wrote to the table."""
    overlapping: set[int] = set()
    widest: int | None = None
    for index, leaf in enumerate(leaves):
        if leaf.first is None or leaf.last is None:
            overlapping.add(index)
            continue
        last_of_widest = None if widest is None else leaves[widest].last
        if widest is not None and last_of_widest is not None and leaf.first <= last_of_widest:
            overlapping |= {widest, index}
        if last_of_widest is None or leaf.last > last_of_widest:
            widest = index
    return overlapping


def _keys_by_leaf(leaves: Sequence[_Leaf], keys: Iterable[RowKey]) -> dict[int, list[RowKey]]:
    """Assign each key to the last leaf that begins at or before it, or to the first leaf."""
    firsts = [leaf.first or () for leaf in leaves]
    by_leaf: dict[int, list[RowKey]] = {}
    for key in keys:
        by_leaf.setdefault(max(0, bisect_right(firsts, key) - 1), []).append(key)
    return by_leaf


def _table_of(ordered: Sequence[RowKey], rows: pa.Table, keys: Sequence[str]) -> pa.Table:
    """Return the columns of keys, in the form of `key_columns`."""
    kinds = key_columns(rows.slice(0, 0), keys).schema
    arrays = [
        pa.array(
            [value if is_valid else None for is_valid, value in (key[index] for key in ordered)], field.type
        )
        for index, field in enumerate(kinds)
    ]
    return pa.Table.from_arrays(arrays, schema=kinds)


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
    """Return the deliveries of later supersteps, newest first."""
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
