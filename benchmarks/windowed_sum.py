"""Windowed sums and counts on the local runner: in columns, by short turns of waiting windows, and by their hooks.

Records of 10,000 keys in windows of ten minutes, about three in each, or a hundred (``dense``), come in batches of
50,000, one after the other. A ``hot`` key has nine of ten records. Sessions have about three as well, and no short
turns. Each figure is records a CPU second in a fresh process with the allocator of ``millpond run``, from the second
batch on; ``ratio`` is columns to the hooks.

    python -m benchmarks.windowed_sum --json build/bench/windowed_sum.json
"""

from __future__ import annotations

import multiprocessing
import resource
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, NamedTuple, ParamSpec
from unittest.mock import patch

import click
import numpy as np
import pyarrow as pa

import millpond as mp
from benchmarks.json_result import tell_result
from millpond.executor.spark.worker_process import use_frugal_allocator
from millpond.executor.windows.windowed_computation import WindowedComputation

_Arguments = ParamSpec("_Arguments")
_KEYS: Final = 10_000
_BATCH: Final = 50_000
_SLOW_BATCHES: Final = 4
"""Of the ways that call Python for each key, whose rates depend less on the length of the run."""
_SIZE_US: Final = 600_000_000
_BEGIN_US: Final = 1_780_000_000_000_000

_WITHOUT: Final[dict[str, tuple[str, ...]]] = {
    "columns": (),
    "short_turns": ("column_rows",),
    "hooks": ("column_rows", "quick_turns"),
}
"""The ways, and the methods without which a step takes them."""


class Load(NamedTuple):
    combiner: mp.CombineFn | dict[str, mp.CombineFn]
    per_window: int = 3
    """The number of records of a key in a window."""
    hot_share: float = 0
    """The share of the records that one key has."""
    window_fn: mp.WindowFn = mp.FixedWindows("10m")


LOADS: Final = {
    "sum": Load(mp.Sum("value")),
    "hot_sum": Load(mp.Sum("value"), hot_share=0.9),
    "count": Load(mp.Count()),
    "dense_count": Load(mp.Count(), per_window=100),
    "sum_of_floats": Load(mp.Sum("share")),
    "sum_and_count": Load({"total": mp.Sum("value"), "visits": mp.Count()}),
    # At random times with a mean distance of 200 s, about three records come without such a gap.
    "session_sum": Load(mp.Sum("value"), window_fn=mp.Sessions("220s")),
}


def records_of(count: int, *, with_ids: bool, load: Load = LOADS["sum"]) -> pa.Table:
    """Return sorted records with numbers."""
    rng = np.random.default_rng(1)
    span_us = _SIZE_US * count // (load.per_window * _KEYS)
    keys = rng.integers(0, _KEYS, count)
    keys[rng.random(count) < load.hot_share] = 0
    columns = {
        "key": [f"user{number}" for number in keys],
        "at": np.sort(rng.integers(0, span_us, count)) + _BEGIN_US,
        "value": rng.integers(0, 1_000, count),
        "share": rng.random(count),
    }
    if with_ids:
        columns["id"] = [f"{number:x}" for number in range(count)]
    return pa.table(columns)


def run_once(load: str, batches: int, *, with_ids: bool, way: str) -> float:
    """Return the records a processor second of a run."""
    use_frugal_allocator()
    rows = records_of(batches * _BATCH, with_ids=with_ids, load=LOADS[load])
    pipeline = mp.Pipeline("windowed")
    stream = pipeline.inject("records", key="key", at="at", at_unit="us", id="id" if with_ids else None)
    stream.window(LOADS[load].window_fn).combine(LOADS[load].combiner, name="totals")
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="millpond-windowed-"))
        store = stack.enter_context(mp.Store.open(folder))
        for method in _WITHOUT[way]:
            stack.enter_context(patch.object(WindowedComputation, method, lambda *_: None))
        return rate_of(store, pipeline, [rows.slice(number * _BATCH, _BATCH) for number in range(batches)])


def rate_of(store: mp.Store, pipeline: mp.Pipeline, batches: Sequence[pa.Table]) -> float:
    """Return the records a processor second of a run over batches of the stream ``records``.

    The first batch pays for the start, and does not count.
    """
    runner = mp.LocalRunner(store, progress=False, upkeep=None)
    with runner.start(pipeline) as run:
        run.inject("records", batches[0])
        run.run_until_quiet()
        before = resource.getrusage(resource.RUSAGE_SELF)
        for batch in batches[1:]:
            run.inject("records", batch)
        run.run_until_quiet()
        after = resource.getrusage(resource.RUSAGE_SELF)
    records = sum(batch.num_rows for batch in batches[1:])
    return records / (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


def measure(batches: int) -> list[dict[str, Any]]:
    """Measure all ways for each load, without and with ids."""
    figures: list[dict[str, Any]] = []
    for load in LOADS:
        for with_ids in (False, True):
            rates = {
                way: round(
                    in_a_process(
                        run_once,
                        load,
                        batches if way == "columns" else min(batches, _SLOW_BATCHES),
                        with_ids=with_ids,
                        way=way,
                    )
                )
                for way in _WITHOUT
            }
            ratio = round(rates["columns"] / rates["hooks"], 2)
            figures.append({"load": load, "with_ids": with_ids, **rates, "ratio": ratio})
    return figures


def in_a_process(
    run: Callable[_Arguments, float], *args: _Arguments.args, **kwargs: _Arguments.kwargs
) -> float:
    """Return the figure of a run in a fresh process."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=1, mp_context=context) as pool:
        return pool.submit(run, *args, **kwargs).result()


@click.command(help=__doc__)
@click.option(
    "--json", "path", type=click.Path(path_type=Path), default=None, help="Write the figures there."
)
@click.option("--batches", type=click.IntRange(2), default=11, show_default=True)
def main(path: Path | None, batches: int) -> None:
    """Measure and print JSON."""
    tell_result({"batches": batches, "figures": measure(batches)}, path, indent=2)


if __name__ == "__main__":
    main()
