"""The reader's rule, over Arrow and as SQL: many row updates in, one row per key out.

The rule is stated in `millpond.statestore.rows.row`. `combine_updates` turns updates of a key into one equivalent update.
It may be applied to some of a key's updates and again to its own results, so a compaction can rewrite a few files and
leave the older files alone. No Python runs per row: keys become small integers, and "the last update that…" is a single
indexed assignment.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from enum import StrEnum
from itertools import pairwise
from types import MappingProxyType
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from millpond.statestore.errors import DataError, InvalidError
from millpond.statestore.rows.row import ROW_SCHEMA, STATE_VERSION, has_state, lengths_of, lists_of
from millpond.statestore.rows.state_schema import (
    SchemaCodec,
    addend_columns_among,
    addend_name,
    state_columns_among,
    struct_of,
    sum_name,
)
from millpond.statestore.rows.value_text import decode_value

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


def values_where(values: pa.Array, chosen: npt.NDArray[np.bool_]) -> pa.Array:
    """Return the values, with null for all that are not chosen."""
    return values.take(pa.array(np.arange(len(values)), mask=~chosen))


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
_HALF_BITS: Final = 32
_HALF: Final = 2**_HALF_BITS - 1

_Mask: TypeAlias = npt.NDArray[np.bool_]
_Index: TypeAlias = npt.NDArray[np.int64]


def merge_updates(updates: pa.Table) -> pa.Table:
    """Return one row per key with state or timers, sorted by key, in `MERGE_COLUMNS` without ``deleted``.

    Absent ``timers`` are an empty list, and ``state_version`` is 0 for a state without a version. Addends are states.
    """
    return split_rows(updates)[0]


def split_rows(updates: pa.Table) -> tuple[pa.Table, pa.Table]:
    """Return the rows of `merge_updates`, and keys without state and timers, but perhaps with ids or productions."""
    combined = with_whole_sums(combine_updates(updates))
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

    Columns of states with a schema and of addends follow. Addends alone stay addends, because an older file may have the
    state to which they add.
    ``combine(a + b) == combine(combine(a) + combine(b))`` for any split in which ``a``'s updates of a key are
    older than ``b``'s. Tombstones stay; drop them only when no older file of the key is left.
    """
    missing = set(MERGE_COLUMNS).difference(updates.column_names)
    if missing:
        raise InvalidError("columns that a merge needs are missing", columns=sorted(missing))
    updates = _with_columns_of_sums(updates)
    typed = [*state_columns_among(updates.column_names), *addend_columns_among(updates.column_names)]
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
    sums = _Sums(table, codes, order, by_key, np.where(is_deleted, -1, last_state), last_state)
    is_deleted &= ~sums.is_state

    whole, states = pa.array(last), _nullable(np.where(is_deleted | sums.is_state, -1, last_state))
    of_states = ("state", "state_bytes", STATE_VERSION, *state_columns_among(table.column_names))
    taken = {
        **{name: take_rows(table.column(name), states) for name in of_states},
        **sums.columns,
        "timers": _empty_lists(
            take_rows(table.column("timers"), _nullable(last_timers)), where=_at(deleted, last_timers)
        ),
        "deleted": pa.array(is_deleted),
    }
    columns = [
        taken[name] if name in taken else take_rows(table.column(name), whole) for name in schema.names
    ]
    return pa.Table.from_arrays(columns, schema=schema)


def _with_columns_of_sums(updates: pa.Table) -> pa.Table:
    """Add the columns of states to which addends add, so that all parts of a compaction have the same columns."""
    for name in addend_columns_among(updates.column_names):
        updates = _with_column(updates, sum_name(name), updates.schema.field(name).type)
    return updates


def _with_column(updates: pa.Table, name: str, kind: pa.StructType) -> pa.Table:
    if name in updates.column_names:
        return updates
    return updates.append_column(name, pa.nulls(updates.num_rows, kind))


