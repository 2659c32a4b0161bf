"""The reader's rule over Arrow: many row updates in, one row per key out.

The rule itself is stated in `millpond.statestore.rows.row`. `combine_updates` turns
the updates of a key into one equivalent update; it may be applied to some of
a key's updates and again to its own results, so a compaction can rewrite
a few files and leave the older files alone. `merge_updates` gives the rows that readers see.
No Python runs per row: keys become small integers, and "the last update that…"
is a single indexed assignment.

Columns that are too large for one Arrow array.

Arrow's text and binary arrays hold at most 2 GiB, because their offsets have 32 bits. The states of
an interval may be larger, over all updates or even over the last updates alone, and must stay
readable: such a column is gathered with 64-bit offsets and returned in chunks.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from millpond.statestore.errors import InvalidError
from millpond.statestore.rows.row import ROW_SCHEMA, STATE_VERSION
from millpond.statestore.rows.row_shape import lengths_of, with_values

_CHUNK_BYTES_MAX: Final = 2**30
_WIDE: Final = {pa.string(): pa.large_string(), pa.binary(): pa.large_binary()}


def nulls(type_: pa.DataType, count: int) -> pa.Array:
    """Nulls, which have no values below them: below those of ``pa.nulls`` are nulls again, and go to files.

    Example:
        >>> nulls(pa.list_(pa.int64()), 2).to_pylist()
        [None, None]
    """
    if not pa.types.is_list(type_):
        return pa.nulls(count, type_)
    buffers = [pa.py_buffer(bytes(-(-count // 8))), pa.py_buffer(bytes(4 * (count + 1)))]
    return pa.Array.from_buffers(type_, count, buffers, count, children=[pa.array([], type_.value_type)])


def take_rows(
    column: pa.ChunkedArray, rows: pa.Array, *, chunk_bytes_max: int = _CHUNK_BYTES_MAX
) -> pa.Array | pa.ChunkedArray:
    """The values of a column at ``rows``, in that order; null where a row number is null.

    Args:
        column: any column.
        rows: row numbers.
        chunk_bytes_max: size from which a text or binary column is returned in chunks.

    Example:
        >>> take_rows(pa.chunked_array([["a", "b"], ["c"]]), pa.array([2, None, 0])).to_pylist()
        ['c', None, 'a']
    """
    if column.null_count == len(column):
        return nulls(column.type, len(rows))
    wide = _WIDE.get(column.type)
    if wide is None or column.num_chunks < 2 or column.nbytes < chunk_bytes_max:
        return column.combine_chunks().take(rows)
    lengths = pc.fill_null(pc.binary_length(column), 0).to_numpy()
    chosen = column.cast(wide).combine_chunks()
    pieces = [
        # Taken piece by piece, so that the offsets of each piece begin at zero.
        chosen.take(rows.slice(start, stop - start)).cast(column.type)
        for start, stop in _cuts(lengths, rows, chunk_bytes_max)
    ]
    return pieces[0] if len(pieces) == 1 else pa.chunked_array(pieces, column.type)


def _cuts(lengths: npt.NDArray[np.int32], rows: pa.Array, bytes_max: int) -> list[tuple[int, int]]:
    """Runs of ``rows`` whose values begin within the same ``bytes_max`` bytes."""
    present = rows.is_valid().to_numpy(zero_copy_only=False)
    numbers = rows.fill_null(0).to_numpy()
    sizes = np.where(present, lengths[numbers], 0).astype(np.int64)
    begins = np.cumsum(sizes) - sizes
    bounds = [0, *(np.flatnonzero(np.diff(begins // bytes_max)) + 1).tolist(), len(numbers)]
    return list(pairwise(bounds))


MERGE_COLUMNS: Final = (
    "key",
    "state",
    "state_bytes",
    "state_version",
    "timers",
    "hold",
    "superstep",
    "sequencer",
    "commit_number",
    "deleted",
)
"""The columns of an update that the rule needs; readers need no others."""

_SCHEMA: Final = pa.schema([ROW_SCHEMA.field(name) for name in MERGE_COLUMNS])
_TIMERS: Final = MERGE_COLUMNS.index("timers")
_STATE_VERSION: Final = MERGE_COLUMNS.index(STATE_VERSION)
_DELETED: Final = MERGE_COLUMNS.index("deleted")

_Mask: TypeAlias = npt.NDArray[np.bool_]
_Index: TypeAlias = npt.NDArray[np.int64]


def merge_updates(updates: pa.Table) -> pa.Table:
    """One row per key, sorted by key: the rows that every reader sees.

    A key with neither state nor timers has no row.

    Args:
        updates: row updates with at least `MERGE_COLUMNS`, in any order.

    Returns:
        `MERGE_COLUMNS` without ``deleted``; ``timers`` is an empty list where there are none, and
        ``state_version`` is 0 of a state without one.
    """
    return split_rows(updates)[0]


def split_rows(updates: pa.Table) -> tuple[pa.Table, pa.Table]:
    """The rows of `merge_updates`, and those of the keys with neither state nor timers, which may have something else."""
    combined = combine_updates(updates)
    timers = _empty_lists(combined.column("timers").combine_chunks())
    has_state = _valid(combined, "state") | _valid(combined, "state_bytes")
    is_row = has_state | (lengths_of(timers) > 0)
    rows = combined.set_column(_TIMERS, combined.schema.field(_TIMERS), timers).drop_columns(["deleted"])
    versions = _versions(combined.column(STATE_VERSION), has_state)
    rows = rows.set_column(_STATE_VERSION, combined.schema.field(_STATE_VERSION), versions)
    if is_row.all():
        return rows, rows.slice(0, 0)
    return rows.filter(pa.array(is_row)), rows.filter(pa.array(~is_row))


def _versions(stored: pa.ChunkedArray, has_state: _Mask) -> pa.Array:
    """The versions of states; null where there is no state."""
    if stored.null_count == len(stored):
        versions = np.zeros(len(stored), np.int32)
    else:
        versions = pc.fill_null(stored, 0).to_numpy()
    return pa.array(versions) if has_state.all() else pa.array(versions, mask=~has_state)


def combine_updates(updates: pa.Table) -> pa.Table:
    """One update per key, sorted by key, equivalent to all of the key's updates together.

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
    missing = set(MERGE_COLUMNS).difference(updates.column_names)
    if missing:
        raise InvalidError("columns that a merge needs are missing", columns=sorted(missing))
    table = updates.select(MERGE_COLUMNS).combine_chunks()
    deleted = _filled(table.column("deleted"))
    keys = table.column("key").combine_chunks()
    if table.schema.equals(_SCHEMA) and not deleted.any() and _rises(keys):
        # One update of each key, in order, is what it would be combined into.
        has_flags = not table.column(_DELETED).null_count
        return table if has_flags else table.set_column(_DELETED, _SCHEMA.field(_DELETED), pa.array(deleted))
    return _combine(table, keys.dictionary_encode(), deleted)


