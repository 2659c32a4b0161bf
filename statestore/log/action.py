"""Delta actions: the lines of a commit file, as values, and Delta schema strings from Arrow schemas.

The actions belong to the basic protocol (reader version 1, writer version 2) that every Delta reader supports.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import orjson
import pyarrow as pa

from millpond.statestore.errors import InvalidError
from millpond.statestore.rows.key_text import NAMED_KINDS

JsonValue: TypeAlias = "bool | int | float | str | Sequence[JsonValue] | Mapping[str, JsonValue] | None"


@dataclass(frozen=True, slots=True, kw_only=True)
class Add:
    """A data file becomes part of the table; ``data_change`` is False when rows only moved between files.

    ``path`` is relative to the table's root and URL-encoded only in the log. ``stats`` is Delta's statistics
    as JSON text.
    """

    path: str
    size_bytes: int
    partition_values: Mapping[str, str | None]
    modification_time_ms: int
    stats: str | None = None
    tags: Mapping[str, str] = field(default_factory=dict)
    data_change: bool = True
    # Some rows of the file are deleted, which only another engine does.
    has_deletion_vector: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Remove:
    """A data file leaves the table; vacuum may delete it later."""

    path: str
    deletion_time_ms: int
    data_change: bool = True
    partition_values: Mapping[str, str | None] | None = None
    size_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Txn:
    """The newest version that an application has reached."""

    app_id: str
    version: int
    updated_ms: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitInfo:
    """Provenance of a commit: the columns of ``DESCRIBE HISTORY``, and Millpond's fields (``None`` for other engines)."""

    operation: str
    timestamp_ms: int
    parameters: Mapping[str, str] = field(default_factory=dict)
    metrics: Mapping[str, str] = field(default_factory=dict)
    engine_info: str = "Millpond"
    is_blind_append: bool = False
    read_version: int | None = None
    millpond: Mapping[str, JsonValue] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Protocol:
    """The protocol versions and, where these list them, the features that readers and writers must support."""

    min_reader_version: int = 1
    min_writer_version: int = 2
    reader_features: tuple[str, ...] | None = None
    writer_features: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Metadata:
    """A table's identity, schema, partitioning and configuration."""

    table_id: str
    name: str | None
    schema_string: str
    partition_columns: tuple[str, ...] = ()
    configuration: Mapping[str, str] = field(default_factory=dict)
    created_ms: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Other:
    """An action that Millpond does not use but counts as a line."""

    name: str


Action: TypeAlias = Add | Remove | Txn | CommitInfo | Protocol | Metadata | Other


# The basic protocol has neither a null type nor times without a zone.
_SIMPLE: Final = {
    kind: name for kind, name in NAMED_KINDS.items() if name not in ("void", "timestamp_ntz")
} | {
    pa.large_string(): "string",
    pa.large_binary(): "binary",
}


def delta_schema(schema: pa.Schema) -> str:
    return orjson.dumps(_struct(list(schema))).decode()


def _struct(fields: list[pa.Field]) -> dict[str, Any]:
    spellings: dict[str, str] = {}
    for one in fields:
        name = one.name
        if name.lower() in spellings:
            other = spellings[name.lower()]
            raise InvalidError(
                "columns of a Delta table must differ in more than case", column=name, other=other
            )
        spellings[name.lower()] = name
    return {
        "type": "struct",
        "fields": [
            {
                "name": field.name,
                "type": _type(field.type, field.name),
                "nullable": field.nullable,
                "metadata": {},
            }
            for field in fields
        ],
    }


def _type(kind: pa.DataType, name: str) -> Any:
    if kind in _SIMPLE:
        return _SIMPLE[kind]
    if pa.types.is_timestamp(kind) and kind.tz is not None:
        return "timestamp"
    if pa.types.is_decimal128(kind) and 0 <= kind.scale <= kind.precision:
        return f"decimal({kind.precision},{kind.scale})"
    if pa.types.is_struct(kind):
        return _struct(list(kind))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return {"type": "array", "elementType": _type(kind.value_type, name), "containsNull": True}
    if pa.types.is_map(kind):
        return {
            "type": "map",
            "keyType": _type(kind.key_type, name),
            "valueType": _type(kind.item_type, name),
            "valueContainsNull": True,
        }
    raise InvalidError(
        f"the basic Delta protocol lacks the column's type{_way_out(kind)}", column=name, type=kind
    )


def _way_out(kind: pa.DataType) -> str:
    if pa.types.is_timestamp(kind):
        return ': take pa.timestamp("us", "UTC"), and produce times with a zone'
    if pa.types.is_time(kind) or pa.types.is_duration(kind):
        return ": take a number, or text, and produce it as that"
    return ""
