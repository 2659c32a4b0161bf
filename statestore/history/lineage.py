"""Lineage of a store: its incarnations, their origins, and the store's location.

All copies of a store have the same id; an **incarnation** identifies a single copy. The first incarnation has the store's
id; a copy, a fork and a restored backup begin another. Leases, the high-water mark and sinks belong to one incarnation.
The lineage is in transactions of the log, and so in every copy of the store.

A store detects that it was moved, copied or restored if its location differs from the one in the log, if its sinks or
its high-water mark are ahead of it, or if the lease service knows a successor. Then an operator adopts it:

- ``moved``: there is no other copy. It stays the same incarnation.
- ``copy``: its original stays in use. It begins an incarnation that leaves the original's sinks alone.
- ``restored``: an older copy replaces a lost store. It begins an incarnation that continues the sinks, unless they
  are ahead of it; the lease service refuses the previous incarnation from now on.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Final, Literal

from millpond.statestore.app_ids import AppId, supersteps_of
from millpond.statestore.errors import ConflictError, DataError, InvalidError
from millpond.statestore.leases.ensemble import NO_ENSEMBLE, Ensemble, ensemble_entry, recorded_ensemble
from millpond.statestore.leases.lease import Leases, exclusive
from millpond.statestore.leases.zookeeper_service import connect_leases
from millpond.statestore.log.committer import Committer
from millpond.statestore.log.high_water import MemoryHighWater, check_high_water, list_marks, newest_mark
from millpond.statestore.log.log import Log
from millpond.statestore.log.rules import CommitRequest
from millpond.statestore.log.snapshot import Snapshot, load
from millpond.statestore.log.table import check_format, store_id_of
from millpond.statestore.objects.obstore import local_path
from millpond.statestore.types import Clock, Objects, Rng


class Origin(StrEnum):
    """The origin of an incarnation.

    ``CREATED``: the first one. ``COPY``: a second store next to its original. ``FORK``: the same, made by Millpond.
    ``RESTORED``: in place of its original.
    """

    CREATED = "created"
    COPY = "copy"
    FORK = "fork"
    RESTORED = "restored"


@dataclass(frozen=True, slots=True)
class Incarnation:
    """One incarnation: its id, its origin, and the table version at which it began."""

    id: str
    origin: Origin
    began: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Lineage:
    """The incarnations of a store up to this one.

    Attributes:
        incarnations: oldest first; the last one is this store, and all have the same store id.
        location: the last location of the store in the log; "" if none is recorded.
        forks: by incarnation and pipeline, the superstep that the incarnation began with.
        parents: locations of the forks that this store descends from, nearest first.
        sinks_taken: the destinations that forks have taken over from their parents: incarnation and identity.
    """

    store_id: str
    incarnations: tuple[Incarnation, ...]
    location: str = ""
    forks: Mapping[tuple[str, str], int] = field(default_factory=dict)
    parents: tuple[str, ...] = ()
    sinks_taken: frozenset[tuple[str, ...]] = frozenset()

    @staticmethod
    def of(store_id: str, txns: Mapping[str, int]) -> Lineage:
        """Return the lineage in a table's transactions; a store from before lineages has one incarnation."""
        named = [(AppId.INCARNATION.of(*parts), parts, at) for parts, at in _of(AppId.INCARNATION, txns)]
        later = [Incarnation(name, _origin(origin, app_id), at) for app_id, (name, origin), at in named]
        later.sort(key=lambda incarnation: incarnation.began)
        places = {at: place for (place,), at in _of(AppId.LOCATION, txns)}
        forked = [known.began for known in later if known.origin is Origin.FORK]
        return Lineage(
            store_id=store_id,
            incarnations=(Incarnation(store_id, Origin.CREATED, 0), *later),
            location=places[max(places)] if places else "",
            forks={(name, pipeline): superstep for (name, pipeline), superstep in _of(AppId.FORK, txns)},
            parents=tuple(places[began] for began in reversed(forked[:-1]) if began in places),
            sinks_taken=frozenset(parts for parts, _ in _of(AppId.SINK_TAKEN, txns)),
        )

    @property
    def current(self) -> Incarnation:
        """This store's incarnation."""
        return self.incarnations[-1]

    @property
    def copied(self) -> Incarnation:
        """The incarnation of the last copy, or the first one; all later incarnations continue it."""
        copies = [known for known in self.incarnations if known.origin in (Origin.COPY, Origin.FORK)]
        return copies[-1] if copies else self.incarnations[0]

    def left_at(self, incarnation: str, pipeline: str) -> int | None:
        """Return the superstep at which an earlier incarnation ended; 0 if unknown, ``None`` for the current one."""
        ids = [known.id for known in self.incarnations]
        later = ids[ids.index(incarnation) + 1 :]
        return None if not later else self.forks.get((later[0], pipeline), 0)

    def is_of_another_copy(self, incarnation: str) -> bool:
        """Return True if this store does not continue the incarnation."""
        ids = [known.id for known in self.incarnations]
        return incarnation not in ids[ids.index(self.copied.id) :]

    def has_taken(self, sink: str) -> bool:
        """Return True if this fork was told to write to a destination of its parent itself."""
        return any(name == sink and not self.is_of_another_copy(by) for by, name in self.sinks_taken)

    def unrecorded_location(self, place: str) -> dict[str, int]:
        """Return the transaction that records the location; empty if it is recorded, or in memory."""
        return {} if self.location or place.startswith("memory:") else {AppId.LOCATION.of(place): 0}

    def check_location(self, place: str) -> None:
        """Refuse to write to a store that is not at its recorded location; the error names the choices."""
        if self.location and self.location != place:
            raise InvalidError(
                "the store's location has changed, and a copy must not continue as the original: declare what "
                "happened, with Store.open(…, adopt=…) or `millpond adopt STORE --as …`: moved (there is no "
                "other), copy (the original stays in use) or restored (an older copy replaces it)",
                path=place,
                was=self.location,
            )


