"""
Verification finds every kind of damage, and nothing in a sound store.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from millpond.executor.computation.computation import Computation
from millpond.executor.local.runner import LocalRunner
from millpond.executor.maintenance.policy import UpkeepPolicy
from millpond.executor.pipeline.pipeline import EnginePipeline
from millpond.gc.compaction_plan import CompactionPolicy
from millpond.statestore.integrity.verification import verify_store
from millpond.statestore.log.commit_file import decode, encode
from millpond.statestore.log.high_water import Mark
from millpond.statestore.log.log import Log, commit_path
from millpond.statestore.log.snapshot import load
from millpond.statestore.objects.memory import MemoryObjects
from millpond.statestore.store import Store
from millpond.statestore.types import TableVersion
from millpond.testing.fixtures.determinism import ManualClock, SeededRng


class Count(Computation):
    def process_record(self, context, record):
        context.state.set((context.state.get() or 0) + 1)


@pytest.fixture
def objects() -> MemoryObjects:
    """
    A store after twenty supersteps, some compactions and a checkpoint.
    """
    disk, clock = MemoryObjects(), ManualClock()
    store = Store.in_memory(objects=disk, clock=clock, rng=SeededRng(1))
    pipeline = EnginePipeline("p")
    pipeline.inject("in", key="k", at="at").apply(Count(), name="count")
    policy = UpkeepPolicy(compaction=CompactionPolicy(fan_in=4, files_max=8), collect_every=15)
    run = LocalRunner(store, clock=clock, rng=SeededRng(2), progress=False, upkeep=policy, intervals=2).start(
        pipeline, stepping=True
    )
    for _ in range(20):
        run.inject("in", [{"k": key, "at": 1} for key in "abcd"])
        run.step()
    run.stop()
    return disk


def flip(objects: MemoryObjects, path: str, place: int = 60) -> None:
    data = bytearray(objects.get(path))
    data[place] ^= 8
    objects.put(path, bytes(data))


def test_a_sound_store_has_no_findings(objects):
    """
    All of it is read, and nothing is wrong.
    """
    snapshot = load(Log(objects))
    found = verify_store(objects, Mark(snapshot.version, snapshot.digest))

    assert found.findings == ()
    assert found.commits == snapshot.version + 1
    assert found.files == snapshot.file_count
    assert found.checkpoints == 1


def test_each_damaged_file_is_named(objects):
    """
    A flipped bit in every live file and in a checkpoint: all are named, with what they held.
    """
    paths = [file.path for file in load(Log(objects)).files]
    checkpoint = next(path for path in objects.list("_delta_log") if path.endswith(".checkpoint.parquet"))
    for path in (*paths, checkpoint):
        flip(objects, path)
    found = verify_store(objects)

    assert {finding.path for finding in found.findings} == {*paths, checkpoint}
    assert any("row updates of count, keys 'a'" in finding.held for finding in found.findings)


def test_a_missing_file_is_named(objects):
    """
    A live file that is gone is as bad as a damaged one.
    """
    path = load(Log(objects)).files[0].path
    objects.delete([path])

    assert [finding.path for finding in verify_store(objects).findings] == [path]


@pytest.mark.parametrize("version", [0, 7, 20])
def test_a_damaged_commit_is_named(objects, version):
    """
    A commit file with a flipped bit is found, and said to hold its version.
    """
    flip(objects, commit_path(version))
    found = verify_store(objects)

    assert found.findings[0].path == commit_path(version)
    assert found.findings[0].held == f"table version {version}"


def test_a_missing_commit_is_named(objects):
    """
    A hole in the log is a finding.
    """
    objects.delete([commit_path(9)])

    assert commit_path(9) in {finding.path for finding in verify_store(objects).findings}


def test_a_log_that_was_cut_shows_at_the_high_water_mark(objects):
    """
    Without its newest commit a log looks whole; the mark knows better.
    """
    newest = load(Log(objects))
    mark = Mark(newest.version, newest.digest)
    objects.delete([commit_path(newest.version)])

    assert verify_store(objects).findings == ()
    (finding,) = verify_store(objects, mark).findings
    assert finding.path == commit_path(newest.version)


def test_a_fence_out_of_order_is_a_finding(objects):
    """
    A commit that follows no rule is found although its seal and chain are whole.
    """
    log = Log(objects)
    newest = load(log)
    data = log.require(newest.version)
    actions = tuple(
        replace(action, millpond={**action.millpond, "previous": newest.digest})
        if getattr(action, "millpond", None)
        else action
        for action in decode(data)
    )
    again = tuple(action for action in actions if type(action).__name__ in {"CommitInfo", "Txn"})
    log.put(TableVersion(newest.version + 1), encode(again))
    found = verify_store(objects)

    assert any("a fence is out of order" in finding.fault for finding in found.findings)
