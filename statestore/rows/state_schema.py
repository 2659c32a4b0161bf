"""States and productions with a schema: columns of the row, in place of text.

A state whose computation declares a schema (``state=`` of `Pipeline.add`) is a *row of cells*: a tuple with a Python
object for each field, in the schema's types. The row file keeps it in a struct column whose name has a digest of the
schema, such as ``state_5f0c1a2b``: computations with one schema share a column, a changed schema is another one, and a
renamed computation's files stay as they are. The first commit of a file with the column adds it to the table's schema.

Values of productions whose stream declares a schema (``produces=``) are such cells too. The row has them in a list column,
such as ``productions_5f0c1a2b``, as long as ``productions``: null where a production has another schema or none. In memory
a production has them in a separate field, ``value_5f0c1a2b``.

Code that only adds to a state of whole numbers (`AddendCodec`) does not read it. Its addends have a column such as
``addend_5f0c1a2b``, named after the column of the state; `millpond.statestore.rows.merge` adds them up.

Whoever does not ask for cells reads such a state or value as its JSON text (`texts_of`), so ``state ->> 'total'`` continues to work.
A row that was stored as text is read as before, and moves to the column when it is next written.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, date, datetime
from decimal import Context, Decimal, Inexact, InvalidOperation
from typing import Any, Final, TypeAlias

import numpy as np
import orjson
import pyarrow as pa

from millpond.statestore.errors import DataError, InvalidError, did_you_mean
from millpond.statestore.rows.key_text import kind_of_name, name_of_kind
from millpond.statestore.rows.value_text import as_python, decode_value, encode_value, has_utf8

StateCells: TypeAlias = tuple[Any, ...]
"""The fields of a state, in the order of its schema."""

_NAME: Final = re.compile(r"(?:state|addend|productions)_[0-9a-f]{8}")
_STATE, _ADDEND, _PRODUCTIONS, _VALUE = "state_", "addend_", "productions_", "value_"
_FORBIDDEN: Final = re.compile(r"[ ,;{}()\n\t=]")
_FLOAT_BITS: Final = 32
_DECIMAL_DIGITS_MAX: Final = 38
_EXACT_FLOAT_MAX: Final = 1 << 53
# All NaN are one object, because Python compares the parts of a tuple by identity first.
_NAN: Final = math.nan
UTC_TIMESTAMP: Final = pa.timestamp("us", "UTC")
_EPOCH: Final = datetime(1970, 1, 1)  # noqa: DTZ001 - of times without a zone
_ZONE: Final = pa.lib.string_to_tzinfo("UTC")
_UTC_EPOCH: Final = _EPOCH.replace(tzinfo=_ZONE)
_WIDER: Final = {
    pa.uint8(): pa.int16(),
    pa.uint16(): pa.int32(),
    pa.uint32(): pa.int64(),
    pa.large_string(): pa.string(),
    pa.large_binary(): pa.binary(),
}
_AS_THEY_ARE: Final = frozenset(
    {pa.bool_(), pa.string(), pa.binary(), pa.date32(), pa.float32(), pa.float64()}
    | {pa.int8(), pa.int16(), pa.int32(), pa.int64()}
)


def is_typed_column(name: str) -> bool:
    """Return True for a row's column of states, or of productions' values, with a schema."""
    return _NAME.fullmatch(name) is not None


def typed_columns_among(names: Iterable[str]) -> list[str]:
    return list(filter(is_typed_column, names))


def state_columns_among(names: Iterable[str]) -> list[str]:
    return [name for name in names if name.startswith(_STATE) and is_typed_column(name)]


def addend_columns_among(names: Iterable[str]) -> list[str]:
    return [name for name in names if name.startswith(_ADDEND) and is_typed_column(name)]


def production_columns_among(names: Iterable[str]) -> list[str]:
    return [name for name in names if name.startswith(_PRODUCTIONS) and is_typed_column(name)]


def stored_columns(columns: Sequence[str], names: Iterable[str]) -> list[str]:
    """Return which columns of a file, by their ``names``, make up these columns of rows."""
    wanted = {*columns, *([_ADDEND[:-1]] if _STATE[:-1] in columns else ())}
    return [
        name
        for name in names
        if name in wanted or (is_typed_column(name) and name.rpartition("_")[0] in wanted)
    ]


def state_field(kind: pa.StructType) -> pa.Field:
    """Return the column of states of this type, whose name follows from the type alone."""
    return _field(_STATE, kind)


def addend_field(kind: pa.StructType) -> pa.Field:
    """Return the column of addends to states of this type."""
    return _field(_ADDEND, kind)


def sum_name(addend: str) -> str:
    """Return the row's column for the states to which a column of addends adds."""
    return addend.replace(_ADDEND, _STATE, 1)


