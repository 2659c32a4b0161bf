"""Loads: the cost of rows from a table, with a state and a timer each, and of starting a pipeline on them.

Keys come in no order. By kind of source: an Arrow table with states in a struct, the same in a Parquet file, JSON text
in CSV, and mappings. Each goes into a new store in a local folder, in one commit. Then a pipeline with the computation
opens, and handles a record of a loaded key.

    python -m benchmarks.load --json build/bench/load.json

The promised bound: 1,000,000 rows in 20 s.
"""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import click
import numpy as np
import orjson
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
from rich.console import Console
from rich.table import Table

import millpond as mp
from benchmarks.json_result import tell_result
from millpond.statestore.system import SystemClock

_CLOCK: Final = SystemClock()
_START_US: Final = 1_700_000_000_000_000
_BOUND_S: Final = 20
_STEP: Final = 7_919


class _Total(mp.Computation):
    """Adds up, and has a timer pending that it has never set itself."""

    def process_record(self, context: mp.Context, record: mp.Record) -> None:
        state = context.state.get()
        context.state.set({"count": state["count"] + 1, "sum": state["sum"] + record.value["n"]})


def measure(rows: int = 1_000_000, intervals: int = 4) -> dict[str, Any]:
    """Load each kind of source into a new store.

    Returns:
        ``sources``: by kind, ``load_s``, its ``cpu_s``, ``rows_per_second``, ``store_mib`` and ``open_s``, the time
        until a pipeline has handled a record; ``bound_s``, and ``peak_mib`` of the process, which holds the table.
    """
    table = _table(rows)
    with TemporaryDirectory(prefix="millpond-load-bench-") as folder:
        root = Path(folder)
        sources: Mapping[str, Callable[[], Any]] = {
            "arrow": lambda: table,
            "parquet": lambda: _written(root / "rows.parquet", table),
            "csv": lambda: _written(root / "rows.csv", table),
            "mappings": lambda: _mappings(table),
        }
        found = {kind: _load(root / kind, make(), rows, intervals) for kind, make in sources.items()}
    peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "rows": rows,
        "intervals": intervals,
        "sources": found,
        "bound_s": _BOUND_S,
        "table_mib": round(table.nbytes / 2**20),
        "peak_mib": round(peak_kib / 1_024),
    }


def _table(rows: int) -> pa.Table:
    numbers = np.arange(rows)
    state = pa.StructArray.from_arrays([pa.array(numbers), pa.array(numbers * 0.5)], ["count", "sum"])
    timers = pa.StructArray.from_arrays(
        [pa.array(["flush"] * rows), pa.array(_START_US + numbers)], ["tag", "at"]
    )
    return pa.table(
        {
            "key": [f"key-{number:09d}" for number in (numbers * _STEP % rows).tolist()],
            "state": state,
            "timers": pa.ListArray.from_arrays(np.arange(rows + 1, dtype=np.int32), timers),
        }
    )


def _written(path: Path, table: pa.Table) -> Path:
    if path.suffix == ".parquet":
        pq.write_table(table, path)
        return path
    texts = {name: _json_texts(table.column(name)) for name in ("state", "timers")}
    pyarrow.csv.write_csv(pa.table({"key": table.column("key"), **texts}), path)
    return path


def _json_texts(column: pa.ChunkedArray) -> list[str]:
    return [orjson.dumps(value).decode() for value in column.to_pylist()]


def _mappings(table: pa.Table) -> Iterator[Mapping[str, Any]]:
    for batch in table.to_batches(10_000):
        yield from batch.to_pylist()


def _load(path: Path, source: Any, rows: int, intervals: int) -> dict[str, float]:
    pipeline = mp.Pipeline("p")
    pipeline.inject("in", key="k", at="at").apply(_Total(), name="total")
    with mp.Store.open(path) as store:
        begun_us, begun_cpu_s = _CLOCK.monotonic_us(), _cpu_s()
        loaded = store.load("total", source, intervals=intervals)
        loaded_us, cpu_s = _CLOCK.monotonic_us(), _cpu_s() - begun_cpu_s
        with mp.LocalRunner(store, progress=False, upkeep=None).start(pipeline, stepping=True) as run:
            run.inject_durably("in", [{"k": "key-000000001", "at": _START_US - 1, "n": 1.0}])
            opened_us = _CLOCK.monotonic_us()
    if loaded.rows != rows:
        raise click.ClickException("rows are missing")
    load_s = (loaded_us - begun_us) / 1_000_000
    return {
        "load_s": round(load_s, 2),
        "cpu_s": round(cpu_s, 2),
        "rows_per_second": round(rows / load_s),
        "store_mib": round(loaded.size_bytes / 2**20, 1),
        "open_s": round((opened_us - loaded_us) / 1_000_000, 2),
    }


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _shown(figures: Mapping[str, Any]) -> Table:
    table = Table(title=f"{figures['rows']:,} rows with a state and a timer each")
    headings: Sequence[str] = ("source", "load s", "CPU s", "rows/s", "store MiB", "open s")
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "source" else "right")
    for kind, found in figures["sources"].items():
        table.add_row(
            kind,
            f"{found['load_s']:.1f}",
            f"{found['cpu_s']:.1f}",
            f"{found['rows_per_second']:,}",
            f"{found['store_mib']:.1f}",
            f"{found['open_s']:.1f}",
        )
    return table


@click.command()
@click.option("--rows", default=1_000_000, show_default=True)
@click.option("--intervals", default=4, show_default=True)
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write the result to a file.")
def main(rows: int, intervals: int, json_path: Path | None) -> None:
    """Measure loads, and the start of a pipeline on the loaded rows."""
    figures = measure(rows, intervals)
    Console(stderr=True).print(_shown(figures))
    tell_result(figures, json_path)


if __name__ == "__main__":
    main()
