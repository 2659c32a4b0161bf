"""The row: all durable data of one key of one computation (MillWheel §7.1).

One Parquet row is one *row update*: the new value of a key's row after a bundle, appended and never updated in place (a
"blind write", §6.1.2). The reader's rule, which `millpond.statestore.rows.merge` implements:

- updates of a key are ordered by (``sequencer``, ``commit_number``);
- the state and its ``state_version`` come from the last update that set or deleted the state (``state``,
  ``state_bytes`` or a column of states with a schema not null, or ``deleted``); a null version is 0;
- addends (a column ``addend_…`` not null) of later updates are added to that state, field by field; a null adds nothing,
  and no state is one of nulls. Their order does not matter;
- the timers come from the last update whose ``timers`` is not null or which is ``deleted`` (a deleting update with
  null ``timers`` leaves none);
- the hold comes from the last update;
- ``record_ids`` are the union; ``productions`` count until they are consumed;
- a key whose state is deleted and which has no timers has no row in queries for state; whole rows, with ids and
  productions, also exist for other keys.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from millpond.statestore.errors import DataError
from millpond.statestore.rows.state_schema import (
    UTC_TIMESTAMP,
    addend_columns_among,
    kind_as_written,
    production_columns_among,
    production_name,
    state_columns_among,
    state_field,
    stored_columns,
    texts_of,
    typed_columns_among,
    value_fields,
    value_name,
)
from millpond.statestore.types import (
    TIME_MAX_US,
    TIME_MIN_US,
    CommitNumber,
    Sequencer,
    quickly_pickled,
)

# UTC microseconds, the type of every time in a row.
TIMESTAMP: Final = UTC_TIMESTAMP

TIMER_TYPE: Final = pa.struct(
    [("tag", pa.string()), ("domain", pa.string()), ("at", TIMESTAMP), ("output_at", TIMESTAMP)]
)
"""A pending timer: its tag, its clock, the time when it fires, and its hold on the output watermark.

The clock is a `TimeDomain`, or ``event@`` and the number of a percentile watermark. A suffix ``/free`` means that the
timer does not hold the output watermark. A record that waits for its turn in time is an entry too (`TimeDomain.RECORD`).
"""

RECORD_ID_TYPE: Final = pa.struct([("id", pa.binary()), ("at", TIMESTAMP), ("arrived_at", TIMESTAMP)])
"""The id of a consumed external record, that record's event time, and the wall time of its first arrival.

The arrival is rounded up to the minute (`millpond.statestore.rows.record_ids`). It is null in files of older versions,
and where another engine has rewritten the files of a table created by an older version.
"""

PRODUCTION_TYPE: Final = pa.struct(
    [
        ("stream", pa.string()),
        ("key", pa.string()),
        ("value", pa.string()),
        ("value_bytes", pa.binary()),
        ("at", TIMESTAMP),
    ]
)
"""A produced record, checkpointed before its delivery (strong productions, §6.1.2)."""

# The Delta partition column; the path and the add action hold it, the files do not.
PARTITION_COLUMN: Final = "computation"
# The column of the version of the code's state; null is version 0.
STATE_VERSION: Final = "state_version"

ROW_SCHEMA: Final = pa.schema(
    [
        ("key", pa.string()),
        ("sequencer", pa.int64()),
        ("commit_number", pa.int64()),
        ("superstep", pa.int64()),
        ("state", pa.string()),
        ("state_bytes", pa.binary()),
        ("timers", pa.list_(TIMER_TYPE)),
        ("record_ids", pa.list_(RECORD_ID_TYPE)),
        ("productions", pa.list_(PRODUCTION_TYPE)),
        ("hold", TIMESTAMP),
        ("deleted", pa.bool_()),
        (STATE_VERSION, pa.int32()),
    ]
)
"""Schema of a row-update file, sorted by ``key``; the table adds the partition column.