def addend_name(sums: str) -> str:
    """Return the row's column for addends to the states in a column; the reverse of `sum_name`."""
    return sums.replace(_STATE, _ADDEND, 1)


def value_field(kind: pa.StructType) -> pa.Field:
    """Return the field that productions in memory have for values of this type."""
    return _field(_VALUE, kind)


def value_name(column: str) -> str:
    """Return the name of `value_field` of the values that a row's column of productions holds."""
    return column.replace(_PRODUCTIONS, _VALUE, 1)


def production_name(value: str) -> str:
    """Return the row's column for the values of a `value_field`."""
    return value.replace(_VALUE, _PRODUCTIONS, 1)


def value_fields(kind: pa.StructType | pa.Schema) -> list[pa.Field]:
    """Return the fields of productions in memory that hold values with a schema."""
    return [field for field in kind if is_typed_column(production_name(field.name))]


def _field(prefix: str, kind: pa.StructType) -> pa.Field:
    name = name_of_kind(kind)
    # The codec refuses nulls where the schema does: Delta could not change a field's nullability later.
    return pa.field(f"{prefix}{zlib.crc32(orjson.dumps(name)):08x}", kind_of_name(name))


def state_kind(schema: pa.Schema | pa.StructType, whole: str = "state") -> pa.StructType:
    """Return the type in which values of a schema are stored, or refuse a type that Delta's basic protocol lacks.

    Times with a zone are stored as microseconds of UTC, unsigned whole numbers in the next wider type.
    """
    kind = _stored(pa.struct(list(schema)), whole)
    if not kind.num_fields:
        raise InvalidError("a schema needs a field")
    return kind


def kind_as_written(kind: pa.StructType) -> pa.StructType:
    """Return the type of states that another engine has rewritten, which may leave out that times are in UTC."""
    return state_kind(_with_zones(kind))


def _with_zones(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_with_zones(field.type)) for field in kind])
    if pa.types.is_map(kind):
        return pa.map_(_with_zones(kind.key_type), _with_zones(kind.item_type))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return pa.list_(_with_zones(kind.value_type))
    return UTC_TIMESTAMP if pa.types.is_timestamp(kind) else kind


def _stored(kind: pa.DataType, part: str) -> pa.DataType:
    if pa.types.is_struct(kind):
        return _stored_fields(kind, part)
    if pa.types.is_map(kind):
        key, item = _stored(kind.key_type, f"{part}[key]"), _stored(kind.item_type, f"{part}[value]")
        if pa.types.is_nested(key):
            raise InvalidError(
                "a dict has no keys of this type", part=f"{part}[key]", type=str(kind.key_type)
            )
        return pa.map_(key, kind.item_field.with_type(item))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return pa.list_(kind.value_field.with_type(_stored(kind.value_type, f"{part}[]")))
    if pa.types.is_decimal(kind) and kind.precision <= _DECIMAL_DIGITS_MAX and kind.scale >= 0:
        return pa.decimal128(kind.precision, kind.scale)
    if pa.types.is_timestamp(kind) and kind.tz is not None:
        return UTC_TIMESTAMP
    stored = _WIDER.get(kind, kind)
    if stored not in _AS_THEY_ARE:
        raise InvalidError(
            "a schema takes the types of Delta's basic protocol: leave it out, and any value of the model is kept as text",
            part=part,
            type=str(kind),
        )
    return stored


def _stored_fields(kind: pa.StructType, part: str) -> pa.StructType:
    names = [field.name.lower() for field in kind]
    for field in kind:
        if not field.name or _FORBIDDEN.search(field.name):
            raise InvalidError(
                "Delta takes no field names with blanks or any of `,;{}()=`", part=f"{part}.{field.name}"
            )
        if names.count(field.name.lower()) > 1:
            raise InvalidError("SQL cannot tell fields apart by case", part=f"{part}.{field.name}")
    return pa.struct([field.with_type(_stored(field.type, f"{part}.{field.name}")) for field in kind])


