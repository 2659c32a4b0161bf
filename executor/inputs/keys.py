"""Key extractors: how a consumer derives a record's key (MillWheel §4.2).

A text field is the key itself. Any other type, or a list of fields, makes a typed key: text in the order of
the values (`millpond.statestore.rows.key_text`). In a list any value may be null; a single null is no key. If
an extractor raises or returns no valid key, the record becomes a dead letter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from functools import partial
from types import NoneType
from typing import Any, Final, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from millpond.executor.inputs.payload import ROW_DICTS, TEXT_TYPES, UndecodedRow, python_rows, reason_of_text
from millpond.statestore.errors import InvalidError, did_you_mean
from millpond.statestore.rows.key_columns import KeyTexts, check_key_type, encode_key_columns, plain_keys
from millpond.statestore.rows.key_text import encode_key, is_missing, is_typed, key_of_text, plain_key
from millpond.statestore.rows.row import is_envelope, one_array
from millpond.statestore.rows.value_text import has_utf8
from millpond.statestore.types import Key

KeyExtractor: TypeAlias = str | Sequence[str] | Callable[[Any], Any] | None
"""A field's name, several, a function of the value that returns text or a tuple, or ``None`` for the record's key."""

KeyField: TypeAlias = str | Sequence[str] | Callable[[Any], Any]
"""A column's name, several, or a function of the row as a ``dict`` that returns text or a tuple."""


def check_key_extractor(extractor: object, **subject: object) -> None:
    if extractor is None or callable(extractor):
        return
    if isinstance(extractor, list | tuple):
        if not extractor or not all(isinstance(name, str) and name for name in extractor):
            raise InvalidError(
                "a list of key columns must have at least one name, and only names", **subject, key=extractor
            )
        if len(set(extractor)) < len(extractor):
            raise InvalidError("a list of key columns must name each column once", **subject, key=extractor)
    elif not isinstance(extractor, str):
        raise InvalidError(
            "a key extractor must be a column's name, a list of names, a function of the value or None",
            **subject,
            type=type(extractor).__name__,
        )
    elif not extractor:
        raise InvalidError("a key extractor must not be empty", **subject)


def settled_key(extractor: KeyExtractor) -> KeyExtractor:
    """Return the extractor with a list as a tuple, which the caller can no longer change."""
    return tuple(extractor) if isinstance(extractor, list) else extractor


def key_names(extractor: KeyExtractor) -> tuple[str, ...]:
    if isinstance(extractor, str):
        return (extractor,)
    return () if extractor is None or callable(extractor) else tuple(extractor)


def extract_key(extractor: KeyExtractor, own_key: str | None, value: Any) -> Key:
    """Return one record's key; ``own_key`` is ``None`` for outside records."""
    if isinstance(value, UndecodedRow):
        raise InvalidError(value.reason)
    if isinstance(extractor, PaneKey):
        return extract_key(extractor.extractor, own_key, extractor.inner(value))
    if extractor is None:
        return _checked_key(own_key)
    if isinstance(extractor, str):
        cell = _field_of(value, extractor)
        if isinstance(cell, str):
            key = _checked_key(cell)
            return Key(plain_key(key)) if is_typed(key) else key
        return _checked_key(None) if is_missing(cell) else Key(encode_key((cell,)))
    if not callable(extractor):
        return _key_of([_field_of(value, name) for name in extractor])
    return _key_made(_called(extractor, value))


def _called(extractor: Callable[[Any], object], value: Any) -> object:
    if isinstance(value, UndecodedRow):
        raise InvalidError(value.reason)
    try:
        return extractor(value)
    except Exception as cause:
        raise InvalidError(f"the key extractor raised {type(cause).__name__}: {cause}") from cause


def _key_made(made: object) -> Key:
    """Return the key that a function has returned: text, or a tuple of cells."""
    if isinstance(made, tuple):
        return _key_of(made)
    return Key(key_of_text(_checked_key(None if is_missing(made) else made)))


def _key_of(cells: Iterable[Any]) -> Key:
    return Key(encode_key([None if is_missing(cell) else cell for cell in cells]))


def _field_of(value: Any, name: str) -> Any:
    if not isinstance(value, Mapping):
        raise InvalidError(
            "the value has no fields to take the key from",
            field=name,
            type=type(value).__name__,
            **reason_of_text(value),
        )
    if name not in value:
        raise InvalidError(
            f"the value has no such field to take the key from{did_you_mean(name, value)}",
            field=name,
            fields=list(value),
        )
    return value[name]


def _checked_key(key: object) -> Key:
    if isinstance(key, str):
        if key.isascii() or has_utf8(key):
            return Key(key)
        raise InvalidError("the key has no UTF-8 form", key=ascii(key))
    if key is None:
        raise InvalidError("the key is null")
    raise InvalidError(
        "the key is not text: return text, or a tuple for a key of other types", type=type(key).__name__
    )


@dataclass(frozen=True, slots=True)
class PaneKey:
    """A key extractor that looks inside the envelope of a windowed step's result."""

    extractor: KeyExtractor

    def __call__(self, value: Any) -> str:
        return extract_key(self.extractor, None, self.inner(value))

    @staticmethod
    def inner(value: Any) -> Any:
        """Return the value inside a pane, and any other value unchanged."""
        return value["value"] if is_envelope(value) else value

    @classmethod
    def of(cls, extractor: KeyExtractor, step: str) -> KeyExtractor:
        check_key_extractor(extractor, computation=step)
        return extractor if extractor is None else cls(settled_key(extractor))


