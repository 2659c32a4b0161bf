"""Spark schemas without Spark's JVM, and their values: checked, and in JSON.

A schema is a ``StructType``, or text such as ``"count int, seen array<string>"``, which Spark would parse in its JVM.
In JSON, text, booleans, whole numbers and finite floats stay unchanged. Times and dates become ISO 8601 text, decimals
text, bytes Base64, NaN and infinities their names, structs objects, and maps lists of pairs.
"""

from __future__ import annotations

import math
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping
from datetime import UTC, date, datetime, tzinfo
from decimal import Context, Decimal, Inexact, InvalidOperation
from functools import lru_cache
from typing import Any, Final, TypeAlias
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import numpy as np
import pandas as pd
import sqlglot
from pyspark.sql import types as T  # noqa: N812 - the name that every Spark user knows
from sqlglot import expressions as tree

from millpond.statestore.errors import InvalidError

_Convert: TypeAlias = Callable[[Any], Any]
_Kind: Final = tree.DType
_ATOM_TYPES: Final[Mapping[tree.DType, Callable[[], T.DataType]]] = {
    _Kind.BIGINT: T.LongType,
    _Kind.BINARY: T.BinaryType,
    _Kind.BOOLEAN: T.BooleanType,
    _Kind.CHAR: T.StringType,
    _Kind.DATE: T.DateType,
    _Kind.DOUBLE: T.DoubleType,
    _Kind.FLOAT: T.FloatType,
    _Kind.INT: T.IntegerType,
    _Kind.SMALLINT: T.ShortType,
    _Kind.TEXT: T.StringType,
    _Kind.TIMESTAMP: T.TimestampType,
    _Kind.TIMESTAMPTZ: T.TimestampType,
    _Kind.TIMESTAMPLTZ: T.TimestampType,
    _Kind.TIMESTAMPNTZ: T.TimestampNTZType,
    _Kind.TINYINT: T.ByteType,
    _Kind.VARCHAR: T.StringType,
}
_DECIMAL_DEFAULT: Final = (10, 0)


def parse_schema(schema: T.StructType | str) -> T.StructType:
    """Return the struct that a schema describes. As in Spark, a type that is no struct becomes the field ``value``."""
    if isinstance(schema, T.StructType):
        return schema
    if not isinstance(schema, str):
        raise InvalidError(
            "a schema must be a StructType, or text such as 'count int'", type=type(schema).__name__
        )
    return _parsed(schema)


@lru_cache(maxsize=1_024)
def _parsed(schema: str) -> T.StructType:
    # Cached because processors declare their variables again in each bundle.
    # Spark accepts "a: int, b: string" for columns too: such text parses only inside struct<…>.
    fields = _columns(f"value {schema}") or (_columns(f"value struct<{schema}>") if ":" in schema else None)
    is_type = fields is not None and len(fields) == 1
    fields = fields or _columns(schema)
    if fields is None:
        raise _refusal(schema, "Spark's syntax is 'count int, seen array<string>'")
    columns = T.StructType([_field(one, schema) for one in fields])
    only = columns[0].dataType
    return only if is_type and isinstance(only, T.StructType) else columns


def _columns(text: str) -> list[tree.Expression] | None:
    try:
        parsed = sqlglot.parse_one(f"CREATE TABLE t ({text})", dialect="spark")
    except sqlglot.ParseError:
        return None
    columns = parsed.this.expressions if isinstance(parsed, tree.Create) else []
    has_types = all(isinstance(one, tree.ColumnDef) and one.args.get("kind") for one in columns)
    # The parser drops unknown words inside a struct without an error, so compare the number of words.
    is_whole = _words(text) == sum(_words(one.sql("spark")) for one in columns)
    return columns if columns and has_types and is_whole else None


def _words(text: str) -> int:
    return sum(any(map(str.isalnum, token.text)) for token in sqlglot.tokenize(text, dialect="spark"))