class SchemaCodec:
    """The codec of states with a schema: dicts of its fields, stored as columns; it reads JSON text as well.

    A field that is left out is null. A field that the schema lacks, a null where it allows none and a value that would
    change are refused, with the path of the part. Whole numbers become floats and decimals where none of their digits
    is lost.
    """

    # The same as `JsonCodec`, because text of one is read by the other.
    name: Final = "json"
    is_text: Final = True

    def __init__(self, schema: pa.Schema | pa.StructType, whole: str = "state") -> None:
        self._whole = whole
        self.kind: pa.StructType = state_kind(schema, whole)
        self.column: pa.Field = state_field(self.kind)
        self.produced: pa.Field = value_field(self.kind)
        self._names = tuple(field.name for field in self.kind)
        self._make = dict_maker(self._names)
        self._fit = _struct_fitter(self.kind)
        self._fits = [_fitter(field.type, is_nullable=field.nullable) for field in self.kind]
        copies = [_copier(field.type) for field in self.kind]
        self._copies = None if not any(copies) else tuple(copy or _same for copy in copies)

    def __reduce__(self) -> tuple[type[SchemaCodec], tuple[pa.StructType, str]]:
        return SchemaCodec, (self.kind, self._whole)

    def encode(self, value: Any) -> Any:
        """Return the `StateCells` of a state, or raise `InvalidError`, which names the part that does not fit."""
        try:
            if type(value) is dict and tuple(value) == self._names:
                parts = value.values()
                return tuple([fit(part) for fit, part in zip(self._fits, parts)])  # noqa: B905 - of one length
        except _MisfitError:
            # Once more below, for the path of the part.
            pass
        try:
            return tuple(self._fit(value).values())
        except _MisfitError as misfit:
            raise InvalidError(
                misfit.reason,
                part=f"{self._whole}{misfit.part}",
                type=type(misfit.value).__name__,
                value=misfit.value,
            ) from None

    def decode(self, encoded: Any) -> dict[str, Any]:
        """Return a new dict of the fields of cells or of text; text is fitted to the schema."""
        if not isinstance(encoded, tuple):
            encoded = self._of_text(encoded)
        if self._copies is None:
            return self._make(encoded)
        parts = zip(self._names, self._copies, encoded, strict=True)
        return {name: None if cell is None else copy(cell) for name, copy, cell in parts}

    def encode_text(self, value: Any) -> str:
        """Return a state that fits as JSON text, for a table without its column."""
        return encode_value(dict(zip(self._names, self.encode(value), strict=True)))

    def _of_text(self, text: str | bytes) -> StateCells:
        try:
            value = decode_value(text)
            if type(value) is not dict:
                raise _MisfitError("a state is a dict of the schema's fields", value)  # noqa: TRY301
            cells = self._fit(_known_parts(value, self.kind))
        except (_MisfitError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
            reason = f"state{error.part}: {error.reason}" if isinstance(error, _MisfitError) else error
            raise DataError(
                "the stored state does not fit its schema: raise state_version, and change it with upgrade_state",
                codec="schema",
                reason=reason,
            ) from error
        return tuple(cells.values())


class AddendCodec(SchemaCodec):
    """The codec of states that code only adds to: a dict has the addend of each field."""

    def __init__(self, schema: pa.Schema | pa.StructType, whole: str = "state") -> None:
        super().__init__(schema, whole)
        check_addend(self.kind)
        self.column: pa.Field = addend_field(self.kind)

    def __reduce__(self) -> tuple[type[SchemaCodec], tuple[pa.StructType, str]]:
        return AddendCodec, (self.kind, self._whole)


def check_addend(kind: pa.StructType) -> None:
    for field in kind:
        if field.type != pa.int64() or not field.nullable:
            raise InvalidError(
                "a combining state has sums of whole numbers: each field is a nullable int64",
                part=f"state.{field.name}",
                type=str(field.type) if field.nullable else f"{field.type} not null",
            )


def _known_parts(value: Any, kind: pa.DataType) -> Any:
    """Return a value without fields that a schema lacks, at any depth, because fields may go while text stays."""
    if pa.types.is_struct(kind) and isinstance(value, dict):
        return {
            field.name: _known_parts(value[field.name], field.type) for field in kind if field.name in value
        }
    if pa.types.is_list(kind) and type(value) is list:
        return [_known_parts(part, kind.value_type) for part in value]
    if pa.types.is_map(kind) and type(value) is dict:
        return {key: _known_parts(item, kind.item_type) for key, item in value.items()}
    return value


class _MisfitError(Exception):
    """A value that does not fit its type; ``part`` is its path within the state."""

    def __init__(self, reason: str, value: object, part: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.value = value
        self.part = part

    def within(self, outer: str) -> _MisfitError:
        self.part = f"{outer}{self.part}"
        return self


_Fit: TypeAlias = Callable[[Any], Any]


def _same(cell: Any) -> Any:
    return cell


def _copier(kind: pa.DataType) -> _Fit | None:
    """Return a function that copies a cell that code could change; ``None`` for types of immutable cells."""
    if pa.types.is_struct(kind):
        parts = {field.name: _copier(field.type) for field in kind}
        if not any(parts.values()):
            return dict
        return lambda cell: {
            name: copy(cell[name]) if copy is not None and cell[name] is not None else cell[name]
            for name, copy in parts.items()
        }
    if pa.types.is_list(kind):
        of_part = _copier(kind.value_type)
        if of_part is None:
            return list
        return lambda cell: [None if part is None else of_part(part) for part in cell]
    if pa.types.is_map(kind):
        of_item = _copier(kind.item_type)
        if of_item is None:
            return dict
        return lambda cell: {key: None if item is None else of_item(item) for key, item in cell.items()}
    return None


def _fitter(kind: pa.DataType, *, is_nullable: bool = True) -> _Fit:
    """Return a function that makes the cell of a value, or raises `_MisfitError`; most cells are the values themselves."""
    if pa.types.is_struct(kind):
        fit = _struct_fitter(kind)
    elif pa.types.is_list(kind):
        fit = _list_fitter(kind)
    elif pa.types.is_map(kind):
        fit = _map_fitter(kind)
    else:
        return _leaf_fitter(kind, is_nullable=is_nullable)
    if is_nullable:
        return lambda value: None if value is None else fit(value)
    return lambda value: _refuse_null() if value is None else fit(value)


def _refuse_null(value: object = None) -> Any:
    raise _MisfitError("the field takes no null, and is missing or null", value)


def _leaf_fitter(kind: pa.DataType, *, is_nullable: bool) -> _Fit:
    convert, expected = _conversion(kind)

    def fit(value: Any) -> Any:
        try:
            known = as_python(value)
            if known is not None:
                return convert(known)
        except (*_MISFITS, InvalidError):
            raise _MisfitError(f"the value is not {expected}", value) from None
        return None if is_nullable else _refuse_null(value)

    return _quick(kind, fit)


def _quick(kind: pa.DataType, slow: _Fit) -> _Fit:
    """Return ``slow`` behind the test that most values pass: they are cells already. A call for each cell costs most."""
    if pa.types.is_integer(kind):
        low, high = _bounds(kind.bit_width)
        return lambda value: value if type(value) is int and low <= value <= high else slow(value)
    if pa.types.is_float64(kind):
        return lambda value: value if type(value) is float and value == value else slow(value)  # noqa: PLR0124
    if pa.types.is_string(kind):
        return lambda value: value if type(value) is str and value.isascii() else slow(value)
    if pa.types.is_timestamp(kind):
        return lambda value: value if type(value) is datetime and value.tzinfo is _ZONE else slow(value)
    if pa.types.is_date(kind):
        return lambda value: value if type(value) is date else slow(value)
    if pa.types.is_boolean(kind):
        return lambda value: value if type(value) is bool else slow(value)
    return _quick_decimal(kind, slow) if pa.types.is_decimal(kind) else slow


def _quick_decimal(kind: pa.DataType, slow: _Fit) -> _Fit:
    convert = _decimal(kind.precision, kind.scale)

    def fit(value: Any) -> Any:
        try:
            return convert(value)
        except _MISFITS:
            return slow(value)

    return fit


def _conversion(kind: pa.DataType) -> tuple[_Fit, str]:
    """Return a function that makes the cell of a value, or raises one of `_MISFITS`, and what it expects."""
    if pa.types.is_integer(kind):
        return _whole(*_bounds(kind.bit_width)), f"a whole number of {kind.bit_width} bits"
    if pa.types.is_decimal(kind):
        return _decimal(kind.precision, kind.scale), f"a {kind}, to the last digit"
    return next(found for test, found in _CONVERSIONS if test(kind))


def _bounds(bits: int) -> tuple[int, int]:
    return -(1 << (bits - 1)), (1 << (bits - 1)) - 1


def _whole(low: int, high: int) -> _Fit:
    def convert(value: Any) -> int:
        # The bounds first, because a decimal may have more digits than memory holds.
        if type(value) not in _NUMBERS or not low <= value <= high:
            raise ValueError(value)
        number = int(value)
        if value != number:
            raise ValueError(value)
        return number

    return convert


_MISFITS: Final = (ValueError, TypeError, OverflowError, InvalidOperation, Inexact)
_NUMBERS: Final = frozenset({int, float, Decimal})


def _double(value: Any) -> float:
    if type(value) is float:
        return value if value == value else _NAN  # noqa: PLR0124 - NaN is the only value that differs from itself
    if type(value) is int and -_EXACT_FLOAT_MAX <= value <= _EXACT_FLOAT_MAX:
        return float(value)
    raise ValueError(value)


def _single(value: Any) -> float:
    double = _double(value)
    with np.errstate(over="ignore", under="ignore"):
        single = float(np.float32(double))
    if (math.isinf(single) and not math.isinf(double)) or (not single and double):
        raise ValueError(value)
    if type(value) is int and single != double:
        raise ValueError(value)
    return single if single == single else _NAN  # noqa: PLR0124


def _decimal(precision: int, scale: int) -> _Fit:
    step = Decimal(1).scaleb(-scale)
    context = Context(prec=precision, traps=[Inexact, InvalidOperation])

    def convert(value: Any) -> Decimal:
        if type(value) is not Decimal:
            if type(value) is not int:
                raise ValueError(value)
            value = Decimal(value)
        cell: Decimal = value.quantize(step, None, context)
        if cell != cell:  # noqa: PLR0124 - NaN passes `quantize`
            raise ValueError(value)
        return cell

    return convert


def _text(value: Any) -> str:
    if type(value) is not str or not (value.isascii() or has_utf8(value)):
        raise ValueError(value)
    return value


def _bytes(value: Any) -> bytes:
    if type(value) is bytes:
        return value
    if type(value) not in (bytearray, memoryview):
        raise ValueError(value)
    return value.tobytes() if type(value) is memoryview else bytes(value)


def _date(value: Any) -> date:
    if type(value) is not date:
        raise ValueError(value)
    return value


def _instant(value: Any) -> datetime:
    if type(value) is not datetime or value.utcoffset() is None:
        raise ValueError(value)
    return value if value.tzinfo is _ZONE else value.astimezone(UTC).replace(tzinfo=_ZONE)


def _boolean(value: Any) -> bool:
    if type(value) is not bool:
        raise ValueError(value)
    return value


_CONVERSIONS: Final[tuple[tuple[Callable[[pa.DataType], bool], tuple[_Fit, str]], ...]] = (
    (pa.types.is_string, (_text, "text that has a UTF-8 form")),
    (pa.types.is_float64, (_double, "a float")),
    (pa.types.is_float32, (_single, "a float of 32 bits")),
    (pa.types.is_boolean, (_boolean, "true or false")),
    (pa.types.is_timestamp, (_instant, "a time with a zone")),
    (pa.types.is_date, (_date, "a date")),
    (pa.types.is_binary, (_bytes, "bytes")),
)


def _struct_fitter(kind: pa.StructType) -> Callable[[Any], dict[str, Any]]:
    fits = {field.name: _fitter(field.type, is_nullable=field.nullable) for field in kind}

    def fit(value: Any) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            raise _MisfitError("the value is not a dict of the schema's fields", value)
        if not fits.keys() >= value.keys():
            name = next(name for name in value if name not in fits)
            hint = did_you_mean(name, fits)
            raise _MisfitError(f"the schema has no such field{hint}", value[name], f".{name}")
        name = ""
        try:
            cells = {}
            for name, fit_part in fits.items():
                cells[name] = fit_part(value.get(name))
        except _MisfitError as misfit:
            raise misfit.within(f".{name}") from None
        return cells

    return fit


def _list_fitter(kind: pa.ListType) -> _Fit:
    fit_part = _fitter(kind.value_type, is_nullable=kind.value_field.nullable)

    def fit(value: Any) -> list[Any]:
        if type(value) not in (list, tuple):
            value = _as_list(value)
        cells: list[Any] = []
        try:
            # On an error, the list's length is the place of the bad part.
            cells.extend(map(fit_part, value))
        except _MisfitError as misfit:
            raise misfit.within(f"[{len(cells)}]") from None
        return cells

    return fit


def _as_list(value: Any) -> list[Any]:
    try:
        known = as_python(value)
    except InvalidError as error:
        raise _MisfitError(error.message, value) from None
    if type(known) is not list:
        raise _MisfitError("the value is not a list", value)
    return known


def _map_fitter(kind: pa.MapType) -> _Fit:
    fit_key = _fitter(kind.key_type, is_nullable=False)
    fit_item = _fitter(kind.item_type, is_nullable=kind.item_field.nullable)

    def fit(value: Any) -> dict[Any, Any]:
        if type(value) is not dict:
            raise _MisfitError("the value is not a dict", value)
        cells = {}
        for key, item in value.items():
            try:
                cells[fit_key(key)] = fit_item(item)
            except _MisfitError as misfit:
                raise misfit.within(f"[{key!r}]") from None
        if len(cells) < len(value):
            raise _MisfitError("two keys of the map become one", value)
        return cells

    return fit


def cells_of(column: pa.StructArray) -> list[StateCells | None]:
    """Return the cells of each state; ``None`` where the struct is null."""
    parts = [_part_cells(part) for part in column.flatten()]
    rows: list[StateCells | None] = list(zip(*parts, strict=True))
    if column.null_count:
        for row in np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False)).tolist():
            rows[row] = None
    return rows


