"""``millpond savepoint``, ``fork`` and ``replay``: versions of a store that stay readable or begin another store."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

from millpond.cli.completion import complete_savepoint
from millpond.cli.terminal.cli_help import command
from millpond.cli.terminal.inputs import (
    Given,
    input_options,
    load_pipeline,
    read_frames,
    read_inputs,
    wrong_usage,
)
from millpond.cli.terminal.opening import (
    StoreAt,
    store_argument,
    version_in,
    version_option,
    zookeeper_options,
)
from millpond.cli.terminal.options import cache_option, flag, json_option, number, option
from millpond.cli.terminal.output import print_json, print_rows, progress_bar, result_as_json, say, size_text
from millpond.executor.replay.fork import fork_store
from millpond.executor.replay.replay import replay as replay_rows
from millpond.statestore.errors import InvalidError


@command(
    'millpond savepoint pond "before the upgrade"',
    "millpond savepoint pond spring --version 12",
    "millpond savepoint pond",
    'millpond sql pond "select count(*) from window_counter" --version "before the upgrade"',
    'millpond savepoint pond "before the upgrade" --drop',
)
@store_argument
@click.argument("name", required=False, shell_complete=complete_savepoint)
@number("--version", "The version to keep; by default the newest.", least=0)
@flag("--drop", "Drop the savepoint: its version may be collected from now on.")
@zookeeper_options
@json_option("One JSON object per savepoint, one per line.")
def savepoint(store: StoreAt, name: str | None, version: int | None, *, drop: bool, as_json: bool) -> None:
    """Keep a version of STORE readable under NAME, or list the savepoints of STORE.

    A version is a consistent picture of the whole pipeline, and can be read for as long as the retention lasts. The
    version of a savepoint can be read until the savepoint is dropped. It costs the files that have been replaced since,
    and nothing of the versions between it and now. The pipeline may run meanwhile.

    The other commands take NAME where they take a --version.
    """
    if name is None:
        if drop or version is not None:
            raise InvalidError("which savepoint? give its NAME")
        with store.to_read() as opened:
            known = [asdict(one) for one in opened.savepoints()]
        print_rows(known, ("savepoint", "version"), [(*one.values(),) for one in known], as_json=as_json)
        return
    if drop and version is not None:
        raise InvalidError("a savepoint is dropped by its name alone, without --version")
    with store.to_write() as opened:
        if drop:
            opened.drop_savepoint(name)
            message, done = f"dropped: {name}", {"name": name, "dropped": True}
        else:
            made = opened.savepoint(name, version)
            message, done = f"version {made.version} is kept as {made.name}", asdict(made)
    if as_json:
        print_json([done])
    else:
        say(message)


@command(
    "millpond fork pond what_if",
    "millpond fork pond as_of_12 --version 12",
    'millpond fork pond without_the_sale --version "before the sale" --json | jq .version',
)
@store_argument
@click.argument("new")
@version_option
@json_option("One JSON object: what was forked.")
def fork(store: StoreAt, new: str, version: str | None, *, as_json: bool) -> None:
    """Make a store at NEW that begins with a version of STORE: rows, timers, record ids and input positions.

    The pipeline of STORE may run meanwhile. NEW is a separate store, with its own leases. Its versions count
    on from the versions of STORE. On the same disk no row is copied: files have two names then, and each store deletes its own.
    Checkpoints of Spark's queries that lie in the folder of STORE are copied and rewound to that version.

    Start a pipeline on NEW, with the same code or other code. Each of its sinks is a table in NEW/sinks, whatever the
    code names, and begins with the output that STORE had delivered to it by that version. To let NEW write to a sink of
    STORE, run `millpond take-over NEW TABLE`.
    """
    with (
        result_as_json(as_json) as result,
        store.to_read() as opened,
        progress_bar("forking row files") as on_progress,
    ):
        at = None if version is None else version_in(opened.savepoints(), version)
        made = fork_store(opened, new, at, told=on_progress)
        result |= {"store": store.path, "path": new, **asdict(made)}
    if as_json:
        return
    copied = f", {made.copied} of them copied" if made.copied else ""
    say(
        f"forked: {new} begins with version {made.version} of {store.path} "
        f"({made.files} files, {size_text(made.size_bytes)}{copied})"
    )


@command(
    'millpond replay pond what_if --version "before the sale" --app flights:pipeline --input flights=flights',
    "millpond diff what_if pond",
    "millpond replay pond up_to_9 --version 3 --until 9 --app flights:pipeline --input flights=flights",
    "millpond replay pond at_once --version 0 --app flights:pipeline --input flights=flights --all-at-once --json",
)
@store_argument
@click.argument("new")
@option(
    "--version=N|NAME",
    "The version of STORE to begin with: its number (see `millpond history`), or a savepoint.",
    required=True,
)
@option("--until=N|NAME", "The version of STORE to go up to; the newest by default.")
@option(
    "--app=MODULE:PIPELINE",
    "The code: a `Pipeline`, or a function without arguments that returns one.",
    required=True,
)
@input_options
@flag(
    "--since-version",
    "The inputs hold only what STORE consumed after the version, not all from the beginning.",
)
@flag("--all-at-once", "Give the input to the code in one run, instead of repeating the supersteps of STORE.")
@flag("--spark", "Run on Spark, on the sources of STORE; implies --all-at-once.")
@cache_option
@json_option("One JSON object: what was replayed.")
def replay(
    store: StoreAt,
    new: str,
    version: str,
    until: str | None,
    app: str,
    given: Given,
    *,
    as_json: bool,
    **how: Any,
) -> None:
    """Run code over the input that STORE has consumed since a version, in a separate store at NEW.

    STORE is only read, and its sinks are left alone: the sinks of NEW are tables in NEW/sinks, which begin with the
    output that STORE had delivered by that version. `millpond diff NEW STORE` shows how the results differ.

    Each --input has the rows that STORE was given, in the same order. By default each superstep of STORE is repeated,
    with the rows that it took, at its wall time and under its watermarks. So the same code comes to exactly the same
    result; watermark policies of other code have no effect. STORE must still have the commits since the version.

    A replay that was killed is continued by calling it again.
    """
    with result_as_json(as_json) as result, store.to_read() as opened:
        with wrong_usage():
            pipeline = load_pipeline(app)
            if how["spark"] and (until is not None or how["since_version"]):
                raise click.UsageError("--spark takes neither --until nor --since-version")
        savepoints = opened.savepoints()
        first = version_in(savepoints, version)
        last = None if until is None else version_in(savepoints, until)
        options: dict[str, Any] = {
            "store": opened,
            "path": new,
            "version": first,
            "cache_mib": how["cache_mib"],
        }
        if how["spark"]:
            from millpond.executor.replay.replay import replay_on_spark
            from millpond.executor.spark.session import spark_session

            session = spark_session(pipeline.name, store=store.path, storage_options=opened.storage_options)
            with wrong_usage():
                options["inputs"] = read_frames(pipeline, given, session)
            done = replay_on_spark(pipeline=pipeline, spark=session, progress=True, **options)
        else:
            with wrong_usage():
                options["inputs"] = read_inputs(pipeline, given)
            options |= {"until": last, "recorded": not how["all_at_once"]}
            with progress_bar("repeating supersteps") as on_progress:
                done = replay_rows(
                    pipeline=pipeline, told=on_progress, since_version=how["since_version"], **options
                )
        result |= {"store": store.path, "path": new, **asdict(done)}
    if not as_json:
        repeated = f"{done.supersteps:,} supersteps, " if done.supersteps else ""
        say(
            f"replayed: {new} has versions {done.version} to {done.until} of {store.path} once more "
            f"({repeated}{done.records:,} records)"
        )
