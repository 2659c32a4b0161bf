"""Pending productions after a restart: the unconsumed productions of the last superstep, from the committed files.

Superstep *n + 1* delivers every production of superstep *n*, so there is never more than one superstep's worth.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pyarrow as pa
import pyarrow.compute as pc

from millpond.executor.inputs.positions import claimed_by, superstep_of
from millpond.executor.interval.bundle import ProductionSummary
from millpond.executor.pipeline.nodes import control_interval
from millpond.executor.pipeline.topology import Topology
from millpond.executor.superstep.delivery import (
    PendingProductions,
    ProductionSource,
    merged_pending,
    read_productions,
    summarise_productions,
)
from millpond.statestore.interval import Interval
from millpond.statestore.log.files import LiveFile
from millpond.statestore.log.snapshot import Snapshot
from millpond.statestore.rows.files import RowFile, write_row_file
from millpond.statestore.rows.row import ROW_SCHEMA, Fence, with_value_texts
from millpond.statestore.store import Store
from millpond.statestore.types import Objects, Superstep


def recover_pending(
    snapshot: Snapshot, row_files: Objects, topology: Topology, superstep: Superstep
) -> PendingProductions:
    if not superstep:
        return PendingProductions()
    control = control_interval(topology.name)
    # Former computations count: their productions are committed, so their consumers must get them.
    producers = claimed_by(snapshot.txns, topology.name) | topology.computations.keys()
    sources: list[ProductionSource] = []
    summaries: list[ProductionSummary] = []
    for file in undelivered_sources(snapshot, producers, control, superstep):
        stored = read_productions(row_files, [file])
        streams_of_file = pc.unique(stored.column("stream")).to_pylist()
        pairs = ((stream, topology.current_stream(stream)) for stream in streams_of_file)
        source = replace(file, renames=tuple((former, name) for former, name in pairs if former != name))
        summaries_of_file = summarise_productions(source.current(stored), topology.percentiles)
        if summaries_of_file:
            streams = frozenset(summary.stream for summary in summaries_of_file)
            sources.append(replace(source, streams=streams))
            summaries.extend(summaries_of_file)
    return merged_pending(sources, summaries, topology)


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
        by_key = sorted(
            snapshot.files_in(computation),
            key=lambda file: (file.min_key or "", file.added_version, file.path),
        )
        files += [(file, None) for file in by_key]
    return tuple(
        ProductionSource(path=file.path, superstep=superstep, interval=interval)
        for file, interval in files
        if file.productions != 0 and (file.max_superstep is None or file.max_superstep >= superstep)
    )


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
    control, superstep = control_interval(pipeline), superstep_of(snapshot.txns, pipeline)
    sources = undelivered_sources(snapshot, computations, control, superstep)
    productions = read_productions(store.objects, [one for one in sources if one.interval is None])
    if not productions.num_rows:
        return None
    row = {
        "key": f"{pipeline}/dropped/{superstep:010d}",
        "sequencer": fence.sequencer,
        "commit_number": fence.commit_number,
        "superstep": superstep,
        "productions": with_value_texts(productions).to_pylist(),
        "deleted": True,
    }
    return write_row_file(
        store.objects,
        control,
        pa.Table.from_pylist([row], schema=ROW_SCHEMA),
        superstep=superstep,
        fence=fence,
        token=token,
        row_format=store.row_format,
    )
