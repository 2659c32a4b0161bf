"""Delta checkpoints: the state of a log at one version, for opening a table whose older commits were cleaned up.

They are in the classic format. Millpond's checkpoints are sealed like row files, and hold the digest of their version's
commit file, so that the digest chain goes on behind them. Pages of other engines' checkpoints are verified where they have
checksums.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from millpond.statestore.errors import DataError
from millpond.statestore.log.action import Action
from millpond.statestore.log.commit_file import action_from_fields, encode
from millpond.statestore.rows.row_format import (
    file_name_of,
    has_parquet_seal,
    parquet_seal_holds,
    read_groups,
    seal_parquet,
)
from millpond.statestore.types import TableVersion

_CLASSIC: Final = re.compile(r"^_delta_log/(\d{20})\.checkpoint(?:\.(\d{10})\.(\d{10}))?\.parquet$")
# A file name can hold any number. This one leaves room for later versions within Delta's 64 bits.
VERSION_MAX: Final = 1 << 62
_KINDS: Final = ("protocol", "metaData", "txn", "add", "remove")
_SEALED: Final = b"millpond.sealed"
_COMMIT: Final = b"millpond.commit"
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
# Of a protocol that lists its features, which a store's does not.
_LISTING_PROTOCOL: Final = pa.struct(
    [
        *_SCHEMA.field("protocol").type,
        *(pa.field(name, pa.list_(pa.string())) for name in ("readerFeatures", "writerFeatures")),
    ]
)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint: its version, and the paths of its parts."""

    version: TableVersion
    paths: tuple[str, ...]


def checkpoint_path(version: int) -> str:
    return f"_delta_log/{version:020d}.checkpoint.parquet"


def checkpoints_among(paths: Iterable[str]) -> tuple[Checkpoint, ...]:
    """Return the complete checkpoints among the files of a log, oldest first."""
    parts: defaultdict[tuple[int, int], list[str]] = defaultdict(list)
    for path in sorted(paths):
        match = _CLASSIC.search(path)
        if match and int(match[1]) <= VERSION_MAX:
            parts[int(match[1]), int(match[3] or 1)].append(path)
    return tuple(
        Checkpoint(TableVersion(version), tuple(part_paths))
        for (version, expected), part_paths in sorted(parts.items())
        if len(part_paths) >= expected
    )


def read_part(data: bytes, path: str, commit: str = "") -> Iterator[Action]:
    """Read protocol, metadata, transactions, live files and remembered removals from one part; verify its seal.

    ``commit`` is the digest of the version's commit file, if that is there: a checkpoint of another log is refused.
    """
    has_seal = has_parquet_seal(memoryview(data))
    if has_seal:
        # Before anything parses the bytes: a parser fails on damage in too many ways to catch.
        _check_seal(data, path)
    try:
        file = pq.ParquetFile(pa.BufferReader(data), page_checksum_verification=True)
        # The schema repeats the mark, because one flipped bit could otherwise pass for a file without a seal.
        if not has_seal and _has_seal_mark(file):
            _check_seal(data, path)
        _check_commit(file, commit)
        table = read_groups(file, range(file.num_row_groups), None, len(data))
        for kind in _KINDS:
            if kind in table.column_names:
                for fields in table.column(kind).drop_null().to_pylist():
                    yield action_from_fields(kind, _with_mappings(fields))
    except DataError as error:
        raise DataError(error.message, **{"path": path, **error.details}) from error
    except (pa.ArrowException, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError("the checkpoint cannot be read", path=path) from error


def write_part(actions: Iterable[Action], path: str, commit: str = "") -> bytes:
    """Return a checkpoint in one part, sealed under its file name and readable by any Delta reader.

    ``commit`` is the digest of the version's commit file.
    """
    rows = [_to_row(action) for action in actions]
    schema = _SCHEMA
    if any("writerFeatures" in row.get("protocol", ()) for row in rows):
        schema = schema.set(schema.names.index("protocol"), pa.field("protocol", _LISTING_PROTOCOL))
    try:
        table = pa.Table.from_pylist(rows, schema=schema.with_metadata({_SEALED: b"1", _COMMIT: commit}))
    except (pa.ArrowException, OverflowError, TypeError) as error:
        raise DataError("the log has values that no checkpoint can hold", path=path, cause=error) from error
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd", write_page_checksum=True)
    return seal_parquet(memoryview(sink.getvalue()), file_name_of(path))


def _to_row(action: Action) -> dict[str, Any]:
    ((kind, fields),) = orjson.loads(encode([action])).items()
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


def _check_commit(file: pq.ParquetFile, commit: str) -> None:
    made_of = (file.schema_arrow.metadata or {}).get(_COMMIT, b"").decode(errors="replace")
    if commit and made_of not in ("", commit):
        raise DataError("the checkpoint is of another log's commit", expected=made_of, found=commit)


def _has_seal_mark(file: pq.ParquetFile) -> bool:
    return _SEALED in (file.schema_arrow.metadata or {}) or _SEALED in (file.metadata.metadata or {})


def _check_seal(data: bytes, path: str) -> None:
    if not parquet_seal_holds(memoryview(data), file_name_of(path)):
        raise DataError("the checkpoint's bytes have changed since it was written", path=path)


def _with_mappings(fields: dict[str, Any]) -> dict[str, Any]:
    # Parquet maps arrive as lists of pairs.
    return {
        name: dict(value) if name in _MAPPINGS and value is not None else value
        for name, value in fields.items()
    }
