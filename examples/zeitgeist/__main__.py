"""
``python -m examples.zeitgeist``: run the job on a year of flights, and show what it found.

Kill it whenever you like and start it again: it goes on where it was, and the answer is the same.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

import millpond as mp
from examples.zeitgeist import oracle
from examples.zeitgeist.data import INPUT_COLUMNS, arrivals, load_flights, prepare_input
from examples.zeitgeist.job import zeitgeist
from examples.zeitgeist.memory import peak_memory_mib
from examples.zeitgeist.picture import draw
from examples.zeitgeist.questions import ask_all, late_flights
from examples.zeitgeist.report import print_alerts, print_summary
from examples.zeitgeist.results import Results, read_results
from examples.zeitgeist.summary import Summary
from millpond.executor.spark_session import spark_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_DAY = click.DateTime(["%Y-%m-%d"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Demo:
    """
    Where one run of the demo keeps its things, and how its stream is cut.
    """

    output: Path
    store: Path
    first: date | None
    last: date | None
    flights_per_file: int
    files_per_trigger: int
    master: str

    @property
    def input(self) -> Path:
        """
        The stream's files.
        """
        return self.output / "input"

    @property
    def tables(self) -> Path:
        """
        The Delta tables that the job writes.
        """
        return self.output / "tables"

    @property
    def summary(self) -> Path:
        """
        The run in numbers; it is written last, so where it is, the run has finished.
        """
        return self.output / "summary.json"

    @property
    def picture(self) -> Path:
        """
        The picture.
        """
        return self.output / "zeitgeist.png"


@click.command(help=__doc__)
@click.option("--output", type=click.Path(path_type=Path), default=Path("build/demo"), show_default=True)
@click.option("--store", type=click.Path(path_type=Path), help="The store; OUTPUT/pond unless given.")
@click.option("--fresh", is_flag=True, help="Forget what an earlier run has done.")
@click.option("--first", type=_DAY, help="First day of flights; all of 2013 unless given.")
@click.option("--last", type=_DAY, help="Last day of flights.")
@click.option("--flights-per-file", type=click.IntRange(1), default=5_000, show_default=True)
@click.option("--files-per-trigger", type=click.IntRange(1), default=1, show_default=True)
@click.option("--master", default="local[2]", show_default=True, help="Where Spark runs.")
def main(
    output: Path,
    store: Path | None,
    fresh: bool,
    first: datetime | None,
    last: datetime | None,
    flights_per_file: int,
    files_per_trigger: int,
    master: str,
) -> None:
    """
    Run the demo, or show its answer once more when it has finished before.
    """
    demo = Demo(
        output=output,
        store=store or output / "pond",
        first=first.date() if first else None,
        last=last.date() if last else None,
        flights_per_file=flights_per_file,
        files_per_trigger=files_per_trigger,
        master=master,
    )
    console = Console()
    if fresh:
        _forget(demo)
    _prepare(demo, console)
    if demo.summary.exists():
        console.print("This run has finished before; here is its answer once more (--fresh starts anew).\n")
        summary = Summary.read(demo.summary)
        results = read_results(demo.tables)
    else:
        run, memory_mib = _run(demo, console)
        results = read_results(demo.tables)
        late = _compare(demo, console, results)
        summary = Summary.of(run, memory_mib, late=late, alerts=len(results.final_alerts))
    _show(demo, console, summary, results)
    summary.write(demo.summary)


def _forget(demo: Demo) -> None:
    if demo.store.exists() and not (demo.store / "rows").is_dir():
        raise click.BadParameter(f"{demo.store} is no store, so it is not removed", param_hint="--store")
    for path in (demo.store, demo.output / "input.unfinished", demo.input, demo.tables):
        shutil.rmtree(path, ignore_errors=True)
    for path in (demo.summary, demo.picture):
        path.unlink(missing_ok=True)


def _prepare(demo: Demo, console: Console) -> None:
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("Writing the stream's files", total=None)
        prepare_input(
            demo.input,
            flights_per_file=demo.flights_per_file,
            first=demo.first,
            last=demo.last,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )


def _run(demo: Demo, console: Console) -> tuple[mp.RunSummary, dict[str, int]]:
    resumed = (demo.store / "rows").is_dir()
    console.print("Going on with the run that is in the store." if resumed else "Starting a run.")
    console.print("Kill it whenever you like and start it again: the answer will be the same.\n")
    with console.status("Starting Spark"), _stderr_into(demo.output / "spark.log"):
        spark = _spark(demo.master)
    try:
        flights = spark.readStream.schema(INPUT_COLUMNS).option("maxFilesPerTrigger", demo.files_per_trigger)
        stream = flights.parquet(str(demo.input))
        run = mp.SparkRunner(demo.store, spark=spark).run(zeitgeist(demo.tables), {"flights": stream})
        return run, peak_memory_mib()
    finally:
        spark.stop()


def _spark(master: str) -> SparkSession:
    options = {"spark.ui.enabled": "false", "spark.log.level": "ERROR"}
    return spark_session("zeitgeist", master=master, options=options)


@contextmanager
def _stderr_into(path: Path) -> Iterator[None]:
    """
    Let what is started meanwhile write its errors into a file: Spark has much to say, and little to us.
    """
    sys.stderr.flush()
    ours = os.dup(2)
    try:
        with path.open("ab") as log:
            os.dup2(log.fileno(), 2)
        yield
    finally:
        os.dup2(ours, 2)
        os.close(ours)


def _show(demo: Demo, console: Console, summary: Summary, results: Results) -> None:
    print_alerts(console, results)
    with mp.Store.open(demo.store, read_only=True) as store:
        ask_all(console, store)
    draw(results, demo.picture)
    print_summary(console, summary)
    console.print(f"\nThe picture is {demo.picture}, the store {demo.store}, the numbers {demo.summary}.")


def _compare(demo: Demo, console: Console, results: Results) -> int:
    """
    Hold the results against a plain computation of the same, and return the number of late flights.
    """
    with mp.Store.open(demo.store, read_only=True) as store:
        late = late_flights(store)
    answer = oracle.compute(arrivals(load_flights(), demo.first, demo.last))
    wrong = oracle.differences(answer, results.answer(late))
    if wrong:
        console.print(f"[red]{len(wrong)} differences from a plain computation over all flights:[/red]")
        console.print("\n".join(wrong[:20]))
        sys.exit(1)
    console.print("A plain computation over all flights comes to the same answer.\n")
    return late


if __name__ == "__main__":
    main()