def with_whole_sums(combined: pa.Table) -> pa.Table:
    """Return combined updates whose addends are states, because nothing lies before them."""
    for name in addend_columns_among(combined.column_names):
        own, states = combined.column(name).combine_chunks(), combined.column(sum_name(name)).combine_chunks()
        if own.null_count < len(own):
            states = pc.coalesce(own, states)
        place = combined.column_names.index(sum_name(name))
        combined = combined.set_column(place, pa.field(sum_name(name), states.type), states).drop_columns(
            [name]
        )
    return combined


class _Sums:
    """The sums of the addends of each key that are newer than its state or deletion.

    Schemas only grow, so each has all fields of the smaller ones. The sum of a key has the largest schema among its
    addends and its state.

    Attributes:
        is_state: the keys with a sum that is a state, because a state or a deletion came before the addends.
        columns: the columns of sums and of addends, complete, by name.
    """

    def __init__(
        self, table: pa.Table, codes: _Index, order: _Index, by_key: _Index, states: _Index, ends: _Index
    ) -> None:
        """Add up the addends of a table of updates in ``order``.

        ``states`` are the rows with the states of the keys, ``ends`` these and the deletions; -1 where there is none.
        """
        count = len(by_key)
        self.is_state: _Mask = np.zeros(count, np.bool_)
        self.columns: dict[str, pa.Array] = {}
        names = _by_size(table.schema)
        if not names:
            return
        slots = np.empty(count, np.int64)
        slots[by_key] = np.arange(count)
        owners = slots[codes]
        ranks = np.empty(len(order), np.int64)
        ranks[order] = np.arange(len(order))
        is_newer = ranks > np.where(ends < 0, -1, ranks[ends])[owners]
        parts: list[_Part] = []
        for name in names:
            if addend_name(name) in table.column_names:
                column = table.column(addend_name(name)).combine_chunks()
                rows = np.flatnonzero(is_newer & _flags(column.is_valid()))
            else:
                column, rows = pa.array([], table.schema.field(name).type), np.empty(0, np.int64)
            parts.append(_Part(column.take(pa.array(rows)), owners[rows]))
        schema = _largest(parts, np.full(count, -1))
        has_sum = schema >= 0
        self.is_state = has_sum & (ends >= 0)
        based = np.flatnonzero(self.is_state & (states >= 0))
        of_rows = table.select(["state", STATE_VERSION, *names]).take(pa.array(states[based]))
        former = _states_to_add_to(of_rows, names)
        of_states = [_Part(part.cells, based[part.owners]) for part in former]
        # The text of a state has no schema.
        schema = _largest(of_states[: len(names)], schema)
        sums = _sums_by_field([*parts, *of_states], count)
        for place, name in enumerate(names):
            kind, own = table.schema.field(name).type, has_sum & (schema == place)
            total = pa.StructArray.from_arrays([sums[field.name] for field in kind], fields=list(kind))
            untouched = take_rows(table.column(name), _nullable(np.where(self.is_state, -1, states)))
            self.columns[name] = pc.coalesce(values_where(total, own & self.is_state), untouched)
            if addend_name(name) in table.column_names:
                self.columns[addend_name(name)] = values_where(total, own & ~self.is_state)


class _Part(NamedTuple):
    """Addends, or states to which they add, of the keys with these numbers."""

    cells: pa.StructArray
    owners: _Index


def _by_size(schema: pa.Schema) -> list[str]:
    """Return the columns of sums, the smallest schema first; each has all fields of the one before."""
    added = sorted(map(sum_name, addend_columns_among(schema.names)), key=lambda name: _size(schema, name))
    if not added:
        return []
    fields = [frozenset(schema.field(name).type) for name in added]
    if any(not small < large for small, large in pairwise(fields)):
        raise DataError("the addends have schemas of which none has all fields of the others", columns=added)
    # A compaction may have left only states of a former schema.
    former = [
        name
        for name in state_columns_among(schema.names)
        if name not in added
        and all(own < (kind := frozenset(schema.field(name).type)) or kind < own for own in fields)
    ]
    return sorted([*added, *former], key=lambda name: _size(schema, name))


