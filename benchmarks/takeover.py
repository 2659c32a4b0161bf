"""Takeover: the time that a store has no working owner after its owner is killed or stopped.

Real processes on one store with a real ZooKeeper: an owner that writes without a pause, and a standby
(``on_held="wait"``) behind it that takes over by itself. The owner gets SIGKILL or SIGSTOP in turns; the
time runs from the signal until a record of the next owner is durable. A stopped owner is resumed
afterwards and must be fenced. At the end every acknowledged record must be in the ledger once.

    python -m benchmarks.takeover --rounds 40 --session-timeout-ms 2000 --json build/takeover.json

The promised bounds: p99 at most twice the session timeout plus a second, and four fifths of the
previous rate within 30 s.
"""

from __future__ import annotations

import argparse
import signal
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.json_result import tell_result
from millpond.statestore.leases.zookeeper_server import EmbeddedZooKeeper
from millpond.statestore.store import Store
from millpond.statestore.system import SystemClock, SystemRng
from tests.processes.relay import Relay


def measure(rounds: int = 40, session_timeout_ms: int = 2_000) -> dict[str, Any]:
    """Take the owner down so many times, by SIGKILL and SIGSTOP in turns.

    Returns:
        ``p50_ms`` and ``p99_ms`` of all takeovers, ``open_p50_ms`` until the next owner has the rows,
        ``rate_p99_ms`` until it writes at four fifths of the former rate, the worst of each kind, the bounds, and the
        ledger's ``acknowledged``, ``lost`` and ``repeated``.
    """
    clock = SystemClock()
    with tempfile.TemporaryDirectory(prefix="millpond-takeover-") as folder:
        server = EmbeddedZooKeeper(Path(folder) / "zookeeper", clock, SystemRng(), is_open=True)
        hosts = server.start_or_join()
        try:
            path = Path(folder) / "pond"
            Store.open(path, zookeeper=hosts).close()
            with Relay(path, hosts, session_timeout_ms, clock) as relay:
                kinds = (signal.SIGKILL, signal.SIGSTOP)
                handovers = [relay.hand_over(kinds[number % 2]) for number in range(rounds)]
                acknowledged, lost, repeated = relay.finish()
        finally:
            server.close()
    work = np.array([handover.work_ms for handover in handovers])
    p50, p99 = np.percentile(work, [50, 99])
    return {
        "rounds": rounds,
        "session_timeout_ms": session_timeout_ms,
        "p50_ms": round(float(p50)),
        "p99_ms": round(float(p99)),
        "open_p50_ms": round(float(np.median([handover.open_ms for handover in handovers]))),
        "worst_kill_ms": round(max((f.work_ms for f in handovers if f.fenced is None), default=0)),
        "worst_stop_ms": round(max((f.work_ms for f in handovers if f.fenced), default=0)),
        "bound_ms": 2 * session_timeout_ms + 1_000,
        "rate_p99_ms": round(float(np.percentile([handover.rate_ms for handover in handovers], 99))),
        "rate_bound_ms": 30_000,
        "zombies_fenced": sum(f.fenced is True for f in handovers),
        "acknowledged": acknowledged,
        "lost": lost,
        "repeated": repeated,
    }


def main() -> None:
    """Measure, print one line of JSON, and write it to the file in ``--json``."""
    parser = argparse.ArgumentParser(description="takeover by a standby process")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--session-timeout-ms", type=int, default=2_000)
    parser.add_argument("--json", type=Path, default=None)
    given = parser.parse_args()
    tell_result(measure(given.rounds, given.session_timeout_ms), given.json)


if __name__ == "__main__":
    main()
