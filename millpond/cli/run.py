"""``millpond run``: run a pipeline of your code on files, to their present end."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any, Final, get_args

import click

from millpond.cli.completion import complete_store
from millpond.cli.terminal.cli_help import command
from millpond.cli.terminal.inputs import (
    Given,
    input_options,
    load_pipeline,
    read_frames,
    read_inputs,
    workers_import_from_here,
    wrong_usage,
)
from millpond.cli.terminal.opening import read_options, storage_option, zookeeper_options
from millpond.cli.terminal.options import cache_option, flag, json_option, number, option
from millpond.cli.terminal.output import (
    is_terminal,
    note,
    print_table,
    result_as_json,
    rows_bar,
    say,
    time_text,
)
from millpond.cli.terminal.row_files import RowFiles
from millpond.executor.inputs.extraction import rows_from
from millpond.executor.local.rows import RowSource, source_of
from millpond.executor.local.runner import LocalRunner
from millpond.executor.pipeline.pipeline import EnginePipeline
from millpond.executor.run.run import RunSummary
from millpond.executor.spark.worker_process import use_frugal_allocator
from millpond.statestore.durations import duration_ms
from millpond.statestore.errors import InvalidError
from millpond.statestore.leases.lease import OnHeld
from millpond.statestore.system import SystemClock
from millpond.statestore.types import DURABILITIES

_COUNTS: Final = (
    "injected",
    "records",
    "late",
    "dropped",
    "duplicates",
    "timers",
    "productions",
    "dead_letters",
    "retried",
)


@command(
    "millpond run flights:pipeline --store pond --input flights=flights --more-to-come",
    "millpond run flights:pipeline --store pond --input flights=flights",
    "millpond run flights:pipeline --store other_pond --inputs flights:inputs --json | jq .run",
    "millpond run flights:pipeline --store big_pond --input flights=flights --spark",
    exit_codes={
        3: "done, but with --strict: records became dead letters, came too late, or have times in 1970"
    },
)
@click.argument("pipeline", metavar="MODULE:PIPELINE")
@option(
    "--store=STORE",
    "Folder or URL of the store, made if it is not there.",
    required=True,
    shell_complete=complete_store,
)
@input_options
@flag(
    "--more-to-come",
    "Later runs bring more: leave windows open and timers waiting where the watermark has not passed them.",
)
@option(
    "--settle=DURATION",
    "Leave the first file that was changed less than so long ago, and all files behind it, for a later run.",
    default=None,
)
@flag("--spark", "Run on Spark, in the session that its configuration describes.")
@number(
    "--intervals",
    "Key intervals of a computation at its first input; by default 1, on Spark its parallelism.",
)
@cache_option
@option(
    "--durability",
    "What commits to a local folder survive: the end of the process, or with disk a power cut too.",
    choices=DURABILITIES,
)
@option(
    "--on-held",
    "What to do if another process runs the pipeline on this store.",
    choices=get_args(OnHeld),
    default="take",
)
@flag("--accept-ended", "Take records of an input that has ended, as late ones.")
@flag("--strict", "Exit with 3 if records became dead letters, came too late, or have times in 1970.")
@zookeeper_options
@storage_option
@flag("--quiet", "Show no progress.")
@json_option("One JSON object: the run's summary.")
def run(
    pipeline: str,
    store: str,
    given: Given,
    storage_options: tuple[str, ...],
    *,
    more_to_come: bool,
    settle: str | None,
    spark: bool,
    strict: bool,
    quiet: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Run a pipeline of your code on files, until their present rows are processed.

    MODULE:PIPELINE is a `Pipeline`, or a function without arguments that returns one; modules of the current folder
    are found. Each --input is a file or a folder of files in Parquet, JSON (an object per line) or CSV, by their
    names. Files of a folder are read in the order of their names. Of files larger than memory only a piece is read at
    a time, twice: for the times of the rows to come, and to process them.

    A run is its input's last unless you give --more-to-come: all windows close, all timers in event time fire, and a
    later run with more is refused. For a folder that grows, give --more-to-come each time: rows that the store has
    consumed are skipped, and new files must come behind the others by name. With --settle 10m a file may come ten
    minutes late, or be written for so long. A run that was killed is continued by running it again.

    On Spark the same files are streams, whose checkpoints lie in the store's folder.
    """
    options |= {"storage_options": read_options(storage_options), "progress": not quiet}
    # From here on, because output of the user's code must not mix with the result.
    with result_as_json(as_json) as result:
        with wrong_usage():
            loaded = load_pipeline(pipeline)
            if settle is not None:
                until_us = _settled_until(settle, more_to_come=more_to_come, spark=spark)
                given = replace(given, settled_until_us=until_us)
        execute = _run_on_spark if spark else _run_here
        summary = execute(loaded, given, store, finish=not more_to_come, **options)
        result |= {"pipeline": loaded.name, "store": store, **asdict(summary)}
        result |= {"watermark": time_text(summary.watermark), "problems": summary.problems}
    if not as_json:
        _print(loaded.name, summary)
    for problem in summary.problems:
        note(f"of the records of this run, {problem}")
    if strict and summary.problems:
        raise SystemExit(3)


