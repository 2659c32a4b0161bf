"""``python -m examples.nexmark``: questions to an auction site, asked of a stream, and their answers."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

import millpond as mp
from examples.nexmark.answers import Bag, differences, expected_answers, read_answer
from examples.nexmark.events import DATA, Events, load_events
from examples.nexmark.generator import BLOCK, Generator
from examples.nexmark.job import run_local, run_spark, stream_local, stream_spark
from examples.nexmark.queries import QUERIES
from examples.nexmark.query import Query
from examples.nexmark.report import print_answer, print_queries, print_summary, print_verdicts
from examples.quiet_spark import quiet_spark

_HELP = """
Ask Nexmark's questions of people, auctions and bids.

Without a query: the list of them. The example has 2,000 events, and each answer on them is held against DuckDB's, from
SQL that shares nothing with the pipelines; --check takes other events with expected answers.

\b
  python -m examples.nexmark --query q5                      the hottest auctions of each ten seconds
  python -m examples.nexmark --query q5 --runner spark       the same on Spark
  python -m examples.nexmark --all                           all queries at once, in one pipeline
  python -m examples.nexmark --query q8 --generate 200000    on 200,000 events out of the generator
  python -m examples.nexmark --query q11 --generate 200000 --rate 1000
                                                             on as many that are further apart in time

Each answer is a Delta table, OUTPUT/<query>, and what was remembered on the way is OUTPUT/pond:
millpond status OUTPUT/pond.
"""


@click.command(help=_HELP)
@click.option("--query", "names", multiple=True, metavar="NAME", help="Which query; may be given again.")
@click.option("--all", "everything", is_flag=True, help="All queries, in one pipeline.")
@click.option("--runner", type=click.Choice(["local", "spark"]), default="local", show_default=True)
@click.option(
    "--check",
    type=click.Path(path_type=Path, file_okay=False),
    default=DATA,
    metavar="DIR",
    help="Take events and expected answers from here: person, auction and bid as .parquet or .jsonl, and "
    "answers.json.gz or expected.json.",
)
@click.option("--generate", type=click.IntRange(1), metavar="N", help="Take N events from the generator.")
@click.option(
    "--rate",
    type=click.FloatRange(0, min_open=True),
    default=10_000,
    show_default=True,
    help="Generated events a second of event time.",
)
@click.option("--seed", type=click.IntRange(0), default=1, show_default=True, help="Which generated events.")
@click.option("--output", type=click.Path(path_type=Path), default=Path("build/nexmark"), show_default=True)
@click.option("--rows", type=click.IntRange(0), default=20, show_default=True, help="Rows to show.")
@click.option("--master", default="local[2]", show_default=True, help="Where Spark runs.")
def main(
    names: tuple[str, ...],
    everything: bool,
    runner: str,
    check: Path,
    generate: int | None,
    rate: float,
    seed: int,
    output: Path,
    rows: int,
    master: str,
) -> None:
    """Run queries, print their answers, and compare these with the expected ones."""
    console = Console()
    queries = list(QUERIES.values()) if everything else [_query(name) for name in names]
    if not queries:
        print_queries(console, QUERIES.values())
        return
    output.mkdir(parents=True, exist_ok=True)
    _forget(queries, output)
    if generate is None:
        summary = _run(console, runner, queries, _events(check), output, master)
    else:
        pieces = _generated(console, Generator(seed=seed, rate=rate), generate)
        summary = _stream(console, runner, queries, pieces, output, master)
    answers = {query.name: read_answer(query, output) for query in queries}
    for query in () if everything else queries:
        print_answer(console, query, answers[query.name], rows)
    print_summary(console, summary, output)
    if generate is None and not _is_as_expected(console, queries, answers, check):
        sys.exit(1)


def _query(name: str) -> Query:
    if name not in QUERIES:
        raise click.BadParameter(f"there is no {name}; there are {', '.join(QUERIES)}", param_hint="--query")
    return QUERIES[name]


def _events(folder: Path) -> Events:
    try:
        return load_events(folder)
    except FileNotFoundError as error:
        raise click.BadParameter(f"{error}; or say --generate N", param_hint="--check") from error


def _forget(queries: Sequence[Query], output: Path) -> None:
    """Remove what an earlier run has left of the same things, and nothing else."""
    for name in ("pond", "pond-input", *(query.name for query in queries)):
        shutil.rmtree(output / name, ignore_errors=True)


def _run(
    console: Console, runner: str, queries: Sequence[Query], events: Events, output: Path, master: str
) -> mp.RunSummary:
    store = output / "pond"
    if runner == "local":
        with console.status(f"Asking {_names(queries)}"):
            return run_local(queries, events, store, output)
    with console.status("Starting Spark"):
        spark = quiet_spark("nexmark", master=master, log=output / "spark.log")
    try:
        with console.status(f"Asking {_names(queries)}"):
            return run_spark(queries, events, store, output, spark)
    finally:
        spark.stop()


def _stream(
    console: Console,
    runner: str,
    queries: Sequence[Query],
    pieces: Iterator[Events],
    output: Path,
    master: str,
) -> mp.RunSummary:
    store = output / "pond"
    if runner == "local":
        return stream_local(queries, pieces, store, output)
    with console.status("Starting Spark"):
        spark = quiet_spark("nexmark", master=master, log=output / "spark.log")
    try:
        return stream_spark(queries, pieces, store, output, spark)
    finally:
        spark.stop()


def _names(queries: Sequence[Query]) -> str:
    return f"{len(queries)} queries" if len(queries) > 3 else ", ".join(query.name for query in queries)


def _generated(console: Console, generator: Generator, count: int) -> Iterator[Events]:
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("Events", total=count)
        for piece in generator.pieces(count):
            yield piece
            bar.advance(task, min(BLOCK, count))


def _is_as_expected(
    console: Console, queries: Sequence[Query], answers: dict[str, Bag], folder: Path
) -> bool:
    expected = expected_answers(folder)
    wrong = {
        query.name: differences(answers[query.name], expected[query.name])
        for query in queries
        if query.name in expected
    }
    print_verdicts(console, queries, answers, wrong)
    return not any(wrong.values())


if __name__ == "__main__":
    main()
