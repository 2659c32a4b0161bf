"""What an update of a running pipeline has done."""

from __future__ import annotations

from dataclasses import dataclass

from millpond.executor.ownership.catalog_recorder import definition_of
from millpond.executor.pipeline.topology import Topology
from millpond.statestore.catalog.topology_change import TopologyChange, change_between
from millpond.statestore.errors import InvalidError
from millpond.statestore.types import TableVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineUpdate:
    """An update of a running pipeline, which has taken effect.

    Attributes:
        version: the table version from which on the changed pipeline runs.
        pause_ms: how long no superstep could run.
        change: what is new, gone and different.
    """

    version: int
    pause_ms: float
    change: TopologyChange


def refuse_other_pipeline(topology: Topology, present: Topology) -> None:
    """Refuse an update to a pipeline of another name, which has other positions in the store.

    Raises:
        InvalidError: the names differ.
    """
    if topology.name != present.name:
        raise InvalidError(
            "an update keeps the pipeline's name, under which the store has its inputs and its time",
            pipeline=present.name,
            given=topology.name,
        )


def update_between(
    former: Topology, present: Topology, version: TableVersion, elapsed_us: int
) -> PipelineUpdate:
    """The update from one topology to another.

    Args:
        former: the one before.
        present: the one that runs now.
        version: the commit that says so.
        elapsed_us: how long the update took.
    """
    change = change_between(definition_of(former), definition_of(present))
    return PipelineUpdate(version=version, pause_ms=elapsed_us / 1_000, change=change)
