"""Upkeep of the tables of sinks: checkpoints, compaction and cleanup."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from millpond.executor.sinks.columns import SinkRecord
from millpond.executor.sinks.delta_table import DeltaSinkWriter, take_back_sink, version_within
from millpond.executor.sinks.delta_upsert import UpsertSinkWriter
from millpond.executor.superstep.delivery import PRODUCTION_SCHEMA
from millpond.statestore.errors import DataError
from millpond.statestore.failpoint import FAILPOINTS, listening
from millpond.statestore.history.lineage import Lineage
from millpond.statestore.log.action import Add, Remove
from millpond.statestore.log.commit_file import decode
from millpond.statestore.log.log import Log
from millpond.statestore.objects.local import LocalObjects
from millpond.statestore.objects.memory import MemoryObjects
from millpond.statestore.rows.row import change_envelope
from millpond.statestore.types import Objects
from millpond.testing.fixtures.determinism import ManualClock, SeededRng

DAY_MS = 86_400_000
RECORD = SinkRecord(Lineage.of("store", {}), "p", "out")
UPSERTED = pa.schema([("key", pa.string()), ("n", pa.int64())])


class DiedError(Exception):
    """The process ends here."""


class Sink:
    """The table of a sink, a process that writes to it, and a clock."""

    def __init__(self, objects: Objects, *, upsert: bool = False) -> None:
        self.objects = objects
        self.clock = ManualClock()
        self.upsert = upsert
        self.opened = 0
        self.restart()

    def restart(self) -> None:
        self.opened += 1
        common = {"name": "out", "record": RECORD}
        rng = SeededRng(self.opened)
        if self.upsert:
            self.writer: Any = UpsertSinkWriter(
                self.objects, self.clock, rng, schema=UPSERTED, keys=["key"], leaf_rows_max=40, **common
            )
        else:
            self.writer = DeltaSinkWriter(self.objects, self.clock, rng, schema=None, **common)
        self.writer.keep_up()

    def deliver(self, superstep: int, *keys: str, value: str = '{"n": 1}') -> None:
        rows = [
            {"stream": "s", "key": key, "value": value, "value_bytes": None, "at": superstep}
            for key in keys or (f"k{superstep}",)
        ]
        table = pa.Table.from_pylist(rows, schema=PRODUCTION_SCHEMA).drop_columns(["stream"])
        self.writer.write(superstep, table)
        work = self.writer.upkeep.due()
        if work is not None:
            work()

    @property
    def live(self) -> set[str]:
        return {file.path for file in self.writer._writer.refresh().files}

    @property
    def log(self) -> Log:
        return Log(self.objects)

    @property
    def entries(self) -> int:
        """The number of log entries that a start reads."""
        inventory = self.log.inventory()
        return inventory.versions[-1] - inventory.checkpoints[-1].version


def keys_of(path: Path) -> list[str]:
    return sorted(DeltaTable(path).to_pyarrow_table().column("key").to_pylist())


def test_small_files_and_log_entries_stay_few(tmp_path: Path) -> None:
    sink = Sink(LocalObjects(tmp_path))
    files = entries = 0
    for superstep in range(1, 201):
        sink.deliver(superstep)
        files = max(files, len(sink.live))
        entries = max(entries, sink.entries if superstep > 12 else 0)

    assert (files <= 24, entries <= 12) == (True, True)
    assert keys_of(tmp_path) == sorted(f"k{superstep}" for superstep in range(1, 201))
    sink.restart()
    assert sink.writer.delivered == 200
    [transaction] = [DeltaTable(tmp_path).transaction_version(RECORD.app_id)]
    assert transaction == 200


def test_streaming_readers_see_no_change_in_a_compaction() -> None:
    sink = Sink(MemoryObjects())
    for superstep in range(1, 21):
        sink.deliver(superstep)
    commits = [decode(sink.log.require(version)) for version in sink.log.inventory().versions]
    moved = [
        action
        for actions in commits
        if any(isinstance(action, Remove) for action in actions)
        for action in actions
        if isinstance(action, (Add, Remove))
    ]

    assert len(moved) > 16
    assert not any(action.data_change for action in moved)


@pytest.mark.parametrize(
    "name",
    [
        *(
            name
            for name in FAILPOINTS
            if name.startswith(("compaction.file", "compaction.comm", "checkpoint"))
        ),
        "garbage.before_delete",
        "garbage.deleted",
    ],
)
def test_death_during_upkeep_repeats_and_loses_nothing(tmp_path: Path, name: str) -> None:
    sink = Sink(LocalObjects(tmp_path))
    DeltaTable(tmp_path).alter.set_table_properties(
        {"delta.deletedFileRetentionDuration": "interval 0 seconds", "delta.checkpointInterval": "2"}
    )
    died = 0

    def die(reached: str) -> None:
        if reached == name:
            raise DiedError

    for superstep in range(1, 45):
        sink.clock.advance_ms(60_000)
        try:
            with listening(die):
                sink.deliver(superstep)
        except DiedError:
            died += 1
            sink.restart()
            sink.deliver(superstep)

    assert died
    assert keys_of(tmp_path) == sorted(f"k{superstep}" for superstep in range(1, 45))


def test_compaction_gives_way_to_a_writer_that_took_its_files(tmp_path: Path) -> None:
    sink = Sink(LocalObjects(tmp_path))
    for superstep in range(1, 17):
        rows = {"stream": "s", "key": f"k{superstep}", "value": "1", "value_bytes": None, "at": superstep}
        table = pa.Table.from_pylist([rows], schema=PRODUCTION_SCHEMA).drop_columns(["stream"])
        sink.writer.write(superstep, table)
    work = sink.writer.upkeep.due()
    DeltaTable(tmp_path).delete("key = 'k3'")
    assert work is not None
    work()
    sink.deliver(17)

    assert keys_of(tmp_path) == sorted(f"k{superstep}" for superstep in range(1, 18) if superstep != 3)
    assert "OPTIMIZE" not in {commit["operation"] for commit in DeltaTable(tmp_path).history()}


def test_files_of_other_writers_stay(tmp_path: Path) -> None:
    sink = Sink(LocalObjects(tmp_path))
    theirs = pa.table({"key": ["x"], "at": pa.array([0], pa.timestamp("us", "UTC")), "value": ["1"]})
    for _ in range(20):
        write_deltalake(tmp_path, theirs, mode="append")
    others = sink.live
    for superstep in range(1, 21):
        sink.deliver(superstep)

    assert others <= sink.live
    assert len(sink.live - others) < 16


def test_damaged_file_ends_upkeep_but_no_delivery(tmp_path: Path) -> None:
    sink = Sink(LocalObjects(tmp_path))
    sink.deliver(1)
    [path] = sink.live
    (tmp_path / path).write_bytes(b"PAR1 nothing PAR1")
    sink.restart()
    for superstep in range(2, 40):
        sink.deliver(superstep)

    assert len(sink.live) == 39


@pytest.mark.parametrize(
    ("properties", "are_gone", "is_cut"),
    [
        ({}, False, False),
        ({"delta.deletedFileRetentionDuration": "interval 1 hour"}, True, False),
        ({"delta.logRetentionDuration": "interval 2 hours"}, False, True),
        (
            {"delta.logRetentionDuration": "interval 2 hours", "delta.enableExpiredLogCleanup": "false"},
            False,
            False,
        ),
    ],
)
def test_replaced_files_and_old_entries_go_as_the_properties_say(
    tmp_path: Path, properties: Mapping[str, str], *, are_gone: bool, is_cut: bool
) -> None:
    sink = Sink(LocalObjects(tmp_path))
    DeltaTable(tmp_path).alter.set_table_properties({"delta.checkpointInterval": "2", **properties})
    for superstep in range(1, 111):
        sink.clock.advance_ms(180_000)
        sink.deliver(superstep)

    there = len(list(tmp_path.glob("*.parquet")))
    assert (there < 80, sink.log.inventory().versions[0] > 0) == (are_gone, is_cut)
    sink.restart()
    assert len(keys_of(tmp_path)) == 110


def test_checkpoints_come_as_often_as_the_table_asks(tmp_path: Path) -> None:
    sink = Sink(LocalObjects(tmp_path))
    DeltaTable(tmp_path).alter.set_table_properties({"delta.checkpointInterval": "50"})
    for superstep in range(1, 110):
        sink.deliver(superstep)

    assert [checkpoint.version // 50 for checkpoint in sink.log.inventory().checkpoints] == [1, 2]


def test_small_leaves_of_an_upsert_become_one(tmp_path: Path) -> None:
    sink = Sink(LocalObjects(tmp_path), upsert=True)
    keys = [f"k{number:03d}" for number in range(720)]
    sink.deliver(1, *keys)
    before = len(sink.live)
    # One row of each leaf is left.
    kept, rest = keys[::40], [key for number, key in enumerate(keys) if number % 40]
    sink.deliver(2, *rest, value=json.dumps(change_envelope({"n": 1}, 1, is_retraction=True)))
    for superstep in range(3, 9):
        sink.deliver(superstep, "k000")

    assert before == 18
    assert keys_of(tmp_path) == kept
    assert len(sink.live) < 4
    sink.deliver(9, "k050")
    assert keys_of(tmp_path) == sorted([*kept, "k050"])


@pytest.mark.parametrize("restarts", [False, True])
def test_sink_is_reverted_across_compactions(tmp_path: Path, *, restarts: bool) -> None:
    sink = Sink(LocalObjects(tmp_path))
    for superstep in range(1, 60):
        sink.deliver(superstep)
        if restarts and superstep % 7 == 0:
            sink.restart()
    for reached in (50, 20, 3):
        done = take_back_sink(
            sink.objects, RECORD.lineage, {"p": reached}, sink.clock, SeededRng(f"back{reached}")
        )
        assert [part.superstep for part in done] == [reached]
        assert keys_of(tmp_path) == sorted(f"k{superstep}" for superstep in range(1, reached + 1))
    sink.restart()
    for superstep in range(4, 60):
        sink.deliver(superstep)
    assert keys_of(tmp_path) == sorted(f"k{superstep}" for superstep in range(1, 60))


def test_older_version_is_found_behind_many_checkpoints() -> None:
    sink = Sink(MemoryObjects())
    for superstep in range(1, 120):
        sink.deliver(superstep)
    for reached in (0, 1, 57, 119):
        version = version_within(sink.log, {RECORD.app_id: reached})
        assert version is not None
        [txns] = [
            action.version for action in decode(sink.log.require(version)) if hasattr(action, "app_id")
        ] or [reached]
        assert txns == reached
    with pytest.raises(DataError):
        version_within(sink.log, {RECORD.app_id: -1})
