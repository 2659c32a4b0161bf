"""A sink table that keeps one row per key: panes replace rows, retractions delete them.

The table's files are the leaves of a tree of one level: each holds the sorted rows of one range of keys, at
most `LEAF_ROWS_MAX`. A superstep rewrites only the leaves of its keys, in one commit that also records the
superstep. So every version of the table has one row per key for any Delta reader, and a superstep's cost
depends on the touched leaves, not on the table's size. One leaf at a time is in memory.

Panes and retractions that cancel each other within a superstep are left out, even across keys of the pipeline:
a value that moves from one key to another keeps its row.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import orjson
import pyarrow as pa
import pyarrow.compute as pc

from millpond.executor.sinks.columns import ROW_SCHEMA_BY_WINDOW, SinkRecord, retractions, sink_table
from millpond.executor.sinks.delta_table import FIRST_TAG, OWN_NAME, TableWriter, read_file, superstep_of
from millpond.executor.sinks.table_upkeep import COMPACTION
from millpond.statestore.errors import ConflictError, DataError, InvalidError
from millpond.statestore.log.action import Add
from millpond.statestore.log.files import LiveFile
from millpond.statestore.log.snapshot import Snapshot
from millpond.statestore.log.table import Replace
from millpond.statestore.rows.row import one_array
from millpond.statestore.types import Clock, Objects, Rng, Superstep

LEAF_ROWS_MAX: Final = 20_000
"""A leaf with more rows is split."""

_LEAF_BYTES: Final = 16 * 1024 * 1024
"""Uncompressed size of a leaf with wide rows, in bytes."""

_TRIES: Final = 10
_LAST_TAG: Final = "millpond.last"


RowKey: TypeAlias = tuple[tuple[bool, Any], ...]
"""The key columns of one row, comparable: nulls come first."""

_NOT_CONTENT: Final = ("at", "pane", "is_retraction")
"""Columns in which a retraction may differ from the retracted row."""


@dataclass(frozen=True, slots=True)
class _Leaf:
    """A file with its first and last key; ``None`` if another engine wrote the file, which may hold any keys."""

    file: LiveFile
    first: RowKey | None
    last: RowKey | None

    def may_hold(self, key: RowKey) -> bool:
        return self.first is None or self.last is None or self.first <= key <= self.last


class UpsertSinkWriter(TableWriter):
    """Updates one Delta table with each superstep, in one commit; `ROW_SCHEMA_BY_WINDOW` without a schema."""

    default_schema = ROW_SCHEMA_BY_WINDOW
    is_whole = True

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
        super().__init__(objects, clock, rng, name=name, record=record, schema=schema)
        self._keys = tuple(keys)
        self._leaf_rows_max = leaf_rows_max
        self._known: dict[str, _Leaf] = {}

    def _required_in(self, snapshot: Snapshot) -> frozenset[str]:
        appended = (OWN_NAME.fullmatch(file.path) and FIRST_TAG not in file.tags for file in snapshot.files)
        if self._record.delivered(snapshot.txns) and any(appended):
            raise InvalidError(
                "the sink has appended to its table, in which a key may have several rows: keep "
                'mode="append", or give the sink another path',
                sink=self._name,
                path=self._objects.url,
            )
        return super()._required_in(snapshot)

    def write(self, superstep: Superstep, productions: pa.Table) -> None:
        """Update the table with a superstep's productions, unless it has the superstep already.

        Raises `ConflictError` if other writers of the table won every try; nothing was written then.
        """
        # The table has it: a runner repeats the last superstep after a crash.
        if superstep <= self.delivered or not productions.num_rows:
            return
        rows = sink_table(productions, self._columns, self._name, self._watch, self._required)
        changes = net_changes(rows, self._keys, retractions(productions, self._name))
        for _ in range(_TRIES):
            with self._lock:
                # Read the leaves again after each conflict: they are rewritten from their current rows.
                snapshot = self._writer.known()
                # Another process of this store may have delivered it meanwhile.
                if superstep <= self.delivered:
                    return
                try:
                    self._update(snapshot, superstep, rows, changes)
                except ConflictError:
                    continue
                return
        raise ConflictError("cannot commit to the sink's table: other writers won every try", sink=self._name)

    def _update(
        self, snapshot: Snapshot, superstep: Superstep, rows: pa.Table, changes: Mapping[RowKey, RowChange]
    ) -> None:
        removed: list[LiveFile] = []
        added: list[Add] = []
        written = 0
        for leaf, table, is_last in self._rewritten(self._leaves(snapshot), rows, changes):
            if leaf is not None:
                removed.append(leaf.file)
            for part in self._parts(table, is_last=is_last):
                added.append(self._put_leaf(superstep, part))
                written += part.num_rows
        # A commit since `read_at` is a conflict: the leaves were rewritten from their rows at that version, so
        # rows of another commit would be lost.
        self._writer.write(
            Replace(
                removed=tuple(removed),
                added=tuple(added),
                read_at=snapshot.version,
                txns={self._record.app_id: superstep},
                metadata={"sink": self._name, "superstep": superstep},
                rows=written,
                guard=self._admit,
            )
        )

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

    def small_files(self, snapshot: Snapshot) -> Sequence[LiveFile]:
        """Return the longest stretch of leaves that fit into one together, if it is worth a rewrite."""
        leaves = self._leaves(snapshot)
        if _overlapping(leaves):
            return ()
        best: list[LiveFile] = []
        stretch: list[LiveFile] = []
        for leaf in leaves:
            stretch.append(leaf.file)
            while sum(file.num_records or self._leaf_rows_max for file in stretch) > self._leaf_rows_max // 2:
                del stretch[0]
            best = max(best, stretch[:], key=len)
        return best if len(best) >= COMPACTION.fan_in else ()

    def merged(self, files: Sequence[LiveFile]) -> Iterable[Add]:
        table = pa.concat_tables(self._read(_leaf_of(file)) for file in files)
        for part in self._parts(table, is_last=False):
            yield self._put_leaf(superstep_of(files), part)

    def _read(self, leaf: _Leaf) -> pa.Table:
        try:
            table = read_file(self._objects, leaf.file.path, self._name)
            return table.select(self._columns.names).cast(self._columns)
        except (pa.ArrowException, KeyError) as error:
            raise DataError(
                "a file of the sink's table has other columns",
                sink=self._name,
                path=leaf.file.path,
                reason=error,
            ) from error

    def _put_leaf(self, superstep: Superstep, table: pa.Table) -> Add:
        ends = key_columns(pa.concat_tables([table.slice(0, 1), table.slice(table.num_rows - 1)]), self._keys)
        first, last = row_keys(ends)
        return self._put(superstep, table, {FIRST_TAG: _tag(first), _LAST_TAG: _tag(last)})


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
    return _Leaf(file, _from_tag(file.tags.get(FIRST_TAG)), _from_tag(file.tags.get(_LAST_TAG)))


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
    kinds = key_columns(rows.slice(0, 0), keys).schema
    arrays = [
        pa.array(
            [value if is_valid else None for is_valid, value in (key[index] for key in ordered)], field.type
        )
        for index, field in enumerate(kinds)
    ]
    return pa.Table.from_arrays(arrays, schema=kinds)


@dataclass(slots=True)
class RowChange:
    """The change of one row: the index of its new content among the superstep's rows, and contents that delete it."""

    put: int | None = None
    taken_back: list[str] = field(default_factory=list)


