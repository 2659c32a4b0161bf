"""How leases lie in ZooKeeper, and which operations take or give one up; values in, values out.

::

    /millpond/<store id>/high_water              {"version": 17, "digest": "..."}
    /millpond/<store id>/leases/<interval>       {"offset": 4}          persistent
    /millpond/<store id>/leases/<interval>/owner {"writer_id": ...}     ephemeral

The sequencer of the last taking is the interval node's data version plus ``offset``.
Every operation that changes an owner is conditional on the version that was read, so
of two writers that decide on the same reading one succeeds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final
from urllib.parse import quote, unquote

from millpond.statestore.errors import check
from millpond.statestore.interval import Interval
from millpond.statestore.leases.lease import Holder, next_sequencer
from millpond.statestore.leases.zookeeper_session import Create, Delete, Expect, Node, Operation, Set
from millpond.statestore.types import Sequencer

_BATCH_INTERVALS: Final = 64
_BATCH_CHARACTERS: Final = 128 * 1024


class StorePaths:
    """Paths of one store's nodes.

    Example:
        >>> paths = StorePaths("s1")
        >>> paths.interval_of(paths.owner(Interval("counter", "a")))
        Interval(computation='counter', low='a', high=None)
    """

    def __init__(self, store_id: str) -> None:
        self.store: str = f"/millpond/{quote(store_id, safe='')}"
        self.leases: str = f"{self.store}/leases"

    def node(self, interval: Interval) -> str:
        """The persistent node of an interval."""
        return f"{self.leases}/{quote(interval.app_id, safe='')}"

    def owner(self, interval: Interval) -> str:
        """The ephemeral node of an interval's holder."""
        return f"{self.node(interval)}/owner"

    def interval_of(self, owner_path: str) -> Interval | None:
        """The interval whose owner node is at ``owner_path``."""
        name = owner_path.removeprefix(f"{self.leases}/").removesuffix("/owner")
        return Interval.from_app_id(unquote(name))


@dataclass(frozen=True, slots=True, kw_only=True)
class IntervalNodes:
    """The nodes of an interval as they were read at one time."""

    interval: Interval
    node: Node | None
    owner: Node | None

    @property
    def last_sequencer(self) -> int:
        """The sequencer of the last taking; 0 if ZooKeeper knows of none."""
        return 0 if self.node is None else self.node.version + _offset(self.node.data)

    def held_by_other(self, session_id: int) -> bool:
        """Whether a session other than ``session_id`` holds the lease."""
        return self.owner is not None and self.owner.owner_session != session_id

    def holder(self) -> Holder | None:
        """Who holds the lease."""
        return None if self.owner is None else Holder.decode(self.owner.data)


def taking(
    found: IntervalNodes, above: Sequencer, holder: Holder, paths: StorePaths
) -> tuple[Sequencer, list[Operation]]:
    """The sequencer of the next taking, and the operations that make ``holder`` the owner."""
    sequencer = next_sequencer(found.last_sequencer, above)
    check(sequencer > found.last_sequencer, "sequencers rise", interval=found.interval.app_id)
    path, owner = paths.node(found.interval), paths.owner(found.interval)
    operations: list[Operation] = []
    if found.node is None:
        operations.append(Create(path, _encode_offset(sequencer)))
    else:
        version = found.node.version
        operations.append(Set(path, _encode_offset(sequencer - version - 1), version))
    if found.owner is not None:
        operations.append(Delete(owner))
    operations.append(Create(owner, holder.encode(), ephemeral=True))
    return sequencer, operations


def giving_up(found: IntervalNodes, session_id: int, paths: StorePaths) -> list[Operation]:
    """The operations that remove ``session_id``'s own owner node; none if it has none."""
    if found.node is None or found.owner is None or found.held_by_other(session_id):
        return []
    return [
        Expect(paths.node(found.interval), found.node.version),
        Delete(paths.owner(found.interval)),
    ]


def batches(intervals: Mapping[Interval, Sequencer]) -> Iterator[dict[Interval, Sequencer]]:
    """Parts of ``intervals`` that fit one ZooKeeper transaction (1 MiB by default)."""
    batch: dict[Interval, Sequencer] = {}
    characters = 0
    for interval, above in intervals.items():
        length = len(interval.app_id)
        if batch and (len(batch) == _BATCH_INTERVALS or characters + length > _BATCH_CHARACTERS):
            yield batch
            batch, characters = {}, 0
        batch[interval] = above
        characters += length
    if batch:
        yield batch


def _encode_offset(offset: int) -> bytes:
    return json.dumps({"offset": offset}).encode()


def _offset(data: bytes) -> int:
    """The offset, or 0 if the data cannot be read: what the table holds bounds the sequencer anyway."""
    try:
        return int(json.loads(data)["offset"])
    except (ValueError, KeyError, TypeError):
        return 0