Files whose states all have version 0 lack the column ``state_version``. Files of states with a schema have a column more for
each schema (`millpond.statestore.rows.state_schema`).
"""

_COMMIT_BITS: Final = 32


class TimeDomain(StrEnum):
    """The clock that a timer waits for (MillWheel §4.6): the low watermark (``EVENT``), or processing time (``WALL``).

    ``HOLD`` is no clock but a state's hold on the output watermark (§5.2), stored as a timer that never
    fires. ``RECORD`` is a record that waits for the low watermark to pass its time, stored as a timer: ``at``
    is a microsecond after the record's time, and the tag is the record as JSON.
    """

    EVENT = "event"
    WALL = "wall"
    HOLD = "hold"
    RECORD = "record"


@quickly_pickled
@dataclass(frozen=True, slots=True, order=True)
class Fence:
    """The ownership of an interval as stored in the table: its sequencer and its last commit's number."""

    sequencer: Sequencer
    commit_number: CommitNumber

    def follows(self, stored: Fence | None) -> bool:
        """Return True if a commit under this fence may follow the stored one.

        The first commit under a lease follows any smaller sequencer; every other one, the number before its
        own under the same sequencer.
        """
        if self.commit_number == 0:
            return stored is None or stored.sequencer < self.sequencer
        return stored is not None and (stored.sequencer, stored.commit_number + 1) == (
            self.sequencer,
            self.commit_number,
        )


def pack_fence(sequencer: Sequencer, commit_number: CommitNumber) -> int:
    """Return the Delta ``txn`` version of an interval: sequencer in the high bits, commit number in the low 32."""
    return (sequencer << _COMMIT_BITS) + commit_number


def unpack_fence(version: int) -> Fence:
    return Fence(Sequencer(version >> _COMMIT_BITS), CommitNumber(version & ((1 << _COMMIT_BITS) - 1)))


_FIELDS: Final = frozenset({"value", "window", "at", "pane"})
_FIELD_COUNT: Final = len(_FIELDS)
_CHANGE_PANE: Final = {
    "index": 0,
    "nonspeculative_index": 0,
    "timing": "on_time",
    "is_first": True,
    "is_last": False,
    "is_retraction": False,
    "watermark_percentile": None,
    "produced_at": 0,
    "trigger": "change",
}
_PANE_FIELDS: Final = frozenset(_CHANGE_PANE)
_BOUNDS: Final = 2


def has_envelope_fields(value: object) -> bool:
    # Called for each record: the length check rejects most values.
    return isinstance(value, dict) and len(value) == _FIELD_COUNT and value.keys() == _FIELDS


def is_envelope(value: object) -> bool:
    if type(value) is not dict or len(value) != _FIELD_COUNT or value.keys() != _FIELDS:
        return False
    window, pane = value["window"], value["pane"]
    has_bounds = type(window) is list and len(window) == _BOUNDS
    return has_bounds and type(pane) is dict and pane.keys() == _PANE_FIELDS


def change_envelope(value: Any, at: int, *, is_retraction: bool) -> dict[str, Any]:
    """Wrap a change of a source's table in an envelope: an element of no window yet, or its retraction."""
    pane = {**_CHANGE_PANE, "is_retraction": is_retraction}
    return {"value": value, "window": [TIME_MIN_US, TIME_MAX_US], "at": at, "pane": pane}


_ORDER: Final = ("key", "sequencer", "commit_number")
# Ids and productions are spread over all updates of a key. They are read separately, so that reading state does not
# pay for them.
ID_COLUMNS: Final = (*_ORDER, "record_ids")
PRODUCTION_COLUMNS: Final = (*_ORDER, "superstep", "productions")


