"""Values of a Spark schema as JSON keeps them, and back.

What JSON has (text, booleans, whole numbers, finite floats) stays as it is. Times and dates become ISO 8601 text,
decimals text, bytes Base64, floats that are not finite their names, structs objects, and maps lists of pairs.
"""

from __future__ import annotations

import math
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping
from datetime import UTC, date, datetime
from decimal import ROUND_HALF_UP, Context, Decimal
from typing import Any, Final, TypeAlias

import numpy as np
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    ByteType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    NullType,
    Row,
    ShortType,
    StringType,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from millpond.statestore.errors import InvalidError

_Convert: TypeAlias = Callable[[Any], Any]

_INT_BITS: Final[Mapping[type[DataType], int]] = {ByteType: 8, ShortType: 16, IntegerType: 32, LongType: 64}


class StructCodec:
    """Converts the values of a struct: tuples in the order of its fields, as Spark's state variables have them.

    Args:
        schema: the fields.
        what: what the values are, for errors: ``"the state 'count'"``.

    Example:
        >>> from millpond.executor.spark_compat.schema import parse_schema
        >>> codec = StructCodec(parse_schema("count int, day date"), "the state 'days'")
        >>> codec.to_json((3, date(2013, 1, 31)))
        {'count': 3, 'day': '2013-01-31'}
        >>> codec.from_json({"count": 3, "day": "2013-01-31"})
        (3, datetime.date(2013, 1, 31))
    """

    __slots__ = ("_get", "_what", "_write", "names", "schema")

    def __init__(self, schema: StructType, what: str) -> None:
        self.schema: StructType = schema
        self.names: list[str] = schema.names
        self._what = what
        self._write = [_writer(field.dataType, f"{what}, field {field.name!r}") for field in schema]
        self._get = [_reader(field.dataType) for field in schema]

    def __reduce__(self) -> tuple[Any, ...]:
        """Travel as the schema."""
        return (StructCodec, (self.schema, self._what))

    def to_json(self, value: Any) -> dict[str, Any]:
        """The JSON object of a value.

        Args:
            value: a tuple, list or Row of as many values as there are fields.

        Raises:
            InvalidError: it is none, or has another number of values, or one does not have its field's type.
        """
        if not isinstance(value, tuple | list):
            raise InvalidError(
                f"{self._what} takes a tuple with one value for each field",
                fields=self.schema.simpleString(),
                type=type(value).__name__,
            )
        if len(value) != len(self.names):
            raise InvalidError(
                f"{self._what} takes a tuple with one value for each field",
                fields=self.schema.simpleString(),
                values=len(value),
            )
        return {
            name: None if part is None else write(part)
            for name, write, part in zip(self.names, self._write, value, strict=True)
        }

    def row_to_json(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """The JSON object of a row's fields by name; a field that the row has not is null.

        Raises:
            InvalidError: a value does not have its field's type.
        """
        get = row.get
        return {
            name: None if (part := get(name)) is None else write(part)
            for name, write in zip(self.names, self._write, strict=True)
        }

    def part_to_json(self, value: Any) -> dict[str, Any]:
        """The JSON object of a value inside another: a dict or a Row by its names, a tuple by its places."""
        if isinstance(value, Row) and hasattr(value, "__fields__"):
            value = dict(zip(value.__fields__, value, strict=True))
        return self.row_to_json(value) if isinstance(value, dict) else self.to_json(value)

    def from_json(self, stored: Mapping[str, Any]) -> tuple[Any, ...]:
        """The tuple that a JSON object stands for; a field that it has not, since it is new, is ``None``."""
        get = stored.get
        return tuple(
            part if read is None or part is None else read(part)
            for part, read in zip(map(get, self.names), self._get, strict=True)
        )


def _writer(kind: DataType, what: str) -> _Convert:
    if isinstance(kind, StructType):
        codec = StructCodec(kind, what)
        return codec.part_to_json
    if isinstance(kind, ArrayType):
        write = _nullable(_writer(kind.elementType, what))
        return lambda value: list(map(write, _of(value, (list, tuple, np.ndarray), kind, what)))
    if isinstance(kind, MapType):
        write_key, write = _writer(kind.keyType, what), _nullable(_writer(kind.valueType, what))
        return lambda value: [
            [write_key(key), write(part)] for key, part in _of(value, dict, kind, what).items()
        ]
    if isinstance(kind, ByteType | ShortType | IntegerType | LongType):
        return _int_writer(kind, what)
    if isinstance(kind, DecimalType):
        return _decimal_writer(kind, what)
    write_atom = _ATOMS.get(type(kind))
    if write_atom is None:
        raise InvalidError(f"{what} has a type that state cannot have", type=kind.simpleString())
    return lambda value: write_atom(value, kind, what)


def _reader(kind: DataType) -> _Convert | None:
    """What makes a value of its JSON; ``None`` if they are the same."""
    if isinstance(kind, StructType):
        codec, factory = StructCodec(kind, ""), Row(*kind.names)
        return lambda stored: factory(*codec.from_json(stored))
    if isinstance(kind, ArrayType):
        read = _reader(kind.elementType)
        if read is None:
            return None
        read_part = _nullable(read)
        return lambda stored: list(map(read_part, stored))
    if isinstance(kind, MapType):
        read_key, read = _reader(kind.keyType) or _same, _nullable(_reader(kind.valueType) or _same)
        return lambda stored: {read_key(key): read(part) for key, part in stored}
    return _READERS.get(type(kind))


def _nullable(convert: _Convert) -> _Convert:
    return lambda value: None if value is None else convert(value)


def _same(value: Any) -> Any:
    return value


def _of(value: Any, kinds: type | tuple[type, ...], kind: DataType, what: str) -> Any:
    if isinstance(value, kinds):
        return value
    raise _misfit(value, kind, what)


def _misfit(value: Any, kind: DataType, what: str) -> InvalidError:
    return InvalidError(
        f"{what} does not take this value",
        value=repr(value)[:100],
        type=type(value).__name__,
        wanted=kind.simpleString(),
    )


def _int_writer(kind: DataType, what: str) -> _Convert:
    bound = 1 << (_INT_BITS[type(kind)] - 1)

    def write(value: Any) -> int:
        if type(value) is not int:
            value = int(_of(value, np.integer, kind, what))
        if not -bound <= value < bound:
            raise _misfit(value, kind, what)
        return int(value)

    return write


def _decimal_writer(kind: DecimalType, what: str) -> _Convert:
    unit, bound = Decimal(1).scaleb(-kind.scale), Decimal(10) ** (kind.precision - kind.scale)
    context = Context(prec=max(kind.precision, 1), rounding=ROUND_HALF_UP)

    def write(value: Any) -> str:
        number = Decimal(_of(value, (Decimal, int), kind, what))
        if not number.is_finite() or abs(number) >= bound:
            raise _misfit(value, kind, what)
        return str(number.quantize(unit, context=context))

    return write


def _write_float(value: Any, kind: DataType, what: str) -> float | str:
    if type(value) is not float:
        # A truth value is a whole number to Python, and none to Spark.
        if isinstance(value, bool):
            raise _misfit(value, kind, what)
        value = float(_of(value, (float, int, np.floating, np.integer), kind, what))
    number: float = value
    return number if math.isfinite(number) else repr(number)


def _write_timestamp(value: Any, kind: DataType, what: str) -> str:
    # One without a zone is local time, as Spark reads it.
    return str(_of(value, datetime, kind, what).astimezone(UTC).isoformat())


def _write_timestamp_ntz(value: Any, kind: DataType, what: str) -> str:
    return str(_of(value, datetime, kind, what).replace(tzinfo=None).isoformat())


def _write_date(value: Any, kind: DataType, what: str) -> str:
    if isinstance(value, datetime):
        raise _misfit(value, kind, what)
    return str(_of(value, date, kind, what).isoformat())


def _write_binary(value: Any, kind: DataType, what: str) -> str:
    return b64encode(_of(value, (bytes, bytearray), kind, what)).decode()


def _write_text(value: Any, kind: DataType, what: str) -> str:
    return value if type(value) is str else str(_of(value, str, kind, what))


def _write_boolean(value: Any, kind: DataType, what: str) -> bool:
    return value if type(value) is bool else bool(_of(value, np.bool_, kind, what))


def _write_null(value: Any, kind: DataType, what: str) -> None:
    raise _misfit(value, kind, what)


_ATOMS: Final[Mapping[type[DataType], Callable[[Any, Any, str], Any]]] = {
    BinaryType: _write_binary,
    BooleanType: _write_boolean,
    DateType: _write_date,
    DoubleType: _write_float,
    FloatType: _write_float,
    NullType: _write_null,
    StringType: _write_text,
    TimestampNTZType: _write_timestamp_ntz,
    TimestampType: _write_timestamp,
}
_READERS: Final[Mapping[type[DataType], _Convert]] = {
    BinaryType: b64decode,
    DateType: date.fromisoformat,
    DecimalType: Decimal,
    # JSON has whole numbers without a point.
    DoubleType: float,
    FloatType: float,
    TimestampNTZType: datetime.fromisoformat,
    TimestampType: lambda stored: datetime.fromisoformat(stored).astimezone().replace(tzinfo=None),
}
