"""
The reader's rule over Arrow: many row updates in, one row per key out.

The rule itself is stated in `millpond.statestore.rows.row`. `combine_updates` turns
the updates of a key into one equivalent update; it may be applied to some of
a key's updates and again to its own results, so a compaction can rewrite
a few files and leave the older files alone. `merge_updates` gives the rows that readers see.
No Python runs per row: keys become small integers, and "the last update that…"
is a single indexed assignment.
"""

from __future__ import annotations

from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from millpond.statestore.errors import InvalidError
from millpond.statestore.rows.row import ROW_SCHEMA
from millpond.statestore.rows.row_shape import with_values
from millpond.statestore.rows.wide_column import take_rows

__all__ = ["MERGE_COLUMNS", "combine_updates", "merge_updates", "split_rows"]

MERGE_COLUMNS: Final = (
    "key",
    "state",
    "state_bytes",
    "timers",
    "hold",
    "superstep",
    "sequencer",
    "commit_number",
    "deleted",
)
"""The columns of an update that the rule needs; readers need no others."""

_Mask: TypeAlias = npt.NDArray[np.bool_]
_Index: TypeAlias = npt.NDArray[np.int64]


def merge_updates(updates: pa.Table) -> pa.Table:
    """
    One row per key, sorted by key: the rows that every reader sees.

    A key with neither state nor timers has no row.

    Args:
        updates: row updates with at least `MERGE_COLUMNS`, in any order.

    Returns:
        `MERGE_COLUMNS` without ``deleted``; ``timers`` is an empty list where there are none.
    """
    return split_rows(updates)[0]


def split_rows(updates: pa.Table) -> tuple[pa.Table, pa.Table]:
    """
    The rows of `merge_updates`, and those of the keys with neither state nor timers, which may have something else.
    """
    combined = combine_updates(updates)
    timers = _empty_lists(combined.column("timers").combine_chunks())
    has_timers = pc.greater(pc.list_value_length(timers), 0)
    has_state = pc.or_(combined.column("state").is_valid(), combined.column("state_bytes").is_valid())
    rows = combined.set_column(combined.column_names.index("timers"), "timers", timers)
    is_row = pc.or_(has_state, has_timers)
    return rows.filter(is_row).drop_columns(["deleted"]), rows.filter(pc.invert(is_row)).drop_columns(
        ["deleted"]
    )


def combine_updates(updates: pa.Table) -> pa.Table:
    """
    One update per key, sorted by key, equivalent to all of the key's updates together.

    ``combine(a + b) == combine(combine(a) + combine(b))`` for any split in which ``a``'s
    updates of a key are older than ``b``'s. Tombstones stay; drop them only when no older
    file of the key is left.

    Args:
        updates: row updates with at least `MERGE_COLUMNS`, in any order.

    Returns:
        `MERGE_COLUMNS`, with the meaning of a row update: null means unchanged.

    Raises:
        InvalidError: a column of `MERGE_COLUMNS` is missing.
    """
    missing = [name for name in MERGE_COLUMNS if name not in updates.column_names]
    if missing:
        raise InvalidError("columns that a merge needs are missing", columns=missing)
    table = updates.select(MERGE_COLUMNS).combine_chunks()
    keys = table.column("key").combine_chunks().dictionary_encode()
    return _combine(table, keys).select(MERGE_COLUMNS)


def _combine(table: pa.Table, keys: pa.DictionaryArray) -> pa.Table:
    codes = keys.indices.to_numpy().astype(np.int64)
    order = _oldest_first(table)
    deleted = _flags(pc.fill_null(table.column("deleted"), False))
    sets_state = _valid(table, "state") | _valid(table, "state_bytes") | deleted
    sets_timers = _valid(table, "timers") | deleted

    by_key = pc.sort_indices(keys.dictionary).to_numpy()
    last = _last_of_each_key(codes, order, len(by_key))[by_key]
    last_state = _last_of_each_key(codes, order[sets_state[order]], len(by_key))[by_key]
    last_timers = _last_of_each_key(codes, order[sets_timers[order]], len(by_key))[by_key]
    is_deleted = _at(deleted, last_state)

    columns = {name: _take(table, name, last) for name in table.column_names}
    columns["state"] = _take(table, "state", np.where(is_deleted, -1, last_state))
    columns["state_bytes"] = _take(table, "state_bytes", np.where(is_deleted, -1, last_state))
    columns["timers"] = _empty_lists(
        _take(table, "timers", last_timers), unless=pa.array(~_at(deleted, last_timers))
    )
    columns["deleted"] = pa.array(is_deleted)
    return pa.table(columns, schema=pa.schema([ROW_SCHEMA.field(name) for name in table.column_names]))


def _oldest_first(table: pa.Table) -> _Index:
    """
    Row numbers by rising (sequencer, commit number).

    Files come in the order of their commits, so the rows are usually in order already.
    """
    sequencers = table.column("sequencer").to_numpy()
    commit_numbers = table.column("commit_number").to_numpy()
    rises = (sequencers[:-1] < sequencers[1:]) | (
        (sequencers[:-1] == sequencers[1:]) & (commit_numbers[:-1] <= commit_numbers[1:])
    )
    if rises.all():
        return np.arange(len(sequencers), dtype=np.int64)
    return np.lexsort((commit_numbers, sequencers)).astype(np.int64)


def _last_of_each_key(codes: _Index, order: _Index, keys: int) -> _Index:
    """
    The last row number in ``order`` of each key; -1 where there is none.
    """
    last = np.full(keys, -1, dtype=np.int64)
    # With repeated indices NumPy keeps the last assigned value: the newest update.
    last[codes[order]] = order
    return last


def _take(table: pa.Table, name: str, rows: _Index) -> pa.Array | pa.ChunkedArray:
    return take_rows(table.column(name), pa.array(rows, mask=rows < 0))


def _empty_lists(lists: pa.ListArray, unless: pa.BooleanArray | None = None) -> pa.ListArray:
    """
    Replace null lists by empty lists, except where ``unless`` is true.

    Arrow's own ``coalesce`` does the same, a hundred times slower on nested lists.
    """
    nulls = pa.array(np.zeros(len(lists), np.bool_)) if unless is None else pc.and_(lists.is_null(), unless)
    return with_values(lists, lists.flatten(), lists.type, nulls)


def _at(flags: _Mask, rows: _Index) -> _Mask:
    """
    The flags of the rows; false where the row number is -1.
    """
    return (flags[rows] if len(flags) else np.zeros(len(rows), dtype=np.bool_)) & (rows >= 0)


def _valid(table: pa.Table, name: str) -> _Mask:
    return _flags(table.column(name).is_valid())


def _flags(column: pa.ChunkedArray) -> _Mask:
    flags: _Mask = column.to_numpy(zero_copy_only=False).astype(np.bool_)
    return flags
