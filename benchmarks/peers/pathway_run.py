"""A run of Pathway from a CSV file to a CSV file."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pathway
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
from pathway.internals.parse_graph import G

from benchmarks.peers.contract import Answer, Task, batches_of, used_seconds


class Record(pathway.Schema):  # type: ignore[misc]
    """A record of the load."""

    key: str
    at: int
    value: int


def run_pathway(task: Task, query: Callable[[pathway.Table], pathway.Table]) -> Answer:
    """Run a query over the records, and return its rows after all retractions.

    Args:
        task: the run.
        query: makes a table with ``key``, ``start`` and ``total`` out of the records.
    """
    logging.disable(logging.INFO)
    source, sink = Path(task.work) / "records.csv", Path(task.work) / "panes.csv"
    records = pa.concat_tables(batches_of(task))
    records = records.set_column(1, "at", records["at"].cast(pa.int64()))
    pyarrow.csv.write_csv(records.select(["key", "at", "value"]), source)
    # Pathway runs all queries of a process; those of former tasks must not run again.
    G.clear()
    before = used_seconds()
    table = pathway.io.csv.read(str(source), schema=Record, mode="static")
    pathway.io.csv.write(query(table), str(sink))
    pathway.run(monitoring_level=pathway.MonitoringLevel.NONE)
    return Answer(used_seconds() - before, _rows_of(sink))


def _rows_of(sink: Path) -> pa.Table:
    changes = pyarrow.csv.read_csv(sink)
    totals = pc.multiply(changes["total"], changes["diff"])
    net = changes.set_column(changes.schema.get_field_index("total"), "total", totals)
    rows = net.group_by(["key", "start"]).aggregate([("total", "sum"), ("diff", "sum")])
    rows = rows.filter(pc.not_equal(rows["diff_sum"], 0)).select(["key", "start", "total_sum"])
    return rows.rename_columns(["key", "start", "total"])
