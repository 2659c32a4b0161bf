"""
Bring what another writer's Parquet says about rows into our schema.

Spark's OPTIMIZE and delta-rs rewrite row files at any time. What they mean stays
the same, what they look like does not: timestamps without a time zone or as
INT96, narrower integers, large strings, nested fields in another order or
under other list names, columns left out. `conform` maps all that by name.
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from millpond.statestore.errors import DataError
from millpond.statestore.row import ROW_SCHEMA

__all__ = ["conform"]

_NEVER_NULL = ("key", "sequencer", "commit_number")


def conform(table: pa.Table, columns: list[str]) -> pa.Table:
    """
    ``columns`` of the table with the types of `ROW_SCHEMA`; a column that it lacks is null.

    Raises:
        DataError: a value cannot be carried over, or a row has no key or no order.
    """
    schema = pa.schema([ROW_SCHEMA.field(name) for name in columns])
    arrays = [_column(table, field) for field in schema]
    for field, array in zip(schema, arrays, strict=True):
        if field.name in _NEVER_NULL and array.null_count:
            raise DataError("a row update lacks a value that every one has", column=field.name)
    return pa.Table.from_arrays(arrays, schema=schema)


def _column(table: pa.Table, field: pa.Field) -> pa.ChunkedArray:
    if field.name not in table.column_names:
        return pa.chunked_array([pa.nulls(table.num_rows, field.type)])
    column = table.column(field.name)
    if column.type.equals(field.type):
        return column
    return pa.chunked_array([_convert(chunk, field.type) for chunk in column.chunks], type=field.type)


def _convert(array: pa.Array, target: pa.DataType) -> pa.Array:
    if array.type.equals(target):
        return array
    if pa.types.is_list(target):
        return _convert_list(array, target)
    if pa.types.is_struct(target) and pa.types.is_struct(array.type):
        return _convert_struct(array, target)
    if pa.types.is_timestamp(target) and pa.types.is_timestamp(array.type):
        # Other writers' clocks may be finer than ours; their extra digits never came from us.
        return pc.cast(pc.cast(array, pa.timestamp("us", tz=array.type.tz), safe=False), target)
    return pc.cast(array, target)


def _convert_list(array: pa.Array, target: pa.ListType) -> pa.Array:
    if not pa.types.is_list(array.type):
        array = pc.cast(array, pa.list_(array.type.value_type))
    values = _convert(array.values, target.value_type)
    mask = array.is_null() if array.null_count else None
    if mask is not None and array.offset:
        # from_arrays refuses a mask together with sliced offsets.
        array = pa.concat_arrays([array, array.slice(0, 0)])
        return _convert_list(array, target)
    return pa.ListArray.from_arrays(array.offsets, values, type=target, mask=mask)


def _convert_struct(array: pa.StructArray, target: pa.StructType) -> pa.Array:
    names = {array.type.field(i).name for i in range(array.type.num_fields)}
    parts = [
        _convert(pc.struct_field(array, field.name), field.type)
        if field.name in names
        else pa.nulls(len(array), field.type)
        for field in target
    ]
    mask = array.is_null() if array.null_count else None
    return pa.StructArray.from_arrays(parts, fields=list(target), mask=mask)
