"""A thousand damages to every kind of a store's files: readers are right, or name the file."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from kazoo.client import KazooClient

from millpond.executor.local.runner import LocalRunner
from millpond.executor.maintenance.policy import UpkeepPolicy
from millpond.gc import compaction
from millpond.gc.collectors import Retention, collect_garbage, write_checkpoint
from millpond.gc.compaction import CompactionPolicy
from millpond.statestore.errors import DataError
from millpond.statestore.history.savepoint import collected_horizon
from millpond.statestore.leases.memory import MemoryLeases, MemoryRegistry
from millpond.statestore.log.log import Log, commit_path
from millpond.statestore.log.snapshot import load
from millpond.statestore.objects.obstore import open_objects
from millpond.statestore.rows import files as row_files
from millpond.statestore.rows import row_format
from millpond.statestore.rows.files import read_row_files
from millpond.statestore.rows.pages import PageIndexes
from millpond.statestore.store import Store
from millpond.statestore.types import TableVersion
from millpond.testing.faults.damage import CUTS, Damage, DamageOutcome, cut, file_kinds, flip, outcome_of
from millpond.testing.faults.report import FaultReport
from millpond.testing.fixtures.determinism import ManualClock, SeededRng
from millpond.testing.processes.ledger import LEDGER, ROWS, ledger_of, ledger_pipeline, numbered, written

pytestmark = pytest.mark.fault

FLIPS: Final = int(os.environ.get("MILLPOND_FLIPS", "1050"))
PART_FLIPS: Final = FLIPS // 4
MARK_FLIPS: Final = 30
CUTS_OF_A_KIND: Final = 5
COMPACTIONS: Final = UpkeepPolicy(compaction=CompactionPolicy(fan_in=4, files_max=8), background=False)
SUPERSTEPS: Final = 16
UNREADABLE: Final = {"k": None, "t": 1, "id": "none", "n": -1}

Answer = tuple[object, ...]
"""Rows, their raw updates, transactions and watermarks of one version."""


@dataclass
class Pond:
    """A store on disk with all kinds of files, and the mark of its last commit."""

    path: Path
    registry: MemoryRegistry
    clock: ManualClock
    versions: tuple[TableVersion, ...]

    @property
    def rows(self) -> Path:
        return self.path / "rows"

    def open(self) -> Store:
        """Open the store for writing, which checks it against the mark."""
        return Store.open(
            self.path,
            leases=lambda _, writer_id: MemoryLeases(self.registry, self.clock, writer_id=writer_id),
            clock=self.clock,
        )

    def kinds(self) -> dict[str, list[str]]:
        """Return its files by kind; row files only if they are live in a version that is read."""
        live = {file.path for version in self.versions for file in load(self.log, version).files}
        kinds = file_kinds(self.rows)
        used = {
            kind: [path for path in files if "computation=" not in path or path in live]
            for kind, files in kinds.items()
        }
        return {kind: files for kind, files in used.items() if files}

    @property
    def log(self) -> Log:
        return Log(open_objects(str(self.rows)))

    def older(self) -> list[tuple[Answer, ...]]:
        """Return the answers of a store whose newest version is an earlier one."""
        with self.open() as store:
            newest, older = self.versions
            views = {
                version: Table(store.rows_view(LEDGER, version).to_arrow())
                for version in range(older, newest)
            }
            answers = {version: (views[version], *answer(store, version)) for version in views}
            return [(value, answer(store, older)) for value in answers.values()]

    def read(self) -> tuple[Answer, ...]:
        """Return its newest version, through a view and in detail, and an older one."""
        with self.open() as store:
            newest, older = (answer(store, version) for version in self.versions)
            return (Table(store.rows_view(LEDGER).to_arrow()), *newest), older


def answer(store: Store, version: int) -> Answer:
    snapshot = store.snapshot(version)
    updates = read_row_files(store.objects, [file.path for file in snapshot.files])
    return Table(updates), sorted(snapshot.txns.items()), sorted(snapshot.watermarks.items())


class Table:
    """An Arrow table that is compared by its rows."""

    def __init__(self, table: pa.Table) -> None:
        self._table = table

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Table) and self._table.equals(other._table)

    __hash__ = None  # type: ignore[assignment]


def make_pond(path: Path, *, cleaned: bool) -> Pond:
    """Run a pipeline with compactions, dead letters, takeovers and checkpoints, with or without old commits deleted."""
    registry, clock = MemoryRegistry(), ManualClock()
    pond = Pond(path, registry, clock, ())
    for run_number in range(2):
        with pond.open() as store:
            runner = LocalRunner(store, intervals=2, upkeep=COMPACTIONS, progress=False, clock=clock)
            run = runner.start(ledger_pipeline(), stepping=True)
            for step in range(SUPERSTEPS // 2):
                clock.advance_ms(60_000)
                first = 10 * (step + run_number * SUPERSTEPS // 2)
                run.inject(ROWS, [*numbered(range(first, first + 10)), *[UNREADABLE] * (step % 4 == 0)])
                run.run_until_quiet()
                if step == SUPERSTEPS // 4:
                    write_checkpoint(store.objects, every=1)
            run.stop()
    if cleaned:
        with pond.open() as store:
            now = Retention(keep_ms=4 * 60_000, checkpoint_every=1_000)
            collect_garbage(store.objects, None, clock, announce=None, retention=now, owned={})
    newest = load(pond.log).version
    oldest = next(version for version in range(newest) if can_load(pond.log, version))
    # Files of a version behind the horizon may be gone by right.
    pond.versions = (newest, max(oldest, newest - 6, collected_horizon(pond.log.objects)))
    return pond


def can_load(log: Log, version: int) -> bool:
    try:
        load(log, TableVersion(version))
    except DataError:
        return False
    return True


@pytest.fixture(scope="module", params=["whole log", "cleaned log"])
def pond(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pond:
    """A store with a whole log, and one whose log begins with a checkpoint."""
    return make_pond(tmp_path_factory.mktemp("pond") / "pond", cleaned=request.param == "cleaned log")


def test_flipped_bits_are_found(pond: Pond, fault_report: FaultReport) -> None:
    kinds, rng = pond.kinds(), SeededRng(FLIPS)
    right, older = pond.read(), pond.older()
    outcomes: Counter[DamageOutcome] = Counter()
    broken = []
    for number in range(FLIPS // 2):
        files = list(kinds.values())[number % len(kinds)]
        damage = flip(pond.rows, files[int(rng.random() * len(files))], rng)
        outcome, text = outcome_of(pond.rows, damage, pond.read, right, older)
        outcomes[outcome] += 1
        broken += [] if outcome.is_kept else [text]
    count(fault_report, "R15", outcomes, broken, flips=FLIPS // 2)
    assert outcomes[DamageOutcome.NAMED] > FLIPS // 4
    assert pond.read() == right


def test_flipped_bits_are_found_by_readers_of_one_key(
    tmp_path: Path, fault_report: FaultReport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They read only the pages that may hold the key."""
    monkeypatch.setattr(row_format, "PAGED_BYTES_MIN", 0)
    monkeypatch.setattr(row_files, "COMPACTED_PAGED_BYTES_MIN", 0)
    monkeypatch.setattr(compaction, "_COMPACTED", row_format.ParquetRowFormat(0))
    monkeypatch.setattr(row_format, "_PAGE_ROWS_MIN", 2)
    monkeypatch.setattr(row_format, "_PAGE_ROWS_MAX", 2)
    pond, rng = make_pond(tmp_path / "pond", cleaned=False), SeededRng(6)
    objects = open_objects(str(pond.rows))
    paths = [file.path for file in load(pond.log).files if file.computation == LEDGER]
    keys = read_row_files(objects, paths, ["key"]).column("key").unique().to_pylist()[:1]

    def read() -> Table:
        # Read like a new process.
        monkeypatch.setattr(row_files, "PAGE_INDEXES", PageIndexes(1 << 20))
        return Table(read_row_files(objects, paths, keys=keys, large=paths))

    right = read()
    assert right == Table(read_row_files(objects, paths, keys=keys))
    assert row_files.PAGE_INDEXES.size_bytes > 1_000
    outcomes: Counter[DamageOutcome] = Counter()
    broken = []
    for number in range(PART_FLIPS):
        damage = flip(pond.rows, paths[number % len(paths)], rng)
        outcome, text = outcome_of(pond.rows, damage, read, right)
        outcomes[outcome] += 1
        broken += [] if outcome.is_kept else [text]
    count(fault_report, "R15", outcomes, broken, flips=PART_FLIPS)
    assert outcomes[DamageOutcome.NAMED] > 0


