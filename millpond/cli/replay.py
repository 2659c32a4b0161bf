"""``millpond replay``: the input of a past run once more, through the same or other code, on a fork."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Final

import click

from millpond.cli.terminal.apps import load_pipeline, wrong_usage
from millpond.cli.terminal.cli_help import TeachingCommand
from millpond.cli.terminal.inputs import input_option, read_frames, read_inputs
from millpond.cli.terminal.opening import open_to_read, store_argument, version_in
from millpond.cli.terminal.output import json_option, progress_bar, result_as_json
from millpond.executor.pipeline.pipeline import EnginePipeline
from millpond.executor.replay.replay import Replayed, replay_on_spark
from millpond.executor.replay.replay import replay as replay_rows
from millpond.statestore.store import Store

_MIB: Final = 512


@click.command(
    cls=TeachingCommand,
    examples=(
        'millpond replay pond what_if --version "before the sale" --app flights:pipeline --input flights=flights',
        "millpond diff what_if pond",
        "millpond replay pond up_to_9 --version 3 --until 9 --app flights:pipeline --input flights=flights",
        "millpond replay pond at_once --version 0 --app flights:pipeline --input flights=flights --all-at-once --json",
    ),
)
@store_argument
@click.argument("new")
@click.option(
    "--version", "version", required=True, metavar="N|NAME",
    help="The version of STORE to begin with: its number (see `millpond history`), or a savepoint.",
)  # fmt: skip
@click.option("--until", metavar="N|NAME", help="The version of STORE to go up to; the newest by default.")
@click.option(
    "--app", required=True, metavar="MODULE:PIPELINE",
    help="The code: a `Pipeline`, or a function without arguments that returns one.",
)  # fmt: skip
@input_option
@click.option(
    "--since-version", is_flag=True,
    help="The inputs hold only what STORE consumed after the version, not all from the beginning.",
)  # fmt: skip
@click.option(
    "--all-at-once", is_flag=True,
    help="Give the input to the code in one run, instead of repeating the supersteps of STORE.",
)  # fmt: skip
@click.option("--spark", is_flag=True, help="Run on Spark, on the sources of STORE; implies --all-at-once.")
@click.option(
    "--cache-mib", type=click.IntRange(min=0), default=_MIB, show_default=True, metavar="N",
    help="Memory for rows of state, of each process.",
)  # fmt: skip
@json_option("One JSON object: what was replayed.")
def replay(
    store: str,
    new: str,
    storage_options: tuple[str, ...],
    version: str,
    until: str | None,
    app: str,
    inputs: tuple[str, ...],
    inputs_of: str | None,
    *,
    as_json: bool,
    **how: Any,
) -> None:
    """Run code over the input that STORE has consumed since a version, in a store of its own at NEW.

    STORE is only read, and its sinks are left alone: those of NEW are tables in NEW/sinks, which begin with what STORE
    had delivered by that version. `millpond diff NEW STORE` says what has come out differently.

    Each --input has the rows that STORE was given, in the same order. By default each superstep of STORE is repeated,
    with the rows that it took, at its wall time and under its watermarks. So the same code comes to exactly the same;
    watermark policies of other code have no effect. STORE must still have the commits since the version.

    A replay that was killed is continued by calling it again.
    """
    with result_as_json(as_json) as result, open_to_read(store, storage_options) as opened:
        with wrong_usage():
            pipeline = load_pipeline(app)
            if how["spark"] and (until is not None or how["since_version"]):
                raise click.UsageError("--spark takes neither --until nor --since-version")
        savepoints = opened.savepoints()
        first = version_in(savepoints, version)
        last = None if until is None else version_in(savepoints, until)
        given = inputs, inputs_of
        if how["spark"]:
            done = _on_spark(opened, new, pipeline, given, first, how["cache_mib"])
        else:
            done = _here(opened, new, pipeline, given, (first, last), how)
        result |= {"store": store, "path": new, **asdict(done)}
    if not as_json:
        repeated = f"{done.supersteps:,} supersteps, " if done.supersteps else ""
        click.echo(
            f"replayed: {new} has versions {done.version} to {done.until} of {store} once more "
            f"({repeated}{done.records:,} records)"
        )


def _here(
    store: Store,
    new: str,
    pipeline: EnginePipeline,
    given: tuple[tuple[str, ...], str | None],
    versions: tuple[int, int | None],
    how: dict[str, Any],
) -> Replayed:
    with wrong_usage():
        rows = read_inputs(pipeline, *given)
    with progress_bar("repeating supersteps") as told:
        return replay_rows(
            store,
            new,
            pipeline,
            rows,
            version=versions[0],
            until=versions[1],
            recorded=not how["all_at_once"],
            since_version=how["since_version"],
            cache_mib=how["cache_mib"],
            told=told,
        )


def _on_spark(
    store: Store,
    new: str,
    pipeline: EnginePipeline,
    given: tuple[tuple[str, ...], str | None],
    version: int,
    cache_mib: int,
) -> Replayed:
    from millpond.executor.spark.session import spark_session

    session = spark_session(pipeline.name)
    with wrong_usage():
        frames = read_frames(pipeline, *given, session)
    return replay_on_spark(
        store, new, pipeline, frames, version=version, spark=session, cache_mib=cache_mib, progress=True
    )
