"""Schemas as Spark's users write them: a ``StructType``, or text such as ``"count int, seen array<string>"``.

Spark parses the text in its JVM, which neither the local runner nor a Python worker has.

The columns that views show of states: one for each variable that a processor declares, or each field of a group's state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from itertools import chain
from typing import Final

import pyarrow as pa
import sqlglot
from pyspark.sql.pandas.types import to_arrow_schema
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
    ShortType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
)
from sqlglot import expressions as tree

from millpond.executor.spark_compat.variables import Variable
from millpond.statestore.errors import InvalidError
from millpond.statestore.rows.key_text import kind_of_name, name_of_kind
from millpond.statestore.view_columns import StateColumn

_Kind: Final = tree.DType
_ATOMS: Final[Mapping[tree.DType, Callable[[], DataType]]] = {
    _Kind.BIGINT: LongType,
    _Kind.BINARY: BinaryType,
    _Kind.BOOLEAN: BooleanType,
    _Kind.CHAR: StringType,
    _Kind.DATE: DateType,
    _Kind.DOUBLE: DoubleType,
    _Kind.FLOAT: FloatType,
    _Kind.INT: IntegerType,
    _Kind.SMALLINT: ShortType,
    _Kind.TEXT: StringType,
    _Kind.TIMESTAMP: TimestampType,
    _Kind.TIMESTAMPTZ: TimestampType,
    _Kind.TIMESTAMPLTZ: TimestampType,
    _Kind.TIMESTAMPNTZ: TimestampNTZType,
    _Kind.TINYINT: ByteType,
    _Kind.VARCHAR: StringType,
}
_DECIMAL_DEFAULT: Final = (10, 0)


def parse_schema(schema: StructType | str) -> StructType:
    """The struct that a schema describes; one type that is no struct becomes its only field, ``value``, as in Spark.

    Args:
        schema: a ``StructType``, or text in Spark's syntax: columns, ``struct<…>`` or one type.

    Raises:
        InvalidError: the text is no schema, or has a type that state cannot have.

    Example:
        >>> parse_schema("count int, seen array<string>").simpleString()
        'struct<count:int,seen:array<string>>'
        >>> parse_schema("decimal(10, 2)").simpleString()
        'struct<value:decimal(10,2)>'
    """
    if isinstance(schema, StructType):
        return schema
    if not isinstance(schema, str):
        raise InvalidError(
            "a schema is a StructType, or text such as 'count int'", type=type(schema).__name__
        )
    return _parsed(schema)


@lru_cache(maxsize=1_024)
def _parsed(schema: str) -> StructType:
    # Processors declare their variables again in each bundle, so a text is parsed once in a process.
    # With colons, as within a struct, is another way to write columns.
    fields = _columns(f"value {schema}") or (_columns(f"value struct<{schema}>") if ":" in schema else None)
    is_type = fields is not None and len(fields) == 1
    fields = fields or _columns(schema)
    if fields is None:
        raise _refusal(schema, "Spark's syntax is 'count int, seen array<string>'")
    columns = StructType([_field(one, schema) for one in fields])
    only = columns[0].dataType
    return only if is_type and isinstance(only, StructType) else columns


def _columns(text: str) -> list[tree.Expression] | None:
    """The columns of a text, each with a type; ``None`` if it is not a list of such columns."""
    try:
        parsed = sqlglot.parse_one(f"CREATE TABLE t ({text})", dialect="spark")
    except sqlglot.ParseError:
        return None
    columns = parsed.this.expressions if isinstance(parsed, tree.Create) else []
    has_types = all(isinstance(one, tree.ColumnDef) and one.args.get("kind") for one in columns)
    # The parser passes over what it does not know inside a struct.
    is_whole = _words(text) == sum(_words(one.sql("spark")) for one in columns)
    return columns if columns and has_types and is_whole else None


def _words(text: str) -> int:
    return sum(any(map(str.isalnum, token.text)) for token in sqlglot.tokenize(text, dialect="spark"))


def _data_type(node: tree.Expression | None, schema: str) -> DataType:
    if not isinstance(node, tree.DataType):
        raise _refusal(schema, "a column has no type that Spark knows")
    parts = node.expressions
    if node.this is _Kind.STRUCT and parts:
        return StructType([_field(part, schema) for part in parts])
    if node.this is _Kind.ARRAY and len(parts) == 1:
        return ArrayType(_data_type(parts[0], schema))
    if node.this is _Kind.MAP and len(parts) == 2:
        return MapType(_data_type(parts[0], schema), _data_type(parts[1], schema))
    if node.this is _Kind.DECIMAL:
        return DecimalType(*([int(part.name) for part in parts] or _DECIMAL_DEFAULT))
    if node.this not in _ATOMS:
        raise _refusal(schema, f"{node.sql('spark') or node.this.value} is no type that state can have")
    return _ATOMS[node.this]()


def _field(node: tree.Expression, schema: str) -> StructField:
    if not isinstance(node, tree.ColumnDef):
        raise _refusal(schema, f"{node.sql('spark')!r} is not a name and a type")
    is_required = any(
        isinstance(one.kind, tree.NotNullColumnConstraint) and not one.kind.args.get("allow_null")
        for one in node.find_all(tree.ColumnConstraint)
        if one.parent is node
    )
    return StructField(node.name, _data_type(node.args.get("kind"), schema), nullable=not is_required)


def _refusal(schema: str, reason: str) -> InvalidError:
    return InvalidError("this text is no schema", schema=schema, reason=reason)


def columns_of_variables(variables: Iterable[Variable]) -> tuple[StateColumn, ...]:
    """A column for each state variable, except those with a type that SQL cannot show, which are in ``state`` alone."""
    return tuple(chain.from_iterable(map(_of_variable, variables)))


def columns_of_fields(schema: StructType) -> tuple[StateColumn, ...]:
    """A column for each field of a state."""
    kind = _kind(schema)
    return () if kind is None else tuple(StateColumn(field.name, "field", field.type) for field in kind)


def _of_variable(variable: Variable) -> Iterable[StateColumn]:
    kind = _kind(variable.codec.schema)
    key_kind = None if variable.key_codec is None else _kind(variable.key_codec.schema)
    if kind is not None and (key_kind is None) == (variable.key_codec is None):
        yield StateColumn(variable.name, variable.form, kind, key_kind, variable.ttl_ms is not None)


def _kind(schema: StructType) -> pa.StructType | None:
    """A schema's type as the store records it; ``None`` for what not every SQL engine can show."""
    if not _is_shown(schema):
        return None
    return kind_of_name(name_of_kind(pa.struct(list(to_arrow_schema(schema, timezone="UTC")))))


def _is_shown(kind: object) -> bool:
    if isinstance(kind, StructType):
        # Names of columns have no case in SQL.
        names = {name.lower() for name in kind.names}
        return len(names) == len(kind.names) and all(_is_shown(field.dataType) for field in kind)
    parts = (getattr(kind, name, None) for name in ("elementType", "keyType", "valueType"))
    return not isinstance(kind, NullType) and all(part is None or _is_shown(part) for part in parts)
