"""The cost of a sink that replaces rows: time per superstep and memory, by the size of its table.

Each superstep has 1,000 rows: half of them refine windows of the last minute, half are new; and, for
comparison, rows anywhere in the table, which is the worst case. Appending the same rows is the
baseline; compare ratios within one run.

    python -m benchmarks.upsert_sink --json build/bench/upsert_sink.json
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa

from benchmarks.json_result import tell_result
from millpond.executor.sinks.sink import DeltaSink, SinkWriter
from millpond.executor.superstep.delivery import PRODUCTION_SCHEMA
from millpond.executor.windows.pane import Pane, Timing, WindowedValue
from millpond.executor.windows.window import Window
from millpond.statestore.system import SystemClock
from millpond.statestore.types import Superstep

ROWS = 1_000
STEPS = 20
FILL = 50_000
SECOND_US = 1_000_000
PANE = Pane(index=0, nonspeculative_index=0, timing=Timing.ON_TIME, is_last=True)


def panes(places: Iterator[int]) -> pa.Table:
    """A superstep's productions: one pane per position, each a key and a window of one second."""
    rows = []
    for position in places:
        start = position // 100 * SECOND_US
        window = Window(start, start + SECOND_US)
        value = WindowedValue(value=position, window=window, at=start, pane=PANE).to_json()
        rows.append(
            {
                "stream": "s",
                "key": f"key{position % 100:04d}",
                "value": orjson.dumps(value).decode(),
                "value_bytes": None,
                "at": start,
            }
        )
    return pa.Table.from_pylist(rows, schema=PRODUCTION_SCHEMA).drop_columns(["stream"])


def _timed(writer: SinkWriter, first: int, places_of: Callable[[int], Iterator[int]]) -> float:
    clock, times = SystemClock(), []
    for step in range(STEPS):
        productions = panes(places_of(step))
        started = clock.monotonic_us()
        writer.write(Superstep(first + step), productions)
        times.append((clock.monotonic_us() - started) / 1_000)
    return statistics.median(times)


def measure(table_rows: int, folder: Path) -> dict[str, Any]:
    """Median milliseconds per superstep of `ROWS` rows, on a table of ``table_rows`` rows."""
    writer = DeltaSink(str(folder / "upsert"), mode="upsert").open("s", "p", "b")
    superstep = 0
    for start in range(0, table_rows, FILL):
        superstep += 1
        writer.write(Superstep(superstep), panes(iter(range(start, min(start + FILL, table_rows)))))
    append = DeltaSink(str(folder / "append")).open("s", "p", "b")
    half = ROWS // 2

    def at_the_end(step: int) -> Iterator[int]:
        newest = table_rows + step * half
        return iter(range(newest - half, newest + half))

    def anywhere(step: int) -> Iterator[int]:
        return iter(range(step, table_rows, max(1, table_rows // ROWS)))

    pa.default_memory_pool().release_unused()
    figures = {
        "table_rows": table_rows,
        "append_ms": _timed(append, 1, at_the_end),
        "at_the_end_ms": _timed(writer, superstep + 1, at_the_end),
        "anywhere_ms": _timed(writer, superstep + 1 + STEPS, anywhere),
        "arrow_peak_bytes": pa.default_memory_pool().max_memory(),
    }
    return {name: round(value, 1) for name, value in figures.items()}


def main() -> None:
    """Measure tables of three sizes, and print or write the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").strip().splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--rows", type=int, nargs="*", default=[10_000, 100_000, 1_000_000])
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        tables = [measure(rows, Path(folder) / str(rows)) for rows in arguments.rows]
    tell_result({"rows_per_superstep": ROWS, "tables": tables}, arguments.json, indent=2)


if __name__ == "__main__":
    main()
