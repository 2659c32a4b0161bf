"""Adoption: an operator declares that a store was moved, copied or restored.

- ``moved``: it is in another place, and there is no other copy. It stays the same incarnation.
- ``copy``: its original stays in use. It begins an incarnation with leases and a high-water mark of its own, and does
  not write into the sinks of its original.
- ``restored``: an older copy replaces a lost store. It begins an incarnation that continues the sinks, unless they
  are ahead of it, and the lease service refuses the previous incarnation from now on.

One commit records this. It changes no interval and no input, so it can be repeated after a crash.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

from millpond.statestore.app_ids import fork_app_id, incarnation_app_id, location_app_id, supersteps_of
from millpond.statestore.commit.committer import Committer
from millpond.statestore.commit.request import CommitRequest
from millpond.statestore.errors import ConflictError, InvalidError
from millpond.statestore.identity.lineage import Lineage, Origin
from millpond.statestore.leases.maintenance_lock import exclusive
from millpond.statestore.log.high_water import HighWater, MemoryHighWater, check_high_water
from millpond.statestore.log.snapshot import Snapshot, load
from millpond.statestore.log.stored_mark import list_marks, newest_mark
from millpond.statestore.log.table import check_format, store_id_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from millpond.statestore.leases.lease import Leases
    from millpond.statestore.log.log import Log
    from millpond.statestore.types import Clock, Objects, Rng

Adoption = Literal["moved", "copy", "restored"]
"""What happened to a store; see `millpond.statestore.identity.adoption`."""


def adopt_store(
    log: Log,
    place: str,
    adoption: Adoption,
    leases: Callable[[str, str], Leases],
    clock: Clock,
    rng: Rng,
    *,
    marks: Objects | None = None,
) -> Lineage:
    """Record that a store was moved, copied or restored.

    Args:
        log: the log of its table.
        place: its present location: an absolute path or a URL.
        adoption: what happened to it.
        leases: creates leases, given an incarnation and a writer's id.
        clock: for timestamps.
        rng: the source of the incarnation's id.
        marks: the store's folder, whose high-water mark a moved store must agree with.

    Returns:
        The new lineage.

    Raises:
        InvalidError: there is no such adoption, or a store that is adopted as a copy has not moved.
        ConflictError: a pipeline of the store is running.
        DataError: a moved store ends before its high-water mark.
        UnavailableError: a service does not respond; repeat the call.
    """
    if adoption not in ("moved", "copy", "restored"):
        raise InvalidError("a store is moved, copy or restored", adopt=adoption)
    listed = () if marks is None else list_marks(marks)
    snapshot = load(log)
    check_format(snapshot)
    lineage = Lineage.of(store_id_of(snapshot), snapshot.txns)
    if adoption != "restored" and lineage.location == place:
        if adoption == "copy" and lineage.current.origin not in (Origin.COPY, Origin.FORK):
            raise InvalidError(
                "the store lies where it always did, so it is no copy: copy its folder, and adopt the copy",
                path=place,
            )
        return lineage
    writer_id = rng.token()
    if adoption == "copy":
        # The original keeps its leases.
        return _record(log, place, adoption, lineage, MemoryHighWater(), clock, rng)
    held = leases(lineage.current.id, writer_id)
    try:
        with _stopped(held, snapshot):
            if adoption == "moved":
                ids = [known.id for known in lineage.incarnations]
                check_high_water(newest_mark(listed, ids), snapshot, log)
                return _record(log, place, adoption, lineage, held.high_water, clock, rng)
            return _restored(log, place, lineage, held, clock, rng)
    finally:
        held.close()


def _restored(log: Log, place: str, lineage: Lineage, held: Leases, clock: Clock, rng: Rng) -> Lineage:
    incarnation = rng.token()
    # First, so that a crash in between never leaves two active incarnations; a repetition draws another id.
    held.high_water.supersede(incarnation)
    return _record(log, place, "restored", lineage, MemoryHighWater(), clock, rng, incarnation)


def _record(
    log: Log,
    place: str,
    adoption: Adoption,
    lineage: Lineage,
    high_water: HighWater,
    clock: Clock,
    rng: Rng,
    incarnation: str = "",
) -> Lineage:
    committer = Committer(log, clock, rng, high_water)
    txns = committer.snapshot.txns
    began = committer.snapshot.version + 1
    positions: dict[str, int] = {location_app_id(place): began}
    if adoption != "moved":
        name = incarnation or rng.token()
        positions[incarnation_app_id(name, Origin(adoption))] = began
        for pipeline, superstep in supersteps_of(txns).items():
            positions[fork_app_id(name, pipeline)] = superstep
    committer.commit(CommitRequest(kind="adoption", positions=positions))
    return Lineage.of(lineage.store_id, committer.snapshot.txns)


@contextmanager
def _stopped(leases: Leases, snapshot: Snapshot) -> Iterator[None]:
    """Hold all leases, so that no pipeline of the store runs meanwhile.

    Raises:
        ConflictError: one is running, or another process maintains the store.
    """
    fences = {interval: fence.sequencer for interval, fence in snapshot.live_intervals().items()}
    with exclusive(leases):
        try:
            taken = leases.take_all(fences, on_held="refuse") if fences else ()
        except ConflictError as error:
            raise ConflictError(
                "a pipeline of the store is running; stop it before the store is adopted", **error.details
            ) from error
        try:
            yield
        finally:
            for lease in taken:
                leases.release(lease)
