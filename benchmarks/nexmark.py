"""Nexmark's queries over generated events: events per second on both runners, and of the generator.

    python -m benchmarks.nexmark --json build/bench/nexmark.json

Each query runs alone over the same events, generated beforehand: on the local runner as a stream of pieces, on Spark
as three streaming queries over files with the same events. The time runs from the start to the last answer, including
the store's commits and the answer's table. If the two answers differ, the benchmark fails.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
from rich.console import Console
from rich.table import Table

import millpond as mp
from examples.nexmark.answers import read_answer
from examples.nexmark.events import Events
from examples.nexmark.generator import Generator
from examples.nexmark.job import stream_local, stream_spark
from examples.nexmark.queries import QUERIES
from examples.nexmark.query import Query
from examples.quiet_spark import quiet_spark
from millpond.statestore.system import SystemClock

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_CHOSEN: Final = ("q0", "q12_event_time", "q5", "q19", "q20", "q4")
"""No state, fixed windows, sliding windows, rankings, a join, timers."""

_PIECE: Final = 50_000
_RATE: Final = 10_000.0
_WARM_UP: Final = 2_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One query's result.

    Attributes:
        query: its name.
        events: number of events of the kinds that it reads.
        rows: number of rows of its answer, on both runners.
        local_events_per_second: on the local runner.
        spark_events_per_second: on Spark; ``None`` if Spark was left out.
        spark_per_local: their ratio.
    """

    query: str
    events: int
    rows: int
    local_events_per_second: float
    spark_events_per_second: float | None = None
    spark_per_local: float | None = None


def measure(query: Query, pieces: Sequence[Events], spark: SparkSession | None) -> Figure:
    """Run a query on both runners.

    Args:
        query: the query.
        pieces: the events.
        spark: the session; ``None`` leaves Spark out.

    Raises:
        RuntimeError: the answers differ, or a record became a dead letter.
    """
    with tempfile.TemporaryDirectory(prefix="millpond-nexmark-") as name:
        local, on_spark = Path(name) / "local", Path(name) / "spark"
        with mp.Store.open(local / "pond") as store:
            summary = _checked(stream_local([query], pieces, store, local))
        answer, speed, events = read_answer(query, local), _speed(summary), summary.run.injected
        figure = Figure(query=query.name, events=events, rows=answer.total(), local_events_per_second=speed)
        if spark is None:
            return figure
        summary = _checked(stream_spark([query], pieces, on_spark / "pond", on_spark, spark))
        if read_answer(query, on_spark) != answer:
            raise RuntimeError(f"{query.name}: the runners come to different answers")
        fields = asdict(figure) | {"spark_events_per_second": _speed(summary)}
        return Figure(**fields | {"spark_per_local": round(_speed(summary) / speed, 2)})


def _checked(summary: mp.RunSummary) -> mp.RunSummary:
    if summary.run.dead_letters:
        raise RuntimeError(f"{summary.run.dead_letters} records ended as dead letters")
    return summary


def _speed(summary: mp.RunSummary) -> float:
    return round(summary.run.injected / summary.elapsed_ms * 1_000)


def generator_speed(events: int) -> float:
    """Events per second of the generator, once its texts are drawn."""
    generator, clock = Generator(rate=_RATE), SystemClock()
    generator.events(1)
    started_us = clock.monotonic_us()
    made = sum(table.num_rows for piece in generator.pieces(events) for table in piece.values())
    return round(made / (clock.monotonic_us() - started_us) * 1e6)


@click.command(help=__doc__)
@click.option("--json", "path", type=click.Path(path_type=Path), default=Path("build/bench/nexmark.json"))
@click.option("--query", "names", multiple=True, type=click.Choice(list(QUERIES)), default=_CHOSEN)
@click.option("--events", type=click.IntRange(_PIECE), default=200_000, show_default=True)
@click.option("--quick", is_flag=True, help="As few events as make sense.")
@click.option("--without-spark", is_flag=True, help="Measure the local runner alone.")
@click.option("--master", default="local[2]", show_default=True, help="Where Spark runs.")
def main(
    path: Path, names: tuple[str, ...], events: int, quick: bool, without_spark: bool, master: str
) -> None:
    """Measure, write the JSON, print a table."""
    console, count = Console(), _PIECE if quick else events
    report: dict[str, Any] = {
        "cores": os.cpu_count(),
        "events": count,
        "generator_events_per_second": generator_speed(10 * _PIECE),
    }
    generator = Generator(rate=_RATE)
    pieces = list(generator.pieces(count))
    path.parent.mkdir(parents=True, exist_ok=True)
    spark = None if without_spark else quiet_spark("nexmark", master=master, log=path.parent / "spark.log")
    figures: list[Figure] = []
    try:
        # Warm up the JVM and its workers, so that no query pays for that.
        measure(QUERIES["q5"], [generator.events(_WARM_UP)], spark)
        for name in names:
            console.print(f"{name}: {QUERIES[name].title} …")
            figures.append(measure(QUERIES[name], pieces, spark))
    finally:
        if spark is not None:
            spark.stop()
    report["queries"] = [asdict(figure) for figure in figures]
    path.write_text(f"{json.dumps(report, indent=2)}\n", encoding="utf-8")
    _print(console, report, figures)
    console.print(f"Every figure is in {path}.")


def _print(console: Console, report: dict[str, Any], figures: Sequence[Figure]) -> None:
    console.print(f"The generator makes {report['generator_events_per_second']:,.0f} events a second.")
    table = Table(header_style="dim", box=None, pad_edge=False)
    table.add_column("query")
    for heading in ("events", "rows", "local (events/s)", "Spark (events/s)", "Spark / local"):
        table.add_column(heading, justify="right")
    for figure in figures:
        cells = (figure.local_events_per_second, figure.spark_events_per_second)
        speeds = ["" if cell is None else f"{cell:,.0f}" for cell in cells]
        ratio = "" if figure.spark_per_local is None else f"{figure.spark_per_local:.2f}"
        table.add_row(figure.query, f"{figure.events:,}", f"{figure.rows:,}", *speeds, ratio)
    console.print(table)


if __name__ == "__main__":
    main()