def _size(schema: pa.Schema, name: str) -> int:
    size: int = schema.field(name).type.num_fields
    return size


def _largest(parts: Sequence[_Part], schema: _Index) -> _Index:
    for place, part in enumerate(parts):
        schema[part.owners] = np.maximum(schema[part.owners], place)
    return schema


def check_addable(rows: pa.Table, addend: pa.Field) -> None:
    """Raise `DataError` unless addends can be added to the states of these rows, each of which has one."""
    name = sum_name(addend.name)
    _states_to_add_to(_with_column(rows, name, addend.type), [name])


def _states_to_add_to(rows: pa.Table, names: Sequence[str]) -> list[_Part]:
    """Return the states in ``rows`` by these columns of sums, and last those that are text."""
    parts, left = [], np.ones(rows.num_rows, np.bool_)
    for name in names:
        column = rows.column(name).combine_chunks()
        own = _flags(column.is_valid())
        parts.append(_Part(column.filter(pa.array(own)), np.flatnonzero(own)))
        left &= ~own
    texts = rows.column("state").filter(pa.array(left)).to_pylist()
    if None in texts or pc.max(rows.column(STATE_VERSION)).as_py():
        raise DataError("states of another schema or version cannot be added to", columns=list(names))
    # States of loaded rows, and from before the schema, are text.
    kind = rows.schema.field(names[-1]).type
    codec = SchemaCodec(kind)
    try:
        # Fields that the schema lacks are refused, because a larger one might count them later.
        parsed = [codec.encode(decode_value(text)) for text in texts]
    except (InvalidError, ValueError) as error:
        raise DataError("a state that is text cannot be added to", column=names[-1], reason=error) from error
    return [*parts, _Part(struct_of(parsed, kind), np.flatnonzero(left))]


