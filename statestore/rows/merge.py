"""The reader's rule, over Arrow and as SQL: many row updates in, one row per key out.

The rule is stated in `millpond.statestore.rows.row`. `combine_updates` turns updates of a key into one equivalent update.
It may be applied to some of a key's updates and again to its own results, so a compaction can rewrite a few files and
leave the older files alone. No Python runs per row: keys become small integers, and "the last update that…" is a single
indexed assignment.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from itertools import pairwise
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from millpond.statestore.errors import InvalidError
from millpond.statestore.rows.row import ROW_SCHEMA, STATE_VERSION, has_state, lengths_of, lists_of
from millpond.statestore.rows.state_schema import state_columns_among

_CHUNK_BYTES_MAX: Final = 2**30
_WIDE: Final = {pa.string(): pa.large_string(), pa.binary(): pa.large_binary()}


def nulls(type_: pa.DataType, count: int) -> pa.Array:
    """Return nulls without values below them; a list of ``pa.nulls`` has null values, which would be written to files."""
    if not pa.types.is_list(type_):
        return pa.nulls(count, type_)
    buffers = [pa.py_buffer(bytes(-(-count // 8))), pa.py_buffer(bytes(4 * (count + 1)))]
    return pa.Array.from_buffers(type_, count, buffers, count, children=[pa.array([], type_.value_type)])


def take_rows(
    column: pa.ChunkedArray, rows: pa.Array, *, chunk_bytes_max: int = _CHUNK_BYTES_MAX
) -> pa.Array | pa.ChunkedArray:
    """Return the values of a column at ``rows``, in that order; null where a row number is null.

    Arrow's text and binary arrays hold at most 2 GiB, because their offsets have 32 bits, but the states of an interval
    may be larger. Such a column is gathered with 64-bit offsets and returned in chunks of ``chunk_bytes_max``.
    """
    if column.null_count == len(column):
        return nulls(column.type, len(rows))
    wide = _WIDE.get(column.type)
    if wide is None or column.num_chunks < 2 or column.nbytes < chunk_bytes_max:
        return column.combine_chunks().take(rows)
    lengths = pc.fill_null(pc.binary_length(column), 0).to_numpy()
    is_present = rows.is_valid().to_numpy(zero_copy_only=False)
    sizes = np.where(is_present, lengths[rows.fill_null(0).to_numpy()], 0).astype(np.int64)
    begins = np.cumsum(sizes) - sizes
    bounds = [0, *(np.flatnonzero(np.diff(begins // chunk_bytes_max)) + 1).tolist(), len(rows)]
    chosen = column.cast(wide).combine_chunks()
    pieces = [
        # Take piece by piece, so that the offsets of each piece begin at zero.
        chosen.take(rows.slice(start, stop - start)).cast(column.type)
        for start, stop in pairwise(bounds)
    ]
    return pieces[0] if len(pieces) == 1 else pa.chunked_array(pieces, column.type)


# The columns of a row that readers see; the rule also needs to know which updates delete.
ROWS_VIEW_COLUMNS: Final = (
    "key",
    "state",
    "state_bytes",
    "state_version",
    "timers",
    "hold",
    "superstep",
    "sequencer",
    "commit_number",
)
MERGE_COLUMNS: Final = (*ROWS_VIEW_COLUMNS, "deleted")
_SCHEMA: Final = pa.schema([ROW_SCHEMA.field(name) for name in MERGE_COLUMNS])
_TIMERS: Final = MERGE_COLUMNS.index("timers")
_STATE_VERSION: Final = MERGE_COLUMNS.index(STATE_VERSION)
_DELETED: Final = MERGE_COLUMNS.index("deleted")

_Mask: TypeAlias = npt.NDArray[np.bool_]
_Index: TypeAlias = npt.NDArray[np.int64]


def merge_updates(updates: pa.Table) -> pa.Table:
    """Return one row per key with state or timers, sorted by key, in `MERGE_COLUMNS` without ``deleted``.

    Absent ``timers`` are an empty list, and ``state_version`` is 0 for a state without a version.
    """
    return split_rows(updates)[0]


def split_rows(updates: pa.Table) -> tuple[pa.Table, pa.Table]:
    """Return the rows of `merge_updates`, and keys without state and timers, but perhaps with ids or productions."""
    combined = combine_updates(updates)
    timers = _empty_lists(combined.column("timers").combine_chunks())
    with_state = has_state(combined)
    is_row = with_state | (lengths_of(timers) > 0)
    rows = combined.set_column(_TIMERS, combined.schema.field(_TIMERS), timers).drop_columns(["deleted"])
    stored = pc.fill_null(combined.column(STATE_VERSION), 0).to_numpy()
    versions = pa.array(stored) if with_state.all() else pa.array(stored, mask=~with_state)
    rows = rows.set_column(_STATE_VERSION, combined.schema.field(_STATE_VERSION), versions)
    if is_row.all():
        return rows, rows.slice(0, 0)
    return rows.filter(pa.array(is_row)), rows.filter(pa.array(~is_row))


def combine_updates(updates: pa.Table) -> pa.Table:
    """Return one update per key, sorted by key in `MERGE_COLUMNS`, equivalent to all of the key's updates together.

    Columns of states with a schema follow.
    ``combine(a + b) == combine(combine(a) + combine(b))`` for any split in which ``a``'s updates of a key are
    older than ``b``'s. Tombstones stay; drop them only when no older file of the key is left.
    """
    missing = set(MERGE_COLUMNS).difference(updates.column_names)
    if missing:
        raise InvalidError("columns that a merge needs are missing", columns=sorted(missing))
    typed = state_columns_among(updates.column_names)
    table = updates.select([*MERGE_COLUMNS, *typed]).combine_chunks()
    flags = table.column("deleted")
    deleted = _flags(pc.fill_null(flags, False) if flags.null_count else flags)
    keys = table.column("key").combine_chunks()
    schema = pa.schema([*_SCHEMA, *(updates.schema.field(name) for name in typed)]) if typed else _SCHEMA
    if table.schema.equals(schema) and not deleted.any():
        last = len(keys) - 1
        if last < 1 or pc.less(keys.slice(0, last), keys.slice(1)).true_count == last:
            # The table has one update per key, in order: combining would not change it.
            if not flags.null_count:
                return table
            return table.set_column(_DELETED, _SCHEMA.field(_DELETED), pa.array(deleted))
    return _combine(table, keys.dictionary_encode(), deleted, schema)


def _combine(table: pa.Table, keys: pa.DictionaryArray, deleted: _Mask, schema: pa.Schema) -> pa.Table:
    codes = keys.indices.to_numpy().astype(np.int64)
    # Files come in the order of their commits, so the rows are usually in order already.
    sequencers, numbers = (table.column(name).to_numpy() for name in ("sequencer", "commit_number"))
    rises = (sequencers[:-1] < sequencers[1:]) | (
        (sequencers[:-1] == sequencers[1:]) & (numbers[:-1] <= numbers[1:])
    )
    order = np.arange(len(codes)) if rises.all() else np.lexsort((numbers, sequencers))
    sets_state = has_state(table) | deleted
    sets_timers = _valid(table, "timers") | deleted

    by_key = pc.sort_indices(keys.dictionary).to_numpy()
    last = _last_of_each_key(codes, order, len(by_key))[by_key]
    last_state = _last_of_each_key(codes, order[sets_state[order]], len(by_key))[by_key]
    last_timers = _last_of_each_key(codes, order[sets_timers[order]], len(by_key))[by_key]
    is_deleted = _at(deleted, last_state)

    whole, states = pa.array(last), _nullable(np.where(is_deleted, -1, last_state))
    of_states = ("state", "state_bytes", STATE_VERSION, *state_columns_among(table.column_names))
    taken = {
        **{name: take_rows(table.column(name), states) for name in of_states},
        "timers": _empty_lists(
            take_rows(table.column("timers"), _nullable(last_timers)), where=_at(deleted, last_timers)
        ),
        "deleted": pa.array(is_deleted),
    }
    columns = [
        taken[name] if name in taken else take_rows(table.column(name), whole) for name in schema.names
    ]
    return pa.Table.from_arrays(columns, schema=schema)


def _last_of_each_key(codes: _Index, order: _Index, keys: int) -> _Index:
    """Return the last row number in ``order`` of each key; -1 for a key without one."""
    last = np.full(keys, -1, dtype=np.int64)
    # With repeated indices NumPy keeps the last assigned value, which is the newest update's.
    last[codes[order]] = order
    return last


def _nullable(rows: _Index) -> pa.Array:
    absent = rows < 0
    return pa.array(rows, mask=absent) if absent.any() else pa.array(rows)


def _empty_lists(lists: pa.ListArray, where: _Mask | None = None) -> pa.ListArray:
    """Replace null lists by empty lists, all or ``where`` true; Arrow's ``coalesce`` is a hundred times slower on nested lists."""
    if not lists.null_count or (where is not None and not where.any()):
        return lists
    stays_null = np.zeros(len(lists), np.bool_) if where is None else _flags(lists.is_null()) & ~where
    return lists_of(lists.flatten(), lengths_of(lists), lists.type, pa.array(stays_null))


