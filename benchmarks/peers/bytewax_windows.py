"""The windowed sum as tumbling windows of Bytewax, with snapshots of the state as often as it makes them by default."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TypeAlias

import bytewax.operators
import bytewax.operators.windowing
import pyarrow as pa
from bytewax.dataflow import Dataflow
from bytewax.inputs import FixedPartitionedSource, StatefulSourcePartition
from bytewax.operators.windowing import EventClock, TumblingWindower
from bytewax.recovery import RecoveryConfig, init_db_dir
from bytewax.testing import TestingSink, run_main

from benchmarks.peers.contract import WINDOW_US, Answer, Task, answer_tasks, batches_of, used_seconds

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_SIZE = timedelta(microseconds=WINDOW_US)

Event: TypeAlias = tuple[datetime, int]


class Batches(FixedPartitionedSource[tuple[str, Event], int]):
    """A source of batches, one after the other.

    Args:
        batches: the batches.
    """

    def __init__(self, batches: list[pa.Table]) -> None:
        self._batches = batches

    def list_parts(self) -> list[str]:
        """Return the only part."""
        return ["all"]

    def build_part(self, step_id: str, for_part: str, resume_state: int | None) -> Part:
        """Return the part."""
        return Part(self._batches, resume_state or 0)


class Part(StatefulSourcePartition[tuple[str, Event], int]):
    """Batches from one of them on."""

    def __init__(self, batches: list[pa.Table], first: int) -> None:
        self._batches = batches
        self._next = first

    def next_batch(self) -> list[tuple[str, Event]]:
        """Return the next batch as Python objects, the only form that Bytewax has."""
        if self._next == len(self._batches):
            raise StopIteration
        batch = self._batches[self._next]
        self._next += 1
        times = [_EPOCH + timedelta(microseconds=at) for at in batch["at"].cast(pa.int64()).to_pylist()]
        events = zip(times, batch["value"].to_pylist(), strict=True)
        return list(zip(batch["key"].to_pylist(), events, strict=True))

    def snapshot(self) -> int:
        """Return the number of the next batch."""
        return self._next


def flow_of(batches: list[pa.Table], panes: list[Any]) -> Dataflow:
    """Return the flow, which appends its panes to a list."""
    flow = Dataflow("windowed")
    records = bytewax.operators.input("records", flow, Batches(batches))
    # The clock runs on between two batches, so without a wait Bytewax drops records as late.
    clock = EventClock(ts_getter=lambda event: event[0], wait_for_system_duration=timedelta(minutes=1))
    sums = bytewax.operators.windowing.fold_window(
        "sums",
        records,
        clock,
        TumblingWindower(length=_SIZE, align_to=_EPOCH),
        builder=lambda: 0,
        folder=lambda total, event: total + event[1],
        merger=lambda one, other: one + other,
    )
    bytewax.operators.output("panes", sums.down, TestingSink(panes))
    return flow


def run(task: Task) -> Answer:
    """Run the flow over all batches."""
    batches, panes = batches_of(task), list[Any]()
    recovery = Path(task.work) / "recovery"
    recovery.mkdir()
    before = used_seconds()
    init_db_dir(recovery, 1)
    run_main(flow_of(batches, panes), recovery_config=RecoveryConfig(str(recovery)))
    seconds = used_seconds() - before
    keys, windows = zip(*panes, strict=True)
    numbers, totals = zip(*windows, strict=True)
    starts = [number * WINDOW_US for number in numbers]
    return Answer(seconds, pa.table({"key": keys, "start": starts, "total": totals}))


if __name__ == "__main__":
    answer_tasks(run)
