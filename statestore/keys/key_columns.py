"""The columns that typed keys are made of: their names and types, as a store records them and as its views show them."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any, Final

import orjson
import pyarrow as pa
import pyarrow.compute as pc

from millpond.statestore.app_ids import KEY_COLUMNS_PREFIX, recorded_word
from millpond.statestore.errors import DataError, InvalidError
from millpond.statestore.keys.key_arrays import encode_key_columns
from millpond.statestore.keys.key_text import ESCAPE, PART, KeyValue, decode_key, is_typed
from millpond.statestore.keys.kind_names import NAMED_KINDS, kind_of_name, name_of_kind

_WIDER: Final = {
    pa.uint8(): pa.int16(),
    pa.uint16(): pa.int32(),
    pa.uint32(): pa.int64(),
    pa.float16(): pa.float32(),
}
_OF_PYTHON: Final[dict[type, pa.DataType]] = {
    str: pa.string(),
    bool: pa.bool_(),
    int: pa.int64(),
    float: pa.float64(),
    Decimal: pa.decimal128(38, 18),
    bytes: pa.binary(),
    dt.date: pa.date32(),
}


def key_word(columns: Iterable[pa.Field]) -> str:
    """Names and types as the text that a store records.

    Example:
        >>> key_word([pa.field("country", pa.string()), pa.field("cents", pa.decimal128(10, 2))])
        '[["country","string"],["cents","decimal(10,2)"]]'
    """
    return orjson.dumps([[column.name, name_of_kind(column.type)] for column in columns]).decode()


def parse_key_word(word: str) -> tuple[pa.Field, ...]:
    """The columns that a store has recorded.

    Raises:
        DataError: a later version has recorded a type that this one does not know.
    """
    try:
        return tuple(pa.field(name, kind_of_name(kind)) for name, kind in orjson.loads(word))
    except (KeyError, ValueError, TypeError) as cause:
        raise DataError(
            "the store has a key of a type that this version does not know", columns=word
        ) from cause


def key_columns_in(positions: Mapping[str, int], computation: str) -> tuple[pa.Field, ...]:
    """The columns that a computation's typed keys are made of, as the positions of a table record them; none for plain keys.

    Raises:
        DataError: a later version has recorded a type that this one does not know.
    """
    word = recorded_word(positions, KEY_COLUMNS_PREFIX, computation)
    return () if word is None else parse_key_word(word)


def key_columns_of(columns: Iterable[pa.Field]) -> tuple[pa.Field, ...]:
    """The same columns in the types that are recorded: one for each text form and width, whatever the layout."""
    return tuple(pa.field(column.name, _recorded(column.type)) for column in columns)


def _recorded(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_dictionary(kind):
        return _recorded(kind.value_type)
    if pa.types.is_struct(kind):
        return pa.struct([(field.name, _recorded(field.type)) for field in kind])
    if pa.types.is_timestamp(kind):
        return pa.timestamp("us", None if kind.tz is None else "UTC")
    if pa.types.is_decimal(kind):
        return pa.decimal128(kind.precision, kind.scale)
    if pa.types.is_date(kind):
        return pa.date32()
    if kind in NAMED_KINDS:
        return kind
    if kind in _WIDER:
        return _WIDER[kind]
    is_text = pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
    return pa.string() if is_text else pa.binary()


def told_kind(cells: Iterable[Any]) -> pa.DataType:
    """The type of a column of Python values, as far as they tell: null where there are none, or of several types."""
    kinds = {_kind_of_value(cell) for cell in cells if cell is not None}
    return kinds.pop() if len(kinds) == 1 else pa.null()


def _kind_of_value(value: Any) -> pa.DataType:
    if isinstance(value, Mapping):
        return pa.struct([(str(name), _kind_of_value(cell)) for name, cell in value.items()])
    if isinstance(value, dt.datetime):
        return pa.timestamp("us", None if value.tzinfo is None else "UTC")
    return next((kind for base, kind in _OF_PYTHON.items() if type(value) is base), pa.null())


def same_texts(stored: pa.DataType, given: pa.DataType) -> bool:
    """Whether equal values of two types have the same text; a type that is not known yet is as any other.

    Example:
        >>> same_texts(pa.int32(), pa.int64()), same_texts(pa.int64(), pa.string())
        (True, False)
    """
    if pa.types.is_null(stored) or pa.types.is_null(given):
        return True
    if pa.types.is_struct(stored) and pa.types.is_struct(given):
        names = [field.name for field in stored] == [field.name for field in given]
        return names and all(map(same_texts, *([field.type for field in kind] for kind in (stored, given))))
    tests = (pa.types.is_integer, pa.types.is_floating, pa.types.is_decimal)
    return stored == given or any(test(stored) and test(given) for test in tests)


# -- views ---------------------------------------------------------------------------------


def typed_columns(
    keys: pa.ChunkedArray, columns: Sequence[pa.Field], places: Sequence[int] | None = None
) -> list[pa.ChunkedArray]:
    """The values of typed keys, a column each; null where a key has no value of the type in that place.

    Args:
        keys: texts of keys.
        columns: what they are made of.
        places: which of the columns are wanted; ``None`` for all, in their order.
    """
    wanted = range(len(columns)) if places is None else places
    texts = pa.chunked_array(keys.chunks, pa.string())
    slow = [place for place in wanted if not _is_quick(columns, place)]
    rows = [_values_of(text, len(columns)) for text in texts.to_pylist()] if slow else []
    parts = None if len(slow) == len(wanted) else pc.split_pattern(texts, PART)
    return [
        pa.chunked_array([fitting_cells(columns[place].type, [row[place] for row in rows])])
        if place in slow
        else _quick_cells(columns[place].type, parts, place)
        for place in wanted
    ]


def _is_quick(columns: Sequence[pa.Field], place: int) -> bool:
    """Whether all rows of a column are decoded at once: where parts and columns go together, as before any struct."""
    kind = columns[place].type
    is_simple = pa.types.is_string(kind) or pa.types.is_integer(kind)
    return is_simple and not any(pa.types.is_struct(column.type) for column in columns[:place])


def _quick_cells(kind: pa.DataType, parts: pa.ChunkedArray, place: int) -> pa.ChunkedArray:
    # Keys with fewer parts, such as plain ones, have none here.
    has_part = pc.greater(pc.list_value_length(parts), place + 1)
    found = pc.list_element(pc.if_else(has_part, parts, pa.scalar([""] * (place + 2), parts.type)), place + 1)
    rest = pc.utf8_slice_codeunits(found, 1)
    if pa.types.is_string(kind):
        texts = pc.if_else(pc.starts_with(found, "="), rest, pa.scalar(None, pa.string()))
        if not pc.any(pc.match_substring(texts, ESCAPE)).as_py():
            return texts
        return pa.chunked_array([[_text_of(part) for part in found.to_pylist()]], pa.string())
    is_positive = pc.match_substring_regex(found, "^[a-s][0-9]+$")
    is_negative = pc.match_substring_regex(found, "^[H-Z][0-9]+$")
    positive = pc.if_else(is_positive, rest, pa.scalar(None, pa.string())).cast(pa.int64())
    if not pc.any(is_negative).as_py():
        return _narrowed(positive, kind)
    cells = [
        _int_of(part) if below else None
        for part, below in zip(found.to_pylist(), is_negative.to_pylist(), strict=True)
    ]
    return _narrowed(pc.coalesce(positive, pa.chunked_array([pa.array(cells, pa.int64())])), kind)


def _narrowed(numbers: pa.ChunkedArray, kind: pa.DataType) -> pa.ChunkedArray:
    try:
        return numbers.cast(kind)
    except pa.ArrowInvalid:
        return pa.chunked_array([fitting_cells(kind, numbers.to_pylist())])


def _text_of(part: str) -> str | None:
    return decode_key(PART + part)[0] if part.startswith("=") else None


def _int_of(part: str) -> int:
    return int(decode_key(PART + part)[0])


def _values_of(text: str, count: int) -> tuple[Any, ...]:
    try:
        values = decode_key(text) if is_typed(text) else ()
    except InvalidError:
        values = ()
    return values if len(values) == count else (None,) * count


def fitting_cells(kind: pa.DataType, values: list[Any]) -> pa.Array:
    """An array of values, with null in place of those that are not of the type."""
    try:
        return pa.array(values, kind)
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError):
        return pa.concat_arrays([pa.array([], kind), *_one_by_one(kind, values)])


def _one_by_one(kind: pa.DataType, values: list[Any]) -> Iterator[pa.Array]:
    for value in values:
        try:
            yield pa.array([value], kind)
        except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError):
            yield pa.nulls(1, kind)


# -- looking up ----------------------------------------------------------------------------


def key_lookup(values: Sequence[KeyValue], columns: Sequence[pa.Field]) -> str:
    """The text of a key whose values are given loosely: as text, or in a type that converts to that of its column.

    Args:
        values: one for each column; all of them where the columns are not known.
        columns: what the keys are made of.

    Raises:
        InvalidError: there are too few or too many, or one does not convert.
    """
    if len(values) != len(columns):
        raise InvalidError(
            "the key has another number of values",
            given=len(values),
            columns=[column.name for column in columns],
        )
    keys = encode_key_columns([_as(value, column) for value, column in zip(values, columns, strict=True)])
    if keys.errors:
        raise InvalidError(keys.errors[0])
    return str(keys.texts[0].as_py())


def _as(value: KeyValue, column: pa.Field) -> pa.Array:
    try:
        if isinstance(value, str) and pa.types.is_binary(column.type):
            return pa.array([bytes.fromhex(value)], column.type)
        if isinstance(value, str):
            return pa.array([value]).cast(column.type)
        if isinstance(value, float) and pa.types.is_decimal(column.type):
            return pa.array([repr(value)]).cast(column.type)
        return pa.array([value], column.type)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as cause:
        raise InvalidError(
            "this is no value of the key's column", value=value, column=column.name, type=column.type
        ) from cause
