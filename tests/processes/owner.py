"""A process that runs a ledger on a store until a test stops, kills or fences it.

`Owner` forks it, in milliseconds, from a process that has imported everything and started nothing. It answers
each command with a text:

- ``write 7`` runs a superstep with record number 7: ``version 12``;
- ``refresh`` reads the table again: ``version 12``;
- ``stop_at_put`` stops the process (SIGSTOP) right before it puts its next commit: ``armed``.

A command that fails is answered with the error's class and text. The engine is ``local`` (a
stepping `LocalRunner`), ``threaded`` (one with a worker thread) or ``coordinator`` (supersteps
of a `Coordinator` without an engine).
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from millpond.executor.local.runner import LocalRunner
from millpond.executor.superstep.coordinator import Coordinator
from millpond.executor.superstep.options import PipelineOptions
from millpond.executor.time.observations import InputObservation, TimesSeen
from millpond.statestore.errors import MillpondError
from millpond.statestore.leases.zookeeper_lease import ZooKeeperLeases
from millpond.statestore.objects.obstore import open_objects
from millpond.statestore.store import Store
from millpond.statestore.system import SystemClock, SystemRng
from millpond.testing.faults.faulty_objects import FaultyObjects
from millpond.testing.processes.ledger import ROWS, ledger_pipeline, numbered
from tests.fixtures.supersteps import commit

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

_CLOCK: Final = SystemClock()
_WAIT: Final = "60s"

Write = Callable[[int], None]


def _stepping(store: Store) -> Write:
    run = LocalRunner(store, progress=False).start(ledger_pipeline(), stepping=True)

    def write(number: int) -> None:
        run.inject(ROWS, numbered([number]))
        run.run_until_quiet()

    return write


def _threaded(store: Store) -> Write:
    run = LocalRunner(store, progress=False).start(ledger_pipeline())

    def write(number: int) -> None:
        run.inject(ROWS, numbered([number])).wait(_WAIT)

    return write


def _coordinated(store: Store) -> Write:
    coordinator = Coordinator(store, ledger_pipeline().check(), PipelineOptions(clock=_CLOCK))
    coordinator.open()

    def write(number: int) -> None:
        # Omit rows: the fence protects the superstep whatever it contains.
        at = numbered([number])[0]["t"]
        seen = InputObservation(stream=ROWS, records=1, times=TimesSeen(newest_at=at, oldest_at=at))
        commit(coordinator, coordinator.begin(), inputs=[seen])

    return write


ENGINES: Final[dict[str, Callable[[Store], Write]]] = {
    "local": _stepping,
    "threaded": _threaded,
    "coordinator": _coordinated,
}
"""What may drive the supersteps."""


def serve(connection: Connection, path: str, hosts: str, session_timeout_ms: int, engine: str) -> None:
    """Open the store and execute commands until the connection ends."""
    objects = FaultyObjects(open_objects(f"{path}/rows"))
    store = Store(
        path,
        objects,
        storage_options={},
        clock=_CLOCK,
        rng=SystemRng(),
        leases=lambda store_id, writer_id: ZooKeeperLeases(
            hosts, store_id, writer_id, _CLOCK, session_timeout_ms=session_timeout_ms
        ),
        catalog_url=None,
        resources=ExitStack(),
    )
    write = ENGINES[engine](store)
    connection.send("open")
    while True:
        try:
            words = connection.recv().split()
        except EOFError:
            return
        try:
            connection.send(_obey(words, store, objects, write))
        except MillpondError as error:
            connection.send(f"{type(error).__name__} {error}")


class Owner:
    """The process as seen by the test that started it.

    Args:
        path: the store's folder.
        hosts: ZooKeeper.
        session_timeout_ms: timeout of its ZooKeeper session.
        engine: what runs the supersteps.
    """

    def __init__(self, path: Path, hosts: str, session_timeout_ms: int, engine: str) -> None:
        context: Any = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        self._connection, theirs = context.Pipe()
        arguments = (theirs, str(path), hosts, session_timeout_ms, engine)
        self._process = context.Process(target=serve, args=arguments)
        self._process.start()
        theirs.close()

    def tell(self, command: str) -> None:
        """Send a command without waiting for the answer."""
        self._connection.send(command)

    def hear(self) -> str:
        """Return the next answer; empty if the process has ended."""
        try:
            answer: str = self._connection.recv()
        except EOFError:
            return ""
        return answer

    def ask(self, command: str) -> str:
        """Send a command, and return its answer."""
        self.tell(command)
        return self.hear()

    def signal(self, number: int) -> None:
        os.kill(self._process.pid, number)

    def is_stopped(self) -> bool:
        """Return True while it is stopped."""
        stat = Path(f"/proc/{self._process.pid}/stat").read_text()
        return stat.rpartition(") ")[2].startswith("T")

    def end(self) -> None:
        self._process.kill()
        self._process.join()
        self._connection.close()


def _obey(words: list[str], store: Store, objects: FaultyObjects, write: Write) -> str:
    match words:
        case ["write", number]:
            write(int(number))
        case ["refresh"]:
            store.committer.refresh()
        case ["stop_at_put"]:
            _stop_at_put(objects)
            return "armed"
        case _:
            return f"unknown command {words}"
    return f"version {store.committer.snapshot.version}"


def _stop_at_put(objects: FaultyObjects) -> None:
    def before(operation: str, path: str) -> None:
        if operation == "put_if_absent" and path.startswith("_delta_log/"):
            objects.before = None
            os.kill(os.getpid(), signal.SIGSTOP)

    objects.before = before
