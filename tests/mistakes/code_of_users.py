"""Correct user code, into which the tests put mistakes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import millpond as mp
from millpond.statestore.system import SystemClock

DAY_US: Final = 1_714_521_600_000_000
"""The first of May 2024, in microseconds."""

ROWS: Final[list[dict[str, Any]]] = [
    {"query": "cat", "at": DAY_US, "n": 1},
    {"query": "dog", "at": DAY_US + 1_000_000, "n": 2},
]


class Does(mp.Computation):
    """A computation that calls a function for each record.

    Args:
        action: called with the context and the record; ``None`` counts.
    """

    def __init__(self, what: Callable[[mp.Context, mp.Record], object] | None = None) -> None:
        self.what = what

    def process_record(self, context: mp.Context, record: mp.Record) -> None:
        if self.what is None:
            context.state.set(context.state.get(0) + 1)
        else:
            self.what(context, record)


def counting(name: str = "counter", pipeline: str = "searches", **options: Any) -> mp.Pipeline:
    made = mp.Pipeline(pipeline)
    made.inject("queries", key="query", at="at").apply(Does(), name=name, **options)
    return made


def run_code(
    what: Callable[[mp.Context, mp.Record], object], rows: Any = None, **options: Any
) -> mp.RunSummary:
    """Run a function as the code of ``counter``, in memory."""
    pipeline = mp.Pipeline("searches")
    pipeline.inject("queries", key="query", at="at").apply(Does(what), name="counter", **options)
    return run(pipeline, ROWS if rows is None else rows)


def run(
    pipeline: mp.Pipeline, rows: Any, store: mp.Store | Path | None = None, **options: Any
) -> mp.RunSummary:
    """Run a pipeline over the rows of its stream ``queries``, in memory by default."""
    if store is None:
        with mp.Store.in_memory() as made:
            return run(pipeline, rows, made, **options)
    finish = options.pop("finish", True)
    runner = mp.LocalRunner(store, progress=False, upkeep=None, **options)
    return runner.run(pipeline, {"queries": rows}, finish=finish)


def held_in_memory(registry: mp.testing.MemoryRegistry | None = None) -> mp.types.LeaseFactory:
    """Replace ZooKeeper by leases in memory, so that a store in a folder opens at once."""
    shared = mp.testing.MemoryRegistry() if registry is None else registry
    return lambda _, writer_id: mp.testing.MemoryLeases(shared, SystemClock(), writer_id=writer_id)