def _of(kind: AppId, txns: Mapping[str, int]) -> list[tuple[tuple[str, ...], int]]:
    return [(kind.parts(app_id), at) for app_id, at in txns.items() if app_id.startswith(kind)]


Adoption = Literal["moved", "copy", "restored"]
"""What happened to a store; see `millpond.statestore.history.lineage`."""


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
    """Record in one commit that a store was moved, copied or restored, and return the new lineage.

    The commit changes no interval and no input, so it can be repeated after a crash. ``marks`` is the store's
    folder, whose high-water mark a moved store must agree with.

    Raises:
        InvalidError: the adoption is unknown, a store adopted as a copy has not moved, or another ensemble serves it.
        ConflictError: a pipeline of the store is running.
        DataError: a moved store ends before its high-water mark.
    """
    if adoption not in ("moved", "copy", "restored"):
        raise InvalidError("adopt must be moved, copy or restored", adopt=adoption)
    listed = () if marks is None else list_marks(marks)
    snapshot = load(log)
    check_format(snapshot)
    lineage = Lineage.of(store_id_of(snapshot), snapshot.txns)
    if adoption != "restored" and lineage.location == place:
        if adoption == "copy" and lineage.current.origin not in (Origin.COPY, Origin.FORK):
            raise InvalidError(
                "cannot adopt a store as a copy where it always was: copy its folder, and adopt the copy",
                path=place,
            )
        return lineage
    writer_id = rng.token()
    if adoption == "copy":
        # No leases are taken: the original keeps its own, and the copy's incarnation has none yet.
        return _record(Committer(log, clock, rng, MemoryHighWater()), place, Origin.COPY, rng.token())
    connected = connect_leases(leases, snapshot.txns, lineage.current.id, writer_id)
    with closing(connected) as held, _stopped(held, snapshot):
        if adoption == "moved":
            check_high_water(newest_mark(listed, [known.id for known in lineage.incarnations]), snapshot, log)
            return _record(Committer(log, clock, rng, held.high_water), place)
        incarnation = rng.token()
        # Supersede first: otherwise a crash in between leaves two active incarnations. A repetition draws another id.
        held.high_water.supersede(incarnation)
        committer = Committer(log, clock, rng, MemoryHighWater())
        return _record(committer, place, Origin.RESTORED, incarnation)


