"""Verification of stores."""

from __future__ import annotations

from dataclasses import replace

import orjson
import pytest

from millpond.executor.computation.computation import Computation
from millpond.executor.local.runner import LocalRunner
from millpond.executor.maintenance.policy import UpkeepPolicy
from millpond.executor.pipeline.pipeline import EnginePipeline
from millpond.gc.compaction import CompactionPolicy
from millpond.statestore.history.verification import Finding, verify_store
from millpond.statestore.interval import Interval
from millpond.statestore.log.action import Action, Add, CommitInfo, Txn
from millpond.statestore.log.commit_file import decode, encode
from millpond.statestore.log.high_water import Mark
from millpond.statestore.log.log import Log, commit_path
from millpond.statestore.log.snapshot import load
from millpond.statestore.objects.local import LocalObjects
from millpond.statestore.objects.memory import MemoryObjects
from millpond.statestore.rows.row import pack_fence
from millpond.statestore.store import Store
from millpond.statestore.types import CommitNumber, Sequencer, TableVersion
from millpond.testing.fixtures.determinism import ManualClock, SeededRng


class Count(Computation):
    def process_record(self, context, record):
        context.state.set((context.state.get() or 0) + 1)


@pytest.fixture
def objects() -> MemoryObjects:
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


def flip(objects: MemoryObjects, path: str, offset: int = 60) -> None:
    data = bytearray(objects.get(path))
    data[offset] ^= 8
    objects.put(path, bytes(data))


@pytest.mark.parametrize("is_folder", [True, False])
def test_link_replacing_row_files_is_reported(objects, tmp_path, is_folder):
    """All other files are still read."""
    store = LocalObjects(tmp_path / "rows")
    for path in objects.list(""):
        store.put(path, objects.get(path))
    path = load(Log(store)).files[0].path
    place = tmp_path / "rows" / (path.partition("/")[0] if is_folder else path)
    place.rename(tmp_path / "moved")
    place.symlink_to(tmp_path / "moved")

    verified = verify_store(store)
    assert path in [finding.path for finding in verified.findings]
    assert all("must not be links" in finding.fault for finding in verified.findings)
    assert verified.files == verify_store(objects).files


def test_intact_store_has_no_findings(objects):
    snapshot = load(Log(objects))
    report = verify_store(objects, Mark(snapshot.version, snapshot.digest))

    assert report.findings == ()
    assert report.commits == snapshot.version + 1
    assert report.files == snapshot.file_count
    assert report.checkpoints == 1


def test_each_damaged_file_is_named(objects):
    paths = [file.path for file in load(Log(objects)).files]
    checkpoint = next(path for path in objects.list("_delta_log") if path.endswith(".checkpoint.parquet"))
    for path in (*paths, checkpoint):
        flip(objects, path)
    report = verify_store(objects)

    assert {finding.path for finding in report.findings} == {*paths, checkpoint}
    assert any("row updates of count, keys 'a'" in finding.held for finding in report.findings)


def test_missing_file_is_named(objects):
    path = load(Log(objects)).files[0].path
    objects.delete([path])

    assert [finding.path for finding in verify_store(objects).findings] == [path]


@pytest.mark.parametrize("version", [0, 7, 20])
def test_damaged_commit_is_named(objects, version):
    flip(objects, commit_path(version))
    report = verify_store(objects)

    assert report.findings[0].path == commit_path(version)
    assert report.findings[0].held == f"table version {version}"


def test_missing_commit_is_named(objects):
    objects.delete([commit_path(9)])

    assert commit_path(9) in {finding.path for finding in verify_store(objects).findings}


def test_missing_newest_commit_is_found_by_mark(objects):
    """The rest of the log looks whole."""
    newest = load(Log(objects))
    mark = Mark(newest.version, newest.digest)
    objects.delete([commit_path(newest.version)])

    assert verify_store(objects).findings == ()
    (finding,) = verify_store(objects, mark).findings
    assert finding.path == commit_path(newest.version)


