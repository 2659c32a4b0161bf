"""Processor time of a process and all of its descendants."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import psutil

from millpond.statestore.leases.zookeeper_process import recorded_server

_JVM: Final = "java"


def used_seconds(*, server_of: Path | None = None) -> float:
    """Return the processor seconds so far of this process and its descendants, ended ones included.

    A difference of two readings is for a process that measures and does nothing else: a descendant whose parent
    ends first, or does not wait for it, leaves the tree and takes its seconds with it.

    Args:
        server_of: a store whose embedded ZooKeeper counts, too; it is a descendant of no process.
    """
    used = sum(used_seconds_by_kind().values())
    server = None if server_of is None else recorded_server(server_of / "zookeeper")
    if server is None:
        return used
    times = psutil.Process(server.process_id).cpu_times()
    return used + times.user + times.system


def used_seconds_by_kind() -> dict[str, float]:
    """Return the same, divided into ``jvm`` and ``python``."""
    used = {"jvm": 0.0, "python": 0.0}
    this = psutil.Process()
    for process in (this, *this.children(recursive=True)):
        try:
            times, kind = process.cpu_times(), "jvm" if process.name() == _JVM else "python"
        except psutil.NoSuchProcess:
            continue
        used[kind] += times.user + times.system + times.children_user + times.children_system
    return used
