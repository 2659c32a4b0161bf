"""
Pending productions: the unconsumed productions of the last superstep.

Superstep *n + 1* delivers everything that superstep *n* produced, so there is never more than
one superstep's worth. After a restart it is found again in the committed files.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from millpond.executor.bundle.bundle import ProductionSummary
from millpond.executor.pipeline.names import control_interval
from millpond.executor.pipeline.positions import claimed_by
from millpond.executor.pipeline.topology import Topology
from millpond.executor.pipeline.weak import addressed
from millpond.executor.superstep.delivery import ProductionSource, read_productions, summarise_productions
from millpond.statestore.interval import Interval
from millpond.statestore.log.live_file import LiveFile
from millpond.statestore.log.snapshot import Snapshot
from millpond.statestore.rows.files import RowFile
from millpond.statestore.store import Store
from millpond.statestore.types import Superstep

__all__ = ["PendingProductions", "pending_of", "recover_pending", "undelivered_sources"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingProductions:
    """
    Where undelivered productions are, and how many and how old they are by stream.

    Attributes:
        sources: committed files that hold productions with a consumer.
        summaries: by stream, of all productions.
    """

    sources: tuple[ProductionSource, ...] = ()
    summaries: Mapping[str, ProductionSummary] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """
        How many productions wait; those that are kept for sinks only have been delivered.
        """
        delivered = addressed("")
        return sum(one.count for stream, one in self.summaries.items() if not stream.endswith(delivered))


def pending_of(
    written: Iterable[tuple[RowFile | None, Sequence[ProductionSummary]]],
    topology: Topology,
    superstep: Superstep,
) -> PendingProductions:
    """
    What a superstep that has just been committed leaves to deliver.

    Args:
        written: the committed files and what is in them.
        topology: the pipeline, which tells the streams with a consumer.
        superstep: the one that was committed.
    """
    sources = [
        ProductionSource(
            path=file.path, superstep=superstep, streams=frozenset(summary.stream for summary in made)
        )
        for file, made in written
        if file is not None and made
    ]
    return _pending(sources, [summary for _, made in written for summary in made], topology)


def recover_pending(store: Store, topology: Topology, superstep: Superstep) -> PendingProductions:
    """
    What the last committed superstep left to deliver, found in the committed files.

    Raises:
        DataError: a file is missing or its bytes are wrong.
    """
    if not superstep:
        return PendingProductions()
    snapshot = store.committer.snapshot
    control = control_interval(topology.name)
    # What a computation has produced is delivered even if the pipeline has it no more.
    producers = claimed_by(snapshot.txns, topology.name) | topology.computations.keys()
    sources: list[ProductionSource] = []
    summaries: list[ProductionSummary] = []
    for source in undelivered_sources(snapshot, producers, control, superstep):
        summaries_of_file = summarise_productions(
            read_productions(store.objects, [source]), topology.percentiles
        )
        if summaries_of_file:
            streams = frozenset(summary.stream for summary in summaries_of_file)
            sources.append(replace(source, streams=streams))
            summaries.extend(summaries_of_file)
    return _pending(sources, summaries, topology)


def _pending(
    sources: Iterable[ProductionSource], summaries: Iterable[ProductionSummary], topology: Topology
) -> PendingProductions:
    merged: dict[str, ProductionSummary] = {}
    for summary in summaries:
        known = merged.get(summary.stream)
        merged[summary.stream] = summary if known is None else _sum(known, summary)
    wanted = tuple(source for source in sources if source.concerns(topology.wanted_addresses))
    return PendingProductions(sources=wanted, summaries=merged)


def _sum(one: ProductionSummary, other: ProductionSummary) -> ProductionSummary:
    return ProductionSummary(
        stream=one.stream,
        count=one.count + other.count,
        oldest_at=min(one.oldest_at, other.oldest_at),
        # The same share is left out of each part, so no more than that of the whole.
        percentile_oldest_at={
            each: min(at, other.percentile_oldest_at.get(each, other.oldest_at))
            for each, at in one.percentile_oldest_at.items()
        },
    )


def undelivered_sources(
    snapshot: Snapshot, computations: Iterable[str], control: Interval, superstep: Superstep
) -> tuple[ProductionSource, ...]:
    """
    The files that may hold productions of ``superstep``, the last one committed.

    Superstep *n* delivers everything that earlier ones produced, so only the last one's
    productions can be undelivered. Files that another program rewrote carry no tags; they
    are included whenever their range of supersteps reaches that far. The order is that of the
    run itself, by computation and then by key, so that a restart changes no order of arrival.

    Args:
        snapshot: the table.
        computations: the pipeline's, those included that it has no more.
        control: the pipeline's own interval, which holds its dead letters.
        superstep: the last one.
    """
    files: list[tuple[LiveFile, Interval | None]] = [(file, control) for file in snapshot.files_of(control)]
    for computation in sorted(computations):
        files += [(file, None) for file in sorted(snapshot.files_in(computation), key=_by_key)]
    return tuple(
        ProductionSource(path=file.path, superstep=superstep, interval=interval)
        for file, interval in files
        if file.productions != 0 and (file.max_superstep is None or file.max_superstep >= superstep)
    )


def _by_key(file: LiveFile) -> tuple[str, int, str]:
    return file.min_key or "", file.added_version, file.path