def _part_cells(part: pa.Array) -> list[Any]:
    cells = part.to_pylist(maps_as_pydicts="strict") if pa.types.is_nested(part.type) else plain_cells(part)
    of_cell = _nan_unifier(part.type)
    return cells if of_cell is None else list(map(of_cell, cells))


def _nan_unifier(kind: pa.DataType) -> _Fit | None:
    """Return a function that makes all NaN within a cell one object; ``None`` for types without floats."""
    if pa.types.is_floating(kind):
        return lambda cell: cell if cell == cell else _NAN  # noqa: PLR0124
    if pa.types.is_struct(kind):
        parts = [(field.name, of) for field in kind if (of := _nan_unifier(field.type)) is not None]
        if not parts:
            return None
        return lambda cell: None if cell is None else cell | {name: of(cell[name]) for name, of in parts}
    if pa.types.is_list(kind):
        of_part = _nan_unifier(kind.value_type)
        return None if of_part is None else lambda cell: None if cell is None else list(map(of_part, cell))
    if pa.types.is_map(kind):
        of_key, of_item = _nan_unifier(kind.key_type) or _same, _nan_unifier(kind.item_type) or _same
        if of_key is of_item is _same:
            return None
        return lambda cell: (
            None if cell is None else {of_key(key): of_item(item) for key, item in cell.items()}
        )
    return None


