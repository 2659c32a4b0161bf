"""Logs written by somebody else, with wrong types and impossible paths."""

from __future__ import annotations

from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from millpond.statestore.catalog.topology import logged_topologies
from millpond.statestore.errors import DataError
from millpond.statestore.history.lineage import Lineage
from millpond.statestore.history.replayed_log import replay_log
from millpond.statestore.history.verification import verify_store
from millpond.statestore.log.action import Add, CommitInfo, Txn
from millpond.statestore.log.checkpoint import checkpoint_path, write_part
from millpond.statestore.log.commit_file import decode, encode
from millpond.statestore.log.files import LiveFile
from millpond.statestore.log.log import Log, commit_path
from millpond.statestore.log.snapshot import catch_up, load
from millpond.statestore.objects.memory import MemoryObjects
from millpond.statestore.store import Store
from millpond.statestore.types import TableVersion

PATHS = [
    "../x", "a/../../x", "/etc/passwd", "//host/x", "a//b", "a/", "", ".", "..", "s3://bucket/x", "file:///x", "file:x",
    "file%3A/x", "%2e%2e/x", "%2Fetc/passwd", "a%00b", "a%0Ab", "a\x1b]0;b", "a%C2%85b",
]  # fmt: skip
ADD = {"path": "a/b", "size": 1, "partitionValues": {}, "modificationTime": 1, "dataChange": True}
GOOD: dict[str, dict[str, Any]] = {
    "add": {**ADD, "stats": "{}", "tags": {}},
    "remove": {"path": "a/b", "deletionTimestamp": 1, "dataChange": True, "partitionValues": {}, "size": 1},
    "txn": {"appId": "a", "version": 1, "lastUpdated": 1},
    "commitInfo": {
        "operation": "WRITE",
        "timestamp": 1,
        "operationParameters": {},
        "operationMetrics": {},
        "engineInfo": "x",
        "readVersion": 1,
    },
    "protocol": {"minReaderVersion": 1, "minWriterVersion": 2},
    "metaData": {
        "id": "x",
        "name": "x",
        "schemaString": "{}",
        "partitionColumns": ["a"],
        "configuration": {"a": "b"},
        "createdTime": 1,
    },
}
WRONG: tuple[object, ...] = (True, 1.5, "x", 7, 2**64 - 1, [], [1], {}, {"a": 1}, {"a": []})


def line(kind: str, fields: object) -> bytes:
    return orjson.dumps({kind: fields}) + b"\n"


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", ["add", "remove"])
def test_path_outside_table_is_damage(kind: str, path: str) -> None:
    with pytest.raises(DataError) as damage:
        decode(line(kind, {**GOOD[kind], "path": path}), commit_path(7))

    assert damage.value.details["path"] == commit_path(7)
    assert damage.value.details.get("field") == f"{kind}.path"


def test_path_outside_table_in_checkpoint_is_damage() -> None:
    struct = pa.struct({"path": pa.string(), "size": pa.int64()})
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"add": pa.array([{"path": "s3://bucket/x", "size": 1}], struct)}), sink)
    objects = MemoryObjects()
    objects.put(checkpoint_path(3), sink.getvalue().to_pybytes())

    with pytest.raises(DataError, match=r"add\.path"):
        load(Log(objects))


def wrong_fields() -> list[tuple[str, str, object]]:
    return [
        (kind, name, value)
        for kind, fields in GOOD.items()
        for name, good in fields.items()
        for value in WRONG
        if (type(value) is not type(good) or value in (2**64 - 1, [1], {"a": 1}, {"a": []}))
        and not (name in {"operationParameters", "operationMetrics"} and isinstance(value, dict))
    ]


@pytest.mark.parametrize(("kind", "name", "value"), wrong_fields())
def test_field_of_wrong_type_is_damage(kind: str, name: str, value: object) -> None:
    with pytest.raises(DataError) as damage:
        decode(line(kind, {**GOOD[kind], name: value}), commit_path(7))

    assert damage.value.details["path"] == commit_path(7)
    assert damage.value.details.get("field") == f"{kind}.{name}"


@pytest.mark.parametrize("kind", GOOD)
def test_optional_fields_may_be_missing(kind: str) -> None:
    assert len(decode(line(kind, GOOD[kind]))) == 1
    assert (
        len(decode(line(kind, {name: value for name, value in GOOD[kind].items() if name not in OPTIONAL})))
        == 1
    )


