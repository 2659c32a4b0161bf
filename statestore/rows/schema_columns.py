"""Rows of a schema that code gives as columns, fitted to the schema's types column by column.

The rules are those of `SchemaCodec.encode`, which fits one value: a field that is left out is null, whole numbers become
floats and decimals where no digit is lost, and what would change is refused with the name of its column.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from millpond.statestore.errors import InvalidError, did_you_mean
from millpond.statestore.rows.state_schema import SchemaCodec

_INTEGER_DIGITS: Final = 20
_DECIMAL256_DIGITS_MAX: Final = 76


def fitted_rows(given: Any, codec: SchemaCodec, whole: str) -> pa.StructArray:
    """Return rows in the types of the codec's column, or raise `InvalidError`.

    They are given as an array of structs, a table, or a dict of columns; only an array of structs can have null rows.
    ``whole`` begins the name of a column in errors, such as ``state.total``.
    """
    columns, is_null = _columns_of(given, whole)
    target = codec.column.type
    names = {field.name for field in target}
    for name, column in columns.items():
        if name not in names:
            raise InvalidError(
                f"the schema has no such field{did_you_mean(name, names)}",
                part=f"{whole}.{name}",
                type=str(column.type),
            )
    lengths = {len(column) for column in columns.values()} | (
        {len(is_null)} if is_null is not None else set()
    )
    if len(lengths) != 1:
        raise InvalidError("the columns must have one length", part=whole, lengths=sorted(lengths))
    count = lengths.pop()
    arrays = []
    for asked, field in zip(codec.kind, target, strict=True):
        column, part = columns.get(field.name), f"{whole}.{field.name}"
        fitted = pa.nulls(count, field.type) if column is None else _fitted(column, field.type, part)
        _refuse_nulls(fitted, asked, part, is_null)
        arrays.append(fitted)
    rows = pa.StructArray.from_arrays(arrays, fields=list(target), mask=is_null)
    try:
        # Arrays can be made of any bytes: text that is not UTF-8 would end the reader of the row.
        rows.validate(full=True)
    except pa.ArrowInvalid as error:
        raise InvalidError(
            "the columns hold values that their types do not have", part=whole, reason=error
        ) from error
    # A copy, because Arrow shares the memory of NumPy's arrays, which the code may change later.
    return pa.concat_arrays([rows, rows.slice(0, 0)])


def _columns_of(given: Any, whole: str) -> tuple[dict[str, pa.Array], pa.BooleanArray | None]:
    """Return the columns by name, and which rows are null, if any is."""
    is_null = None
    if isinstance(given, pa.ChunkedArray) and pa.types.is_struct(given.type):
        given = given.combine_chunks()
    if isinstance(given, pa.StructArray):
        names, columns = [field.name for field in given.type], given.flatten()
        if given.null_count or not names:
            is_null = given.is_null()
    elif isinstance(given, pa.Table | pa.RecordBatch):
        names, columns = given.schema.names, given.columns
    elif isinstance(given, Mapping) and given:
        names, columns = list(given), list(given.values())
    else:
        raise InvalidError(
            "give the rows as columns: an array of structs, a table, or a dict of columns",
            part=whole,
            type=type(given).__qualname__,
        )
    if len(set(names)) < len(names):
        raise InvalidError("the columns must have different names", part=whole, names=names)
    return {
        name: as_array(column, f"{whole}.{name}") for name, column in zip(names, columns, strict=True)
    }, is_null


def as_array(column: Any, part: str) -> pa.Array:
    """Return a column of any form that Arrow takes as one array."""
    if isinstance(column, pa.ChunkedArray):
        return column.combine_chunks()
    if isinstance(column, pa.Array):
        return column
    if not isinstance(column, np.ndarray | Sequence) or isinstance(column, str | bytes):
        raise InvalidError(
            "a column must be an Arrow or NumPy array", part=part, type=type(column).__qualname__
        )
    try:
        return pa.array(column)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise InvalidError("the values make no column", part=part, reason=error) from error


def _fitted(column: pa.Array, kind: pa.DataType, part: str) -> pa.Array:
    if column.type == kind:
        return column
    if not _may_become(column.type, kind):
        raise InvalidError(
            "the column is of another type", part=part, type=str(column.type), expected=str(kind)
        )
    try:
        fitted = _cast(column, kind)
    except (pa.ArrowException, ValueError) as error:
        raise InvalidError(
            "a value of the column does not fit its type without a change",
            part=part,
            type=str(column.type),
            expected=str(kind),
            reason=error,
        ) from error
    if kind == pa.float32() and pa.types.is_floating(column.type):
        single, double = (one.to_numpy(zero_copy_only=False) for one in (fitted, column))
        if bool(((np.isinf(single) & ~np.isinf(double)) | ((single == 0) & (double != 0))).any()):
            raise InvalidError(
                "a value of the column lies beyond its type",
                part=part,
                type=str(column.type),
                expected=str(kind),
            )
    return fitted


def _cast(column: pa.Array, kind: pa.DataType) -> pa.Array:
    if pa.types.is_decimal(kind) and pa.types.is_integer(column.type):
        # Arrow asks for room for all digits that the type of the column has, not those that its values have.
        digits = min(_INTEGER_DIGITS + kind.scale, _DECIMAL256_DIGITS_MAX)
        column = column.cast(pa.decimal256(digits, kind.scale))
    return column.cast(kind, safe=True)


_Test: TypeAlias = Callable[[pa.DataType], bool]
_NUMBERS: Final[Sequence[_Test]] = (pa.types.is_integer, pa.types.is_floating)
_EXACT: Final[Sequence[_Test]] = (pa.types.is_integer, pa.types.is_decimal)
_TEXTS: Final[Sequence[_Test]] = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
_BLOBS: Final[Sequence[_Test]] = (
    pa.types.is_binary,
    pa.types.is_large_binary,
    pa.types.is_binary_view,
    pa.types.is_fixed_size_binary,
)
_LISTS: Final[Sequence[_Test]] = (
    pa.types.is_list,
    pa.types.is_large_list,
    pa.types.is_fixed_size_list,
)
_LEAVES: Final[Sequence[tuple[_Test, Sequence[_Test]]]] = (
    (pa.types.is_integer, (*_NUMBERS, pa.types.is_decimal)),
    (pa.types.is_floating, _NUMBERS),
    (pa.types.is_decimal, _EXACT),
    (pa.types.is_string, _TEXTS),
    (pa.types.is_binary, _BLOBS),
    (pa.types.is_boolean, (pa.types.is_boolean,)),
    (pa.types.is_date, (pa.types.is_date,)),
    (pa.types.is_timestamp, (lambda source: pa.types.is_timestamp(source) and source.tz is not None,)),
)
"""For a type of the schema, the types whose values may be of it; Arrow's own casts also parse text, for example."""


