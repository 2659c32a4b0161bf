"""Delta checkpoints: the state of a log at a version, for opening a table whose older commits were cleaned up.

It reads the classic format, in one or several parts, of any writer
(delta-rs, delta-spark), and writes it in one part. A checkpoint is not part of the digest
chain, so the log itself is preferred as long as it is whole. Our checkpoints are sealed like row files;
the pages of other writers' checkpoints are verified if they have checksums.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from millpond.statestore.errors import DataError
from millpond.statestore.log.commit_file import action_from_fields, encode
from millpond.statestore.rows.row_format import (
    file_name_of,
    has_parquet_seal,
    parquet_seal_holds,
    seal_parquet,
)
from millpond.statestore.types import TableVersion

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from millpond.statestore.log.action import Action

_CLASSIC: Final = re.compile(r"^_delta_log/(\d{20})\.checkpoint(?:\.(\d{10})\.(\d{10}))?\.parquet$")
_KINDS: Final = ("protocol", "metaData", "txn", "add", "remove")
_SEALED: Final = b"millpond.sealed"


_MAPPINGS: Final = frozenset({"partitionValues", "tags", "configuration", "options"})
_MAP: Final = pa.map_(pa.string(), pa.string())
_SCHEMA: Final = pa.schema(
    {
        "txn": pa.struct({"appId": pa.string(), "version": pa.int64(), "lastUpdated": pa.int64()}),
        "add": pa.struct(
            {
                "path": pa.string(),
                "partitionValues": _MAP,
                "size": pa.int64(),
                "modificationTime": pa.int64(),
                "dataChange": pa.bool_(),
                "stats": pa.string(),
                "tags": _MAP,
            }
        ),
        "remove": pa.struct(
            {
                "path": pa.string(),
                "deletionTimestamp": pa.int64(),
                "dataChange": pa.bool_(),
                "extendedFileMetadata": pa.bool_(),
                "partitionValues": _MAP,
                "size": pa.int64(),
            }
        ),
        "metaData": pa.struct(
            {
                "id": pa.string(),
                "name": pa.string(),
                "description": pa.string(),
                "format": pa.struct({"provider": pa.string(), "options": _MAP}),
                "schemaString": pa.string(),
                "partitionColumns": pa.list_(pa.string()),
                "configuration": _MAP,
                "createdTime": pa.int64(),
            }
        ),
        "protocol": pa.struct({"minReaderVersion": pa.int32(), "minWriterVersion": pa.int32()}),
    }
)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint: the version whose state it holds, and the paths of its parts."""

    version: TableVersion
    paths: tuple[str, ...]


def checkpoint_path(version: int) -> str:
    """The path of a checkpoint in one part, relative to the table's root.

    Example:
        >>> checkpoint_path(7)
        '_delta_log/00000000000000000007.checkpoint.parquet'
    """
    return f"_delta_log/{version:020d}.checkpoint.parquet"


def checkpoints_among(paths: Iterable[str]) -> tuple[Checkpoint, ...]:
    """The complete checkpoints among the files of a log, oldest first; incomplete ones are left out."""
    parts: defaultdict[tuple[int, int], list[str]] = defaultdict(list)
    for path in sorted(paths):
        match = _CLASSIC.search(path)
        if match:
            parts[int(match[1]), int(match[3] or 1)].append(path)
    return tuple(
        Checkpoint(TableVersion(version), tuple(part_paths))
        for (version, expected), part_paths in sorted(parts.items())
        if len(part_paths) >= expected
    )


def is_sealed(data: bytes) -> bool:
    """Whether Millpond wrote this part of a checkpoint: those of other engines have no seal."""
    return has_parquet_seal(memoryview(data))


def read_part(data: bytes, path: str) -> Iterator[Action]:
    """The actions of one part: protocol, metadata, transactions, live files and remembered removals.

    Raises:
        DataError: the part cannot be read, or is sealed and has changed since.
    """
    has_seal = is_sealed(data)
    if has_seal:
        # Before anything parses them: this is cheaper than to find out how damaged bytes fail.
        _check_seal(data, path)
    try:
        file = pq.ParquetFile(pa.BufferReader(data), page_checksum_verification=True)
        if not has_seal and _says_it_is_sealed(file):
            _check_seal(data, path)
        table = file.read()
        for kind in _KINDS:
            if kind in table.column_names:
                for fields in table.column(kind).drop_null().to_pylist():
                    yield action_from_fields(kind, _with_mappings(fields))
    except (pa.ArrowException, OSError, ValueError, KeyError, TypeError) as error:
        raise DataError("the checkpoint cannot be read", path=path) from error


def write_part(actions: Iterable[Action], path: str) -> bytes:
    """The bytes of a checkpoint in one part, sealed under its name and readable by any Delta reader."""
    rows = [_to_row(action) for action in actions]
    table = pa.Table.from_pylist(rows, schema=_SCHEMA.with_metadata({_SEALED: b"1"}))
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd", write_page_checksum=True)
    return seal_parquet(memoryview(sink.getvalue()), file_name_of(path))


def _to_row(action: Action) -> dict[str, Any]:
    (row,) = orjson.loads(encode([action])).items()
    kind, fields = row
    if kind == "add":
        fields["dataChange"] = False
    return {kind: _with_pairs(fields)}


def _with_pairs(value: Any) -> Any:
    return {
        name: list(inner.items())
        if name in _MAPPINGS and inner is not None
        else _with_pairs(inner)
        if isinstance(inner, dict)
        else inner
        for name, inner in value.items()
    }


def _says_it_is_sealed(file: pq.ParquetFile) -> bool:
    # A single flipped bit cannot destroy both marks of a seal.
    return _SEALED in (file.schema_arrow.metadata or {}) or _SEALED in (file.metadata.metadata or {})


def _check_seal(data: bytes, path: str) -> None:
    if not parquet_seal_holds(memoryview(data), file_name_of(path)):
        raise DataError("the checkpoint's bytes have changed since it was written", path=path)


def _with_mappings(fields: dict[str, Any]) -> dict[str, Any]:
    # Parquet maps arrive as lists of pairs.
    return {name: dict(value) if name in _MAPPINGS and value else value for name, value in fields.items()}
