"""Claims: what the commit that takes intervals records about their computations, and what its leases must exceed."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from millpond.executor.ownership.stored_states import state_records
from millpond.executor.pipeline.positions import conflicting_pipeline, id_slack_position, stream_number
from millpond.executor.pipeline.topology import Topology
from millpond.statestore.app_ids import bare_ids_app_id, claim_app_id, id_slack_app_id, pipeline_number
from millpond.statestore.errors import InvalidError
from millpond.statestore.interval import Interval
from millpond.statestore.log.snapshot import Snapshot
from millpond.statestore.rows.row import Fence
from millpond.statestore.store import Store
from millpond.statestore.types import Sequencer


def refuse_claimed(positions: Mapping[str, int], pipeline: str, computations: Iterable[str]) -> None:
    """Refuse computations whose rows another pipeline of the store has.

    Raises:
        InvalidError: names the first of them, and the pipeline that it belongs to.
    """
    for name in sorted(computations):
        rival = conflicting_pipeline(positions, pipeline, name)
        if rival is not None:
            raise InvalidError(
                "the computation's rows belong to another pipeline of this store: choose another name, or, if the "
                "pipeline has a new one, say the former in renamed_from= of the pipeline",
                computation=name,
                pipeline=pipeline,
                belongs_to=rival,
            )


def claims_of(
    store: Store, topology: Topology, names: frozenset[str], moved: frozenset[str]
) -> dict[str, int]:
    """The positions of the commit that takes intervals of some computations, which no other pipeline may have.

    Args:
        store: the open store.
        topology: the checked pipeline.
        names: the computations.
        moved: those that receive the rows of others, which have scoped ids already.

    Raises:
        InvalidError: a computation belongs to another pipeline of the store.
    """
    pipeline, positions = topology.name, store.committer.snapshot.txns
    refuse_claimed(positions, pipeline, names)
    claims = {claim_app_id(name): pipeline_number(pipeline) for name in sorted(names)}
    claims |= store.lineage.unrecorded_location(store.path)
    for name in sorted((names & topology.computations.keys()) - moved):
        stream = topology.bare_stream(name)
        if stream is not None and bare_ids_app_id(name) not in positions:
            claims[bare_ids_app_id(name)] = stream_number(stream)
        slack = id_slack_app_id(name)
        if stream is not None:
            claims[slack] = id_slack_position(positions.get(slack), topology.id_slack_us(name))
    return claims | state_records(topology, store.committer.snapshot, names)


def sequencers_before(
    snapshot: Snapshot,
    intervals: Iterable[Interval],
    replaced: Collection[Interval],
    above: Mapping[Interval, Interval],
) -> dict[Interval, Sequencer]:
    """By interval, the sequencer that its new lease must exceed.

    Args:
        snapshot: the table.
        intervals: those that are taken.
        replaced: those whose keys they take over.
        above: by interval, the one whose rows it receives.
    """
    wanted = {interval: _stored_sequencer(snapshot.fence_of(interval)) for interval in intervals}
    former = [*above.items(), *((by, one) for by in wanted for one in replaced if one.overlaps(by))]
    for interval, one in former:
        wanted[interval] = max(wanted[interval], _stored_sequencer(snapshot.fence_of(one)))
    return wanted


def _stored_sequencer(fence: Fence | None) -> Sequencer:
    return Sequencer(0) if fence is None else fence.sequencer