def move_to_ensemble(log: Log, present: Leases | None, to: Ensemble, clock: Clock, rng: Rng) -> None:
    """Record in one commit that another ensemble, or the store's own server, serves the store from now on.

    ``present`` is the service that has the leases, ``None`` if it is gone for good.

    Raises:
        ConflictError: a pipeline of the store is running.
    """
    # The leases are held during the commit: a pipeline that starts afterwards reads the new entry.
    with nullcontext() if present is None else _stopped(present, load(log)):
        committer = Committer(log, clock, rng, MemoryHighWater() if present is None else present.high_water)
        version = committer.snapshot.version + 1
        committer.commit(CommitRequest(kind="ensemble", positions=ensemble_entry(to, version)))


def _record(committer: Committer, place: str, origin: Origin | None = None, incarnation: str = "") -> Lineage:
    snapshot = committer.snapshot
    began = snapshot.version + 1
    positions: dict[str, int] = {AppId.LOCATION.of(place): began}
    if origin is not None:
        positions[AppId.INCARNATION.of(incarnation, origin)] = began
        for pipeline, superstep in supersteps_of(snapshot.txns).items():
            positions[AppId.FORK.of(incarnation, pipeline)] = superstep
    if origin is Origin.COPY and recorded_ensemble(snapshot.txns).id:
        # Its leases are its own, wherever they are: the ensemble stays the original's.
        positions |= ensemble_entry(NO_ENSEMBLE, began)
    committer.commit(CommitRequest(kind="adoption", positions=positions))
    return Lineage.of(store_id_of(committer.snapshot), committer.snapshot.txns)


@contextmanager
def _stopped(leases: Leases, snapshot: Snapshot) -> Iterator[None]:
    fences = {interval: fence.sequencer for interval, fence in snapshot.live_intervals().items()}
    with exclusive(leases):
        try:
            taken = leases.take_all(fences, on_held="refuse") if fences else ()
        except ConflictError as error:
            raise ConflictError(
                "a pipeline of the store is running; stop it before the store is adopted or moved",
                **error.details,
            ) from error
        try:
            yield
        finally:
            for lease in taken:
                leases.release(lease)


# Schemes of one letter are Windows drives.
_ONE_SLASH: Final = re.compile(r"[a-z][a-z0-9+.-]+:/(?!/)", re.IGNORECASE)
NO_STORE: Final = "there is no store at this path: name the folder that a runner was given"
# The folder of the table within that of the store.
ROWS_FOLDER: Final = "rows"


def _origin(text: str, app_id: str) -> Origin:
    try:
        return Origin(text)
    except ValueError as error:
        raise DataError("the log names an incarnation of no known origin", app_id=app_id) from error


def place_of(path: str | Path) -> str:
    """Return a store's location, equal in every process: an absolute path, or a URL without trailing slash."""
    local = local_folder(path)
    return str(path).rstrip("/") if local is None else str(local)


def local_folder(path: str | Path) -> Path | None:
    """Return a store's folder on this machine; ``None`` for an object store."""
    found = local_path(path)
    # A link's target is held to the same rule.
    return None if found is None else local_path(found.resolve())


def check_folder(local: Path, path: str | Path, what: str) -> None:
    """Refuse a local path that cannot be the folder of ``what``."""
    if _ONE_SLASH.match(str(path)):
        raise InvalidError(
            "this is a URL with one slash, or a path that only Spark knows: write s3://…, or the folder's path on this "
            "machine, such as /dbfs/… for dbfs:/…",
            path=path,
        )
    if local.exists() and not local.is_dir():
        raise InvalidError(
            f"the path of {what} must be a folder, but it is a file: name another place", path=path
        )
    blocking = next((parent for parent in local.parents if parent.is_file()), None)
    if blocking is not None:
        raise InvalidError(
            f"the path of {what} must be a folder, but there is a file on the way to it",
            path=path,
            file=blocking,
        )


def check_location(local: Path | None, path: str | Path, *, create: bool) -> None:
    if local is None:
        return
    check_folder(local, path, "a store")
    log = local / ROWS_FOLDER / "_delta_log"
    if log.is_dir():
        return
    # A process that was killed while creating the store leaves an empty `rows`.
    is_used = local.is_dir() and any(
        entry.name != ROWS_FOLDER or not entry.is_dir() or any(entry.iterdir()) for entry in local.iterdir()
    )
    # Another process may have created the store since the first look.
    if is_used and not log.is_dir():
        raise InvalidError(
            "the folder is not empty and is not a Millpond store: name the folder of one, or an empty or a new folder",
            path=path,
        )
    if not create and not log.is_dir():
        raise InvalidError(NO_STORE, path=path)