def _data_type(node: tree.Expression | None, schema: str) -> T.DataType:
    if not isinstance(node, tree.DataType):
        raise _refusal(schema, "a column needs a type that Spark knows")
    parts = node.expressions
    if node.this is _Kind.STRUCT and parts:
        return T.StructType([_field(part, schema) for part in parts])
    if node.this is _Kind.ARRAY and len(parts) == 1:
        return T.ArrayType(_data_type(parts[0], schema))
    if node.this is _Kind.MAP and len(parts) == 2:
        return T.MapType(_data_type(parts[0], schema), _data_type(parts[1], schema))
    if node.this is _Kind.DECIMAL:
        return T.DecimalType(*([int(part.name) for part in parts] or _DECIMAL_DEFAULT))
    if node.this not in _ATOM_TYPES:
        raise _refusal(schema, f"{node.sql('spark') or node.this.value} is not a type for state")
    return _ATOM_TYPES[node.this]()


def _field(node: tree.Expression, schema: str) -> T.StructField:
    if not isinstance(node, tree.ColumnDef):
        raise _refusal(schema, f"{node.sql('spark')!r} is not a name and a type")
    is_required = any(
        isinstance(one.kind, tree.NotNullColumnConstraint) and not one.kind.args.get("allow_null")
        for one in node.find_all(tree.ColumnConstraint)
        if one.parent is node
    )
    return T.StructField(node.name, _data_type(node.args.get("kind"), schema), nullable=not is_required)


def _refusal(schema: str, reason: str) -> InvalidError:
    return InvalidError("cannot parse the schema", schema=schema, reason=reason)


_BITS: Final[Mapping[type[T.DataType], int]] = {
    T.ByteType: 8,
    T.ShortType: 16,
    T.IntegerType: 32,
    T.LongType: 64,
}


def zone_named(name: str) -> tzinfo:
    """Return the time zone of a Spark session: a region or, as in ``+02:00``, an offset."""
    try:
        return ZoneInfo(name)
    except (ValueError, ZoneInfoNotFoundError):
        pass
    try:
        offset = datetime.fromisoformat(f"1970-01-01T00:00:00{name}").tzinfo
    except ValueError:
        offset = None
    if offset is None:
        raise InvalidError("a time zone must be a region's name or an offset such as +02:00", time_zone=name)
    return offset


