"""Names of types, as a store records them: of the columns of keys, and of what is inside states."""

from __future__ import annotations

from typing import Any, Final

import pyarrow as pa

NAMED_KINDS: Final[dict[pa.DataType, str]] = {
    pa.null(): "void",
    pa.string(): "string",
    pa.bool_(): "boolean",
    pa.int8(): "byte",
    pa.int16(): "short",
    pa.int32(): "integer",
    pa.int64(): "long",
    pa.float32(): "float",
    pa.float64(): "double",
    pa.date32(): "date",
    pa.timestamp("us", "UTC"): "timestamp",
    pa.timestamp("us"): "timestamp_ntz",
    pa.binary(): "binary",
}
"""The types that are one word; decimals, structs, arrays and maps are made of several."""

_KINDS: Final = {name: kind for kind, name in NAMED_KINDS.items()}


def name_of_kind(kind: pa.DataType) -> Any:
    """A type's name: text, or for one with parts a JSON object.

    Raises:
        KeyError: the type has no name.

    Example:
        >>> name_of_kind(pa.list_(pa.struct([("cents", pa.decimal128(10, 2))])))
        {'array': {'struct': [['cents', 'decimal(10,2)']]}}
    """
    if pa.types.is_struct(kind):
        return {"struct": [[field.name, name_of_kind(field.type)] for field in kind]}
    if pa.types.is_list(kind):
        return {"array": name_of_kind(kind.value_type)}
    if pa.types.is_map(kind):
        return {"map": [name_of_kind(kind.key_type), name_of_kind(kind.item_type)]}
    if pa.types.is_decimal(kind):
        return f"decimal({kind.precision},{kind.scale})"
    return NAMED_KINDS[kind]


def kind_of_name(name: Any) -> pa.DataType:
    """The type of a name; all its parts may be null.

    Raises:
        KeyError: no type of this version has the name; or ``ValueError``, or ``TypeError``.
    """
    if isinstance(name, dict):
        ((form, parts),) = name.items()
        if form == "struct":
            return pa.struct([(field, kind_of_name(kind)) for field, kind in parts])
        if form == "array":
            return pa.list_(kind_of_name(parts))
        if form == "map":
            return pa.map_(*map(kind_of_name, parts))
        raise KeyError(form)
    if name.startswith("decimal("):
        return pa.decimal128(*map(int, name.removeprefix("decimal(").rstrip(")").split(",")))
    return _KINDS[name]
