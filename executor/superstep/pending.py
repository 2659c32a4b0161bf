"""Pending productions: the unconsumed productions of the last superstep.

Superstep *n + 1* delivers every production of superstep *n*, so there is never more than one superstep's worth. After
a restart they are recovered from the committed files.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from millpond.executor.inputs.positions import claimed_by, superstep_of
from millpond.executor.interval.bundle import ProductionSummary
from millpond.executor.pipeline.nodes import addressed, control_interval
from millpond.executor.pipeline.topology import Topology
from millpond.executor.superstep.delivery import ProductionSource, read_productions, summarise_productions
from millpond.statestore.interval import Interval
from millpond.statestore.log.files import LiveFile
from millpond.statestore.log.snapshot import Snapshot
from millpond.statestore.rows.files import RowFile, write_row_file
from millpond.statestore.rows.row import ROW_SCHEMA, Fence
from millpond.statestore.store import Store
from millpond.statestore.types import Superstep

_FOR_SINKS: Final = addressed("")


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingProductions:
    """The files of undelivered productions that have a consumer, with the number and age of all by stream."""

    sources: tuple[ProductionSource, ...] = ()
    summaries: Mapping[str, ProductionSummary] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """The number of waiting productions; productions kept only for sinks have been delivered."""
        return sum([one.count for stream, one in self.summaries.items() if not stream.endswith(_FOR_SINKS)])


def pending_of(
    written: Iterable[tuple[RowFile | None, Sequence[ProductionSummary]]],
    topology: Topology,
    superstep: Superstep,
) -> PendingProductions:
    """Return the undelivered productions of a committed superstep, from its files and their summaries."""
    sources: list[ProductionSource] = []
    all_summaries: list[ProductionSummary] = []
    for file, summaries in written:
        all_summaries += summaries
        if file is not None and summaries:
            streams = frozenset([summary.stream for summary in summaries])
            sources.append(ProductionSource(path=file.path, superstep=superstep, streams=streams))
    return _pending(sources, all_summaries, topology)


def recover_pending(store: Store, topology: Topology, superstep: Superstep) -> PendingProductions:
    """Return the undelivered productions of the last committed superstep, from the committed files."""
    if not superstep:
        return PendingProductions()
    snapshot = store.committer.snapshot
    control = control_interval(topology.name)
    # Former computations count: their productions are committed, so their consumers must get them.
    producers = claimed_by(snapshot.txns, topology.name) | topology.computations.keys()
    sources: list[ProductionSource] = []
    summaries: list[ProductionSummary] = []
    for file in undelivered_sources(snapshot, producers, control, superstep):
        stored = read_productions(store.objects, [file])
        source = replace(file, renames=_stream_renames(stored, topology))
        summaries_of_file = summarise_productions(source.current(stored), topology.percentiles)
        if summaries_of_file:
            streams = frozenset(summary.stream for summary in summaries_of_file)
            sources.append(replace(source, streams=streams))
            summaries.extend(summaries_of_file)
    return _pending(sources, summaries, topology)


def _stream_renames(productions: pa.Table, topology: Topology) -> tuple[tuple[str, str], ...]:
    streams = pc.unique(productions.column("stream")).to_pylist()
    pairs = ((stream, topology.current_stream(stream)) for stream in streams)
    return tuple((stored, current) for stored, current in pairs if stored != current)


def _pending(
    sources: Iterable[ProductionSource], summaries: Iterable[ProductionSummary], topology: Topology
) -> PendingProductions:
    merged: dict[str, ProductionSummary] = {}
    for summary in summaries:
        known = merged.get(summary.stream)
        merged[summary.stream] = summary if known is None else _sum(known, summary)
    wanted = [source for source in sources if source.concerns(topology.wanted_addresses)]
    return PendingProductions(sources=tuple(wanted), summaries=merged)


def _sum(left: ProductionSummary, right: ProductionSummary) -> ProductionSummary:
    return ProductionSummary(
        stream=left.stream,
        count=left.count + right.count,
        oldest_at=min(left.oldest_at, right.oldest_at),
        # The same share is left out of each part, so at most the same share of the whole.
        percentile_oldest_at={
            percentile: min(at, right.percentile_oldest_at.get(percentile, right.oldest_at))
            for percentile, at in left.percentile_oldest_at.items()
        },
    )


def undelivered_sources(
    snapshot: Snapshot, computations: Iterable[str], control: Interval, superstep: Superstep
) -> tuple[ProductionSource, ...]:
    """Return the files that may hold productions of ``superstep``, the last committed superstep.

    Superstep *n* delivers every production of earlier supersteps, so only the last superstep's productions can be
    undelivered. Files that another program rewrote carry no tags; a file is included if its range of supersteps
    reaches that far. The order is by computation and then by key, as in a run, so that a restart keeps the order of
    arrival. The ``control`` interval holds the dead letters.
    """
    files: list[tuple[LiveFile, Interval | None]] = [(file, control) for file in snapshot.files_of(control)]
    for computation in sorted(computations):
        files += [(file, None) for file in sorted(snapshot.files_in(computation), key=_by_key)]
    return tuple(
        ProductionSource(path=file.path, superstep=superstep, interval=interval)
        for file, interval in files
        if file.productions != 0 and (file.max_superstep is None or file.max_superstep >= superstep)
    )


def undelivered_of(
    snapshot: Snapshot, pipeline: str, computations: Iterable[str]
) -> tuple[ProductionSource, ...]:
    """Return the files of some computations that may hold undelivered productions."""
    control, superstep = control_interval(pipeline), superstep_of(snapshot.txns, pipeline)
    sources = undelivered_sources(snapshot, computations, control, superstep)
    return tuple(source for source in sources if source.interval is None)


def keep_undelivered(
    store: Store,
    pipeline: str,
    computations: Iterable[str],
    *,
    fence: Fence,
    token: str,
) -> RowFile | None:
    """Write undelivered productions of computations to an uncommitted file of the pipeline's own interval.

    The file outlives the computations' rows. The row that carries the productions is deleted in the same update, so
    that no reader of rows sees it.
    """
    snapshot = store.committer.snapshot
    superstep = superstep_of(snapshot.txns, pipeline)
    productions = read_productions(store.objects, undelivered_of(snapshot, pipeline, computations))
    if not productions.num_rows:
        return None
    row = {
        "key": f"{pipeline}/dropped/{superstep:010d}",
        "sequencer": fence.sequencer,
        "commit_number": fence.commit_number,
        "superstep": superstep,
        "productions": productions.to_pylist(),
        "deleted": True,
    }
    return write_row_file(
        store.objects,
        control_interval(pipeline),
        pa.Table.from_pylist([row], schema=ROW_SCHEMA),
        superstep=superstep,
        fence=fence,
        token=token,
        row_format=store.row_format,
    )


def _by_key(file: LiveFile) -> tuple[str, int, str]:
    return file.min_key or "", file.added_version, file.path