def _is_any(kind: pa.DataType, tests: Sequence[_Test]) -> bool:
    return any(test(kind) for test in tests)


def _may_become(source: pa.DataType, kind: pa.DataType) -> bool:
    if pa.types.is_null(source):
        return True
    if pa.types.is_dictionary(source):
        return _may_become(source.value_type, kind)
    if pa.types.is_list(kind):
        return _is_any(source, _LISTS) and _may_become(source.value_type, kind.value_type)
    if pa.types.is_map(kind):
        is_map = pa.types.is_map(source)
        return is_map and source.key_type == kind.key_type and _may_become(source.item_type, kind.item_type)
    if pa.types.is_struct(kind):
        if not pa.types.is_struct(source) or {own.name for own in source} - {own.name for own in kind}:
            return False
        return all(_may_become(own.type, kind.field(own.name).type) for own in source)
    return any(is_kind(kind) and _is_any(source, taken) for is_kind, taken in _LEAVES)


def _refuse_nulls(column: pa.Array, asked: pa.Field, part: str, outer: pa.BooleanArray | None = None) -> None:
    """Refuse a null where the schema allows none, but where the row or the struct around it is null."""
    if not asked.nullable and column.null_count:
        missing = column.is_null() if outer is None else pc.and_not(column.is_null(), outer)
        if missing.true_count:
            raise InvalidError("the field takes no null, and is missing or null", part=part)
    kind = asked.type
    if pa.types.is_struct(kind):
        for inner, own in zip(column.flatten(), kind, strict=True):
            _refuse_nulls(inner, own, f"{part}.{own.name}", column.is_null())
    elif pa.types.is_list(kind):
        _refuse_nulls(column.flatten(), kind.value_field, f"{part}[]")
    elif pa.types.is_map(kind):
        maps = column.drop_null()
        if len(maps):
            first, last = maps.offsets[0].as_py(), maps.offsets[-1].as_py()
            _refuse_nulls(maps.items.slice(first, last - first), kind.item_field, f"{part}[value]")
