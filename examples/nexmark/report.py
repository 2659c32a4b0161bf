"""The example's output: the list of queries, answers as tables, and their comparison with the expected answers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

import millpond as mp
from examples.nexmark.answers import Bag
from examples.nexmark.query import Query

_DIFFERENCES_SHOWN: Final = 5
_CELL_WIDTH: Final = 28


def print_queries(console: Console, queries: Iterable[Query]) -> None:
    """Print every query with its line."""
    table = _table("query", "what it asks")
    for query in queries:
        table.add_row(query.name, query.title)
    console.print(table)
    console.print("\nAsk one with --query NAME, or all with --all; --help tells the rest.")


def print_answer(console: Console, query: Query, answer: Bag, rows_max: int) -> None:
    """Print an answer as a table, in the order of its rows."""
    rows = sorted(answer.elements(), key=lambda row: [(cell is None, str(type(cell)), cell) for cell in row])
    console.print(f"[bold]{query.name}[/bold]: {query.title}")
    table = _table(*query.columns)
    for row in rows[:rows_max]:
        table.add_row(*map(_text, row))
    console.print(table)
    if len(rows) > rows_max:
        console.print(f"[dim]… and {len(rows) - rows_max:,} rows more[/dim]")
    console.print()


def print_summary(console: Console, summary: mp.RunSummary, output: Path) -> None:
    """Print the run in numbers."""
    seconds = summary.elapsed_ms / 1_000
    console.print(
        f"{summary.run.injected:,} events in {summary.supersteps:,} supersteps and {seconds:.1f} s "
        f"({summary.run.injected / seconds:,.0f} a second), {summary.run.timers:,} timers, "
        f"{summary.run.late:,} late, {summary.run.dead_letters:,} dead letters. The tables are in {output}."
    )


def print_verdicts(
    console: Console, queries: Sequence[Query], answers: Mapping[str, Bag], wrong: Mapping[str, Sequence[str]]
) -> None:
    """Print for each query whether its answer is as expected."""
    table = _table("query", "rows", "as expected", "what it asks")
    for query in queries:
        found = wrong.get(query.name)
        verdict = "[dim]not known[/dim]" if found is None else "[red]no[/red]" if found else "yes"
        table.add_row(query.name, f"{answers[query.name].total():,}", verdict, query.title)
    console.print(table)
    for name, found in wrong.items():
        for line in found[:_DIFFERENCES_SHOWN]:
            console.print(f"[red]{name}[/red]: {line}", highlight=False)


def _table(*columns: str) -> Table:
    table = Table(header_style="dim", box=None, pad_edge=False)
    for column in columns:
        table.add_column(column)
    return table


def _text(cell: Any) -> str:
    if cell is None:
        return ""
    text = f"{cell:,.2f}" if isinstance(cell, float) else str(cell)
    return text if len(text) <= _CELL_WIDTH else f"{text[: _CELL_WIDTH - 1]}…"
