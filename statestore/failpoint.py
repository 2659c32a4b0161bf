"""Failpoints: named places in the code where tests make a process die.

A failpoint stands right before or after a write becomes durable, a lease is taken or a promise is made, where a
crash leaves half of the work done. Production has no listener, so a failpoint costs one read of a module variable.
The simulator (`millpond.testing.simulation`) counts how often each failpoint is reached, and kills simulated processes
there. The listener is global to the process, so use it only in tests that run one system at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Final

Listener = Callable[[str], object]
"""Called with a failpoint's name in the thread that reaches it; its exceptions propagate there."""

FAILPOINTS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "commit.before_put": "a commit is built but not yet put",
        "commit.after_put": "a commit's put succeeded",
        "commit.put_failed": "a commit's put failed: it may have landed",
        "commit.version_taken": "a commit's version was taken, by another writer or by its own first try",
        "commit.before_apply": "a commit is known to have landed but not yet applied in memory",
        "commit.done": "a commit is applied in memory",
        "commit.outcome_unknown": "a commit's tries are used up and its outcome is unknown",
        "lease.taken": "leases are taken but the former owner is not yet fenced",
        "lease.fenced": "the former owner is fenced but nothing is scanned yet",
        "lease.released": "the leases were released",
        "recovery.scanned": "the rows of the intervals were scanned for timers and holds",
        "recovery.productions_found": "undelivered productions were found in the files",
        "delivery.read": "undelivered productions were read for their consumers",
        "superstep.planned": "a superstep is planned",
        "superstep.bundle_processed": "an interval's bundle is processed in memory",
        "superstep.file_written": "an interval's row file is written but not committed",
        "superstep.before_commit": "a superstep's work is done but not committed",
        "superstep.committed": "a superstep is committed but not yet applied in memory",
        "superstep.applied": "a superstep is applied in memory but not yet delivered to the sinks",
        "sink.behind": "a superstep is about to be delivered to a sink",
        "sink.file_written": "a sink's file is written but not committed",
        "sink.delivered": "a superstep is delivered to a sink",
        "update.checked": "a changed pipeline is checked and its sinks are open, but nothing has changed",
        "update.leases_released": "the leases on what a changed pipeline no longer has were released",
        "update.committed": "a changed pipeline's topology is committed but nothing of it runs yet",
        "update.done": "a changed pipeline runs, and its sinks have the last superstep",
        "compaction.read": "the input files of a compaction are read",
        "compaction.file_written": "a compaction's file is written but not committed",
        "compaction.committed": "compactions are committed",
        "checkpoint.summed": "a checkpoint of the log is about to be written",
        "checkpoint.written": "a checkpoint is written but the pointer does not name it yet",
        "checkpoint.named": "the pointer names the new checkpoint",
        "garbage.surveyed": "the horizon is published but nothing is deleted",
        "garbage.before_delete": "a batch of garbage files is about to be deleted",
        "garbage.deleted": "a batch of garbage files is deleted",
    }
)
"""Every failpoint, with the state of the system when it is reached."""

_listener: Listener | None = None


def reach(name: str) -> None:
    if _listener is not None:
        _listener(name)


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Call ``listener`` at every failpoint of this process until the end of the block."""
    global _listener  # noqa: PLW0603 - a place in the code has no constructor to take a seam
    before, _listener = _listener, listener
    try:
        yield
    finally:
        _listener = before
