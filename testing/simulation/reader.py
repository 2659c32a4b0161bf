"""
Readers of a simulated store, without faults.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from millpond.executor.pipeline.names import DEAD_LETTERS
from millpond.executor.pipeline.topology import Topology
from millpond.executor.sinks.sink import DeltaSink
from millpond.statestore.log.log import Log
from millpond.statestore.log.snapshot import load
from millpond.statestore.types import TableVersion
from millpond.statestore.view import RowsView
from millpond.testing.simulation.workload import End, Sent
from millpond.testing.simulation.world import ROWS, World

__all__ = ["read_end", "read_states"]


def read_states(world: World, topology: Topology, version: int) -> dict[str, dict[str, Any]]:
    """
    Decoded states by computation and key, at a table version.
    """
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


def read_end(world: World, topology: Topology, sent: Sequence[Sent]) -> End:
    """
    The final state of the store and its sinks.
    """
    disk = world.disk(ROWS)
    newest = load(Log(disk))
    letters = RowsView.of(newest, disk, DEAD_LETTERS).to_arrow().column("state").to_pylist()
    sinks = {
        name: _read_sink(world, name)
        for name, node in topology.sinks.items()
        if isinstance(node.sink, DeltaSink)
    }
    return End(
        sent=sent,
        states=read_states(world, topology, newest.version),
        sinks=sinks,
        letters=[orjson.loads(letter) for letter in letters],
    )


def _read_sink(world: World, name: str) -> list[Mapping[str, Any]]:
    """
    A sink's rows in the order of its commits, with JSON text decoded.
    """
    disk = world.disk(name)
    log = Log(disk)
    rows: list[Mapping[str, Any]] = []
    latest = log.latest_version()
    for version in range(0 if latest is None else latest + 1):
        data = log.read(TableVersion(version)) or b""
        for line in data.splitlines():
            add = orjson.loads(line).get("add")
            if add is not None:
                table = pq.read_table(pa.BufferReader(disk.get(add["path"])), use_threads=False)
                rows += [_decoded(row) for row in table.to_pylist()]
    return rows


def _decoded(row: Mapping[str, Any]) -> Mapping[str, Any]:
    value = row.get("value")
    return {**row, "value": orjson.loads(value)} if isinstance(value, str) else row
