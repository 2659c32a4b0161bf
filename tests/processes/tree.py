"""The direct and indirect child processes of a process, from ``/proc``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def descendants_of(process: int) -> dict[int, int]:
    """Return the ids of all live descendants of a process of this machine, each with its parent's id.

    Args:
        process: the process id; a process that does not exist has no descendants.
    """
    parents = dict(_parents())
    return {child: parent for child, parent in parents.items() if process in _ancestors(child, parents)}


def command_of(process: int) -> str:
    """Return the command line of a process, separated by spaces; empty if the process does not exist."""
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def _parents() -> Iterator[tuple[int, int]]:
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                status = (folder / "stat").read_text(encoding="utf-8", errors="replace")
            except OSError:
                continue
            yield int(folder.name), int(status.rpartition(")")[2].split()[1])


def _ancestors(process: int, parents: dict[int, int]) -> Iterator[int]:
    while process in parents:
        process = parents[process]
        yield process