def _at(flags: _Mask, rows: _Index) -> _Mask:
    return (flags[rows] if len(flags) else np.zeros(len(rows), dtype=np.bool_)) & (rows >= 0)


def _valid(table: pa.Table, name: str) -> _Mask:
    return _flags(table.column(name).is_valid())


def _flags(column: pa.Array | pa.ChunkedArray) -> _Mask:
    flags: _Mask = column.to_numpy(zero_copy_only=False).astype(np.bool_)
    return flags


class SqlDialect(StrEnum):
    """The value is the dialect's literal for the empty list."""

    SPARK = "array()"
    DUCKDB = "[]"


_QUERY: Final = """
with updates as (
    -- numbered as Delta's txn versions are: the lease in the high bits
    select *, sequencer * 4294967296 + commit_number as position, coalesce(deleted, false) as gone
    from {source}
),
positioned as (
    select *,
        max(position) over (partition by key) as last_position,
        max(case when {has_state} or gone then position end)
            over (partition by key) as state_position,
        max(case when timers is not null or gone then position end)
            over (partition by key) as timers_position
    from updates
),
-- at most one update of a key has a given position, so max() picks that update
merged as (
    select
        key,
        max(case when position = state_position and not gone then state end) as state,
        max(case when position = state_position and not gone then state_bytes end) as state_bytes,
        max(case when position = state_position and not gone then coalesce(state_version, 0) end)
            as state_version,
        {typed}
        coalesce(max(case when position = timers_position then timers end), {empty_list}) as timers,
        max(case when position = last_position then hold end) as hold,
        max(case when position = last_position then superstep end) as superstep,
        max(case when position = last_position then sequencer end) as sequencer,
        max(case when position = last_position then commit_number end) as commit_number
    from positioned
    group by key
)
select {columns}
from merged
where {has_state} or timers <> {empty_list}
"""


def rows_query(source: str, dialect: SqlDialect, typed: Sequence[str] = ()) -> str:
    """Return a query for one row per key over the row updates of one computation, quoted for the dialect.

    ``typed`` are its columns of states with a schema, which come last. The query needs one shuffle, because windows and
    grouping have the same partitioning.
    """
    # A struct with a map has no order, so its update is found by the position.
    chosen = "max_by({0}, case when position = state_position and not gone then position end) as {0},"
    return _QUERY.format(
        source=source,
        empty_list=dialect.value,
        columns=", ".join((*ROWS_VIEW_COLUMNS, *typed)),
        has_state=" or ".join(f"{name} is not null" for name in ("state", "state_bytes", *typed)),
        typed="\n        ".join(map(chosen.format, typed)),
    )
