"""Replacement of files in any Delta table, exactly once."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from millpond.statestore.errors import ConflictError, OutcomeUnknownError
from millpond.statestore.log.action import Add
from millpond.statestore.log.files import LiveFile
from millpond.statestore.log.log import Log
from millpond.statestore.log.snapshot import load
from millpond.statestore.log.table import Append, Replace, create_table
from millpond.statestore.log.writer import Committed, LogWriter
from millpond.testing.faults.faulty_objects import Fault, FaultyObjects
from tests.fixtures.commit_requests import Bench

SCHEMA = pa.schema([pa.field("key", pa.string())])


@pytest.fixture
def bench() -> Bench:
    bench = Bench()
    writer = create_table(bench.log, bench.clock, bench.rng, schema=SCHEMA, name="berths")
    append(writer, (_add("a"), _add("b")), txns={"sink": 1})
    return bench


def append(writer: LogWriter, added: tuple[Add, ...], **of: Any) -> Committed | None:
    return writer.write(Append(added=added, **of))


def replace_files(
    writer: LogWriter, removed: tuple[LiveFile, ...], added: tuple[Add, ...], **of: Any
) -> Committed | None:
    return writer.write(Replace(removed=removed, added=added, **of))


def _writer(bench: Bench, log: Log | None = None) -> LogWriter:
    return LogWriter(log or bench.log, load(bench.log), bench.clock, bench.rng, retry=bench.retry)


def _add(path: str) -> Add:
    return Add(path=path, size_bytes=1, partition_values={}, modification_time_ms=0)


def _paths(bench: Bench) -> list[str]:
    return [file.path for file in load(bench.log).files]


def test_files_are_replaced_in_one_commit(bench: Bench) -> None:
    writer = _writer(bench)
    before = writer.snapshot.version
    gone = writer.snapshot.files[:1]
    replace_files(writer, gone, (_add("c"),), read_at=before, txns={"sink": 2}, rows=1)

    after = load(bench.log)
    assert _paths(bench) == ["b", "c"]
    assert (after.version, after.txns) == (before + 1, {"sink": 2})


def test_replacement_is_applied_once(bench: Bench) -> None:
    writer = _writer(bench)
    read_at = writer.snapshot.version
    replace_files(writer, writer.snapshot.files, (_add("c"),), read_at=read_at, txns={"sink": 2})

    for each in (writer, _writer(bench)):
        assert replace_files(each, (), (_add("d"),), read_at=read_at, txns={"sink": 2}) is None
    assert _paths(bench) == ["c"]


def test_changed_table_is_not_overwritten(bench: Bench) -> None:
    """The new files would undo the other writer's change."""
    writer = _writer(bench)
    append(_writer(bench), (_add("other"),), txns={})

    with pytest.raises(ConflictError, match="has changed since it was read"):
        replace_files(
            writer,
            writer.snapshot.files,
            (_add("c"),),
            read_at=writer.snapshot.version,
            txns={"sink": 2},
        )
    assert _paths(bench) == ["a", "b", "other"]


def test_concurrent_change_is_noticed(bench: Bench) -> None:
    objects = FaultyObjects(bench.memory)
    writer = _writer(bench, Log(objects))
    objects.interrupt("put_if_absent", lambda: append(_writer(bench), (_add("other"),), txns={}))

    with pytest.raises(ConflictError, match="has changed since it was read"):
        replace_files(writer, (), (_add("c"),), read_at=writer.snapshot.version, txns={"sink": 2})
    assert _paths(bench) == ["a", "b", "other"]


def test_unknown_outcome_of_replacement_is_resolved_by_retry(bench: Bench) -> None:
    objects = FaultyObjects(bench.memory)
    writer = _writer(bench, Log(objects))
    read_at, files = writer.snapshot.version, writer.snapshot.files
    objects.plan(Fault.LATE, "put_if_absent", times=3)
    with pytest.raises(OutcomeUnknownError):
        replace_files(writer, files, (_add("c"),), read_at=read_at, txns={"sink": 2})
    objects.land()

    replace_files(writer, files, (_add("c"),), read_at=read_at, txns={"sink": 2})
    after = load(bench.log)
    assert (_paths(bench), after.version, after.txns) == (["c"], read_at + 1, {"sink": 2})
