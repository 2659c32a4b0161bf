"""The demo's output: the alerts, and three SQL queries of the store with their answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import pandas as pd
from rich.console import Console
from rich.syntax import Syntax
from rich.table import Table

from examples.zeitgeist.results import Results, days_of, days_only_in
from examples.zeitgeist.summary import Summary
from examples.zeitgeist.what_if import WhatIf

_DAYS_SHOWN: Final = 12
_ALERTS_SHOWN: Final = 12
_NEW_DAYS_SHOWN: Final = 7
_UNITS: Final = {
    "cancelled": "cancelled",
    "delay": "delay (min)",
    "departed": "departed",
    "silent": "silent hour",
}


def print_alerts(console: Console, results: Results) -> None:
    """Print the strongest days and the strongest single alerts."""
    days = days_of(results)
    console.print(f"[bold]The strongest of {len(days)} days with alerts[/bold]")
    console.print(_days_table(days.head(_DAYS_SHOWN)))
    console.print(f"\n[bold]The strongest of {len(results.final_alerts)} alerts[/bold]")
    console.print(_alerts_table(results))
    console.print("[dim]at once: the total at which a spike was reported, before its hour was over[/dim]")
    still = results.standstills
    console.print(f"\n[bold]The {len(still)} hours in which a whole airport stood still[/bold]")
    console.print(_standstills_table(still))
    console.print(
        "[dim]silent: no flight was even cancelled; nights, which always are, are none of them[/dim]"
    )


def print_question(console: Console, question: str, sql: str) -> None:
    """Print a question and the SQL that asks it."""
    console.print(f"\n[bold]{question}[/bold]")
    console.print(Syntax(sql.strip(), "sql", background_color="default", word_wrap=True))


def print_answer(console: Console, columns: Sequence[str], rows: Sequence[Any], title: str | None) -> None:
    """Print the rows of an answer under a line that names their source."""
    console.print(f"[dim]{title}[/dim]")
    table = _table()
    for position, column in enumerate(columns):
        numeric = bool(rows) and isinstance(rows[0][position], int | float)
        table.add_column(column, justify="right" if numeric else "left")
    for row in rows:
        table.add_row(*map(_text, row))
    console.print(table)


def print_summary(console: Console, summary: Summary) -> None:
    """Print the run in numbers."""
    console.print(
        f"\n{summary.records:,} flights in {summary.supersteps} supersteps, {summary.late_records:,} late, "
        f"{summary.alerts} alerts. The last run took {summary.elapsed_seconds:.0f} s "
        f"({summary.records_per_second:,.0f} flights a second) and {summary.peak_memory_mib:,} MiB at most."
    )


def print_what_if(console: Console, what_if: WhatIf, results: Results, sensitive: Results) -> None:
    """Print how a replay with the more sensitive alarm differs from the run."""
    console.print("\n[bold]What if the alarm had been twice as sensitive?[/bold]")
    console.print(
        f"The flights that came after version {what_if.version} of the store, when nothing from {what_if.day} on was "
        "complete, went through the job once more, with half as much from normal to alarm. What differs:"
    )
    console.print(_differences_table(what_if))
    before, after = len(results.final_alerts), len(sensitive.final_alerts)
    days = days_only_in(sensitive, results)
    console.print(
        f"[dim]gone: spikes that were reported at once, and are now, at a smaller total[/dim]\n\n"
        f"{after:,} alerts in place of {before:,}: {after - before:,} more. "
        f"[bold]{len(days)} days have alerts only then{', the strongest:' if len(days) else '.'}[/bold]"
    )
    if len(days):
        console.print(_days_table(days.head(_NEW_DAYS_SHOWN)))


def _differences_table(what_if: WhatIf) -> Table:
    table = _table()
    table.add_column("rows of")
    table.add_column("")
    for heading in ("equal", "changed", "new", "gone"):
        table.add_column(heading, justify="right")
    for kind, parts in (("state", what_if.computations), ("table", what_if.tables)):
        for part in parts:
            numbers = (part.equal, part.changed, part.added, part.missing)
            table.add_row(part.name, kind, *(f"{number:,}" if number else "-" for number in numbers))
    return table


def _days_table(days: pd.DataFrame) -> Table:
    table = _table()
    table.add_column("day")
    for heading in ("strength", "spikes", "dips", "flights", "cancelled"):
        table.add_column(heading, justify="right")
    table.add_column("airports")
    for day, row in days.iterrows():
        numbers = (f"{row.strength:.1f}", row.spikes, row.dips, row.flights, row.cancelled)
        table.add_row(_day(day), *map(str, numbers), row.origins)
    return table


def _alerts_table(results: Results) -> Table:
    alerts = results.final_alerts
    at_once = results.alerts[results.alerts["stage"] == "at once"]
    first = at_once.set_index(["origin", "hour", "measure"])["value"].to_dict()
    table = _table()
    table.add_column("when (New York)", no_wrap=True)
    table.add_column("from")
    table.add_column("kind")
    for heading in ("expected", "found", "at once"):
        table.add_column(heading, justify="right")
    table.add_column("of what", no_wrap=True)
    table.add_column("strength", justify="right")
    for alert in alerts.head(_ALERTS_SHOWN).itertuples():
        reported = first.get((alert.origin, alert.hour, alert.measure), "")
        numbers = (f"{alert.expected:.1f}", str(alert.value), str(reported))
        unit = _UNITS[alert.measure]
        table.add_row(alert.local_time, alert.origin, alert.kind, *numbers, unit, f"{alert.strength:.1f}")
    return table


def _standstills_table(still: pd.DataFrame) -> Table:
    """A line for each day, airport and kind of standstill, with its hours."""
    table = _table()
    for heading in ("day", "from", "hours (New York)", "what"):
        table.add_column(heading)
    for (day, origin, measure), hours in still.groupby([still["time"].dt.normalize(), "origin", "measure"]):
        times = ", ".join(f"{time:%H}" for time in hours["time"])
        table.add_row(_day(day), origin, times, "silent" if measure == "silent" else "nothing left")
    return table


def _table() -> Table:
    return Table(header_style="dim", box=None, pad_edge=False)


def _day(day: pd.Timestamp) -> str:
    return f"{day:%a} {day.day:2d} {day:%b %Y}"


def _text(value: Any) -> str:
    return f"{value:,.2f}" if isinstance(value, float) else str(value)
