"""
A process that runs a ledger on a store until a test stops, kills or fences it.

``python -m millpond.testing.processes.owner STORE HOSTS SESSION_TIMEOUT_MS ENGINE`` reads commands from
its standard input, one per line, and answers each with a line:

- ``write 7`` runs a superstep with record number 7: ``version 12``;
- ``refresh`` reads the table again: ``version 12``;
- ``stop_at_put`` stops the process (SIGSTOP) right before it puts its next commit: ``armed``.

A command that fails is answered with the error's class and text. ``ENGINE`` is ``local`` (a
stepping `LocalRunner`), ``threaded`` (one with a worker thread) or ``coordinator`` (supersteps
directly on the `Coordinator`, as the Spark runner drives it).
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Final

from millpond.executor.injectors.observation import InputObservation
from millpond.executor.local.runner import LocalRunner
from millpond.executor.superstep.coordinator import Coordinator
from millpond.statestore.errors import MillpondError
from millpond.statestore.objects.obstore import open_objects
from millpond.statestore.store import Store
from millpond.statestore.system import SystemClock, SystemRng
from millpond.statestore.zookeeper.lease import ZooKeeperLeases
from millpond.testing.faults.faulty_objects import FaultyObjects
from millpond.testing.processes.ledger import ROWS, ledger_pipeline, numbered

__all__ = ["ENGINES", "main"]

_CLOCK: Final = SystemClock()
_WAIT_MS: Final = 60_000

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
        run.inject(ROWS, numbered([number])).wait(_WAIT_MS)

    return write


def _coordinated(store: Store) -> Write:
    coordinator = Coordinator(store, ledger_pipeline().check(), clock=_CLOCK, rng=SystemRng())
    coordinator.open()

    def write(number: int) -> None:
        # Without rows: the fence protects the superstep whatever it contains.
        seen = InputObservation(stream=ROWS, records=1, newest_at=numbered([number])[0]["t"])
        coordinator.commit(coordinator.begin(), [], inputs=[seen])

    return write


ENGINES: Final[dict[str, Callable[[Store], Write]]] = {
    "local": _stepping,
    "threaded": _threaded,
    "coordinator": _coordinated,
}
"""What may drive the supersteps."""


def main(arguments: list[str]) -> None:
    """
    Open the store and execute commands.
    """
    path, hosts, session_timeout_ms, engine = arguments
    objects = FaultyObjects(open_objects(f"{path}/rows"))
    store = Store(
        path,
        objects,
        storage_options={},
        clock=_CLOCK,
        rng=SystemRng(),
        leases=lambda store_id, writer_id: ZooKeeperLeases(
            hosts, store_id, writer_id, _CLOCK, session_timeout_ms=int(session_timeout_ms)
        ),
        catalog_url=None,
        resources=ExitStack(),
    )
    write = ENGINES[engine](store)
    _say("open")
    for line in sys.stdin:
        try:
            _say(_obey(line.split(), store, objects, write))
        except MillpondError as error:
            _say(f"{type(error).__name__} {error}")


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


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
