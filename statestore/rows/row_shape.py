"""Conversion of other writers' Parquet files into the row schema.

Spark's OPTIMIZE and delta-rs rewrite row files at any time. The values stay
the same but their shape changes: timestamps without a time zone or as
INT96, narrower integers, large strings, nested fields in another order or
under other list names, missing columns. `conform` maps all of these by name; a name
that rows do not have is an error, since a damaged name must not read as a missing
column.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from millpond.statestore.errors import DataError
from millpond.statestore.rows.row import PARTITION_COLUMN, ROW_SCHEMA

_NEVER_NULL = ("key", "sequencer", "commit_number")

_ALL: Final = list(ROW_SCHEMA.names)


def check_names(schema: pa.Schema) -> None:
    """Refuse a file with columns that rows do not have.

    Raises:
        DataError: there are such columns; the error names them.
    """
    unknown = sorted(set(schema.names) - {PARTITION_COLUMN, *ROW_SCHEMA.names})
    if unknown:
        raise DataError("the file has columns that rows do not have", columns=unknown)


def conform(table: pa.Table, columns: list[str]) -> pa.Table:
    """``columns`` of the table with the types of `ROW_SCHEMA`; a missing column is null.

    Raises:
        DataError: a row lacks its key, sequencer or commit number, or a nested field is unknown.
    """
    schema = ROW_SCHEMA if columns == _ALL else pa.schema([ROW_SCHEMA.field(name) for name in columns])
    if not table.schema.equals(schema):
        table = _converted(table, schema)
    for name in _NEVER_NULL:
        if name in columns and table.column(name).null_count:
            raise DataError("a row update lacks a required value", column=name)
    return table


def _converted(table: pa.Table, schema: pa.Schema) -> pa.Table:
    indices = {name: index for index, name in enumerate(table.column_names)}
    arrays = [_column(table, field, indices.get(field.name)) for field in schema]
    return pa.Table.from_arrays(arrays, schema=schema)


def with_values(
    lists: pa.Array, values: pa.Array, target: pa.ListType, nulls: pa.BooleanArray
) -> pa.ListArray:
    """Lists with the lengths of ``lists`` over other values.

    Args:
        lists: lists of any layout; null lists count as empty.
        values: the concatenated values of the new lists.
        target: the type of the result.
        nulls: which lists of the result are null.
    """
    return lists_of(values, lengths_of(lists), target, nulls)


def lists_of(
    values: pa.Array, lengths: npt.NDArray[np.int64], target: pa.ListType, nulls: pa.BooleanArray
) -> pa.ListArray:
    """Values cut into lists.

    Args:
        values: the concatenated values.
        lengths: the length of each list; 0 of a null list.
        target: the type of the result.
        nulls: which lists are null.

    Example:
        >>> lengths = np.array([2, 0, 1])
        >>> lists_of(pa.array([1, 2, 3]), lengths, pa.list_(pa.int64()), pa.array(lengths == 0)).to_pylist()
        [[1, 2], None, [3]]
    """
    offsets = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    # Arrow takes five times as long with a mask.
    return pa.ListArray.from_arrays(offsets, values, type=target, mask=nulls if nulls.true_count else None)


def lengths_of(lists: pa.Array) -> npt.NDArray[np.int64]:
    """The length of each list; 0 of a null list."""
    lengths: npt.NDArray[np.int64]
    if not isinstance(lists, pa.ListArray):
        lengths = pc.fill_null(pc.list_value_length(lists), 0).to_numpy()
    else:
        offsets = lists.offsets.to_numpy()
        lengths = offsets[1:] - offsets[:-1]
        if lists.null_count:
            lengths[lists.is_null().to_numpy(zero_copy_only=False)] = 0
    return lengths.astype(np.int64)


def _column(table: pa.Table, field: pa.Field, index: int | None) -> pa.ChunkedArray:
    if index is None:
        return pa.chunked_array([pa.nulls(table.num_rows, field.type)])
    column = table.column(index)
    if column.type.equals(field.type):
        return column
    return pa.chunked_array([_convert(chunk, field.type) for chunk in column.chunks], type=field.type)


def _convert(array: pa.Array, target: pa.DataType) -> pa.Array:
    if array.type.equals(target):
        return array
    if pa.types.is_list(target) and _is_any_list(array.type):
        return _convert_list(array, target)
    if pa.types.is_struct(target) and pa.types.is_struct(array.type):
        return _convert_struct(array, target)
    if pa.types.is_timestamp(target) and pa.types.is_timestamp(array.type):
        # Other writers may store finer times; our values have no digits below a microsecond.
        return pc.cast(pc.cast(array, pa.timestamp("us", tz=array.type.tz), safe=False), target)
    return pc.cast(array, target)


def _is_any_list(type_: pa.DataType) -> bool:
    kinds = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    return any(is_kind(type_) for is_kind in kinds)


def _convert_list(array: pa.Array, target: pa.ListType) -> pa.Array:
    return with_values(array, _convert(array.flatten(), target.value_type), target, array.is_null())


def _convert_struct(array: pa.StructArray, target: pa.StructType) -> pa.Array:
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
