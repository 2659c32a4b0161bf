"""
Bring what another writer's Parquet says about rows into our schema.

Spark's OPTIMIZE and delta-rs rewrite row files at any time. What they mean stays
the same, what they look like does not: timestamps without a time zone or as
INT96, narrower integers, large strings, nested fields in another order or
under other list names, columns left out. `conform` maps all that by name; a name
that rows do not have is an error, since a damaged name must not read as a column
left out.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from millpond.statestore.errors import DataError
from millpond.statestore.rows.row import PARTITION_COLUMN, ROW_SCHEMA

__all__ = ["check_names", "conform", "with_values"]

_NEVER_NULL = ("key", "sequencer", "commit_number")

_ALL: Final = list(ROW_SCHEMA.names)


def check_names(schema: pa.Schema) -> None:
    """
    Refuse a file with columns that rows do not have.

    Raises:
        DataError: it has; they are named.
    """
    unknown = sorted(set(schema.names) - {PARTITION_COLUMN, *ROW_SCHEMA.names})
    if unknown:
        raise DataError("the file has columns that rows do not have", columns=unknown)


def conform(table: pa.Table, columns: list[str]) -> pa.Table:
    """
    ``columns`` of the table with the types of `ROW_SCHEMA`; a column that it lacks is null.

    Raises:
        DataError: a value cannot be carried over, or a row has no key or no order.
    """
    schema = ROW_SCHEMA if columns == _ALL else pa.schema([ROW_SCHEMA.field(name) for name in columns])
    known = {name: place for place, name in enumerate(table.column_names)}
    arrays = [_column(table, field, known.get(field.name)) for field in schema]
    for field, array in zip(schema, arrays, strict=True):
        if field.name in _NEVER_NULL and array.null_count:
            raise DataError("a row update lacks a value that every one has", column=field.name)
    return pa.Table.from_arrays(arrays, schema=schema)


def with_values(
    lists: pa.Array, values: pa.Array, target: pa.ListType, nulls: pa.BooleanArray
) -> pa.ListArray:
    """
    Lists as long as ``lists`` over other values.

    Args:
        lists: lists of any layout; null ones count as empty.
        values: what is in the lists, one after the other.
        target: the type of the result.
        nulls: which lists of the result are null.
    """
    lengths = pc.fill_null(pc.list_value_length(lists), 0).to_numpy()
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return pa.ListArray.from_arrays(offsets, values, type=target, mask=nulls)


def _column(table: pa.Table, field: pa.Field, place: int | None) -> pa.ChunkedArray:
    if place is None:
        return pa.chunked_array([pa.nulls(table.num_rows, field.type)])
    column = table.column(place)
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
        # Other writers' clocks may be finer than ours; their extra digits never came from us.
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
