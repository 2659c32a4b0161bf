"""
Key extractors: how a consumer derives a record's key (MillWheel §4.2).

Each *consumer* of a stream names a field of the value, gives a function of the value, or keeps the key that
the record was produced with (``None``). A key is text. If an extractor raises or returns anything else, that
record becomes a dead letter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from millpond.statestore.errors import InvalidError
from millpond.statestore.types import Key

__all__ = [
    "ExtractedKeys",
    "KeyExtractor",
    "ValueSequence",
    "check_key_extractor",
    "extract_key",
    "extract_key_column",
    "extract_keys",
]

KeyExtractor: TypeAlias = str | Callable[[Any], str] | None
"""A field's name, a function of the value, or ``None`` for the record's own key."""


class ValueSequence(Protocol):
    """
    Record values that are decoded one by one, as `millpond.executor.bundle.bundle.Values` are.
    """

    def __len__(self) -> int:
        """
        Number of values.
        """
        ...

    def value(self, index: int) -> Any:
        """
        The decoded value at ``index``.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtractedKeys:
    """
    The keys of a whole column.

    Attributes:
        keys: a string array, null exactly where ``errors`` has an entry.
        errors: why a record has no key, by its index.
    """

    keys: pa.StringArray
    errors: Mapping[int, str] = field(default_factory=dict)


def check_key_extractor(extractor: object, **subject: object) -> None:
    """
    Refuse an invalid key extractor.

    Args:
        extractor: what the user gave.
        subject: the computation and stream that it belongs to, for the error.

    Raises:
        InvalidError: it is neither a field's name, nor callable, nor ``None``.
    """
    if extractor is None or callable(extractor):
        return
    if not isinstance(extractor, str):
        raise InvalidError(
            "a key extractor is a column's name, a function of the value or None",
            **subject,
            type=type(extractor).__name__,
        )
    if not extractor:
        raise InvalidError("a key extractor names no column", **subject)


def extract_key(extractor: KeyExtractor, own_key: str | None, value: Any) -> Key:
    """
    One record's key.

    Args:
        extractor: how the consumer derives it.
        own_key: the key under which the record was produced; ``None`` for outside records.
        value: the decoded value.

    Example:
        >>> extract_key("city", "k", {"city": "Bergen"})
        'Bergen'

    Raises:
        InvalidError: the extractor failed, or its result is not text.
    """
    if extractor is None:
        return _checked_key(own_key)
    if isinstance(extractor, str):
        return _checked_key(_field_of(value, extractor))
    try:
        key = extractor(value)
    except Exception as cause:
        raise InvalidError(f"the key extractor raised {type(cause).__name__}: {cause}") from cause
    return _checked_key(key)


def _field_of(value: Any, name: str) -> Any:
    if not isinstance(value, Mapping):
        raise InvalidError(
            "the value has no fields to take the key from", field=name, type=type(value).__name__
        )
    if name not in value:
        raise InvalidError("the value has no such field to take the key from", field=name)
    return value[name]


def _checked_key(key: object) -> Key:
    if isinstance(key, str):
        return Key(key) if key.isascii() else _encodable(key)
    if key is None:
        raise InvalidError("the key is null")
    raise InvalidError("the key is not text", type=type(key).__name__)


def _encodable(key: str) -> Key:
    try:
        key.encode()
    except UnicodeEncodeError as cause:
        raise InvalidError("the key has no UTF-8 form", key=ascii(key)) from cause
    return Key(key)


def extract_keys(extractor: KeyExtractor, own_keys: pa.Array, values: ValueSequence) -> ExtractedKeys:
    """
    The keys of many records; values are decoded only if the extractor wants them.

    Args:
        extractor: how the consumer wants the key.
        own_keys: the keys under which the records were produced.
        values: the values, as many.
    """
    if extractor is None:
        return _text_column(own_keys)
    keys: list[str | None] = []
    errors: dict[int, str] = {}
    for row in range(len(values)):
        try:
            keys.append(extract_key(extractor, None, values.value(row)))
        except InvalidError as error:
            keys.append(None)
            errors[row] = str(error)
    return ExtractedKeys(keys=pa.array(keys, pa.string()), errors=errors)


def extract_key_column(extractor: str | Callable[[Any], str], rows: pa.Table) -> ExtractedKeys:
    """
    The keys of outside records that stand in Arrow columns; a column's name costs no decoding.

    Args:
        extractor: a column's name, or a function of a row given as a ``dict``.
        rows: the records, a column per field.

    Raises:
        InvalidError: there is no such column, or its type can never hold text.
    """
    if not isinstance(extractor, str):
        return extract_keys(extractor, pa.nulls(rows.num_rows, pa.string()), _RowValues(rows.to_pylist()))
    if extractor not in rows.column_names:
        raise InvalidError("the input has no such key column", column=extractor, columns=rows.column_names)
    return _text_column(_decoded_column(rows.column(extractor), extractor))


@dataclass(frozen=True, slots=True)
class _RowValues:
    rows: list[dict[str, Any]]

    def __len__(self) -> int:
        return len(self.rows)

    def value(self, index: int) -> Any:
        return self.rows[index]


def _decoded_column(column: pa.ChunkedArray, name: str) -> pa.Array:
    kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    text = pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
    if not text and not pa.types.is_null(kind):
        raise InvalidError("the key column is not text", column=name, type=column.type)
    text = column.cast(pa.string())
    return text.combine_chunks() if isinstance(text, pa.ChunkedArray) else text


def _text_column(keys: pa.Array) -> ExtractedKeys:
    if not keys.null_count:
        return ExtractedKeys(keys=keys)
    nulls = pc.indices_nonzero(keys.is_null()).to_pylist()
    return ExtractedKeys(keys=keys, errors=dict.fromkeys(nulls, "the key is null"))
