"""Which files may hold productions that wait for their delivery.

Superstep *n + 1* delivers everything that superstep *n* of its pipeline produced, so only the last one's
productions can be undelivered (MillWheel §6.1.2).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from millpond.statestore.app_ids import claim_app_id, pipeline_number, supersteps_of
from millpond.statestore.interval import Interval
from millpond.statestore.log.snapshot import Snapshot
from millpond.statestore.types import Superstep


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingFiles:
    """Files of one computation with productions of a pipeline's last superstep, or of later ones.

    Attributes:
        paths: the files.
        interval: whose productions in them; ``None`` for all.
        superstep: what earlier supersteps produced has been delivered.
    """

    paths: tuple[str, ...]
    interval: Interval | None
    superstep: Superstep


def pending_files(snapshot: Snapshot, computation: str) -> tuple[PendingFiles, ...]:
    """The files of a computation that may hold undelivered productions.

    Files that another program rewrote do not say what they hold; they are included.
    """
    found: list[PendingFiles] = []
    for interval, superstep in _owners(snapshot, computation):
        files = snapshot.files_in(computation) if interval is None else snapshot.files_of(interval)
        paths = tuple(
            file.path
            for file in files
            if file.productions != 0 and (file.max_superstep is None or file.max_superstep >= superstep)
        )
        if paths:
            found.append(PendingFiles(paths=paths, interval=interval, superstep=superstep))
    return tuple(found)


def _owners(snapshot: Snapshot, computation: str) -> Iterator[tuple[Interval | None, Superstep]]:
    """The last superstep of the pipeline that a computation belongs to.

    Dead letters belong to no pipeline: each has an interval of them, named after it.
    """
    supersteps = supersteps_of(snapshot.txns)
    claim = snapshot.txns.get(claim_app_id(computation))
    if claim is not None:
        for pipeline, superstep in supersteps.items():
            if pipeline_number(pipeline) == claim:
                yield None, superstep
        return
    for app_id in snapshot.txns:
        interval = Interval.from_app_id(app_id)
        if interval is not None and interval.computation == computation:
            pipeline = interval.low.removesuffix("/")
            if pipeline in supersteps:
                yield interval, supersteps[pipeline]
