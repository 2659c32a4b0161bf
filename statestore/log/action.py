"""
Delta actions: the lines of a commit file, as values.

They are the plain protocol (reader version 1, writer version 2) that every Delta
reader knows; `millpond.statestore.log.commit_file` turns them into bytes and back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

__all__ = [
    "Action",
    "Add",
    "CommitInfo",
    "JsonValue",
    "Metadata",
    "Other",
    "Protocol",
    "Remove",
    "Txn",
]

JsonValue: TypeAlias = "bool | int | float | str | Sequence[JsonValue] | Mapping[str, JsonValue] | None"
"""What JSON can say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Add:
    """
    A data file becomes part of the table.

    Args:
        path: as it lies in the store, relative to the table's root; URL-encoded only in the log.
        size_bytes: its length.
        partition_values: by partition column; ``None`` is null.
        modification_time_ms: when it was made, milliseconds since 1970.
        stats: Delta's statistics as JSON text.
        tags: free words about the file; checkpoints keep them.
        data_change: false when rows were only moved between files.
    """

    path: str
    size_bytes: int
    partition_values: Mapping[str, str | None]
    modification_time_ms: int
    stats: str | None = None
    tags: Mapping[str, str] = field(default_factory=dict)
    data_change: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Remove:
    """
    A data file ceases to be part of the table; vacuum may delete it later.
    """

    path: str
    deletion_time_ms: int
    data_change: bool = True
    partition_values: Mapping[str, str | None] | None = None
    size_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Txn:
    """
    The newest version that an application has reached.
    """

    app_id: str
    version: int
    updated_ms: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitInfo:
    """
    Who committed and why: what ``DESCRIBE HISTORY`` shows, and Millpond's own part.

    Args:
        operation: one word for the history.
        timestamp_ms: the writer's wall time.
        parameters: what the operation was about.
        metrics: what it did.
        engine_info: name and version of the writing engine.
        is_blind_append: true when nothing was read or removed.
        read_version: the table version that the commit is built on.
        millpond: Millpond's own fields; ``None`` in the commits of others.
    """

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
    """
    What a reader and a writer must be able to do.
    """

    min_reader_version: int = 1
    min_writer_version: int = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Metadata:
    """
    What the table is: its identity, schema, partitioning and configuration.
    """

    table_id: str
    name: str | None
    schema_string: str
    partition_columns: tuple[str, ...] = ()
    configuration: Mapping[str, str] = field(default_factory=dict)
    created_ms: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Other:
    """
    An action that Millpond has no use for; it counts as a line.
    """

    name: str


Action: TypeAlias = Add | Remove | Txn | CommitInfo | Protocol | Metadata | Other
"""One line of a commit file."""