def test_fence_out_of_order_is_finding(objects):
    """Seal and chain of the commit are whole."""
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
    report = verify_store(objects)

    assert any("a fence is out of order" in finding.fault for finding in report.findings)


def commit_on_top(
    objects: MemoryObjects, *actions: Action, previous: str | None = None, kind: str = "superstep"
) -> None:
    log = Log(objects)
    newest = load(log)
    ours = {"kind": kind, "previous": newest.digest if previous is None else previous}
    info = CommitInfo(operation="TEST", timestamp_ms=0, millpond=ours)
    log.put(TableVersion(newest.version + 1), encode((info, *actions)))


def said_of(objects: MemoryObjects, *, keys: tuple[str, str], records: int, **tags: str) -> Add:
    file = next(
        file for file in load(Log(objects)).files if file.computation == "count" and file.min_key == "a"
    )
    stats = {"numRecords": records, "minValues": {"key": keys[0]}, "maxValues": {"key": keys[1]}}
    return Add(
        path=file.path,
        size_bytes=file.size_bytes,
        partition_values=file.partition_values,
        modification_time_ms=0,
        stats=orjson.dumps(stats).decode(),
        tags={**file.tags, **tags},
    )


@pytest.mark.parametrize(
    ("said", "fault"),
    [
        ({"records": 99}, "rows, the log says 99"),
        ({"keys": ("aa", "z")}, "keys outside the range that the log says"),
        ({"keys": ("", "a ")}, "keys outside the range that the log says"),
        ({"interval": Interval("count", "x", "y").app_id}, "keys outside its interval"),
        ({"superstep": "0"}, "rows of a later superstep than it was written in"),
    ],
)
def test_file_differing_from_log_is_finding(objects, said, fault):
    """Every seal is whole, so only the log can show the difference."""
    add = said_of(objects, **{"keys": ("", "z"), "records": rows_of_the_first(objects), **said})
    commit_on_top(objects, add)

    findings = [finding for finding in verify_store(objects).findings if finding.path == add.path]
    assert any(fault in finding.fault for finding in findings)


def test_foreign_file_is_checked_against_present_statistics(objects):
    """Its add action has no interval and no superstep."""
    add = replace(said_of(objects, keys=("", "z"), records=rows_of_the_first(objects)), tags={})
    commit_on_top(objects, add)

    assert verify_store(objects).findings == ()


def rows_of_the_first(objects: MemoryObjects) -> int:
    files = load(Log(objects)).files
    return next(
        file.num_records or 0 for file in files if file.computation == "count" and file.min_key == "a"
    )


def test_falling_position_is_finding_except_in_repair(objects):
    fallen = Txn(app_id="millpond/superstep/p", version=1)
    commit_on_top(objects, fallen, kind="repair")
    assert verify_store(objects).findings == ()

    commit_on_top(objects, Txn(app_id="millpond/superstep/p", version=0))
    (finding,) = verify_store(objects).findings
    assert finding.fault == "a position fell: millpond/superstep/p from 1 to 0"


def test_rows_newer_than_fence_are_finding(objects):
    """This shows a fence that was set back."""
    interval = next(file.interval_id for file in load(Log(objects)).files if file.computation == "count")
    commit_on_top(objects, Txn(app_id=interval, version=pack_fence(Sequencer(1), CommitNumber(1))))

    faults = {finding.fault.partition(":")[0] for finding in verify_store(objects).findings}
    assert faults == {"a fence is out of order", "it has rows newer than its interval's last commit"}


def test_commit_of_another_history_is_finding(objects):
    commit_on_top(objects, previous="0" * 64)
    newest = max(path for path in objects.list("_delta_log") if path.endswith(".json"))

    (finding,) = verify_store(objects).findings
    assert finding == Finding(
        path=newest, held=finding.held, fault="it was not built on the commit before it"
    )


def test_missing_log_is_finding():
    (finding,) = verify_store(MemoryObjects()).findings

    assert (finding.path, finding.fault) == (commit_path(0), "there is no commit at all")
