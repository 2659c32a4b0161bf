"""What a pipeline is called: the name in its code, and the one under which the store has it.

Input positions, totals, watermarks, fences, dead letters and the tables of sinks have the pipeline's first name in them,
some of them in files and in other tables. So a rename moves nothing: the commit that takes the pipeline's intervals
records what it is called from then on, and all else stays under the name that the store knows.
"""

from __future__ import annotations

from dataclasses import replace

from millpond.executor.pipeline.names import DEAD_LETTERS
from millpond.executor.pipeline.positions import current_name
from millpond.executor.pipeline.topology import Topology
from millpond.statestore.app_ids import pipeline_name_app_id, supersteps_of
from millpond.statestore.errors import InvalidError
from millpond.statestore.log.snapshot import Snapshot


def as_stored(topology: Topology, snapshot: Snapshot) -> Topology:
    """The pipeline under the name by which the store knows it; as it is if the store does not know it.

    Raises:
        InvalidError: the store has a pipeline under either name, or the one that is meant has another name by now.
    """
    stored = _stored_pipelines(snapshot)
    by_name = {current_name(snapshot.txns, pipeline): pipeline for pipeline in stored}
    name, former = topology.title, topology.renamed_from
    if name in by_name:
        if former in by_name:
            raise InvalidError(
                "the store has a pipeline under either name: remove renamed_from= to go on with this one",
                pipeline=name,
                renamed_from=former,
            )
        return replace(topology, name=by_name[name], declared_name=name)
    if former in by_name:
        return replace(topology, name=by_name[former], declared_name=name)
    for other in (former, name):
        if other in stored:
            raise InvalidError(
                "the pipeline that had this name in the store has another one by now: use that, or say it in "
                "renamed_from= of the pipeline",
                pipeline=name,
                former=other,
                now=current_name(snapshot.txns, other),
            )
    return topology


def name_records(topology: Topology, snapshot: Snapshot) -> dict[str, int]:
    """The position that records what the pipeline is called; none where the table says the same.

    Raises:
        InvalidError: another process has renamed it meanwhile.
    """
    stored, title = topology.name, topology.title
    current = current_name(snapshot.txns, stored)
    if current == title:
        return {}
    if current != topology.renamed_from:
        raise InvalidError(
            "another process has renamed the pipeline meanwhile", pipeline=title, former=stored, now=current
        )
    return {pipeline_name_app_id(stored, title): snapshot.version + 1}


def _stored_pipelines(snapshot: Snapshot) -> frozenset[str]:
    """The pipelines that have run in the store, or at least opened, by the names that the store has for them."""
    opened = (interval.low.removesuffix("/") for interval in snapshot.live_intervals(DEAD_LETTERS))
    return frozenset([*supersteps_of(snapshot.txns), *opened])
