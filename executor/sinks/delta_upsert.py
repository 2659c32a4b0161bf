"""
A sink table that keeps one row for each key: panes replace rows, retractions delete them.

The table's files are the leaves of a tree of one level: each holds the rows of one range of
keys, sorted, and at most `LEAF_ROWS_MAX` of them. A superstep rewrites the leaves that its keys
fall into and no others, in one commit that also says which superstep it was. So every version of
the table has one row a key, for any Delta reader, and the cost of a superstep depends on the
leaves that it touches and not on the size of the table. One leaf at a time is in memory.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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
from millpond.executor.sinks.columns import ROW_SCHEMA_BY_WINDOW, ColumnWatch, retractions, sink_table
from millpond.executor.sinks.record import SinkRecord
from millpond.executor.sinks.table import open_table, write_sink_file
from millpond.statestore.errors import ConflictError, DataError
from millpond.statestore.log.action import Add
from millpond.statestore.log.live_file import LiveFile
from millpond.statestore.log.replace import replace_files
from millpond.statestore.log.snapshot import Snapshot
from millpond.statestore.types import Clock, Objects, Rng, Superstep

__all__ = ["LEAF_ROWS_MAX", "UpsertSinkWriter"]

LEAF_ROWS_MAX: Final = 20_000
"""A leaf with more rows is split."""

_LEAF_BYTES: Final = 16 * 1024 * 1024
"""About so many bytes of rows, uncompressed, is a leaf when rows are wide."""

_TRIES: Final = 10
_FIRST_TAG: Final = "millpond.first"
_LAST_TAG: Final = "millpond.last"


@dataclass(frozen=True, slots=True)
class _Leaf:
    """
    A file and the keys between which all of its rows are; ``None``: another engine wrote it, anything may be.
    """

    file: LiveFile
    first: RowKey | None
    last: RowKey | None

    def may_hold(self, key: RowKey) -> bool:
        return self.first is None or self.last is None or self.first <= key <= self.last


class UpsertSinkWriter:
    """
    Brings one Delta table up to date with each superstep: one commit each.

    Args:
        objects: the table's root.
        clock: for timestamps and waiting.
        rng: for file names and the table's identity.
        name: the sink's name.
        record: what the last superstep is remembered under.
        schema: the columns; ``None`` means `ROW_SCHEMA_BY_WINDOW`.
        keys: the columns that tell rows apart, all of them in the schema.
        leaf_rows_max: how many rows a file may hold.
    """

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
        record.check_on_opening(self._writer.snapshot)
        self._known: dict[str, _Leaf] = {}

    @property
    def delivered(self) -> Superstep:
        """
        The last superstep that the table has; 0 when it has none.
        """
        return self._record.delivered(self._writer.snapshot.txns)

    def write(self, superstep: Superstep, productions: pa.Table) -> None:
        """
        Bring the table up to date with a superstep, unless it is already.

        Raises:
            InvalidError: a value does not fit its column; the error names sink, column and key.
            ConflictError: other writers of the table kept coming first; nothing was written.
            DataError: a file of the table that has to be rewritten is missing or damaged; nothing was written.
            OutcomeUnknownError: the commit may have landed; the same call again decides.
            UnavailableError: the table is away; nothing was written.
        """
        if superstep <= self.delivered or not productions.num_rows:
            return
        rows = sink_table(productions, self._schema, self._name, self._watch)
        changes = net_changes(rows, self._keys, retractions(productions, self._name))
        for _ in range(_TRIES):
            # A leaf is rewritten from what is in it now; who comes in between has it read again.
            snapshot = self._writer.refresh()
            if superstep <= self.delivered:
                return
            try:
                self._bring_up_to_date(snapshot, superstep, rows, changes)
            except ConflictError:
                continue
            return
        raise ConflictError("other writers of the sink's table came first too often", sink=self._name)

    def _bring_up_to_date(
        self, snapshot: Snapshot, superstep: Superstep, rows: pa.Table, changes: Mapping[RowKey, RowChange]
    ) -> None:
        version = snapshot.version
        removed: list[LiveFile] = []
        added: list[Add] = []
        written = 0
        for leaf, left, is_last in self._rewritten(self._leaves(snapshot), rows, changes):
            if leaf is not None:
                removed.append(leaf.file)
            for part in self._parts(left, is_last=is_last):
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
        """
        The table's files in the order of their keys; those of other engines come first.
        """
        self._known = {file.path: self._known.get(file.path) or _leaf_of(file) for file in snapshot.files}
        return sorted(
            self._known.values(),
            key=lambda leaf: (leaf.first is not None, leaf.first or (), leaf.file.path),
        )

    def _rewritten(
        self, leaves: Sequence[_Leaf], rows: pa.Table, changes: Mapping[RowKey, RowChange]
    ) -> Iterator[tuple[_Leaf | None, pa.Table, bool]]:
        """
        Each leaf that changes with the rows that it is to hold, and whether it is the last one.
        """
        ordered = sorted(changes)
        texts = dict(zip(ordered, key_texts(_table_of(ordered, rows, self._keys)).to_pylist(), strict=True))
        if not leaves:
            new = [key for key in ordered if changes[key].put is not None]
            if new:
                yield None, self._with(rows.schema.empty_table(), rows, changes, new), True
            return
        homes, loose = _homes(leaves, ordered), _loose(leaves)
        for index in sorted(homes.keys() | loose):
            leaf = leaves[index]
            new = [key for key in homes.get(index, ()) if changes[key].put is not None]
            asked = ordered if index in loose else homes[index]
            touched = {texts[key]: changes[key] for key in asked if leaf.may_hold(key)}
            if not touched and not new:
                continue
            before = self._read(leaf)
            kept = self._without(before, touched)
            # What another engine has put together is cut into leaves as soon as it is read.
            if kept.num_rows < before.num_rows or new or leaf.first is None:
                yield leaf, self._with(kept, rows, changes, new), index == len(leaves) - 1

    def _without(self, table: pa.Table, touched: Mapping[str, RowChange]) -> pa.Table:
        """
        A leaf's rows without those that are replaced or taken back.
        """
        if not touched or not table.num_rows:
            return table
        texts = key_texts(key_columns(table, self._keys))
        indices = pc.indices_nonzero(pc.is_in(texts, pa.array(list(touched), pa.string())))
        met = table.take(indices)
        gone = [
            index
            for index, text, said in zip(
                indices.to_pylist(), texts.take(indices).to_pylist(), contents(met, self._keys), strict=True
            )
            if touched[text].put is not None or said in touched[text].taken_back
        ]
        if not gone:
            return table
        stays = pc.invert(pc.is_in(pa.array(range(table.num_rows)), pa.array(gone, pa.int64())))
        return table.filter(stays)

    def _with(
        self, kept: pa.Table, rows: pa.Table, changes: Mapping[RowKey, RowChange], new: Iterable[RowKey]
    ) -> pa.Table:
        indices = [index for key in new if (index := changes[key].put) is not None]
        table = pa.concat_tables([kept, rows.take(pa.array(indices, pa.int64()))])
        return table.take(_order(key_columns(table, self._keys)))

    def _parts(self, table: pa.Table, *, is_last: bool) -> Iterator[pa.Table]:
        """
        The rows of a leaf, split if they are too many for one.
        """
        rows = table.num_rows
        wide = max(1, _LEAF_BYTES * rows // max(table.nbytes, 1))
        most = min(self._leaf_rows_max, wide)
        # Keys that follow time come at the end; leaves that are left behind there are full.
        size = most if is_last or rows <= most else -(-rows // -(-rows // most))
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
    """
    The indices of rows in the order of their `RowKey`, nulls first.
    """
    by: dict[str, pa.ChunkedArray] = {}
    for name in columns.column_names:
        by |= {f"{name} is there": pc.is_valid(columns.column(name)), name: columns.column(name)}
    return pc.sort_indices(pa.table(by), sort_keys=[(name, "ascending") for name in by])


def _tag(key: RowKey) -> str:
    return orjson.dumps([value if there else None for there, value in key]).decode()


def _from_tag(text: str | None) -> RowKey | None:
    if text is None:
        return None
    return tuple((value is not None, 0 if value is None else value) for value in orjson.loads(text))


def _leaf_of(file: LiveFile) -> _Leaf:
    return _Leaf(file, _from_tag(file.tags.get(_FIRST_TAG)), _from_tag(file.tags.get(_LAST_TAG)))


def _loose(leaves: Sequence[_Leaf]) -> set[int]:
    """
    Leaves that share keys with others, or may: none, unless other engines wrote to the table.
    """
    loose: set[int] = set()
    widest: int | None = None
    for index, leaf in enumerate(leaves):
        if leaf.first is None or leaf.last is None:
            loose.add(index)
            continue
        reach_of_widest = None if widest is None else leaves[widest].last
        if widest is not None and reach_of_widest is not None and leaf.first <= reach_of_widest:
            loose |= {widest, index}
        if reach_of_widest is None or leaf.last > reach_of_widest:
            widest = index
    return loose


def _homes(leaves: Sequence[_Leaf], keys: Iterable[RowKey]) -> dict[int, list[RowKey]]:
    """
    The leaf that each key belongs to: the last one that begins at or before it, or the first.
    """
    firsts = [leaf.first or () for leaf in leaves]
    homes: dict[int, list[RowKey]] = {}
    for key in keys:
        homes.setdefault(max(0, bisect_right(firsts, key) - 1), []).append(key)
    return homes


def _table_of(ordered: Sequence[RowKey], rows: pa.Table, keys: Sequence[str]) -> pa.Table:
    """
    Keys as the columns that `key_columns` makes of rows.
    """
    kinds = key_columns(rows.slice(0, 0), keys).schema
    arrays = [
        pa.array([value if there else None for there, value in (key[index] for key in ordered)], field.type)
        for index, field in enumerate(kinds)
    ]
    return pa.Table.from_arrays(arrays, schema=kinds)