_MAKERS: Final[tuple[Callable[..., Callable[[Any], dict[str, Any]]], ...]] = (
    lambda a: lambda row: {a: row[0]},
    lambda a, b: lambda row: {a: row[0], b: row[1]},
    lambda a, b, c: lambda row: {a: row[0], b: row[1], c: row[2]},
    lambda a, b, c, d: lambda row: {a: row[0], b: row[1], c: row[2], d: row[3]},
    lambda a, b, c, d, e: lambda row: {a: row[0], b: row[1], c: row[2], d: row[3], e: row[4]},
    lambda a, b, c, d, e, f: lambda row: {a: row[0], b: row[1], c: row[2], d: row[3], e: row[4], f: row[5]},
    lambda a, b, c, d, e, f, g: (
        lambda row: {a: row[0], b: row[1], c: row[2], d: row[3], e: row[4], f: row[5], g: row[6]}
    ),
    lambda a, b, c, d, e, f, g, h: (
        lambda row: {a: row[0], b: row[1], c: row[2], d: row[3], e: row[4], f: row[5], g: row[6], h: row[7]}
    ),
)


def dict_maker(names: Sequence[str], kind: type[dict[str, Any]] = dict) -> Callable[[Any], dict[str, Any]]:
    """Return a function that makes a dict of a row's cells: of a few names in half the time that ``zip`` takes."""
    if kind is dict and 0 < len(names) <= len(_MAKERS):
        return _MAKERS[len(names) - 1](*names)
    return lambda row: kind(zip(names, row))  # noqa: B905 - of one length, and strict costs a tenth