class StructCodec:
    """Converts the values of a struct, which are tuples in the order of its fields.

    Args:
        schema: the fields.
        what: the values' name in errors, such as ``"the state 'count'"``.
        time_zone: of times without a zone; by default this process's, as for Spark's rows. Frames have the session's.
        in_json: encode to JSON; otherwise to Python's values of the field's types.

    Example:
        >>> codec = StructCodec(parse_schema("count int, day date"), "the state 'days'")
        >>> codec.encode((3, date(2013, 1, 31)))
        {'count': 3, 'day': '2013-01-31'}
        >>> codec.from_json({"count": 3, "day": "2013-01-31"})
        (3, datetime.date(2013, 1, 31))
    """

    __slots__ = ("_get", "_in_json", "_time_zone", "_what", "_write", "names", "schema")

    def __init__(
        self, schema: T.StructType, what: str, time_zone: tzinfo | None = None, in_json: bool = True
    ) -> None:
        self.schema: T.StructType = schema
        self.names: list[str] = schema.names
        self._what = what
        self._time_zone = time_zone
        self._in_json = in_json
        self._write = [
            _writer(field.dataType, f"{what}, field {field.name!r}", time_zone, in_json) for field in schema
        ]
        self._get = [_reader(field.dataType) for field in schema]

    def __reduce__(self) -> tuple[Any, ...]:
        return (StructCodec, (self.schema, self._what, self._time_zone, self._in_json))

    def encode(self, value: Any) -> dict[str, Any]:
        """Encode a tuple, list or Row with one value for each field, or a text with one letter for each, as in Spark."""
        if isinstance(value, str):
            value = tuple(value)
        if isinstance(value, tuple | list) and len(value) == len(self.names):
            return {
                name: None if part is None else write(part)
                for name, write, part in zip(self.names, self._write, value, strict=True)
            }
        found = {"values": len(value)} if isinstance(value, tuple | list) else {"type": type(value).__name__}
        raise InvalidError(
            f"{self._what} takes a tuple with one value for each field",
            fields=self.schema.simpleString(),
            **found,
        )

    def encode_row(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Encode a row's fields by name. An absent field becomes null."""
        get = row.get
        return {
            name: None if (part := get(name)) is None else write(part)
            for name, write in zip(self.names, self._write, strict=True)
        }

    def encode_part(self, value: Any) -> dict[str, Any]:
        """Encode a nested value: a dict or a Row by its names, a tuple by its places."""
        if isinstance(value, T.Row) and hasattr(value, "__fields__"):
            value = dict(zip(value.__fields__, value, strict=True))
        return self.encode_row(value) if isinstance(value, dict) else self.encode(value)

    def from_json(self, stored: Mapping[str, Any]) -> tuple[Any, ...]:
        """Decode a JSON object. A field that is newer than the object becomes ``None``."""
        get = stored.get
        return tuple(
            part if read is None or part is None else read(part)
            for part, read in zip(map(get, self.names), self._get, strict=True)
        )


def _writer(kind: T.DataType, what: str, time_zone: tzinfo | None, in_json: bool) -> _Convert:
    if isinstance(kind, T.StructType):
        codec = StructCodec(kind, what, time_zone, in_json)
        return codec.encode_part
    if isinstance(kind, T.ArrayType):
        write = _nullable(_writer(kind.elementType, what, time_zone, in_json))
        return lambda value: list(map(write, _of(value, (list, tuple, np.ndarray), kind, what)))
    if isinstance(kind, T.MapType):
        write_key = _writer(kind.keyType, what, time_zone, in_json)
        write = _nullable(_writer(kind.valueType, what, time_zone, in_json))
        # A nested key has no hash.
        of_pairs = list if in_json or isinstance(kind.keyType, T.StructType | T.ArrayType) else dict
        return lambda value: of_pairs(
            [write_key(key), write(part)] for key, part in _pairs(value, kind, what)
        )
    take, as_json = _taker(kind, what, time_zone), _AS_JSON.get(type(kind)) if in_json else None
    return take if as_json is None else lambda value: as_json(take(value))


def _taker(kind: T.DataType, what: str, time_zone: tzinfo | None) -> _Convert:
    """Return the function that makes Python's value of what code gives for a type, or refuses it."""
    if isinstance(kind, T.TimestampType):
        return lambda value: _timestamp(value, kind, what, time_zone)
    if type(kind) in _BITS:
        return _whole_taker(kind, what)
    if isinstance(kind, T.DecimalType):
        return _decimal_taker(kind, what)
    take = _TAKERS.get(type(kind))
    if take is None:
        raise InvalidError(f"{what} cannot have this type", type=kind.simpleString())
    return lambda value: take(value, kind, what)


def _reader(kind: T.DataType) -> _Convert | None:
    """Return the decoder of a type, ``None`` if JSON has the value unchanged."""
    if isinstance(kind, T.StructType):
        codec, factory = StructCodec(kind, ""), T.Row(*kind.names)
        return lambda stored: factory(*codec.from_json(stored))
    if isinstance(kind, T.ArrayType):
        if _reader(kind.elementType) is None:
            return None
        read = _nullable(_reader(kind.elementType))
        return lambda stored: list(map(read, stored))
    if isinstance(kind, T.MapType):
        read_key, read = _reader(kind.keyType) or _nullable(None), _nullable(_reader(kind.valueType))
        return lambda stored: {read_key(key): read(part) for key, part in stored}
    return _READERS.get(type(kind))


def _nullable(convert: _Convert | None) -> _Convert:
    if convert is None:
        return lambda value: value
    return lambda value: None if value is None else convert(value)


def _of(value: Any, kinds: type | tuple[type, ...], kind: T.DataType, what: str) -> Any:
    if isinstance(value, kinds):
        return value
    raise _misfit(value, kind, what)


def _pairs(value: Any, kind: T.DataType, what: str) -> list[tuple[Any, Any]]:
    # Spark's rows have a map as its pairs.
    given = value.items() if isinstance(value, dict) else _of(value, (list, tuple, np.ndarray), kind, what)
    pairs = dict(tuple(pair) for pair in given if isinstance(pair, list | tuple) and len(pair) == 2)
    if len(pairs) != len(given):
        raise _misfit(value, kind, what)
    return list(pairs.items())


def _misfit(value: Any, kind: T.DataType, what: str) -> InvalidError:
    return InvalidError(
        f"{what} does not take this value",
        value=repr(value)[:100],
        type=type(value).__name__,
        wanted=kind.simpleString(),
    )


def _whole_taker(kind: T.DataType, what: str) -> _Convert:
    bound = 1 << (_BITS[type(kind)] - 1)

    def take(value: Any) -> int:
        if type(value) is not int:
            # A column of whole numbers with a missing one has floats in pandas.
            is_whole = isinstance(value, float | np.floating) and float(value).is_integer()
            value = int(value if is_whole else _of(value, np.integer, kind, what))
        if not -bound <= value < bound:
            raise _misfit(value, kind, what)
        return int(value)

    return take


def _decimal_taker(kind: T.DecimalType, what: str) -> _Convert:
    unit, bound = Decimal(1).scaleb(-kind.scale), Decimal(10) ** (kind.precision - kind.scale)
    context = Context(prec=max(kind.precision, 1), traps=[Inexact, InvalidOperation])

    def take(value: Any) -> Decimal:
        number = Decimal(_of(value, (Decimal, int), kind, what))
        # `abs` would round to 28 digits.
        if not number.is_finite() or number.copy_abs() >= bound:
            raise _misfit(value, kind, what)
        try:
            return number.quantize(unit, context=context)
        except Inexact as error:
            raise _misfit(value, kind, what) from error

    return take


def _float(value: Any, kind: T.DataType, what: str) -> float:
    if type(value) is not float:
        # In Python a bool is an int, but Spark refuses it for a float.
        if isinstance(value, bool):
            raise _misfit(value, kind, what)
        value = float(_of(value, (float, int, np.floating, np.integer), kind, what))
    number: float = value
    return number


def _time(value: Any, kind: T.DataType, what: str) -> datetime:
    """Return a time of Python's, NumPy's or pandas' as Python's."""
    if isinstance(value, np.datetime64):
        value = pd.Timestamp(value)
    if isinstance(value, pd.Timestamp):
        if value.nanosecond:
            raise _misfit(value, kind, what)
        value = value.to_pydatetime()
    time: datetime = _of(value, datetime, kind, what)
    return time


def _timestamp(value: Any, kind: T.DataType, what: str, time_zone: tzinfo | None) -> datetime:
    time = _time(value, kind, what)
    if time.tzinfo is None and time_zone is not None:
        # As in Spark, the hour that a zone has twice is the later one.
        time = time.replace(tzinfo=time_zone, fold=1)
    return time.astimezone(UTC)


def _date(value: Any, kind: T.DataType, what: str) -> date:
    if isinstance(value, datetime | np.datetime64):
        return _time(value, kind, what).date()
    day: date = _of(value, date, kind, what)
    return day


def _boolean(value: Any, kind: T.DataType, what: str) -> bool:
    # As in Spark, 0 and 1 are booleans too.
    is_binary = isinstance(value, bool | np.bool_ | int | float | np.number) and value in (0, 1)
    if not is_binary:
        raise _misfit(value, kind, what)
    return bool(value)


_TAKERS: Final[Mapping[type[T.DataType], Callable[[Any, Any, str], Any]]] = {
    T.BinaryType: lambda value, kind, what: bytes(_of(value, (bytes, bytearray), kind, what)),
    T.BooleanType: _boolean,
    T.DateType: _date,
    T.DoubleType: _float,
    T.FloatType: _float,
    T.NullType: lambda value, kind, what: _of(value, (), kind, what),
    T.StringType: lambda value, kind, what: value if type(value) is str else str(_of(value, str, kind, what)),
    T.TimestampNTZType: lambda value, kind, what: _time(value, kind, what).replace(tzinfo=None),
}
_AS_JSON: Final[Mapping[type[T.DataType], _Convert]] = {
    T.BinaryType: lambda value: b64encode(value).decode(),
    T.DateType: date.isoformat,
    T.DecimalType: str,
    **dict.fromkeys(
        (T.DoubleType, T.FloatType), lambda value: value if math.isfinite(value) else repr(value)
    ),
    **dict.fromkeys((T.TimestampNTZType, T.TimestampType), datetime.isoformat),
}
_READERS: Final[Mapping[type[T.DataType], _Convert]] = {
    T.BinaryType: b64decode,
    T.DateType: date.fromisoformat,
    T.DecimalType: Decimal,
    # A whole float may come back from JSON as an int.
    T.DoubleType: float,
    T.FloatType: float,
    T.TimestampNTZType: datetime.fromisoformat,
    T.TimestampType: lambda stored: datetime.fromisoformat(stored).astimezone().replace(tzinfo=None),
}
