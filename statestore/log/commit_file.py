"""Commit files: Delta actions as bytes, one JSON object per line.

A Millpond commit is sealed: under the key ``millpond`` its ``commitInfo`` carries the number of lines and a
SHA-256 over the whole file (computed with zeros in place of the seal), which detects truncation, zeroing and
flipped bits. Other readers ignore the key. Delta requires URL-encoded paths in the file; in the actions they
are plain.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final
from urllib.parse import quote, unquote

import orjson

from millpond.statestore.errors import DataError, InvalidError
from millpond.statestore.log.action import Action, Add, CommitInfo, Metadata, Other, Protocol, Remove, Txn

_SEAL: Final = "seal"
_ACTIONS: Final = "actions"
_UNSEALED: Final = "0" * 64
_UNSEALED_FIELD: Final = f'"{_SEAL}":"{_UNSEALED}"'.encode()


def digest_of(data: bytes) -> str:
    """Return the SHA-256 of a commit file in hexadecimal: the link of the digest chain."""
    return hashlib.sha256(data).hexdigest()


def encode(actions: Iterable[Action]) -> bytes:
    r"""Return a commit file with ``commitInfo`` first, sealed if the commit is Millpond's.

    Example:
        >>> encode([Txn(app_id="a", version=1)])
        b'{"txn":{"appId":"a","version":1}}\n'
    """
    given = tuple(actions)
    infos = [action for action in given if isinstance(action, CommitInfo)]
    try:
        lines = [orjson.dumps(line) for line in _to_json(given, infos)]
    except TypeError as error:
        raise InvalidError("a value in the commit cannot be written as JSON", cause=error) from error
    data = b"\n".join([*lines, b""])
    if infos and infos[0].millpond is not None:
        seal = f'"{_SEAL}":"{digest_of(data)}"'.encode()
        return data.replace(_UNSEALED_FIELD, seal, 1)
    return data


def decode(data: bytes, path: str = "") -> tuple[Action, ...]:
    """Parse a commit file of any writer and verify the seal of a Millpond commit; ``path`` is for errors."""
    try:
        actions = tuple(_from_json(orjson.loads(line)) for line in data.splitlines() if line)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError("the commit file cannot be parsed", path=path) from error
    if not actions:
        raise DataError("the commit file is empty", path=path)
    _verify_seal(data, actions, path)
    return actions


def _verify_seal(data: bytes, actions: tuple[Action, ...], path: str) -> None:
    for action in actions:
        if not isinstance(action, CommitInfo) or action.millpond is None:
            continue
        if action.millpond.get(_ACTIONS) != len(actions):
            raise DataError(
                "the commit file is incomplete",
                path=path,
                actions=len(actions),
                expected=action.millpond.get(_ACTIONS),
            )
        seal = str(action.millpond.get(_SEAL))
        if digest_of(data.replace(seal.encode(), _UNSEALED.encode(), 1)) != seal:
            raise DataError("the commit file's bytes have changed since it was written", path=path)


def _to_json(actions: tuple[Action, ...], infos: list[CommitInfo]) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = [{"commitInfo": _commit_info_to_json(info, len(actions))} for info in infos]
    # A superstep's commit is mostly transactions, so their branch is the shortest.
    for action in actions:
        match action:
            case Txn():
                txn: dict[str, Any] = {"appId": action.app_id, "version": action.version}
                if action.updated_ms is not None:
                    txn["lastUpdated"] = action.updated_ms
                lines.append({"txn": txn})
            case Add():
                lines.append({"add": _add_to_json(action)})
            case Remove():
                lines.append({"remove": _remove_to_json(action)})
            case CommitInfo():
                pass
            case Protocol():
                protocol = {
                    "minReaderVersion": action.min_reader_version,
                    "minWriterVersion": action.min_writer_version,
                }
                lines.append({"protocol": protocol})
            case Metadata():
                lines.append({"metaData": _metadata_to_json(action)})
            case Other():
                raise DataError("an unknown action cannot be written", name=action.name)
    return lines


def _present(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _add_to_json(add: Add) -> dict[str, Any]:
    return _present(
        {
            "path": _quote_path(add.path),
            "partitionValues": dict(add.partition_values),
            "size": add.size_bytes,
            "modificationTime": add.modification_time_ms,
            "dataChange": add.data_change,
            "stats": add.stats,
            "tags": dict(add.tags) or None,
        }
    )


def _remove_to_json(remove: Remove) -> dict[str, Any]:
    values = remove.partition_values
    return _present(
        {
            "path": _quote_path(remove.path),
            "deletionTimestamp": remove.deletion_time_ms,
            "dataChange": remove.data_change,
            "extendedFileMetadata": values is not None and remove.size_bytes is not None,
            "partitionValues": None if values is None else dict(values),
            "size": remove.size_bytes,
        }
    )


def _commit_info_to_json(info: CommitInfo, count: int) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "timestamp": info.timestamp_ms,
        "operation": info.operation,
        "operationParameters": dict(info.parameters),
        "readVersion": info.read_version,
        "isBlindAppend": info.is_blind_append,
        "operationMetrics": dict(info.metrics) or None,
        "engineInfo": info.engine_info,
    }
    if info.millpond is not None:
        sealing = {_SEAL: _UNSEALED, _ACTIONS: count}
        # First and last: the fields of a commit that was read have an older seal, and the seal leads the object.
        fields["millpond"] = {**sealing, **info.millpond, **sealing}
    return _present(fields)


def _metadata_to_json(metadata: Metadata) -> dict[str, Any]:
    return _present(
        {
            "id": metadata.table_id,
            "name": metadata.name,
            "format": {"provider": "parquet", "options": {}},
            "schemaString": metadata.schema_string,
            "partitionColumns": list(metadata.partition_columns),
            "configuration": dict(metadata.configuration),
            "createdTime": metadata.created_ms,
        }
    )


def action_from_fields(name: str, fields: Mapping[str, Any]) -> Action:
    """Return an action from its name and fields, which checkpoints hold in columns."""
    return _READERS[name](dict(fields))


def _from_json(line: dict[str, Any]) -> Action:
    for name, fields in line.items():
        reader = _READERS.get(name)
        if reader is not None and fields is not None:
            return reader(fields)
    return Other(name=next(iter(line), ""))


def _read_add(fields: dict[str, Any]) -> Add:
    return Add(
        path=unquote(fields["path"]),
        size_bytes=fields["size"],
        partition_values=fields.get("partitionValues") or {},
        modification_time_ms=fields.get("modificationTime") or 0,
        stats=fields.get("stats"),
        tags=fields.get("tags") or {},
        data_change=fields.get("dataChange", True),
    )


def _read_remove(fields: dict[str, Any]) -> Remove:
    return Remove(
        path=unquote(fields["path"]),
        deletion_time_ms=fields.get("deletionTimestamp") or 0,
        data_change=fields.get("dataChange", True),
        partition_values=fields.get("partitionValues"),
        size_bytes=fields.get("size"),
    )


def _read_txn(fields: dict[str, Any]) -> Txn:
    return Txn(app_id=fields["appId"], version=fields["version"], updated_ms=fields.get("lastUpdated"))


def _read_commit_info(fields: dict[str, Any]) -> CommitInfo:
    return CommitInfo(
        operation=fields.get("operation") or "",
        timestamp_ms=fields.get("timestamp") or 0,
        parameters=fields.get("operationParameters") or {},
        metrics=fields.get("operationMetrics") or {},
        engine_info=fields.get("engineInfo") or "",
        is_blind_append=bool(fields.get("isBlindAppend")),
        read_version=fields.get("readVersion"),
        millpond=fields.get("millpond"),
    )


def _read_protocol(fields: dict[str, Any]) -> Protocol:
    return Protocol(
        min_reader_version=fields["minReaderVersion"], min_writer_version=fields["minWriterVersion"]
    )


def _read_metadata(fields: dict[str, Any]) -> Metadata:
    return Metadata(
        table_id=fields["id"],
        name=fields.get("name"),
        schema_string=fields["schemaString"],
        partition_columns=tuple(fields.get("partitionColumns") or ()),
        configuration=fields.get("configuration") or {},
        created_ms=fields.get("createdTime"),
    )


_READERS: Final[Mapping[str, Callable[[dict[str, Any]], Action]]] = {
    "add": _read_add,
    "remove": _read_remove,
    "txn": _read_txn,
    "commitInfo": _read_commit_info,
    "protocol": _read_protocol,
    "metaData": _read_metadata,
}


def _quote_path(path: str) -> str:
    # Readers decode the path as a URI, so every character with a meaning in URIs is escaped.
    return quote(path, safe="/=-_.~:" if "://" in path else "/=-_.~")
