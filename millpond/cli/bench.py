"""``millpond bench``: measure a small load on this machine."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path

import click

from millpond.cli.terminal.cli_help import TeachingCommand
from millpond.cli.terminal.measuring import (
    Commits,
    Latency,
    Machine,
    Throughput,
    measure_commits,
    measure_latency,
    measure_throughput,
)
from millpond.cli.terminal.output import json_option, number_text, print_table, progress_bar, result_as_json
from millpond.statestore.store import Store
from millpond.statestore.system import SystemClock
from millpond.statestore.types import DURABILITIES, Durability


@click.command(
    cls=TeachingCommand,
    examples=(
        "millpond bench --seconds 1 --records 20000 --commits 20",
        "millpond bench --seconds 1 --records 20000 --commits 20 --durability disk --folder . --json | jq .commits",
    ),
)
@click.option(
    "--folder", type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Where the temporary store lies, on the disk that is to be measured; by default the system's temporary folder.",
)  # fmt: skip
@click.option(
    "--records", type=click.IntRange(min=1), default=200_000, show_default=True, metavar="N",
    help="How many records the rate is measured with.",
)  # fmt: skip
@click.option(
    "--keys", type=click.IntRange(min=1), default=10_000, show_default=True, metavar="N",
    help="How many keys they have.",
)  # fmt: skip
@click.option(
    "--seconds", type=click.FloatRange(min=0.1), default=5.0, show_default=True, metavar="N",
    help="For how long the latency is measured.",
)  # fmt: skip
@click.option(
    "--rate", type=click.IntRange(min=1), default=1_000, show_default=True, metavar="N",
    help="How many records in a second it is measured with.",
)  # fmt: skip
@click.option(
    "--commits", type=click.IntRange(min=1), default=200, show_default=True, metavar="N",
    help="How many commits are measured.",
)  # fmt: skip
@click.option(
    "--durability", type=click.Choice(DURABILITIES), default="os_cache", show_default=True,
    help="What commits survive: the end of the process, or with disk a power cut too.",
)  # fmt: skip
@json_option("One JSON object with everything.")
def bench(
    folder: Path | None,
    records: int,
    keys: int,
    seconds: float,
    rate: int,
    commits: int,
    durability: Durability,
    *,
    as_json: bool,
) -> None:
    """Measure a small load on this machine, with the local runner, in a temporary store that is deleted afterwards.

    Three figures: how many records a second are counted by key from a bounded input; how long a record takes from
    its injection to the second of two computations, after the commit in which the first one produced it; and how long
    a commit takes. Each is measured alone, after a warm-up. What else runs on the machine counts.

    The figures are those of this machine and its disk now. They do not measure Spark, and compare no engines: the
    benchmarks in the repository do.
    """
    clock = SystemClock()
    with ExitStack() as resources:
        result = resources.enter_context(result_as_json(as_json))
        place = resources.enter_context(tempfile.TemporaryDirectory(prefix="millpond-bench-", dir=folder))
        with progress_bar("opening a store"):
            store = resources.enter_context(Store.open(Path(place) / "pond", durability=durability))
        with progress_bar("records per second"):
            throughput = measure_throughput(store, clock, records=records, keys=keys)
        with progress_bar("latency") as told:
            latency = measure_latency(store, clock, seconds=seconds, rate=rate, told=told)
        with progress_bar("commits") as told:
            made = measure_commits(store, clock, commits=commits, keys=keys, told=told)
        machine = Machine.of_this_process()
        result |= {
            "machine": asdict(machine),
            "durability": durability,
            "throughput": asdict(throughput),
            "latency": asdict(latency),
            "commits": asdict(made),
        }
        if not as_json:
            resources.callback(partial(_print, machine, durability, throughput, latency, made))


def _print(
    machine: Machine, durability: Durability, throughput: Throughput, latency: Latency, made: Commits
) -> None:
    click.echo(
        f"{machine.processors} processors, {machine.system}, Python {machine.python}; durability {durability}"
    )
    rows = [
        (
            "records per second",
            number_text(round(throughput.records_per_second)),
            f"{throughput.records:,} of {throughput.keys:,} keys",
        ),
        ("latency, p50", f"{latency.p50_ms} ms", f"{latency.records:,} records at {latency.rate:,} a second"),
        ("latency, p95", f"{latency.p95_ms} ms", ""),
        ("latency, p99", f"{latency.p99_ms} ms", ""),
        ("commit, p50", f"{made.commit_p50_ms} ms", f"{made.commits:,} commits of {made.records:,} records"),
        ("commit, p99", f"{made.commit_p99_ms} ms", ""),
        ("superstep, p50", f"{made.superstep_p50_ms} ms", "the same, with the work and the commit"),
    ]
    print_table("", ("figure", "here", "measured with"), rows)
