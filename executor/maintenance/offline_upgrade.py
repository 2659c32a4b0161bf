"""Offline upgrade: every row whose state earlier code wrote gets the form that today's code keeps.

It opens the stopped pipeline as a run does, with leases and fences, and commits the upgraded states in batches as row
updates. After a kill, the committed rows have today's version, so the next call skips them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from millpond.executor.computation.computation import upgrade
from millpond.executor.computation.state import Encoded, FormerState, StateLayout
from millpond.executor.inputs.positions import superstep_of
from millpond.executor.ownership.evolution import as_stored, check_states, plan_evolution
from millpond.executor.ownership.ownership import OwnedNames, Ownership
from millpond.executor.pipeline.nodes import ComputationNode
from millpond.executor.pipeline.topology import Topology
from millpond.gc.compaction import stretches
from millpond.statestore.errors import InvalidError
from millpond.statestore.interval import Interval
from millpond.statestore.leases.lease import exclusive
from millpond.statestore.log.files import LiveFile
from millpond.statestore.log.rules import CommitRequest, IntervalWrite
from millpond.statestore.log.snapshot import Snapshot
from millpond.statestore.rows.files import Run, open_runs, read_row_files, write_row_file
from millpond.statestore.rows.merge import combine_updates, with_whole_sums
from millpond.statestore.rows.row import ROW_SCHEMA, STATE_VERSION, Fence, has_state, with_texts
from millpond.statestore.rows.row_format import ParquetRowFormat
from millpond.statestore.store import Store
from millpond.statestore.types import Clock, Rng

FAILURES_NAMED_MAX: Final = 20
"""Number of rows per computation whose failed upgrade is reported by key."""

_ROWS_AT_ONCE: Final = 20_000
"""Number of rows that one commit upgrades."""

_BYTES_AT_ONCE: Final = 1 << 26
"""An interval whose files are larger together is read through the local disk."""

_PAUSE_TIMEOUT_MS: Final = 60_000.0


@dataclass(slots=True, kw_only=True)
class Upgraded:
    """The upgrade of a computation's rows, done or planned.

    ``rows`` were upgraded, ``current`` needed no upgrade, and ``failed`` stay unchanged; ``failures`` has the first of them,
    as key and reason.
    """

    computation: str
    state_version: int
    rows: int = 0
    current: int = 0
    failed: int = 0
    failures: list[tuple[str, str]] = field(default_factory=list)


def upgrade_offline(
    store: Store,
    topology: Topology,
    clock: Clock,
    rng: Rng,
    *,
    computations: Collection[str] = (),
    dry_run: bool = False,
    on_progress: Callable[[int], None] | None = None,
) -> list[Upgraded]:
    """Upgrade the states of all rows of a stopped pipeline; return the result of each computation.

    By default it upgrades every computation that declares a version. A dry run only reads and calls the code. ``on_progress``
    gets each piece's number of rows.

    Raises:
        ConflictError: the pipeline is running, or another process repairs the store or collects its garbage offline.
        InvalidError: a computation is unknown or declares no version, the pipeline's code does not fit the store, or
            it renames or drops computations, which its next start has to do first.
    """
    nodes = _chosen(topology, computations)
    if dry_run:
        snapshot = store.snapshot()
        _check(as_stored(topology, snapshot), snapshot, store)
        return [_Upgrade(store, node, on_progress).look(snapshot) for node in nodes]
    # A repair would replace the rows under the upgrade, and a collection take its files for orphans.
    with exclusive(store.leases):
        snapshot = store.committer.refresh()
        topology = as_stored(topology, snapshot)
        _check(topology, snapshot, store)
        owner = Ownership(
            store, topology, clock=clock, intervals=1, on_held="refuse", pause_timeout_ms=_PAUSE_TIMEOUT_MS
        )
        owner.open()
        try:
            names = OwnedNames(rng, topology.name, lambda: owner.control.fence.sequencer)
            return [_Upgrade(store, node, on_progress).write(owner, names, topology.name) for node in nodes]
        finally:
            owner.close()


def _chosen(topology: Topology, computations: Collection[str]) -> list[ComputationNode]:
    nodes = [topology.computation(name) for name in computations] or list(topology.computations.values())
    for node in nodes:
        if computations and not node.computation.state_version:
            raise InvalidError(
                "the computation declares no state_version, so there is nothing to upgrade to",
                computation=node.name,
            )
    return [node for node in nodes if node.computation.state_version]


def _check(topology: Topology, snapshot: Snapshot, store: Store) -> None:
    evolution = plan_evolution(topology, snapshot)
    if evolution:
        raise InvalidError(
            "the pipeline renames or drops computations: start it once, and upgrade then",
            pipeline=topology.name,
            renamed=dict(evolution.renames),
            dropped=sorted(evolution.drops),
        )
    check_states(topology, snapshot, evolution, store.objects)


class _Upgrade:
    def __init__(
        self, store: Store, node: ComputationNode, on_progress: Callable[[int], None] | None
    ) -> None:
        self._store = store
        self._node = node
        self._on_progress = on_progress
        self._done = Upgraded(computation=node.name, state_version=node.computation.state_version)

    def look(self, snapshot: Snapshot) -> Upgraded:
        """Call the code for each former state, and discard the result."""
        for interval in snapshot.live_intervals(self._node.name):
            for rows in self._former(interval, snapshot.files_of(interval)):
                self._upgraded(rows)
        return self._done

    def write(self, owner: Ownership, rng: Rng, pipeline: str) -> Upgraded:
        for owned in owner.of(self._node.name):
            interval = owned.interval
            snapshot = self._store.committer.snapshot
            superstep = superstep_of(snapshot.txns, pipeline)
            for rows in self._former(interval, snapshot.files_of(interval)):
                table = self._updates(rows, owned.next_fence)
                if not table.num_rows:
                    continue
                file = write_row_file(
                    self._store.objects,
                    interval,
                    table,
                    superstep=superstep,
                    fence=owned.next_fence,
                    token=rng.token(),
                    row_format=self._store.row_format,
                )
                write = IntervalWrite(interval=interval, fence=owned.next_fence, added=(file,))
                request = CommitRequest(
                    kind="upgrade",
                    writes=(write,),
                    metadata={"pipeline": pipeline, "computation": self._node.name},
                )
                owner.commit(request)
        return self._done

    def _former(self, interval: Interval, files: tuple[LiveFile, ...]) -> Iterator[pa.Table]:
        """Yield the rows of an interval whose states earlier code wrote, in pieces, keys rising."""
        for updates in self._pieces(interval, files):
            rows = with_texts(with_whole_sums(combine_updates(updates)))
            versions = pc.fill_null(rows.column(STATE_VERSION), 0).to_numpy()
            states = has_state(rows)
            is_former = states & (versions < self._node.computation.state_version)
            self._done.current += int((states & ~is_former).sum())
            former = rows.filter(pa.array(is_former))
            for start in range(0, former.num_rows, _ROWS_AT_ONCE):
                yield former.slice(start, _ROWS_AT_ONCE)
            if self._on_progress is not None:
                self._on_progress(updates.num_rows)

    def _pieces(self, interval: Interval, files: tuple[LiveFile, ...]) -> Iterator[pa.Table]:
        paths = [file.path for file in files]
        is_small = sum(file.size_bytes for file in files) <= _BYTES_AT_ONCE
        if is_small or not isinstance(self._store.row_format, ParquetRowFormat):
            yield read_row_files(self._store.objects, paths, interval=interval)
            return
        with ExitStack() as opened:
            folder = Path(opened.enter_context(TemporaryDirectory(prefix="millpond-upgrade-")))
            runs: list[Run] = []
            for number, path in enumerate(paths):
                scratch = folder / str(number)
                scratch.mkdir()
                batch_bytes = max(_BYTES_AT_ONCE // len(paths), 1 << 20)
                runs += open_runs(
                    self._store.objects, path, interval=interval, scratch=scratch, batch_bytes=batch_bytes
                )
            yield from stretches(runs)

    def _upgraded(self, rows: pa.Table) -> dict[int, Encoded]:
        """Return the new states by row number, without the rows that cannot be upgraded."""
        done, node, states = self._done, self._node, {}
        columns = (rows.column(name).to_pylist() for name in ("key", "state", "state_bytes", STATE_VERSION))
        for number, (key, text, blob, version) in enumerate(zip(*columns, strict=True)):
            former = FormerState(blob if text is None else text, version or 0)
            try:
                upgraded = upgrade(node.computation, node.name, key, former).upgraded
            except InvalidError as error:
                done.failed += 1
                if len(done.failures) < FAILURES_NAMED_MAX:
                    done.failures.append((key, str(error.details.get("reason", error))))
                continue
            if upgraded is not None:
                states[number] = upgraded
        done.rows += len(states)
        return states

    def _updates(self, rows: pa.Table, fence: Fence) -> pa.Table:
        """Return row updates that change only the state and its version."""
        states = self._upgraded(rows)
        kept = rows.take(pa.array(list(states), pa.int64()))
        count = kept.num_rows
        layout = StateLayout.of(self._node.computation)
        columns: dict[str, Any] = {
            "key": kept.column("key"),
            "sequencer": pa.array(np.full(count, fence.sequencer, np.int64)),
            "commit_number": pa.array(np.full(count, fence.commit_number, np.int64)),
            "superstep": kept.column("superstep"),
            # The last update's hold is the row's.
            "hold": kept.column("hold"),
            "deleted": pa.array(np.zeros(count, np.bool_)),
            STATE_VERSION: pa.array(np.full(count, layout.version, np.int32)),
            **layout.arrays(list(states.values())),
        }
        schema = ROW_SCHEMA if layout.column is None else ROW_SCHEMA.append(layout.column)
        nothing = {column.name: pa.nulls(count, column.type) for column in schema}
        return pa.Table.from_arrays([(nothing | columns)[name] for name in schema.names], schema=schema)
