"""Sinks into tables, sent to simulated disks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from millpond.executor.pipeline.pipeline import EnginePipeline
from millpond.executor.sinks.columns import SinkRecord
from millpond.executor.sinks.delta_table import DeltaSinkWriter
from millpond.executor.sinks.sink import DeltaSink
from millpond.statestore.types import Clock, Objects, Rng


@dataclass(frozen=True, slots=True, eq=False)
class SimulatedSink:
    """A `DeltaSink` whose table is on a simulated disk.

    Attributes:
        sink: whose columns it has.
        disk: opens the disk of a sink's name.
        clock: for writers that are given none.
        rng: likewise.
    """

    sink: DeltaSink
    disk: Callable[[str], Objects]
    clock: Clock
    rng: Rng

    @property
    def identity(self) -> str:
        """The table, as its sink names it."""
        return self.sink.identity

    def open(
        self, store_id: str, pipeline: str, name: str, *, clock: Clock | None = None, rng: Rng | None = None
    ) -> DeltaSinkWriter:
        """Open the table for the first incarnation of a store."""
        return self.open_for(SinkRecord.of_store(store_id, pipeline, name), clock=clock, rng=rng)

    def open_for(
        self, record: SinkRecord, *, clock: Clock | None = None, rng: Rng | None = None
    ) -> DeltaSinkWriter:
        """Open the table for the sink remembered under this record."""
        return DeltaSinkWriter(
            self.disk(record.name),
            clock or self.clock,
            rng or self.rng,
            name=record.name,
            record=record,
            schema=self.sink.schema,
        )


def simulate_sinks(pipeline: EnginePipeline, disk: Callable[[str], Objects], clock: Clock, rng: Rng) -> None:
    """Send the pipeline's sinks into tables to simulated disks."""
    sinks = pipeline._sinks  # noqa: SLF001 - a declared sink says a path, and a simulated disk has none
    for name, node in sinks.items():
        if isinstance(node.sink, DeltaSink):
            sinks[name] = replace(node, sink=SimulatedSink(node.sink, disk, clock, rng))
