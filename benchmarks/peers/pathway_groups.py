"""The windowed sum as a grouping of Pathway by key and number of the window, whose groups never end.

This is the fastest form of the sum in Pathway: no watermark, no end of a window, and memory that grows with the input.
"""

from __future__ import annotations

from benchmarks.peers.contract import WINDOW_US, Answer, Task, answer_tasks
from benchmarks.peers.pathway_run import pathway, run_pathway


def groups(records: pathway.Table) -> pathway.Table:
    """Return the sums: ``key``, ``start`` and ``total``."""
    numbered = records.select(records.key, records.value, start=records.at // WINDOW_US * WINDOW_US)
    return numbered.groupby(numbered.key, numbered.start).reduce(
        numbered.key, numbered.start, total=pathway.reducers.sum(numbered.value)
    )


def run(task: Task) -> Answer:
    """Run the query over the whole input."""
    return run_pathway(task, groups)


if __name__ == "__main__":
    answer_tasks(run)