def _rises(keys: pa.StringArray) -> bool:
    """Whether each key is greater than the one before it."""
    last = len(keys) - 1
    return last < 1 or bool(pc.less(keys.slice(0, last), keys.slice(1)).true_count == last)


def _combine(table: pa.Table, keys: pa.DictionaryArray, deleted: _Mask) -> pa.Table:
    codes = keys.indices.to_numpy().astype(np.int64)
    order = _oldest_first(table)
    sets_state = _valid(table, "state") | _valid(table, "state_bytes") | deleted
    sets_timers = _valid(table, "timers") | deleted

    by_key = pc.sort_indices(keys.dictionary).to_numpy()
    last = _last_of_each_key(codes, order, len(by_key))[by_key]
    last_state = _last_of_each_key(codes, order[sets_state[order]], len(by_key))[by_key]
    last_timers = _last_of_each_key(codes, order[sets_timers[order]], len(by_key))[by_key]
    is_deleted = _at(deleted, last_state)

    whole, states = pa.array(last), _nullable(np.where(is_deleted, -1, last_state))
    taken = {
        "state": take_rows(table.column("state"), states),
        "state_bytes": take_rows(table.column("state_bytes"), states),
        STATE_VERSION: take_rows(table.column(STATE_VERSION), states),
        "timers": _empty_lists(
            take_rows(table.column("timers"), _nullable(last_timers)), where=_at(deleted, last_timers)
        ),
        "deleted": pa.array(is_deleted),
    }
    columns = [
        taken[name] if name in taken else take_rows(table.column(name), whole) for name in MERGE_COLUMNS
    ]
    return pa.Table.from_arrays(columns, schema=_SCHEMA)


def _oldest_first(table: pa.Table) -> _Index:
    """Row numbers by rising (sequencer, commit number).

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
    """The last row number in ``order`` of each key; -1 where there is none."""
    last = np.full(keys, -1, dtype=np.int64)
    # With repeated indices NumPy keeps the last assigned value: the newest update.
    last[codes[order]] = order
    return last


def _nullable(rows: _Index) -> pa.Array:
    """Row numbers; null where there is none."""
    absent = rows < 0
    return pa.array(rows, mask=absent) if absent.any() else pa.array(rows)


def _empty_lists(lists: pa.ListArray, where: _Mask | None = None) -> pa.ListArray:
    """Replace null lists by empty lists: all of them, or those ``where`` is true.

    Arrow's own ``coalesce`` does the same, a hundred times slower on nested lists.
    """
    if not lists.null_count or (where is not None and not where.any()):
        return lists
    stays_null = np.zeros(len(lists), np.bool_) if where is None else _flags(lists.is_null()) & ~where
    return with_values(lists, lists.flatten(), lists.type, pa.array(stays_null))


def _at(flags: _Mask, rows: _Index) -> _Mask:
    """The flags of the rows; false where the row number is -1."""
    return (flags[rows] if len(flags) else np.zeros(len(rows), dtype=np.bool_)) & (rows >= 0)


def _valid(table: pa.Table, name: str) -> _Mask:
    return _flags(table.column(name).is_valid())


def _filled(column: pa.ChunkedArray) -> _Mask:
    """The flags of a column; false where it is null."""
    return _flags(pc.fill_null(column, False) if column.null_count else column)


def _flags(column: pa.Array | pa.ChunkedArray) -> _Mask:
    flags: _Mask = column.to_numpy(zero_copy_only=False).astype(np.bool_)
    return flags
