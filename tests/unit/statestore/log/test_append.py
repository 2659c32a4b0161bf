"""Appends to any Delta table, exactly once."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from millpond.statestore.errors import ConflictError, InvalidError, OutcomeUnknownError
from millpond.statestore.log.action import Add, Metadata
from millpond.statestore.log.commit_file import encode
from millpond.statestore.log.log import Log
from millpond.statestore.log.snapshot import load
from millpond.statestore.log.table import Append, create_table
from millpond.statestore.log.writer import Committed, LogWriter
from millpond.testing.faults.faulty_objects import Fault, FaultyObjects
from tests.fixtures.commit_requests import Bench

SCHEMA = pa.schema([pa.field("key", pa.string()), pa.field("day", pa.string())])


@pytest.fixture
def bench() -> Bench:
    bench = Bench()
    create_table(bench.log, bench.clock, bench.rng, schema=SCHEMA, name="spikes", partition_columns=("day",))
    return bench


def append(writer: LogWriter, added: tuple[Add, ...], **of: Any) -> Committed | None:
    return writer.write(Append(added=added, **of))


def _writer(bench: Bench, log: Log | None = None) -> LogWriter:
    return LogWriter(log or bench.log, load(bench.log), bench.clock, bench.rng, retry=bench.retry)


def _add(path: str) -> Add:
    return Add(path=path, size_bytes=1, partition_values={"day": "1"}, modification_time_ms=0)


class TestAppend:
    def test_append_is_applied_once(self, bench: Bench) -> None:
        """Another writer may repeat it."""
        writer = _writer(bench)
        first = append(writer, (_add("a"),), txns={"sink": 1}, metadata={"superstep": 1}, rows=3)

        assert first is not None
        assert append(writer, (_add("b"),), txns={"sink": 1}) is None
        assert append(_writer(bench), (_add("c"),), txns={"sink": 0}) is None
        assert [file.path for file in load(bench.log).files] == ["a"]

    def test_later_transaction_version_is_appended(self, bench: Bench) -> None:
        """Versions may have gaps."""
        writer = _writer(bench)
        append(writer, (_add("a"),), txns={"sink": 1})

        assert append(writer, (_add("b"),), txns={"sink": 7}) is not None
        assert load(bench.log).txns == {"sink": 7}

    def test_append_without_transaction_is_not_deduplicated(self, bench: Bench) -> None:
        writer = _writer(bench)
        append(writer, (_add("a"),))
        append(writer, (_add("b"),))

        assert load(bench.log).file_count == 2

    def test_concurrent_twin_wins_race(self, bench: Bench) -> None:
        objects = FaultyObjects(bench.memory)
        writer, twin = _writer(bench, Log(objects)), _writer(bench)

        def overtake(operation: str, _path: str) -> None:
            if operation == "put_if_absent":
                append(twin, (_add("b"),), txns={"sink": 1})

        objects.before = overtake
        assert append(writer, (_add("a"),), txns={"sink": 1}) is None
        assert [file.path for file in load(bench.log).files] == ["b"]

    def test_unknown_outcome_is_resolved_by_retry(self, bench: Bench) -> None:
        objects = FaultyObjects(bench.memory)
        writer = _writer(bench, Log(objects))
        objects.plan(Fault.LATE, "put_if_absent", times=3)
        with pytest.raises(OutcomeUnknownError):
            append(writer, (_add("a"),), txns={"sink": 1})
        objects.land()

        committed = append(writer, (_add("a"),), txns={"sink": 1})

        assert committed is not None
        assert (committed.version, load(bench.log).file_count) == (1, 1)

    def test_partly_applied_transactions_are_conflict(self, bench: Bench) -> None:
        writer = _writer(bench)
        append(writer, (_add("a"),), txns={"one": 1})

        with pytest.raises(ConflictError, match="one"):
            append(writer, (_add("b"),), txns={"one": 1, "two": 1})

    def test_partition_values_must_match_table(self, bench: Bench) -> None:
        add = Add(path="a", size_bytes=1, partition_values={}, modification_time_ms=0)

        with pytest.raises(InvalidError, match="partition"):
            append(_writer(bench), (add,))

    def test_changed_schema_is_conflict(self, bench: Bench) -> None:
        objects = FaultyObjects(bench.memory)
        writer = _writer(bench, Log(objects))
        changed = Metadata(table_id="x", name="spikes", schema_string="{}", partition_columns=("day",))

        def overtake(operation: str, path: str) -> None:
            if operation == "put_if_absent":
                bench.memory.put(path, encode((changed,)))

        objects.before = overtake
        with pytest.raises(ConflictError, match="metadata"):
            append(writer, (_add("a"),), txns={"sink": 1})
