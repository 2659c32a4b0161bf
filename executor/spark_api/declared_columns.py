"""The columns that views show of states: one for each variable that a processor declares, or each field of a group's state."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

import pyarrow as pa
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import NullType, StructType

from millpond.executor.spark_api.variables import Variable
from millpond.statestore.keys.kind_names import kind_of_name, name_of_kind
from millpond.statestore.views.state_columns import StateColumn


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
