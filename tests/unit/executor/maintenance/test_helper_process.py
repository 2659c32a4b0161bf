"""The helper process: work elsewhere, and nothing left of it when its parent is gone."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from millpond.executor.computation.computation import Computation
from millpond.executor.local.runner import LocalRunner
from millpond.executor.maintenance.helpers import HelperProcess
from millpond.executor.maintenance.policy import ProcessWorker, UpkeepPolicy
from millpond.executor.pipeline.pipeline import EnginePipeline
from millpond.gc.compaction import CompactionPolicy
from millpond.statestore.errors import DataError, UnavailableError
from millpond.statestore.leases.memory import MemoryLeases, MemoryRegistry
from millpond.statestore.objects.obstore import open_objects
from millpond.statestore.store import Store
from millpond.statestore.system import SystemClock
from millpond.testing.servers.zookeeper import wait_until

ORPHAN = """
import sys, time
from millpond.executor.maintenance.helpers import HelperProcess
helper = HelperProcess("orphan")
helper.submit(print, "warm").result()
print(helper.process_id, flush=True)
helper.submit(time.sleep, 600)
sys.stdin.read()
"""

CALLS_HELPER = """
import operator
from millpond.executor.maintenance.helpers import HelperProcess
helper = HelperProcess("helper")
print(helper.submit(operator.add, 1, 2).result())
helper.shutdown()
"""


@pytest.fixture
def helper():
    made = HelperProcess("helper")
    yield made
    made.shutdown()


def is_alive(process_id: int) -> bool:
    try:
        status = Path(f"/proc/{process_id}/status").read_text(encoding="utf-8")
    except (FileNotFoundError, ProcessLookupError):
        return False
    return "\nState:\tZ" not in status


def test_work_is_done_in_another_process(helper):
    """It is started at the first piece of work, used again, and gone after the end."""
    assert helper.process_id is None
    first = helper.submit(os.getpid).result()
    assert helper.submit(os.getpid).result() == first == helper.process_id != os.getpid()
    helper.shutdown()
    assert not is_alive(first)


def test_errors_come_back_as_they_are(helper, tmp_path):
    """An error of the tree keeps class, message and details; any other one is no reason to stop."""
    with pytest.raises(DataError, match="missing") as caught:
        helper.submit(open_objects(str(tmp_path)).get, "nothing").result()
    assert caught.value.details["path"] == "nothing"
    with pytest.raises(UnavailableError, match="ZeroDivisionError"):
        helper.submit(divmod, 1, 0).result()
    assert helper.submit(divmod, 7, 2).result() == (3, 1)


def test_what_it_prints_does_not_get_between(helper):
    """Standard output of the other process is not the channel of its answers."""
    assert helper.submit(print, "to whom it may concern").result() is None
    assert helper.submit(len, b"x" * (1 << 22)).result() == 1 << 22


def test_a_killed_process_is_replaced(helper):
    """The work it did is reported as not done, and the next piece gets a fresh process."""
    killed = helper.submit(os.getpid).result()
    with pytest.raises(UnavailableError, match="helper process has ended"):
        helper.submit(os.kill, killed, signal.SIGKILL).result()
    assert helper.submit(os.getpid).result() != killed


def test_an_interrupt_is_not_for_it(helper):
    """A signal that a terminal sends to the whole group does not end it, not even while it starts."""
    first = helper.submit(os.getpid)
    assert wait_until(lambda: helper.process_id is not None, SystemClock())
    os.kill(helper.process_id, signal.SIGINT)
    assert first.result() == helper.process_id
    os.kill(helper.process_id, signal.SIGINT)
    assert helper.submit(os.getpid).result() == first.result()


def test_a_stopped_process_is_replaced(helper, monkeypatch):
    """One that takes no question, and one that gives no answer, are given up after a bounded time."""
    stopped = helper.submit(os.getpid).result()
    os.kill(stopped, signal.SIGSTOP)
    monkeypatch.setattr("millpond.executor.maintenance.helpers._ANSWER_S_MAX", 0.2)
    monkeypatch.setattr("millpond.executor.maintenance.helpers._END_S_MAX", 0.2)
    with pytest.raises(UnavailableError, match="helper process has ended"):
        helper.submit(len, b"x" * (1 << 22)).result(20)
    assert not is_alive(stopped)
    monkeypatch.undo()
    assert helper.submit(len, b"x" * (1 << 22)).result() == 1 << 22


def test_it_works_for_a_program_with_many_files(helper):
    """The numbers of its pipes may be above a thousand."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4_096, hard), hard))
    with contextlib.ExitStack() as held:
        held.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        for _ in range(1_100):
            held.enter_context(Path(os.devnull).open("rb"))
        assert helper.submit(divmod, 7, 2).result() == (3, 1)


