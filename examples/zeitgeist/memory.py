"""Peak memory of a run: this process, Spark's JVM and its Python workers, ZooKeeper."""

from __future__ import annotations

import os
import resource
import sys
from collections import defaultdict
from pathlib import Path
from typing import Final

_PROC: Final = Path("/proc")


def peak_memory_mib() -> dict[str, int]:
    """Return the peak resident memory of this process and its descendants, by the name of the program.

    The sum of the processes' own peaks is an upper bound: peaks need not coincide, and pages
    that a forked worker shares with its parent count twice. Without ``/proc`` only this process is measured.
    """
    if not _PROC.is_dir():
        unit = 1 << 20 if sys.platform == "darwin" else 1 << 10
        return {"python": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // unit}
    status = {int(path.name): _status(path) for path in _PROC.iterdir() if path.name.isdecimal()}
    peaks: dict[str, int] = defaultdict(int)
    for process in _family(status, os.getpid()):
        fields = status[process]
        peaks[fields.get("Name", "?")] += int(fields.get("VmHWM", "0 kB").split()[0]) >> 10
    return {name: peak for name, peak in peaks.items() if peak > 0}


def _status(process: Path) -> dict[str, str]:
    """The process's ``status`` file; empty if it has just ended."""
    try:
        lines = (process / "status").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return {}
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def _family(status: dict[int, dict[str, str]], root: int) -> list[int]:
    children: dict[int, list[int]] = defaultdict(list)
    for process, fields in status.items():
        children[int(fields.get("PPid", "0"))].append(process)
    family = [root]
    for process in family:  # grows while it is walked, by each process once
        family += children[process]
    return family
