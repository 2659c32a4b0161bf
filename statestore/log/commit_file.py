"""Commit files: Delta actions as bytes, one JSON object per line.

A Millpond commit is sealed: under the key ``millpond`` its ``commitInfo`` carries the number of lines and a
SHA-256 over the whole file (computed with zeros in place of the seal), which detects truncation, zeroing and
flipped bits. Other readers ignore the key. Delta requires URL-encoded paths in the file; in the actions they
are plain.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final
from urllib.parse import quote, unquote

import orjson

from millpond.statestore.app_ids import is_app_id
from millpond.statestore.errors import DataError, InvalidError
from millpond.statestore.log.action import Action, Add, CommitInfo, Metadata, Other, Protocol, Remove, Txn
from millpond.statestore.objects.system_files import is_object_path

_SEAL: Final = "seal"
_ACTIONS: Final = "actions"
_SHOWN_MAX: Final = 80
_UNSEALED: Final = "0" * 64
_UNSEALED_FIELD: Final = f'"{_SEAL}":"{_UNSEALED}"'.encode()
_SEALED_FIELD: Final = re.compile(rf'"{_SEAL}":"([0-9a-f]{{64}})"'.encode())


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
    except DataError as error:
        raise DataError(error.message, **{"path": path, **error.details}) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError("the commit file cannot be parsed", path=path) from error
    if not actions:
        raise DataError("the commit file is empty", path=path)
    _verify_seal(data, actions, path)
    return actions


def seal_holds(data: bytes) -> bool:
    """Return True if the bytes match the seal in them; this costs far less than `decode`, which checks their form too."""
    field = _SEALED_FIELD.search(data)
    if field is None:
        return False
    unsealed = data[: field.start()] + _UNSEALED_FIELD + data[field.end() :]
    return digest_of(unsealed) == field[1].decode()


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
                    "readerFeatures": action.reader_features,
                    "writerFeatures": action.writer_features,
                }
                lines.append({"protocol": _present(protocol)})
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
    return _READERS[name](dict(fields))


def _from_json(line: dict[str, Any]) -> Action:
    for name, fields in line.items():
        reader = _READERS.get(name)
        if reader is not None and fields is not None:
            return reader(fields)
    return Other(name=next(iter(line), ""))


_NONE: Final = type(None)
# The fields that are read, with their types; ``None`` where a field may be missing.
_FIELDS: Final[Mapping[str, Mapping[str, tuple[type, ...]]]] = {
    "add": {
        "path": (str,),
        "size": (int,),
        "partitionValues": (dict, _NONE),
        "modificationTime": (int, _NONE),
        "stats": (str, _NONE),
        "tags": (dict, _NONE),
        "dataChange": (bool, _NONE),
        "deletionVector": (dict, _NONE),
    },
    "remove": {
        "path": (str,),
        "deletionTimestamp": (int, _NONE),
        "dataChange": (bool, _NONE),
        "partitionValues": (dict, _NONE),
        "size": (int, _NONE),
    },
    "txn": {"appId": (str,), "version": (int,), "lastUpdated": (int, _NONE)},
    "commitInfo": {
        "operation": (str, _NONE),
        "timestamp": (int, _NONE),
        "operationParameters": (dict, _NONE),
        "operationMetrics": (dict, _NONE),
        "engineInfo": (str, _NONE),
        "readVersion": (int, _NONE),
        "millpond": (dict, _NONE),
    },
    "protocol": {
        "minReaderVersion": (int,),
        "minWriterVersion": (int,),
        "readerFeatures": (list, _NONE),
        "writerFeatures": (list, _NONE),
    },
    "metaData": {
        "id": (str,),
        "name": (str, _NONE),
        "schemaString": (str,),
        "partitionColumns": (list, _NONE),
        "configuration": (dict, _NONE),
        "createdTime": (int, _NONE),
    },
}
# A rewind writes the least number for a watermark that it reverts.
_LONG_MIN: Final = -(1 << 63)
_LONG_MAX: Final = (1 << 63) - 1
_INT_OR_NONE: Final = (int, _NONE)
_TEXTS: Final[frozenset[type]] = frozenset({str})
_TEXTS_OR_NONE: Final[frozenset[type]] = frozenset({str, _NONE})


def _check_types(kind: str, fields: Mapping[str, Any]) -> None:
    for name, types in _FIELDS[kind].items():
        value = fields.get(name)
        # The exact type: to isinstance a bool is an int.
        if type(value) not in types or (type(value) is int and not _LONG_MIN <= value <= _LONG_MAX):
            raise _wrong(kind, name, value)


def _wrong(kind: str, name: str, value: object) -> DataError:
    shown = repr(value)[:_SHOWN_MAX]
    return DataError("the log has a field that cannot be right", field=f"{kind}.{name}", value=shown)


def _path_of(kind: str, fields: Mapping[str, Any]) -> str:
    path = unquote(fields["path"])
    if not is_object_path(path):
        raise _wrong(kind, "path", path)
    return path


def _texts_of(kind: str, name: str, fields: Mapping[str, Any], types: frozenset[type] = _TEXTS) -> Any:
    values = fields.get(name) or {}
    if not types.issuperset(map(type, values.values())):
        raise _wrong(kind, name, values)
    return values


def _read_add(fields: dict[str, Any]) -> Add:
    _check_types("add", fields)
    if fields["size"] < 0:
        raise _wrong("add", "size", fields["size"])
    return Add(
        path=_path_of("add", fields),
        size_bytes=fields["size"],
        partition_values=_texts_of("add", "partitionValues", fields, _TEXTS_OR_NONE),
        modification_time_ms=fields.get("modificationTime") or 0,
        stats=fields.get("stats"),
        tags=_texts_of("add", "tags", fields),
        data_change=fields.get("dataChange", True),
        # A checkpoint may have a vector without values for a file that has none.
        has_deletion_vector=any((fields.get("deletionVector") or {}).values()),
    )


def _read_remove(fields: dict[str, Any]) -> Remove:
    _check_types("remove", fields)
    values = _texts_of("remove", "partitionValues", fields, _TEXTS_OR_NONE)
    return Remove(
        path=_path_of("remove", fields),
        deletion_time_ms=fields.get("deletionTimestamp") or 0,
        data_change=fields.get("dataChange", True),
        partition_values=None if fields.get("partitionValues") is None else values,
        size_bytes=fields.get("size"),
    )


def _read_txn(fields: dict[str, Any]) -> Txn:
    app_id, version, updated_ms = fields["appId"], fields["version"], fields.get("lastUpdated")
    # Most actions are transactions: the other kinds are checked field by field.
    if (
        type(app_id) is not str
        or type(version) is not int
        or type(updated_ms) not in _INT_OR_NONE
        or not _LONG_MIN <= version <= _LONG_MAX
        or (updated_ms or 0) > _LONG_MAX
    ):
        _check_types("txn", fields)
    if not is_app_id(app_id):
        raise _wrong("txn", "appId", app_id)
    return Txn(app_id=app_id, version=version, updated_ms=updated_ms)


def _read_commit_info(fields: dict[str, Any]) -> CommitInfo:
    _check_types("commitInfo", fields)
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
    _check_types("protocol", fields)
    return Protocol(
        min_reader_version=fields["minReaderVersion"],
        min_writer_version=fields["minWriterVersion"],
        reader_features=_features_of("readerFeatures", fields),
        writer_features=_features_of("writerFeatures", fields),
    )


def _features_of(name: str, fields: Mapping[str, Any]) -> tuple[str, ...] | None:
    features = fields.get(name)
    if features is not None and not _TEXTS.issuperset(map(type, features)):
        raise _wrong("protocol", name, features)
    return None if features is None else tuple(features)


def _read_metadata(fields: dict[str, Any]) -> Metadata:
    _check_types("metaData", fields)
    columns = fields.get("partitionColumns") or ()
    if not _TEXTS.issuperset(map(type, columns)):
        raise _wrong("metaData", "partitionColumns", columns)
    return Metadata(
        table_id=fields["id"],
        name=fields.get("name"),
        schema_string=fields["schemaString"],
        partition_columns=tuple(columns),
        configuration=_texts_of("metaData", "configuration", fields),
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
    return quote(path, safe="/=-_.~")