def _settled_until(settle: str, *, more_to_come: bool, spark: bool) -> int:
    if spark:
        raise InvalidError("--settle is for the local runner: Spark takes files in the order of their times")
    if not more_to_come:
        raise InvalidError("--settle needs --more-to-come: the files that it leaves are for a later run")
    return SystemClock().now_us() - int(duration_ms("--settle", settle) * 1_000)


def _run_here(
    pipeline: EnginePipeline, inputs: Given, store: str, *, finish: bool, **options: Any
) -> RunSummary:
    with wrong_usage():
        given = read_inputs(pipeline, inputs)
    for stream, rows in given.items():
        if isinstance(rows, RowFiles) and rows.waiting:
            note(
                f"of {stream}: {rows.waiting:,} files wait for a later run, from the first that has not settled"
            )
    use_frugal_allocator()
    has_bar = options["progress"] and is_terminal()
    options |= {"intervals": options["intervals"] or 1, "progress": options["progress"] and not has_bar}
    runner = LocalRunner(store, **options)
    if not has_bar:
        return runner.run(pipeline, given, finish=finish)
    with rows_bar() as shown:
        sources = {
            stream: shown(stream, rows if isinstance(rows, RowSource) else source_of(rows_from(rows)))
            for stream, rows in given.items()
        }
        return runner.run(pipeline, sources, finish=finish)


def _run_on_spark(
    pipeline: EnginePipeline, inputs: Given, store: str, *, finish: bool, **options: Any
) -> RunSummary:
    from millpond.executor.spark.runner import SparkRunner
    from millpond.executor.spark.session import spark_session

    workers_import_from_here()
    session = spark_session(pipeline.name, store=store, storage_options=options["storage_options"])
    with wrong_usage():
        given = read_frames(pipeline, inputs, session)
    return SparkRunner(store, spark=session, **options).run(pipeline, given, finish=finish)


def _print(pipeline: str, summary: RunSummary) -> None:
    say(
        f"{pipeline}: superstep {summary.superstep:,}, {summary.supersteps:,} of them in this run, "
        f"{summary.elapsed_ms / 1_000:,.1f} s"
    )
    say(f"watermark {time_text(summary.watermark)}")
    if summary.ended:
        say(f"ended     {', '.join(summary.ended)}")
    rows = [
        (name.replace("_", " "), getattr(summary.run, name), getattr(summary.totals, name))
        for name in _COUNTS
        if name != "retried" or summary.totals.retried
    ]
    print_table("", ("", "this run", "ever"), rows)
    for stream, reason in sorted(summary.skipped.items()):
        note(f"of {stream}: {reason}")
