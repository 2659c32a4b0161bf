"""Worker processes that run a ledger; tests kill, stop and cut them off.

`Nest` keeps one clean process that has imported everything and started nothing, and forks workers
from it in milliseconds. A worker opens the store, takes or awaits its leases, publishes
numbered records from the first unacknowledged one, and writes a history
(`millpond.testing.processes.history`) of the records it injects and those acknowledged. It ends when it is
killed, fenced, or has published its last record.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from millpond.executor.computation.context import Context
from millpond.executor.computation.records import Record
from millpond.executor.local.intake import Receipt
from millpond.executor.local.run import LocalRun
from millpond.executor.local.runner import LocalRunner
from millpond.executor.maintenance.policy import UpkeepPolicy
from millpond.executor.ownership.ownership import Ownership
from millpond.executor.spark.worker_process import use_frugal_allocator
from millpond.gc.compaction import CompactionPolicy
from millpond.statestore.errors import FencedError, MillpondError, UnavailableError
from millpond.statestore.failpoint import listening
from millpond.statestore.leases.lease import OnHeld
from millpond.statestore.log import committer as commit
from millpond.statestore.store import Store
from millpond.statestore.system import SystemClock
from millpond.statestore.types import Clock
from millpond.testing.processes.history import HistoryFile, last_acknowledged
from millpond.testing.processes.ledger import ROWS, Ledger, ledger_pipeline, numbered
from millpond.testing.processes.usage import Usage, usage_of
from millpond.testing.servers.zookeeper import wait_until

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

KEYS: Final = 16
"""Keys of the ledger: enough that no list gets long."""

UPKEEP: Final = UpkeepPolicy(
    compaction=CompactionPolicy(fan_in=8, files_max=32), collect_every=64, background=False, place="thread"
)
"""Compactions and collections are frequent, so that processes die in them too."""

_OUTSTANDING_MAX: Final = 4
_FAILPOINT_EXIT: Final = 9
_CLOCK: Final = SystemClock()
_PRELOADED: Final = [
    "millpond.testing.processes.worker",
    "pandas",
    "pyarrow.pandas_compat",
    "alembic.command",
]
_OPENINGS_MAX: Final = 10

_armed = threading.Event()


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """The options of a worker.

    Args:
        name: unique; names its part of the history.
        path: the store's folder or URL.
        history: folder of the history.
        hosts: the ZooKeeper ensemble.
        storage_options: for a store in an object store.
        session_timeout_ms: timeout of its ZooKeeper session.
        on_held: its reaction to a store that another worker holds.
        records: number of records it publishes before it ends.
        together: number of records injected at once.
        pace_ms: pause between two injections.
        exit_at: failpoint at which the process ends at once, as if killed.
        exit_after: number of passes of that failpoint before.
        retention: how long the store's replaced versions stay readable.
        id_slack: how long a record may be repeated after its arrival, and in event time.
        kept: how many numbers a key's list keeps, for long runs without a checker, whose history does not
            grow either; 0 keeps all.
        fenced: ``False`` disables the fence, for canaries.
    """

    name: str
    path: str
    history: Path
    hosts: str
    storage_options: Mapping[str, str] = field(default_factory=dict)
    session_timeout_ms: int = 1_000
    on_held: OnHeld = "take"
    records: int = 1_000_000
    together: int = 1
    pace_ms: float = 0.0
    exit_at: str = ""
    exit_after: int = 0
    retention: str = "1h"
    id_slack: str = "3h"
    kept: int = 0
    fenced: bool = True


class ShortLedger(Ledger):
    """A ledger that keeps only the newest numbers, for long runs.

    Args:
        kept: how many numbers of a key it keeps.
    """

    def __init__(self, kept: int) -> None:
        self._kept = kept

    def process_record(self, context: Context, record: Record) -> None:
        """Append, and drop the oldest."""
        super().process_record(context, record)
        context.state.set(context.state.get([])[-self._kept :])


def work(options: WorkerOptions) -> None:
    """Run a worker; called in the forked process."""
    use_frugal_allocator()
    told = HistoryFile(options.history, options.name, _CLOCK)
    logging.basicConfig(filename=options.history / f"{options.name}.log", level=logging.WARNING)
    told.tell("start", pid=os.getpid())
    if not options.fenced:
        _disable_the_fence()
    signal.signal(signal.SIGUSR1, lambda *_: _armed.set())
    try:
        with listening(_at_failpoint(options)), ExitStack() as closing:
            run = _open_patiently(options, told, closing)
            _publish(run, options, told)
            run.stop()
    except FencedError as error:
        told.tell("fenced", text=str(error))
    except MillpondError as error:
        told.tell("error", kind=type(error).__name__, text=str(error))
    told.tell("end")


def _open_patiently(options: WorkerOptions, told: HistoryFile, closing: ExitStack) -> LocalRun:
    """Start the run; if a service is unavailable, retry, as a process supervisor would."""
    for _ in range(_OPENINGS_MAX - 1):
        try:
            return _start(options, told, closing)
        except UnavailableError as error:
            told.tell("away", text=str(error))
            closing.close()
    return _start(options, told, closing)


def _start(options: WorkerOptions, told: HistoryFile, closing: ExitStack) -> LocalRun:
    store = closing.enter_context(_open(options))
    upkeep = replace(UPKEEP, retention=options.retention)
    runner = LocalRunner(store, on_held=options.on_held, upkeep=upkeep, progress=False)
    ledger = ShortLedger(options.kept) if options.kept else Ledger()
    run = runner.start(ledger_pipeline(computation=ledger, id_slack=options.id_slack))
    told.tell("open", writer=store.committer.writer_id)
    return run


def _open(options: WorkerOptions) -> Store:
    return Store.open(
        options.path,
        options.hosts,
        storage_options=options.storage_options,
        session_timeout=f"{options.session_timeout_ms}ms",
    )


def _publish(run: LocalRun, options: WorkerOptions, told: HistoryFile) -> None:
    first = last_acknowledged(options.history) + 1
    outstanding: deque[tuple[Receipt, int, int]] = deque()
    for start in range(first, first + options.records, options.together):
        last = start + options.together - 1
        if not options.kept:
            told.tell("invoke", first=start, last=last)
        outstanding.append((run.inject(ROWS, numbered(range(start, last + 1), keys=KEYS)), start, last))
        while len(outstanding) >= _OUTSTANDING_MAX or (outstanding and outstanding[0][0].is_durable):
            _await(outstanding, options, told)
        if options.pace_ms:
            _CLOCK.sleep_ms(options.pace_ms)
    while outstanding:
        _await(outstanding, options, told)


def _await(outstanding: deque[tuple[Receipt, int, int]], options: WorkerOptions, told: HistoryFile) -> None:
    receipt, first, last = outstanding[0]
    receipt.wait()
    if not options.kept:
        told.tell("ack", first=first, last=last)
    outstanding.popleft()


def _at_failpoint(options: WorkerOptions) -> Callable[[str], None]:
    left = [options.exit_after]

    def listener(name: str) -> None:
        if name == "commit.before_put" and _armed.is_set():
            _armed.clear()
            os.kill(os.getpid(), signal.SIGSTOP)
        if name == options.exit_at:
            left[0] -= 1
            if left[0] < 0:
                os._exit(_FAILPOINT_EXIT)

    return listener


def _disable_the_fence() -> None:
    """For canaries: every check of the lease and every rule of the commit passes."""

    def allow(*_: Any) -> None:
        return

    setattr(commit, "check_commit", allow)  # noqa: B010
    setattr(commit._RequestPlan, "admit", allow)  # noqa: B010, SLF001 - a canary reaches in
    setattr(Ownership, "wait_until_held", allow)  # noqa: B010


class Worker:
    """A forked worker, as its supervisor sees it."""

    def __init__(self, process: BaseProcess, options: WorkerOptions) -> None:
        self._process = process
        self.options = options

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid or 0

    @property
    def is_alive(self) -> bool:
        """Return True while the process lives."""
        return self._process.is_alive()

    def usage(self) -> Usage:
        """The resources it uses now."""
        return usage_of(self.pid)

    @property
    def exit_at_failpoint(self) -> bool:
        """Return True if it ended at its `WorkerOptions.exit_at`."""
        return self._process.exitcode == _FAILPOINT_EXIT

    def kill(self) -> None:
        """Send SIGKILL, and wait for the end."""
        self._process.kill()
        self._process.join()

    def stop(self) -> None:
        """Send SIGSTOP: the process is paused until `go_on`."""
        os.kill(self.pid, signal.SIGSTOP)

    def stop_before_put(self) -> None:
        """Make it pause itself when its next commit is built and not yet put."""
        os.kill(self.pid, signal.SIGUSR1)

    def wait_until_stopped(self, clock: Clock, timeout_ms: float) -> bool:
        """Wait until it is paused; returns whether it is."""
        return wait_until(self._is_stopped, clock, timeout_ms)

    def _is_stopped(self) -> bool:
        status = Path(f"/proc/{self.pid}/stat").read_text(encoding="utf-8", errors="replace")
        return status.rpartition(") ")[2].startswith("T")

    def go_on(self) -> None:
        """Send SIGCONT."""
        os.kill(self.pid, signal.SIGCONT)

    def join(self, timeout_ms: float) -> bool:
        """Wait for its end; returns whether it came in time."""
        self._process.join(timeout_ms / 1_000)
        return not self._process.is_alive()


class Nest:
    """Forks workers; closing it kills those that are left."""

    def __init__(self) -> None:
        self._context: Any = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(_PRELOADED)
        self._workers: list[Worker] = []

    def hatch(self, options: WorkerOptions) -> Worker:
        """Fork a worker."""
        process = self._context.Process(target=work, args=(options,), name=options.name)
        process.start()
        self._workers = [worker for worker in self._workers if worker.is_alive]
        worker = Worker(process, options)
        self._workers.append(worker)
        return worker

    def close(self) -> None:
        """Kill the workers that are left."""
        for worker in self._workers:
            if worker.is_alive:
                worker.kill()

    def __enter__(self) -> Self:
        """The nest; its first process starts with the first worker."""
        return self

    def __exit__(self, *_: object) -> None:
        """Kill the workers that are left."""
        self.close()