def test_cut_files_are_found(pond: Pond, fault_report: FaultReport) -> None:
    rng, right, older = SeededRng(2), pond.read(), pond.older()
    outcomes: Counter[DamageOutcome] = Counter()
    broken = []
    for damage in cuts(pond, rng):
        outcome, text = outcome_of(pond.rows, damage, pond.read, right, older)
        outcomes[outcome] += 1
        broken += [] if outcome.is_kept else [text]
    count(fault_report, "R16", outcomes, broken, cuts=outcomes.total())
    assert outcomes[DamageOutcome.NAMED] > len(pond.kinds()) * CUTS_OF_A_KIND
    assert pond.read() == right


def test_pipeline_on_damaged_files_is_right_or_refused(pond: Pond, tmp_path: Path) -> None:
    with pond.open() as store:
        numbers = sorted(number for value in ledger_of(store).values() for number in value)
    kinds, whole, rng = pond.kinds(), tmp_path / "whole", SeededRng(3)
    went_on = refused = 0
    # A store is identified by its place, so each damaged copy replaces the intact one.
    shutil.copytree(pond.path, whole)
    try:
        for files in kinds.values():
            for how in ("deleted", "rolled back"):
                damage = cut(pond.rows, files[-1], files, how, rng)
                if damage is None:
                    continue
                copy = replace(pond, registry=registry_of(pond))
                for path, data in damage.files.items():
                    (copy.rows / path).unlink() if data is None else (copy.rows / path).write_bytes(data)
                error = go_on(copy, [numbers[-1], 1_000])
                if error is None:
                    went_on += 1
                    with copy.open() as store:
                        assert ledger_of(store) == written(numbered([*numbers, 1_000])), damage.what
                else:
                    refused += 1
                    assert any(path.rpartition("/")[2] in str(error) for path in damage.files), damage.what
                shutil.rmtree(pond.path)
                shutil.copytree(whole, pond.path)
    finally:
        shutil.rmtree(pond.path)
        shutil.copytree(whole, pond.path)
    assert went_on
    assert refused


