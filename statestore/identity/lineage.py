"""Lineage: which incarnation of a store this is, where it came from, and its location.

All copies of a store have the same id. An **incarnation** identifies one of them: the first one has the store's id;
a copy, and a store that was restored from a backup, begin another one (`millpond.statestore.identity.adoption`).
Leases, the high-water mark and sinks belong to one incarnation. The lineage is stored in transactions of the log, and
so in every copy of the store.

A store detects that it was moved, copied or restored if its location differs from the one in the log, if its sinks
or its high-water mark are ahead of it, or if the lease service knows a successor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from millpond.statestore.app_ids import (
    FORK_PREFIX,
    INCARNATION_PREFIX,
    LOCATION_PREFIX,
    app_id_parts,
    location_app_id,
)
from millpond.statestore.errors import InvalidError


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
        store_id: the store's id, which all of them share.
        incarnations: oldest first; the last one is this store.
        location: the last location of the store in the log; "" if none is recorded.
        forks: by incarnation and pipeline, the superstep that the incarnation began with.
        parents: where the forks lay that this one descends from, the nearest first.
    """

    store_id: str
    incarnations: tuple[Incarnation, ...]
    location: str = ""
    forks: Mapping[tuple[str, str], int] = field(default_factory=dict)
    parents: tuple[str, ...] = ()

    @staticmethod
    def of(store_id: str, txns: Mapping[str, int]) -> Lineage:
        """The lineage in a table's transactions; a store from before lineages has only the first incarnation."""
        later = [
            Incarnation(name, Origin(origin), began)
            for app_id, began in txns.items()
            if app_id.startswith(INCARNATION_PREFIX)
            for name, origin in (app_id_parts(app_id, INCARNATION_PREFIX),)
        ]
        locations = [
            (at, app_id_parts(app_id, LOCATION_PREFIX)[0])
            for app_id, at in txns.items()
            if app_id.startswith(LOCATION_PREFIX)
        ]
        forks = {
            (incarnation, pipeline): superstep
            for app_id, superstep in txns.items()
            if app_id.startswith(FORK_PREFIX)
            for incarnation, pipeline in (app_id_parts(app_id, FORK_PREFIX),)
        }
        first = Incarnation(store_id, Origin.CREATED, 0)
        later.sort(key=lambda incarnation: incarnation.began)
        places, forked = dict(locations), [known.began for known in later if known.origin is Origin.FORK]
        return Lineage(
            store_id=store_id,
            incarnations=(first, *later),
            location=max(locations)[1] if locations else "",
            forks=forks,
            parents=tuple(places[began] for began in reversed(forked[:-1]) if began in places),
        )

    @property
    def current(self) -> Incarnation:
        """This store's own incarnation."""
        return self.incarnations[-1]

    @property
    def copied(self) -> Incarnation:
        """The incarnation of the last copy, or the first one; all later incarnations continue it."""
        copies = [known for known in self.incarnations if known.origin in (Origin.COPY, Origin.FORK)]
        return copies[-1] if copies else self.incarnations[0]

    def left_at(self, incarnation: str, pipeline: str) -> int | None:
        """The superstep at which an earlier incarnation was left, 0 if none is recorded; ``None`` for this one."""
        ids = [known.id for known in self.incarnations]
        later = ids[ids.index(incarnation) + 1 :]
        return None if not later else self.forks.get((later[0], pipeline), 0)

    def is_of_another_copy(self, incarnation: str) -> bool:
        """Whether this store does not continue an incarnation: it is the original of a copy, or unrelated."""
        ids = [known.id for known in self.incarnations]
        return incarnation not in ids[ids.index(self.copied.id) :]

    def unrecorded_location(self, place: str) -> dict[str, int]:
        """The transaction that records the store's location; empty if it is recorded, or for a store in memory."""
        return {} if self.location or place.startswith("memory:") else {location_app_id(place): 0}

    def check_location(self, place: str) -> None:
        """Refuse to write to a store that is not at its recorded location.

        Raises:
            InvalidError: the location differs; the error names the choices.
        """
        if self.location and self.location != place:
            raise InvalidError(
                "the store lies elsewhere than it did, and a copy must not go on as the original: say which it "
                "is, with Store.open(…, adopt=…) or `millpond adopt STORE --as …`: moved (there is no other), "
                "copy (the original goes on) or restored (an older copy takes its place)",
                path=place,
                was=self.location,
            )