def lists_by_key(updates: pa.Table, name: str) -> pa.Table:
    """Join the lists of ``record_ids`` or ``productions`` by key, oldest update first, without empty ones."""
    filled = updates.filter(pc.greater(pc.fill_null(pc.list_value_length(updates.column(name)), 0), 0))
    ordered = filled.sort_by([(column, "ascending") for column in _ORDER]).combine_chunks()
    kind = ROW_SCHEMA.field(name).type
    lists = ordered.column(name).combine_chunks() if ordered.num_rows else pa.array([], kind)
    keys = ordered.column("key").combine_chunks().dictionary_encode()
    lengths = pc.list_value_length(lists).to_numpy(zero_copy_only=False).astype(np.int64)
    # Updates of a key lie together now, and so do their values: only the ends of the lists change.
    per_key = np.bincount(keys.indices.to_numpy(), weights=lengths, minlength=len(keys.dictionary))
    offsets = np.concatenate([[0], np.cumsum(per_key)]).astype(np.int32)
    joined = pa.ListArray.from_arrays(offsets, lists.flatten(), type=kind)
    return pa.table({"key": keys.dictionary, name: joined})


class ListsOfKeys:
    def __init__(self, by_key: pa.Table, name: str) -> None:
        lists = by_key.column(name).combine_chunks()
        self._rows: dict[str, int] = {key: row for row, key in enumerate(by_key.column("key").to_pylist())}
        self._none = len(lists)
        self._lists = pa.concat_arrays([lists, pa.array([[]], lists.type)])

    def at(self, keys: pa.Array | pa.ChunkedArray) -> pa.Array:
        """Return the lists of these keys in their order; an empty one for a key without a list."""
        rows = [self._rows.get(key, self._none) for key in keys.to_pylist()]
        return self._lists.take(pa.array(rows, pa.int64()))


_ALL: Final = list(ROW_SCHEMA.names)
_LISTS: Final = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)


def check_names(schema: pa.Schema) -> None:
    """Refuse a file with columns that rows do not have, because a damaged name must not read as a missing column."""
    known = {PARTITION_COLUMN, *ROW_SCHEMA.names, *typed_columns_among(schema.names)}
    unknown = sorted(set(schema.names) - known)
    if unknown:
        raise DataError("the file has columns that rows do not have", columns=unknown)


def has_state(updates: pa.Table) -> npt.NDArray[np.bool_]:
    """Return which row updates set a state, in any of its columns."""
    found = np.zeros(updates.num_rows, np.bool_)
    for name in ("state", "state_bytes", *state_columns_among(updates.column_names)):
        found |= updates.column(name).is_valid().to_numpy()
    return found


def conform(table: pa.Table, columns: list[str], *, keeps_cells: bool = False) -> pa.Table:
    """Return ``columns`` of another writer's table in the types of `ROW_SCHEMA`; a missing column is null.

    States with a schema become text, or stay in columns of their own with ``keeps_cells``.

    Spark's OPTIMIZE and delta-rs rewrite row files at any time, with the same values in another shape:
    timestamps without a zone or as INT96, narrower integers, large strings, nested fields in another order or
    under other list names.
    """
    schema = ROW_SCHEMA if columns == _ALL else pa.schema([ROW_SCHEMA.field(name) for name in columns])
    typed = _typed_columns(table, columns)
    if not table.schema.equals(schema):
        names = frozenset(table.column_names)
        arrays = [
            pa.chunked_array(
                [_convert(chunk, field.type) for chunk in table.column(field.name).chunks], field.type
            )
            if field.name in names
            else pa.nulls(table.num_rows, field.type)
            for field in schema
        ]
        table = pa.Table.from_arrays(arrays, schema=schema)
    for name in _ORDER:
        if name in columns and table.column(name).null_count:
            raise DataError("a row update lacks a required value", column=name)
    for name, column in typed.items():
        table = table.append_column(name, column)
    return table if keeps_cells or not typed else with_texts(table)


def as_written(states: pa.StructArray) -> pa.StructArray:
    """Return states with a schema in the types in which they were written, whatever another engine has made of them."""
    return _convert(states, state_field(kind_as_written(states.type)).type)