@pytest.mark.zookeeper
def test_flipped_bit_of_the_mark_never_gives_an_older_table(
    tmp_path: Path, zookeeper_hosts: str, fault_report: FaultReport
) -> None:
    client, rng = KazooClient(hosts=zookeeper_hosts), SeededRng(4)
    client.start()
    with Store.open(tmp_path / "pond", zookeeper=zookeeper_hosts) as store:
        with LocalRunner(store, progress=False).start(ledger_pipeline()) as run:
            run.inject(ROWS, numbered(range(10))).wait("60s")
        node = f"/millpond/{store.store_id}/high_water"
    whole, _ = client.get(node)
    refused = 0
    for _ in range(MARK_FLIPS):
        data = bytearray(whole)
        data[int(rng.random() * len(data))] ^= 1 << int(rng.random() * 8)
        client.set(node, bytes(data))
        try:
            with Store.open(tmp_path / "pond", zookeeper=zookeeper_hosts) as store:
                assert ledger_of(store) == written(numbered(range(10)))
        except DataError:
            refused += 1
    client.stop()
    client.close()
    fault_report.fault("R15", MARK_FLIPS, flips=MARK_FLIPS)
    assert refused > MARK_FLIPS // 2


def test_canary_reader_without_checks_reads_wrong(tmp_path: Path) -> None:
    """Silent wrong and older answers are found."""
    pond = make_pond(tmp_path / "pond", cleaned=False)

    def read() -> object:
        return Table(
            DeltaTable(pond.rows)
            .to_pyarrow_table()
            .sort_by([("key", "ascending"), ("superstep", "ascending")])
        )

    right, rng = read(), SeededRng(5)
    files = pond.kinds()["compacted row file"]
    flips = [flip(pond.rows, files[number % len(files)], rng) for number in range(100)]
    last = commit_path(pond.versions[0])
    outcomes = Counter(outcome_of(pond.rows, damage, read, right)[0] for damage in flips)
    lost = Damage(what="the last commit deleted", files={last: None})

    assert outcomes[DamageOutcome.WRONG] > 0
    assert outcome_of(pond.rows, lost, read, right)[0] is DamageOutcome.WRONG


def go_on(pond: Pond, numbers: list[int]) -> DataError | None:
    """Write more; return the error if the store refuses."""
    try:
        with pond.open() as store:
            run = LocalRunner(store, upkeep=COMPACTIONS, progress=False).start(
                ledger_pipeline(), stepping=True
            )
            run.inject(ROWS, numbered(numbers))
            run.run_until_quiet()
            run.stop()
    except DataError as error:
        return error
    return None


def registry_of(pond: Pond) -> MemoryRegistry:
    """A copy of the lease service's state."""
    copy = MemoryRegistry(sequencers=dict(pond.registry.sequencers))
    mark = pond.registry.high_water.read()
    assert mark is not None
    copy.high_water.advance(mark.version, mark.digest)
    return copy


def cuts(pond: Pond, rng: SeededRng) -> Iterator[Damage]:
    """Yield every kind of cut of some files of every kind, including the newest."""
    for files in pond.kinds().values():
        chosen = {files[-1], *(files[int(rng.random() * len(files))] for _ in range(CUTS_OF_A_KIND - 1))}
        for path in sorted(chosen):
            for how in CUTS:
                damage = cut(pond.rows, path, files, how, rng)
                if damage is not None:
                    yield damage


def count(
    report: FaultReport, row: str, outcomes: Counter[DamageOutcome], broken: list[str], **counts: int
) -> None:
    wrong, older = outcomes[DamageOutcome.WRONG], outcomes[DamageOutcome.OLDER]
    report.fault(row, outcomes.total(), silent_wrong_reads=wrong, silent_older_reads=older, **counts)
    for text in broken:
        report.violation(text)
    assert broken == []