def extract_keys(extractor: KeyExtractor, own_keys: pa.Array, value: Callable[[int], Any]) -> KeyTexts:
    """Return the keys of many records, reading values by index only if the extractor needs them."""
    if extractor is None:
        return _text_column(own_keys)
    if isinstance(extractor, PaneKey):
        inner = extractor.inner
        return extract_keys(extractor.extractor, own_keys, lambda row: inner(value(row)))
    if callable(extractor):
        made, errors = _each(lambda row: _called(extractor, value(row)), range(len(own_keys)))
        at_once = None if errors else _tuples_at_once(made)
        if at_once is not None:
            return KeyTexts(keys=at_once)
        keys, refused = _each(_key_made, made)
        return KeyTexts(keys=pa.array(keys, pa.string()), errors=refused | errors)
    rows = [value(row) for row in range(len(own_keys))]
    at_once = (
        _texts_at_once(extractor, rows)
        if isinstance(extractor, str)
        else _made_at_once(tuple(extractor), rows)
    )
    if at_once is not None:
        return KeyTexts(keys=at_once)
    keys, errors = _each(partial(extract_key, extractor, None), rows)
    return KeyTexts(keys=pa.array(keys, pa.string()), errors=errors)


def _each(function: Callable[[Any], Any], items: Iterable[Any]) -> tuple[list[Any], dict[int, str]]:
    """Return each item's result, or null and by its position the reason why there is none."""
    results, errors = list[Any](), dict[int, str]()
    for place, item in enumerate(items):
        try:
            results.append(function(item))
        except InvalidError as error:
            results.append(None)
            errors[place] = str(error)
    return results, errors


def _texts_at_once(name: str, rows: Sequence[Any]) -> pa.StringArray | None:
    """Return the keys of a field that is text in all rows; ``None`` unless it is."""
    if not rows or not ROW_DICTS.issuperset(map(type, rows)):
        return None
    try:
        cells = [row[name] for row in rows]
        return plain_keys(pa.array(cells, pa.string())) if {*map(type, cells)} == {str} else None
    except (KeyError, UnicodeEncodeError, pa.ArrowException):
        # The slow path reports the reason for each row without a key.
        return None


def _made_at_once(names: tuple[str, ...], rows: Sequence[Any]) -> pa.StringArray | None:
    """Return typed keys of fields by columns, which is much faster; ``None`` unless each column has one simple type."""
    if not rows or not ROW_DICTS.issuperset(map(type, rows)):
        return None
    try:
        return _columns_at_once([row[name] for row in rows] for name in names)
    except KeyError:
        # The slow path reports the reason for each row without a key.
        return None


def _tuples_at_once(made: Sequence[Any]) -> pa.StringArray | None:
    """Return typed keys of tuples by columns; ``None`` unless all have as many cells, of one simple type each."""
    if {*map(type, made)} != {tuple} or len({*map(len, made)}) > 1 or not made[0]:
        return None
    return _columns_at_once(map(list, zip(*made, strict=True)))


def _columns_at_once(columns: Iterable[list[Any]]) -> pa.StringArray | None:
    try:
        return encode_key_columns([_simple_column(cells) for cells in columns]).keys
    except (ValueError, OverflowError):
        # A mixture, half a character or a large number: cell by cell, with the reason for each row without a key.
        return None


def _simple_column(cells: list[Any]) -> pa.Array:
    kinds = set(map(type, cells)) - {NoneType}
    if len(kinds) > 1 or not kinds <= _SIMPLE.keys():
        raise ValueError(kinds)
    # NaN is a null in rows of Python objects.
    return pa.array(cells, _SIMPLE[kinds.pop()] if kinds else pa.null(), from_pandas=True)


_SIMPLE: Final[dict[type, pa.DataType]] = {
    str: pa.string(),
    int: pa.int64(),
    bool: pa.bool_(),
    float: pa.float64(),
    bytes: pa.binary(),
    date: pa.date32(),
}


def extract_key_column(extractor: KeyField, rows: pa.Table) -> KeyTexts:
    """Return the keys of an Arrow table; a column's name costs no decoding."""
    if callable(extractor):
        return extract_keys(extractor, pa.nulls(rows.num_rows, pa.string()), python_rows(rows).__getitem__)
    for name in key_names(extractor):
        if name not in rows.column_names:
            hint = did_you_mean(name, rows.column_names)
            raise InvalidError(
                f"the input has no such key column{hint}", column=name, columns=rows.column_names
            )
        check_key_type(rows.schema.field(name).type, name)
    if not isinstance(extractor, str):
        return encode_key_columns([rows.column(name) for name in extractor])
    column = rows.column(extractor)
    kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    if kind in TEXT_TYPES:
        text = column.cast(pa.string())
        return _text_column(plain_keys(one_array(text)))
    typed = encode_key_columns([column])
    if not column.null_count:
        return typed
    # The nulls of a single column are no keys.
    valid = pa.chunked_array(column.is_valid()).combine_chunks()
    return _text_column(pc.if_else(valid, typed.keys, pa.scalar(None, pa.string())), typed.errors)


def _text_column(keys: pa.Array, errors: Mapping[int, str] | None = None) -> KeyTexts:
    if not keys.null_count:
        return KeyTexts(keys=keys)
    nulls = pc.indices_nonzero(keys.is_null()).to_pylist()
    return KeyTexts(keys=keys, errors={**dict.fromkeys(nulls, "the key is null"), **(errors or {})})