def _typed_columns(table: pa.Table, columns: Sequence[str]) -> dict[str, pa.Array]:
    """Return the columns of states and productions with a schema, by name, in the types in which they were written."""
    found: dict[str, pa.Array] = {}
    for name in stored_columns(columns, typed_columns_among(table.column_names)):
        column = table.column(name).combine_chunks()
        is_list = name in production_columns_among([name])
        kind = column.type.value_type if is_list and pa.types.is_list(column.type) else column.type
        if is_list != pa.types.is_list(column.type) or not pa.types.is_struct(kind):
            raise DataError("the file has states or productions that are no rows of fields", column=name)
        field = state_field(kind_as_written(kind))
        if field.name.rpartition("_")[2] != name.rpartition("_")[2]:
            raise DataError(
                "the file has another schema in a column than the column's name says", column=name
            )
        if addend_columns_among([name]) and any(part.type != pa.int64() for part in field.type):
            raise DataError("the file has addends that are no whole numbers of 64 bits", column=name)
        found[name] = _convert(column, pa.list_(field.type) if is_list else field.type)
    return found


def with_texts(updates: pa.Table, but: Collection[str] = ()) -> pa.Table:
    """Return row updates without columns of cells ``but`` these: other states and productions with a schema are text.

    Addends stay, because they are no states yet.
    """
    names = updates.column_names
    kept_cells = {*but, *addend_columns_among(names)}
    typed = [name for name in typed_columns_among(names) if name not in kept_cells]
    of_states, of_productions = state_columns_among(typed), production_columns_among(typed)
    for name in of_states:
        column = updates.column(name).combine_chunks()
        if column.null_count < len(column):
            texts = pc.coalesce(updates.column("state"), texts_of(column))
            updates = updates.set_column(names.index("state"), ROW_SCHEMA.field("state"), texts)
    if of_productions:
        lists = updates.column("productions").combine_chunks()
        kept = updates.drop_columns([name for name in production_columns_among(but) if name in names])
        flat = flat_productions(kept)
        table = with_value_texts(pa.Table.from_arrays(flat.flatten(), schema=pa.schema(list(flat.type))))
        columns = [column.combine_chunks() for column in table.columns]
        values = pa.StructArray.from_arrays(columns, fields=list(PRODUCTION_TYPE))
        field = ROW_SCHEMA.field("productions")
        joined = lists_of(values, lengths_of(lists), field.type, lists.is_null())
        updates = updates.set_column(names.index("productions"), field, joined)
    return updates.drop_columns(typed)


def no_cells(updates: pa.Table, field: pa.Field) -> pa.Array:
    """Return a column of cells without any, for row updates whose states and productions have other schemas."""
    if not pa.types.is_list(field.type):
        return pa.nulls(updates.num_rows, field.type)
    # As long as the productions, so that their values stay side by side.
    lists = updates.column("productions").combine_chunks()
    lengths = lengths_of(lists)
    return lists_of(pa.nulls(int(lengths.sum()), field.type.value_type), lengths, field.type, lists.is_null())


def flat_productions(updates: pa.Table) -> pa.StructArray:
    """Return the productions of row updates in order; values with a schema are in fields of their own."""
    flat = one_array(updates.column("productions")).flatten()
    columns, fields = flat.flatten(), list(PRODUCTION_TYPE)
    for name in production_columns_among(updates.column_names):
        values = updates.column(name).combine_chunks().flatten()
        if len(values) != len(flat):
            raise DataError("productions and their values differ in number", column=name)
        columns.append(values)
        fields.append(pa.field(value_name(name), values.type))
    return pa.StructArray.from_arrays(columns, fields=fields) if len(fields) > flat.type.num_fields else flat


