"""Repair of damaged stores."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from click.testing import CliRunner
from deltalake import DeltaTable

from millpond.cli.main import main
from millpond.executor.computation.computation import Computation
from millpond.executor.inputs.extraction import pieces, rows_from
from millpond.executor.inputs.positions import LOCAL_SOURCE, counts_by_computation
from millpond.executor.local.runner import LocalRunner
from millpond.executor.maintenance.policy import UpkeepPolicy
from millpond.executor.pipeline.pipeline import EnginePipeline
from millpond.executor.replay.repair import SET_ASIDE_FOLDER, repair_store
from millpond.executor.replay.repair_plan import RepairPlan, plan_repair
from millpond.executor.sinks.sink import DeltaSink
from millpond.executor.superstep.plan import InputPosition
from millpond.gc.collectors import write_checkpoint
from millpond.gc.compaction import CompactionPolicy
from millpond.statestore.errors import ConflictError, DataError
from millpond.statestore.history.verification import verify_store
from millpond.statestore.interval import Interval
from millpond.statestore.leases.memory import MemoryLeases, MemoryRegistry
from millpond.statestore.log.files import LiveFile
from millpond.statestore.log.log import Log, commit_path
from millpond.statestore.log.snapshot import load
from millpond.statestore.objects.memory import MemoryObjects
from millpond.statestore.store import Store
from millpond.testing.fixtures.determinism import ManualClock, SeededRng

pytestmark = pytest.mark.slow

ROUNDS, ROWS, BUNDLE = 8, 12, 4
COMPACTIONS = UpkeepPolicy(compaction=CompactionPolicy(fan_in=4, files_max=8), collect_every=10**9)


class First(Computation):
    counters = ("young",)

    def process_record(self, context, record):
        context.state.set((context.state.get() or 0) + 1)
        context.produce("seen", {"key": record.key})
        if record.value["at"] >= ROUNDS * ROWS:
            context.count("young")


class Second(Computation):
    def process_record(self, context, record):
        context.state.set((context.state.get() or 0) + 1)


def pipeline(sink: DeltaSink | None = None) -> EnginePipeline:
    made = EnginePipeline("p")
    made.inject("in", key="k", at="at").apply(First(), name="first", produces="seen").apply(
        Second(), name="second", key="key"
    )
    if sink is not None:
        made.stream("seen").sink("out", sink)
    return made


def rows(rounds: int) -> list[dict[str, object]]:
    return [{"k": f"k{number % 5}", "at": number} for number in range(rounds * ROWS)]


class Pond:
    """A store in memory whose pipeline consumes a growing input and restarts for each part."""

    def __init__(self) -> None:
        self.disk, self.registry, self.clock = MemoryObjects(), MemoryRegistry(), ManualClock()
        self.opened = 0

    def copy(self) -> Pond:
        """Copy the store to another disk."""
        made, mark = Pond(), self.leases().high_water.read()
        made.clock.advance_ms(3_600_000)
        made.opened = 1_000
        for path in self.disk.list(""):
            made.disk.put(path, self.disk.get(path))
        if mark is not None:
            made.leases().high_water.advance(mark.version, mark.digest)
        return made

    def store(self) -> Store:
        self.opened += 1
        return Store.in_memory(
            objects=self.disk, registry=self.registry, clock=self.clock, rng=SeededRng(self.opened)
        )

    def consume(self, rounds: int, sink: DeltaSink | None = None) -> None:
        self.clock.advance_ms(1_000)
        with self.store() as store:
            runner = LocalRunner(
                store,
                clock=self.clock,
                rng=SeededRng("runner"),
                progress=False,
                upkeep=COMPACTIONS,
                intervals=2,
            )
            # Step like `LocalRunner.run`, so that each run compacts at the same places.
            run = runner.start(pipeline(sink), stepping=True)
            given = rows(rounds)
            rest = given[run.consumed("in").get(LOCAL_SOURCE, 0) :]
            for count, piece in pieces(rows_from(rest), BUNDLE):
                position = InputPosition(
                    stream="in", source=LOCAL_SOURCE, batch=len(given) - len(rest) + count
                )
                run.consume("in", piece, position)
                rest = rest[count:]
            run.run_until_quiet()
            run.stop()

    def leases(self) -> MemoryLeases:
        return MemoryLeases(self.registry, self.clock, writer_id="repair")

    def plan(self) -> RepairPlan:
        return plan_repair(self.disk, self.leases().high_water.read())

    def repair(self, plan: RepairPlan | None = None) -> RepairPlan:
        plan = plan or self.plan()
        repair_store(self.disk, plan, self.leases(), self.clock, SeededRng("repair"))
        return plan

    def live(self) -> list[LiveFile]:
        return list(load(Log(self.disk)).files)

    def of_kind(self, *, is_compaction: bool) -> LiveFile:
        """Return the newest live file of a compaction or a superstep."""
        return [
            file
            for file in self.live()
            if (file.min_superstep is None) == is_compaction and file.computation != "dead_letters"
        ][-1]

    def counts(self) -> Counter[str]:
        with self.store() as store:
            counts: Counter[str] = Counter()
            for name in ("first", "second"):
                table = store.rows_view(name).to_arrow()
                pairs = zip(table.column("key").to_pylist(), table.column("state").to_pylist(), strict=True)
                counts.update({f"{name}/{key}": int(state) for key, state in pairs})
            return counts


def expected(rounds: int) -> Counter[str]:
    keys = Counter(str(row["k"]) for row in rows(rounds))
    return Counter({f"{name}/{key}": count for name in ("first", "second") for key, count in keys.items()})


def totals(pond: Pond) -> dict[str, dict[str, int]]:
    return counts_by_computation(load(Log(pond.disk)).txns, "p")


def check_sound(pond: Pond) -> None:
    """Check that readers find no damage and that the next run counts every record once."""
    mark = pond.leases().high_water.read()
    assert mark is not None
    assert verify_store(pond.disk, mark).findings == ()
    assert load(Log(pond.disk)).version == mark.version
    assert not pond.plan().is_needed
    pond.consume(ROUNDS + 1)
    assert pond.counts() == expected(ROUNDS + 1)
    assert verify_store(pond.disk, pond.leases().high_water.read()).findings == ()


def flip(disk: MemoryObjects, path: str, *offsets: int) -> None:
    data = bytearray(disk.get(path))
    for offset in offsets:
        data[offset] ^= 4
    disk.put(path, bytes(data))


def cut(disk: MemoryObjects, path: str) -> None:
    disk.put(path, disk.get(path)[:-40])


@pytest.fixture(scope="module")
def original() -> Pond:
    made = Pond()
    for rounds in range(1, ROUNDS + 1):
        made.consume(rounds)
    assert made.counts() == expected(ROUNDS)
    return made


@pytest.fixture
def pond(original: Pond) -> Pond:
    """A store with files of supersteps and compactions, and a complete log."""
    return original.copy()


def test_sound_store_needs_no_repair(pond):
    plan = pond.plan()
    assert not plan.is_needed
    assert not plan.is_rollback
    assert plan.lost == plan.set_aside == plan.restored == ()


@pytest.mark.parametrize("offset", [5, 400, -30])
@pytest.mark.parametrize("kind", ["superstep", "compaction", "commit"])
def test_flipped_bit_is_restored_without_a_rollback(pond, kind, offset):
    path = (
        commit_path(load(Log(pond.disk)).version - 9)
        if kind == "commit"
        else pond.of_kind(is_compaction=kind == "compaction").path
    )
    before = pond.disk.get(path)
    flip(pond.disk, path, offset)
    assert verify_store(pond.disk).findings
    plan = pond.repair()

    assert pond.disk.get(path) == before
    assert list(plan.healed) == [path]
    assert not plan.is_rollback
    assert pond.counts() == expected(ROUNDS)
    check_sound(pond)


@pytest.mark.parametrize("damage", [cut, lambda disk, path: disk.delete([path])])
def test_lost_compaction_is_restored_from_its_sources(pond, damage: Callable[[MemoryObjects, str], None]):
    """Nothing is lost while the source files exist."""
    path = pond.of_kind(is_compaction=True).path
    damage(pond.disk, path)
    plan = pond.repair()

    assert [each.path for each in plan.restored] == [path]
    assert len(plan.restored[0].sources) >= 2
    assert not plan.is_rollback
    assert pond.counts() == expected(ROUNDS)
    check_sound(pond)


def test_lost_nested_compactions_are_restored_recursively(pond):
    for rounds in range(ROUNDS, 3 * ROUNDS):
        pond.consume(rounds)
    known = {path for path in pond.disk.list("") if path.endswith(".parquet")}
    plan_before = pond.plan()
    compactions = {
        add.path
        for change in plan_before.history.changes
        if change.kind == "compaction"
        for add in change.added
        if add.path in known
    }
    nested = [
        path
        for path in compactions
        if (made := plan_before.history.maker_of(path))
        and any(add.path in compactions for add in made.removed)
    ]
    live = {file.path for file in pond.live()}
    assert live.intersection(nested)
    for path in compactions:
        pond.disk.delete([path])
    plan = pond.repair()
    assert not plan.is_rollback
    assert pond.counts() == expected(3 * ROUNDS - 1)
    assert verify_store(pond.disk, pond.leases().high_water.read()).findings == ()


@pytest.mark.parametrize("damage", [cut, lambda disk, path: disk.delete([path])])
def test_lost_file_rolls_the_store_back(pond, damage: Callable[[MemoryObjects, str], None]):
    """State, productions and positions go back together, so the input is read again."""
    path = pond.of_kind(is_compaction=False).path
    damage(pond.disk, path)
    plan = pond.repair()

    assert plan.is_rollback
    assert plan.lost == (path,)
    assert plan.is_readable
    check_sound(pond)


@pytest.mark.parametrize("back", [0, 1, 7, 20])
@pytest.mark.parametrize("damage", [cut, lambda disk, path: disk.delete([path])])
def test_lost_commit_rolls_the_store_back(pond, back, damage: Callable[[MemoryObjects, str], None]):
    """The restored version gets a number above all others, and the old log is set aside."""
    newest = load(Log(pond.disk)).version
    path = commit_path(newest - back)
    damage(pond.disk, path)
    plan = pond.repair()

    assert plan.newest == newest
    assert plan.state.version == newest - back - 1
    assert not plan.is_readable
    assert load(Log(pond.disk)).version == newest + 1
    assert pond.disk.list(SET_ASIDE_FOLDER)
    check_sound(pond)


def test_log_without_its_newest_commits_continues_above_the_high_water_mark(pond):
    """Only the high-water mark still knows of the ten lost commits."""
    newest = load(Log(pond.disk)).version
    pond.disk.delete([commit_path(version) for version in range(newest - 9, newest + 1)])
    plan = pond.repair()

    assert (plan.newest, plan.state.version) == (newest, newest - 10)
    check_sound(pond)


def test_damaged_checkpoint_is_set_aside(pond):
    """The commits contain the same facts."""
    write_checkpoint(pond.disk, every=1)
    path = next(path for path in pond.disk.list("_delta_log") if path.endswith(".checkpoint.parquet"))
    flip(pond.disk, path, 100, 200)
    plan = pond.repair()

    assert plan.set_aside == (path,)
    assert not plan.is_rollback
    check_sound(pond)


@pytest.mark.parametrize("back", [0, 5])
def test_damaged_commit_before_a_checkpoint_loses_history_only(pond, back):
    """The checkpoint has the state, so only older versions become unreadable."""
    write_checkpoint(pond.disk, every=1)
    made = load(Log(pond.disk)).version
    pond.consume(ROUNDS)
    cut(pond.disk, commit_path(made - back))
    plan = pond.repair()

    assert not plan.is_rollback
    assert commit_path(made - back) in plan.set_aside
    assert pond.counts() == expected(ROUNDS)
    check_sound(pond)


def test_store_without_a_sound_version_is_refused(pond):
    """Only a copy can help, and nothing is changed."""
    for path in pond.disk.list("_delta_log"):
        cut(pond.disk, path)
    with pytest.raises(DataError, match="restore it from a copy"):
        pond.plan()


def test_repair_of_a_running_pipeline_is_refused(pond):
    pond.disk.delete([pond.of_kind(is_compaction=False).path])
    holder = MemoryLeases(pond.registry, pond.clock, writer_id="runner")
    snapshot = load(Log(pond.disk))
    interval = next(each for each in map(Interval.from_app_id, snapshot.txns) if each is not None)
    fence = snapshot.fence_of(interval)
    assert fence is not None
    holder.take(interval, above=fence.sequencer)
    before = set(pond.disk.list(""))
    with pytest.raises(ConflictError):
        pond.repair()
    assert set(pond.disk.list("")) == before


def test_sinks_miss_nothing_after_a_rollback(pond, tmp_path):
    """The sink has outputs of undone supersteps and must not mistake new ones for them."""
    sink = DeltaSink(str(tmp_path / "out"))
    pond.consume(ROUNDS + 2, sink)
    pond.disk.delete([pond.of_kind(is_compaction=False).path])
    plan = pond.repair()
    assert plan.is_rollback
    pond.consume(ROUNDS + 3, sink)
    assert pond.counts() == expected(ROUNDS + 3)
    delivered = Counter(DeltaTable(str(tmp_path / "out")).to_pyarrow_table().column("key").to_pylist())
    for key, count in Counter(str(row["k"]) for row in rows(ROUNDS + 3)[ROUNDS * ROWS :]).items():
        assert delivered[key] >= count


def test_counter_added_after_the_restored_version_restarts_at_zero(pond):
    """Its records are read and counted again."""
    old = set(pond.disk.list(""))
    pond.consume(ROUNDS + 1)
    assert totals(pond) == {"first": {"young": ROWS}}
    pond.disk.delete([path for path in pond.disk.list("computation=first") if path not in old])
    plan = pond.repair()
    assert plan.is_rollback
    pond.consume(ROUNDS + 2)
    assert totals(pond) == {"first": {"young": 2 * ROWS}}


def test_repair_recognises_its_own_commit_after_a_lost_reply(pond):
    """The repeated put finds its first attempt, which is no other writer's."""
    newest = load(Log(pond.disk)).version
    cut(pond.disk, commit_path(newest - 3))

    class Forgetful:
        def __getattr__(self, name: str) -> Any:
            return getattr(pond.disk, name)

        def put_if_absent(self, path: str, data: bytes) -> None:
            pond.disk.put_if_absent(path, data)
            pond.disk.put_if_absent(path, data)

    repair_store(Forgetful(), pond.plan(), pond.leases(), pond.clock, SeededRng("repair"))
    check_sound(pond)


