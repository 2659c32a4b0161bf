"""Windowed sums and counts on the local runner: in columns, by short turns of waiting windows, and by their hooks.

Records of 10,000 keys in windows of ten minutes, about three in each, come in batches of 50,000. Each figure is
records a CPU second of a run in a fresh process, without start and import; ``ratio`` is columns to the hooks.

    python -m benchmarks.windowed_sum --json build/bench/windowed_sum.json
"""

from __future__ import annotations

import multiprocessing
import resource
import tempfile
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import click
import numpy as np
import pyarrow as pa

import millpond as mp
from benchmarks.json_result import tell_result
from millpond.executor.windows.windowed_computation import WindowedComputation

_KEYS: Final = 10_000
_BATCH: Final = 50_000
_RECORDS_PER_WINDOW: Final = 3
_SIZE_US: Final = 600_000_000
_BEGIN_US: Final = 1_780_000_000_000_000

_WITHOUT: Final[dict[str, tuple[str, ...]]] = {
    "columns": (),
    "short_turns": ("column_rows",),
    "hooks": ("column_rows", "quick_turns"),
}
"""The ways, and the methods without which a step takes them."""

COMBINERS: Final = {"sum": mp.Sum("value"), "count": mp.Count(), "sum_of_floats": mp.Sum("share")}
"""What is combined, by name."""


def records_of(count: int, *, with_ids: bool) -> pa.Table:
    """Return sorted records with whole numbers, about three for each key and window."""
    rng = np.random.default_rng(1)
    span_us = _SIZE_US * count // (_RECORDS_PER_WINDOW * _KEYS)
    columns = {
        "key": [f"user{number}" for number in rng.integers(0, _KEYS, count)],
        "at": np.sort(rng.integers(0, span_us, count)) + _BEGIN_US,
        "value": rng.integers(0, 1_000, count),
        "share": rng.random(count),
    }
    if with_ids:
        columns["id"] = [f"{number:x}" for number in range(count)]
    return pa.table(columns)


def run_once(combiner: str, records: int, *, with_ids: bool, way: str) -> float:
    """Return the processor time of a run, in seconds."""
    rows = records_of(records, with_ids=with_ids)
    pipeline = mp.Pipeline("windowed")
    stream = pipeline.inject("records", key="key", at="at", at_unit="us", id="id" if with_ids else None)
    stream.window(mp.FixedWindows("10m")).combine(COMBINERS[combiner], name="totals")
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="millpond-windowed-"))
        store = stack.enter_context(mp.Store.open(folder))
        for method in _WITHOUT[way]:
            stack.enter_context(patch.object(WindowedComputation, method, lambda *_: None))
        return processor_seconds(
            store, pipeline, [rows.slice(start, _BATCH) for start in range(0, records, _BATCH)]
        )


def processor_seconds(store: mp.Store, pipeline: mp.Pipeline, batches: Iterable[pa.Table]) -> float:
    """Return the processor time of a run over batches of the stream ``records``, in seconds."""
    runner = mp.LocalRunner(store, progress=False, upkeep=None)
    before = resource.getrusage(resource.RUSAGE_SELF)
    with runner.start(pipeline) as run:
        for batch in batches:
            run.inject("records", batch)
            run.run_until_quiet()
    after = resource.getrusage(resource.RUSAGE_SELF)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def measure(records: int) -> list[dict[str, Any]]:
    """Measure all ways for each combiner, without and with ids."""
    figures: list[dict[str, Any]] = []
    for combiner in COMBINERS:
        for with_ids in (False, True):
            rates = {
                way: round(records / _in_a_process(combiner, records, with_ids=with_ids, way=way))
                for way in _WITHOUT
            }
            ratio = round(rates["columns"] / rates["hooks"], 2)
            figures.append({"combiner": combiner, "with_ids": with_ids, **rates, "ratio": ratio})
    return figures


def _in_a_process(combiner: str, records: int, *, with_ids: bool, way: str) -> float:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=1, mp_context=context) as pool:
        # The first run pays for imports.
        pool.submit(run_once, combiner, 100, with_ids=with_ids, way=way).result()
        return pool.submit(run_once, combiner, records, with_ids=with_ids, way=way).result()


@click.command(help=__doc__)
@click.option(
    "--json", "path", type=click.Path(path_type=Path), default=None, help="Write the figures there."
)
@click.option("--records", type=click.IntRange(1), default=200_000, show_default=True)
def main(path: Path | None, records: int) -> None:
    """Measure and print JSON."""
    tell_result({"records": records, "figures": measure(records)}, path, indent=2)


if __name__ == "__main__":
    main()