def production_lists(values: pa.StructArray, counts: npt.NDArray[np.int64]) -> dict[str, pa.ListArray]:
    """Return the row's columns for productions, ``counts`` of them in each row; the reverse of `flat_productions`."""
    nulls = pa.array(counts == 0)
    typed = value_fields(values.type)
    base = (
        values
        if not typed
        else pa.StructArray.from_arrays(
            values.flatten()[: PRODUCTION_TYPE.num_fields], fields=list(PRODUCTION_TYPE)
        )
    )
    lists = {"productions": lists_of(base, counts, pa.list_(PRODUCTION_TYPE), nulls)}
    for field in typed:
        column = values.field(field.name)
        lists[production_name(field.name)] = lists_of(column, counts, pa.list_(field.type), nulls)
    return lists


def with_value_texts(productions: pa.Table) -> pa.Table:
    """Return a table of productions with the columns of `PRODUCTION_TYPE`: values with a schema are text."""
    typed = value_fields(productions.schema)
    text = productions.column_names.index("value")
    for field in typed:
        texts = texts_of(productions.column(field.name).combine_chunks())
        joined = pc.coalesce(productions.column("value"), texts)
        productions = productions.set_column(text, PRODUCTION_TYPE.field("value"), joined)
    return productions.drop_columns([field.name for field in typed])


def one_array(column: pa.ChunkedArray | pa.Array) -> pa.Array:
    """Return a column as one array, without a copy if it is one chunk, as `combine_chunks` makes."""
    if isinstance(column, pa.Array):
        return column
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def lists_of(
    values: pa.Array, lengths: npt.NDArray[np.int64], target: pa.ListType, nulls: pa.BooleanArray
) -> pa.ListArray:
    offsets = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    # A mask only where needed: Arrow takes five times as long with one.
    return pa.ListArray.from_arrays(offsets, values, type=target, mask=nulls if nulls.true_count else None)


def lengths_of(lists: pa.Array) -> npt.NDArray[np.int64]:
    """Return the length of each list; 0 for a null list."""
    lengths: npt.NDArray[np.int64]
    if not isinstance(lists, pa.ListArray):
        lengths = pc.fill_null(pc.list_value_length(lists), 0).to_numpy()
    else:
        offsets = lists.offsets.to_numpy()
        lengths = offsets[1:] - offsets[:-1]
        if lists.null_count:
            lengths[lists.is_null().to_numpy(zero_copy_only=False)] = 0
    return lengths.astype(np.int64)


def _convert(array: pa.Array, target: pa.DataType) -> pa.Array:
    if array.type.equals(target):
        return array
    if pa.types.is_list(target) and any(is_kind(array.type) for is_kind in _LISTS):
        values = _convert(array.flatten(), target.value_type)
        return lists_of(values, lengths_of(array), target, array.is_null())
    if pa.types.is_map(target) and pa.types.is_map(array.type):
        keys, items = _convert(array.keys, target.key_type), _convert(array.items, target.item_type)
        mask = array.is_null() if array.null_count else None
        return pa.MapArray.from_arrays(array.offsets, keys, items, type=target, mask=mask)
    if pa.types.is_struct(target) and pa.types.is_struct(array.type):
        names = {field.name for field in array.type}
        unknown = sorted(names - {field.name for field in target})
        if unknown:
            raise DataError("the file has nested fields that rows do not have", fields=unknown)
        parts = [
            _convert(pc.struct_field(array, field.name), field.type)
            if field.name in names
            else pa.nulls(len(array), field.type)
            for field in target
        ]
        mask = array.is_null() if array.null_count else None
        return pa.StructArray.from_arrays(parts, fields=list(target), mask=mask)
    if pa.types.is_timestamp(target) and pa.types.is_timestamp(array.type):
        # Other writers may store finer times; our values have no digits below a microsecond, so none are lost.
        return pc.cast(pc.cast(array, pa.timestamp("us", tz=array.type.tz), safe=False), target)
    return pc.cast(array, target)