def key_columns(table: pa.Table, keys: Sequence[str]) -> pa.Table:
    return pa.table({f"k{index}": _plain(table.column(name), name) for index, name in enumerate(keys)})


def _plain(column: pa.ChunkedArray, name: str) -> pa.ChunkedArray:
    kind = column.type
    if pa.types.is_timestamp(kind):
        return column.cast(pa.timestamp("us", kind.tz)).cast(pa.int64())
    if pa.types.is_date32(kind):
        return column.cast(pa.int32()).cast(pa.int64())
    if pa.types.is_integer(kind) or pa.types.is_boolean(kind):
        return column.cast(pa.int64())
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return column.cast(pa.string())
    raise InvalidError("a row's keys must be text, whole numbers or times", column=name, type=kind)


def row_keys(columns: pa.Table) -> list[RowKey]:
    lists = [column.to_pylist() for column in columns.columns]
    return [
        tuple((value is not None, 0 if value is None else value) for value in row)
        for row in zip(*lists, strict=True)
    ]


def key_texts(columns: pa.Table) -> pa.Array:
    """Return one text for the key of each row, different for different keys."""
    parts = []
    for column in columns.combine_chunks().columns:
        text = column.cast(pa.string())
        length = pc.utf8_length(text).cast(pa.string())
        parts.append(pc.fill_null(pc.binary_join_element_wise(length, text, ":"), "-"))
    joined = pc.binary_join_element_wise(*parts, "|") if len(parts) > 1 else parts[0]
    return one_array(joined)


def contents(table: pa.Table, keys: Sequence[str]) -> list[str]:
    """Return the columns of each row outside its key, as comparable text."""
    names = [name for name in table.column_names if name not in (*keys, *_NOT_CONTENT)]
    if not names:
        return [""] * table.num_rows
    return [repr(tuple(row.values())) for row in table.select(names).to_pylist()]


def net_changes(table: pa.Table, keys: Sequence[str], retracts: Sequence[bool]) -> dict[RowKey, RowChange]:
    changes: dict[RowKey, RowChange] = {}
    texts = contents(table, keys)
    pending: dict[RowKey, list[int]] = {}
    for index, (key, is_retraction) in enumerate(
        zip(row_keys(key_columns(table, keys)), retracts, strict=True)
    ):
        change, puts = changes.setdefault(key, RowChange()), pending.setdefault(key, [])
        if not is_retraction:
            puts.append(index)
            continue
        cancelled = next((put for put in reversed(puts) if texts[put] == texts[index]), None)
        if cancelled is None:
            change.taken_back.append(texts[index])
        else:
            puts.remove(cancelled)
    for key, change in changes.items():
        change.put = pending[key][-1] if pending[key] else None
    return {key: change for key, change in changes.items() if change.put is not None or change.taken_back}
