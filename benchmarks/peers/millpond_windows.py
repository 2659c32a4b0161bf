"""The windowed sum on Millpond: the pipeline of both runners, and a run of the local one."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa

import millpond as mp
from benchmarks.peers.contract import Answer, Task, answer_tasks, batches_of
from benchmarks.processor_time import used_seconds


def pipeline_of(task: Task, sink: Path) -> mp.Pipeline:
    """Return the pipeline; its panes go to a Delta table."""
    pipeline = mp.Pipeline("windowed")
    records = pipeline.inject("records", key="key", at="at", id="id" if task.with_ids else None)
    sums = records.window(mp.FixedWindows("10m")).combine(mp.Sum("value"), name="sums")
    sums.sink("panes", mp.DeltaSink(str(sink)))
    return pipeline


def panes_in(sink: Path) -> pa.Table:
    """Return the panes of the Delta table."""
    table = mp.read_table(sink)
    values = [json.loads(value) for value in table["value"].to_pylist()]
    starts, totals = [value["window"][0] for value in values], [value["value"] for value in values]
    return pa.table({"key": table["key"], "start": starts, "total": totals})


def run(task: Task) -> Answer:
    """Run the pipeline on the local runner as users do, from a source that does not wait."""
    with mp.Store.open(Path(task.work) / "pond") as store:
        return _run_in(task, mp.LocalRunner(store, progress=False))


def run_without_upkeep(task: Task) -> Answer:
    """Run the pipeline without compactions, checkpoints and garbage collection."""
    with mp.Store.open(Path(task.work) / "pond") as store:
        return _run_in(task, mp.LocalRunner(store, progress=False, upkeep=None))


def _run_in(task: Task, runner: mp.LocalRunner) -> Answer:
    batches, sink, pond = batches_of(task), Path(task.work) / "panes", Path(task.work) / "pond"
    before = used_seconds(server_of=pond)
    with runner.start(pipeline_of(task, sink)) as run:
        for batch in batches:
            run.inject("records", batch)
        run.run_until_quiet()
    return Answer(used_seconds(server_of=pond) - before, panes_in(sink))


if __name__ == "__main__":
    answer_tasks(run)
