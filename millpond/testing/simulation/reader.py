"""Readers of a simulated store, without faults."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from millpond.executor.pipeline.nodes import DEAD_LETTERS
from millpond.executor.pipeline.topology import Topology
from millpond.executor.sinks.sink import DeltaSink
from millpond.statestore.log.log import Log
from millpond.statestore.log.snapshot import load
from millpond.statestore.types import Objects, TableVersion
from millpond.statestore.view import RowsView
from millpond.testing.simulation.workload import End, Sent
from millpond.testing.simulation.world import ROWS, World


def read_states(world: World, topology: Topology, version: int) -> dict[str, dict[str, Any]]:
    """Decoded states by computation and key, at a table version."""
    disk = world.disk(ROWS)
    snapshot = load(Log(disk), TableVersion(version))
    states: dict[str, dict[str, Any]] = {}
    for name, node in topology.computations.items():
        column = "state" if node.computation.codec.is_text else "state_bytes"
        rows = RowsView.of(snapshot, disk, name).to_arrow()
        pairs = zip(rows.column("key").to_pylist(), rows.column(column).to_pylist(), strict=True)
        states[name] = {
            key: node.computation.codec.decode(state) for key, state in pairs if state is not None
        }
    return states


def read_end(
    world: World,
    topology: Topology,
    sent: Sequence[Sent],
    before: Mapping[str, Sequence[Mapping[str, Any]]],
    undone: Sequence[tuple[int, int]],
) -> End:
    """The final state of the store and its sinks.

    Args:
        world: has the disks.
        topology: the pipeline's.
        sent: all records.
        before: rows that count as the sinks' first rows.
        undone: first and last of supersteps whose deliveries do not count.
    """
    disk = world.disk(ROWS)
    newest = load(Log(disk))
    letters = RowsView.of(newest, disk, DEAD_LETTERS).to_arrow().column("state").to_pylist()
    sinks = {
        name: [*before.get(name, ()), *read_sink(world, name, undone=undone)]
        for name, node in topology.sinks.items()
        if isinstance(node.sink, DeltaSink)
    }
    return End(
        sent=sent,
        states=read_states(world, topology, newest.version),
        sinks=sinks,
        letters=[orjson.loads(letter) for letter in letters],
    )


def read_sink(
    world: World, name: str, *, undone: Sequence[tuple[int, int]] = (), until: int | None = None
) -> list[Mapping[str, Any]]:
    """A sink's rows in the order of its commits, with JSON text decoded.

    Args:
        world: has the disk.
        name: the sink's.
        undone: first and last of supersteps that are left out.
        until: the first superstep that is left out, with all later ones.
    """
    disk = world.disk(name)
    return [
        _decoded(row)
        for path in live_files(disk)
        for at in (superstep_of(path),)
        if not any(first <= at <= last for first, last in undone) and (until is None or at < until)
        for row in pq.read_table(pa.BufferReader(disk.get(path)), use_threads=False).to_pylist()
    ]


def live_files(disk: Objects) -> list[str]:
    """The files of a table whose log nothing cleans up, oldest first, from the plain JSON of its commits."""
    live: dict[str, None] = {}
    for path in disk.list("_delta_log"):
        if path.endswith(".json"):
            for line in disk.get(path).splitlines():
                action = orjson.loads(line)
                if "remove" in action:
                    live.pop(action["remove"]["path"], None)
                if "add" in action:
                    live[action["add"]["path"]] = None
    return list(live)


def superstep_of(path: str) -> int:
    """The superstep in the name of a sink's file."""
    return int(path.rsplit("-", 2)[1])


def _decoded(row: Mapping[str, Any]) -> Mapping[str, Any]:
    value = row.get("value")
    return {**row, "value": orjson.loads(value)} if isinstance(value, str) else row
