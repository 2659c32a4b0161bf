"""One run of the demo: prepare the stream, run the job on Spark, check the answer, show it, and ask what if."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

import millpond as mp
from examples.quiet_spark import quiet_spark
from examples.zeitgeist import oracle
from examples.zeitgeist.data import INPUT_COLUMNS, arrivals, load_flights, prepare_input
from examples.zeitgeist.memory import peak_memory_mib
from examples.zeitgeist.questions import ask_all, late_flights
from examples.zeitgeist.report import print_alerts, print_summary, print_what_if
from examples.zeitgeist.results import Results, read_results
from examples.zeitgeist.summary import Summary
from examples.zeitgeist.what_if import WhatIf, replay_what_if

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_FILES_PER_TRIGGER = 4
"""Of the replay, which nobody watches, so fewer supersteps are enough."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demo:
    """The folders of one run of the demo, and the cut of its stream.

    Attributes:
        first: first day of flights, ``None`` for all of the year.
        flights_per_file: the number of flights in a file of the stream.
        files_per_trigger: the number of files that Spark reads at a time.
        master: the Spark master.
        pipeline: makes the job, given the folder for its tables.
    """

    output: Path
    store: Path
    first: date | None
    last: date | None
    flights_per_file: int
    files_per_trigger: int
    master: str
    pipeline: Callable[[Path], mp.Pipeline]

    @property
    def input(self) -> Path:
        """The stream's files."""
        return self.output / "input"

    @property
    def tables(self) -> Path:
        """The Delta tables that the job writes."""
        return self.output / "tables"

    @property
    def summary(self) -> Path:
        """The run in numbers; it is written after its answer, so where it is, the run has finished."""
        return self.output / "summary.json"

    @property
    def picture(self) -> Path:
        """The picture."""
        return self.output / "zeitgeist.png"

    @property
    def what_if(self) -> Path:
        """The store of the replay, with its tables."""
        return self.output / "what_if"

    @property
    def what_if_numbers(self) -> Path:
        """What the replay has come to; where it is, the replay has finished."""
        return self.output / "what_if.json"

    @property
    def what_if_picture(self) -> Path:
        """The picture of both alarms."""
        return self.output / "what_if.png"


def forget(demo: Demo) -> None:
    """Remove the files of an earlier run, the store included.

    Raises:
        SystemExit: there is something else at the store's path.
    """
    if demo.store.exists() and not (demo.store / "rows").is_dir():
        raise SystemExit(f"{demo.store} is no store, so it is not removed")
    # Remove the marks of completion first: after a kill in between, none may claim files that are gone.
    for path in (demo.summary, demo.what_if_numbers, demo.picture, demo.what_if_picture):
        path.unlink(missing_ok=True)
    unfinished = (demo.output / "input.unfinished", demo.output / ".what_if.forking")
    for path in (demo.what_if, demo.store, *unfinished, demo.input, demo.tables):
        shutil.rmtree(path, ignore_errors=True)


def run(demo: Demo, console: Console) -> None:
    """Run the demo, resuming a killed run; print the answer again if it had finished.

    Raises:
        SystemExit: the answer differs from a plain computation's.
    """
    _prepare(demo, console)
    with _sessions(demo, console) as session:
        if demo.summary.exists():
            console.print("This run has already finished; here is its answer again (--fresh starts over).\n")
            summary = Summary.read(demo.summary)
            results = read_results(demo.tables)
        else:
            counts, memory_mib = _run_on_spark(demo, console, session())
            results = read_results(demo.tables)
            late = _compare(demo, console, results)
            summary = Summary.of(counts, results, late=late, memory_mib=memory_mib)
        _show(demo, console, summary, results)
        summary.write(demo.summary)
        if not demo.what_if_numbers.exists():
            _replay(demo, console, session())
    _show_what_if(demo, console, results)
    console.print(f"\nThe pictures are {demo.picture} and {demo.what_if_picture}.")
    console.print(f"The stores are {demo.store} and {demo.what_if}, the numbers {demo.summary}.")


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


@contextmanager
def _sessions(demo: Demo, console: Console) -> Iterator[Callable[[], SparkSession]]:
    """What starts Spark when it is first needed; it is stopped in the end."""

    @cache
    def session() -> SparkSession:
        with console.status("Starting Spark"):
            return quiet_spark("zeitgeist", master=demo.master, log=demo.output / "spark.log")

    try:
        yield session
    finally:
        if session.cache_info().currsize:
            session().stop()


def _run_on_spark(demo: Demo, console: Console, spark: SparkSession) -> tuple[mp.RunSummary, dict[str, int]]:
    resumed = (demo.store / "rows").is_dir()
    console.print("Going on with the run that is in the store." if resumed else "Starting a run.")
    console.print("Kill it whenever you like and start it again: the answer will be the same.\n")
    runner = mp.SparkRunner(demo.store, spark=spark, progress=_shows_progress())
    run = runner.run(demo.pipeline(demo.tables), {"flights": _flights(demo, spark, demo.files_per_trigger)})
    return run, peak_memory_mib()


def _shows_progress() -> bool:
    """Return False where the run would write a line of JSON a superstep, which nobody reads here."""
    return sys.stderr.isatty()


def _flights(demo: Demo, spark: SparkSession, files_per_trigger: int) -> DataFrame:
    stream = spark.readStream.schema(INPUT_COLUMNS).option("maxFilesPerTrigger", files_per_trigger)
    return stream.parquet(str(demo.input))


def _show(demo: Demo, console: Console, summary: Summary, results: Results) -> None:
    # Imported here, because it is slow and a resumed run draws only once.
    from examples.zeitgeist.picture import draw

    print_alerts(console, results)
    with mp.Store.open(demo.store, read_only=True) as store:
        ask_all(console, store)
    draw(results, demo.picture)
    print_summary(console, summary)


def _replay(demo: Demo, console: Console, spark: SparkSession) -> None:
    console.print("\nReplaying the flights with another alarm. This too goes on where it was killed.")
    what_if = replay_what_if(
        demo.store,
        demo.what_if,
        demo.tables,
        (demo.first, demo.last),
        _flights(demo, spark, _FILES_PER_TRIGGER),
        spark,
        progress=_shows_progress(),
    )
    what_if.write(demo.what_if_numbers)


def _show_what_if(demo: Demo, console: Console, results: Results) -> None:
    from examples.zeitgeist.picture import draw_what_if

    sensitive = read_results(demo.what_if / "sinks")
    print_what_if(console, WhatIf.read(demo.what_if_numbers), results, sensitive)
    draw_what_if(results, sensitive, demo.what_if_picture)


def _compare(demo: Demo, console: Console, results: Results) -> int:
    """Hold the results against a plain computation of the same, and return the number of late flights."""
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
