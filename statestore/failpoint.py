"""
Failpoints: named places in the code at which a process may die, for whoever wants to try it.

Each stands right before or right after something became durable, was taken, or was promised: where
a crash leaves one half of two things done. In production nobody listens, and a place costs
one look at a module's variable. The simulator (`millpond.testing.simulation`) listens, counts how
often each place was reached, and lets simulated processes die there; a test may do the same::

    with listening(lambda name: os._exit(9) if name == "commit.after_put" else None):
        ...

A listener is the whole process's, so it is for tests that run one thing at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Final

__all__ = ["FAILPOINTS", "Listener", "listening", "reach"]

Listener = Callable[[str], object]
"""Called with a failpoint's name in the thread that has reached it; what it raises is raised there."""

FAILPOINTS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "commit.before_put": "a commit is built and not yet put",
        "commit.after_put": "a commit's put was answered",
        "commit.put_failed": "a commit's put failed: it may have landed",
        "commit.version_taken": "a commit's version was taken, by others or by its own first try",
        "commit.before_apply": "a commit is known to have landed and not yet applied in memory",
        "commit.done": "a commit is applied in memory",
        "commit.outcome_unknown": "a commit's tries are used up and its outcome is unknown",
        "lease.taken": "leases are taken and the former owner is not yet fenced",
        "lease.fenced": "the former owner is fenced and nothing is scanned yet",
        "lease.released": "the leases were given back",
        "recovery.scanned": "the rows of the intervals were scanned for timers and holds",
        "recovery.productions_found": "undelivered productions were found in the files",
        "delivery.read": "undelivered productions were read for their consumers",
        "superstep.planned": "a superstep is planned",
        "superstep.bundle_processed": "an interval's bundle is processed in memory",
        "superstep.file_written": "an interval's row file is written and not committed",
        "superstep.before_commit": "a superstep's work is done and not committed",
        "superstep.committed": "a superstep is committed and not yet taken over in memory",
        "superstep.applied": "a superstep is taken over in memory and the sinks know nothing of it",
        "sink.behind": "a sink is about to get a superstep",
        "sink.file_written": "a sink's file is written and not committed",
        "sink.delivered": "a sink has a superstep",
        "compaction.read": "the files of a compaction are read",
        "compaction.file_written": "a compaction's file is written and not committed",
        "compaction.committed": "compactions are committed",
        "checkpoint.summed": "a checkpoint of the log is about to be written",
        "checkpoint.written": "a checkpoint is written and the pointer does not name it yet",
        "checkpoint.named": "the pointer names the new checkpoint",
        "garbage.surveyed": "the horizon is published and nothing is deleted",
        "garbage.before_delete": "a batch of garbage files is about to be deleted",
        "garbage.deleted": "a batch of garbage files is deleted",
    }
)
"""Every failpoint, with what has happened when it is reached."""

_listener: Listener | None = None


def reach(name: str) -> None:
    """
    Tell whoever listens that the failpoint ``name`` is reached.
    """
    if _listener is not None:
        _listener(name)


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """
    Have ``listener`` called at every failpoint of this process until the end of the block.
    """
    global _listener  # noqa: PLW0603 - a place in the code has no constructor to take a seam
    before, _listener = _listener, listener
    try:
        yield
    finally:
        _listener = before
