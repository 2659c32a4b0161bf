"""A process that waits for a ledger's lease, takes over by itself, and then writes endlessly.

``python -m tests.processes.standby STORE HOSTS SESSION_TIMEOUT_MS FIRST`` prints one line per step:

- ``standing by``: the store is open, and the process waits for the owner to leave;
- ``at work``: it owns the intervals, and has scanned their rows;
- ``acknowledged 7``: the record of this number is durable; the first is number ``FIRST``;
- ``fenced``: another process has taken over; the process ends.

It also ends with its standard input. From the lines a reader knows when it took over, and which
records must be in the ledger.
"""

from __future__ import annotations

import sys
import threading
from itertools import count

from millpond.executor.local.runner import LocalRunner
from millpond.statestore.errors import FencedError
from millpond.statestore.store import Store
from millpond.statestore.system import SystemClock
from millpond.testing.processes.ledger import ROWS, ledger_pipeline, numbered

_EVERY_MS = 20.0


def main(arguments: list[str]) -> None:
    path, hosts, session_timeout_ms, first = arguments
    clock, ended = SystemClock(), threading.Event()
    threading.Thread(target=_wait_for_end_of_input, args=(ended,), daemon=True).start()
    store = Store.open(path, zookeeper=hosts, session_timeout=f"{session_timeout_ms}ms")
    _say("standing by")
    run = LocalRunner(store, on_held="wait", progress=False).start(ledger_pipeline())
    _say("at work")
    try:
        for number in count(int(first)):
            if ended.is_set():
                break
            run.inject(ROWS, numbered([number])).wait()
            _say(f"acknowledged {number}")
            clock.sleep_ms(_EVERY_MS)
        run.stop()
    except FencedError:
        _say("fenced")
        run.abandon()
    store.close()


def _wait_for_end_of_input(ended: threading.Event) -> None:
    sys.stdin.read()
    ended.set()


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
