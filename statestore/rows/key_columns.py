"""The columns of typed keys: whole Arrow columns encoded as the texts of `encode_key`, and decoded again for views.

A store records the names and types of the columns; see `key_word`.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from millpond.statestore.app_ids import AppId, recorded_word
from millpond.statestore.errors import DataError, InvalidError
from millpond.statestore.rows.key_text import (
    CONTROLS,
    DIGITS_MAX,
    ESCAPE,
    FALLING,
    NAMED_KINDS,
    NULL,
    PART,
    RISING,
    KeyValue,
    decode_key,
    is_typed,
    kind_of_name,
    name_of_kind,
    plain_key,
    struct_mark,
)

_Bools: TypeAlias = "npt.NDArray[np.bool_]"

_EPOCH_DAYS: Final = (-719_162, 2_932_896)  # the years 1 to 9999
_EPOCH_US: Final = (-62_135_596_800_000_000, 253_402_300_799_999_999)
_NS: Final = 1_000
_WIDTH: Final = 8
_SIGN_BIT: Final = np.uint64(1 << 63)
_OUT_OF_RANGE: Final = "a date or time in the key is not in the years 1 to 9999"
_TOO_FINE: Final = "a time in the key has a part of a microsecond"


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyTexts:
    """The keys of rows: ``keys`` is null exactly for the rows whose index has a reason in ``errors``."""

    keys: pa.StringArray
    errors: Mapping[int, str] = field(default_factory=dict)


def check_key_type(kind: pa.DataType, column: str) -> None:
    kind = _plain(kind)
    if pa.types.is_struct(kind):
        struct_mark([each.name for each in kind])
        for each in kind:
            check_key_type(each.type, f"{column}.{each.name}")
        return
    if pa.types.is_decimal(kind) and not (kind.precision <= DIGITS_MAX and kind.scale >= 0):
        raise InvalidError("a decimal in a key has 38 digits at most", column=column, type=kind)
    if any(test(kind) for test in _REPEATED):
        raise InvalidError(
            "a key is made of single values: take elements of the list or map as columns of their own, or its JSON text",
            column=column,
            type=kind,
        )
    if not any(test(kind) for test in _ENCODERS):
        raise InvalidError(
            "no key is made of this type: cast the column to text, a whole number, a decimal, a float, a boolean, a date, "
            "a timestamp or binary",
            column=column,
            type=kind,
        )


def plain_keys(texts: pa.StringArray) -> pa.StringArray:
    """Return the keys of a column of text; see `plain_key`."""
    if not pc.any(pc.starts_with(texts, PART)).as_py():
        return texts
    return pa.array([None if text is None else plain_key(text) for text in texts.to_pylist()], pa.string())


def encode_key_columns(columns: Sequence[pa.Array]) -> KeyTexts:
    r"""Return the texts of the keys that columns of one length make together, of types accepted by `check_key_type`.

    Example:
        >>> encode_key_columns([pa.array(["no", None]), pa.array([4711, 7])]).keys.to_pylist()
        ['\t=no\td4711', '\t!\ta7']
    """
    problems: list[tuple[_Bools, str]] = []
    encoded = [_part(_single(column), problems) for column in columns]
    start = pa.array([""] * len(encoded[0]), pa.string())
    texts = pc.binary_join_element_wise(start, *encoded, PART)
    if not problems:
        return KeyTexts(keys=texts)
    errors: dict[int, str] = {}
    for mask, why in problems:
        errors |= dict.fromkeys(np.flatnonzero(mask).tolist(), why)
    refused = np.isin(np.arange(len(texts)), list(errors))
    return KeyTexts(keys=pc.if_else(pa.array(refused), pa.scalar(None, pa.string()), texts), errors=errors)


def _single(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if isinstance(array, pa.ChunkedArray):
        array = pa.concat_arrays(array.chunks) if array.num_chunks else pa.array([], array.type)
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    return array.cast(_plain(array.type))


def _plain(kind: pa.DataType) -> pa.DataType:
    if isinstance(kind, pa.BaseExtensionType):
        kind = kind.storage_type
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def _part(array: pa.Array, problems: list[tuple[_Bools, str]]) -> pa.Array:
    kind = array.type
    if pa.types.is_null(kind):
        return pa.array([NULL] * len(array), pa.string())
    if pa.types.is_struct(kind):
        fields = [_part(_single(each), problems) for each in array.flatten()]
        texts = pc.binary_join_element_wise(_scalar(struct_mark([each.name for each in kind])), *fields, PART)
        texts = pc.if_else(array.is_valid(), texts, pa.scalar(None, pa.string()))
    else:
        array = _in_range(array, problems)
        encoder = next(encoder for test, encoder in _ENCODERS.items() if test(kind))
        texts = encoder(array)
    return texts if not texts.null_count else pc.fill_null(texts, NULL)


def _scalar(text: str) -> pa.StringScalar:
    return pa.scalar(text, pa.string())


def _joined(*parts: pa.Array | pa.Scalar) -> pa.Array:
    return pc.binary_join_element_wise(*parts, _scalar(""))


def _of_text(array: pa.Array) -> pa.Array:
    texts = array.cast(pa.string())
    # In UTF-8 these bytes occur for nothing else. A slice's whole buffer is searched, which finds at worst too many.
    found = np.frombuffer(texts.buffers()[2] or b"", np.uint8)
    for code in np.unique(found[found < len(CONTROLS)])[::-1].tolist():
        texts = pc.replace_substring(texts, chr(code), ESCAPE + chr(code + 64))
    return _joined(_scalar("="), texts)


def _of_int(array: pa.Array) -> pa.Array:
    return _signed(array.cast(pa.int64()).cast(pa.string()), "", "")


def _of_decimal(array: pa.Array) -> pa.Array:
    kind = pa.decimal128(DIGITS_MAX, array.type.scale)
    # Widen first, so that every decimal has the scale's digits; Arrow writes small ones with an exponent.
    digits = _plain_decimals(array.cast(kind))
    if kind.scale:
        digits = pc.replace_substring_regex(digits, r"\.?0+$", "")
        digits = pc.if_else(pc.equal(digits, "-0"), _scalar("0"), digits)
    return _signed(digits, "#", "~")


def _plain_decimals(array: pa.Array) -> pa.Array:
    """Write decimals with all digits of their scale, without an exponent."""
    scale = array.type.scale
    texts = array.cast(pa.string())
    if not scale or not pc.any(pc.match_substring(texts, "E")).as_py():
        return texts
    unscaled = pa.Array.from_buffers(
        pa.decimal128(DIGITS_MAX, 0), len(array), array.buffers(), offset=array.offset
    )
    whole = unscaled.cast(pa.string())
    sign = pc.if_else(pc.starts_with(whole, "-"), _scalar("-"), _scalar(""))
    padded = pc.utf8_lpad(pc.utf8_ltrim(whole, "-"), scale + 1, "0")
    whole, fraction = pc.utf8_slice_codeunits(padded, 0, -scale), pc.utf8_slice_codeunits(padded, -scale)
    return _joined(sign, whole, _scalar("."), fraction)


def _signed(digits: pa.Array, mark: str, end: str) -> pa.Array:
    """Put a letter for the length before each number; turn the digits of negative ones."""
    is_negative = pc.starts_with(digits, "-")
    if not pc.any(is_negative).as_py():
        return _joined(_lengths(digits, mark, RISING), digits)
    magnitudes = pc.utf8_ltrim(digits, "-")
    rising = _joined(_lengths(magnitudes, mark, RISING), magnitudes)
    validity, offsets, data = magnitudes.buffers()
    turned = pa.StringArray.from_buffers(
        len(magnitudes),
        offsets,
        pa.py_buffer(_NINES[np.frombuffer(data or b"", np.uint8)]),
        validity,
        magnitudes.null_count,
        magnitudes.offset,
    )
    falling = _joined(_lengths(magnitudes, mark, FALLING), turned, _scalar(end))
    return pc.if_else(is_negative, falling, rising)


def _lengths(digits: pa.Array, mark: str, letters: Sequence[str]) -> pa.Array:
    point = pc.find_substring(digits, ".")
    counts = pc.if_else(pc.less(point, 0), pc.binary_length(digits), point)
    return pa.array([mark + each for each in letters], pa.string()).take(counts)


def _of_float(array: pa.Array) -> pa.Array:
    numbers = array.cast(pa.float64()).fill_null(0).to_numpy(zero_copy_only=False) + 0.0
    numbers[np.isnan(numbers)] = np.nan
    bits = numbers.view(np.uint64)
    turned = np.where(bits & _SIGN_BIT, ~bits, bits ^ _SIGN_BIT).astype(">u8")
    octets = pa.Array.from_buffers(pa.binary(_WIDTH), len(array), [None, pa.py_buffer(turned.tobytes())])
    return _hexadecimal("~", octets, array)


def _hexadecimal(mark: str, octets: pa.Array, array: pa.Array) -> pa.Array:
    plain = octets.cast(pa.binary())
    starts = np.frombuffer(plain.buffers()[1], np.int32)[plain.offset : plain.offset + len(plain) + 1]
    data = plain.buffers()[2]
    digits = b"" if data is None else _UPPER[np.frombuffer(data, np.uint8)].tobytes()
    offsets = pa.py_buffer((starts * 2).astype(np.int32))
    texts = _joined(_scalar(mark), pa.StringArray.from_buffers(len(plain), offsets, pa.py_buffer(digits)))
    return pc.if_else(array.is_valid(), texts, pa.scalar(None, pa.string())) if array.null_count else texts


def _of_time(array: pa.Array) -> pa.Array:
    mark = "t" if array.type.tz is None else "z"
    micros = array.cast(pa.timestamp("us", array.type.tz)).cast(pa.int64()).cast(pa.timestamp("us"))
    return _joined(_scalar(mark), pc.replace_substring_regex(micros.cast(pa.string()), r"\.?0+$", ""))


def _in_range(array: pa.Array, problems: list[tuple[_Bools, str]]) -> pa.Array:
    kind, why = array.type, _OUT_OF_RANGE
    if pa.types.is_date(kind):
        days = array.cast(pa.date32(), safe=False)
        wrong = _outside(days.cast(pa.int32()), *_EPOCH_DAYS)
        if pa.types.is_date64(kind) and pc.any(part := pc.not_equal(days.cast(kind), array)).as_py():
            wrong, why = pc.or_(wrong, part), "a date in the key has a part of a day"
    elif pa.types.is_timestamp(kind) and kind.unit == "ns":
        numbers, why = array.cast(pa.int64()), _TOO_FINE
        wrong = pc.not_equal(pc.subtract(numbers, pc.multiply(pc.divide(numbers, _NS), _NS)), 0)
    elif pa.types.is_timestamp(kind):
        per_us, (low, high) = {"s": 1_000_000, "ms": 1_000, "us": 1}[kind.unit], _EPOCH_US
        wrong = _outside(array.cast(pa.int64()), -(-low // per_us), high // per_us)
    else:
        return array
    if not pc.any(wrong).as_py():
        return array
    mask = pc.fill_null(wrong, False)
    problems.append((mask.to_numpy(zero_copy_only=False), why))
    return pc.if_else(mask, pa.scalar(None, kind), array)


def _outside(numbers: pa.Array, low: int, high: int) -> pa.Array:
    kind = numbers.type
    return pc.or_(pc.less(numbers, pa.scalar(low, kind)), pc.greater(numbers, pa.scalar(high, kind)))


_BINARY: Final = (
    pa.types.is_binary,
    pa.types.is_large_binary,
    pa.types.is_binary_view,
    pa.types.is_fixed_size_binary,
)
_NINES: Final = np.arange(256, dtype=np.uint8)
_NINES[ord("0") : ord("9") + 1] = np.frombuffer(b"9876543210", np.uint8)
_UPPER: Final = np.frombuffer(bytes(range(256)).hex().upper().encode(), np.uint16)


_ENCODERS: Final[dict[Callable[[pa.DataType], bool], Callable[[pa.Array], pa.Array]]] = {
    **dict.fromkeys((pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view), _of_text),
    pa.types.is_signed_integer: _of_int,
    lambda kind: pa.types.is_unsigned_integer(kind) and not pa.types.is_uint64(kind): _of_int,
    pa.types.is_boolean: lambda array: pc.if_else(array, _scalar("?1"), _scalar("?0")),
    pa.types.is_decimal: _of_decimal,
    pa.types.is_floating: _of_float,
    pa.types.is_date: lambda array: _joined(_scalar("@"), array.cast(pa.date32()).cast(pa.string())),
    pa.types.is_timestamp: _of_time,
    **dict.fromkeys(_BINARY, lambda array: _hexadecimal("x", array, array)),
    pa.types.is_null: lambda array: array,
}
_REPEATED: Final = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list, pa.types.is_map)


_WIDER: Final = {
    pa.uint8(): pa.int16(),
    pa.uint16(): pa.int32(),
    pa.uint32(): pa.int64(),
    pa.float16(): pa.float32(),
}
_OF_PYTHON: Final = {
    str: pa.string(),
    bool: pa.bool_(),
    int: pa.int64(),
    float: pa.float64(),
    Decimal: pa.decimal128(38, 18),
    bytes: pa.binary(),
    dt.date: pa.date32(),
}


def key_word(columns: Iterable[pa.Field]) -> str:
    """Return key columns as the text that a store records, such as ``[["cents","decimal(10,2)"]]``."""
    return orjson.dumps([[column.name, name_of_kind(column.type)] for column in columns]).decode()


def parse_key_word(word: str) -> tuple[pa.Field, ...]:
    try:
        return tuple(pa.field(name, kind_of_name(kind)) for name, kind in orjson.loads(word))
    except (KeyError, ValueError, TypeError) as cause:
        raise DataError(
            "the store has a key of a type that this release does not know: use the release that wrote it, or a later one",
            columns=word,
        ) from cause


def key_columns_in(positions: Mapping[str, int], computation: str) -> tuple[pa.Field, ...]:
    word = recorded_word(positions, AppId.KEY_COLUMNS, computation)
    return () if word is None else parse_key_word(word)


def key_columns_of(columns: Iterable[pa.Field]) -> tuple[pa.Field, ...]:
    """Return the columns in the types that are recorded: one for each text form and width."""
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
    """Return the type of a column of Python values; null if they are absent, or of several types."""
    kinds = {_kind_of_value(cell) for cell in cells if cell is not None}
    return kinds.pop() if len(kinds) == 1 else pa.null()


def _kind_of_value(value: Any) -> pa.DataType:
    if isinstance(value, Mapping):
        return pa.struct([(str(name), _kind_of_value(cell)) for name, cell in value.items()])
    if isinstance(value, dt.datetime):
        return pa.timestamp("us", None if value.tzinfo is None else "UTC")
    return next((kind for base, kind in _OF_PYTHON.items() if type(value) is base), pa.null())


def same_texts(stored: pa.DataType, given: pa.DataType) -> bool:
    """Return True if equal values of two types have the same text; an unknown (null) type matches any."""
    if pa.types.is_null(stored) or pa.types.is_null(given):
        return True
    if pa.types.is_struct(stored) and pa.types.is_struct(given):
        names = [field.name for field in stored] == [field.name for field in given]
        return names and all(map(same_texts, *([field.type for field in kind] for kind in (stored, given))))
    tests = (pa.types.is_integer, pa.types.is_floating, pa.types.is_decimal)
    return stored == given or any(test(stored) and test(given) for test in tests)


def typed_column(columns: Sequence[pa.Field], place: int, keys: pa.ChunkedArray) -> pa.Array:
    """Decode one of the columns of typed keys; a value that does not fit the column is null."""
    texts, kind = pa.chunked_array(keys.chunks, pa.string()), columns[place].type
    is_simple = pa.types.is_string(kind) or pa.types.is_integer(kind)
    # Parts and columns correspond only before any struct; such a column is decoded at once.
    if is_simple and not any(pa.types.is_struct(column.type) for column in columns[:place]):
        return _quick_cells(kind, pc.split_pattern(texts, PART), place).combine_chunks()
    return fitting_cells(kind, [_values_of(text, len(columns))[place] for text in texts.to_pylist()])


def _quick_cells(kind: pa.DataType, parts: pa.ChunkedArray, place: int) -> pa.ChunkedArray:
    # Keys with fewer parts, such as plain ones, get null.
    has_part = pc.greater(pc.list_value_length(parts), place + 1)
    found = pc.list_element(pc.if_else(has_part, parts, pa.scalar([""] * (place + 2), parts.type)), place + 1)
    rest = pc.utf8_slice_codeunits(found, 1)
    if pa.types.is_string(kind):
        texts = pc.if_else(pc.starts_with(found, "="), rest, pa.scalar(None, pa.string()))
        if not pc.any(pc.match_substring(texts, ESCAPE)).as_py():
            return texts
        cells = [decode_key(PART + part)[0] if part.startswith("=") else None for part in found.to_pylist()]
        return pa.chunked_array([cells], pa.string())
    is_positive = pc.match_substring_regex(found, "^[a-s][0-9]+$")
    is_negative = pc.match_substring_regex(found, "^[H-Z][0-9]+$")
    positive = pc.if_else(is_positive, rest, pa.scalar(None, pa.string())).cast(pa.int64())
    if not pc.any(is_negative).as_py():
        return _narrowed(positive, kind)
    signed = zip(found.to_pylist(), is_negative.to_pylist(), strict=True)
    cells = [decode_key(PART + part)[0] if is_below else None for part, is_below in signed]
    return _narrowed(pc.coalesce(positive, pa.chunked_array([pa.array(cells, pa.int64())])), kind)


def _narrowed(numbers: pa.ChunkedArray, kind: pa.DataType) -> pa.ChunkedArray:
    try:
        return numbers.cast(kind)
    except pa.ArrowInvalid:
        return pa.chunked_array([fitting_cells(kind, numbers.to_pylist())])


def _values_of(text: str, count: int) -> tuple[Any, ...]:
    try:
        values = decode_key(text) if is_typed(text) else ()
    except InvalidError:
        values = ()
    return values if len(values) == count else (None,) * count


def fitting_cells(kind: pa.DataType, values: list[Any]) -> pa.Array:
    try:
        return pa.array(values, kind)
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError):
        if len(values) == 1:
            return pa.nulls(1, kind)
        return pa.concat_arrays([fitting_cells(kind, [value]) for value in values])


def key_lookup(values: Sequence[KeyValue], columns: Sequence[pa.Field]) -> str:
    if len(values) != len(columns):
        raise InvalidError(
            "the key must have a value for each column",
            given=len(values),
            columns=[column.name for column in columns],
        )
    arrays = []
    for value, column in zip(values, columns, strict=True):
        kind = column.type
        try:
            if isinstance(value, str):
                is_binary = pa.types.is_binary(kind)
                array = pa.array([bytes.fromhex(value)]) if is_binary else pa.array([value]).cast(kind)
            elif isinstance(value, float) and pa.types.is_decimal(kind):
                array = pa.array([repr(value)]).cast(kind)
            else:
                array = pa.array([value], kind)
        except (pa.ArrowException, TypeError, ValueError, OverflowError) as cause:
            raise InvalidError(
                "the value does not convert to the type of the key's column",
                value=value,
                column=column.name,
                type=kind,
            ) from cause
        arrays.append(array)
    keys = encode_key_columns(arrays)
    if keys.errors:
        raise InvalidError(keys.errors[0])
    return str(keys.keys[0].as_py())