def _sums_by_field(parts: Sequence[_Part], count: int) -> dict[str, pa.Array]:
    """Return the sums of all parts by field and owner; null where nothing is added."""
    high: dict[str, _Index] = defaultdict(lambda: np.zeros(count, np.int64))
    low: dict[str, _Index] = defaultdict(lambda: np.zeros(count, np.int64))
    has_any: dict[str, _Mask] = defaultdict(lambda: np.zeros(count, np.bool_))
    for cells, owners in parts:
        for field, values in zip(cells.type, cells.flatten(), strict=True):
            own, numbers = owners[_flags(values.is_valid())], values.drop_null().to_numpy()
            # In two halves, because whole sums wrap around in silence.
            np.add.at(high[field.name], own, numbers >> _HALF_BITS)
            np.add.at(low[field.name], own, numbers & _HALF)
            has_any[field.name][own] = True
    found = {}
    for name, halves in low.items():
        upper = high[name] + (halves >> _HALF_BITS)
        if ((upper < -(2**31)) | (upper >= 2**31)).any():
            raise DataError("a sum of a combining state does not fit into 64 bits", field=name)
        found[name] = pa.array((upper << _HALF_BITS) | (halves & _HALF), mask=~has_any[name])
    return found


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

    def struct(self, fields: Mapping[str, str]) -> str:
        """Return a struct of expressions by the quoted name of the field."""
        if self is SqlDialect.DUCKDB:
            return f"struct_pack({', '.join(f'{name} := {value}' for name, value in fields.items())})"
        return f"struct({', '.join(f'{value} as {name}' for name, value in fields.items())})"

    def of_text(self, name: str) -> str:
        """Return the whole number in a field of a state that is text."""
        quoted = self.quote(name)
        if self is SqlDialect.DUCKDB:
            path = f"$.{quoted}".replace("'", "''")
            return f"cast(json_extract_string(state, '{path}') as bigint)"
        kind = f"{quoted} bigint".replace("\\", "\\\\").replace("'", "\\'")
        return f"from_json(state, '{kind}').{quoted}"

    def wide(self, number: str) -> str:
        """Return a whole number in a type in which sums do not wrap around."""
        return f"cast({number} as {'hugeint' if self is SqlDialect.DUCKDB else 'decimal(38, 0)'})"

    def narrow(self, number: str) -> str:
        """Return a whole number of 64 bits; another one is an error, whatever Spark's setting for casts."""
        if self is SqlDialect.DUCKDB:
            return f"cast({number} as bigint)"
        error = "cast(raise_error('a sum of a combining state does not fit into 64 bits') as bigint)"
        is_held = f"{number} between {-(2**63)} and {2**63 - 1}"
        return f"case when {is_held} then cast({number} as bigint) else {error} end"

    def quote(self, name: str) -> str:
        mark = '"' if self is SqlDialect.DUCKDB else "`"
        return mark + name.replace(mark, 2 * mark) + mark


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
        {addends}
        coalesce(max(case when position = timers_position then timers end), {empty_list}) as timers,
        max(case when position = last_position then hold end) as hold,
        max(case when position = last_position then superstep end) as superstep,
        max(case when position = last_position then sequencer end) as sequencer,
        max(case when position = last_position then commit_number end) as commit_number
    from positioned
    group by key
),
summed as (
    select {columns}
    from merged
)
select *
from summed
where {has_state} or timers <> {empty_list}
"""


def rows_query(
    source: str,
    dialect: SqlDialect,
    typed: Sequence[str] = (),
    addends: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> str:
    """Return a query for one row per key over the row updates of one computation, quoted for the dialect.

    ``typed`` are its columns of states with a schema, which come last, and ``addends`` the fields of each column of
    addends; ``typed`` has their sums too. The query needs one shuffle, because windows and grouping have the same
    partitioning.
    """
    # A struct with a map has no order, so its update is found by the position.
    chosen = "max_by({0}, case when position = state_position and not gone then position end) as {0},"
    columns = {name: name for name in (*ROWS_VIEW_COLUMNS, *typed)}
    added = []
    largest_first = sorted(addends.items(), key=lambda column: -len(column[1]))
    for name, fields in largest_first:
        news = f"case when position > coalesce(state_position, -1) then {name} end"
        parts = {
            quoted: f"sum({dialect.wide(f'({news}).{quoted}')})" for quoted in map(dialect.quote, fields)
        }
        added.append(f"case when count({news}) > 0 then {dialect.struct(parts)} end as {name}_sums,")
    has_sum = " or ".join(f"{name}_sums is not null" for name in addends)
    larger: list[str] = []
    for name, fields in largest_first:
        wholes = {}
        for field in fields:
            quoted = dialect.quote(field)
            terms = [dialect.of_text(field)]
            for own, of_own in addends.items():
                terms += [f"{sum_name(own)}.{quoted}", f"{own}_sums.{quoted}"] if field in of_own else []
            wide = list(map(dialect.wide, terms))
            total = " + ".join(f"coalesce({term}, 0)" for term in wide)
            wholes[quoted] = (
                f"case when coalesce({', '.join(wide)}) is not null then {dialect.narrow(f'({total})')} end"
            )
        is_own = f"({name}_sums is not null or {sum_name(name)} is not null)"
        is_largest = " and not ".join([is_own, *larger])
        columns[sum_name(name)] = (
            f"case when not ({has_sum}) then {sum_name(name)} when {is_largest} then {dialect.struct(wholes)} end"
        )
        larger.append(is_own)
    if addends:
        columns["state"] = f"case when not ({has_sum}) then state end"
        columns[STATE_VERSION] = f"case when {has_sum} then 0 else {STATE_VERSION} end"
    return _QUERY.format(
        source=source,
        empty_list=dialect.value,
        columns=", ".join(f"{value} as {name}" for name, value in columns.items()),
        addends="\n        ".join(added),
        has_state=" or ".join(f"{name} is not null" for name in ("state", "state_bytes", *typed)),
        typed="\n        ".join(map(chosen.format, typed)),
    )
