"""Appends a stream to a Delta table: one file and one commit per superstep."""

from __future__ import annotations

import pyarrow as pa

from millpond.executor.sinks.columns import SINK_SCHEMA, ColumnWatch, SinkRecord, sink_table
from millpond.executor.sinks.delta_table import open_table, write_sink_file
from millpond.statestore.log.table import append
from millpond.statestore.types import Clock, Objects, Rng, Superstep


class DeltaSinkWriter:
    """Appends supersteps to one Delta table: one file and one commit each; `SINK_SCHEMA` without a schema."""

    def __init__(
        self,
        objects: Objects,
        clock: Clock,
        rng: Rng,
        *,
        name: str,
        record: SinkRecord,
        schema: pa.Schema | None,
    ) -> None:
        self._objects = objects
        self._clock = clock
        self._rng = rng
        self._name = name
        self._record = record
        self._schema = schema
        self._watch = ColumnWatch(schema, name)
        self._writer = open_table(objects, clock, rng, name, SINK_SCHEMA if schema is None else schema)
        record.check_on_opening(self._writer.snapshot, objects.url)

    @property
    def delivered(self) -> Superstep:
        return self._record.delivered(self._writer.snapshot.txns)

    def write(self, superstep: Superstep, productions: pa.Table) -> None:
        if superstep <= self.delivered or not productions.num_rows:
            return
        table = sink_table(productions, self._schema, self._name, self._watch)
        add = write_sink_file(self._objects, self._clock, self._rng, self._name, superstep, table)
        append(
            self._writer,
            (add,),
            txns={self._record.app_id: superstep},
            metadata={"sink": self._name, "superstep": superstep},
            rows=table.num_rows,
            guard=self._record.check,
        )
