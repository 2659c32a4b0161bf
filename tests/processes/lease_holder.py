"""A process that acquires a lease and prints its states; tests stop and kill it.

``python -m tests.processes.lease_holder HOSTS STORE_ID SESSION_TIMEOUT_MS`` writes one line per state
(``held 1``, ``suspended 1``, ``lost 1``: state and sequencer) and ends with its standard input or with the
lease.
"""

from __future__ import annotations

import os
import sys
import threading

from millpond.statestore.interval import Interval
from millpond.statestore.leases.lease import LeaseState
from millpond.statestore.leases.zookeeper_lease import ZooKeeperLeases
from millpond.statestore.system import SystemClock
from millpond.statestore.types import Sequencer

INTERVAL = Interval("held")
"""The interval whose lease is taken."""


def main(arguments: list[str]) -> None:
    hosts, store_id, session_timeout_ms = arguments
    clock = SystemClock()
    ended = threading.Event()
    threading.Thread(target=_wait_for_end_of_input, args=(ended,), daemon=True).start()
    leases = ZooKeeperLeases(
        hosts, store_id, f"holder-{os.getpid()}", clock, session_timeout_ms=int(session_timeout_ms)
    )
    lease = leases.take(INTERVAL, above=Sequencer(0))
    told = None
    while not ended.is_set() and told is not LeaseState.LOST:
        state = lease.state
        if state is not told:
            sys.stdout.write(f"{state} {lease.sequencer}\n")
            sys.stdout.flush()
            told = state
        clock.sleep_ms(5)
    leases.close()


def _wait_for_end_of_input(ended: threading.Event) -> None:
    sys.stdin.read()
    ended.set()


if __name__ == "__main__":
    main(sys.argv[1:])
