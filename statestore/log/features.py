"""Table features: the demands of a Delta table on its readers and writers that Millpond does not meet.

This module alone decides, for stores and for sinks' tables, from a table's protocol and metadata. A feature that the protocol
merely allows demands nothing of a writer until a property or a column uses it. Reader features, and features unknown to
Millpond, may demand something at once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from operator import attrgetter
from typing import Any, Final

import orjson

from millpond.statestore.errors import DataError
from millpond.statestore.log.action import Metadata, Protocol

_READER_VERSION_MAX: Final = 1
# From these versions on the protocol lists its features by name.
_READER_LISTED, _WRITER_LISTED = 3, 7
_NEWER: Final = "newer Delta {} than Millpond, version {}"
# Writer features without demands until the metadata uses them.
_IDLE: Final = frozenset(
    {
        "appendOnly",
        "invariants",
        "checkConstraints",
        "changeDataFeed",
        "generatedColumns",
        "identityColumns",
        "allowColumnDefaults",
    }
)
_CONSTRAINT: Final = "delta.constraints."
_REWRITES: Final = {"delta.appendOnly": "appendOnly", "delta.enableChangeDataFeed": "changeDataFeed"}
_COLUMN_RULES: Final = {
    "delta.invariants": "invariants",
    "delta.generationExpression": "generatedColumns",
    "delta.identity.start": "identityColumns",
}
_DEFAULT: Final = "CURRENT_DEFAULT"
_LENGTH: Final = "__CHAR_VARCHAR_TYPE_STRING"


class Use(IntEnum):
    """What is done with a table; each use has the duties of the ones before it."""

    READ = 0
    APPEND = 1
    REWRITE = 2

    @property
    def verb(self) -> str:
        return ("read", "write to", "rewrite rows of")[self]


@dataclass(frozen=True, slots=True)
class Duty:
    """A duty that Millpond does not meet.

    Attributes:
        use: the use that it forbids.
        feature: its name in Delta's protocol, or a description.
        by: the property, constraint or column that asks for it; "" for the protocol.
        mend: how to free the table of it; "" if that takes another table.
    """

    use: Use
    feature: str
    by: str = ""
    mend: str = ""


def unmet_duties(
    protocol: Protocol, metadata: Metadata | None, columns: Collection[str] | None = None
) -> tuple[Duty, ...]:
    """Return the duties that Millpond does not meet, readers' first; ``columns`` are the written columns."""
    duties = [*_of_protocol(protocol)]
    if metadata is not None:
        duties += _of_properties(metadata.configuration)
        try:
            duties += _of_columns(orjson.loads(metadata.schema_string or "{}"), columns)
        except (ValueError, TypeError, AttributeError) as error:
            raise DataError("the table's schema cannot be read", table=metadata.table_id) from error
    return tuple(sorted(duties, key=attrgetter("use")))


def _of_protocol(protocol: Protocol) -> Iterator[Duty]:
    reader, writer = protocol.min_reader_version, protocol.min_writer_version
    if reader == _READER_LISTED and protocol.reader_features is not None:
        yield from (_listed(Use.READ, name) for name in protocol.reader_features)
    elif reader == _READER_LISTED - 1:
        yield _listed(Use.READ, "columnMapping")
    elif reader > _READER_VERSION_MAX:
        yield Duty(Use.READ, _NEWER.format("reader", reader))
    if writer == _WRITER_LISTED and protocol.writer_features is not None:
        known = {*_IDLE, *(protocol.reader_features or ())}
        yield from (_listed(Use.APPEND, name) for name in protocol.writer_features if name not in known)
    elif writer >= _WRITER_LISTED:
        yield Duty(Use.APPEND, _NEWER.format("writer", writer))


def _listed(use: Use, feature: str) -> Duty:
    return Duty(use, feature, mend=f"drop it (ALTER TABLE … DROP FEATURE {feature})")


def _of_properties(configuration: Mapping[str, str]) -> Iterator[Duty]:
    for name in configuration:
        if name.startswith(_CONSTRAINT):
            constraint = name.removeprefix(_CONSTRAINT)
            mend = f"drop it (ALTER TABLE … DROP CONSTRAINT {constraint})"
            yield Duty(Use.APPEND, "checkConstraints", name, mend)
    if configuration.get("delta.columnMapping.mode", "none").lower() != "none":
        yield Duty(Use.READ, "columnMapping", "delta.columnMapping.mode")
    for name, feature in _REWRITES.items():
        if configuration.get(name, "false").lower() == "true":
            yield Duty(Use.REWRITE, feature, name, f"unset {name}")


def _of_columns(kind: Any, columns: Collection[str] | None) -> Iterator[Duty]:
    """Yield the duties of columns and of the fields within them."""
    if not isinstance(kind, Mapping):
        return
    for field in kind.get("fields", ()):
        name, rules = str(field.get("name", "")), field.get("metadata") or {}
        yield from (
            Duty(Use.APPEND, feature, name) for rule, feature in _COLUMN_RULES.items() if rule in rules
        )
        if columns is not None and _DEFAULT in rules and name not in columns:
            mend = f"fill the column, or drop its default (ALTER TABLE … ALTER COLUMN {name} DROP DEFAULT)"
            yield Duty(Use.APPEND, "allowColumnDefaults", name, mend)
        if columns is not None and _LENGTH in rules and name in columns:
            yield Duty(Use.APPEND, str(rules[_LENGTH]), name)
        yield from _of_columns(field.get("type"), None)
    for part in ("elementType", "keyType", "valueType"):
        yield from _of_columns(kind.get(part), None)