def plain_cells(column: pa.Array) -> list[Any]:
    """Return the same objects as ``to_pylist``, which takes a microsecond or more for each time and decimal."""
    kind = column.type
    if pa.types.is_decimal(kind):
        return [
            None if digits is None else Decimal(digits) for digits in column.cast(pa.string()).to_pylist()
        ]
    if kind == pa.duration("us"):
        return _durations(column)
    if kind == pa.timestamp("us"):
        return [None if length is None else _EPOCH + length for length in _durations(column)]
    if kind == UTC_TIMESTAMP:
        return [None if length is None else _UTC_EPOCH + length for length in _durations(column)]
    if kind == pa.date32():
        days: list[Any] = column.to_numpy(zero_copy_only=False).astype("O").tolist()
        # NumPy gives a number for a day that Python's dates lack.
        if int not in set(map(type, days)):
            return days
    cells: list[Any] = column.to_pylist()
    return cells


def _durations(column: pa.Array) -> list[Any]:
    lengths = column.view(pa.int64()).view(pa.duration("us")).to_numpy(zero_copy_only=False)
    objects: list[Any] = lengths.astype("O").tolist()
    # NumPy takes the smallest number for a missing value.
    return objects if objects.count(None) == column.null_count else column.view(pa.duration("us")).to_pylist()


