"""Offline garbage collection, as a function and as a command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from millpond.cli.main import main
from millpond.executor.computation.computation import Computation
from millpond.executor.local.run import LocalRun
from millpond.executor.local.runner import LocalRunner
from millpond.executor.maintenance.offline_gc import collect_offline
from millpond.executor.maintenance.policy import UpkeepPolicy
from millpond.executor.pipeline.pipeline import EnginePipeline
from millpond.executor.replay.repair import repair_store
from millpond.executor.replay.repair_plan import plan_repair
from millpond.gc import collectors as gc_round
from millpond.gc.collectors import CollectionRound
from millpond.statestore.errors import ConflictError, FencedError
from millpond.statestore.history.verification import verify_store
from millpond.statestore.leases.lease import exclusive
from millpond.statestore.leases.memory import MemoryLeases, MemoryRegistry
from millpond.statestore.log.log import Log
from millpond.statestore.log.snapshot import load
from millpond.statestore.objects.memory import MemoryObjects
from millpond.statestore.store import Store
from millpond.testing.fixtures.determinism import ManualClock, SeededRng

NOW = UpkeepPolicy(retention=0, collect_every=1)


class Count(Computation):
    def process_record(self, context, record):
        context.state.set((context.state.get() or 0) + 1)


def pipeline() -> EnginePipeline:
    made = EnginePipeline("p")
    made.inject("in", key="k", at="at", id="id").apply(Count(), name="count")
    return made


class Pond:
    """A store in memory with forty files of a pipeline."""

    def __init__(self) -> None:
        self.disk, self.registry, self.clock = MemoryObjects(), MemoryRegistry(), ManualClock()
        self.opened = 0
        self.run = self.start()
        for number in range(20):
            self.run.inject("in", [{"k": key, "at": 1, "id": f"{key}{number}"} for key in "abcd"])
            self.run.step()

    def open(self) -> Store:
        self.opened += 1
        return Store.in_memory(
            objects=self.disk, registry=self.registry, clock=self.clock, rng=SeededRng(self.opened)
        )

    def start(self) -> LocalRun:
        runner = LocalRunner(
            self.open(), clock=self.clock, rng=SeededRng("r"), progress=False, upkeep=None, intervals=2
        )
        return runner.start(pipeline(), stepping=True)

    def collect(self, *, dry_run: bool = False) -> CollectionRound:
        with self.open() as store:
            return collect_offline(store, self.clock, SeededRng(self.opened), NOW, dry_run=dry_run)

    def counts(self) -> list[str]:
        return list(self.open().rows_view("count").to_arrow().column("state").to_pylist())


def test_stopped_store_is_compacted_and_cleaned():
    """Each interval keeps the file of its last superstep and one other."""
    pond = Pond()
    pond.run.stop()
    before = pond.counts()
    collected = pond.collect()
    live = [file.path for file in pond.open().snapshot().files]

    assert pond.counts() == before == ["20"] * 4
    assert len(live) == 4
    assert [path for path in pond.disk.list("") if path.startswith("computation=")] == sorted(live)
    assert [each.kind for each in collected.collections] == [
        "compactions",
        "checkpoint",
        "vacuum",
        "orphans",
        "log",
    ]
    assert len(collected.collections[0].paths) == 38


@pytest.mark.parametrize("keep", ["0s", "1m", "1h"])
def test_first_collection_deletes_what_the_retention_lets_go(keep: str):
    """The log then begins at the run's last commit, and a second collection finds only what the first one wrote."""
    pond = Pond()
    pond.run.stop()
    ran_to = pond.open().snapshot().version
    pond.clock.advance_ms(2 * 3_600_000)
    policy = UpkeepPolicy(retention=keep, collect_every=1)
    with pond.open() as store:
        foreseen = collect_offline(store, pond.clock, SeededRng(1), policy, dry_run=True)
    with pond.open() as store:
        collected = collect_offline(store, pond.clock, SeededRng(2), policy)
    log = Log(pond.disk)

    assert log.inventory().versions[0] == ran_to
    assert len(collected.collections[-1].paths) == ran_to
    assert foreseen.collections[-1].paths == collected.collections[-1].paths
    assert pond.counts() == ["20"] * 4
    assert load(log, ran_to).version == ran_to
    assert verify_store(pond.disk).findings == ()


def test_commits_of_the_last_half_minute_stay():
    pond = Pond()
    ran_to = pond.open().snapshot().version
    pond.clock.advance_ms(31_000)
    pond.run.inject("in", [{"k": "a", "at": 1, "id": "more"}])
    pond.run.step()
    pond.run.stop()
    pond.collect()

    assert Log(pond.disk).inventory().versions[0] == ran_to


def test_pipeline_continues_after_an_offline_collection():
    """It must still know the consumed ids."""
    pond = Pond()
    pond.run.stop()
    pond.collect()
    run = pond.start()
    run.inject("in", [{"k": "a", "at": 1, "id": "a3"}, {"k": "a", "at": 1, "id": "new"}])
    run.step()

    assert pond.counts() == ["21", "20", "20", "20"]


def test_intervals_of_a_running_pipeline_are_skipped():
    pond = Pond()
    collected = pond.collect()
    pond.run.inject("in", [{"k": "a", "at": 1, "id": "more"}])
    pond.run.step()

    assert collected.collections[0].paths == ()
    assert "pipeline p is running" in collected.collections[0].skipped[0]
    assert pond.counts() == ["21", "20", "20", "20"]


