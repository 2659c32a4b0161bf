"""
What the demo prints: the alerts, and three questions to the store in SQL with their answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import pandas as pd
from rich.console import Console
from rich.syntax import Syntax
from rich.table import Table

from examples.zeitgeist.results import Results, days_of
from examples.zeitgeist.summary import Summary

__all__ = ["print_alerts", "print_question", "print_summary"]

_DAYS_SHOWN: Final = 12
_ALERTS_SHOWN: Final = 12
_UNITS: Final = {"cancelled": "cancelled", "delay": "minutes of delay", "departed": "departed"}


def print_alerts(console: Console, results: Results) -> None:
    """
    Print the strongest days and the strongest single alerts.
    """
    console.print(_days_table(results))
    console.print(_alerts_table(results))


def print_question(
    console: Console, question: str, sql: str, columns: Sequence[str], rows: Sequence[Any]
) -> None:
    """
    Print a question, the SQL that asks it, and the answer.
    """
    console.print(f"\n[bold]{question}[/bold]")
    console.print(Syntax(sql.strip(), "sql", background_color="default", word_wrap=True))
    table = _table(None)
    for position, column in enumerate(columns):
        numeric = bool(rows) and isinstance(rows[0][position], int | float)
        table.add_column(column, justify="right" if numeric else "left")
    for row in rows:
        table.add_row(*map(_text, row))
    console.print(table)


def print_summary(console: Console, summary: Summary) -> None:
    """
    Print the run in one line.
    """
    console.print(
        f"\n{summary.records:,} flights in {summary.supersteps} supersteps, "
        f"{summary.records_per_second:,.0f} a second in the last run; "
        f"{summary.late_records:,} late; {summary.alerts} alerts; "
        f"at most {summary.peak_memory_mib:,} MiB of memory."
    )


def _days_table(results: Results) -> Table:
    days = days_of(results)
    table = _table(f"The strongest of {len(days)} days with alerts")
    table.add_column("day")
    for heading in ("strength", "spikes", "dips", "flights", "cancelled"):
        table.add_column(heading, justify="right")
    table.add_column("airports")
    for day, row in days.head(_DAYS_SHOWN).iterrows():
        numbers = (f"{row.strength:.1f}", row.spikes, row.dips, row.flights, row.cancelled)
        table.add_row(_day(day), *map(str, numbers), row.origins)
    return table


def _alerts_table(results: Results) -> Table:
    alerts = results.final_alerts
    at_once = results.alerts[results.alerts["stage"] == "at once"]
    first = at_once.set_index(["origin", "hour", "measure"])["value"].to_dict()
    table = _table(f"The strongest of {len(alerts)} alerts")
    table.add_column("hour in New York")
    table.add_column("airport")
    table.add_column("kind")
    for heading in ("expected", "found", "reported at"):
        table.add_column(heading, justify="right")
    table.add_column("of what")
    table.add_column("strength", justify="right")
    for alert in alerts.head(_ALERTS_SHOWN).itertuples():
        reported = first.get((alert.origin, alert.hour, alert.measure), "the end")
        numbers = (f"{alert.expected:.1f}", str(alert.value), str(reported))
        when = f"{_day(alert.time)} {alert.time:%H:%M}"
        table.add_row(
            when, alert.origin, alert.kind, *numbers, _UNITS[alert.measure], f"{alert.strength:.1f}"
        )
    return table


def _table(title: str | None) -> Table:
    return Table(
        title=title, title_justify="left", title_style="bold", header_style="dim", box=None, pad_edge=False
    )


def _day(day: pd.Timestamp) -> str:
    return f"{day:%a} {day.day:2d} {day:%b %Y}"


def _text(value: Any) -> str:
    return f"{value:,.2f}" if isinstance(value, float) else str(value)
