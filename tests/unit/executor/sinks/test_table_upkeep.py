"""Upkeep of the tables of sinks: checkpoints, compaction and cleanup."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from hypothesis import example, given
from hypothesis import strategies as st

from millpond.executor.sinks.columns import SinkRecord
from millpond.executor.sinks.delta_table import DeltaSinkWriter, read_rows, take_back_sink, version_within
from millpond.executor.sinks.delta_upsert import UpsertSinkWriter
from millpond.executor.superstep.delivery import PRODUCTION_SCHEMA
from millpond.statestore.errors import ConflictError, DataError, OutcomeUnknownError
from millpond.statestore.failpoint import FAILPOINTS, listening
from millpond.statestore.history.lineage import Lineage
from millpond.statestore.log.action import Add, Remove
from millpond.statestore.log.commit_file import decode
from millpond.statestore.log.log import Log
from millpond.statestore.log.table import ChangeSchema
from millpond.statestore.log.writer import BOUNDARY_FOLDER
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


def test_checkpoints_of_short_runs_forget_deleted_files() -> None:
    """Otherwise checkpoints of a pipeline that runs for minutes a night would name each file that it has ever had."""
    sink, sizes = Sink(MemoryObjects(), upsert=True), []
    for superstep in range(1, 1_201):
        sink.clock.advance_ms(DAY_MS / 10)
        if superstep % 12 == 0:
            sink.restart()
        sink.deliver(superstep, "k")
        if superstep % 400 == 0:
            newest = sink.log.inventory().checkpoints[-1]
            sizes.append(sum(isinstance(action, Remove) for action in sink.log.read_checkpoint(newest)))

    # A week's files, and those of the 160 versions until the next cleanup.
    assert max(sizes) <= 7 * 10 + 160, sizes


def test_checkpoints_come_as_often_as_the_table_asks(tmp_path: Path) -> None:
    sink = Sink(LocalObjects(tmp_path))
    DeltaTable(tmp_path).alter.set_table_properties({"delta.checkpointInterval": "50"})
    for superstep in range(1, 110):
        sink.deliver(superstep)

    assert [checkpoint.version // 50 for checkpoint in sink.log.inventory().checkpoints] == [1, 2]


def test_close_of_a_long_run_leaves_few_entries_in_an_object_store() -> None:
    sink = Sink(FarObjects())
    for superstep in range(1, 26):
        sink.deliver(superstep)
    before = sink.entries
    sink.writer.upkeep.close()
    after = sink.entries
    sink.restart()
    for superstep in (26, 27):
        sink.deliver(superstep)
    sink.writer.upkeep.close()

    assert (before > 3, after, sink.entries) == (True, 0, 2)


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


class FarObjects(MemoryObjects):
    def get_many(self, paths: Sequence[str]) -> Sequence[bytes | None]:
        return [self.get(path) if path in self._objects else None for path in paths]


class Looks(MemoryObjects):
    """A store that counts the looks at the boundary of a cleanup."""

    looks = 0

    def list(self, prefix: str, start_after: str | None = None) -> Sequence[str]:
        self.looks += prefix == BOUNDARY_FOLDER
        return super().list(prefix, start_after)


class Table:
    """One table, and the sinks of several stores that write to it; entries of its log may go at once."""

    def __init__(self, stores: int = 2) -> None:
        self.objects = Looks()
        self.clock = ManualClock()
        self.stores = range(stores)
        self.opened = 0
        self.writers = [self._open(store) for store in self.stores]
        self.reached = [0] * stores
        self.asleep: set[int] = set()
        self.former: list[DeltaSinkWriter] = []
        before = self.writers[0]._writer.snapshot.metadata
        properties = {"delta.logRetentionDuration": "interval 0 seconds", "delta.checkpointInterval": "100"}
        self.metadata = replace(before, configuration=properties)
        self.writers[0]._writer.write(ChangeSchema(before=before, after=self.metadata))

    def _open(self, store: int) -> DeltaSinkWriter:
        self.opened += 1
        record = SinkRecord(Lineage.of(f"store{store}", {}), "p", "out")
        rng = SeededRng(self.opened)
        writer = DeltaSinkWriter(self.objects, self.clock, rng, name="out", record=record, schema=None)
        writer.keep_up()
        return writer

    def restart(self, store: int) -> None:
        """Let another process take the pipeline over; the former one may be asleep, and its store refuses it from now on."""
        self.former.append(self.writers[store])
        self.writers[store] = self._open(store)
        self.asleep.discard(store)
        # The successor delivers the last superstep of the store once more.
        self._write(self.writers[store], store, self.reached[store])

    def deliver(self, store: int, meanwhile: Callable[[], object] = lambda: None) -> None:
        """Deliver the next superstep, asleep between the last check and the put while something else happens."""
        if store in self.asleep:
            return
        writer, self.reached[store] = self.writers[store], self.reached[store] + 1
        superstep = self.reached[store]
        pending = [meanwhile]

        def sleep(name: str) -> None:
            if name == "commit.before_put" and pending:
                self.asleep.add(store)
                with listening(lambda _: None):
                    pending.pop()()

        with listening(sleep):
            while True:
                try:
                    self._write(writer, store, superstep)
                    break
                except ConflictError:
                    # The runner delivers again.
                    continue
                except OutcomeUnknownError:
                    # Only a former owner may be left without an answer.
                    assert self.writers[store] is not writer
                    break
        if self.writers[store] is writer:
            self.asleep.discard(store)

    def _write(self, writer: DeltaSinkWriter, store: int, superstep: int) -> None:
        key = f"{store}.{superstep}"
        rows = [{"stream": "s", "key": key, "value": "1", "value_bytes": None, "at": superstep}]
        if superstep:
            writer.write(
                superstep, pa.Table.from_pylist(rows, schema=PRODUCTION_SCHEMA).drop_columns(["stream"])
            )

    def clean_up(self, writer: DeltaSinkWriter) -> None:
        """Write a checkpoint, and delete all of the log before it; no process sees time pass, as on a suspended machine."""
        self.clock.jump_ms(60_000)
        writer.upkeep._write_checkpoint()
        writer.upkeep._clean_up(self.metadata)

    def compact(self, writer: DeltaSinkWriter) -> None:
        files = sorted(writer._writer.refresh().files, key=lambda file: file.path)
        if len(files) > 1:
            # As the upkeep itself does: whether the commit of a writer that slept has landed may be unknown.
            writer.upkeep._try(lambda: writer.upkeep._compact(files[:2]))

    def check(self) -> None:
        """Each delivery that was reported is in the table once."""
        version = Log(self.objects).latest_version()
        keys = [row["key"] for row in read_rows(self.objects, version).to_pylist()]
        wanted = [f"{store}.{step}" for store in self.stores for step in range(1, self.reached[store] + 1)]
        assert sorted(keys) == sorted(wanted)


def test_delivery_after_an_own_one_needs_no_look_at_the_boundary() -> None:
    table = Table()
    looks = []
    for store in (0, 0, 0, 1, 0, 0, 1, 1):
        before = table.objects.looks
        table.deliver(store)
        looks.append(table.objects.looks - before)

    # The first of a process, and those after another writer's commit.
    assert looks == [1, 0, 0, 1, 1, 0, 1, 0]
    table.compact(table.writers[0])
    before = table.objects.looks
    table.deliver(0)
    assert table.objects.looks == before + 1


@pytest.mark.parametrize("has_compacted", [False, True])
def test_sink_that_slept_through_cleanups_of_another_delivers_once(*, has_compacted: bool) -> None:
    table = Table()

    def others() -> None:
        for _ in range(3):
            for _ in range(5):
                table.deliver(1)
            table.clean_up(table.writers[1])

    for store in (1, 0, 0):
        table.deliver(store)
    if has_compacted:
        table.compact(table.writers[0])
    table.deliver(0, others)

    table.check()
    # The sleeper's last commit and the one after it were kept. It put version 6, which did not count, before it knew.
    versions = Log(table.objects).inventory().versions
    assert versions[:3] == (4, 5, 6)
    assert versions[3] > 16


def test_cleanup_of_a_former_owner_spares_what_its_successor_takes() -> None:
    table = Table()
    for _ in range(3):
        table.deliver(0)
    table.restart(0)
    table.deliver(0)
    table.deliver(0)

    def others() -> None:
        for _ in range(5):
            table.deliver(1)
        table.clean_up(table.former[0])

    table.deliver(0, others)
    table.check()


# Two sleepers, of which one leaves a commit where the other looks for the next one; one that its successor replaces; and
# a compaction by one that has not seen a cleanup.
@example([("d", 0, 1), ("s", 1, 1), ("s", 2, 1), ("c", 0, 1)])
@example([("s", 0, 3), ("r", 0, 1), ("d", 0, 1), ("c", 0, 1)])
@example([("d", 0, 1), ("d", 1, 1), ("d", 1, 1), ("d", 1, 1), ("c", 0, 1), ("k", 0, 1)])
@given(
    st.lists(st.tuples(st.sampled_from("ddddsssccfkr"), st.integers(0, 2), st.integers(1, 8)), max_size=60)
)
def test_sinks_that_sleep_at_any_time_deliver_once(actions: Sequence[tuple[str, int, int]]) -> None:
    table, left = Table(3), deque(actions)

    def act() -> None:
        kind, store, number = left.popleft()
        match kind:
            case "d":
                table.deliver(store)
            case "s":
                table.deliver(store, lambda: [act() for _ in range(number) if left])
            case "c":
                table.clean_up(table.writers[store])
            case "f" if table.former:
                table.clean_up(table.former[number % len(table.former)])
            case "k" if store not in table.asleep:
                table.compact(table.writers[store])
            case "r":
                table.restart(store)

    while left:
        act()
    table.check()