def struct_of(rows: Sequence[StateCells | None], kind: pa.StructType) -> pa.StructArray:
    """Return states as a column of their type; the reverse of `cells_of`."""
    if not rows:
        return pa.array([], kind)
    is_null = [row is None for row in rows]
    nothing = (None,) * kind.num_fields
    parts = zip(*[nothing if row is None else row for row in rows], strict=True)
    arrays = [
        pa.array(map(_pairs(field.type), cells) if _has_maps(field.type) else cells, field.type)
        for field, cells in zip(kind, parts, strict=True)
    ]
    return pa.StructArray.from_arrays(
        arrays, fields=list(kind), mask=pa.array(is_null) if any(is_null) else None
    )


def _has_maps(kind: pa.DataType) -> bool:
    if pa.types.is_map(kind):
        return True
    if pa.types.is_list(kind):
        return _has_maps(kind.value_type)
    return pa.types.is_struct(kind) and any(_has_maps(field.type) for field in kind)


def _pairs(kind: pa.DataType) -> _Fit:
    """Return a function that makes a list of pairs of each map within a cell, as Arrow takes it."""
    if pa.types.is_map(kind):
        of_item = _pairs(kind.item_type)
        of_key = _pairs(kind.key_type)
        return lambda cell: None if cell is None else [(of_key(k), of_item(v)) for k, v in cell.items()]
    if pa.types.is_list(kind) and _has_maps(kind):
        of_part = _pairs(kind.value_type)
        return lambda cell: None if cell is None else list(map(of_part, cell))
    if pa.types.is_struct(kind) and _has_maps(kind):
        parts = {field.name: _pairs(field.type) for field in kind}
        return lambda cell: None if cell is None else {name: of(cell[name]) for name, of in parts.items()}
    return _same


def texts_of(column: pa.StructArray) -> pa.StringArray:
    """Return states as JSON text, null where the struct is."""
    names = [field.name for field in column.type]
    texts = [
        None if cells is None else encode_value(dict(zip(names, cells, strict=True)))
        for cells in cells_of(column)
    ]
    return pa.array(texts, pa.string())