def test_repair_and_offline_collection_exclude_each_other():
    """A dry run is allowed, and a dead process blocks nobody."""
    pond = Pond()
    pond.run.stop()
    working = MemoryLeases(pond.registry, pond.clock, writer_id="worker")
    with exclusive(working) as hold:
        with pytest.raises(ConflictError, match="is repairing the store or collecting its garbage"):
            pond.collect()
        leases = MemoryLeases(pond.registry, pond.clock, writer_id="repair")
        plan = plan_repair(pond.disk, leases.high_water.read())
        with pytest.raises(ConflictError, match="is repairing the store or collecting its garbage"):
            repair_store(pond.disk, plan, leases, pond.clock, SeededRng("repair"))
        assert pond.collect(dry_run=True).collections[0].paths
        hold.check()
        working.expire_session()
        assert pond.collect().collections[0].paths


def test_collection_that_lost_its_lease_deletes_nothing(monkeypatch: pytest.MonkeyPatch):
    """While it slept past its session, a repair may have restored files that it found to be garbage."""
    pond = Pond()
    pond.run.stop()
    before = {path for path in pond.disk.list("") if path.startswith("computation=")}
    store = pond.open()
    real_survey = gc_round.survey

    def slept(*given: object, **named: object) -> object:
        surveyed = real_survey(*given, **named)
        store.leases.expire_session()
        return surveyed

    monkeypatch.setattr(gc_round, "survey", slept)
    with pytest.raises(FencedError):
        collect_offline(store, pond.clock, SeededRng("late"), NOW)
    assert before <= set(pond.disk.list(""))


def test_dry_run_takes_no_lease_and_writes_nothing():
    """It also works while a pipeline runs."""
    pond = Pond()
    before = {path: pond.disk.get(path) for path in pond.disk.list("")}
    collected = pond.collect(dry_run=True)
    pond.run.inject("in", [{"k": "a", "at": 1, "id": "more"}])

    assert len(collected.collections[0].paths) == 38
    assert {path: pond.disk.get(path) for path in pond.disk.list("")} == before
    pond.run.step()


def test_gc_command_compacts_and_verify_finds_damage(tmp_path: Path, zookeeper_hosts: str):
    path = tmp_path / "pond"
    rows = [{"k": "a", "at": number, "id": str(number)} for number in range(5)]
    for number in range(1, 5):
        LocalRunner(path, zookeeper=zookeeper_hosts, progress=False, upkeep=None).run(
            pipeline(), {"in": rows[:number]}, finish=False
        )
    command = CliRunner()
    given = [str(path), "--zookeeper", zookeeper_hosts]
    planned = command.invoke(main, ["gc", str(path), "--dry-run", "--json"], catch_exceptions=False)
    assert not (path / "zookeeper").exists()
    done = command.invoke(main, ["gc", *given, "--keep", "0s", "--json"], catch_exceptions=False)
    verified = command.invoke(main, ["verify", *given], catch_exceptions=False)

    compactions = [json.loads(planned.stdout.splitlines()[0]), json.loads(done.stdout.splitlines()[0])]
    assert compactions[0]["paths"] == compactions[1]["paths"] != []
    assert verified.exit_code == 0
    assert verified.stdout.startswith("sound: ")
    file = next((path / "rows").glob("computation=count/*.parquet"))
    data = bytearray(file.read_bytes())
    data[40] ^= 1
    file.write_bytes(bytes(data))
    damaged = command.invoke(main, ["verify", *given], catch_exceptions=False)
    assert damaged.exit_code == 1
    assert file.name in damaged.stdout
    assert "row updates of count" in damaged.stdout


def test_repair_command_repairs_and_the_pipeline_continues(tmp_path: Path, zookeeper_hosts: str):
    """One bit can be flipped back; a truncated file needs a rewind."""
    path = tmp_path / "pond"
    rows = [{"k": "a", "at": number, "id": str(number)} for number in range(5)]
    command, given = CliRunner(), [str(path), "--zookeeper", zookeeper_hosts]
    run_all = LocalRunner(path, zookeeper=zookeeper_hosts, progress=False, upkeep=None).run
    run_all(pipeline(), {"in": rows[:4]}, finish=False)
    file = next((path / "rows").glob("computation=count/*.parquet"))
    data = bytearray(file.read_bytes())
    data[40] ^= 1
    file.write_bytes(bytes(data))

    asked = command.invoke(main, ["repair", *given], input="n\n")
    assert asked.exit_code == 1
    assert file.read_bytes() == bytes(data)
    mended = command.invoke(main, ["repair", *given, "--yes"], catch_exceptions=False)
    assert (mended.exit_code, "one bit is turned back" in mended.stdout) == (0, True)
    assert command.invoke(main, ["verify", *given], catch_exceptions=False).exit_code == 0
    run_all(pipeline(), {"in": rows}, finish=False)
    newest = max((path / "rows").glob("computation=count/*.parquet"))
    newest.write_bytes(newest.read_bytes()[:-9])
    planned = command.invoke(main, ["repair", *given, "--dry-run"], catch_exceptions=False)
    assert planned.exit_code == 1
    assert "input in of p: read again from position" in planned.stdout
    assert command.invoke(main, ["verify", *given], catch_exceptions=False).exit_code == 1
    assert command.invoke(main, ["repair", *given, "--yes"], catch_exceptions=False).exit_code == 0
    assert command.invoke(main, ["verify", *given], catch_exceptions=False).exit_code == 0
    whole = command.invoke(main, ["repair", *given], catch_exceptions=False)
    assert (whole.exit_code, "nothing to repair" in whole.stdout) == (0, True)
    run_all(pipeline(), {"in": rows}, finish=False)
    counted = command.invoke(main, ["rows", str(path), "count", "--json"], catch_exceptions=False)
    assert [json.loads(line)["state"] for line in counted.stdout.splitlines()] == [5]
