"""The figures as tables for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from rich.table import Table

from benchmarks.engine_result import percentile

_PAPER: Final = {"p50_ms": 33.7, "p95_ms": 93.8}
"""MillWheel §8.1: strong productions with exactly-once, between machines."""


def engine_table(results: Sequence[Mapping[str, Any]], ratios: Sequence[Mapping[str, Any]]) -> Table:
    """Engines side by side: the median batch, the engine's part of it, and how many times as fast Millpond is."""
    table = _table("Records per second")
    table.add_column("engine", no_wrap=True)
    for heading in ("rows", "keys", "rows/s", "batch ms", "work ms", "times", "goal"):
        table.add_column(heading, justify="right")
    known = {(ratio["engine"], ratio["rows_per_batch"]): ratio for ratio in ratios}
    for result in results:
        ratio = known.get((result["engine"], result["rows_per_batch"]), {"ratio": 1, "goal": None})
        measured = slice(result["warm_up_batches"], None)
        work_ms = [parts["addBatch"] for parts in result["parts_ms"][measured]]
        table.add_row(
            result["engine"],
            f"{result['rows_per_batch']:,}",
            f"{result['keys_per_batch']:,}",
            f"{result['records_per_second']:,.0f}",
            f"{percentile(result['batch_ms'][measured], 0.5):,.0f}",
            f"{percentile(work_ms, 0.5):,.0f}",
            f"{ratio['ratio']:.1f}",
            "" if ratio["goal"] is None else f"{ratio['goal']}",
        )
    return table


def commit_table(results: Sequence[Mapping[str, Any]]) -> Table:
    """Commits of 100 updates, including their data file."""
    table = _table("Commits of 100 updates")
    for heading in ("keys", "live files", "p50 ms", "p99 ms", "file p50 ms", "log entry p50 ms"):
        table.add_column(heading, justify="right")
    for result in results:
        table.add_row(
            f"{result['keys']:,}",
            f"{result['live_files']:,}",
            *(f"{result[name]:.2f}" for name in ("p50_ms", "p99_ms", "file_p50_ms", "log_entry_p50_ms")),
        )
    return table


def local_table(result: Mapping[str, Any]) -> Table:
    """Latency through one stage of the local runner."""
    table = _table(f"Local runner: strong productions, exactly once, {result['rate']:,} records/s")
    for heading in ("", "p50 ms", "p95 ms"):
        table.add_column(heading, justify="right" if heading else "left")
    table.add_row("millpond-local", f"{result['p50_ms']:.1f}", f"{result['p95_ms']:.1f}")
    table.add_row("MillWheel, between machines", *(str(_PAPER[name]) for name in ("p50_ms", "p95_ms")))
    return table


def driver_table(runs: Sequence[Mapping[str, Any]]) -> Table:
    """The driver's part of a superstep, phase by phase."""
    table = _table("The driver's part of a superstep, in milliseconds")
    names = ("plan", "pack", "reports", "commit", "upkeep", "superstep", "cpu")
    for heading in ("intervals", "files", *names, "plan KiB", "reports KiB", "commit KiB"):
        table.add_column(heading, justify="right")
    for run in runs:
        table.add_row(
            f"{run['intervals']:,}",
            f"{run['files']:.1f}",
            *(f"{run[f'{name}_ms']:,.1f}" for name in names),
            *(f"{run[f'{name}_kib']:,.0f}" for name in ("plan", "reports", "commit")),
        )
    return table


def _table(title: str) -> Table:
    return Table(
        title=f"\n{title}",
        title_justify="left",
        title_style="bold",
        header_style="dim",
        box=None,
        pad_edge=False,
        min_width=len(title),
    )
