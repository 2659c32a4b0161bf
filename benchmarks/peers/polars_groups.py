"""The windowed sum as one group-by of Polars over all records at once: the bound that no engine with state reaches."""

from __future__ import annotations

import polars as pl
import pyarrow as pa

from benchmarks.peers.contract import WINDOW_US, Answer, Task, answer_tasks, batches_of, used_seconds


def run(task: Task) -> Answer:
    """Group the whole input; with ids, drop repeated ones first."""
    records = pl.from_arrow(pa.concat_tables(batches_of(task)))
    before = used_seconds()
    if task.with_ids:
        records = records.unique("id", maintain_order=False)
    start = pl.col("at").dt.epoch("us") // WINDOW_US * WINDOW_US
    panes = records.group_by("key", start.alias("start")).agg(total=pl.col("value").sum())
    return Answer(used_seconds() - before, panes.to_arrow())


if __name__ == "__main__":
    answer_tasks(run)