OPTIONAL = frozenset(
    (
        "partitionValues",
        "modificationTime",
        "dataChange",
        "stats",
        "tags",
        "deletionTimestamp",
        "lastUpdated",
        "name",
    )
) | frozenset(GOOD["commitInfo"])


@pytest.mark.parametrize(
    "data", [b"7\n", b"[]\n", b'"x"\n', b'{"add":[]}\n', b'{"add":7}\n', b'{"txn":{}}\n']
)
def test_malformed_line_is_damage(data: bytes) -> None:
    with pytest.raises(DataError):
        decode(data)


@pytest.mark.parametrize(
    "app_id",
    [
        "millpond/interval/c",
        "millpond/interval/c/a/b/c",
        "millpond/input/p/s",
        "millpond/fork/x",
        "millpond/cut/c/split",
    ],
)
def test_id_with_wrong_number_of_parts_is_damage(app_id: str) -> None:
    with pytest.raises(DataError, match=r"txn\.appId"):
        decode(encode([Txn(app_id=app_id, version=1)]))


def test_incarnation_of_unknown_origin_is_damage() -> None:
    with pytest.raises(DataError, match="origin"):
        Lineage.of("x", {"millpond/incarnation/a/stolen": 1})


@pytest.mark.parametrize(
    "stats", ['{"minValues":5}', '{"minValues":{"key":5,"superstep":"x"},"numRecords":[]}']
)
def test_statistics_of_wrong_type_prune_nothing(stats: str) -> None:
    tags = {"interval": "i", "superstep": "9" * 5_000, "productions": "x", "version": "²"}
    file = LiveFile.from_add(
        Add(path="a", size_bytes=1, partition_values={}, modification_time_ms=1, stats=stats, tags=tags),
        TableVersion(3),
    )

    assert (file.min_key, file.max_key, file.min_superstep, file.max_superstep) == (None, None, None, None)
    assert (file.num_records, file.productions, file.added_version) == (None, None, 3)


@pytest.mark.parametrize(
    ("field", "value"), [("name", []), ("computations", [{"name": "c", "code_hash": "1", "options": "x"}])]
)
def test_topology_of_wrong_type_is_damage(field: str, value: object) -> None:
    definition = {"name": "p", "computations": [], "streams": [], "subscriptions": [], field: value}
    objects = MemoryObjects()
    info = CommitInfo(operation="x", timestamp_ms=1, millpond={"definition": definition})
    objects.put(commit_path(0), encode([info]))

    with pytest.raises(DataError, match="malformed"):
        logged_topologies(Log(objects), TableVersion(0))


def test_verification_continues_after_wrong_field() -> None:
    objects = MemoryObjects()
    Store.in_memory(objects=objects).close()
    objects.put(commit_path(1), line("txn", {**GOOD["txn"], "version": "x"}))
    objects.put(commit_path(2), line("add", {**GOOD["add"], "path": "../x"}))
    objects.put(commit_path(3), line("protocol", {"minReaderVersion": 9, "minWriterVersion": 9}))

    found = verify_store(objects).findings
    assert [finding.path for finding in found][:2] == [commit_path(1), commit_path(2)]
    assert all("cannot be right" in finding.fault for finding in found[:2])


def test_verification_reports_newer_protocol() -> None:
    objects = MemoryObjects()
    Store.in_memory(objects=objects).close()
    objects.put(commit_path(1), line("protocol", {"minReaderVersion": 9, "minWriterVersion": 9}))

    assert "newer Delta reader" in verify_store(objects).findings[0].fault


@pytest.mark.parametrize("version", [10**12, 2**62, 2**63, 10**20 - 1])
def test_commit_of_huge_version_is_fast(version: int) -> None:
    """The gap below it is counted, not walked."""
    objects = MemoryObjects()
    Store.in_memory(objects=objects).close()
    log, snapshot = Log(objects), load(Log(objects))
    objects.put(commit_path(version), line("txn", GOOD["txn"]))
    objects.put(checkpoint_path(version), write_part([Txn(app_id="a", version=1)], checkpoint_path(version)))

    if version > 2**62:
        assert log.latest_version() == 0
        return
    found = verify_store(objects).findings
    assert any("commit files before it are missing" in finding.fault for finding in found)
    assert catch_up(log, snapshot).version == version
    assert logged_topologies(log, TableVersion(version)) == []


def test_checkpoint_of_log_without_metadata_is_refused() -> None:
    objects = MemoryObjects()
    objects.put(commit_path(0), line("txn", GOOD["txn"]))

    with pytest.raises(DataError, match="no metadata"):
        list(replay_log(Log(objects), TableVersion(0)).actions(on_disk=()))
