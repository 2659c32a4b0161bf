"""The helper process, which must end with its parent."""

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


def test_work_runs_in_one_other_process_started_on_demand(helper):
    assert helper.process_id is None
    first = helper.submit(os.getpid).result()
    assert helper.submit(os.getpid).result() == first == helper.process_id != os.getpid()
    helper.shutdown()
    assert not is_alive(first)


def test_errors_keep_class_message_and_details(helper, tmp_path):
    """An error of any other class becomes UnavailableError, and the helper continues."""
    with pytest.raises(DataError, match="missing") as caught:
        helper.submit(open_objects(str(tmp_path)).get, "nothing").result()
    assert caught.value.details["path"] == "nothing"
    with pytest.raises(UnavailableError, match="ZeroDivisionError"):
        helper.submit(divmod, 1, 0).result()
    assert helper.submit(divmod, 7, 2).result() == (3, 1)


def test_printing_does_not_disturb_the_answers(helper):
    """The answers do not use standard output."""
    assert helper.submit(print, "to whom it may concern").result() is None
    assert helper.submit(len, b"x" * (1 << 22)).result() == 1 << 22


def test_killed_process_is_replaced_by_the_next_task(helper):
    killed = helper.submit(os.getpid).result()
    with pytest.raises(UnavailableError, match="helper process has ended"):
        helper.submit(os.kill, killed, signal.SIGKILL).result()
    assert helper.submit(os.getpid).result() != killed


def test_interrupts_do_not_end_the_process(helper):
    """A terminal sends the signal to the whole group, perhaps while the process starts."""
    first = helper.submit(os.getpid)
    assert wait_until(lambda: helper.process_id is not None, SystemClock())
    os.kill(helper.process_id, signal.SIGINT)
    assert first.result() == helper.process_id
    os.kill(helper.process_id, signal.SIGINT)
    assert helper.submit(os.getpid).result() == first.result()


def test_unresponsive_process_is_replaced(helper, monkeypatch):
    """A stopped process reads no question and sends no answer."""
    stopped = helper.submit(os.getpid).result()
    os.kill(stopped, signal.SIGSTOP)
    monkeypatch.setattr("millpond.executor.maintenance.helpers._ANSWER_S_MAX", 0.2)
    monkeypatch.setattr("millpond.executor.maintenance.helpers._END_S_MAX", 0.2)
    with pytest.raises(UnavailableError, match="helper process has ended"):
        helper.submit(len, b"x" * (1 << 22)).result(20)
    assert not is_alive(stopped)
    monkeypatch.undo()
    assert helper.submit(len, b"x" * (1 << 22)).result() == 1 << 22


def test_helper_works_with_file_descriptors_above_1024(helper):
    """`select` cannot wait for such descriptors."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4_096, hard), hard))
    with contextlib.ExitStack() as held:
        held.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        for _ in range(1_100):
            held.enter_context(Path(os.devnull).open("rb"))
        assert helper.submit(divmod, 7, 2).result() == (3, 1)


def test_helper_ends_if_its_parent_died_before_its_first_look(helper, monkeypatch):
    """It gets its parent's id, because a fork may keep the pipes open."""
    monkeypatch.setattr("millpond.executor.maintenance.helpers.os.getpid", lambda: 1)
    with pytest.raises(UnavailableError, match="helper process has ended"):
        helper.submit(divmod, 7, 2).result()


def test_helper_ends_with_a_killed_parent():
    """Even a busy helper must end."""
    command = [sys.executable, "-c", ORPHAN]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        process_id = int(parent.stdout.readline())
        assert is_alive(process_id)
        parent.kill()
    assert wait_until(lambda: not is_alive(process_id), SystemClock())


def test_nothing_is_imported_from_the_current_folder(tmp_path):
    """The program lies elsewhere and does not import from the current folder, so its helper must not either."""
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


def test_pipeline_compacts_and_collects_in_the_helper(tmp_path):
    """Killing the helper process changes no result."""
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


def test_abort_ends_running_work_and_removes_scratch_files(helper):
    process_id, scratch = helper.submit(os.getpid).result(), helper.submit(tempfile.gettempdir).result()
    assert Path(scratch).is_dir()
    endless, waiting = helper.submit(signal.pause), helper.submit(os.getpid)
    helper.abort()

    for future in (endless, waiting):
        with pytest.raises(UnavailableError, match="helper process has ended"):
            future.result(20)
    assert not is_alive(process_id)
    assert not Path(scratch).exists()