def test_it_ends_if_its_parent_is_gone_before_it_looks(helper, monkeypatch):
    """It is told whose it is, so that a fork that keeps its pipes open does not keep it."""
    monkeypatch.setattr("millpond.executor.maintenance.helpers.os.getpid", lambda: 1)
    with pytest.raises(UnavailableError, match="helper process has ended"):
        helper.submit(divmod, 7, 2).result()


def test_it_ends_with_its_parent():
    """A parent that is killed with SIGKILL leaves no helper behind, not even a busy one."""
    command = [sys.executable, "-c", ORPHAN]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        process_id = int(parent.stdout.readline())
        assert is_alive(process_id)
        parent.kill()
    assert wait_until(lambda: not is_alive(process_id), SystemClock())


def test_nothing_is_imported_from_the_current_folder(tmp_path):
    """A program that lies elsewhere, and does not import from the current folder, has no helper that does."""
    here, program = tmp_path / "here", tmp_path / "there" / "program.py"
    for folder in (here, program.parent):
        folder.mkdir()
    for name in ("json", "pickle", "signal"):
        (here / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    program.write_text(CALLS_HELPER)
    done = subprocess.run([sys.executable, program], cwd=here, check=True, capture_output=True, text=True)
    assert (done.stdout, (tmp_path / "ran").exists()) == ("3\n", False)


class Count(Computation):
    def process_record(self, context, record):
        context.state.set((context.state.get() or 0) + 1)


def test_a_pipeline_on_disk_compacts_and_collects_in_it(tmp_path):
    """The files of a running pipeline stay few, its log is checkpointed, and killing the process changes nothing."""
    registry, clock = MemoryRegistry(), SystemClock()
    policy = UpkeepPolicy(compaction=CompactionPolicy(fan_in=4, files_max=8), collect_every=30)
    pipeline = EnginePipeline("p")
    pipeline.inject("in", key="k", at="at").apply(Count(), name="count")
    with Store.open(
        tmp_path / "pond", leases=lambda _, writer: MemoryLeases(registry, clock, writer_id=writer)
    ) as store:
        with LocalRunner(store, progress=False, upkeep=policy).start(pipeline) as run:
            small = run._worker.coordinator.upkeep._workers.small
            assert isinstance(small, ProcessWorker)
            worker = small.process
            for step in range(150):
                run.inject_durably("in", {"k": "a", "at": step})
                if step == 75 and worker.process_id is not None:
                    os.kill(worker.process_id, signal.SIGKILL)
        assert len(store.snapshot().files) < 40
        assert store.rows_view("count").to_arrow().column("state").to_pylist() == ["150"]
        assert store.log.inventory().checkpoints


def test_what_is_under_way_can_be_cut_short(helper):
    """Closing does not wait for endless work; the process is gone, with its scratch files."""
    process_id, scratch = helper.submit(os.getpid).result(), helper.submit(tempfile.gettempdir).result()
    assert Path(scratch).is_dir()
    endless, waiting = helper.submit(signal.pause), helper.submit(os.getpid)
    helper.abort()

    for future in (endless, waiting):
        with pytest.raises(UnavailableError, match="helper process has ended"):
            future.result(20)
    assert not is_alive(process_id)
    assert not Path(scratch).exists()
