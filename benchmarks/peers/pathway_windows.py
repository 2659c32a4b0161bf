"""The windowed sum as tumbling windows of Pathway, each emitted once, at its end.

Pathway reads the records from one CSV file, which costs it less than records from Python.
"""

from __future__ import annotations

from benchmarks.peers.contract import WINDOW_US, Answer, Task, answer_tasks
from benchmarks.peers.pathway_run import pathway, run_pathway


def windows(records: pathway.Table) -> pathway.Table:
    """Return the panes: ``key``, ``start`` and ``total``."""
    grouped = records.windowby(
        records.at,
        window=pathway.temporal.tumbling(duration=WINDOW_US),
        instance=records.key,
        behavior=pathway.temporal.exactly_once_behavior(),
    )
    return grouped.reduce(
        key=pathway.this._pw_instance,
        start=pathway.this._pw_window_start,
        total=pathway.reducers.sum(pathway.this.value),
    )


def run(task: Task) -> Answer:
    """Run the query over the whole input."""
    return run_pathway(task, windows)


if __name__ == "__main__":
    answer_tasks(run)