def test_plan_with_meanwhile_collected_files_is_refused(pond):
    """A collection changes no version, so the files themselves must be checked."""
    cut(pond.disk, pond.of_kind(is_compaction=True).path)
    plan = pond.plan()
    pond.disk.delete(plan.restored[0].sources[:1])
    before = set(pond.disk.list(""))
    with pytest.raises(ConflictError, match="repair again"):
        repair_store(pond.disk, plan, pond.leases(), pond.clock, SeededRng("repair"))
    assert set(pond.disk.list("")) == before
    pond.repair()
    check_sound(pond)


@pytest.mark.parametrize("arguments", [["--dry-run"], ["--yes"]])
def test_repair_of_a_path_without_a_store_is_refused(tmp_path, arguments):
    """A mistyped path must not be created, nor suggest restoring a copy."""
    result = CliRunner().invoke(main, ["repair", str(tmp_path / "nowhere"), *arguments])
    assert result.exit_code != 0
    assert "no store at this path" in result.output
    assert not (tmp_path / "nowhere").exists()


@pytest.fixture(scope="module")
def lacking(original: Pond) -> tuple[Pond, RepairPlan]:
    """A store with a truncated commit, and its plan, which is costly to make."""
    damaged = original.copy()
    cut(damaged.disk, commit_path(load(Log(damaged.disk)).version - 3))
    return damaged, damaged.plan()


@pytest.mark.parametrize("stop_after", range(1, 12))
def test_repair_killed_midway_can_be_repeated(lacking, stop_after):
    pond, plan = lacking[0].copy(), lacking[1]
    done = 0

    class KilledError(Exception):
        pass

    class Doomed:
        def __getattr__(self, name: str) -> Any:
            inner = getattr(pond.disk, name)
            if name not in {"put", "put_if_absent", "delete"}:
                return inner

            def call(*arguments: Any) -> Any:
                nonlocal done
                done += 1
                if done > stop_after:
                    raise KilledError
                return inner(*arguments)

            return call

    leases = pond.leases()
    try:
        repair_store(Doomed(), plan, leases, pond.clock, SeededRng("doomed"))
    except KilledError:
        leases.close()
    again = pond.plan()
    pond.repair(again) if again.is_needed else None
    check_sound(pond)
