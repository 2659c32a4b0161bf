"""
Made-up histories of commits, for everything that reads what commits say.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from millpond.statestore.catalog import Catalog
from millpond.statestore.catalog_entries import (
    ComputationDefinition,
    PipelineDefinition,
    StreamDefinition,
    SubscriptionDefinition,
)
from millpond.statestore.catalog_facts import (
    CommitFacts,
    definition_to_metadata,
    input_app_id,
    superstep_app_id,
)
from millpond.statestore.interval import Interval
from millpond.statestore.row import pack_fence
from millpond.statestore.types import CommitNumber, Sequencer, TableVersion, WallTimeMicros

__all__ = [
    "ALL",
    "DEFINITION",
    "LEFT",
    "RIGHT",
    "CommitHistory",
    "busy_history",
    "everything",
    "packed_fence",
]

ALL: Final = Interval("counter")
"""All keys of a computation."""

LEFT: Final = Interval("counter", "", "m")
"""Its keys below "m"."""

RIGHT: Final = Interval("counter", "m")
"""The others."""

DEFINITION: Final = PipelineDefinition(
    name="zeitgeist",
    computations=(
        ComputationDefinition(name="counter", code_hash="a1", options={"exactly_once": True}),
        ComputationDefinition(name="spikes", code_hash="b1", codec="msgpack"),
    ),
    streams=(
        StreamDefinition(name="counts", producers=("counter",)),
        StreamDefinition(name="queries", producers=("queries",)),
    ),
    subscriptions=(
        SubscriptionDefinition(consumer="counter", stream="queries", key_extractor="query"),
        SubscriptionDefinition(consumer="spikes", stream="counts", key_extractor="key"),
    ),
)
"""A pipeline of two computations."""


@dataclass
class CommitHistory:
    """
    Commits as a log keeps them: the facts of each, and the newest ``txn`` of every app id.
    """

    commits: list[CommitFacts] = field(default_factory=list)
    txns: dict[str, int] = field(default_factory=dict)

    @property
    def version(self) -> TableVersion:
        """
        The newest commit.
        """
        return TableVersion(len(self.commits) - 1)

    def commit(self, txns: dict[str, int], **metadata: object) -> CommitFacts:
        """
        Add a commit.
        """
        facts = CommitFacts(
            version=TableVersion(len(self.commits)),
            wall_us=WallTimeMicros(5_000_000 + 1_000 * len(self.commits)),
            txns=txns,
            metadata=metadata,
        )
        self.commits.append(facts)
        self.txns.update(txns)
        return facts

    def superstep(self, number: int, fences: dict[Interval, tuple[int, int]]) -> CommitFacts:
        """
        Add a superstep of the pipeline "zeitgeist" by owners given as (sequencer, commit number).
        """
        txns = {interval.app_id: packed_fence(*numbers) for interval, numbers in fences.items()}
        txns[superstep_app_id("zeitgeist")] = number
        txns[input_app_id("zeitgeist", "queries", "q-1")] = number - 1
        marks = {interval.app_id: 1_000 * number for interval in fences}
        return self.commit(txns, kind="superstep", records=10 * number, late=1, watermarks=marks)


def packed_fence(sequencer: int, commit_number: int) -> int:
    """
    The ``txn`` version of an owner.
    """
    return pack_fence(Sequencer(sequencer), CommitNumber(commit_number))


def busy_history() -> CommitHistory:
    """
    A pipeline that started, was split in two, and had one half taken over.
    """
    log = CommitHistory()
    log.commit({}, kind="create")
    log.commit({ALL.app_id: packed_fence(1, 0)}, kind="fence", definition=definition_to_metadata(DEFINITION))
    log.superstep(1, {ALL: (1, 1)})
    log.superstep(2, {ALL: (1, 2)})
    log.commit({LEFT.app_id: packed_fence(2, 0), RIGHT.app_id: packed_fence(2, 0)}, kind="fence")
    log.superstep(3, {LEFT: (2, 1)})
    log.commit({RIGHT.app_id: packed_fence(3, 0)}, kind="fence")
    log.superstep(4, {LEFT: (2, 2), RIGHT: (3, 1)})
    return log


def everything(catalog: Catalog) -> tuple[object, ...]:
    """
    All that a catalog says about the pipeline "zeitgeist", for comparing two.
    """
    return (
        catalog.computations(),
        catalog.streams("zeitgeist"),
        catalog.subscriptions("zeitgeist"),
        catalog.intervals(closed=True),
        [catalog.leases(interval) for interval in (ALL, LEFT, RIGHT)],
        catalog.input_positions(),
        catalog.supersteps(),
        catalog.watermarks("zeitgeist"),
        [(each.name, each.version, each.released_us) for each in catalog.savepoints(released=True)],
    )
